"""Fair shares of one event loop: bulk (large bodies) waits, so that small appends and Raft do not.

All partitions of a loop share a journal, here and on each follower, which writes in the order of arrival. A
client with 50 MB under way (not committed yet) gains nothing by that, because the disk is no faster, but an
append of one record has to wait for all of it, and so does the next. So bulk begins only when there is room:
at most `ALONE_BYTES` are under way, and at most `BESIDE_BYTES` while another client appends small bodies. In
the latter case the room of each bulk append stays taken after its commit for as long as it was under way
(0.25 s at most), so bulk uses half of the disk's time. Waiting clients begin in turns.

Small appends do not wait. Raft's own messages, a follower's entries among them, never come here. A group
without a majority commits nothing, and must not block the bulk of all others: an append that is under way for
longer than `HELD_S` no longer counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from laminar.log.disk.fair_queue import FairLimiter

BULK_BYTES: Final = 64 * 1024
"""Bodies of more bytes than this are bulk."""

ALONE_BYTES: Final = 16 << 20
"""The most bytes of bulk under way while no other client appends small bodies; a larger body goes alone."""

BESIDE_BYTES: Final = 1 << 20
"""The most bytes of bulk under way while other clients append small bodies."""

QUIET_S: Final = 0.5
"""The time after another client's last small append for which `BESIDE_BYTES` applies."""

HELD_S: Final = 1.0
_LONGEST_REST_S: Final = 0.25
_MOST: Final = 1 << 20


class Bulk:
    """Limits the bulk of one event loop, more strictly while other clients append small bodies."""

    def __init__(self) -> None:
        """Begin with all of the room free."""
        self._limiter = FairLimiter(limit=_MOST, limit_bytes=ALONE_BYTES)
        self._smalls = self._smalls_seen = 0
        # The source of the last bulk: its own small appends, like the rest of a large upload, do not count.
        self._from: object = None
        self._beside_until_s = 0.0
        self._waits = self._rests = self._taken_bytes = 0

    def small(self, source: object) -> None:
        """Count a small append, which does not wait here; `source` is its connection or client."""
        if source != self._from:
            self._smalls += 1

    @asynccontextmanager
    async def share(self, who: str, size_bytes: int, source: object = None) -> AsyncIterator[None]:
        """Wait until there is room for `size_bytes` of a client; they count as under way until the exit."""
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
        """Set the limit by whether other clients have appended small bodies since the last check."""
        if self._smalls != self._smalls_seen:
            self._smalls_seen = self._smalls
            self._beside_until_s = now_s + QUIET_S
        self._limiter.limit_bytes = BESIDE_BYTES if now_s < self._beside_until_s else ALONE_BYTES

    def statistics(self) -> dict[str, int]:
        """Return gauges of bulk under way and waiting, and counts of its waits and rests."""
        return {
            "on_their_way_bytes": self._limiter.running_bytes,
            "waiting": self._limiter.waiting,
            "waits": self._waits,
            "rests": self._rests,
            "bytes": self._taken_bytes,
        }
