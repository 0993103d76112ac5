"""The requests of a search to the shards that have replicas: bounds of partitions, and scans of them.

One scan request names all partitions of a shard, which scans them one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from laminar.http.api.deadlines import FORWARDED_STEP_S
from laminar.http.api.problems import Problem
from laminar.http.api.timestamps import EARLIEST_MS
from laminar.log.disk.errors import StorageError
from laminar.node.api.common.leader_call import READ, LeaderCall
from laminar.node.api.common.leader_lookup import Locator, ReplicaEndpoint
from laminar.node.api.common.services import ShardServices
from laminar.node.find.examine import Wanted
from laminar.node.find.pace import Pace
from laminar.node.find.scan import NO_END, Scanned, Span, scan
from laminar.node.partition.partition import Partition
from laminar.node.transport.transport import Peer

MOST_WAITING: Final = 64
"""The most searches that may wait for records at one shard; others are answered at once, and ask again."""
ANSWER_S: Final = 1.5
"""How long another shard has to answer, in addition to the time that the scan may take."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A place in a partition: an offset, the first record appended at or after a time (ms), or an end.

    `name` is "earliest" or "latest" for an end.
    """

    name: str = ""
    offset: int | None = None
    time_ms: int | None = None


class BoundsRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request to a partition's leader for the offsets at which a search begins and ends."""

    topic: str
    partition: int
    first: Place
    end: Place | None
    """None if the search has no end."""


class BoundsAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The bounds of a search, `low` <= offset < `high`; `group` is the id of the partition's group."""

    group: bytes
    low: int
    high: int


class ScanRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request to search ranges of offsets (`spans`) for wanted records, for at most `budget_ms`.

    If none is found, the answer waits up to `wait_ms` for new records.
    """

    topic: str
    spans: list[Span]
    wanted: Wanted
    budget_ms: int
    wait_ms: int = 0


class SearchSteps:
    """Sends requests of searches to shards, and answers those for replicas of this shard."""

    def __init__(self, services: ShardServices, leaders: LeaderCall) -> None:
        self._services = services
        self._leaders = leaders
        self.pace = Pace(services.settings.search_bytes_per_s)
        self._followers = 0

    @property
    def locator(self) -> Locator:
        """The lookup of replicas and leaders."""
        return self._leaders.locator

    async def bounds(self, request: BoundsRequest) -> BoundsAnswer:
        """Return the bounds of a search in a partition, confirmed by a majority. Raises `Problem`."""
        return await self._leaders.ask(
            "search_bounds",
            request,
            BoundsAnswer,
            here=_bounds,
            policy=READ,
            timeout_s=FORWARDED_STEP_S,
        )

    async def on_bounds(self, peer: Peer, payload: bytes) -> BoundsAnswer:
        """Answer another shard with the bounds of a search in a partition that this shard leads."""
        request = msgspec.msgpack.decode(payload, type=BoundsRequest)
        return await _bounds(self._leaders.led_here(request.topic, request.partition), request)

    async def scan(self, where: ReplicaEndpoint | None, request: ScanRequest) -> list[Scanned]:
        """Return the results of the scans at the shard `where`, or at this shard if None.

        Raises `Problem`.
        """
        if where is None:
            return await self.scan_here(request)
        answer: list[Scanned] = await self._leaders.locator.exchange.ask(
            where.address,
            "search_scan",
            request,
            kind=list[Scanned],
            timeout_s=(request.budget_ms + request.wait_ms) / 1000 + ANSWER_S,
        )
        return answer

    async def on_scan(self, peer: Peer, payload: bytes) -> list[Scanned]:
        """Scan replicas of this shard for another shard."""
        return await self.scan_here(msgspec.msgpack.decode(payload, type=ScanRequest))

    async def scan_here(self, request: ScanRequest) -> list[Scanned]:
        """Search the spans in replicas of this shard. Raises 503 `overloaded`."""
        async with self.pace.admitted():
            found = await self._scan(request)
        waits = request.wait_ms and not any(each.found for each in found)
        if not waits or self._followers >= MOST_WAITING:
            return found
        spans = [
            Span(each.number, span.group, each.low, each.high)
            for each, span in zip(found, request.spans, strict=True)
        ]
        self._followers += 1
        try:
            arrived = await self._wait(request.topic, spans, request.wait_ms / 1000)
        finally:
            self._followers -= 1
        if not arrived:
            return found
        async with self.pace.admitted():
            return await self._scan(msgspec.structs.replace(request, spans=spans))

    async def _scan(self, request: ScanRequest) -> list[Scanned]:
        """Search the spans one after the other, each for an equal share of the time that is left."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + request.budget_ms / 1000
        wanted = request.wanted
        found: list[Scanned] = []
        room = wanted.most_bytes
        for at, span in enumerate(request.spans):
            await asyncio.sleep(0)
            partition = self._services.partitions.get((request.topic, span.number))
            if partition is None:
                found.append(Scanned(span.number, span.low, span.high, "absent"))
                continue
            if room <= 0:
                found.append(Scanned(span.number, span.low, span.high))
                continue
            left_s = until_s - loop.time()
            asked = msgspec.structs.replace(wanted, most_bytes=room)
            share_s = loop.time() + max(0.0, left_s) / (len(request.spans) - at)
            scanned = await scan(partition, span, asked, self.pace, until_s=share_s)
            room -= sum(len(each.document) for each in scanned.found)
            found.append(scanned)
        return found

    async def _wait(self, topic: str, spans: Sequence[Span], wait_s: float) -> bool:
        """Wait until one of these spans has a new record; return whether one has within `wait_s`."""
        waits = [
            asyncio.ensure_future(partition.reader.wait_past(span.low, wait_s))
            for span in spans
            if span.high == NO_END
            and (partition := self._services.partitions.get((topic, span.number))) is not None
        ]
        try:
            pending = set(waits)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if any(each.result() for each in done):
                    return True
        finally:
            for each in waits:
                each.cancel()
        return False


async def _bounds(partition: Partition, request: BoundsRequest) -> BoundsAnswer:
    try:
        return await _offsets(partition, request)
    except StorageError as error:
        raise Problem("damaged", str(error), outcome="not_applied") from error


async def _offsets(partition: Partition, request: BoundsRequest) -> BoundsAnswer:
    bounds = await partition.reader.confirmed_bounds()

    async def offset_of(place: Place) -> int:
        if place.offset is not None:
            return min(place.offset, bounds.end)
        if place.time_ms is not None:
            return (await partition.reader.at_time(bounds, max(place.time_ms, EARLIEST_MS)))[0]
        return bounds.start if place.name == "earliest" else bounds.end

    low = await offset_of(request.first)
    high = NO_END if request.end is None else max(low, await offset_of(request.end))
    return BoundsAnswer(partition.replica.group, low, high)
