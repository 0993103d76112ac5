"""What the storage tests share: frames as a leader stamps them, and a model of what a storage must hold.

The model is plain Python: after each recorded change a picture of all logs and hard states. Whatever a
crash leaves must be one of these pictures, not older than the last acknowledged one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from laminar.batch import Kind, build, build_control, stamp
from laminar.log import DamagedRange, Log, LogStart, ReplicaEntry, Storage, StorageSettings
from laminar.log.disk.disk import Disk
from laminar.log.disk.errors import StorageError
from laminar.log.disk.threads import SerialInlineExecutor

P = ParamSpec("P")
T = TypeVar("T")

HOME = "data/shards/1-0"
LOGS = "data/logs"
SMALL = StorageSettings(
    segment_size_bytes=2048,
    first_journal_file_bytes=32 * 1024,
    journal_file_bytes=64 * 1024,
    checkpoint_bytes=1 << 30,
    max_frame_bytes=64 * 1024,
    gather_bytes=0,
    recent_bytes=1 << 20,
    idle_marker_ms=1,
)


class InlineExecutor(Executor):
    """Runs a read at once, so that a test repeats exactly."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except StorageError as error:
            future.set_exception(error)
        return future


@dataclass
class End:
    """Where a log ends, as far as the next frame is concerned."""

    last_index: int
    last_term: int
    next_offset: int
    last_append_time_ms: int
    start: LogStart
    segment_full: bool = False


def frame_for(
    log: Log | End,
    values: list[bytes],
    *,
    term: int | None = None,
    opens: bool | None = None,
    time_ms: int = 0,
) -> bytes:
    """A batch stamped to follow the log's last entry, as its leader would."""
    frame = build(values) if values else build_control(Kind.NOOP, b"")
    stamp(
        frame,
        index=log.last_index + 1,
        term=term if term is not None else max(log.last_term, 1),
        prev_term=log.last_term,
        base_offset=log.next_offset,
        append_time_ms=max(time_ms, log.last_append_time_ms),
        committed_index=0,
        opens_segment=(log.segment_full or log.last_index == log.start.index if opens is None else opens),
    )
    return bytes(frame)


def manifest_entry(log_id: int) -> ReplicaEntry:
    """A replica of a group of its own, on this log."""
    return ReplicaEntry(
        log_id=log_id,
        replica_id=100 + log_id,
        group=bytes(16),
        topic="t",
        partition=log_id,
        partition_hash=log_id,
        state="made",
    )


def open_inline(disk: Disk, *, settings: StorageSettings = SMALL, home: str = HOME, seed: int = 1) -> Storage:
    """A storage that does everything on one thread."""
    return Storage.open(
        disk,
        home,
        LOGS,
        settings=settings,
        rng=random.Random(seed),
        workers=SerialInlineExecutor,
        readers=InlineExecutor(),
    )


def contents(log: Log) -> list[bytes]:
    """All frames of a log; those in files by the door of any reader."""
    frames: list[bytes] = []
    while log.first_index + len(frames) <= log.last_index:
        found = log.read_here(log.first_index + len(frames), log.last_index, max_bytes=1 << 20)
        frames += [bytes(frame) for frame in found]
    return frames


@dataclass(frozen=True)
class Picture:
    """Logs by id: the start's index, then the frames. Hard states by replica id: (term, vote)."""

    logs: dict[int, tuple[int, tuple[bytes, ...]]]
    hard_states: dict[int, tuple[int, int]]


def picture_of(storage: Storage) -> Picture:
    return Picture(
        {log_id: (log.start.index, tuple(contents(log))) for log_id, log in storage.logs.items()},
        {replica: (state.term, state.vote) for replica, state in storage.hard_states.items()},
    )


@dataclass
class History:
    """A storage under test, and the pictures after each of its changes."""

    storage: Storage
    pictures: list[Picture] = field(default_factory=list)
    acknowledged: int = 0

    def __post_init__(self) -> None:
        self._logs: dict[int, tuple[int, list[bytes]]] = {
            log_id: (log.start.index, contents(log)) for log_id, log in self.storage.logs.items()
        }
        self._hard_states = {
            replica: (state.term, state.vote) for replica, state in self.storage.hard_states.items()
        }
        self._note()
        self.acknowledged = 0

    def _note(self) -> None:
        logs = {log_id: (start, tuple(frames)) for log_id, (start, frames) in self._logs.items()}
        self.pictures.append(Picture(logs, dict(self._hard_states)))

    def create(self, log_id: int) -> Log:
        log = self.storage.create_log(f"log-{log_id}", log_id)
        self._logs[log_id] = (0, [])
        self._note()
        return log

    def append(self, log_id: int, frame: bytes) -> None:
        self.storage.logs[log_id].append([frame])
        self._logs[log_id][1].append(frame)
        self._note()

    def write(self, log_id: int, *values: bytes, term: int | None = None, opens: bool | None = None) -> None:
        self.append(log_id, frame_for(self.storage.logs[log_id], list(values), term=term, opens=opens))

    def write_together(self, log_id: int, batches: list[list[bytes]], *, term: int) -> None:
        """Several frames in one append."""
        log = self.storage.logs[log_id]
        end = End(
            log.last_index,
            log.last_term,
            log.next_offset,
            log.last_append_time_ms,
            log.start,
            log.segment_full,
        )
        frames = []
        for values in batches:
            frames.append(frame_for(end, values, term=term))
            next_offset = end.next_offset + len(values)
            end = End(end.last_index + 1, term, next_offset, end.last_append_time_ms, end.start)
        log.append(frames)
        for frame in frames:
            # More than one journal frame takes together: a power cut may keep the first of them.
            self._logs[log_id][1].append(frame)
            self._note()

    def truncate(self, log_id: int, index: int) -> None:
        self.storage.logs[log_id].truncate(index)
        start, frames = self._logs[log_id]
        del frames[index - start - 1 :]
        self._note()

    def set_start(self, log_id: int, index: int) -> None:
        log = self.storage.logs[log_id]
        row = log.index_entry(index)
        log.set_start(index=index, term=row.term, offset=row.next_offset)
        start, frames = self._logs[log_id]
        self._logs[log_id] = (index, frames[index - start :])
        self._note()

    def delete(self, log_id: int, *, replica_id: int = 0) -> None:
        deleted = self.storage.delete_log(log_id, replica_id=replica_id)
        deleted.add_done_callback(lambda future: future.exception())
        del self._logs[log_id]
        self._hard_states.pop(replica_id, None)
        self._note()

    def vote(self, replica_id: int, term: int, vote: int) -> None:
        self.storage.record_hard_state(replica_id, term=term, vote=vote)
        self._hard_states[replica_id] = (term, vote)
        self._note()

    async def sync(self) -> None:
        recorded = len(self.pictures) - 1
        await self.storage.sync()
        self.acknowledged = recorded

    def check(self, recovered: Storage) -> None:
        """What came back is a picture not older than the last acknowledged one; no log is marked."""
        self.check_part(picture_of(recovered))
        self.check_no_mark(recovered)

    def check_part(self, node: Picture) -> None:
        """As `check`, of the logs and replicas in it that are of this history."""
        logs = {log_id for picture in self.pictures for log_id in picture.logs}
        replicas = {replica for picture in self.pictures for replica in picture.hard_states}
        found = Picture(
            {log_id: held for log_id, held in node.logs.items() if log_id in logs},
            {replica: state for replica, state in node.hard_states.items() if replica in replicas},
        )
        later = self.pictures[self.acknowledged :]
        assert any(found.logs == picture.logs for picture in later), self._difference(found)
        for replica in set(found.hard_states) | set(self.pictures[self.acknowledged].hard_states):
            wanted = [picture.hard_states.get(replica) for picture in later]
            assert found.hard_states.get(replica) in wanted, (
                f"replica {replica}: {found.hard_states} {wanted}"
            )

    @staticmethod
    def check_no_mark(recovered: Storage) -> None:
        """Nothing was damaged, so nothing is marked, and all is durable."""
        assert not recovered.lost_hard_states
        assert not [log for log in recovered.logs.values() if log.recovering]
        assert all(log.durable_index == log.last_index for log in recovered.logs.values())

    def _difference(self, found: Picture) -> str:
        wanted = self.pictures[self.acknowledged].logs
        return (
            f"recovered { ({key: (start, len(frames)) for key, (start, frames) in found.logs.items()}) }, "
            f"acknowledged { ({key: (start, len(frames)) for key, (start, frames) in wanted.items()}) }"
        )

    def check_damaged(self, storages: Sequence[Storage], path: str) -> None:
        """One block of the file at `path` has rotten: every log serves what it held, names what it can't, or
        is marked.
        """
        logs = {log_id: log for storage in storages for log_id, log in storage.logs.items()}
        hard_states = {replica: s for storage in storages for replica, s in storage.hard_states.items()}
        lost = {replica for storage in storages for replica in storage.lost_hard_states}
        wanted = self.pictures[-1]
        for log_id, (start, frames) in wanted.logs.items():
            log = logs.get(log_id)
            if log is None:
                assert "journal" in path, f"log {log_id} is gone after rot in {path}"
                continue
            if not log.recovering:
                assert (start, start + len(frames)) == (log.start.index, log.last_index), path
                for index, served in enumerate(readable(log)):
                    assert served in (None, frames[index]), f"log {log_id}, entry {start + 1 + index}, {path}"
        for replica, state in wanted.hard_states.items():
            if replica not in lost:
                assert state == (hard_states[replica].term, hard_states[replica].vote), path


def readable(log: Log) -> list[bytes | None]:
    """Each entry's frame, or None where a read names it as damaged."""
    frames: list[bytes | None] = []
    for index in range(log.first_index, log.last_index + 1):
        try:
            found = log.read_here(index, index, max_bytes=1)
            frames.append(bytes(found[0]))
        except DamagedRange as damage:
            assert (index, index) == (damage.first_index, damage.last_index)
            frames.append(None)
    return frames


async def settle(storage: Storage) -> None:
    """Let the idle marker be written."""
    async with asyncio.timeout(60):
        while storage._commits._in_flight or storage._commits._idle_timer is not None:  # noqa: ASYNC110  # a timer
            await asyncio.sleep(0.001)


async def in_segments(storage: Storage) -> None:
    """Wait until what was recorded lies in segments only."""
    await storage.sync()
    await storage.checkpoint()
    storage._changes.evict_written()


def run(main: Coroutine[Any, Any, T] | Awaitable[T]) -> T:
    async def wrapped() -> T:
        return await main

    return asyncio.run(wrapped())
