"""Free space of the data disk, and whether it is below the low-water mark.

Below it appends are refused with 507, so that everything else can go on: votes, elections, checkpoints,
catch-up, and retention, which makes room. The low-water mark is a share of the disk or a number of bytes,
whichever is less: a share of a large disk would leave too much unused.

The lower half of it is reserved for consumers. Their writes (deliveries and cursors) are accepted until the
free space is below half of the mark, because records that are consumed let retention make room. There is a
limit because a consumer that fails again and again makes no room.

The trace of records gives way first: it is refused while less than one and a half times the mark is free.

Writes are accepted again when the free space is a quarter above the mark at which they were refused, so that
this does not change with every request. The free space is measured in a thread, not on the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from laminar.http.api.problems import Problem
from laminar.log.disk.disk import Disk
from laminar.log.disk.errors import DiskError

_log = logging.getLogger("laminar.space")


class DiskSpace:
    """Free space on the disk of `directory` as last measured, and which writes are refused because of it.

    `low` says that it is below the low-water mark; `reserve_is_used`, that it is below half of the mark, too.
    """

    def __init__(self, disk: Disk, directory: str, *, low_water_bytes: int, low_water_percent: float) -> None:
        self._disk = disk
        self._directory = directory
        self._low_water_bytes = low_water_bytes
        self._low_water_percent = low_water_percent
        self.free_bytes = 0
        self.threshold_bytes = 0
        self.low = False
        self.reserve_is_used = False
        # Called when `low` changes.
        self.on_change: Callable[[], None] | None = None

    def measure(self) -> tuple[int, int]:
        """Return free and total bytes now. Blocks."""
        return self._disk.free_bytes(self._directory), self._disk.total_bytes(self._directory)

    def take(self, free_bytes: int, total_bytes: int) -> None:
        """Store a measurement, and log when something begins or ceases to be refused."""
        self.free_bytes = free_bytes
        self.threshold_bytes = min(self._low_water_bytes, int(total_bytes * self._low_water_percent / 100))
        is_used = self._is_below(self.reserve_mark_bytes, self.reserve_is_used)
        if is_used != self.reserve_is_used:
            self.reserve_is_used = is_used
            if is_used:
                _log.error("consumers are refused, too: %s", self.reason)
            else:
                _log.warning("consumers go on: %s has %d bytes free", self._directory, free_bytes)
        low = self._is_below(self.threshold_bytes, self.low)
        if low == self.low:
            return
        self.low = low
        if low:
            _log.error("appends are refused: %s", self.reason)
        else:
            _log.warning("appends are accepted again: %s has %d bytes free", self._directory, free_bytes)
        if self.on_change is not None:
            self.on_change()

    @property
    def reserve_mark_bytes(self) -> int:
        """The free space below which consumers are refused as well."""
        return self.threshold_bytes // 2

    @property
    def reason(self) -> str:
        """A sentence for people: which disk is low, its free bytes, and the mark that they are below."""
        mark = f"the low-water mark of {self.threshold_bytes}"
        if self.reserve_is_used:
            mark = f"{self.reserve_mark_bytes}, half of {mark}"
        return f"the disk of {self._directory} has {self.free_bytes} bytes free, less than {mark}"

    async def refresh(self) -> None:
        """Measure the disk in a thread and store the result."""
        try:
            found = await asyncio.get_running_loop().run_in_executor(None, self.measure)
        except DiskError as error:
            _log.warning("the free space cannot be measured: %s", error)
            return
        self.take(*found)

    def refusal(self) -> Problem | None:
        """Return the problem (507) with which appends are refused now; None if they are accepted."""
        return self._refusal(self.threshold_bytes) if self.low else None

    def consumer_refusal(self) -> Problem | None:
        """Return the problem (507) with which consumers' writes are refused now; None if accepted."""
        return self._refusal(self.reserve_mark_bytes) if self.reserve_is_used else None

    def trace_refusal(self) -> Problem | None:
        """Return the problem (507) with which the trace of records is refused now; None if it is accepted."""
        mark_bytes = self.threshold_bytes * 3 // 2
        return self._refusal(mark_bytes) if self.low or self.free_bytes < mark_bytes else None

    def _is_below(self, mark_bytes: int, was_below: bool) -> bool:
        return self.free_bytes < (mark_bytes * 5 // 4 if was_below else mark_bytes)

    def _refusal(self, mark_bytes: int) -> Problem:
        return Problem(
            "disk_full",
            self.reason,
            field="disk_free_bytes",
            value=self.free_bytes,
            limit=mark_bytes,
            hint="Free space on the node's disk, or shorten the topics' retention. "
            "`laminar cluster doctor` names channels that keep logs longer.",
            retry_after_ms=1000,
            outcome="not_applied",
        )
