"""A storage against a model of Python lists, with crashes as rules; and torn journals of any length."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from laminar.log.errors import StorageClosed
from laminar.log.settings import StorageSettings
from tests.log.crash_disk import CrashDisk, PowerCut
from tests.log.histories import HOME, History, contents, open_inline, picture_of, run

_SETTINGS = StorageSettings(
    segment_size_bytes=1500,
    first_journal_file_bytes=8192,
    journal_file_bytes=16384,
    checkpoint_bytes=24 * 1024,
    max_frame_bytes=4096,
    recent_bytes=2000,
    # Never by a timer: a rule writes the marker, so that each run repeats exactly.
    idle_marker_ms=1_000_000,
)
_LOGS = st.integers(1, 3)
_SIZES = st.lists(st.integers(0, 900), max_size=3)


class StorageMachine(RuleBasedStateMachine):
    """Everything that may be recorded, synced or not, and every way to go down."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.disk = CrashDisk()
        self.term = 1
        self.lives = 0

    @initialize()
    def begin(self) -> None:
        self._open()

    def _open(self) -> None:
        self.lives += 1
        storage = open_inline(self.disk, settings=_SETTINGS, seed=self.lives)
        self.history = History(storage)

    def _run(self, work: Any) -> Any:
        async def main() -> Any:
            found = work()
            return await found if asyncio.iscoroutine(found) else found

        return self.loop.run_until_complete(main())

    def teardown(self) -> None:
        self.disk.cut_after = None
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    @precondition(lambda self: len(self.history.storage.logs) < 3)
    @rule()
    def create(self) -> None:
        free = next(log_id for log_id in range(1, 1000) if log_id not in self._used())
        self._run(lambda: self.history.create(free))

    def _used(self) -> set[int]:
        names = self.disk.list("data/logs") + self.disk.list("data/trash")
        pictured = {log_id for picture in self.history.pictures for log_id in picture.logs}
        return pictured | {int(name.rsplit("-", 1)[1], 16) for name in names}

    @precondition(lambda self: self.history.storage.logs)
    @rule(
        pick=_LOGS, sizes=st.lists(st.integers(0, 900), max_size=3), newer=st.booleans(), opens=st.booleans()
    )
    def write(self, pick: int, sizes: list[int], newer: bool, opens: bool) -> None:
        self.term += newer
        log_id = self._pick(pick)
        values = [random.Random(self.term).randbytes(size) for size in sizes]
        self._run(lambda: self.history.write(log_id, *values, term=self.term, opens=opens or None))

    def _pick(self, pick: int) -> int:
        ids = sorted(self.history.storage.logs)
        return ids[pick % len(ids)]

    @precondition(lambda self: self.history.storage.logs)
    @rule(pick=_LOGS, back=st.integers(1, 6))
    def truncate(self, pick: int, back: int) -> None:
        log_id = self._pick(pick)
        log = self.history.storage.logs[log_id]
        index = max(log.last_index - back + 1, log.first_index)
        if index <= log.last_index:
            self._run(lambda: self.history.truncate(log_id, index))

    @precondition(lambda self: self.history.storage.logs)
    @rule(pick=_LOGS, ahead=st.integers(0, 5))
    def set_start(self, pick: int, ahead: int) -> None:
        log_id = self._pick(pick)
        log = self.history.storage.logs[log_id]
        index = min(log.first_index + ahead, log.durable_index)
        if index >= log.first_index:
            self._run(lambda: self.history.set_start(log_id, index))

    @precondition(lambda self: len(self.history.storage.logs) > 1)
    @rule(pick=_LOGS)
    def delete(self, pick: int) -> None:
        log_id = self._pick(pick)
        self._run(lambda: self.history.delete(log_id))

    @rule(replica=st.integers(1, 3))
    def vote(self, replica: int) -> None:
        self.term += 1
        self._run(lambda: self.history.vote(replica, self.term, replica))

    @rule()
    def sync(self) -> None:
        self._run(self.history.sync)

    @rule()
    def quiet(self) -> None:
        async def marker() -> None:
            await self.history.sync()
            storage = self.history.storage
            storage._quiet_since = -1e9
            if storage._idle_timer is not None:
                storage._idle_timer.cancel()
            storage._mark_quiet()

        self._run(marker)

    @rule()
    def checkpoint(self) -> None:
        self._run(self.history.storage.checkpoint)

    @rule(steps=st.integers(1, 30), keep=st.sampled_from([0.0, 0.5, 1.0]), seed=st.integers(0, 1 << 20))
    def power_cut(self, steps: int, keep: float, seed: int) -> None:
        """The power goes somewhere in the next sync or checkpoint, or behind it."""
        self.disk.cut_after = self.disk.steps + steps
        try:
            self._run(self.history.sync)
            self._run(self.history.storage.checkpoint)
        except (StorageClosed, PowerCut):
            pass
        self._come_back(lambda: self.disk.crash(random.Random(seed), keep))

    @rule(seed=st.integers(0, 1 << 20))
    def kill_then_power_cut(self, seed: int) -> None:
        self._come_back(self.disk.kill)
        self._come_back(lambda: self.disk.crash(random.Random(seed), 0.0))

    def _come_back(self, down: Any) -> None:
        self.loop.run_until_complete(asyncio.sleep(0))
        history = self.history
        down()
        self._open()
        history.check(self.history.storage)

    @invariant()
    def memory_agrees_with_the_model(self) -> None:
        assert self.history.pictures[-1] == picture_of(self.history.storage)
        for log in self.history.storage.logs.values():
            assert log.durable_index <= log.last_index
            assert log.size_bytes >= sum(map(len, contents(log)))


TestStorageMachine = StorageMachine.TestCase
TestStorageMachine.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_torn_journal_recovers_the_synced_prefix_or_more() -> None:
    """Cut off at any 512 bytes, the journal gives back a prefix of the frames, whole frames only."""

    async def main() -> None:
        source = CrashDisk()
        roomy = StorageSettings(first_journal_file_bytes=128 * 1024)
        history = History(open_inline(source, settings=roomy))
        history.create(1)
        ends: list[tuple[int, int]] = []
        for number in range(6):
            history.write(1, b"%d" % number * (number * 900))
            if number % 2:
                history.vote(5, number, 1)
            await history.storage.sync()
            ends.append((history.storage._journal._position, number + 1))
        data = bytes(source.open(f"{HOME}/journal-1").pread(1 << 20, 0))
        for cut in range(4096, ends[-1][0] + 512, 512):
            disk = CrashDisk()
            open_inline(disk, settings=roomy)
            disk.kill()
            file = disk.open(f"{HOME}/journal-1")
            file.pwritev([data[:cut] + bytes(len(data) - cut)], 0)
            file.sync()

            log = open_inline(disk, seed=3).logs.get(1)

            held = 0 if log is None else log.last_index
            whole = max((count for end, count in ends if end <= cut), default=0)
            assert whole <= held <= whole + 1
            if log is not None:
                assert not log.recovering
                assert list(history.pictures[-1].logs[1][1][:held]) == contents(log)

    run(main())
