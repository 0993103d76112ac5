"""Calls by which a sealed partition's leader sends its delayed records to the partitions that follow."""

from __future__ import annotations

import msgspec

from laminar.http.api.deadlines import FORWARDED_APPEND_S
from laminar.node.api.common.leader_call import STEP, LeaderCall
from laminar.node.delay.publishers import Publishers
from laminar.node.delay.sender import DelayedBatchAnswer, DelayedBatchRequest, take
from laminar.node.partition.partition import Partition
from laminar.node.transport.transport import Peer


class DelayedSends:
    """Sends batches of delayed records to partitions' leaders, and takes those for partitions led here."""

    def __init__(self, publishers: Publishers, leaders: LeaderCall) -> None:
        self._leaders = leaders
        publishers.send = self._send

    async def _send(self, partition: Partition, request: DelayedBatchRequest) -> DelayedBatchAnswer:
        return await self._leaders.ask(
            "delayed_batch",
            request,
            DelayedBatchAnswer,
            here=_take,
            policy=STEP,
            timeout_s=FORWARDED_APPEND_S,
        )

    async def on_delayed_batch(self, peer: Peer, payload: bytes) -> DelayedBatchAnswer:
        """Append a batch of delayed records from another shard to a partition that this shard leads."""
        request = msgspec.msgpack.decode(payload, type=DelayedBatchRequest)
        return await _take(self._leaders.led_here(request.topic, request.partition), request)


async def _take(partition: Partition, request: DelayedBatchRequest) -> DelayedBatchAnswer:
    return await take(partition, request.batch)
