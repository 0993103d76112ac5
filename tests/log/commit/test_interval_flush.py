"""Logs with the flush policy `interval`: who waits for what, and when it is synced."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import random

import pytest
import uvloop

from laminar.batch import Kind, build_control, stamp
from laminar.log import Log, StorageError
from laminar.log.commit import end_mark
from laminar.log.disk.errors import LogRemoved
from laminar.log.format.flush_policy import COMMIT, FlushPolicy
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import SMALL, contents, frame_for, open_inline, run, settle
from tests.log.interval_histories import NEVER, IntervalHistory


def test_an_append_waits_for_no_sync_of_the_journal() -> None:
    """It is acknowledged when it is written. A commit log's append waits for a sync, which covers both."""
    disk = FaultDisk()

    synced: list[str] = []

    def note(operation: str, path: str) -> None:
        if operation == "sync" and "journal-" in path:
            synced.append(path)

    async def main() -> tuple[int, int]:
        disk.error = note
        roomy = dataclasses.replace(SMALL, first_journal_file_bytes=1 << 20)
        h = IntervalHistory(open_inline(disk, settings=roomy))
        h.create()
        other = h.storage.create_log("other", 2)
        h.write(b"first")
        await h.settle()
        await settle(h.storage)
        before = len(synced)
        for number in range(10):
            h.write(b"%d" % number)
            await h.settle()
        interval = len(synced) - before
        other.append([frame_for(other, [b"x"])])
        await h.storage.sync_log(other)
        return interval, len(synced) - before - interval

    interval, commit = run(main())

    assert 0 == interval
    assert 1 <= commit


def test_what_is_cut_while_it_is_not_synced_never_counts_as_synced() -> None:
    """A sync says that what lies there is on disk, not the entry that was cut before."""

    async def main() -> None:
        h = IntervalHistory(open_inline(FaultDisk()))
        h.create()
        h.write(b"a")
        await h.settle()  # with what says that the log may be behind
        h.write(b"b")
        h.write(b"c")
        await h.settle()
        assert (3, 1) == (h.log.durable_index, h.log.synced_index)

        h.truncate(2)
        assert (1, 1) == (h.log.durable_index, h.log.synced_index)
        h.write(b"B", term=2)
        await h.settle()  # the truncation must be durable, and so is all before it

        assert (2, 2) == (h.log.durable_index, h.log.synced_index)

    run(main())


def test_a_configuration_counts_when_it_is_synced() -> None:
    """A replica that lost the last interval asks all voters it knows of: it must not forget who they are."""

    async def main() -> None:
        h = IntervalHistory(open_inline(FaultDisk()))
        h.create()
        h.write(b"a")
        await h.settle()  # with what says that the log may be behind
        h.write(b"b")
        await h.settle()
        assert (2, 1) == (h.log.durable_index, h.log.synced_index)

        frame = build_control(Kind.CONFIGURATION, b"")
        stamp(
            frame,
            index=3,
            term=h.log.last_term,
            prev_term=h.log.last_term,
            base_offset=h.log.next_offset,
            append_time_ms=h.log.last_append_time_ms,
            committed_index=0,
            opens_segment=h.log.segment_full,
        )
        h.again(bytes(frame))
        await h.settle()

        assert (3, 3) == (h.log.durable_index, h.log.synced_index)

    run(main())


def test_a_clean_stop_leaves_nothing_to_be_forgotten() -> None:
    """After a close, a power loss takes nothing, and the log is not marked; after new appends it is."""
    disk = FaultDisk()

    async def write_and_close(close: bool) -> None:
        storage = open_inline(disk, seed=disk.steps)
        log = storage.logs.get(1) or storage.create_log("log", 1, policy=NEVER)
        for _ in range(2):
            log.append([frame_for(log, [b"x" * 300])])
            await storage.sync_log(log)
        if close:
            await storage.close()

    run(write_and_close(True))
    disk.crash(random.Random(1), keep=0.0)
    closed = open_inline(disk, seed=5).logs[1]
    disk.crash(random.Random(1), keep=0.0)
    run(write_and_close(False))
    disk.crash(random.Random(1), keep=0.0)
    crashed = open_inline(disk, seed=6).logs[1]

    assert (2, False, NEVER) == (closed.last_index, closed.recovering, closed.policy)
    # The first append of a life is synced, with the note that others may not be.
    assert (3, True, True) == (crashed.last_index, crashed.recovering, crashed.power_lost)


def test_a_failed_segment_stops_its_log_alone_and_nothing_is_lost() -> None:
    """It takes no more appends; the journal has what was acknowledged, and a start writes it again."""
    disk = FaultDisk()

    async def main() -> list[Log]:
        h = IntervalHistory(open_inline(disk))
        stopped: list[Log] = []
        h.storage.on_log_failure = stopped.append
        h.create()
        other = h.storage.create_log("other", 2, policy=NEVER)
        h.write(b"a" * 100)
        await h.settle()
        h.write(b"b" * 100)
        await h.settle()
        disk.error = lambda operation, path: (
            errno.EIO if operation == "sync" and "log-0" in path and path.endswith(".log") else None
        )
        await h.storage.checkpoint()
        with pytest.raises(StorageError):
            h.write(b"c")
        with pytest.raises(StorageError):
            await h.storage.sync_log(h.log)
        other.append([frame_for(other, [b"x"])])
        await h.storage.sync_log(other)
        for _ in range(3):
            await h.storage.sync(durable=True)
            await h.storage.checkpoint()
        return stopped

    stopped = run(main())
    disk.kill()
    recovered = open_inline(disk, seed=2)

    assert [1] == [log.log_id for log in stopped]
    assert {1: 2, 2: 1} == {log_id: log.last_index for log_id, log in recovered.logs.items()}
    assert not any(log.recovering for log in recovered.logs.values())


def test_a_sync_that_fails_under_acknowledged_entries_is_told_to_the_next_start() -> None:
    """Its pages are clean and may leave memory: the process ends, and its start marks who may have lost."""
    disk = FaultDisk()

    async def main() -> None:
        h = IntervalHistory(open_inline(disk))
        h.create()
        h.storage.create_log("other", 2)
        h.write(b"a")
        await h.settle()
        h.write(b"b")
        await h.settle()
        disk.error = lambda operation, path: errno.EIO if operation == "sync" and "journal-" in path else None
        with pytest.raises(StorageError):
            await h.storage.sync(durable=True)

    run(main())
    disk.kill()
    recovered = open_inline(disk, seed=2)

    assert recovered.logs[1].recovering and recovered.logs[1].power_lost
    assert not recovered.logs[2].recovering


@pytest.mark.parametrize("go", ["deleted", "replaced"])
def test_the_policy_of_a_log_that_is_gone_is_not_changed(go: str) -> None:
    """Who wants it changed is told."""

    async def main() -> None:
        h = IntervalHistory(open_inline(FaultDisk()))
        h.create()
        h.write(b"a" * 700)
        await h.settle()
        h.write(b"not synced")
        if go == "deleted":
            gone = h.storage.delete_log(1)
        else:
            gone = h.storage.replace_log(1, h.storage.create_log("new"))
        with pytest.raises(LogRemoved, match="deleted or replaced"):
            await h.storage.set_policy(h.log, COMMIT)
        await gone
        await h.storage.close()

    run(main())


def test_a_batch_reaches_its_segment_when_its_frame_is_synced() -> None:
    """A segment never holds what a loss of power could take from the journal."""
    disk = FaultDisk()

    async def main() -> None:
        h = IntervalHistory(open_inline(disk))
        h.create()
        h.write(b"a")
        await h.settle()
        path = h.log.segment_of(1).file.path
        before = len(disk.held(path))
        h.write(b"b")
        await h.settle()
        assert before == len(disk.held(path))
        assert 2 == len(contents(h.log))

        await h.sync()
        assert before < len(disk.held(path))

    run(main())


def test_one_sync_covers_all_logs_that_wait_for_one() -> None:
    """A hundred logs with one interval, and a commit log's append: none has a sync of its own."""
    disk = FaultDisk()
    synced: list[str] = []

    async def main() -> None:
        storage = open_inline(disk)
        logs = [storage.create_log(f"log-{number}", number, policy=NEVER) for number in range(1, 101)]
        other = storage.create_log("other", 200)
        for turn in range(2):
            for log in logs:
                log.append([frame_for(log, [b"%d" % turn])])
            await storage.sync()
        assert all((2, 1) == (log.durable_index, log.synced_index) for log in logs)
        disk.on_step = lambda operation, path: synced.append(path) if operation == "sync" else None
        other.append([frame_for(other, [b"x"])])
        await storage.sync()
        assert all(2 == log.synced_index for log in logs)
        assert not storage._changes.unsynced

    run(main())

    # On a slow machine the end mark, too, is due.
    assert 1 == len([path for path in synced if not path.endswith(end_mark.NAME)])


def test_a_sync_that_is_due_at_once_holds_nothing_up() -> None:
    """uvloop's timer for an instant that is near is another object than its others."""

    async def main() -> None:
        storage = open_inline(FaultDisk())
        log = storage.create_log("log", 1, policy=FlushPolicy(interval_ms=60_000))
        other = storage.create_log("other", 2, policy=FlushPolicy(interval_ms=10))
        for each in (log, other, log):
            each.append([frame_for(each, [b"a"])])
            await storage.sync()
        commits = storage._commits
        commits._due_s = commits.loop().time() + 0.0003
        commits._sync_due()
        commits._due_s = commits.loop().time() + 0.0002
        other.append([frame_for(other, [b"b"])])
        async with asyncio.timeout(60):
            await storage.sync()
        await storage.close()

    uvloop.run(main())


def test_more_than_so_many_bytes_are_synced_at_once() -> None:
    """Long before the interval is over: what is not synced stays in memory."""

    async def main() -> None:
        settings = dataclasses.replace(SMALL, unsynced_bytes=16 * 1024)
        storage = open_inline(FaultDisk(), settings=settings)
        log = storage.create_log("log", 1, policy=NEVER)
        most = 0
        for _ in range(40):
            log.append([frame_for(log, [b"x" * 1000])])
            await storage.sync()
            await asyncio.sleep(0)
            most = max(most, log.unsynced_records)
            assert storage._journal.unsynced_bytes <= settings.unsynced_bytes + 4096
        assert 1 < most <= 5

    run(main())


@pytest.mark.parametrize(
    "policy", [FlushPolicy(interval_ms=20), FlushPolicy(interval_ms=60_000, interval_records=3)]
)
def test_a_log_is_synced_when_its_time_or_its_records_are_up(policy: FlushPolicy) -> None:
    """Within the interval, or as soon as so many records are not synced."""

    async def main() -> None:
        storage = open_inline(FaultDisk())
        log = storage.create_log("log", 1, policy=policy)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        log.append([frame_for(log, [b"first"])])
        await storage.sync_log(log)
        log.append([frame_for(log, [b"a", b"b"])])
        await storage.sync_log(log)
        assert 2 == log.durable_index
        early = (log.synced_index, log.unsynced_records)
        assert (1, 2) == early or loop.time() >= began_s + policy.interval_ms / 1000
        log.append([frame_for(log, [b"c"])])
        async with asyncio.timeout(60):
            while log.synced_index < 3:  # noqa: ASYNC110  # a timer of the engine, which tells nobody
                await asyncio.sleep(0.001)
        assert 0 == log.unsynced_records

    run(main())
