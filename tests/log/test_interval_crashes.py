"""Random histories of a log whose policy changes, each cut off at random steps in every way.

The scripts of `test_intervals` are cut at every step; here the scripts are drawn too.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from laminar.log.errors import BrokenChain
from laminar.log.policy import COMMIT, FlushPolicy
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import contents, open_inline, run
from tests.log.test_intervals import NEVER, IntervalHistory, Script, _perform, _reopen, _steps

HISTORIES = 60
CUTS = 5


def _drawn(seed: int) -> Script:
    """A history of 5 to 30 changes."""

    async def script(h: IntervalHistory) -> None:
        rng = random.Random(seed)
        h.create(rng.choice([NEVER, COMMIT]))
        cut: list[tuple[int, list[bytes]]] = []
        for number in range(rng.randrange(5, 30)):
            dice = rng.random()
            log = h.log
            if dice < 0.45:
                value = bytes([number]) * rng.choice([10, 100, 450, 600, 900])
                term = max(log.last_term, 1) + (rng.random() < 0.3)
                h.write(value, term=term, opens=True if rng.random() < 0.15 else None)
            elif dice < 0.6 and log.last_index > log.start.index:
                index = rng.randrange(log.first_index, log.last_index + 1)
                frames = contents(log)[index - log.first_index :]
                h.truncate(index)
                cut.append((index, frames))
                if rng.random() < 0.5:
                    for frame in frames:
                        h.again(frame)
            elif dice < 0.65 and cut and log.last_index == cut[-1][0] - 1:
                try:
                    h.again(cut[-1][1][0])
                except BrokenChain:
                    pass  # what came instead since has another term
            elif dice < 0.75:
                await h.settle()
            elif dice < 0.83:
                await h.sync_segments()
            elif dice < 0.88:
                await h.storage.checkpoint()
            elif dice < 0.92 and log.durable_index > log.start.index:
                await h.settle()
                h.set_start(rng.randrange(log.first_index, log.last_index + 1))
            elif dice < 0.96:
                policy = rng.choice([COMMIT, NEVER, FlushPolicy(interval_ms=3_000_000)])
                change = asyncio.ensure_future(h.storage.set_policy(log, policy))
                await asyncio.sleep(0)
                if rng.random() < 0.7:
                    h.write(b"p" * rng.choice([5, 700]))
                await change
            else:
                h.storage._intervals.say_synced()
                await h.storage.sync()
        await h.settle()

    return script


def _go_down(script: Script, way: str, step: int, rng: random.Random) -> None:
    disk = FaultDisk()
    disk.cut_after = step
    history = run(_perform(script, disk))
    if way == "kill":
        disk.kill()
        _reopen(history, disk, rng, power_lost=False)
    elif way == "power":
        disk.crash(rng, rng.choice([0.0, 0.5, 1.0]))
        _reopen(history, disk, rng, power_lost=True)
    else:
        disk.kill()
        open_inline(disk, seed=2)
        disk.crash(rng, rng.choice([0.0, 0.5]))
        recovered = open_inline(disk, seed=3)
        if history is not None and history.states:
            # The start in between synced what it found: nothing is lost any more.
            history.check(recovered, power_lost=False)


@pytest.mark.parametrize("seed", range(1, HISTORIES + 1))
def test_no_way_down_loses_what_an_interval_log_promised(seed: int) -> None:
    """After a kill all that was acknowledged is there; after a power loss too, or the log says so."""
    script = _drawn(seed)
    rng = random.Random(seed)
    total = _steps(script)
    for _ in range(CUTS):
        way = rng.choice(["kill", "power", "kill, then power"])
        _go_down(script, way, rng.randrange(1, total + 2), rng)
