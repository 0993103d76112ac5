"""A thread with an event loop, on which the synchronous client runs the asynchronous one.

A thread of its own works also if the caller has a running loop already, as in notebooks, and lets appends
continue while the caller computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from laminar.client.errors import ConfigError, client_closed

T = TypeVar("T")

# If a signal arrives just before a thread begins to wait for a lock, Python notes it but does not wake the
# thread: Ctrl-C would have no effect until the wait ends. So a waiting thread wakes up at this interval.
LOOK_UP_S = 0.5
LAST_S = 10.0
"""Longest wait for tasks that go on though they are cancelled when the portal is closed."""


def wait_until(wait: Callable[[float], object]) -> None:
    """Call `wait(seconds)` until it returns true; an interrupt is raised within `LOOK_UP_S`."""
    while not wait(LOOK_UP_S):
        pass


def _ended(future: Future[Any], seconds: float) -> bool:
    try:
        future.exception(seconds)
    except TimeoutError:
        return future.done()
    return True


class Portal:
    """A thread that runs coroutines for other threads; it starts with the object, and ends with `close`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="laminar-client", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether `close` was called, by any thread."""
        return self._closed

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            # A call that failed in one partition leaves its requests to other partitions under way.
            left = 0
            while len(tasks := asyncio.all_tasks(self.loop)) > left:
                for task in tasks:
                    task.cancel()
                ended, going_on = self.loop.run_until_complete(asyncio.wait(tasks, timeout=LAST_S))
                for task in ended:
                    if not task.cancelled():
                        task.exception()  # which would be logged as never read
                left = len(going_on)
        finally:
            self.loop.close()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine `work()` on the portal's loop and return its result.

        An interrupt of the waiting thread cancels the coroutine. `work` is called on the loop too: if it were
        called here, an interrupt could leave a coroutine that is never run.

        Raises:
            ConfigError: the portal is closed, or this is its own thread.
            OutcomeUnknown: another thread closed it meanwhile.
        """
        if threading.get_ident() == self._thread.ident or self._closed:
            raise ConfigError("the client is closed, or called from its own thread", code="not_open")
        return self._run_on_loop(work)

    def _run_on_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        future: Future[T] = Future()
        try:
            try:
                self.loop.call_soon_threadsafe(self._begin, work, future)
            except RuntimeError:  # its loop was closed a moment ago
                raise client_closed(maybe_applied=False) from None
            wait_until(lambda seconds: _ended(future, seconds) or not self._thread.is_alive())
            if not future.done():  # it came too late to be begun
                raise client_closed(maybe_applied=False)
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _begin(self, work: Callable[[], Coroutine[Any, Any, T]], future: Future[T]) -> None:
        """Start `work` for `future`, unless the waiting thread was interrupted. Called on the loop."""
        if future.cancelled():
            return
        try:
            task = self.loop.create_task(work())
        except BaseException as error:  # noqa: BLE001  # raised in the waiting thread, which would else wait for ever
            future.set_exception(error)
            return
        task.add_done_callback(lambda done: self._copy_outcome(done, future))
        future.add_done_callback(lambda done: self._interrupted(task) if done.cancelled() else None)

    def _copy_outcome(self, done: asyncio.Task[T], future: Future[T]) -> None:
        """Set the result or error of the task `done` on `future`, unless `future` was cancelled."""
        if not future.set_running_or_notify_cancel():
            return
        if done.cancelled():
            future.set_exception(client_closed(maybe_applied=True) if self._closed else CancelledError())
        elif (error := done.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(done.result())

    def _interrupted(self, task: asyncio.Task[Any]) -> None:
        """Cancel the task of a waiting thread that was interrupted; called in that thread or on the loop."""
        with contextlib.suppress(RuntimeError):  # the loop was closed, and has ended it
            self.loop.call_soon_threadsafe(task.cancel)

    def close(self, last: Callable[[], Coroutine[Any, Any, object]] | None = None) -> None:
        """Run `last()`, cancel the tasks that are left, and end the loop and its thread.

        Idempotent; any number of threads may call it, and each returns after the thread has ended. Tasks that
        go on though they are cancelled are given `LAST_S` seconds.
        """
        with self._lock:
            first, self._closed = not self._closed, True
        try:
            if first and last is not None:
                self._run_on_loop(last)
        finally:
            if first:
                self.loop.call_soon_threadsafe(self.loop.stop)
            wait_until(self._join)

    def _join(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()
