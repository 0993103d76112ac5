"""A limit on a rate, in bytes per second. Idle time saves nothing up for later."""

from __future__ import annotations

import asyncio


class Pace:
    """A limit on the bytes per second of all callers together, which are served in order of arrival."""

    def __init__(self, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    async def take(self, size_bytes: int) -> None:
        """Wait until the bytes taken before have used up their time; then `size_bytes` may be moved.

        After idle time there is no wait, whatever the size: it only delays the calls that follow.
        """
        now_s = asyncio.get_running_loop().time()
        start_s = max(self._free_at_s, now_s)
        self._free_at_s = start_s + size_bytes / self.bytes_per_s
        if start_s > now_s:
            await asyncio.sleep(start_s - now_s)

    def correct(self, difference_bytes: int) -> None:
        """Count bytes that were moved beyond those taken; fewer, if negative."""
        self._free_at_s += difference_bytes / self.bytes_per_s
