"""Ask a partition's leader at which keys to split it into parts of equal load.

`laminar.node.routes.cut_points` computes the answer.
"""

from __future__ import annotations

import msgspec

from laminar.node.api.common.leader_call import READ, LeaderCall
from laminar.node.api.common.services import ShardServices
from laminar.node.partition.partition import Partition
from laminar.node.routes.cut_points import cuts_of, sample, weights_of
from laminar.node.transport.transport import Peer
from membership.records import KeyRange


class CutRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request for the points at which to cut the range of a partition `into` parts.

    The range has `size` logical partitions from `first` on.
    """

    topic: str
    partition: int
    first: int
    size: int
    into: int


class CutPoints:
    """Asks partitions' leaders for cut points, and answers for partitions that this shard leads."""

    def __init__(self, services: ShardServices, leaders: LeaderCall) -> None:
        self._services = services
        self._leaders = leaders

    async def of(self, topic: str, held: KeyRange, *, into: int) -> list[int]:
        """Return the logical partitions at which to cut a partition: `into` - 1 numbers, in ascending order.

        Raises:
            Problem: for example, the partition has no leader.
        """
        asked = CutRequest(topic, held.number, held.first, held.size, into)
        return await self._leaders.ask("cuts", asked, list[int], here=self._cuts, policy=READ)

    async def on_cuts(self, peer: Peer, payload: bytes) -> list[int]:
        """Answer another shard with the cut points of a partition that this shard leads."""
        asked = msgspec.msgpack.decode(payload, type=CutRequest)
        return await self._cuts(self._leaders.led_here(asked.topic, asked.partition), asked)

    async def _cuts(self, partition: Partition, asked: CutRequest) -> list[int]:
        frames = await sample(
            lambda offset, most: partition.reader.frames(offset, max_bytes=most),
            start=partition.start_offset,
            end=partition.end_offset,
        )
        weights = await self._services.off_loop(weights_of, frames)
        return cuts_of(weights, first=asked.first, size=asked.size, into=asked.into)
