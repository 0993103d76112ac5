"""The schedule of a load: record n is due n / rate seconds after the start, even if earlier records wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

# A loop's timer is late by up to a millisecond: for the last two of a wait a thread sleeps, which is exact to
# a tenth of one.
EXACT_S = 0.002
# What is due within this time is sent together, so that a high rate does not mean as many wake-ups.
TICK_S = 0.001
# So long after the schedule what is late is still sent: this share of its time, or this time.
GRACE, GRACE_S = 0.02, 0.1


class Pace:
    """The schedule of a load: `total` records, one each 1 / `rate` seconds; times are of `perf_counter`."""

    def __init__(self, rate: float, seconds: float) -> None:
        self.rate = rate
        self.seconds = seconds
        self.total = max(1, round(rate * seconds))
        self.began_s = 0.0
        self._sleeper: ThreadPoolExecutor

    @contextmanager
    def running(self) -> Iterator[Pace]:
        """Start the schedule now; `until` may be awaited within the block."""
        with ThreadPoolExecutor(1, thread_name_prefix="pace") as self._sleeper:
            self.began_s = time.perf_counter()
            yield self

    @property
    def ends_s(self) -> float:
        """The time (`perf_counter`) at which the load ends even if records are unsent.

        It is a little after the last record is due.
        """
        return self.began_s + self.seconds + max(GRACE_S, GRACE * self.seconds)

    def due_s(self, number: int) -> float:
        """Return the time (`perf_counter`) at which record `number` (from 0) is due."""
        return self.began_s + number / self.rate

    def due(self, now_s: float) -> int:
        """Return how many records are due by the time `now_s` (`perf_counter`)."""
        return min(self.total, int((now_s - self.began_s) * self.rate) + 1)

    async def until(self, number: int) -> None:
        """Wait until a record is due; if several are due within one tick, wait at least one tick."""
        left_s = self.due_s(number) - time.perf_counter()
        if self.rate * TICK_S > 1:
            await asyncio.sleep(max(left_s, TICK_S))
            return
        if left_s > EXACT_S:
            await asyncio.sleep(left_s - EXACT_S)
        left_s = self.due_s(number) - time.perf_counter()
        if left_s > 0:
            await asyncio.get_running_loop().run_in_executor(self._sleeper, time.sleep, left_s)
        else:
            await asyncio.sleep(0)
