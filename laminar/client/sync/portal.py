"""A thread with an event loop, on which the synchronous client runs the asynchronous one.

A thread of its own works also if the caller has a running loop already, as in notebooks, and lets appends
continue while the caller computes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from laminar.client.errors import ConfigError

T = TypeVar("T")

# If a signal arrives just before a thread begins to wait for a lock, Python notes it but does not wake the
# thread: Ctrl-C would have no effect until the wait ends. So a waiting thread wakes up at this interval.
LOOK_UP_S = 0.5


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


def _copy_outcome(done: asyncio.Task[T], future: Future[T]) -> None:
    """Set the result or error of the task `done` on `future`, unless `future` was cancelled."""
    error = None if done.cancelled() else done.exception()
    if not future.set_running_or_notify_cancel():
        return
    if done.cancelled():
        future.set_exception(CancelledError())
    elif error is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())


class Portal:
    """A thread that runs coroutines for other threads; it starts with the object, and ends with `close`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="laminar-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine `work()` on the portal's loop and return its result.

        An interrupt of the waiting thread cancels the coroutine. `work` is called on the loop too: if it were
        called here, an interrupt could leave a coroutine that is never run.
        """
        if threading.get_ident() == self._thread.ident or self.loop.is_closed():
            raise ConfigError("the client is closed, or called from its own thread", code="not_open")
        future: Future[T] = Future()
        try:
            self.loop.call_soon_threadsafe(self._begin, work, future)
            wait_until(lambda seconds: _ended(future, seconds))
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
        task.add_done_callback(lambda done: _copy_outcome(done, future))
        future.add_done_callback(lambda done: self._interrupted(task) if done.cancelled() else None)

    def _interrupted(self, task: asyncio.Task[Any]) -> None:
        """Cancel the task of a waiting thread that was interrupted; called in that thread or on the loop."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """Cancel the tasks that are left, stop the loop and its thread. Idempotent.

        A call that failed in one partition leaves its requests to other partitions under way.
        """
        if self.loop.is_closed():
            return
        try:
            self.run(_end_tasks)
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()


async def _end_tasks() -> None:
    """Cancel all other tasks of the running loop, and wait until they have ended."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
