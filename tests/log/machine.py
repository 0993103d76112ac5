"""A node's storage against a model of Python lists: everything that may happen to it, as rules.

Each history of a shard keeps a picture after every change. Whatever a way down leaves must be one of these
pictures, not older than the last acknowledged one, whichever shards the logs come back to. Damage is done to
a copy of the disk, so that the run goes on from a sound one.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from laminar.batch import Header
from laminar.log import ReplicaEntry, ShardLayout, recover_node, shard_store
from laminar.log.disk.errors import StorageClosed, StorageError
from laminar.log.format.settings import StorageSettings
from laminar.log.partition_log.log import Log
from laminar.log.storage import Storage
from tests.disks.fault_disk import BLOCK, FaultDisk, PowerCut
from tests.log.histories import History, Picture, contents, open_inline, picture_of

SETTINGS = StorageSettings(
    segment_size_bytes=1500,
    first_journal_file_bytes=8192,
    journal_file_bytes=16384,
    checkpoint_bytes=24 * 1024,
    max_frame_bytes=4096,
    recent_bytes=2000,
    # Never by a timer: a rule writes the end mark, so that each run repeats exactly. And a storage that a
    # crash left behind must not write its next checkpoint into the life that follows.
    idle_marker_ms=1_000_000,
    retry_ms=1_000_000_000,
)
_PICKS = st.integers(0, 11)
_SEEDS = st.integers(0, 1 << 20)
_KEEPS = st.sampled_from([0.0, 0.5, 1.0])
_WAYS = st.sampled_from(
    ["power cut", "power cut in recovery", "failing disk", "kill", "kill, then power cut"]
)
_SIZES = st.lists(st.integers(0, 900), max_size=3)


def _shard_of(entry: ReplicaEntry, shards: int) -> int:
    return entry.partition_hash % shards


def open_node(disk: FaultDisk, shards: int, seed: int) -> list[Storage]:
    """What a node does at its start: every journal recovered, then each shard's home opened."""
    found: ShardLayout = recover_node(
        disk, "data", shards=shards, shard_of=_shard_of, settings=SETTINGS, rng=random.Random(seed)
    )
    homes = [shard_store("data", found, shard) for shard in range(shards)]
    return [open_inline(disk, settings=SETTINGS, home=home, seed=seed) for home in homes]


def merged(pictures: list[Picture]) -> Picture:
    """All logs and hard states of a node."""
    logs: dict[int, tuple[int, tuple[bytes, ...]]] = {}
    hard_states: dict[int, tuple[int, int]] = {}
    for picture in pictures:
        assert not logs.keys() & picture.logs.keys(), "a log has two owners"
        logs |= picture.logs
        hard_states |= picture.hard_states
    return Picture(logs, hard_states)


class StorageMachine(RuleBasedStateMachine):
    """See the module. `done` counts what was done over all runs."""

    done: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.disk = FaultDisk()
        self.disk.on_step = self._note_step
        self.histories: list[History] = []
        self.term = 1
        self.lives = 0
        self.last_log_id = 0

    def _note_step(self, operation: str, path: str) -> None:
        if operation == "rename" and "/journal-" in path:
            self.done["reuse"] += 1

    def teardown(self) -> None:
        self.disk.cut_after = None
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    @initialize(shards=st.integers(1, 3))
    def begin(self, shards: int) -> None:
        self._open(shards)
        for history in self.histories:
            self.last_log_id += 1
            log_id = self.last_log_id
            self._run(partial(history.create, log_id))
            self._run(history.sync)

    def _open(self, shards: int) -> None:
        self.lives += 1
        self.histories = [History(storage) for storage in open_node(self.disk, shards, self.lives)]

    def _run(self, work: Callable[[], Any]) -> Any:
        async def main() -> Any:
            found = work()
            return await found if asyncio.iscoroutine(found) or asyncio.isfuture(found) else found

        return self.loop.run_until_complete(main())

    def _logs(self) -> list[tuple[History, Log]]:
        found = [(history, log) for history in self.histories for log in history.storage.logs.values()]
        return sorted(found, key=lambda each: each[1].log_id)

    def _pick(self, pick: int) -> tuple[History, Log]:
        logs = self._logs()
        return logs[pick % len(logs)]

    # What a partition does

    @precondition(lambda self: len(self._logs()) < 4)
    @rule(shard=_PICKS, named=st.booleans())
    def create(self, shard: int, named: bool) -> None:
        """A new log, and its replica in the manifest (or not yet)."""
        shard %= len(self.histories)
        history = self.histories[shard]
        self.last_log_id += 1
        log_id = self.last_log_id

        async def create() -> None:
            history.create(log_id)
            if named:
                entry = ReplicaEntry(
                    log_id=log_id,
                    replica_id=100 + log_id,
                    group=bytes(16),
                    topic="t",
                    partition=log_id,
                    partition_hash=shard + len(self.histories) * log_id,
                )
                await history.storage.write_manifest([*history.storage.manifest.entries, entry])

        self._run(create)

    @precondition(lambda self: self._logs())
    @rule(pick=_PICKS, sizes=_SIZES, newer=st.booleans())
    def append(self, pick: int, sizes: list[int], newer: bool) -> None:
        self._append(pick, [sizes], newer, opens=False)

    @precondition(lambda self: self._logs())
    @rule(pick=_PICKS, batches=st.lists(_SIZES, min_size=2, max_size=4), newer=st.booleans())
    def append_together(self, pick: int, batches: list[list[int]], newer: bool) -> None:
        self._append(pick, batches, newer, opens=False)

    @precondition(lambda self: self._logs())
    @rule(pick=_PICKS, newer=st.booleans())
    def roll(self, pick: int, newer: bool) -> None:
        """An entry that opens a segment."""
        self._append(pick, [[7]], newer, opens=True)

    def _append(self, pick: int, batches: list[list[int]], newer: bool, *, opens: bool) -> None:
        self.term += newer
        history, log = self._pick(pick)
        rng = random.Random(f"{self.term} {log.last_index}")
        values = [[rng.randbytes(size) for size in sizes] for sizes in batches]
        if len(values) == 1:
            self._run(lambda: history.write(log.log_id, *values[0], term=self.term, opens=opens or None))
        else:
            self._run(lambda: history.write_together(log.log_id, values, term=self.term))

    @precondition(lambda self: self._logs())
    @rule(pick=_PICKS, back=st.integers(1, 6))
    def truncate(self, pick: int, back: int) -> None:
        history, log = self._pick(pick)
        index = max(log.last_index - back + 1, log.first_index)
        if index <= log.last_index:
            self._run(lambda: history.truncate(log.log_id, index))

    @precondition(lambda self: self._logs())
    @rule(pick=_PICKS, ahead=st.integers(0, 5))
    def set_start(self, pick: int, ahead: int) -> None:
        """Give up entries at the front, also a part of a segment."""
        history, log = self._pick(pick)
        index = min(log.first_index + ahead, log.durable_index)
        if index >= log.first_index:
            self._run(lambda: history.set_start(log.log_id, index))

    @precondition(lambda self: self._logs())
    @rule(pick=_PICKS)
    def expire(self, pick: int) -> None:
        """Give up the first segment, as retention does."""
        history, log = self._pick(pick)
        border = [first for first in log.segment_first_indexes if first - 1 > log.start.index][:1]
        if border and border[0] - 1 <= log.durable_index:
            self._run(lambda: history.set_start(log.log_id, border[0] - 1))

    @precondition(lambda self: len(self._logs()) > 1)
    @rule(pick=_PICKS)
    def delete(self, pick: int) -> None:
        history, log = self._pick(pick)
        storage = history.storage

        async def delete() -> None:
            entries = [entry for entry in storage.manifest.entries if entry.log_id != log.log_id]
            await storage.write_manifest(entries)
            history.delete(log.log_id)

        self._run(delete)

    @precondition(lambda self: self._logs())
    @rule(pick=_PICKS)
    def vote(self, pick: int) -> None:
        self.term += 1
        history, log = self._pick(pick)
        self._run(lambda: history.vote(100 + log.log_id, self.term, pick))

    @precondition(lambda self: self._logs())
    @rule(pick=_PICKS, first=st.integers(0, 30), max_bytes=st.integers(0, 4000), cold=st.booleans())
    def read(self, pick: int, first: int, max_bytes: int, cold: bool) -> None:
        """Whole frames from one on, at least one, within the limit; also when the disk must be asked."""
        history, log = self._pick(pick)
        start, frames = history.pictures[-1].logs[log.log_id]
        if not frames:
            return
        first %= len(frames)
        self.disk.cold = cold
        found = self._run(lambda: log.read(start + 1 + first, log.last_index, max_bytes=max_bytes))
        self.disk.cold = False
        assert found
        assert list(frames[first : first + len(found)]) == [bytes(frame) for frame in found]
        assert len(found) == 1 or sum(map(len, found)) <= max_bytes
        header = Header.unpack(frames[first])
        for offset in range(header.base_offset, header.base_offset + header.count):
            assert start + 1 + first == log.index_of_offset(offset)

    # What the storage does

    @rule(pick=_PICKS)
    def sync(self, pick: int) -> None:
        self._run(self.histories[pick % len(self.histories)].sync)

    @rule()
    def quiet(self) -> None:
        """Everything is synced, and nothing comes behind it: the idle marker."""
        for history in self.histories:
            self._run(partial(_come_to_rest, history))

    @rule(pick=_PICKS)
    def checkpoint(self, pick: int) -> None:
        self._run(self.histories[pick % len(self.histories)].storage.checkpoint)

    # Ways to go down, and to come back

    @rule(how=_WAYS, pick=_PICKS, steps=st.integers(1, 60), keep=_KEEPS, seed=_SEEDS, shards=_PICKS)
    def go_down(self, how: str, pick: int, steps: int, keep: float, seed: int, shards: int) -> None:
        """And come back, possibly with another number of shards. One rule, so that it is not most of them."""
        history = self.histories[pick % len(self.histories)]
        rng = random.Random(seed)
        if how == "power cut":
            self._power_cut(history, steps // 2, shards, partial(self.disk.crash, rng, keep))
        elif how == "power cut in recovery":
            self._power_cut_in_recovery(steps, shards, rng, keep)
        elif how == "failing disk":
            self._failing_disk(history, pick)
            self._restart_to_recover(self.disk.kill, shards)
            self._restart_to_recover(partial(self.disk.crash, rng, 0.0), 11)
        else:
            self._restart_to_recover(self.disk.kill, shards)
            if how == "kill, then power cut":
                # What was told after the kill is still there after the power went.
                self._restart_to_recover(partial(self.disk.crash, rng, 0.0), 11)

    def _power_cut(self, history: History, steps: int, shards: int, crash: Callable[[], None]) -> None:
        """The power goes somewhere in the next sync or checkpoint, or behind it."""
        self.disk.cut_after = self.disk.steps + steps
        try:
            self._run(history.sync)
            self._run(history.storage.checkpoint)
        except (StorageClosed, PowerCut):
            pass
        self._restart_to_recover(crash, shards)

    def _power_cut_in_recovery(self, steps: int, shards: int, rng: random.Random, keep: float) -> None:
        """Killed or cut off, and the power goes again while the node comes back."""
        self._down(self.disk.kill if rng.random() < 0.5 else partial(self.disk.crash, rng, keep))
        self.disk.cut_after = self.disk.steps + steps
        try:
            open_node(self.disk, self._count(shards), steps)
        except PowerCut:
            pass
        self._restart_to_recover(partial(self.disk.crash, rng, keep), shards)

    def _failing_disk(self, history: History, pick: int) -> None:
        """Syncs, or all that needs room, fail in some files."""
        names = ("journal", ".log", "checkpoint", "")
        operations, number = (
            (("write", "create"), errno.ENOSPC) if pick > 7 else (("sync", "sync directory"), errno.EIO)
        )
        name = names[pick % 4]
        self.disk.error = lambda operation, path: number if operation in operations and name in path else None
        try:
            self._run(history.sync)
            self._run(history.storage.checkpoint)
        except StorageError:
            pass

    @rule(seed=_SEEDS, bit=st.booleans(), shards=_PICKS)
    def damage(self, seed: int, bit: bool, shards: int) -> None:
        """At rest a block rots, or one bit of it: reported, or the log is marked; never silent, never cut."""
        self.quiet()
        rng = random.Random(seed)
        disk = self.disk.copy()
        disk.crash(rng, keep=rng.choice([0.0, 1.0]))
        path, size = rng.choice(disk.files("data"))
        at = rng.randrange(size)
        if bit:
            disk.rot(path, at, mask=1 << rng.randrange(8))
        else:
            disk.rot(path, at // BLOCK * BLOCK, BLOCK)
        storages = open_node(disk, self._count(shards), seed)
        self.done["damage"] += 1
        for history in self.histories:
            self._run(partial(history.check_damaged, storages, path))

    def _count(self, shards: int) -> int:
        """Every other time as many shards as now."""
        return shards % 3 + 1 if shards < 6 else len(self.histories)

    def _down(self, down: Callable[[], None]) -> None:
        self.loop.run_until_complete(asyncio.sleep(0))
        down()

    def _restart_to_recover(self, down: Callable[[], None], shards: int) -> None:
        self._down(down)
        before, count = self.histories, self._count(shards)
        self.done["down"] += 1
        self.done["other shards"] += count != len(before)
        self._open(count)
        node = merged([picture_of(history.storage) for history in self.histories])
        for history in before:
            history.check_part(node)
        for history in self.histories:
            history.check_no_mark(history.storage)
        pictured = {log_id for history in before for picture in history.pictures for log_id in picture.logs}
        assert node.logs.keys() <= pictured, "a log came from nowhere"

    @invariant()
    def memory_agrees_with_the_model(self) -> None:
        self.done["step"] += 1
        for history in self.histories:
            assert history.pictures[-1] == picture_of(history.storage)
            for log in history.storage.logs.values():
                assert log.durable_index <= log.last_index
                assert log.size_bytes >= sum(map(len, contents(log)))


async def _come_to_rest(history: History) -> None:
    await history.sync()
    commits = history.storage._commits
    commits._quiet_since = -1e9
    if commits._idle_timer is not None:
        commits._idle_timer.cancel()
    commits._write_idle_marker()
