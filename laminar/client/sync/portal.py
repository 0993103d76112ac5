"""A thread with an event loop of its own, through which the sync face runs the async one.

Its own thread, so that it works where a loop is running already (notebooks), and appends go on while the
caller computes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from laminar.client.errors import ConfigError

T = TypeVar("T")

# A signal that comes a moment before its thread begins to wait for a lock is only noted by Python and wakes
# no thread: Ctrl-C would do nothing until something else happens. So a waiting thread wakes up this often.
LOOK_UP_S = 0.5


def wait_until(wait: Callable[[float], object]) -> None:
    """Call `wait(seconds)` until it is true; an interrupt is raised soon, whenever it came."""
    while not wait(LOOK_UP_S):
        pass


def _ended(future: Future[Any], seconds: float) -> bool:
    try:
        future.exception(seconds)
    except TimeoutError:
        return future.done()
    return True


def _tell(done: asyncio.Task[T], future: Future[T]) -> None:
    """Resolve `future` as `done` ended, unless it is resolved already."""
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
    """Runs coroutines for other threads. Running when made; `close` ends it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="laminar-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `work()`, run on the portal's loop; an interrupt here cancels it there.

        `work` is called on the loop too: an interrupt in between would leave a coroutine that is never run.
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
        """Run `work` for `future`, unless the waiting thread was interrupted already. Loop's thread."""
        if future.cancelled():
            return
        try:
            task = self.loop.create_task(work())
        except BaseException as error:  # noqa: BLE001  # raised in the waiting thread, which would else wait for ever
            future.set_exception(error)
            return
        task.add_done_callback(lambda done: _tell(done, future))
        future.add_done_callback(lambda done: self._interrupted(task) if done.cancelled() else None)

    def _interrupted(self, task: asyncio.Task[Any]) -> None:
        """End the task of a waiter that was interrupted; in that thread, or on the loop."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """Stop the loop and its thread. Idempotent."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
