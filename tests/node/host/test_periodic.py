"""Looks of a process: few timers, and nothing is looked at twice at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from laminar.node.host.periodic import PeriodicTasks
from tests.sim.loop import SimLoop


class _Owner:
    """Spawns work, and keeps what failed."""

    def __init__(self) -> None:
        self.loop = SimLoop()  # type: ignore[abstract]  # sockets and signals: nobody has any here
        self.failures: list[BaseException] = []
        self.rounds: PeriodicTasks

    async def begin(self) -> None:
        self.rounds = PeriodicTasks(spawn=self.spawn, on_error=self.failures.append)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self.loop.create_task(work)


def _owner() -> _Owner:
    owner = _Owner()
    owner.loop.run_until_complete(owner.begin())
    return owner


def test_looks_that_come_equally_often_share_a_timer() -> None:
    """An idle process turns its loop once for all of them."""
    owner = _owner()
    seen: list[tuple[str, float]] = []
    for name in ("one", "two", "three"):
        owner.rounds.every(1.0, lambda name=name: seen.append((name, owner.loop.time())))  # type: ignore[misc]
    owner.rounds.every(0.5, lambda: seen.append(("often", owner.loop.time())))

    owner.loop.run_for(1.2)

    assert [("often", 0.5), ("one", 1.0), ("two", 1.0), ("three", 1.0), ("often", 1.0)] == seen
    assert 2 == len(owner.loop._timers)
    owner.loop.close()


def test_nothing_is_looked_at_while_what_was_found_there_is_dealt_with() -> None:
    """The other looks go on meanwhile."""
    owner = _owner()
    begun: list[float] = []
    others: list[float] = []

    async def work() -> None:
        begun.append(owner.loop.time())
        await asyncio.sleep(2.5)

    owner.rounds.every(1.0, work)
    owner.rounds.every(1.0, lambda: others.append(owner.loop.time()))

    owner.loop.run_for(5.1)

    assert [1.0, 4.0] == begun
    assert [1.0, 2.0, 3.0, 4.0, 5.0] == others
    owner.loop.close()


def test_a_look_that_raises_is_told_of() -> None:
    """The process ends over it, as over a task that fails."""
    owner = _owner()
    error = ValueError("no")

    def look() -> None:
        raise error

    owner.rounds.every(1.0, look)
    owner.loop.run_for(1.1)

    assert [error] == owner.failures
    owner.loop.close()


def test_after_the_end_nobody_looks() -> None:
    """Nor are looks taken on."""
    owner = _owner()
    seen: list[int] = []
    owner.rounds.every(1.0, lambda: seen.append(1))

    owner.rounds.close()
    owner.rounds.every(0.5, lambda: seen.append(2))
    owner.loop.run_for(3.0)

    assert [] == seen
    owner.loop.close()
