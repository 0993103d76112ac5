"""Each way down of a log with the policy `interval`: at every step of scripts, and at some of drawn ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from laminar.log.disk.errors import BrokenChain
from laminar.log.format.flush_policy import COMMIT, FlushPolicy
from tests.disks.fault_disk import FaultDisk, PowerCut
from tests.log.crashing import Cutter, start_again
from tests.log.histories import contents, open_inline, run
from tests.log.interval_histories import NEVER, IntervalHistory

HISTORIES = 60
CUTS = 5

Script = Callable[[IntervalHistory], Awaitable[None]]
CUTTER = Cutter(IntervalHistory)


async def _growing(h: IntervalHistory) -> None:
    """Appends over segment borders, with syncs, checkpoints and a new start in between."""
    h.create()
    h.write(b"a" * 700)
    h.write(b"b" * 900, b"c")
    await h.settle()
    h.write(b"d" * 300)
    await h.settle()
    await h.sync()
    h.write(b"e" * 30, opens=True)
    h.write(b"f" * 1200)
    await h.settle()
    await h.storage.checkpoint()
    h.write(b"g" * 700)
    await h.settle()
    await h.sync()
    h.set_start(2)
    h.write(b"h" * 100, opens=True)
    await h.settle()
    h.set_start(7)
    await h.settle()
    h.write(b"i" * 600, opens=True)
    h.storage.record_hard_state(5, term=1, vote=0)
    h.write(b"j" * 600)
    await h.settle()
    await h.sync()
    h.write(b"k" * 60)
    await h.settle()


async def _conflicts(h: IntervalHistory) -> None:
    """Truncations and overwrites of other and equal sizes, over a segment border, and an entry come again."""
    h.create()
    for value in (b"a" * 600, b"b" * 600, b"c" * 600):
        h.write(value, term=1)
    h.write(b"d" * 100, term=1, opens=True)
    h.write(b"e" * 100, term=1)
    await h.settle()
    old = contents(h.log)
    await h.sync()
    h.truncate(5)
    h.write(b"E" * 100, term=2)
    await h.settle()
    h.truncate(3)
    h.write(b"C" * 600, term=3)
    h.write(b"D" * 40, term=3)
    await h.settle()
    await h.storage.checkpoint()
    h.truncate(3)
    for frame in old[2:]:
        h.again(frame)
    await h.settle()
    h.truncate(4)
    h.again(old[3])
    h.truncate(4)
    h.again(old[3])
    await h.settle()
    await h.sync()
    h.truncate(1)
    h.write(b"A" * 600, term=6, opens=True)
    await h.settle()


async def _policies(h: IntervalHistory) -> None:
    """The policy changed in place, both ways, with appends and truncations before, behind and meanwhile."""
    h.create(COMMIT)
    h.write(b"a" * 700)
    h.write(b"b" * 900)
    await h.settle()
    h.write(b"c" * 900)
    change = asyncio.ensure_future(h.storage.set_policy(h.log, NEVER))
    await asyncio.sleep(0)
    h.write(b"d" * 300)
    await change
    await h.settle()
    h.write(b"e" * 30, opens=True)
    await h.settle()
    change = asyncio.ensure_future(h.storage.set_policy(h.log, COMMIT))
    await asyncio.sleep(0)
    h.write(b"f" * 500)
    h.truncate(6)
    h.write(b"F" * 500, term=2)
    await change
    await h.settle()
    h.write(b"g" * 800)
    await h.settle()
    await h.storage.checkpoint()
    h.write(b"h" * 80)
    await h.storage.set_policy(h.log, NEVER)
    h.truncate(8)
    h.write(b"H" * 80, term=3)
    await h.settle()
    await h.storage.set_policy(h.log, FlushPolicy(interval_ms=3_000_000))
    h.write(b"i" * 80)
    await h.settle()


SCRIPTS = [_growing, _conflicts, _policies]


def _reopen(
    history: IntervalHistory | None, disk: FaultDisk, rng: random.Random, *, power_lost: bool
) -> None:
    """Recover, possibly with more of the same in the recovery itself; then compare."""

    def go_down() -> None:
        if power_lost:
            disk.crash(rng, keep=rng.choice([0.0, 0.5, 1.0]))
        else:
            disk.kill()

    async def reopen() -> None:
        storage = await start_again(disk, rng, go_down)
        if history is not None and history.states:
            history.check(storage, power_lost=power_lost)

    run(reopen())


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_kill_at_any_step_keeps_everything_acknowledged(script: Script) -> None:
    """What was written is in the page cache: after kill -9 it is all there, in order, and not marked."""
    rng = random.Random(f"kill {script.__name__}")
    for step in range(1, CUTTER.steps(script) + 1):
        disk, history = CUTTER.truncate(script, step)
        disk.kill()
        _reopen(history, disk, rng, power_lost=False)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_a_power_loss_at_any_step_keeps_what_was_synced_and_says_so(script: Script, keep: float) -> None:
    """The synced entries are there, none but those appended, and the log is marked if any may be gone."""
    rng = random.Random(f"power {script.__name__} {keep}")
    for step in range(1, CUTTER.steps(script) + 1):
        disk, history = CUTTER.truncate(script, step)
        disk.crash(rng, keep)
        _reopen(history, disk, rng, power_lost=True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_pitfall_33_a_power_loss_behind_a_restart_takes_nothing_that_the_restart_found(
    script: Script,
) -> None:
    """kill -9, restart, power loss before anything else is written: all that was acknowledged is there."""
    rng = random.Random(f"kill and power {script.__name__}")
    for step in range(1, CUTTER.steps(script) + 1):
        disk, history = CUTTER.truncate(script, step)
        disk.kill()
        try:
            open_inline(disk, seed=2)
        except PowerCut:
            pass
        disk.crash(rng, keep=rng.choice([0.0, 0.5]))
        storage = open_inline(disk, seed=3)
        if history is not None and history.states:
            history.check(storage, power_lost=False)


def test_pitfall_30_a_truncation_read_from_the_page_cache_only() -> None:
    """A cut entry that still lies in the segment, whole and in its place, does not come back."""
    disk = FaultDisk()

    async def main() -> None:
        h = IntervalHistory(open_inline(disk))
        h.create()
        h.write(b"a" * 600, term=1)
        h.write(b"b" * 600, term=1)
        await h.settle()
        # The record of the truncation is durable, but the files do not follow any more.
        h.storage._writer_worker.submit = lambda task: None  # type: ignore[method-assign]
        h.truncate(2)
        await h.storage.sync()

    run(main())
    disk.kill()
    log = open_inline(disk, seed=2).logs[1]

    assert 1 == log.last_index and not log.recovering


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
                await h.sync()
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
                h.storage.record_hard_state(5, term=number, vote=0)
                await h.storage.sync()
        await h.settle()

    return script


def _go_down(script: Script, way: str, step: int, rng: random.Random) -> None:
    disk, history = CUTTER.truncate(script, step)
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
    total = CUTTER.steps(script)
    for _ in range(CUTS):
        way = rng.choice(["kill", "power", "kill, then power"])
        _go_down(script, way, rng.randrange(1, total + 2), rng)
