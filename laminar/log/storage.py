"""A shard's storage: its logs, its hard states, and the one journal that makes both durable.

The loop records changes, `GroupCommit` makes them durable in the journal's thread, and the segments follow in
the writer's thread, with checkpoints in the background thread. This module joins the parts: it has the logs
and hard states by id, stops a log that fails, and closes everything. It does not know Raft: the driver
decides what must be durable before which message leaves, and waits for `sync`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial

from laminar.histogram import Histogram
from laminar.log.commit.checkpoints import Checkpointer
from laminar.log.commit.group_commit import Frame, GroupCommit
from laminar.log.commit.thread_requests import StorageExecutor
from laminar.log.disk.disk import Disk
from laminar.log.disk.document import Document
from laminar.log.disk.errors import DamagedRange, LogRemoved, StorageError
from laminar.log.disk.retry_when_full import DiskFullRetry
from laminar.log.disk.threads import SerialExecutor, SerialThreadExecutor
from laminar.log.format.checkpoint_state import HardState
from laminar.log.format.flush_policy import COMMIT, FlushPolicy
from laminar.log.format.journal_codec import ONE, PAIR, RecordKind, record_head
from laminar.log.format.manifest import Manifest, ManifestChange, ReplicaEntry
from laminar.log.format.settings import StorageSettings
from laminar.log.integrity.damage_registry import DamageRegistry
from laminar.log.integrity.scrubber import Scrubber
from laminar.log.partition_log.changes import Create, Delete, Replace, Vote
from laminar.log.partition_log.log import Log
from laminar.log.partition_log.readers import SegmentReader
from laminar.log.recovery.store import Recovered, recover_store
from laminar.log.segment.log_files import LogFiles

# The directory's name ends in the log's id (16 digits); a topic of 200 characters and its partition fit.
_MAX_NAME_BYTES = 220


class Storage:
    """The storage of one shard, or of a folder of logs: its logs, and the journal that they share.

    It is made by `open`. The loop's thread only.
    """

    def __init__(
        self,
        disk: Disk,
        logs_directory: str,
        recovered: Recovered,
        *,
        settings: StorageSettings,
        rng: random.Random,
        workers: Callable[[str], SerialExecutor],
    ) -> None:
        self._disk = disk
        self._logs_directory = logs_directory
        self._recovered = recovered
        self._settings = settings
        self._rng = rng
        self.logs: dict[int, Log] = recovered.logs
        # Term and vote by replica id, as recorded (so possibly ahead of the disk).
        self.hard_states: dict[int, HardState] = recovered.hard_states
        # Ids of replicas whose newest hard state may be lost: they must neither vote nor answer.
        self.lost_hard_states: set[int] = recovered.lost_hard_states
        self.manifest: Manifest = recovered.manifest
        # Called once, on the loop, when the journal cannot be trusted any more: the process must end.
        self.on_failure: Callable[[BaseException], None] | None = None
        # Called on the loop when a segment failed: that log takes no more changes, all others
        # continue.
        self.on_log_failure: Callable[[Log], None] | None = None
        self._changes = recovered.changes
        self._journal = recovered.journal
        self._writer = recovered.writer
        self._writer.on_failed = self._segment_failed
        self._writer.waits = True
        self._journal_worker = workers("journal")
        self._writer_worker = workers("segments")
        self._background = workers("checkpoints")
        self._commits = GroupCommit(
            self._changes,
            self._journal,
            self._journal_worker,
            settings,
            hand_over=self._hand_over,
        )
        self._commits.on_failure = self._failed
        # Those that a driver calls in each turn. `schedule_turn_end()`: let this turn of the loop end like
        # one that has recorded something. `before_turn_end(callback)`: call `callback` at the first end of a
        # turn after the next pass of the loop has begun. `when_stored(stored)`: call `stored` when `sync`,
        # called now, would be done, with None or the `StorageClosed`; it raises nothing. That is a pass of
        # the loop earlier than a callback of that future.
        self.schedule_turn_end = self._commits.schedule_turn_end
        self.before_turn_end = self._commits.before_turn_end
        self.when_stored = self._commits.when_stored
        self._executor = StorageExecutor(
            self._commits,
            journal=self._journal_worker,
            writer=self._writer_worker,
            background=self._background,
        )
        recovered.readers.beside_commits = lambda: self._commits.busy
        self._checkpoints = Checkpointer(
            self._writer,
            disk=disk,
            store=recovered.store,
            max_frame_bytes=settings.max_frame_bytes,
            journal_worker=self._journal_worker,
            background=self._background,
            after_synced_frames=self._executor.after_synced_frames,
            on_failed=partial(self._request_retry, "checkpoint"),
            on_bug=self._commits.fail_process,
        )
        # Retries what could not be made: "checkpoint", "spare" (the next journal file), "segments".
        self._retries = DiskFullRetry(self._commits.loop, pause_ms=settings.retry_ms, attempt=self._try_again)
        self._damage = DamageRegistry(self._executor.run_in_writer)
        # Finds damage before a reader does; it works only while the storage's owner awaits its `run`.
        self.scrubber = Scrubber(
            self.logs.values, damage_registry=self._damage, readers=recovered.readers, settings=settings
        )
        self._damage.on_suspicion = self.scrubber.expedite
        for log in self.logs.values():
            self._damage.adopt(log)
            log.begin()

    @classmethod
    def open(
        cls,
        disk: Disk,
        store: str,
        logs_directory: str,
        *,
        settings: StorageSettings | None = None,
        rng: random.Random | None = None,
        workers: Callable[[str], SerialExecutor] = SerialThreadExecutor,
        readers: Executor | None = None,
        forget: bool = False,
    ) -> Storage:
        """Lock and recover a store directory (made if missing); return its storage. Blocks; needs no loop.

        `rng`, `workers` and `readers` are for tests and the simulator: `rng` draws log ids and the random
        parts of generations, `workers` makes the executor of each thread from its name, and `readers`
        replaces the pool of reader threads. `forget` is explained at `recover_store`.

        Raises:
            StorageError: The store directory cannot be recovered.
        """
        settings = settings or StorageSettings()
        rng = rng or random.SystemRandom()
        pool = SegmentReader(disk, settings, executor=readers)
        recovered = recover_store(
            disk, store, logs_directory, settings=settings, rng=rng, readers=pool, forget=forget
        )
        return cls(disk, logs_directory, recovered, settings=settings, rng=rng, workers=workers)

    # Logs

    def create_log(self, name: str, log_id: int | None = None, *, policy: FlushPolicy = COMMIT) -> Log:
        """Make an empty log, which is durable when a later `sync` is done; return it.

        The log has no files before its first entry. Without `log_id` it gets a random id.
        """
        assert name and "/" not in name and len(name.encode()) <= _MAX_NAME_BYTES, f"a log named {name!r}"
        if log_id is None:
            log_id = self._rng.getrandbits(63)
        assert log_id not in self.logs, f"log id {log_id:#x} is taken by {self.logs[log_id]!r}"
        readers = self._recovered.readers
        files = LogFiles(readers.resources, self._logs_directory, name=name, log_id=log_id)
        log = Log(files, self._changes, readers, segment_size_bytes=self._settings.segment_size_bytes)
        self._damage.adopt(log)
        self.logs[log_id] = log
        encoded = name.encode()
        self._changes.record(record_head(RecordKind.CREATED, log_id, len(encoded)), encoded, Create(files))
        log.begin()
        if policy != COMMIT:
            log.set_policy(policy)
        return log

    async def set_policy(self, log: Log, policy: FlushPolicy) -> None:
        """Change a log's flush policy; durable on return. Appends continue meanwhile.

        Raises:
            StorageError: The log has failed, or was removed (`LogRemoved`), or the storage is
                closed.
        """
        if self.logs.get(log.log_id) is not log:
            raise LogRemoved(f"{log!r} is deleted or replaced")
        if log.policy != policy:
            log.set_policy(policy)
        await self.sync()

    def sync_log(self, log: Log) -> asyncio.Future[None]:
        """Return a future that is done when all changes recorded so far may be acknowledged.

        If the log has failed, the future fails with the log's error.
        """
        if log.files.failure is None:
            return self.sync()
        future = self._commits.loop().create_future()
        future.set_exception(log.files.failure)
        return future

    def delete_log(self, log_id: int, *, replica_id: int = 0) -> asyncio.Future[None]:
        """Delete a log; its files go to the trash. The future is done when the deletion is durable.

        With `replica_id` that replica's term and vote are deleted too. Give it only if the replica's group
        was deleted as a whole: otherwise the replica could come back and vote twice in a term.
        """
        log = self.logs.pop(log_id)
        log.detach()
        self.hard_states.pop(replica_id, None)
        self.lost_hard_states.discard(replica_id)
        self._changes.record(
            record_head(RecordKind.DELETED, log_id, ONE.size),
            ONE.pack(replica_id),
            Delete(log.files, replica_id),
        )
        return self.sync()

    def replace_log(self, old_log_id: int, new: Log) -> asyncio.Future[None]:
        """Replace the old log by `new`; the future is done when the replacement is durable.

        It is one journal record: after a crash either both logs are as they were, or the old one is replaced.
        Until the manifest names the new id, `resolve` maps the old id to it. The new log gets the recovery
        state and incarnation of the old one.
        """
        assert self.logs.get(new.log_id) is new, f"{new!r} is not of this storage"
        old = self.logs.pop(old_log_id)
        if old.recovering or old.incarnation > new.incarnation:
            new.copy_recovering(old)
        old.detach()
        self._changes.record(
            record_head(RecordKind.RESET, new.log_id, ONE.size),
            ONE.pack(old_log_id),
            Replace(new.files, old.files),
        )
        return self.sync()

    def resolve(self, log_id: int) -> int:
        """Return the id of the log that has replaced log `log_id`; `log_id` itself if none has."""
        return self._writer.replaced.get(log_id, log_id)

    @property
    def on_damage(self) -> Callable[[Log, DamagedRange], None] | None:
        """The callback for damage, called on the loop once for each range that a read or the scrubber finds.

        It may fetch the entry from another replica and pass its frame to `Log.repair`.
        """
        return self._damage.on_damage

    @on_damage.setter
    def on_damage(self, callback: Callable[[Log, DamagedRange], None] | None) -> None:
        self._damage.on_damage = callback

    # Hard states

    def record_hard_state(self, replica_id: int, *, term: int, vote: int) -> None:
        """Record a replica's term and vote, which are durable when a later `sync` is done."""
        state = HardState(term, vote)
        self.hard_states[replica_id] = state
        self._changes.record(
            record_head(RecordKind.HARD_STATE, replica_id, PAIR.size),
            PAIR.pack(term, vote),
            Vote(replica_id, term, vote),
        )

    # Group commit

    def end_turns_with(self, on_turn_end: Callable[[], None]) -> None:
        """Let `on_turn_end` be called at the end of each turn of the loop in which a change was recorded.

        It is also called after `schedule_turn_end`. When it returns, the recorded changes are handed to the
        journal; a `sync` that it calls covers all of them.
        """
        self._commits.on_turn_end = on_turn_end

    def sync(self, *, durable: bool = False) -> asyncio.Future[None]:
        """Return a future that is done when every change recorded before this call may be acknowledged.

        That is when the changes are durable; if they are only batches of `interval` logs, it is when they are
        written. With `durable` the future waits for the sync in every case. Each call returns a new future,
        which fails with `StorageClosed` if the journal fails.
        """
        return self._commits.sync(durable=durable)

    def _hand_over(self, gathered: list[Frame]) -> None:
        """Hand durable frames to the segment writer. The journal's thread."""
        self._executor.post_to_writer(partial(self._write_segments, gathered))

    def _write_segments(self, gathered: list[Frame]) -> None:
        """Write frames into their segments. The segment writer's thread."""
        actions = [action for frame in gathered for _, _, action in frame.taken]
        size = sum(frame.place.size for frame in gathered)
        place, done = gathered[-1].place, partial(self._commits.written, gathered)
        self._writer.apply(actions, place, size, done=done)
        if self._writer.is_full:
            self._request_retry("segments")
        if self._journal.wants_spare():
            self._prepare_spare()
        if self._writer.due() and not self._writer.is_full:
            self._checkpoints.request()

    def _prepare_spare(self) -> None:
        """Let the background thread make the next journal file. Any thread."""

        def prepare() -> None:
            self._journal.prepare_spare()
            if self._journal.starved:
                self._request_retry("spare")

        self._executor.post_to_background(prepare)

    def _request_retry(self, what: str) -> None:
        """Retry `what` after a pause, because no frame may come that would trigger it. Any thread."""
        self._commits.call_on_loop(partial(self._retries.request, what))

    def _try_again(self, lacks: set[str]) -> None:
        """Retry "checkpoint", "spare" or "segments", which failed for lack of room. The loop's thread."""
        if "spare" in lacks and self._journal.starved:
            self._prepare_spare()
        if "segments" in lacks:
            self._executor.post_to_writer(self._resume_segments)
        if "checkpoint" in lacks:
            self._executor.after_synced_frames(self._checkpoints.request)

    def _resume_segments(self) -> None:
        """Write the segments that waited for room on the disk. The segment writer's thread."""
        if not self._writer.resume():
            self._request_retry("segments")

    def _failed(self, error: BaseException) -> None:
        """Let all work that waits for a thread fail, as the journal failed. The loop's thread, once."""
        self._executor.fail_all(error)
        self._retries.close()
        if self.on_failure is not None:
            self.on_failure(error)

    # A segment that failed

    def _segment_failed(self, files: LogFiles) -> None:
        """Let the loop stop a log whose segment failed; called in the thread in which it failed."""
        self._commits.call_on_loop(partial(self._stop_log, files))

    def _stop_log(self, files: LogFiles) -> None:
        """Report a failed log, which refuses every change by itself. The loop's thread.

        Checkpoints wait from then on, until the last record of the log has passed the segment writer.
        """
        log = self.logs.get(files.log_id)
        if log is None or log.files is not files:
            return
        if self.on_log_failure is not None:
            self.on_log_failure(log)
        self.sync(durable=True).add_done_callback(partial(self._resume_checkpoints, files.log_id))

    def _resume_checkpoints(self, log_id: int, synced: asyncio.Future[None]) -> None:
        if not synced.cancelled() and synced.exception() is None:
            self._executor.after_synced_frames(partial(self._checkpoints.resume_after_failure, log_id))

    # Everything else

    async def write_manifest(self, entries: Sequence[ReplicaEntry], *, known: bool | None = None) -> None:
        """Replace the entries of the manifest (the list of replicas); durable on return.

        `known` says whether the list is complete; None leaves that unchanged (`Manifest.known`).
        """
        written = list(entries)

        def write() -> None:
            self.manifest.replace(written, known=known)
            self._forget_replaced()

        await self._executor.run_in_writer(write)

    async def change_manifest(
        self, change: Callable[[Mapping[int, ReplicaEntry]], ManifestChange], *, known: bool | None = None
    ) -> None:
        """Change some of the manifest's entries; durable on return.

        `change` gets the entries by key (`Manifest.by_key`), and returns those that it changes or adds, with
        None for an entry to be removed. It is called just before the write, in the writer's thread, with the
        entries of that moment: so changes that are in progress at the same time do not undo each other.
        `known` says whether the list is complete; None leaves that unchanged (`Manifest.known`).
        """

        def write() -> None:
            self.manifest.change(change(self.manifest.by_key), known=known)
            self._forget_replaced()

        await self._executor.run_in_writer(write)

    def _forget_replaced(self) -> None:
        """Drop the mappings of replaced logs that the manifest does not name any more."""
        replaced = self._writer.replaced
        if replaced:
            named = {entry.log_id for entry in self.manifest.entries}
            self._writer.replaced = {old: new for old, new in replaced.items() if old in named}

    async def checkpoint(self) -> None:
        """Make a checkpoint, after the segment writer has written all frames that are synced by now.

        Raises:
            DiskError: The checkpoint cannot be made.
        """
        await self._executor.submit(self._checkpoints.request)

    def write_log_document(self, log: Log, name: str, payload: bytes) -> asyncio.Future[None]:
        """Replace a document (a small file) in a log's directory; the future is done when that is durable.

        The document is moved and deleted with the log. It is written in the background thread, possibly
        before changes that were recorded earlier. The future fails with `DiskError` if the document cannot be
        written, or the log was removed meanwhile.
        """
        files = log.files
        return self._executor.run_in_background(
            lambda: Document(files.disk, files.directory, name).write(payload)
        )

    @property
    def journal_files(self) -> tuple[int, int]:
        """Number of journal files not covered by a checkpoint, and the limit at which appends are refused."""
        return self._journal.files, self._settings.max_journal_files

    @property
    def journal_lsn(self) -> int:
        """LSN of the last journal frame that was written; it grows with every frame."""
        return self._journal.lsn

    def failed_logs(self) -> list[Log]:
        """Return the failed logs, which accept no entries: a segment could not be written or synced."""
        logs = (self.logs.get(log_id) for log_id in list(self._writer.failed))
        return [log for log in logs if log is not None and log.failure is not None]

    @property
    def refusal(self) -> str | None:
        """Why new records should be refused now: "disk" (full), "journal" (too long); else None."""
        if self._journal.starved or self._writer.is_full:
            return "disk"
        if self._journal.files >= self._settings.max_journal_files:
            return "journal"
        return None

    @property
    def sync_times(self) -> Histogram:
        """Histogram of the times (s) that syncs of the journal took; the journal's thread adds to it."""
        return self._journal.sync_times

    def statistics(self) -> dict[str, int]:
        """Return counters and gauges of the whole storage; cheap enough for every scrape of the metrics."""
        return {
            **{f"journal_{name}": value for name, value in self._journal.statistics().items()},
            **self._commits.statistics(),
            "checkpoints": self._writer.checkpoints,
            "failed_checkpoints": self._writer.failed_checkpoints,
            "journal_bytes_since_checkpoint": self._writer.journal_bytes,
            "logs": len(self.logs),
            "logs_recovering": sum(log.recovering for log in self.logs.values()),
            **self._recovered.readers.statistics(),
            "damage_found": self._damage.found,
            "damage_repaired": self._damage.repaired,
            "damage_repairs_refused": self._damage.refused_repairs,
            "damage_quarantined": sum(len(log.quarantine) for log in self.logs.values()),
            "failed_logs": len(self._writer.failed),
        }

    async def close(self) -> None:
        """Sync what is recorded, make a last checkpoint, and release files and lock."""
        if self._commits.closed:
            return
        try:
            if self._commits.failure is None:
                await self.sync(durable=True)
                for log in self.logs.values():
                    log.stop_clean()
                await self._executor.run_in_writer(self._writer.stop_clean)
                await self.checkpoint()
        except StorageError:
            pass  # what is durable is in the journal; the next start reads it from there
        finally:
            # Also if cancelled: threads and locks of an unreachable storage would stay for ever.
            self._commits.close()
            self._retries.close()
            # In this order: a checkpoint in the background ends through the other two threads.
            for worker in (self._background, self._journal_worker, self._writer_worker):
                worker.close()
            self._recovered.close()
