"""The two clocks of a process: a monotonic one, and the wall clock.

Protocol deadlines use `monotonic_ms`; batch stamps use `wall_ms`. Both are passed in wherever they are
needed, so that a test or a simulator can use its own.
"""

from __future__ import annotations

import time


class Clock:
    """The machine's clocks, in whole milliseconds."""

    __slots__ = ()

    def monotonic_ms(self) -> int:
        """Return milliseconds since an arbitrary instant; never goes back."""
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        """Return milliseconds since the Unix epoch; may step."""
        return time.time_ns() // 1_000_000
