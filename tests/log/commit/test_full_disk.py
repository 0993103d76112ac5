"""No room: for a checkpoint, or for the next file of the journal (48 in docs/pitfalls.md)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from dataclasses import dataclass, replace

import pytest

from laminar.log import Storage
from laminar.log.commit.journal import Journal
from laminar.log.disk.errors import DiskError, StorageClosed, StorageError
from laminar.log.format.index_entry import ROW_SIZE
from laminar.log.segment.segment_file import INDEX_HEAD_SIZE, index_name
from tests.disks.fault_disk import FaultDisk, PowerCut
from tests.log.histories import HOME, LOGS, SMALL, History, in_segments, open_inline, picture_of, run, settle


def test_pitfall_48_a_disk_full_during_a_checkpoint_stops_nothing() -> None:
    """The former checkpoint and the journal stand; commits and votes go on."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        history.write(1, b"before")
        await history.sync()
        disk.error = lambda operation, path: errno.ENOSPC if "checkpoint" in path else None
        with pytest.raises(StorageError):
            await history.storage.checkpoint()
        history.write(1, b"meanwhile")
        history.vote(5, 2, 1)
        await history.sync()
        disk.crash(random.Random(1), keep=0.0)
        storage = open_inline(disk)
        history.check(storage)

    run(main())


def test_pitfall_48_no_room_for_the_next_journal_file_refuses_appends_but_not_votes() -> None:
    """`refusal` names the disk while the present file has room left, and is lifted when room is back."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        disk.error = lambda operation, path: (
            errno.ENOSPC if operation in ("create", "write") and "spare" in path else None
        )
        for _ in range(3):
            history.write(1, b"x" * 3000)
            await history.sync()
        assert "disk" == history.storage.refusal
        history.vote(5, 2, 1)
        await history.sync()
        disk.error = None
        history.vote(5, 3, 1)
        await history.sync()
        async with asyncio.timeout(60):
            while history.storage.refusal:  # noqa: ASYNC110  # it tells nobody
                await asyncio.sleep(0.001)
        disk.crash(random.Random(1), keep=0.0)
        history.check(open_inline(disk))

    run(main())


def a_journal(disk: FaultDisk) -> Journal:
    disk.make_directory(HOME)
    journal = Journal(disk, HOME, SMALL, generation=1, seed=7, number=1, lsn=0)
    journal.open_generation()
    return journal


def test_a_file_that_was_not_ready_in_time_has_its_room_when_the_disk_fills() -> None:
    """It is used before it is filled with zeros. A full disk ends the process at none of its frames."""
    disk = FaultDisk()
    disk.room_bytes = 1 << 20
    journal = a_journal(disk)
    while journal.number == 1:
        journal.write([b"x" * 3000], records=1, hard_states=[])
    disk.room_bytes = 0

    for _ in range(SMALL.journal_file_bytes // 4096 - 1):
        journal.write([b"x" * 3000], records=1, hard_states=[])

    assert 2 == journal.number
    assert not journal.starved


def test_a_next_file_without_room_refuses_appends_until_another_is_ready() -> None:
    """The frame that it was made for may still fit."""
    disk = FaultDisk()
    journal = a_journal(disk)
    disk.error = lambda operation, path: errno.ENOSPC if operation == "reserve" else None
    while journal.number == 1:
        assert not journal.starved
        journal.write([b"x" * 3000], records=1, hard_states=[])

    assert journal.starved
    assert journal.wants_spare()
    journal.prepare_spare()
    assert not journal.starved


def test_a_file_that_was_not_filled_in_time_is_left_for_one_that_is() -> None:
    """Its syncs take longer. The one that is left goes with the next checkpoint, and is not used again."""
    disk = FaultDisk()
    journal = a_journal(disk)
    while journal.number == 1:
        written = journal.write([b"x" * 3000], records=1, hard_states=[])
    assert (2, 0) == (written.file_number, written.file_size)
    assert journal.wants_spare()
    assert 2 == journal.write([b"x" * 3000], records=1, hard_states=[]).file_number

    journal.prepare_spare()
    written = journal.write([b"x" * 3000], records=1, hard_states=[])
    assert (3, SMALL.journal_file_bytes) == (written.file_number, written.file_size)
    assert 3 == journal.write([b"x" * 3000], records=1, hard_states=[]).file_number

    journal.delete_before(3)
    assert {"journal-3", "end-mark"} == set(disk.list(HOME))


def test_a_file_made_beside_commits_is_synced_piece_by_piece() -> None:
    """A commit's sync waits behind one piece of it at most."""
    disk = FaultDisk()
    disk.make_directory(HOME)
    settings = replace(SMALL, first_journal_file_bytes=1 << 20, journal_file_bytes=4 << 20)
    journal = Journal(disk, HOME, settings, generation=1, seed=7, number=1, lsn=0)
    seen: list[str] = []
    disk.on_step = lambda operation, path: seen.append(operation) if "spare" in path else None
    journal.prepare_spare()

    assert ["write", "sync"] * 4 == [each for each in seen if each in ("write", "sync")]


def test_a_frame_larger_than_the_file_that_is_ready_leaves_it_to_the_next() -> None:
    """A file that is passed over is not forgotten on the disk."""
    disk = FaultDisk()
    journal = a_journal(disk)
    journal.prepare_spare()
    journal.write([b"x" * 2 * SMALL.journal_file_bytes], records=1, hard_states=[])
    assert {"journal-1", "journal-2", "spare-1"} <= set(disk.list(HOME))

    journal.write([b"x" * 3000], records=1, hard_states=[])

    assert {"journal-1", "journal-2", "journal-3", "end-mark"} == set(disk.list(HOME))


@pytest.mark.parametrize("what, named", [("spare-", "disk"), ("checkpoint.", "journal")])
def test_pitfall_48_a_refusal_ends_when_there_is_room_though_nobody_appends(what: str, named: str) -> None:
    """While appends are refused no frame comes that could ask: what failed is tried again by itself."""

    async def main() -> None:
        disk = FaultDisk()
        settings = replace(SMALL, retry_ms=5, max_journal_files=3, checkpoint_bytes=16 * 1024)
        history = History(open_inline(disk, settings=settings))
        storage = history.storage
        history.create(1)
        room = False
        tried = asyncio.Event()

        def fail(operation: str, path: str) -> int | None:
            if operation in ("create", "write") and what in path:
                tried.set()
                return None if room else errno.ENOSPC
            return None

        disk.error = fail
        while storage.refusal != named:
            history.write(1, b"x" * 3000)
            await history.sync()
        for _ in range(3):
            tried.clear()
            await asyncio.wait_for(tried.wait(), 60)
        assert named == storage.refusal
        room = True
        tried.clear()
        await asyncio.wait_for(tried.wait(), 60)
        assert not bool(storage.refusal)
        history.write(1, b"again")
        await history.sync()
        disk.crash(random.Random(1), keep=0.0)
        history.check(open_inline(disk))

    run(main())


def no_room_for_logs(operation: str, path: str) -> int | None:
    """The journal's file is filled already; nothing else finds room. What is removed needs none."""
    grows = operation in ("create", "write", "make directory")
    return errno.ENOSPC if grows and path.startswith(LOGS) else None


async def until_taken_again(storage: Storage) -> None:
    async with asyncio.timeout(60):
        while storage.refusal:  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("crashes", [False, True])
def test_a_segment_that_finds_no_room_is_written_when_there_is_some(crashes: bool) -> None:
    """The journal has the bytes meanwhile, and memory answers for them: no log fails, votes and entries that
    are under way go on, and appends are refused.
    """

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk, settings=replace(SMALL, retry_ms=5)))
        storage = history.storage
        for log_id in (1, 2):
            history.create(log_id)
        history.write(1, b"before")
        await history.sync()
        await settle(storage)
        disk.error = no_room_for_logs
        for number in range(5):
            history.write(1, b"%d" % number, b"x" * 900)
            history.write(2, b"%d" % number)
            history.vote(5, 2 + number, 1)
            await history.sync()
        await settle(storage)

        assert "disk" == storage.refusal
        assert not any(log.failure for log in storage.logs.values())
        assert picture_of(storage) == history.pictures[-1]
        with pytest.raises(StorageError, match="wait for room"):
            await storage.checkpoint()
        if not crashes:
            disk.error = None
            await until_taken_again(storage)
            history.write(1, b"again")
            await history.sync()
            await storage.checkpoint()
        disk.crash(random.Random(1), keep=0.0)
        history.check(open_inline(disk))

    run(main())


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("how", ["trimmed", "deleted"])
def test_what_is_given_up_on_a_full_disk_goes_before_what_waits_for_room(how: str, crashes: bool) -> None:
    """Else there would never be any."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk, settings=replace(SMALL, retry_ms=5)))
        storage = history.storage
        for log_id in (1, 2):
            history.create(log_id)
            for _ in range(3):
                history.write(log_id, b"x" * 1500, opens=True)
        await history.sync()
        await settle(storage)
        folder = storage.logs[1].files.directory
        names = disk.list(folder)
        assert 3 <= len(names)
        lacking = True
        disk.error = lambda operation, path: no_room_for_logs(operation, path) if lacking else None
        history.write(2, b"waits")
        history.write(1, b"waits")
        await history.sync()
        await settle(storage)
        assert "disk" == storage.refusal

        if how == "trimmed":
            history.set_start(1, 4)
        else:
            history.delete(1)
        await history.sync()
        await settle(storage)

        assert "disk" == storage.refusal
        assert not set(names) & set(disk.list(folder))
        if not crashes:
            lacking = False
            await until_taken_again(storage)
            history.write(2, b"again")
            await history.sync()
            await storage.checkpoint()
        disk.crash(random.Random(1), keep=0.0)
        history.check(open_inline(disk))

    run(main())


def test_more_than_memory_has_room_for_is_not_waited_for() -> None:
    """Else no vote would become durable behind it: the logs that find no room fail, as by any other error."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk, settings=replace(SMALL, max_unwritten_bytes=64 * 1024)))
        storage = history.storage
        for log_id in (1, 2):
            history.create(log_id)
        disk.error = no_room_for_logs
        for _ in range(20):
            if storage.logs[1].failure is None:
                history.write(1, b"x" * 3000)
                await history.sync()
        assert storage.logs[1].failure is not None
        history.vote(5, 2, 1)
        await history.sync()
        history.write(2, b"goes on")
        await history.sync()

        assert storage.logs[2].failure is None
        disk.crash(random.Random(1), keep=0.0)
        history.check(open_inline(disk))

    run(main())


def test_rows_that_found_no_room_are_written_once() -> None:
    """An index that holds a row twice would lead all readers of later entries astray."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk, settings=replace(SMALL, retry_ms=5, segment_size_bytes=1 << 20)))
        history.create(1)
        for number in range(255):
            history.write(1, b"%d" % number)
        await history.sync()
        await settle(history.storage)
        disk.error = lambda operation, path: (
            errno.ENOSPC if operation in ("create", "write") and path.endswith(".index") else None
        )
        for number in range(20):
            history.write(1, b"%d" % number)
            await history.sync()
            await settle(history.storage)
        assert "disk" == history.storage.refusal
        disk.error = None
        await until_taken_again(history.storage)
        history.write(1, b"again")
        await history.sync()
        await history.storage.checkpoint()
        index = "/".join((history.storage.logs[1].files.directory, index_name(1)))

        assert INDEX_HEAD_SIZE + 276 * ROW_SIZE == disk.open(index).size()
        assert picture_of(history.storage) == history.pictures[-1]
        disk.crash(random.Random(1), keep=0.0)
        history.check(open_inline(disk))

    run(main())


@dataclass
class Drawn:
    """A history that is drawn from a seed, on a disk that is full now and then, until the power may go."""

    rng: random.Random
    disk: FaultDisk
    history: History
    stalls: int = 0

    async def steps(self) -> None:
        for number in range(self.rng.randrange(20, 80)):
            kind = self.rng.choices(
                ("room", "write", "cut", "trim", "delete", "vote", "sync", "pause", "checkpoint"),
                (8, 52, 8, 10, 4, 4, 8, 3, 3),
            )[0]
            await self.step(kind, number)
        await self.history.sync()

    async def step(self, kind: str, number: int) -> None:
        rng, history, storage = self.rng, self.history, self.history.storage
        works = [log_id for log_id, log in storage.logs.items() if log.failure is None]
        if kind == "room":
            self.disk.error = no_room_for_logs if self.disk.error is None else None
        elif kind == "vote":
            history.vote(5, number + 2, 1)
        elif kind == "sync":
            await history.sync()
            self.stalls += storage._writer.is_full
        elif kind == "pause":
            await asyncio.sleep(0.004)  # so that it is tried again, which nobody is told of
        elif kind == "checkpoint":
            with contextlib.suppress(DiskError):
                await storage.checkpoint()
        elif works:
            self.change(kind, rng.choice(works), number)

    def change(self, kind: str, log_id: int, number: int) -> None:
        rng, history = self.rng, self.history
        log = history.storage.logs[log_id]
        if kind == "write":
            value = b"%d" % number * rng.choice((1, 300, 700))
            history.write(log_id, value, opens=True if rng.random() < 0.2 else None)
        elif kind == "delete":
            history.delete(log_id)
            history.create(100 + number)
        elif log.last_index > log.start.index:
            index = rng.randint(log.start.index + 1, log.last_index)
            (history.truncate if kind == "cut" else history.set_start)(log_id, index)


def test_whatever_happens_on_a_disk_that_is_full_now_and_then_nothing_is_lost() -> None:
    """Writes, cuts, trims and deletions while segments wait, checkpoints, and power that goes at any step."""
    stalled = 0

    async def main(seed: int) -> None:
        nonlocal stalled
        rng = random.Random(seed)
        disk = FaultDisk()
        settings = replace(SMALL, retry_ms=2, max_unwritten_bytes=rng.choice((64 * 1024, 1 << 20)))
        history = History(open_inline(disk, settings=settings))
        drawn = Drawn(rng, disk, history)
        for log_id in (1, 2, 3):
            history.create(log_id)
        disk.cut_after = rng.randrange(50, 400) if rng.random() < 0.5 else None
        try:
            await drawn.steps()
            if disk.cut_after is not None and disk.steps >= disk.cut_after:
                raise PowerCut("while nobody waited for anything")
            disk.error = disk.cut_after = None
            await until_taken_again(history.storage)
            if not any(log.failure for log in history.storage.logs.values()):
                await in_segments(history.storage)
                assert picture_of(history.storage) == history.pictures[-1]
        except (PowerCut, StorageClosed):
            pass
        except DiskError as error:
            assert error.is_full, error  # of a log that failed while it was written to
        stalled += drawn.stalls > 0
        disk.error = disk.cut_after = None
        disk.crash(rng, keep=rng.choice((0.0, 0.5, 1.0)))
        history.check(open_inline(disk, seed=seed + 1))

    for seed in range(60):
        run(main(seed))
    assert stalled > 20
