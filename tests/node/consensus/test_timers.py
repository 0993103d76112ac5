"""Deadlines of many groups in one heap: each is told in time, and one timer of the loop stands for all."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from laminar.node.consensus.timers import MOST_DUE, Timers
from laminar.node.host.clock import Clock


class Counted(Timers):
    """Counts how often it is called."""

    ticks = 0

    def _tick(self) -> None:
        self.ticks += 1
        super()._tick()


class Groups:
    """So many groups that are due at the same instant, again and again."""

    def __init__(self, number: int, *, interval_ms: int) -> None:
        self.interval_ms = interval_ms
        self.told = 0
        self.clock = Clock()
        self.due_ms = self.clock.monotonic_ms() + interval_ms
        self.timers = Counted(
            self.clock,
            heartbeat_ms=10_000,
            drives=lambda replica: True,
            on_due=self._on_due,
            on_stall=lambda late_ms: None,
            on_failed=lambda replica, error: self._raise(error),
            on_error=self._raise,
        )
        self.replicas = [self._made() for _ in range(number)]
        for replica in self.replicas:
            self.timers.schedule(replica)

    def _made(self) -> Any:
        replica = SimpleNamespace(scheduled_ms=None, due_ms=self.due_ms)
        replica.core = SimpleNamespace(deadline_ms=lambda: replica.due_ms)
        return replica

    def _on_due(self, replica: Any, now_ms: int) -> None:
        self.told += 1
        replica.due_ms += self.interval_ms
        self.timers.schedule(replica)

    def _raise(self, error: BaseException) -> None:
        raise error


async def test_one_timer_stands_for_all_groups_also_when_many_are_due_at_once() -> None:
    """What is left for another turn replaces the timer and does not add to it."""
    groups = Groups(4 * MOST_DUE + 1, interval_ms=50)
    ticks = []
    async with asyncio.timeout(20):
        for interval in range(1, 13):
            while groups.told < interval * len(groups.replicas):  # noqa: ASYNC110  # counted from within
                await asyncio.sleep(0.002)
            ticks.append(groups.timers.ticks)
    groups.timers.close()
    # Five turns for those that are due, and as many in which nothing is due yet.
    assert ticks[-1] - ticks[-3] <= 2 * 10, ticks
