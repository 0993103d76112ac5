"""The question to a partition's leader where to cut it (`laminar.node.routes.cut_points`)."""

from __future__ import annotations

import msgspec

from laminar.node.api.common.leader_call import READ, LeaderCall
from laminar.node.api.common.services import ShardServices
from laminar.node.partition.partition import Partition
from laminar.node.routes.cut_points import cuts_of, sample, weights_of
from laminar.node.transport.transport import Peer
from membership.records import KeyRange


class CutRequest(msgspec.Struct, frozen=True, array_like=True):
    """Ask a partition's leader where to cut the range of its logical partitions `into` parts."""

    topic: str
    partition: int
    first: int
    size: int
    into: int


class CutPoints:
    """The question, and the answer of a leader."""

    def __init__(self, services: ShardServices, leaders: LeaderCall) -> None:
        self._services = services
        self._leaders = leaders

    async def of(self, topic: str, held: KeyRange, *, into: int) -> list[int]:
        """Return the logical partitions at which to cut a partition, rising: one less than `into`.

        Raises:
            Problem: the partition has no leader, among others.
        """
        asked = CutRequest(topic, held.number, held.first, held.size, into)
        return await self._leaders.ask("cuts", asked, list[int], here=self._cuts, policy=READ)

    async def on_cuts(self, peer: Peer, payload: bytes) -> list[int]:
        """Answer another shard, for a partition that is led here."""
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
