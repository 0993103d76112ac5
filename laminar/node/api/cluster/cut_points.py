"""Where to split a partition, so that each part gets as many bytes as the others.

The leader looks at a sample of its newest records with keys: a range of keys that grew lately is cut, however
old the rest of the log is. The keys of one logical partition cannot be divided; a partition whose records are
all of one is cut beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from laminar.batch import Batch, BatchError, Buffer
from laminar.http.api.deadlines import FORWARDED_STEP_S
from laminar.node.api.common.forwarding import Exchange
from laminar.node.api.common.leader_call import READ, LeaderCall
from laminar.node.api.common.leader_lookup import ReplicaEndpoint
from laminar.node.api.common.services import ShardServices
from laminar.node.partition.partition import Partition
from laminar.node.transport.transport import Peer
from laminar.wire.key_route import logical_of_key
from membership.records import KeyRange

SAMPLES = 64
SAMPLE_BYTES = 64 * 1024
MOST_BYTES = 16 * 1024 * 1024
NEWEST = 4
"""The samples are of the newest quarter of the records."""


class CutRequest(msgspec.Struct, frozen=True, array_like=True):
    """Ask a partition's leader where to cut the range of its logical partitions `into` parts."""

    topic: str
    partition: int
    first: int
    size: int
    into: int


class CutPoints:
    """The question, and the answer of a leader."""

    def __init__(self, services: ShardServices, exchange: Exchange, leaders: LeaderCall) -> None:
        self._services = services
        self._exchange = exchange
        self._leaders = leaders

    async def of(self, topic: str, held: KeyRange, *, into: int) -> list[int]:
        """Return the logical partitions at which to cut a partition, rising: one less than `into`.

        Raises:
            Problem: the partition has no leader, among others.
        """
        asked = CutRequest(topic, held.number, held.first, held.size, into)

        async def there(where: ReplicaEndpoint) -> list[int]:
            cuts: list[int] = await self._exchange.ask(
                where.address, "cuts", asked, kind=list[int], timeout_s=FORWARDED_STEP_S
            )
            return cuts

        return await self._leaders(
            topic, held.number, here=lambda led: self._cuts(led, asked), there=there, policy=READ
        )

    async def on_cuts(self, peer: Peer, payload: bytes) -> list[int]:
        """Answer another shard, for a partition that is led here."""
        asked = msgspec.msgpack.decode(payload, type=CutRequest)
        return await self._cuts(self._leaders.led_here(asked.topic, asked.partition), asked)

    async def _cuts(self, partition: Partition, asked: CutRequest) -> list[int]:
        start, end = partition.start_offset, partition.end_offset
        first = end - (end - start) // NEWEST
        frames: list[Buffer] = []
        size = 0
        for sample in range(SAMPLES):
            offset = first + (end - first) * sample // SAMPLES
            if offset >= end or size >= MOST_BYTES:
                break
            found = await partition.reader.frames(offset, max_bytes=SAMPLE_BYTES)
            frames += found
            size += sum(map(len, found))
        weights = await self._services.off_loop(weights_of, frames)
        return cuts_of(weights, first=asked.first, size=asked.size, into=asked.into)


def weights_of(frames: Sequence[Buffer]) -> dict[int, int]:
    """Return by logical partition the bytes of its records in these batches."""
    weights: dict[int, int] = {}
    for frame in frames:
        try:
            batch = Batch(frame)
            keys = batch.keys
            values = batch.values if keys is not None else []
        except BatchError:  # an unreadable batch is no reason not to split
            continue
        for key, value in zip(keys or (), values, strict=True):
            if key is not None:
                logical = logical_of_key(key)
                weights[logical] = weights.get(logical, 0) + len(key) + len(value)
    return weights


def cuts_of(weights: dict[int, int], *, first: int, size: int, into: int) -> list[int]:
    """Return where to cut `size` logical partitions from `first` on into parts of about the same weight.

    Without weights the parts have the same number of logical partitions. Each part has one at least.
    """
    inside = sorted(
        (logical, weight) for logical, weight in weights.items() if first <= logical < first + size
    )
    total = sum(weight for _, weight in inside)
    cuts: list[int] = []
    passed, place = 0, 0
    for part in range(1, into):
        cut = first + size * part // into
        if total:
            while place < len(inside) and (passed + inside[place][1] / 2) * into <= total * part:
                passed += inside[place][1]
                place += 1
            if place < len(inside):
                cut = inside[place][0]
        # Room for a part before it, and for each that follows.
        low = (cuts[-1] if cuts else first) + 1
        cuts.append(min(max(cut, low), first + size - (into - part)))
    return cuts
