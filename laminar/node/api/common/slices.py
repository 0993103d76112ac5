"""Work over many things: in slices, so that others are answered in between, and once for all who ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Final, Generic, TypeVar

from laminar.node.host.clock import Clock

T = TypeVar("T")

SLICE_MS: Final = 2
"""How long a slice may hold the event loop, but for its last thing; the clock counts whole ms."""
FRESHEST_S: Final = 0.2
COSTS: Final = 20
"""A result is kept this many times as long as it took: so it takes a twentieth of a core at most."""
CHEAP_S: Final = 0.05
"""CPU time that need not be saved."""


class Kept(Generic[T]):
    """The last result of a costly question, which is asked once for all who wait for it.

    It is kept for `keep_s`, or if it was costly `COSTS` times as long as it took of the CPU, unless `version`
    has changed.
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
        """`ask` finds a result. `version` returns a number; a result of another one is not kept."""
        self._ask = ask
        self._clock = clock
        self._keep_s = keep_s
        self._at_most_s = at_most_s
        self._version = version
        self._result: tuple[T, int, int] | None = None
        self._asking: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """Return the result that is kept, or a new one."""
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
    """Call `work` with each thing, and let the loop turn whenever a slice's time is over."""
    until_ms = clock.monotonic_ms() + SLICE_MS
    for each in things:
        work(each)
        if clock.monotonic_ms() >= until_ms:
            await asyncio.sleep(0)
            until_ms = clock.monotonic_ms() + SLICE_MS
