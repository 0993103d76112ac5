"""A limit on a rate, in bytes per second, without bursts: idle time earns no credit for later."""

from __future__ import annotations

import asyncio


class Pace:
    """A limit on the bytes per second of all callers together, which are served in order of arrival."""

    def __init__(self, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    async def take(self, size_bytes: int) -> None:
        """Wait until the earlier callers' bytes have had their time; then `size_bytes` may be moved.

        After idle time there is no wait, whatever the size: `size_bytes` delays only the calls that follow.
        """
        now_s = asyncio.get_running_loop().time()
        start_s = max(self._free_at_s, now_s)
        self._free_at_s = start_s + size_bytes / self.bytes_per_s
        if start_s > now_s:
            await asyncio.sleep(start_s - now_s)

    def correct(self, difference_bytes: int) -> None:
        """Add to the bytes passed to `take` (negative: subtract), because more or fewer were moved."""
        self._free_at_s += difference_bytes / self.bytes_per_s
