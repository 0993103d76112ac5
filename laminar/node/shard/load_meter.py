"""The load of a shard's replicas: averages of what their counters gained between two questions.

The rate of a counter is its gain, divided by the time in which it was gained, both faded by `FADE_S`: an
average of about a minute, that is right from the second question on. Nothing is measured between questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec

from laminar.node.host.clock import Clock
from laminar.node.partition.partition import Partition
from laminar.node.placement.load import Load, LoadReport, PartitionLoad, hottest
from laminar.node.transport.transport import Peer

FADE_S = 60.0
"""Time in which the weight of what was measured falls to 37 %."""

_Counters = tuple[int, int, int]


class _Meter:
    """The counters of one replica as they were last, and what they gained, faded."""

    __slots__ = ("counters", "gained", "partition")

    def __init__(self, partition: Partition, counters: _Counters) -> None:
        self.partition = partition
        self.counters = counters
        self.gained = (0.0, 0.0, 0.0)

    def follow(self, counters: _Counters, fade: float) -> None:
        """Add what the counters have gained; one that went down, as a trimmed log, has gained nothing."""
        if counters == self.counters and not any(self.gained):
            return
        written, read, requests = (
            max(0, new - old) for new, old in zip(counters, self.counters, strict=True)
        )
        past = self.gained
        self.gained = (past[0] * fade + written, past[1] * fade + read, past[2] * fade + requests)
        self.counters = counters


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
        return msgspec.msgpack.encode(self.report())

    def report(self) -> LoadReport:
        """Return the load since the last questions; all rates are 0 at the first one."""
        now_ms = self._clock.monotonic_ms()
        passed_s = (now_ms - self._asked_ms) / 1000
        self._asked_ms = now_ms
        fade = math.exp(-passed_s / FADE_S)
        self._seconds = self._seconds * fade + passed_s
        former, self._meters = self._meters, {}
        loads: list[PartitionLoad] = []
        for key, partition in self._partitions.items():
            counters = (
                partition.log.size_bytes,
                partition.reader.fetched_bytes,
                partition.appends.appended_batches + partition.reader.fetches,
            )
            meter = former.get(key)
            if meter is None or meter.partition is not partition:
                meter = _Meter(partition, counters)
            else:
                meter.follow(counters, fade)
            self._meters[key] = meter
            loads.append(self._load(partition, meter))
        total = sum((each.load for each in loads), Load())
        return LoadReport(self._node, total, hottest(loads, total), disk_is_low=self._disk_is_low())

    def _load(self, partition: Partition, meter: _Meter) -> PartitionLoad:
        seconds = self._seconds or 1.0
        written, read, requests = (each / seconds for each in meter.gained)
        leads = partition.leads
        load = Load(
            appended_bytes_per_s=written if leads else 0.0,
            written_bytes_per_s=written,
            read_bytes_per_s=read,
            requests_per_s=requests,
            stored_bytes=meter.counters[0],
        )
        return PartitionLoad(f"{partition.topic}/{partition.number}", leads, load)
