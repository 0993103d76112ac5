"""The pace of one shard's scans: one reads at a time, at a bounded rate, none while the event loop is late.

Scans take turns: each reads one slice in its turn. So a search that reads for hours delays another search
only by single slices, and appends only by the cost of one slice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from laminar.http.api.problems import Problem

MOST_WAITING: Final = 8
"""The most scans that wait for their turns beside the one that reads; more are refused."""
LATE_S: Final = 0.02
_REST_S: Final = 0.1
_MOST_RESTS: Final = 10


class Pace:
    """Gives turns to the scans of one shard, so that they read at most `bytes_per_s`."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._turn = asyncio.Lock()
        self._scans = 0
        self.bytes = 0
        """The bytes read since the start of the process."""

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Count a scan while it runs, and refuse it if there are too many.

        Raises:
            Problem: 503 `overloaded` if one scan reads and `MOST_WAITING` wait for their turn.
        """
        if self._scans > MOST_WAITING:
            raise Problem(
                "overloaded",
                f"{self._scans} searches are already reading on this shard",
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
        """Hold the turn while a slice is read and examined, and then until the rate permits the next slice.

        The reader fills in `cost`. The pause after a slice is at least as long as the work on it.
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
        """Sleep for `pause_s`, and go on sleeping while the event loop is late."""
        loop = asyncio.get_running_loop()
        for _ in range(_MOST_RESTS):
            due_s = loop.time() + pause_s
            await asyncio.sleep(pause_s)
            if loop.time() - due_s <= LATE_S:
                return
            pause_s = _REST_S


class Cost:
    """The cost of a slice: the bytes that it has read, and the shortest pause after it, in seconds."""

    __slots__ = ("bytes", "rest_s")

    def __init__(self) -> None:
        self.bytes = 0
        self.rest_s = 0.0
