"""Periodic checks of a process: one timer for all checks with the same period.

A check is a plain function, so one that finds nothing to do costs neither a task nor a wake-up of its own: an
idle process turns its loop a few times a second, however many checks it has. Work that a check finds is a
coroutine; it runs as a task, and until it is done that check is skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

Work = Coroutine[Any, Any, None]
Check = Callable[[], Work | None]


class _Entry:
    """One check, with the work that it found last."""

    __slots__ = ("check", "work")

    def __init__(self, check: Check) -> None:
        self.check = check
        self.work: asyncio.Task[None] | None = None


class PeriodicTasks:
    """Calls the periodic checks of one process, and runs the work that they return.

    `spawn(work)` makes a task of the work that a check returned. `on_error(error)` gets the exception of a
    check that raised one; the checks after it are skipped this time.
    """

    def __init__(
        self, *, spawn: Callable[[Work], asyncio.Task[None]], on_error: Callable[[BaseException], None]
    ) -> None:
        self._spawn = spawn
        self._on_error = on_error
        self._loop = asyncio.get_running_loop()
        self._entries: dict[float, list[_Entry]] = {}
        self._timers: dict[float, asyncio.TimerHandle] = {}
        self._closed = False

    def every(self, period_s: float, check: Check) -> None:
        """Call `check` every `period_s` seconds; the first call comes after at most that long."""
        if self._closed:
            return
        self._entries.setdefault(period_s, []).append(_Entry(check))
        if period_s not in self._timers:
            self._timers[period_s] = self._loop.call_later(period_s, self._round, period_s)

    def close(self) -> None:
        """Stop the checks. Work that has begun goes on."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()

    def _round(self, period_s: float) -> None:
        # Planned from now on, so a late loop checks less often, and never twice to make up for it.
        self._timers[period_s] = self._loop.call_later(period_s, self._round, period_s)
        for entry in tuple(self._entries[period_s]):
            if entry.work is not None:
                if not entry.work.done():
                    continue
                entry.work = None
            try:
                work = entry.check()
            except Exception as error:  # noqa: BLE001  # the owner ends the process
                self._on_error(error)
                return
            if work is not None:
                entry.work = self._spawn(work)
