"""Routes about one producer in one partition: its last sequence, and the start of its next epoch.

The partition's leader answers; any other shard forwards the request. Names of producers, and their next
epochs, are not known here (`laminar.node.api.transactions.producers`): a request has a producer id and an
epoch.
"""

from __future__ import annotations

import re

from laminar.batch import NO_PRODUCER
from laminar.http.api.documents import records as documents
from laminar.http.api.parameters import MAX_EPOCH, MAX_NUMBER, MAX_WAIT_MS
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Request, Response
from laminar.node.access.principals import owner_of
from laminar.node.api.common.answer_head import AnswerHead
from laminar.node.api.common.query import integer
from laminar.node.api.common.services import ShardServices
from laminar.node.api.records.fetch import FetchRoutes
from laminar.node.api.records.new_ids import NewIds
from laminar.node.partition.partition import Partition
from laminar.node.partition.producer_progress import fence, read
from laminar.node.partition.state.producers import Progress

_ID = re.compile(r"[0-9a-f]{32}\Z", re.ASCII)


class ProducerProgressRoutes:
    """The handlers that describe and fence a producer."""

    def __init__(self, services: ShardServices, fetch: FetchRoutes, new_ids: NewIds) -> None:
        """Create the handlers; `new_ids` counts producers that are new to a partition when fenced."""
        self._fetch = fetch
        self._new_ids = new_ids
        self._head = AnswerHead(services, fetch.topics)

    async def describe(self, request: Request, topic: str, partition: str, producer: str) -> Response:
        """Answer GET .../partitions/{partition}/producers/{producer} with the producer's progress there."""
        producer_id = _id(producer)
        epoch = integer(request, "epoch", 0, maximum=MAX_EPOCH)
        sequence = integer(request, "sequence", 0, maximum=MAX_NUMBER)
        wait_ms = integer(request, "wait_ms", 0, maximum=MAX_WAIT_MS)
        led = await self._fetch.led(request, topic, partition)
        if isinstance(led, Response):
            return led
        progress = await read(
            led,
            producer_id,
            epoch=epoch,
            sequence=sequence if "sequence" in request.query else None,
            wait_s=wait_ms / 1000,
        )
        return self._answer(led, producer, progress)

    async def fence(self, request: Request, topic: str, partition: str, producer: str) -> Response:
        """Answer PUT .../partitions/{partition}/producers/{producer}?epoch=n: refuse older epochs."""
        producer_id = _id(producer)
        if "epoch" not in request.query:
            raise Problem("invalid", "the query parameter `epoch` is required", field="epoch")
        epoch = integer(request, "epoch", 0, maximum=MAX_EPOCH)
        led = await self._fetch.led(request, topic, partition)
        if isinstance(led, Response):
            return led
        self._new_ids.count(led, producer_id, owner_of(request))
        return self._answer(led, producer, await fence(led, producer_id, epoch))

    def _answer(self, partition: Partition, producer: str, progress: Progress | None) -> Response:
        if progress is None:
            raise Problem(
                "no_such_producer",
                f"nothing of producer {producer} is durable in {partition.topic}/{partition.number}",
                field="producer",
                value=producer,
            )
        taken = partition.producers.progress(bytes.fromhex(producer))
        same = taken is not None and taken.epoch == progress.epoch
        answer = Response.json(
            documents.ProducerProgress(
                topic=partition.topic,
                partition=partition.number,
                producer=producer,
                epoch=progress.epoch,
                sequence=taken.sequence if same and taken is not None else progress.sequence,
                committed_sequence=progress.sequence,
                checkpoint=progress.checkpoint,
                floor=progress.floor,
                sealed=partition.context.final_seal is not None,
            )
        )
        answer.header_block = self._head.block(partition.topic, partition.copies.window())
        return answer


def _id(producer: str) -> bytes:
    if _ID.match(producer) is None or bytes.fromhex(producer) == NO_PRODUCER:
        raise Problem(
            "invalid",
            "a producer id must be 32 hexadecimal digits, not all of them 0",
            field="producer",
            value=producer,
        )
    return bytes.fromhex(producer)
