"""The load of a shard's replicas: average rates of their counters, computed when the controller asks.

The rate of a counter is its increase divided by the time in which it increased. In both, older values count
less and less (exponential decay with the time constant `FADE_S`), so the rate is an average over about a
minute. It is right from the second question on. Nothing is measured between questions, and while one is
answered, other tasks of the loop run after every `AT_ONCE` replicas.
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
"""Time (seconds) in which the weight of a measurement falls to 37 % (1/e)."""

AT_ONCE = 500

# A decayed increase below this is so old that it counts as 0, and need not be decayed any more.
_NOTHING = 0.01

_Counters = tuple[int, int, int]
_NO_GAIN = (0.0, 0.0, 0.0)


class _Meter:
    """The last values of one replica's counters, and their decayed increases."""

    __slots__ = ("counters", "gained", "leads", "partition")

    def __init__(self, partition: Partition, counters: _Counters) -> None:
        self.partition = partition
        self.counters = counters
        self.gained = _NO_GAIN
        self.leads = False

    def follow(self, counters: _Counters, fade: float) -> None:
        """Add the counters' increases since the last call; one that went down (a trimmed log) adds 0."""
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
        """Return the load: the decayed increases, divided by `seconds`, the decayed time."""
        written, read, requests = self.gained
        return Load(
            appended_bytes_per_s=written / seconds if self.leads else 0.0,
            written_bytes_per_s=written / seconds,
            read_bytes_per_s=read / seconds,
            requests_per_s=requests / seconds,
            stored_bytes=self.counters[0],
        )


class LoadMeter:
    """The meters of the replicas of one shard, and its answers to the controller's questions."""

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
        """Return the load now: rates are moving averages of about a minute, and 0 in the first call."""
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
        """Update the meter of a partition with its present counters, and return it.

        If there is none, or it is that of an earlier partition of the same name, return a new one.
        """
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
    """Return the `HOTTEST` partitions with the highest share of the shard's load (see `load.hottest`)."""
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
