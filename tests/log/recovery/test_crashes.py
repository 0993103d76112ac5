"""Power cut at every step of a scripted history, with any subset of what was not synced."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest

from laminar.log import Storage
from tests.disks.fault_disk import BLOCK, FaultDisk
from tests.log.crashing import Cutter, start_again
from tests.log.histories import History, open_inline, run, settle

Script = Callable[[History], Awaitable[None]]
CUTTER = Cutter(History)


async def _ordinary(h: History) -> None:
    """Two logs, votes, a segment border, a checkpoint in between, a new start."""
    h.create(1)
    h.create(2)
    h.write(1, b"a" * 700)
    h.vote(11, 1, 11)
    await h.sync()
    h.write(1, b"b" * 900, b"c")
    h.write(2, b"x")
    await h.sync()
    h.write(1, b"d" * 1200)
    h.write(1, b"e" * 30, opens=True)
    await h.storage.checkpoint()
    await h.sync()
    h.vote(12, 4, 0)
    h.write(2, b"y" * 1500)
    await h.sync()
    h.set_start(1, 3)
    h.write(1, b"f")
    await h.sync()
    await h.storage.checkpoint()
    h.delete(2, replica_id=12)
    h.write(1, b"g")
    await h.sync()


async def _conflicts(h: History) -> None:
    """Truncations and overwrites of equal and other sizes, over a segment border, and ABA."""
    h.create(1)
    for value in (b"a" * 600, b"b" * 600, b"c" * 600):
        h.write(1, value, term=1)
    h.write(1, b"d" * 100, term=1, opens=True)
    h.write(1, b"e" * 100, term=1)
    await h.sync()
    await h.storage.checkpoint()
    h.truncate(1, 5)
    h.write(1, b"E" * 100, term=2)
    await h.sync()
    h.truncate(1, 3)
    h.write(1, b"C" * 600, term=3)
    h.write(1, b"D" * 40, term=3)
    await h.sync()
    h.truncate(1, 4)
    h.write(1, b"d" * 100, term=4, opens=True)
    h.truncate(1, 4)
    h.write(1, b"D" * 40, term=5)
    await h.sync()
    await h.storage.checkpoint()
    h.truncate(1, 1)
    h.write(1, b"A" * 600, term=6)
    await h.sync()


def _reopen(history: History | None, disk: FaultDisk, rng: random.Random) -> None:
    """Recover, possibly with further power cuts in the recovery itself; then compare."""

    async def reopen() -> None:
        storage = await start_again(disk, rng, lambda: disk.crash(rng, keep=rng.choice([0.0, 0.5, 1.0])))
        if history is not None:
            history.check(storage)
        else:
            assert not storage.logs and not storage.lost_hard_states

    run(reopen())


@pytest.mark.parametrize("script", [_ordinary, _conflicts])
@pytest.mark.parametrize("how", ["nothing kept", "some kept", "killed"])
def test_a_crash_at_any_step_loses_nothing_acknowledged(script: Script, how: str) -> None:
    """After a cut at each step the recovered state is one that was recorded, not older than the last ack."""
    rng = random.Random(f"{script.__name__} {how}")
    for step in range(1, CUTTER.steps(script) + 1):
        disk, history = CUTTER.truncate(script, step)
        if how == "killed":
            disk.kill()
        else:
            disk.crash(rng, keep=0.0 if how == "nothing kept" else 0.5)
        _reopen(history, disk, rng)


def test_pitfall_30_conflict_truncation_with_a_crash_at_every_step() -> None:
    """No old entry returns behind an acknowledged new one, also after a recovery from the page cache."""
    rng = random.Random(30)
    for step in range(1, CUTTER.steps(_conflicts) + 1):
        disk, history = CUTTER.truncate(_conflicts, step)
        disk.kill()

        async def restart(disk: FaultDisk = disk, history: History | None = history) -> None:
            storage = open_inline(disk, seed=2)
            if history is not None:
                history.check(storage)

        run(restart())
        disk.crash(rng, keep=rng.choice([0.0, 0.5]))
        _reopen(history, disk, rng)


@pytest.mark.parametrize("script", [_ordinary, _conflicts])
def test_rot_of_one_block_is_never_silent(script: Script) -> None:
    """At rest, one block anywhere rots: every log serves what it held, names the damage, or is marked."""
    rng = random.Random(f"rot {script.__name__}")

    async def prepare(disk: FaultDisk) -> History:
        history = History(open_inline(disk))
        await script(history)
        await settle(history.storage)
        if rng.random() < 0.3:
            await history.storage.close()
        return history

    for _ in range(250):
        disk = FaultDisk()
        history = run(prepare(disk))
        disk.crash(rng, keep=rng.choice([0.0, 1.0]))
        path, size = rng.choice(disk.files("data"))
        disk.rot(path, rng.randrange(size) // BLOCK * BLOCK, BLOCK)

        storage = open_inline(disk, seed=9)

        async def check(history: History = history, storage: Storage = storage, path: str = path) -> None:
            history.check_damaged([storage], path)

        run(check())
