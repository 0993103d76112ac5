"""The shares of one loop: bulk waits, so that small appends and Raft do not.

All partitions of a loop share a journal, here and on each follower. What comes there waits for all that came
before it. A client that has 50 MB on their way gains nothing by that, as the disk is no faster, but an append
of one record waits for all of it, and so does the next. So bulk begins when there is room: at most
`ALONE_BYTES` are between there and their commit, and `BESIDE_BYTES` while another client appends something
small. Then each also rests as long as it took, in which the disk is the other's: so bulk has half of the
time. What waits begins by turns of those who wait.

Small appends pass by. Raft's own messages, a follower's entries among them, never come here. A group without
a majority commits nothing, and must not keep the bulk of all others: what is on its way for longer than
`HELD_S` counts no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from laminar.log.disk.fair_queue import FairLimiter

BULK_BYTES: Final = 64 * 1024
"""Larger bodies are bulk."""

ALONE_BYTES: Final = 16 << 20
"""Bytes of bulk on their way while no other connection appends. What is larger than the room goes alone."""

BESIDE_BYTES: Final = 1 << 20
"""The same beside the small appends of others."""

QUIET_S: Final = 0.5
"""After this time without a small append bulk is alone again."""

HELD_S: Final = 1.0
_LONGEST_REST_S: Final = 0.25
_MOST: Final = 1 << 20


class Bulk:
    """The bulk of one loop, and whether others append something small beside it."""

    def __init__(self) -> None:
        """Begin with all of the room."""
        self._limiter = FairLimiter(limit=_MOST, limit_bytes=ALONE_BYTES)
        self._smalls = self._smalls_seen = 0
        # Where bulk came from last: a producer's own small appends, as its last ones, do not count.
        self._from: object = None
        self._beside_until_s = 0.0
        self._waits = self._rests = self._taken_bytes = 0

    def small(self, source: object) -> None:
        """Note a small append, which waits for nothing here; `source` is its connection or client."""
        if source != self._from:
            self._smalls += 1

    @asynccontextmanager
    async def share(self, who: str, size_bytes: int, source: object = None) -> AsyncIterator[None]:
        """Wait until there is room for `size_bytes` of a client; they are on their way until the end."""
        loop, limiter = asyncio.get_running_loop(), self._limiter
        self._look(loop.time())
        self._waits += bool(limiter.waiting or limiter.running_bytes + size_bytes > limiter.limit_bytes)
        await limiter.acquire(who, size_bytes)
        self._from = source
        self._taken_bytes += size_bytes
        began_s, held = loop.time(), [size_bytes]

        def release() -> None:
            if held:
                limiter.release(held.pop())

        timer = loop.call_later(HELD_S, release)
        try:
            yield
        finally:
            timer.cancel()
            now_s = loop.time()
            self._look(now_s)
            if now_s < self._beside_until_s and held:
                self._rests += 1
                loop.call_later(min(now_s - began_s, _LONGEST_REST_S), release)
            else:
                release()

    def _look(self, now_s: float) -> None:
        """Note whether others have appended since the last look, and give room accordingly."""
        if self._smalls != self._smalls_seen:
            self._smalls_seen = self._smalls
            self._beside_until_s = now_s + QUIET_S
        self._limiter.limit_bytes = BESIDE_BYTES if now_s < self._beside_until_s else ALONE_BYTES

    def statistics(self) -> dict[str, int]:
        """Return gauges of what is on its way and of what waits, and counts of what waited and rested."""
        return {
            "on_their_way_bytes": self._limiter.running_bytes,
            "waiting": self._limiter.waiting,
            "waits": self._waits,
            "rests": self._rests,
            "bytes": self._taken_bytes,
        }
