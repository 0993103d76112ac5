"""What a search asks of the shards that have replicas: bounds of partitions, and scans of them.

A scan is asked of all partitions of one shard at once, which looks through them one after the other.
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
"""Followers that may wait for records at one shard; others are answered at once, and ask again."""
ANSWER_S: Final = 1.5
"""How long another shard has to answer, beside the time that it is given."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A place in a partition: an offset, or the first record appended at a time (ms), or one of the ends."""

    name: str = ""
    offset: int | None = None
    time_ms: int | None = None


class BoundsRequest(msgspec.Struct, frozen=True, array_like=True):
    """Where a search of a partition begins and ends: asked of its leader."""

    topic: str
    partition: int
    first: Place
    end: Place | None
    """None: it has no end."""


class BoundsAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The offsets, from and to before; `group` is the id of the partition."""

    group: bytes
    low: int
    high: int


class ScanRequest(msgspec.Struct, frozen=True, array_like=True):
    """Search these spans for `budget_ms`; with `wait_ms` wait so long if there is nothing to look at."""

    topic: str
    spans: list[Span]
    wanted: Wanted
    budget_ms: int
    wait_ms: int = 0


class SearchSteps:
    """Asks shards for a search, and answers them where this shard has the replicas."""

    def __init__(self, services: ShardServices, leaders: LeaderCall) -> None:
        self._services = services
        self._leaders = leaders
        self.pace = Pace(services.settings.search_bytes_per_s)
        self._followers = 0

    @property
    def locator(self) -> Locator:
        """Where replicas are."""
        return self._leaders.locator

    async def bounds(self, request: BoundsRequest) -> BoundsAnswer:
        """Return where a search begins and ends, as a majority confirms it. Raises `Problem`."""
        return await self._leaders.ask(
            "search_bounds",
            request,
            BoundsAnswer,
            here=_bounds,
            policy=READ,
            timeout_s=FORWARDED_STEP_S,
        )

    async def on_bounds(self, peer: Peer, payload: bytes) -> BoundsAnswer:
        """Answer another shard about a partition that is led here."""
        request = msgspec.msgpack.decode(payload, type=BoundsRequest)
        return await _bounds(self._leaders.led_here(request.topic, request.partition), request)

    async def scan(self, where: ReplicaEndpoint | None, request: ScanRequest) -> list[Scanned]:
        """Return what a shard finds; None: this one. Raises `Problem`."""
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
        """Search for another shard."""
        return await self.scan_here(msgspec.msgpack.decode(payload, type=ScanRequest))

    async def scan_here(self, request: ScanRequest) -> list[Scanned]:
        """Search the spans whose replicas are here. Raises 503 `overloaded`."""
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
        """Search the spans one after the other; what is left of the time is shared by those that follow."""
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
        """Wait until one of these spans has a record to look at; return False after `wait_s`."""
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
