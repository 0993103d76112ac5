"""A budget for bytes that peers have sent and the disk has not taken yet.

Raft's window bounds each group by itself; a process of a thousand groups whose disk does not respond would
take a thousand windows into memory. So above a budget nothing more is read from the connections that carry
entries: their senders' queues fill, and what does not fit there is dropped and sent again later. The
connections for answers and heartbeats are read all the time, so no peer is taken for dead, and two nodes that
have both stopped reading still report to each other what they have stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

# As much as eight groups' windows of unacknowledged appends.
RECEIVE_BUDGET_BYTES: Final = 64 << 20


class ReceiveBudget:
    """Counts received bytes from the loop turn that processed their frames until their entries are on disk.

    `pause` is called when more than `limit_bytes` wait, `resume` once at most half of `limit_bytes` do.
    """

    def __init__(self, limit_bytes: int, *, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        self._limit_bytes = limit_bytes
        self._pause = pause
        self._resume = resume
        # Of this turn; `hold` takes them.
        self.turn_bytes = 0
        self.waiting_bytes = 0
        self.pauses = 0
        self.paused = False

    def received(self, size: int) -> None:
        """Count a frame of `size` bytes taken in this turn."""
        self.turn_bytes += size

    def forget(self) -> None:
        """Stop counting the turn's bytes, because none of them are written."""
        self.turn_bytes = 0

    def hold(self) -> int:
        """Count the turn's bytes as waiting until `release` is called with the number returned."""
        size, self.turn_bytes = self.turn_bytes, 0
        self.waiting_bytes += size
        if not self.paused and self.waiting_bytes > self._limit_bytes:
            self.paused = True
            self.pauses += 1
            self._pause()
        return size

    def release(self, size: int) -> None:
        """Stop counting these bytes: their entries are on disk, or never will be."""
        self.waiting_bytes -= size
        if self.paused and self.waiting_bytes <= self._limit_bytes // 2:
            self.paused = False
            self._resume()
