"""GET /metrics: any shard answers for all processes of its node, by asking the others.

An answer that took more than 50 ms of CPU time is cached for twenty times as long, 5 s at most: so scrapes
take at most a twentieth of a core, however many monitors there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import msgspec

from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Request, Response
from laminar.node.api.common.query import one_of
from laminar.node.api.common.services import HostServices
from laminar.node.api.common.slices import Kept, in_slices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.metrics.shard_numbers import PartitionNumbers, ProcessNumbers, ShardNumbers, label_of
from laminar.node.api.metrics.text import OPENMETRICS_TYPE, PROMETHEUS_TYPE, Text, accepts_openmetrics
from laminar.node.host.clock import Clock
from laminar.node.runtime.boot import CONTROLLER, Role, role_number
from laminar.node.transport.transport import Peer, TransportError

ASK_TIMEOUT_S: Final = 2.0
LONGEST_KEPT_S: Final = 5.0


class MetricsRoute:
    """The handler of GET /metrics, and the transport methods that answer the node's other processes."""

    def __init__(self, services: HostServices, topics: TopicLookup, numbers: ShardNumbers) -> None:
        self._services = services
        self._topics = topics
        self._numbers = numbers
        self._own = Kept(numbers.look, clock=services.clock, keep_s=0.0, at_most_s=LONGEST_KEPT_S)
        self._plain = Kept(
            partial(self._text, openmetrics=False), clock=services.clock, keep_s=0.0, at_most_s=LONGEST_KEPT_S
        )
        self._openmetrics = Kept(
            partial(self._text, openmetrics=True), clock=services.clock, keep_s=0.0, at_most_s=LONGEST_KEPT_S
        )

    async def lines(self) -> list[str]:
        """Return the text of the node's metrics as lines, one for each sample."""
        return [line for line in (await self._plain.get()).decode().splitlines() if line[:1] != "#"]

    async def on_stats(self, peer: Peer, payload: bytes) -> bytes:
        """Answer another process of this node with this shard's values of metrics."""
        return msgspec.msgpack.encode(await self._own.get())

    async def on_partition_stats(self, peer: Peer, payload: bytes) -> bytes:
        """Answer another process of this node with the numbers of this shard's replicas of a topic."""
        return msgspec.msgpack.encode(await self._numbers.of_partitions(payload.decode()))

    async def metrics(self, request: Request) -> Response:
        """Answer GET /metrics; with `detail=partitions` the numbers of a topic's partitions."""
        openmetrics = accepts_openmetrics(request.headers.get("accept", ""))
        content = [("Content-Type", OPENMETRICS_TYPE if openmetrics else PROMETHEUS_TYPE)]
        topic = request.query.get("topic", "")
        if one_of(request, "detail", ("none", "partitions")) == "none":
            if topic:
                detail = "a topic is named only with detail=partitions"
                raise Problem("invalid", detail, field="topic", value=topic)
            kept = self._openmetrics if openmetrics else self._plain
            return Response(200, content, await kept.get())
        if not topic:
            raise Problem(
                "invalid", "detail=partitions needs the query parameter topic", field="topic", value=""
            )
        self._topics.record(topic)
        rows = await self._of_partitions(topic)
        pieces = Text(openmetrics=openmetrics).of_partitions(topic, rows)
        return Response(200, content, await _joined(pieces, clock=self._services.clock))

    async def _of_partitions(self, topic: str) -> list[PartitionNumbers]:
        rows = await self._numbers.of_partitions(topic)
        shards = [role for role in self._services.siblings if role != CONTROLLER]
        for answer in (await self._ask(shards, "partition_stats", topic.encode())).values():
            if answer is not None:
                rows += msgspec.msgpack.decode(answer, type=list[PartitionNumbers])
        return rows

    async def _text(self, *, openmetrics: bool) -> bytes:
        services = self._services
        siblings = sorted(services.siblings, key=role_number)
        answers = await self._ask(siblings, "stats", b"")
        processes = [await self._own.get()]
        up = {label_of(services.number): True}
        for role, answer in answers.items():
            up[label_of(role)] = answer is not None
            if answer is not None:
                processes.append(msgspec.msgpack.decode(answer, type=ProcessNumbers))
        return await _joined(Text(openmetrics=openmetrics).of_node(processes, up=up), clock=services.clock)

    async def _ask(self, roles: Sequence[Role], method: str, payload: bytes) -> dict[Role, bytes | None]:
        """Return the answers of other processes of this node, by role; None for one that did not answer."""
        services = self._services
        found = await asyncio.gather(
            *(services.ask_sibling(role, method, payload=payload, timeout_s=ASK_TIMEOUT_S) for role in roles),
            return_exceptions=True,
        )
        answers: dict[Role, bytes | None] = {}
        for role, answer in zip(roles, found, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, TransportError):
                raise answer
            answers[role] = None if isinstance(answer, BaseException) else answer
        return answers


async def _joined(pieces: Iterator[str], *, clock: Clock) -> bytes:
    """Join the pieces of a text; yield to the event loop between pieces whenever a slice's time is over."""
    found: list[str] = []
    await in_slices(pieces, found.append, clock=clock)
    return "".join(found).encode()
