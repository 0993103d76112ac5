"""Executors for blocking work: each has one thread, for one kind of work, and runs its tasks in order.

The interface has only two methods, so that tests and the simulator can run the same storage in one thread, in
an order of their choice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol


class SerialExecutor(Protocol):
    """Runs tasks one after the other, in the order in which they were submitted. Tasks must not raise."""

    def submit(self, task: Callable[[], None]) -> None:
        """Run `task` after all tasks submitted before."""

    def close(self) -> None:
        """Wait until every task submitted before has ended, then release the executor."""


class SerialThreadExecutor:
    """A serial executor with a thread of its own, started with the first task."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, task: Callable[[], None]) -> None:
        """Run `task` in the thread after all tasks submitted before; the first starts the thread."""
        if self._thread is None:
            # A daemon thread: a process that ends without closing its storage is a crash like any
            # other.
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def close(self) -> None:
        """Wait until every task submitted before has ended, and end the thread."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None


class SerialInlineExecutor:
    """Runs each task at once in the caller's thread: for tests that must be reproducible."""

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, task: Callable[[], None]) -> None:
        """Run `task` now, in the caller's thread."""
        task()

    def close(self) -> None:
        """Do nothing: every task has ended already."""
        return None
