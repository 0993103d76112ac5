"""Executors for blocking work: one thread per kind of work, fed in order.

The interface has two calls, so that tests and the simulator can run the same storage in one thread, in an
order of their choice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol


class SerialExecutor(Protocol):
    """Runs tasks one after the other, in the order submitted. Tasks do not raise."""

    @property
    def runs_here(self) -> bool:
        """Whether `run_here` may run a task."""

    def submit(self, task: Callable[[], None]) -> None:
        """Run `task` after all tasks submitted before."""

    def run_here(self, task: Callable[[], None]) -> bool:
        """Run `task` in the caller's thread if every task submitted before has ended; return whether it ran.

        What is submitted meanwhile runs after it.
        """

    def close(self) -> None:
        """Return when every task submitted before has ended."""


class SerialThreadExecutor:
    """A serial executor with a thread of its own, started with the first task."""

    runs_here = True

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # Tasks that were submitted and have not ended, and the right to run one.
        self._left = 0
        self._counting = threading.Lock()
        self._running = threading.Lock()

    def submit(self, task: Callable[[], None]) -> None:
        """Run `task` in the thread after all tasks submitted before; the first starts the thread."""
        if self._thread is None:
            # A daemon thread: a process that ends without closing its storage is a crash like any
            # other.
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        with self._counting:
            self._left += 1
        self._tasks.put(task)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            with self._running:
                task()
            with self._counting:
                self._left -= 1

    def run_here(self, task: Callable[[], None]) -> bool:
        """Run `task` in the caller's thread if every task submitted before has ended; return whether it ran.

        What is submitted meanwhile waits for it, in the thread.
        """
        with self._counting:
            if self._left or not self._running.acquire(blocking=False):
                return False
        try:
            task()
        finally:
            self._running.release()
        return True

    def close(self) -> None:
        """End the thread when every task submitted before has ended."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None


class SerialInlineExecutor:
    """Runs each task at once in the caller's thread: for tests that must be reproducible."""

    runs_here = False

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, task: Callable[[], None]) -> None:
        """Run `task` now, in the caller's thread."""
        task()

    def run_here(self, task: Callable[[], None]) -> bool:
        """Return False: `submit` runs tasks in the caller's thread."""
        return False

    def close(self) -> None:
        """Do nothing: every task has ended already."""
        return None
