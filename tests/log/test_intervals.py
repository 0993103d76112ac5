"""Logs with the flush policy `interval`: who waits for what, and when it is synced."""

from __future__ import annotations

import asyncio
import errno
import random
from itertools import pairwise

import pytest

from laminar.log import Log, StorageError
from laminar.log.errors import LogGone
from laminar.log.intervals import next_slot_s
from laminar.log.policy import COMMIT, FlushPolicy
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import contents, frame_for, open_inline, run, settle
from tests.log.interval_histories import NEVER, IntervalHistory


def test_an_append_waits_for_no_sync_of_the_journal() -> None:
    """It is acknowledged when it is written; the journal is not asked. A commit log's append asks it."""
    disk = FaultDisk()

    synced: list[str] = []

    def note(operation: str, path: str) -> None:
        if operation == "sync" and "journal-" in path:
            synced.append(path)

    async def main() -> tuple[int, int]:
        disk.error = note
        h = IntervalHistory(open_inline(disk))
        h.create()
        other = h.storage.create_log("other", 2)
        h.write(b"first")
        await h.settle()
        await h.storage.sync()
        await settle(h.storage)  # the marker that ends a journal at rest is a frame too
        before = len(synced)
        for number in range(10):
            h.write(b"%d" % number)
            await h.settle()
        interval = len(synced) - before
        other.append([frame_for(other, [b"x"])])
        await h.storage.settled(other)
        return interval, len(synced) - before - interval

    interval, commit = run(main())

    assert 0 == interval
    assert 1 <= commit


def test_what_is_cut_while_it_is_synced_does_not_count_as_synced() -> None:
    """A sync says that the entry which lay there then is on disk, not the one that came since."""

    async def main() -> None:
        h = IntervalHistory(open_inline(FaultDisk()))
        h.create()
        h.write(b"a")
        h.write(b"b")
        await h.settle()
        old = contents(h.log)
        # The same entry again waits for a sync of the segments; the next truncation comes before that ends.
        h.truncate(2)
        h.again(old[1])
        h.truncate(1)
        h.write(b"c", term=2)
        await h.settle()

        assert (1, 0) == (h.log.durable_index, h.log.synced_index)

    run(main())


def test_a_clean_stop_leaves_nothing_to_be_forgotten() -> None:
    """After a close, a power loss takes nothing, and the log is not marked; after new appends it is."""
    disk = FaultDisk()

    async def write_and_close(close: bool) -> None:
        storage = open_inline(disk, seed=disk.steps)
        log = storage.logs.get(1) or storage.create_log("log", 1, policy=NEVER)
        log.append([frame_for(log, [b"x" * 300])])
        await storage.settled(log)
        if close:
            await storage.close()

    run(write_and_close(True))
    disk.crash(random.Random(1), keep=0.0)
    closed = open_inline(disk, seed=5).logs[1]
    disk.crash(random.Random(1), keep=0.0)
    run(write_and_close(False))
    disk.crash(random.Random(1), keep=0.0)
    crashed = open_inline(disk, seed=6).logs[1]

    assert (1, False, NEVER) == (closed.last_index, closed.recovering, closed.policy)
    assert (1, True, True) == (crashed.last_index, crashed.recovering, crashed.power_lost)


def test_a_failed_sync_of_a_segment_stops_its_log_alone() -> None:
    """It takes no more appends and comes back marked, as its pages may be gone; the other log goes on."""
    disk = FaultDisk()

    async def main() -> list[Log]:
        h = IntervalHistory(open_inline(disk))
        stopped: list[Log] = []
        h.storage.on_log_failure = stopped.append
        h.create()
        other = h.storage.create_log("other", 2, policy=NEVER)
        h.write(b"a" * 100)
        await h.settle()
        disk.error = lambda operation, path: (
            errno.EIO if operation == "sync" and "log-0" in path and path.endswith(".log") else None
        )
        await h.sync_segments()
        await asyncio.sleep(0.01)
        with pytest.raises(StorageError):
            h.write(b"b")
        with pytest.raises(StorageError):
            await h.storage.settled(h.log)
        other.append([frame_for(other, [b"x"])])
        await h.storage.settled(other)
        await h.storage.sync()
        return stopped

    stopped = run(main())
    disk.kill()
    recovered = open_inline(disk, seed=2)

    assert [1] == [log.log_id for log in stopped]
    assert recovered.logs[1].recovering and not recovered.logs[1].power_lost
    assert not recovered.logs[2].recovering and 1 == recovered.logs[2].last_index


@pytest.mark.parametrize("go", ["deleted", "replaced"])
def test_a_change_of_policy_ends_when_the_log_goes(go: str) -> None:
    """It waits for syncs that nobody will do any more, and so does who asks whether all is settled."""

    async def main() -> None:
        h = IntervalHistory(open_inline(FaultDisk()))
        h.create(COMMIT)
        h.write(b"a" * 700)
        await h.settle()
        log = h.log
        change = asyncio.ensure_future(h.storage.set_policy(log, NEVER))
        await asyncio.sleep(0)
        log.append([frame_for(log, [b"held"])])
        settled = h.storage.settled(log)
        if go == "deleted":
            gone = h.storage.delete_log(log.log_id)
        else:
            gone = h.storage.replace_log(log.log_id, h.storage.create_log("new"))

        for waiting in (change, settled, h.storage.settled(log)):
            with pytest.raises(LogGone, match="deleted or replaced"):
                await asyncio.wait_for(waiting, 10)
        await gone
        await h.storage.close()

    run(main())


def test_syncs_of_many_logs_are_spread_over_the_interval() -> None:
    """Logs made one after the other have slots of their own; none is more than one interval away."""
    slots = sorted(next_slot_s(1000.0, 500, log_id) - 1000.0 for log_id in range(1, 101))

    assert 0 < slots[0] and slots[-1] <= 0.5
    assert max(late - early for early, late in pairwise(slots)) < 0.02


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
        log.append([frame_for(log, [b"a", b"b"])])
        await storage.settled(log)
        assert 1 == log.durable_index
        early = (log.synced_index, log.unsynced_records)
        assert (0, 2) == early or loop.time() >= began_s + policy.interval_ms / 1000
        log.append([frame_for(log, [b"c"])])
        async with asyncio.timeout(30):
            while log.synced_index < 2:  # noqa: ASYNC110  # a timer of the engine, which tells nobody
                await asyncio.sleep(0.001)
        assert 0 == log.unsynced_records

    run(main())
