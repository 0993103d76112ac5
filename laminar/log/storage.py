"""A shard's storage: its logs, its hard states, and the one journal that makes both durable.

The loop records changes; a frame of them is cut at the end of the turn, or as soon as the sync before it
has returned (group commit without a timer), written and synced by the journal's thread, and its waiters
are told at once. The segments follow in the writer's thread. It does not know Raft: what must be durable
before which message leaves is the driver's to say, by waiting for `sync`.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

from laminar.log.codec import ONE, PAIR, RecordKind, record_head
from laminar.log.disk import Buffer, Disk
from laminar.log.errors import DiskError, StorageClosed, StorageError
from laminar.log.journal import Written
from laminar.log.log import Log
from laminar.log.manifest import Manifest, ReplicaEntry
from laminar.log.pending import Create, Delete, Pending, Replace, Vote
from laminar.log.reading import Readers
from laminar.log.recovery import Recovered, recover_home
from laminar.log.settings import StorageSettings
from laminar.log.state import HardState, LogFiles
from laminar.log.worker import ThreadWorker, Worker

# The folder has the log's id (16 digits) behind it; a topic of 200 characters and its partition fit.
_MAX_NAME_BYTES = 220


class Storage:
    """See the module. Made by `open`; call it from the loop's thread only."""

    def __init__(
        self,
        disk: Disk,
        logs_directory: str,
        recovered: Recovered,
        *,
        settings: StorageSettings,
        rng: random.Random,
        workers: Callable[[str], Worker],
    ) -> None:
        self._disk = disk
        self._logs_directory = logs_directory
        self._recovered = recovered
        self._settings = settings
        self._rng = rng
        self.logs: dict[int, Log] = recovered.logs
        # Term and vote by replica id, as recorded (so possibly ahead of the disk).
        self.hard_states: dict[int, HardState] = recovered.hard_states
        # Replicas whose newest hard state may be gone: they must neither vote nor answer.
        self.lost_hard_states: set[int] = recovered.lost_hard_states
        self.manifest: Manifest = recovered.manifest
        # Told once, on the loop, when the journal cannot be trusted any more: the process must end.
        self.on_failure: Callable[[BaseException], None] | None = None
        self._recorder = recovered.recorder
        self._recorder.on_record = self._schedule
        self._journal = recovered.journal
        self._writer = recovered.writer
        self._journal_worker = workers("journal")
        self._writer_worker = workers("segments")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None
        self._closed = False
        # Group commit: running numbers (see `Recorder`) of what was cut and of what is durable.
        self._scheduled = False
        self._in_flight = False
        self._blocked = False
        self._cut_number = self._recorder.recorded
        self._durable_number = self._recorder.recorded
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        # Bytes handed to the writer's thread, and bytes it has written; each counted by one thread only.
        self._handed_bytes = 0
        self._written_bytes = 0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._quiet_since = 0.0
        self._frames = 0
        self._markers = 0

    @classmethod
    def open(
        cls,
        disk: Disk,
        home: str,
        logs_directory: str,
        *,
        settings: StorageSettings | None = None,
        rng: random.Random | None = None,
        workers: Callable[[str], Worker] = ThreadWorker,
        readers: Executor | None = None,
    ) -> Storage:
        """Lock and recover a home (a new one is made where there is none). Blocks; needs no loop.

        `rng` seeds generations and log ids: leave it out in production. Raises `StorageError`.
        """
        settings = settings or StorageSettings()
        rng = rng or random.SystemRandom()
        pool = Readers(
            threads=settings.reader_threads, inline_bytes=settings.inline_read_bytes, executor=readers
        )
        recovered = recover_home(disk, home, logs_directory, settings=settings, rng=rng, readers=pool)
        return cls(disk, logs_directory, recovered, settings=settings, rng=rng, workers=workers)

    # Logs

    def create_log(self, name: str, log_id: int | None = None) -> Log:
        """A new, empty log. It has no files before its first entry, and is durable with the next `sync`."""
        assert name and "/" not in name and len(name.encode()) <= _MAX_NAME_BYTES, f"a log named {name!r}"
        if log_id is None:
            log_id = self._rng.getrandbits(63)
        assert log_id not in self.logs, f"log id {log_id:#x} is taken by {self.logs[log_id]!r}"
        files = LogFiles(self._disk, self._logs_directory, name=name, log_id=log_id)
        readers = self._recovered.readers
        log = Log(files, self._recorder, readers, segment_size_bytes=self._settings.segment_size_bytes)
        self.logs[log_id] = log
        encoded = name.encode()
        self._recorder.record(record_head(RecordKind.CREATED, log_id, len(encoded)), encoded, Create(files))
        return log

    def delete_log(self, log_id: int) -> asyncio.Future[None]:
        """Forget a log; its files go to the trash. Done when that is durable."""
        log = self.logs.pop(log_id)
        log.changes += 1
        self._recorder.record(record_head(RecordKind.DELETED, log_id, 0), b"", Delete(log.files))
        return self.sync()

    def replace_log(self, old_log_id: int, new: Log) -> asyncio.Future[None]:
        """Let `new` stand for the old log from one record on; done when that is durable.

        A crash before it leaves both logs as they were. Until the manifest names the new id, `resolve`
        leads from the old one to it.
        """
        assert self.logs.get(new.log_id) is new, f"{new!r} is not of this storage"
        old = self.logs.pop(old_log_id)
        old.changes += 1
        self._recorder.record(
            record_head(RecordKind.RESET, new.log_id, ONE.size),
            ONE.pack(old_log_id),
            Replace(new.files, old.files),
        )
        return self.sync()

    def resolve(self, log_id: int) -> int:
        """The id of the log that stands for `log_id` by now."""
        return self._writer.replaced.get(log_id, log_id)

    # Hard states

    def record_hard_state(self, replica_id: int, *, term: int, vote: int) -> None:
        """Let the next frame carry a replica's term and vote; durable when a later `sync` is done."""
        state = HardState(term, vote)
        self.hard_states[replica_id] = state
        self._recorder.record(
            record_head(RecordKind.HARD_STATE, replica_id, PAIR.size),
            PAIR.pack(term, vote),
            Vote(replica_id, term, vote),
        )

    # Group commit

    def sync(self) -> asyncio.Future[None]:
        """Done when everything recorded before this call is durable. Each call has a future of its own."""
        future = self._loop_now().create_future()
        if self._failure is not None or self._closed:
            future.set_exception(StorageClosed(f"the journal is closed: {self._failure}"))
        elif self._durable_number >= self._recorder.recorded:
            future.set_result(None)
        else:
            self._waiters.append((self._recorder.recorded, future))
            self._schedule()
        return future

    def _loop_now(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def _schedule(self) -> None:
        """Cut a frame at the end of this turn, unless one is under way: its end cuts the next."""
        if self._scheduled or self._in_flight:
            return
        if self._loop is None:
            try:
                self._loop = asyncio.get_running_loop()
            except RuntimeError:
                return  # recorded before there is a loop: the first `sync` schedules it
        self._scheduled = True
        self._loop.call_soon(self._cut_scheduled)

    def _cut_scheduled(self) -> None:
        self._scheduled = False
        self._cut()

    def _cut(self) -> None:
        """Hand what is recorded to the journal's thread as one frame."""
        recorder = self._recorder
        if self._in_flight or self._failure is not None or not recorder.pending:
            return
        if self._handed_bytes - self._written_bytes > self._settings.max_unwritten_bytes:
            self._blocked = True
            # It may have caught up between the two lines; it looks at `_blocked` after it has counted.
            if self._handed_bytes - self._written_bytes > self._settings.max_unwritten_bytes:
                return
            self._blocked = False
        before = recorder.pending_bytes
        taken = recorder.take(self._settings.max_frame_bytes)
        size = before - recorder.pending_bytes
        touched = list(recorder.touched)
        if not recorder.pending:
            recorder.touched.clear()
        self._cut_number += len(taken)
        self._handed_bytes += size
        self._frames += 1
        self._start_frame(taken, touched, size)

    def _start_frame(self, taken: list[Pending], touched: list[Log], size: int) -> None:
        self._in_flight = True
        self._journal_worker.submit(partial(self._write_frame, taken, touched, size, self._cut_number))

    def _write_frame(self, taken: list[Pending], touched: list[Log], size: int, number: int) -> None:
        """In the journal's thread: write, sync, tell the loop, and only then let the segments follow."""
        loop = self._loop
        assert loop is not None, "a frame was cut without a loop"
        try:
            parts: list[Buffer] = []
            hard_states: list[Buffer] = []
            for head, payload, action in taken:
                parts.append(head)
                parts.append(payload)
                if type(action) is Vote:
                    hard_states += (head, payload)
            place = self._journal.write(parts, records=len(taken), hard_states=hard_states)
        except BaseException as error:
            self._tell(loop, partial(self._fail, error))
            if not isinstance(error, Exception):
                raise
            return
        self._tell(loop, partial(self._durable, number, touched, not taken))
        self._writer_worker.submit(partial(self._write_segments, taken, place, size, number))

    def _durable(self, number: int, touched: list[Log], marker: bool) -> None:
        """On the loop: a frame is synced."""
        self._in_flight = False
        self._durable_number = number
        for log in touched:
            log.durable_up_to(number)
        waiters = self._waiters
        while waiters and waiters[0][0] <= number:
            _, future = waiters.popleft()
            if not future.done():
                future.set_result(None)
        if self._recorder.pending:
            self._cut()
        elif not marker:
            self._await_quiet()

    def _await_quiet(self) -> None:
        loop = self._loop_now()
        self._quiet_since = loop.time()
        if self._idle_timer is None and not self._closed:
            self._idle_timer = loop.call_later(self._settings.idle_marker_ms / 1000, self._mark_quiet)

    def _mark_quiet(self) -> None:
        """Nothing has come since the last sync: end the journal in a frame that does not matter."""
        self._idle_timer = None
        if self._in_flight or self._recorder.pending or self._failure is not None or self._closed:
            return
        loop = self._loop_now()
        due = self._quiet_since + self._settings.idle_marker_ms / 1000
        if loop.time() < due:
            self._idle_timer = loop.call_at(due, self._mark_quiet)
            return
        self._markers += 1
        self._start_frame([], [], 0)

    # Behind the journal

    def _write_segments(self, taken: list[Pending], place: Written, size: int, number: int) -> None:
        """In the writer's thread."""
        loop = self._loop
        assert loop is not None, "segments were written without a loop"
        try:
            self._writer.apply([action for _, _, action in taken], place)
            self._recorder.written = number
            self._written_bytes += size
            if self._blocked:
                self._tell(loop, self._unblock)
            if self._journal.wants_spare():
                self._journal.prepare_spare()
            if self._writer.due():
                self._checkpoint()
        except BaseException as error:
            self._tell(loop, partial(self._fail, error))
            if not isinstance(error, Exception):
                raise

    def _checkpoint(self) -> None:
        try:
            self._writer.checkpoint()
        except DiskError:
            # A full or failing disk. The former checkpoint and the journal still stand for everything; if
            # this goes on, `refusal` names it.
            self._writer.failed_checkpoints += 1

    def _unblock(self) -> None:
        if self._blocked:
            self._blocked = False
            self._cut()

    def _tell(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        try:
            loop.call_soon_threadsafe(callback)
        except RuntimeError:
            pass  # the loop is closed: nobody is left who could be told

    def _fail(self, error: BaseException) -> None:
        """The journal (or our own code behind it) failed: nothing recorded from now on can become durable."""
        if self._failure is not None:
            return
        self._failure = error
        waiters, self._waiters = self._waiters, deque()
        for _, future in waiters:
            if not future.done():
                future.set_exception(StorageClosed(f"the journal failed: {error!r}"))
        if self.on_failure is not None:
            self.on_failure(error)

    # Everything else

    async def write_manifest(self, entries: Sequence[ReplicaEntry]) -> None:
        """Replace the manifest; durable when it returns."""
        entries = list(entries)

        def write() -> None:
            self.manifest.replace(entries)
            named = {entry.log_id for entry in entries}
            replaced = self._writer.replaced
            self._writer.replaced = {old: new for old, new in replaced.items() if old in named}

        await self._in_writer(write)

    async def checkpoint(self) -> None:
        """Make a checkpoint of everything that is in its segment by now."""
        await self._in_writer(self._writer.checkpoint)

    def _in_writer(self, work: Callable[[], None]) -> asyncio.Future[None]:
        """Run something in the writer's thread, behind what was handed to it before."""
        loop = self._loop_now()
        future: asyncio.Future[None] = loop.create_future()
        if self._closed:
            future.set_exception(StorageClosed("the storage is closed"))
            return future

        def finish(error: StorageError | None) -> None:
            if not future.done():
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)

        def task() -> None:
            try:
                work()
            except StorageError as error:
                self._tell(loop, partial(finish, error))
            except BaseException as error:
                self._tell(loop, partial(self._fail, error))
                raise
            else:
                self._tell(loop, partial(finish, None))

        # By way of the journal's thread, as the frames it has synced: else this could overtake one whose
        # waiters have been told already.
        self._journal_worker.submit(partial(self._writer_worker.submit, task))
        return future

    @property
    def refusal(self) -> str | None:
        """Why new records should be refused for now: "disk" (full), "journal" (too long); else None."""
        if self._journal.starved:
            return "disk"
        if self._writer.journal_bytes > self._settings.max_journal_bytes:
            return "journal"
        return None

    def statistics(self) -> dict[str, int]:
        """Counters and gauges, cheap enough for every scrape."""
        return {
            **{f"journal_{name}": value for name, value in self._journal.statistics().items()},
            "frames": self._frames,
            "markers": self._markers,
            "checkpoints": self._writer.checkpoints,
            "failed_checkpoints": self._writer.failed_checkpoints,
            "journal_bytes_since_checkpoint": self._writer.journal_bytes,
            "pending_bytes": self._recorder.pending_bytes,
            "recent_bytes": self._recorder.recent_bytes,
            "unwritten_bytes": self._handed_bytes - self._written_bytes,
            "logs": len(self.logs),
        }

    async def close(self) -> None:
        """Sync what is recorded, make a last checkpoint, and let go of files and lock."""
        if self._closed:
            return
        if self._failure is None:
            try:
                await self.sync()
                await self.checkpoint()
            except StorageError:
                pass  # what is durable is in the journal; the next start reads it from there
        self._closed = True
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._journal_worker.close()
        self._writer_worker.close()
        self._recovered.close()
