"""Free space of the disk that holds the data: above or below the low-water mark.

Below it appends are refused with 507, so that what must go on can: votes, elections, checkpoints, catching
up, and retention, which makes room. The mark is a share of the disk or a number of bytes, whichever is
less: a share of a large disk would leave too much unused. Refusing ends a quarter above the mark, so that
it does not begin and end with every request. The disk is asked off the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from laminar.http.api.problems import Problem
from laminar.log.disk.disk import Disk
from laminar.log.disk.errors import DiskError

_log = logging.getLogger("laminar.space")


class Space:
    """What is free on the disk of `directory`, as `look` found it last."""

    def __init__(self, disk: Disk, directory: str, *, low_water_bytes: int, low_water_percent: float) -> None:
        self._disk = disk
        self._directory = directory
        self._low_water_bytes = low_water_bytes
        self._low_water_percent = low_water_percent
        self.free_bytes = 0
        self.mark_bytes = 0
        self.low = False
        # Told when `low` changes.
        self.on_change: Callable[[], None] | None = None

    def measure(self) -> tuple[int, int]:
        """Free and total bytes now. Blocks."""
        return self._disk.free_bytes(self._directory), self._disk.total_bytes(self._directory)

    def take(self, free_bytes: int, total_bytes: int) -> None:
        """Judge a measurement."""
        self.free_bytes = free_bytes
        self.mark_bytes = min(self._low_water_bytes, int(total_bytes * self._low_water_percent / 100))
        low = free_bytes < (self.mark_bytes * 5 // 4 if self.low else self.mark_bytes)
        if low == self.low:
            return
        self.low = low
        if low:
            _log.error("appends are refused: %s", self.reason)
        else:
            _log.warning("appends are taken again: %s has %d bytes free", self._directory, free_bytes)
        if self.on_change is not None:
            self.on_change()

    @property
    def reason(self) -> str:
        """What is low, for people."""
        return (
            f"the disk of {self._directory} has {self.free_bytes} bytes free, "
            f"less than the low-water mark of {self.mark_bytes}"
        )

    async def look(self) -> None:
        """Ask the disk, off the loop."""
        try:
            found = await asyncio.get_running_loop().run_in_executor(None, self.measure)
        except DiskError as error:
            _log.warning("the free space cannot be told: %s", error)
            return
        self.take(*found)

    def refusal(self) -> Problem | None:
        """Why nothing is appended now: 507, or None."""
        if not self.low:
            return None
        return Problem(
            "disk_full",
            self.reason,
            field="disk_free_bytes",
            value=self.free_bytes,
            limit=self.mark_bytes,
            hint="Free space on the node's disk, or shorten the topics' retention.",
            retry_after_ms=1000,
            outcome="not_applied",
        )
