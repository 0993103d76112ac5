"""The load of a shard's replicas: averages of what their counters gained between two questions.

The rate of a counter is its gain, divided by the time in which it was gained, both faded by `FADE_S`: an
average of about a minute, that is right from the second question on. Nothing is measured between questions,
and a question lets the loop turn every `AT_ONCE` replicas.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Mapping

import msgspec
from msgspec.structs import astuple

from laminar.node.host.clock import Clock
from laminar.node.partition.partition import Partition
from laminar.node.placement.load import HOTTEST, SMALL, Load, LoadReport, PartitionLoad
from laminar.node.transport.transport import Peer

FADE_S = 60.0
"""Time in which the weight of what was measured falls to 37 %."""

AT_ONCE = 500

# Less than this, faded, was gained long ago: it counts as nothing, and need not be faded any more.
_NOTHING = 0.01

_Counters = tuple[int, int, int]
_NO_GAIN = (0.0, 0.0, 0.0)


class _Meter:
    """The counters of one replica as they were last, and what they gained, faded."""

    __slots__ = ("counters", "gained", "leads", "partition")

    def __init__(self, partition: Partition, counters: _Counters) -> None:
        self.partition = partition
        self.counters = counters
        self.gained = _NO_GAIN
        self.leads = False

    def follow(self, counters: _Counters, fade: float) -> None:
        """Add what the counters have gained; one that went down, as a trimmed log, has gained nothing."""
        past = self.gained
        if counters == self.counters and past is _NO_GAIN:
            return
        old = self.counters
        gained = (
            past[0] * fade + max(0, counters[0] - old[0]),
            past[1] * fade + max(0, counters[1] - old[1]),
            past[2] * fade + max(0, counters[2] - old[2]),
        )
        self.gained = gained if sum(gained) > _NOTHING else _NO_GAIN
        self.counters = counters

    def load(self, seconds: float) -> Load:
        """Return the load, if the gains are of this number of seconds."""
        written, read, requests = self.gained
        return Load(
            appended_bytes_per_s=written / seconds if self.leads else 0.0,
            written_bytes_per_s=written / seconds,
            read_bytes_per_s=read / seconds,
            requests_per_s=requests / seconds,
            stored_bytes=self.counters[0],
        )


class LoadMeter:
    """The meters of one shard's replicas."""

    def __init__(
        self,
        node: str,
        partitions: Mapping[tuple[str, int], Partition],
        *,
        clock: Clock,
        disk_is_low: Callable[[], bool],
    ) -> None:
        self._node = node
        self._partitions = partitions
        self._clock = clock
        self._disk_is_low = disk_is_low
        self._meters: dict[tuple[str, int], _Meter] = {}
        self._asked_ms = clock.monotonic_ms()
        self._seconds = 0.0

    async def on_load(self, peer: Peer, payload: bytes) -> bytes:
        """Answer the node's controller with the load of this shard."""
        return msgspec.msgpack.encode(await self.report())

    async def report(self) -> LoadReport:
        """Return the load since the last questions; all rates are 0 at the first one."""
        now_ms = self._clock.monotonic_ms()
        passed_s = (now_ms - self._asked_ms) / 1000
        self._asked_ms = now_ms
        fade = math.exp(-passed_s / FADE_S)
        self._seconds = self._seconds * fade + passed_s
        seconds = self._seconds or 1.0
        former, meters = self._meters, {}
        appended = written = read = requests = 0.0
        stored = 0
        for place, (key, partition) in enumerate(list(self._partitions.items())):
            if place % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
            meter = meters[key] = self._followed(former.get(key), partition, fade)
            stored += meter.counters[0]
            if meter.gained is not _NO_GAIN:
                gained = meter.gained
                appended += gained[0] if meter.leads else 0.0
                written += gained[0]
                read += gained[1]
                requests += gained[2]
        self._meters = meters
        total = Load(appended / seconds, written / seconds, read / seconds, requests / seconds, stored)
        return LoadReport(
            self._node, total, _hottest(meters, total, seconds), disk_is_low=self._disk_is_low()
        )

    def _followed(self, meter: _Meter | None, partition: Partition, fade: float) -> _Meter:
        """Return the partition's meter with its counters of now, a new one for another partition."""
        counters = (
            partition.log.size_bytes,
            partition.reader.fetched_bytes,
            partition.appends.appended_batches + partition.reader.fetches,
        )
        if meter is None or meter.partition is not partition:
            meter = _Meter(partition, counters)
        else:
            meter.follow(counters, fade)
        meter.leads = partition.leads
        return meter


def _hottest(meters: Mapping[tuple[str, int], _Meter], total: Load, seconds: float) -> list[PartitionLoad]:
    """Return the `HOTTEST` partitions by the rule of `load.hottest`; the others cost little each."""
    wholes = [whole + small for whole, small in zip(astuple(total), astuple(SMALL), strict=True)]
    of_appended, of_written, of_read, of_requests, of_stored = wholes
    least = min(of_appended, of_written)

    def part(item: tuple[tuple[str, int], _Meter]) -> float:
        meter = item[1]
        most: float = meter.counters[0] / of_stored
        if meter.gained is not _NO_GAIN:
            written, read, requests = meter.gained
            bytes_ = written / seconds / (least if meter.leads else of_written)
            most = max(most, bytes_, read / seconds / of_read, requests / seconds / of_requests)
        return most

    return [
        PartitionLoad(f"{topic}/{number}", meter.leads, meter.load(seconds))
        for (topic, number), meter in heapq.nlargest(HOTTEST, meters.items(), key=part)
    ]
