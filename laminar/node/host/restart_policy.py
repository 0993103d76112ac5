"""The policy by which a child that died is started again: at once, then after growing pauses, then never.

Pure: its inputs are the instants of deaths, its outputs pauses.
"""

from __future__ import annotations

from collections import deque

RESTARTS_IN_WINDOW = 5
WINDOW_MS = 60_000
FIRST_PAUSE_MS = 100
LONGEST_PAUSE_MS = 5_000


class RestartPolicy:
    """Counts the deaths of one child and gives the pause before its next start.

    After its sixth death within a minute the child is not started again. After a minute without a death the
    next start is at once again.
    """

    def __init__(self) -> None:
        self._deaths_ms: deque[int] = deque()

    def died(self, *, now_ms: int) -> int | None:
        """Count a death; return the ms until the next start, or None if there is to be no other start."""
        while self._deaths_ms and now_ms - self._deaths_ms[0] >= WINDOW_MS:
            self._deaths_ms.popleft()
        before = len(self._deaths_ms)
        self._deaths_ms.append(now_ms)
        if before >= RESTARTS_IN_WINDOW:
            return None
        return 0 if before == 0 else min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS * 4 ** (before - 1))
