"""Retry what failed because the disk was full, until it succeeds.

While the disk has no room for a checkpoint or the next journal file, appends are refused. Then no frame
arrives that would trigger another attempt, so a timer on the loop triggers it, as long as something is
missing. This module knows neither journal nor checkpoints: the caller says what one attempt is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class DiskFullRetry:
    """A timer that retries failed operations, by name, after a pause. The loop's thread only."""

    def __init__(
        self,
        loop: Callable[[], asyncio.AbstractEventLoop],
        *,
        pause_ms: int,
        attempt: Callable[[set[str]], None],
    ) -> None:
        """Make a timer that calls `attempt`, `pause_ms` after a `request`.

        `attempt` gets the names of all operations requested until then, and must call `request` again for
        each that fails again. `loop` returns the event loop.
        """
        self._loop = loop
        self._pause_ms = pause_ms
        self._attempt = attempt
        self._missing: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def request(self, what: str) -> None:
        """Retry the operation named `what` after the pause, or with those that wait already."""
        self._missing.add(what)
        if self._timer is None and not self._closed:
            self._timer = self._loop().call_later(self._pause_ms / 1000, self._try)

    def _try(self) -> None:
        self._timer = None
        missing, self._missing = self._missing, set()
        self._attempt(missing)

    def close(self) -> None:
        """Stop the timer; later requests do nothing."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
