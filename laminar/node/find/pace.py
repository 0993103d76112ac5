"""The pace of one shard's scans: one reads at a time, at a bounded rate, and none while the loop is late.

A scan reads a slice in its turn, and others take theirs after it. So a search that would read for hours
delays another by its slices only, and appends by what one slice costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from laminar.http.api.problems import Problem

MOST_WAITING: Final = 8
"""Scans that take turns with the one that reads; more are refused."""
LATE_S: Final = 0.02
_REST_S: Final = 0.1
_MOST_RESTS: Final = 10


class Pace:
    """The turns of one shard's scans; at most `bytes_per_s` are read."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._turn = asyncio.Lock()
        self._scans = 0
        self.bytes = 0
        """Read since the start."""

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Count one scan while it runs.

        Raises:
            Problem: 503 `overloaded` if one scan reads and `MOST_WAITING` wait for their turn.
        """
        if self._scans > MOST_WAITING:
            raise Problem(
                "overloaded",
                f"{self._scans} searches read on this shard",
                field="search",
                value=self._scans + 1,
                limit=MOST_WAITING + 1,
                retry_after_ms=500,
                outcome="not_applied",
            )
        self._scans += 1
        try:
            yield
        finally:
            self._scans -= 1

    @asynccontextmanager
    async def turn(self, cost: Cost) -> AsyncIterator[None]:
        """Hold the turn while a slice is read and looked through, and then until the rate allows the next.

        `cost` is filled in by the reader. At least as long as the work took, nothing is read after it.
        """
        async with self._turn:
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            try:
                yield
            finally:
                self.bytes += cost.bytes
            await self._rest(max(cost.bytes / self._bytes_per_s, cost.rest_s, loop.time() - began_s))

    async def _rest(self, pause_s: float) -> None:
        """Sleep for `pause_s`, and longer as long as the loop is late."""
        loop = asyncio.get_running_loop()
        for _ in range(_MOST_RESTS):
            due_s = loop.time() + pause_s
            await asyncio.sleep(pause_s)
            if loop.time() - due_s <= LATE_S:
                return
            pause_s = _REST_S


class Cost:
    """The bytes that a slice has read, and how long (s) nothing is read after it at the least."""

    __slots__ = ("bytes", "rest_s")

    def __init__(self) -> None:
        self.bytes = 0
        self.rest_s = 0.0
