"""A limit on the reads that run in threads at a time, shared fairly between readers.

It limits the reads in progress, in number and in bytes, and lets waiting readers start one read each in turn.
Without it one consumer that replays old data would use all threads and all memory, and every other reader
would wait. It knows nothing of files. The loop's thread only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable


class FairLimiter:
    """A limit of `limit` reads and `limit_bytes` bytes in progress; a larger read waits until it runs alone.

    `limit_bytes` may be changed; the next `release` applies it to the reads that wait.
    """

    def __init__(self, *, limit: int, limit_bytes: int) -> None:
        self._limit = limit
        self.limit_bytes = limit_bytes
        self.running = 0
        self.running_bytes = 0
        self.most_running = 0
        # By reader; the reader served next comes first.
        self._waiting: dict[Hashable, deque[tuple[asyncio.Future[None], int]]] = {}

    @property
    def waiting(self) -> int:
        """Number of reads that wait for their start."""
        return sum(map(len, self._waiting.values()))

    async def acquire(self, reader: Hashable, size_bytes: int) -> None:
        """Wait until a read of `size_bytes` may start, and count it as started.

        When the read has ended or failed, the caller must call `release`; it must not if this call raised.
        `reader` is any key by which the reads of one reader are recognised.
        """
        if not self._waiting and self._has_room(size_bytes):
            self._start(size_bytes)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(reader, deque()).append((future, size_bytes))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(size_bytes)
            else:
                future.cancel()
                self._next()
            raise

    def release(self, size_bytes: int) -> None:
        """Count a read of `size_bytes` as ended, and start waiting reads for which there is room now."""
        self.running -= 1
        self.running_bytes -= size_bytes
        self._next()

    def _has_room(self, size_bytes: int) -> bool:
        if not self.running:
            return True
        return self.running < self._limit and self.running_bytes + size_bytes <= self.limit_bytes

    def _start(self, size_bytes: int) -> None:
        self.running += 1
        self.running_bytes += size_bytes
        self.most_running = max(self.most_running, self.running)

    def _next(self) -> None:
        while self._waiting:
            reader, queue = next(iter(self._waiting.items()))
            future, size_bytes = queue[0]
            if not future.done() and not self._has_room(size_bytes):
                return
            queue.popleft()
            del self._waiting[reader]
            if queue:
                self._waiting[reader] = queue
            if not future.done():
                self._start(size_bytes)
                future.set_result(None)
