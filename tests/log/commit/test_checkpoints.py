"""Checkpoints that run beside commits and segment writes: what they may say, and what they hold up."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path

import pytest

from laminar.log import RealDisk, Storage, StorageClosed, StorageError, StorageSettings
from tests.disks.fault_disk import FaultDisk, PowerCut
from tests.log.histories import History, frame_for, open_inline, run
from tests.log.stepped import Steps, open_stepped
from tests.long_examples import long

_SETTINGS = StorageSettings(
    segment_size_bytes=2000,
    first_journal_file_bytes=8192,
    journal_file_bytes=16384,
    checkpoint_bytes=12 * 1024,
    max_frame_bytes=4096,
    recent_bytes=3000,
    idle_marker_ms=1_000_000,
)


async def _stepped(disk: FaultDisk, steps: Steps, history: History, work: Awaitable[None]) -> None:
    """Run `work` while the workers take their steps in between."""
    turns = asyncio.ensure_future(steps.run())
    try:
        await work
    finally:
        turns.cancel()
        with contextlib.suppress(asyncio.CancelledError, PowerCut):
            await turns


async def _random_life(history: History, rng: random.Random, changes: int) -> None:
    """Appends, truncations, starts, votes, deletions, syncs and checkpoints, in any order and overlapping."""
    term = 1
    for log_id in (1, 2, 3):
        history.create(log_id)
    for _ in range(changes):
        term += 1
        log_id = rng.choice(sorted(history.storage.logs))
        log = history.storage.logs[log_id]
        draw = rng.random()
        try:
            if draw < 0.5 or not log.last_index - log.start.index:
                values = [rng.randbytes(rng.randrange(700))]
                history.write(log_id, *values, term=term, opens=rng.random() < 0.1 or None)
            elif draw < 0.6:
                history.truncate(log_id, max(log.first_index, log.last_index - rng.randrange(5)))
            elif draw < 0.65 and log.durable_index >= log.first_index:
                history.set_start(log_id, rng.randrange(log.first_index, log.durable_index + 1))
            elif draw < 0.7:
                history.vote(rng.randrange(3), term, 1)
            elif draw < 0.72 and len(history.storage.logs) > 2:
                history.delete(log_id, replica_id=rng.randrange(3))
            elif draw < 0.9:
                await history.sync()
            elif not history.storage._executor._asked:
                asked = asyncio.ensure_future(history.storage.checkpoint())
                asked.add_done_callback(lambda done: done.cancelled() or done.exception())
            if rng.random() < 0.5:
                for _ in range(rng.randrange(6)):
                    await asyncio.sleep(0)
        except StorageClosed:
            return
        except StorageError:
            pass  # a log that has failed takes no more


def _life(seed: int, *, failing: bool = False) -> tuple[int, bool]:
    """One life of a storage up to a power cut, and what comes back; (checkpoints made, some log failed)."""
    rng = random.Random(seed)
    disk = FaultDisk()
    settings = replace(_SETTINGS, gather_bytes=rng.choice([0, 2500]))
    found: list[tuple[int, bool]] = []

    async def main() -> None:
        steps = Steps(rng)
        history = History(open_stepped(disk, steps, settings=settings, seed=seed + 1))
        if failing:
            victim, begins = rng.choice(["log-1-", "log-2-"]), disk.steps + rng.randrange(200)
            how = rng.choice([{"sync"}, {"sync", "write"}, {"sync directory"}])

            def error(operation: str, path: str) -> int | None:
                hit = operation in how and victim in path
                return errno.EIO if hit and disk.steps > begins and "trash" not in path else None

            disk.error = error
        disk.cut_after = disk.steps + rng.randrange(20, 700)
        await _stepped(disk, steps, history, _random_life(history, rng, 120))
        found.append((history.storage._writer.checkpoints, bool(history.storage._writer.failed)))
        for _ in range(rng.choice([1, 1, 2])):
            disk.crash(rng, keep=rng.choice([0.0, 0.0, 0.5, 1.0]))
            history.check(open_inline(disk, settings=settings, seed=rng.getrandbits(30)))

    run(main())
    return found[0]


@pytest.mark.parametrize("part", [0, *long(1, 2, 3)])
def test_a_crash_at_any_step_beside_a_checkpoint_loses_nothing_acknowledged(part: int) -> None:
    """Frames, truncations and deletions go on between a checkpoint's picture, its syncs and its document."""
    made = [_life(part * 1000 + seed)[0] for seed in range(100)]
    assert sum(made) > 200


@pytest.mark.parametrize("part", [0, *long(1, 2, 3)])
def test_a_failed_logs_records_are_carried_past_checkpoints(part: int) -> None:
    """A segment's sync or write fails: that log stops, the others' checkpoints go on, and a start from any
    of these, after any crash, has everything acknowledged.
    """
    made = [_life(part * 1000 + seed, failing=True) for seed in range(100)]
    assert sum(failed for _, failed in made) > 30
    assert sum(checkpoints for checkpoints, failed in made if failed) > 100


def test_a_journal_that_checkpoints_cannot_follow_is_named() -> None:
    """`refusal` says "journal" at the limit of files, and is lifted by the checkpoint that frees them."""

    async def main() -> None:
        steps = Steps(random.Random(1))
        settings = replace(_SETTINGS, max_journal_files=3, gather_bytes=0)
        history = History(open_stepped(FaultDisk(), steps, settings=settings))
        steps.held.add("checkpoints")
        turns = asyncio.ensure_future(steps.run())
        history.create(1)
        storage = history.storage
        for _ in range(100):
            if storage.refusal:
                break
            history.write(1, b"x" * 2000)
            await history.sync()
        refusal, files = storage.refusal, storage.journal_files
        assert ("journal", (3, 3)) == (refusal, files)

        steps.held.clear()
        await storage.checkpoint()

        assert storage.refusal is None
        turns.cancel()

    run(main())


def test_pitfall_48_a_checkpoint_on_a_full_disk_goes_on_once_there_is_room() -> None:
    """Commits and votes go on meanwhile, the journal is kept, and the next try frees it."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk, settings=_SETTINGS))
        history.create(1)
        disk.error = lambda operation, path: errno.ENOSPC if "checkpoint." in path else None
        for number in range(12):
            history.write(1, b"%d" % number * 800)
            history.vote(5, number, 1)
            await history.sync()
        assert history.storage.statistics()["failed_checkpoints"] > 1
        before, _ = history.storage.journal_files
        disk.error = None

        await history.storage.checkpoint()

        assert history.storage.journal_files[0] < before
        disk.crash(random.Random(1), keep=0.0)
        history.check(open_inline(disk))

    run(main())


async def test_small_journal_files_are_checkpointed_before_their_number_refuses_appends(
    tmp_path: Path,
) -> None:
    """Else nothing is appended any more, and so no checkpoint ever becomes due."""
    settings = StorageSettings(
        first_journal_file_bytes=64 << 10, journal_file_bytes=128 << 10, checkpoint_bytes=64 << 20
    )
    storage = Storage.open(RealDisk(), str(tmp_path / "home"), str(tmp_path / "logs"), settings=settings)
    try:
        log = storage.create_log("t-0")
        for number in range(200):
            log.append([frame_for(log, [b"%d" % number * 10_000])])
            await storage.sync()
            # Nothing more is appended meanwhile: what was due must come by itself.
            async with asyncio.timeout(60):
                while storage.refusal is not None:
                    await storage.sync()
                    await asyncio.sleep(0.001)
        assert storage.statistics()["checkpoints"] > 3
    finally:
        await storage.close()
