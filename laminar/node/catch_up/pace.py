"""A limit of a rate in bytes per second, which saves up no more than one second's worth."""

from __future__ import annotations

import asyncio


class Pace:
    """A limit on bytes per second; callers that share it are served in order of arrival."""

    def __init__(self, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    async def take(self, size_bytes: int) -> None:
        """Wait until `size_bytes` more may be moved."""
        now_s = asyncio.get_running_loop().time()
        start_s = max(self._free_at_s, now_s)
        self._free_at_s = start_s + size_bytes / self.bytes_per_s
        if start_s > now_s:
            await asyncio.sleep(start_s - now_s)
