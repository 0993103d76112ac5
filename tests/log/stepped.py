"""Workers whose tasks run one at a time, in an order drawn from a seed: threads without their chance.

Each worker keeps the order of its own tasks, as a thread does; whose turn comes next is drawn. So a
checkpoint's steps fall between any two frames, and a failing run can be repeated.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from laminar.log import Storage
from laminar.log.disk.disk import Disk
from laminar.log.format.settings import StorageSettings
from tests.log.histories import HOME, LOGS, InlineExecutor

Task = Callable[[], None]
T = TypeVar("T")


class _Worker:
    def __init__(self) -> None:
        self.tasks: deque[Task] = deque()

    def submit(self, task: Task) -> None:
        self.tasks.append(task)

    def close(self) -> None:
        while self.tasks:
            self.tasks.popleft()()


class Steps:
    """The workers of one storage. `held` names those whose tasks wait."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.workers: dict[str, _Worker] = {}
        self.held: set[str] = set()

    def worker(self, name: str) -> _Worker:
        return self.workers.setdefault(name, _Worker())

    def step(self) -> bool:
        """Run the next task of a worker drawn from those that have one."""
        ready = [worker for name, worker in self.workers.items() if worker.tasks and name not in self.held]
        if not ready:
            return False
        self._rng.choice(ready).tasks.popleft()()
        return True

    async def drain(self) -> None:
        """Go on until nothing is left to do but what is held."""
        idle = 0
        while idle < 3:
            idle = 0 if self.step() else idle + 1
            await asyncio.sleep(0)

    async def until(self, done: Awaitable[T]) -> T:
        """Go on until `done` is."""
        future = asyncio.ensure_future(done)
        for _ in range(10_000):
            if future.done():
                return future.result()
            self.step()
            await asyncio.sleep(0)
        raise AssertionError(f"not done, and held is {self.held}")

    async def run(self) -> None:
        """Go on for ever, one task in a turn of the loop, so that the test's own coroutine runs between."""
        while True:
            self.step()
            await asyncio.sleep(0)


def open_stepped(disk: Disk, steps: Steps, *, settings: StorageSettings, seed: int = 1) -> Storage:
    """A storage whose threads are `steps`."""
    return Storage.open(
        disk,
        HOME,
        LOGS,
        settings=settings,
        rng=random.Random(seed),
        workers=steps.worker,
        readers=InlineExecutor(),
    )
