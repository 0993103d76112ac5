"""An event loop whose time is a number: it runs what is due and jumps to the next instant at once.

Everything of a simulated cluster runs on one such loop, in one thread. Each callback belongs to the *life* of
the process that scheduled it (a context variable, which tasks and callbacks inherit). What belongs to a dead
life is never run: so `kill -9` needs nobody's help, and no `finally` of the dead says a last word. What
belongs to a paused one waits until it goes on (SIGSTOP).
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

from laminar.http.api.problems import Problem
from laminar.log.disk.errors import StorageError

T = TypeVar("T")


# A coroutine that waits anew each time that it is closed is left after so many.
CLOSE_TRIES = 20

_LIFE: ContextVar[Life | None] = ContextVar("life", default=None)


class Life:
    """One process from its start to its end."""

    __slots__ = ("alive", "context", "name", "parked", "paused")

    def __init__(self, name: str) -> None:
        self.name = name
        # What callbacks into this life run in; they run one after the other, so one serves all.
        self.context = Context()
        self.context.run(_LIFE.set, self)
        self.alive = True
        self.paused = False
        self.parked: list[SimHandle] = []

    def __repr__(self) -> str:
        return f"<Life {self.name}{'' if self.alive else ' over'}{' paused' if self.paused else ''}>"


class SimHandle:
    """What is to be called, as `asyncio.Handle` and `TimerHandle`; these cost three times as much to make."""

    __slots__ = ("args", "callback", "context", "when_s")

    def __init__(
        self, callback: Callable[..., Any], args: tuple[Any, ...], context: Context, when_s: float
    ) -> None:
        self.callback: Callable[..., Any] | None = callback
        self.args = args
        self.context = context
        self.when_s = when_s

    def cancel(self) -> None:
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return self.when_s


class SimLoop(asyncio.AbstractEventLoop):
    """See the module. `run_until` and `run_until_complete` turn it."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._ready: deque[SimHandle] = deque()
        self._timers: list[tuple[float, int, SimHandle]] = []
        self._nobodys = Context()
        self._number = 0
        self._closed = False
        self._running = False
        # Held for ever, so that no garbage collector closes a coroutine of a dead process and runs its end.
        self.tasks: list[asyncio.Task[Any]] = []
        self.failures: list[BaseException] = []

    # -- time and callbacks ----------------------------------------------------------------

    def time(self) -> float:
        return self._now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> SimHandle:
        handle = SimHandle(callback, args, copy_context() if context is None else context, self._now_s)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> SimHandle:
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> SimHandle:
        # As `call_at`, without a call in between.
        when_s = self._now_s + delay if delay > 0.0 else self._now_s
        handle = SimHandle(callback, args, copy_context() if context is None else context, when_s)
        self._number += 1
        heapq.heappush(self._timers, (when_s, self._number, handle))
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> SimHandle:
        handle = SimHandle(callback, args, copy_context() if context is None else context, when)
        self._number += 1
        heapq.heappush(self._timers, (when, self._number, handle))
        return handle

    def call_in(self, life: Life | None, delay_s: float, callback: Callable[..., Any], *args: Any) -> None:
        """Call back in another life (None: the world's own) after `delay_s` seconds."""
        context = self._nobodys if life is None else life.context
        if delay_s <= 0.0:
            self._ready.append(SimHandle(callback, args, context, self._now_s))
            return
        self._number += 1
        when_s = self._now_s + delay_s
        heapq.heappush(self._timers, (when_s, self._number, SimHandle(callback, args, context, when_s)))

    # -- tasks and futures -----------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: str | None = None,
        context: Context | None = None,
        **options: Any,
    ) -> asyncio.Task[T]:
        task: asyncio.Task[T] = asyncio.Task(coro, loop=self, name=name, context=context)
        self.tasks.append(task)
        return task

    def start(self, life: Life, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task in the life of a process."""
        return self.create_task(work, context=life.context.copy())

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> Any:
        """At once, on this thread: a simulated disk takes its time elsewhere."""
        future = self.create_future()
        try:
            found = func(*args)
        except Exception as error:  # noqa: BLE001  # handed to whoever awaits it
            future.set_exception(error)
        else:
            future.set_result(found)
        return future

    # -- turning ---------------------------------------------------------------------------

    def run_until(self, condition: Callable[[], bool], *, at_most_s: float) -> bool:
        """Turn until the condition holds at the end of an instant; False when `at_most_s` simulated seconds
        went by before.
        """
        return self._run(self._now_s + at_most_s, condition)

    def run_for(self, seconds: float) -> None:
        """Turn for so many simulated seconds."""
        self._run(self._now_s + seconds, _never)

    def run_until_complete(self, future: Any) -> Any:
        task = future if isinstance(future, asyncio.Future) else self.create_task(future)
        assert self.run_until(task.done, at_most_s=1e9), f"{task!r} never ends"
        return task.result()

    def _run(self, end_s: float, condition: Callable[[], bool]) -> bool:
        # One function, as it is what a simulated world does most.
        ready, timers, failures = self._ready, self._timers, self.failures
        take, pop = ready.popleft, heapq.heappop
        self._enter()
        try:
            while True:
                while ready:
                    handle = take()
                    callback = handle.callback
                    if callback is None:
                        continue  # cancelled meanwhile
                    context = handle.context
                    life = context.get(_LIFE)
                    if life is not None:
                        if not life.alive:
                            continue
                        if life.paused:
                            life.parked.append(handle)
                            continue
                    try:
                        context.run(callback, *handle.args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:  # noqa: BLE001  # as a loop tells of it
                        self.call_exception_handler({"message": f"in {callback!r}", "exception": error})
                    if failures:
                        raise failures[0]
                if condition():
                    return True
                while timers and timers[0][2].callback is None:
                    pop(timers)  # cancelled meanwhile
                if not timers or timers[0][0] > end_s:
                    self._now_s = max(self._now_s, end_s)
                    return False
                now_s = self._now_s = max(self._now_s, timers[0][0])
                while timers and timers[0][0] <= now_s:
                    due = pop(timers)[2]
                    if due.callback is not None:
                        ready.append(due)
        finally:
            self._leave()

    def run_in(self, life: Life, callback: Callable[..., Any], *args: Any) -> None:
        """Call into another life within this callback; if it is paused, when it goes on."""
        if life.paused:
            life.parked.append(SimHandle(callback, args, life.context, self._now_s))
        elif life.alive:
            life.context.run(callback, *args)

    def check(self) -> None:
        """Raise what nobody took of the exceptions so far."""
        if self.failures:
            raise self.failures[0]

    def resume(self, life: Life) -> None:
        """SIGCONT: what waited runs now, in its order."""
        life.paused = False
        parked, life.parked = life.parked, []
        self._ready.extend(parked)

    # -- what asyncio asks of a loop -------------------------------------------------------

    def _enter(self) -> None:
        assert not self._running, "this loop turns already"
        self._running = True
        asyncio._set_running_loop(self)

    def _leave(self) -> None:
        self._running = False
        asyncio._set_running_loop(None)

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Let go of everything. The ends of coroutines that were cut off run here, and say nothing.

        They would else run when the collector finds them, in the middle of whatever runs then, on a loop
        that nobody turns.
        """
        self._closed = True
        self._ready.clear()
        self._timers.clear()
        told, sys.unraisablehook = sys.unraisablehook, _say_nothing
        self._enter()
        try:
            for task in self.tasks:
                # Nobody is to hear of tasks that their processes took with them.
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                work = task.get_coro()
                if inspect.iscoroutine(work) and not task.done():
                    _end(work)
            self.tasks.clear()
            self._ready.clear()
            self._timers.clear()
        finally:
            self._leave()
            sys.unraisablehook = told

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """An exception that nobody took: the simulation ends with it.

        Unless it is a future's of a storage that failed, or of a seal that is final: it is told to everybody
        who waits, and whoever waited may be dead by now.
        """
        error = context.get("exception")
        is_told_to_all = isinstance(error, StorageError) or (
            isinstance(error, Problem) and error.code == "sealed"
        )
        if is_told_to_all and "never retrieved" in context.get("message", ""):
            return
        self.failures.append(error if isinstance(error, BaseException) else AssertionError(str(context)))


def _end(work: Coroutine[Any, Any, Any]) -> None:
    """Close a coroutine that was cut off, however it takes that."""
    for _ in range(CLOSE_TRIES):
        try:
            work.close()
        except RuntimeError:
            # It waits once more while it ends, as `Condition.wait` does for its lock; or lacks what it held.
            continue
        except (Exception, asyncio.CancelledError):  # noqa: BLE001  # the last words of the dead
            pass
        return


def _never() -> bool:
    return False


def _say_nothing(broken: object) -> None:
    """What goes wrong while the dead are buried."""


def current_life() -> Life | None:
    """The life of the process whose callback runs now."""
    return _LIFE.get()
