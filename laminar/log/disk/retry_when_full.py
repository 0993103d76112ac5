"""What a full disk stopped is tried again, until it works.

While the disk has no room for a checkpoint or for the next journal file, appends are refused. Then no frame
comes that could ask for either, so somebody else must: a timer on the loop, running only while something is
missing. It knows neither journal nor checkpoints: its caller says what one more try is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class DiskFullRetry:
    """One timer; all methods are the loop's."""

    def __init__(
        self,
        loop: Callable[[], asyncio.AbstractEventLoop],
        *,
        pause_ms: int,
        attempt: Callable[[set[str]], None],
    ) -> None:
        """`attempt` begins what is missing, by name; if that fails again, its end calls `request` again."""
        self._loop = loop
        self._pause_ms = pause_ms
        self._attempt = attempt
        self._missing: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def request(self, what: str) -> None:
        """It could not be made: try it in `pause_ms`."""
        self._missing.add(what)
        if self._timer is None and not self._closed:
            self._timer = self._loop().call_later(self._pause_ms / 1000, self._try)

    def _try(self) -> None:
        self._timer = None
        missing, self._missing = self._missing, set()
        self._attempt(missing)

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
