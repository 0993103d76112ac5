"""Going down at any step of a scripted history, and the starts behind that."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from laminar.log import Storage, StorageClosed, StorageError
from tests.disks.fault_disk import FaultDisk, PowerCut
from tests.log.histories import open_inline, run

H = TypeVar("H")


class Cutter(Generic[H]):
    """Runs scripts, which change a history. `begin` makes one of an open storage."""

    def __init__(self, begin: Callable[[Storage], H]) -> None:
        self._begin = begin

    def steps(self, script: Callable[[H], Awaitable[None]]) -> int:
        """How many there are to cut it at."""
        disk = FaultDisk()
        run(self._perform(script, disk))
        return disk.steps

    def truncate(self, script: Callable[[H], Awaitable[None]], step: int) -> tuple[FaultDisk, H | None]:
        """The disk at that step, and the history: None when it was over before the storage was open.

        What the disk then keeps is for the caller to say, by `kill` or `crash`.
        """
        disk = FaultDisk()
        disk.cut_after = step
        return disk, run(self._perform(script, disk))

    async def _perform(self, script: Callable[[H], Awaitable[None]], disk: FaultDisk) -> H | None:
        try:
            storage = open_inline(disk)
        except PowerCut:
            return None
        history = self._begin(storage)
        try:
            await script(history)
        except (StorageClosed, PowerCut):
            pass
        for _ in range(5):
            await asyncio.sleep(0)
        return history


async def start_again(disk: FaultDisk, rng: random.Random, go_down: Callable[[], None]) -> Storage:
    """Recover, possibly only after some starts that are cut off themselves and end by `go_down`."""
    for _ in range(rng.choice([0, 0, 1, 2])):
        disk.cut_after = disk.steps + rng.randrange(1, 40)
        try:
            await open_inline(disk, seed=rng.getrandbits(30)).close()
        except (PowerCut, StorageError):
            pass
        go_down()
    return open_inline(disk, seed=rng.getrandbits(30))
