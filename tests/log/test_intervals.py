"""Logs with the flush policy `interval`, and a model of what each way of going down keeps of them."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from laminar.log import Log, Storage, StorageClosed, StorageError
from laminar.log.errors import LogGone
from laminar.log.intervals import next_slot_s
from laminar.log.policy import COMMIT, FlushPolicy
from tests.disks.fault_disk import FaultDisk, PowerCut
from tests.log.histories import contents, frame_for, open_inline, run, settle

# Never by a timer: a test says when a log is synced.
NEVER = FlushPolicy(interval_ms=3_600_000)
State = tuple[int, tuple[bytes, ...]]


@dataclass
class IntervalHistory:
    """One `interval` log: its state after each change, and what was acknowledged (by number of the state)."""

    storage: Storage
    log: Log = field(init=False)
    states: list[State] = field(default_factory=list)
    acknowledged: int = 0

    def create(self, policy: FlushPolicy = NEVER) -> None:
        self.log = self.storage.create_log("log", 1, policy=policy)
        self._note()

    def _note(self) -> None:
        log = self.log
        self.states.append((log.start.index, tuple(contents(log))))

    def write(self, *values: bytes, term: int | None = None, opens: bool | None = None) -> None:
        self.log.append([frame_for(self.log, list(values), term=term, opens=opens)])
        self._note()

    def again(self, frame: bytes) -> None:
        self.log.append([frame])
        self._note()

    def truncate(self, index: int) -> None:
        self.log.truncate(index)
        self._note()

    def set_start(self, index: int) -> None:
        row = self.log.row(index)
        self.log.set_start(index=index, term=row.term, offset=row.next_offset)
        self._note()

    async def settle(self) -> None:
        """What a leader or follower waits for before it acknowledges."""
        number = len(self.states) - 1
        await self.storage.settled(self.log)
        assert self.log.durable_index == self.log.last_index
        self.acknowledged = number

    async def sync_segments(self) -> None:
        """What the interval does when it is over."""
        intervals = self.storage._intervals
        if self.log in intervals._waiting:
            intervals._start_sync(self.log)
        for _ in range(3):
            await asyncio.sleep(0)

    def check(self, recovered: Storage, *, power_lost: bool) -> None:
        """What was synced is there; what was acknowledged too, or the log says that it may have forgotten."""
        log = recovered.logs.get(1)
        if log is None:
            assert self.acknowledged == 0 and self.log.synced_index == 0, "the log is gone"
            return
        found: State = (log.start.index, tuple(contents(log)))
        assert log.recovering <= power_lost, "a mark without a power loss"
        later = self.states[self.acknowledged :]
        if not log.recovering:
            assert found in later, f"{_shape(found)} is none of {[_shape(state) for state in later]}"
            return
        assert log.power_lost and log.incarnation == 1
        start, frames = found
        assert any(start == state[0] and frames == state[1][: len(frames)] for state in self.states), (
            f"{_shape(found)} is no beginning of any of {[_shape(state) for state in self.states]}"
        )
        kept = self.states[-1]
        synced = kept[1][: max(self.log.synced_index - kept[0], 0)]
        here = set(frames)
        assert all(frame in here for frame in synced[max(start - kept[0], 0) :]), (
            f"synced up to {self.log.synced_index} of {_shape(kept)}, found {_shape(found)}"
        )


def _shape(state: State) -> str:
    return f"{state[0]}+{[len(frame) for frame in state[1]]}"


Script = Callable[[IntervalHistory], Awaitable[None]]


async def _growing(h: IntervalHistory) -> None:
    """Appends over segment borders, with syncs, checkpoints and a new start in between."""
    h.create()
    h.write(b"a" * 700)
    h.write(b"b" * 900, b"c")
    await h.settle()
    h.write(b"d" * 300)
    await h.settle()
    await h.sync_segments()
    h.write(b"e" * 30, opens=True)
    h.write(b"f" * 1200)
    await h.settle()
    await h.storage.checkpoint()
    h.write(b"g" * 700)
    await h.settle()
    await h.sync_segments()
    h.set_start(2)
    h.write(b"h" * 100, opens=True)
    await h.settle()
    h.set_start(7)
    await h.settle()
    h.write(b"i" * 600, opens=True)
    h.storage.record_hard_state(5, term=1, vote=0, log=h.log)
    h.write(b"j" * 600)
    await h.settle()
    await h.sync_segments()
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
    await h.sync_segments()
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
    await h.sync_segments()
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


async def _perform(script: Script, disk: FaultDisk) -> IntervalHistory | None:
    try:
        storage = open_inline(disk)
    except PowerCut:
        return None
    history = IntervalHistory(storage)
    try:
        await script(history)
    except (StorageClosed, PowerCut):
        pass
    for _ in range(5):
        await asyncio.sleep(0)
    return history


def _steps(script: Script) -> int:
    disk = FaultDisk()
    run(_perform(script, disk))
    return disk.steps


def _reopen(
    history: IntervalHistory | None, disk: FaultDisk, rng: random.Random, *, power_lost: bool
) -> None:
    """Recover, possibly with more of the same in the recovery itself; then compare."""

    async def reopen() -> None:
        for _ in range(rng.choice([0, 0, 1, 2])):
            disk.cut_after = disk.steps + rng.randrange(1, 40)
            try:
                await open_inline(disk, seed=rng.getrandbits(30)).close()
            except (PowerCut, StorageError):
                pass
            if power_lost:
                disk.crash(rng, keep=rng.choice([0.0, 0.5, 1.0]))
            else:
                disk.kill()
        storage = open_inline(disk, seed=rng.getrandbits(30))
        if history is not None and history.states:
            history.check(storage, power_lost=power_lost)

    run(reopen())


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_kill_at_any_step_keeps_everything_acknowledged(script: Script) -> None:
    """What was written is in the page cache: after kill -9 it is all there, in order, and not marked."""
    rng = random.Random(f"kill {script.__name__}")
    for step in range(1, _steps(script) + 1):
        disk = FaultDisk()
        disk.cut_after = step
        history = run(_perform(script, disk))
        disk.kill()
        _reopen(history, disk, rng, power_lost=False)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_a_power_loss_at_any_step_keeps_what_was_synced_and_says_so(script: Script, keep: float) -> None:
    """The synced entries are there, none but those appended, and the log is marked if any may be gone."""
    rng = random.Random(f"power {script.__name__} {keep}")
    for step in range(1, _steps(script) + 1):
        disk = FaultDisk()
        disk.cut_after = step
        history = run(_perform(script, disk))
        disk.crash(rng, keep)
        _reopen(history, disk, rng, power_lost=True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_pitfall_33_a_power_loss_behind_a_restart_takes_nothing_that_the_restart_found(
    script: Script,
) -> None:
    """kill -9, restart, power loss before anything else is written: all that was acknowledged is there."""
    rng = random.Random(f"kill and power {script.__name__}")
    for step in range(1, _steps(script) + 1):
        disk = FaultDisk()
        disk.cut_after = step
        history = run(_perform(script, disk))
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
