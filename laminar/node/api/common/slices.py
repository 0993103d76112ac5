"""Two tools for costly work on the event loop: `in_slices` yields in between, `Kept` caches a result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Final, Generic, TypeVar

from laminar.node.host.clock import Clock

T = TypeVar("T")

SLICE_MS: Final = 2
"""How long a slice may occupy the event loop, apart from its last item; the clock counts whole ms."""
FRESHEST_S: Final = 0.2
COSTS: Final = 20
"""A result is cached this many times as long as it took: so the work takes a twentieth of a core at most."""
CHEAP_S: Final = 0.05
"""A result that took less CPU time than this is not cached longer because of its cost."""


class Kept(Generic[T]):
    """A cache of the result of a costly function; callers that wait at the same time share one call.

    The result is cached for `keep_s`, or, if it was costly, for `COSTS` times the CPU time that it took. It
    is dropped earlier if `version` changes.
    """

    def __init__(
        self,
        ask: Callable[[], Coroutine[None, None, T]],
        *,
        clock: Clock,
        version: Callable[[], int] = lambda: 0,
        keep_s: float = FRESHEST_S,
        at_most_s: float = 60.0,
    ) -> None:
        """Create a cache of results of `ask`, each valid only while `version` returns the same number."""
        self._ask = ask
        self._clock = clock
        self._keep_s = keep_s
        self._at_most_s = at_most_s
        self._version = version
        self._result: tuple[T, int, int] | None = None
        self._asking: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """Return the cached result if it is valid, or a new one."""
        if self._result is not None:
            result, version, until_ms = self._result
            if version == self._version() and self._clock.monotonic_ms() < until_ms:
                return result
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._ask_now())
        return await asyncio.shield(self._asking)

    async def _ask_now(self) -> T:
        version, began_s = self._version(), time.thread_time()
        result = await self._ask()
        kept_s = self._kept_s(time.thread_time() - began_s)
        self._result = result, version, self._clock.monotonic_ms() + int(1000 * kept_s)
        return result

    def _kept_s(self, took_s: float) -> float:
        costs_s = COSTS * took_s if took_s > CHEAP_S else 0.0
        return min(max(self._keep_s, costs_s), self._at_most_s)


async def in_slices(things: Iterable[T], work: Callable[[T], None], *, clock: Clock) -> None:
    """Call `work` with each item, and yield to the event loop whenever a slice's time is over."""
    until_ms = clock.monotonic_ms() + SLICE_MS
    for each in things:
        work(each)
        if clock.monotonic_ms() >= until_ms:
            await asyncio.sleep(0)
            until_ms = clock.monotonic_ms() + SLICE_MS
