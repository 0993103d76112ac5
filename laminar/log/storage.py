"""A shard's storage: its logs, its hard states, and the one journal that makes both durable.

The loop records changes, `GroupCommit` makes them durable in the journal's thread, and the segments follow
in the writer's thread, with checkpoints in the background. Here the parts are put together: the registry of
logs and hard states, what happens to a log that fails, and how it all ends. It does not know Raft: what must
be durable before which message leaves is the driver's to say, by waiting for `sync`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

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
from laminar.log.format.manifest import Manifest, ReplicaEntry
from laminar.log.format.settings import StorageSettings
from laminar.log.integrity.damage_registry import DamageRegistry
from laminar.log.integrity.scrubber import Scrubber
from laminar.log.partition_log.changes import Create, Delete, Replace, Vote
from laminar.log.partition_log.log import Log
from laminar.log.partition_log.readers import SegmentReader
from laminar.log.recovery.store import Recovered, recover_store
from laminar.log.segment.log_files import LogFiles

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
        # Replicas whose newest hard state may be gone: they must neither vote nor answer.
        self.lost_hard_states: set[int] = recovered.lost_hard_states
        self.manifest: Manifest = recovered.manifest
        # Told once, on the loop, when the journal cannot be trusted any more: the process must end.
        self.on_failure: Callable[[BaseException], None] | None = None
        # Told on the loop when a segment failed: that log takes no change any more, all others go on.
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
        # Of what could not be made: "checkpoint", "spare" (the next journal file), "segments".
        self._retries = DiskFullRetry(self._commits.loop, pause_ms=settings.retry_ms, attempt=self._try_again)
        self._damage = DamageRegistry(self._executor.run_in_writer)
        # Finds rot before anybody reads it; whoever has a loop to spare lets it `run` there.
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
        """Lock and recover a home (a new one is made where there is none). Blocks; needs no loop.

        `rng` seeds generations and log ids: leave it out in production. `forget` as in `recover_store`.
        Raises `StorageError`.
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
        """A new, empty log. It has no files before its first entry, and is durable with the next `sync`."""
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
        """Change a log's flush policy in place; durable when it returns. Appends go on meanwhile.

        Raises `StorageError`: the log has failed, or is gone (`LogRemoved`), or the storage is closed.
        """
        if self.logs.get(log.log_id) is not log:
            raise LogRemoved(f"{log!r} is deleted or replaced")
        if log.policy != policy:
            log.set_policy(policy)
        await self.sync()

    def sync_log(self, log: Log) -> asyncio.Future[None]:
        """As `sync`; fails with what made the log fail, where it has."""
        if log.files.failure is None:
            return self.sync()
        future = self._commits.loop().create_future()
        future.set_exception(log.files.failure)
        return future

    def delete_log(self, log_id: int, *, replica_id: int = 0) -> asyncio.Future[None]:
        """Forget a log; its files go to the trash. Done when that is durable.

        With `replica_id` the term and vote of a replica that is no more are forgotten too: only for one of a
        group that was deleted as a whole, as it could vote anew.
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
        """Let `new` stand for the old log from one record on; done when that is durable.

        A crash before it leaves both logs as they were. Until the manifest names the new id, `resolve`
        leads from the old one to it. The replica's mark and incarnation go with it.
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
        """The id of the log that stands for `log_id` by now."""
        return self._writer.replaced.get(log_id, log_id)

    @property
    def on_damage(self) -> Callable[[Log, DamagedRange], None] | None:
        """Told of each damaged range once, on the loop, when a read or the scrubber finds it.

        Bytes from a replica that is whole go to `Log.repair`.
        """
        return self._damage.on_damage

    @on_damage.setter
    def on_damage(self, callback: Callable[[Log, DamagedRange], None] | None) -> None:
        self._damage.on_damage = callback

    # Hard states

    def record_hard_state(self, replica_id: int, *, term: int, vote: int) -> None:
        """Let the next frame carry a replica's term and vote; durable when a later `sync` is done."""
        state = HardState(term, vote)
        self.hard_states[replica_id] = state
        self._changes.record(
            record_head(RecordKind.HARD_STATE, replica_id, PAIR.size),
            PAIR.pack(term, vote),
            Vote(replica_id, term, vote),
        )

    # Group commit

    def sync(self, *, durable: bool = False) -> asyncio.Future[None]:
        """Done when everything recorded before this call counts: when it is durable, and batches of
        `interval` logs, where nothing else goes with them, when they are written. With `durable` these are
        synced too.

        Each call has a future of its own.
        """
        return self._commits.sync(durable=durable)

    def _hand_over(self, gathered: list[Frame]) -> None:
        """In the journal's thread."""
        self._executor.post_to_writer(partial(self._write_segments, gathered))

    def _write_segments(self, gathered: list[Frame]) -> None:
        """In the writer's thread."""
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
        """From any thread."""

        def prepare() -> None:
            self._journal.prepare_spare()
            if self._journal.starved:
                self._request_retry("spare")

        self._executor.post_to_background(prepare)

    def _request_retry(self, what: str) -> None:
        """From any thread: it could not be made, and no frame may come that would ask for it again."""
        self._commits.call_on_loop(partial(self._retries.request, what))

    def _try_again(self, lacks: set[str]) -> None:
        """On the loop."""
        if "spare" in lacks and self._journal.starved:
            self._prepare_spare()
        if "segments" in lacks:
            self._executor.post_to_writer(self._resume_segments)
        if "checkpoint" in lacks:
            self._executor.after_synced_frames(self._checkpoints.request)

    def _resume_segments(self) -> None:
        """In the writer's thread."""
        if not self._writer.resume():
            self._request_retry("segments")

    def _failed(self, error: BaseException) -> None:
        """On the loop, once."""
        self._executor.fail_all(error)
        self._retries.close()
        if self.on_failure is not None:
            self.on_failure(error)

    # A segment that failed

    def _segment_failed(self, files: LogFiles) -> None:
        """In the thread where it happened."""
        self._commits.call_on_loop(partial(self._stop_log, files))

    def _stop_log(self, files: LogFiles) -> None:
        """On the loop: from now on the log refuses every change. When the last one has passed the writer,
        checkpoints go on.
        """
        log = self.logs.get(files.log_id)
        if log is None or log.files is not files:
            return
        if self.on_log_failure is not None:
            self.on_log_failure(log)
        self.sync(durable=True).add_done_callback(partial(self._let_rest, files.log_id))

    def _let_rest(self, log_id: int, synced: asyncio.Future[None]) -> None:
        if not synced.cancelled() and synced.exception() is None:
            self._executor.after_synced_frames(partial(self._checkpoints.at_rest, log_id))

    # Everything else

    async def write_manifest(self, entries: Sequence[ReplicaEntry], *, known: bool | None = None) -> None:
        """Replace the manifest; durable when it returns. `known` as in `Manifest.replace`."""
        written = list(entries)
        await self.change_manifest(lambda entries: written, known=known)

    async def change_manifest(
        self, change: Callable[[list[ReplicaEntry]], list[ReplicaEntry]], *, known: bool | None = None
    ) -> None:
        """As `write_manifest`, with what `change` makes of the entries as they are when they are written.

        For who does not know of other changes that are under way. `change` is called in the writer's thread.
        """

        def write() -> None:
            entries = change(self.manifest.entries)
            self.manifest.replace(entries, known=known)
            named = {entry.log_id for entry in entries}
            replaced = self._writer.replaced
            self._writer.replaced = {old: new for old, new in replaced.items() if old in named}

        await self._executor.run_in_writer(write)

    async def checkpoint(self) -> None:
        """Make a checkpoint of everything that is in its segment by now. Raises `DiskError`."""
        await self._executor.submit(self._checkpoints.request)

    def write_log_document(self, log: Log, name: str, payload: bytes) -> asyncio.Future[None]:
        """Replace a document in a log's folder, beside its segments; done when it is durable.

        It goes where the log goes. Written in the background, so in no order with what is recorded. Fails
        with `DiskError`, also when the log is gone meanwhile.
        """
        files = log.files
        return self._executor.run_in_background(
            lambda: Document(files.disk, files.directory, name).write(payload)
        )

    @property
    def journal_files(self) -> tuple[int, int]:
        """Journal files that no checkpoint covers (the present one among them), and from how many on
        `refusal` names the journal.
        """
        return self._journal.files, self._settings.max_journal_files

    @property
    def refusal(self) -> str | None:
        """Why new records should be refused for now: "disk" (full), "journal" (too long); else None."""
        if self._journal.starved or self._writer.is_full:
            return "disk"
        if self._journal.files >= self._settings.max_journal_files:
            return "journal"
        return None

    def statistics(self) -> dict[str, int]:
        """Counters and gauges, cheap enough for every scrape."""
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
        """Sync what is recorded, make a last checkpoint, and let go of files and lock."""
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
            # Also when it is cancelled: threads and locks of a storage that nobody has would stay for ever.
            self._commits.close()
            self._retries.close()
            # The end of a checkpoint comes back from the background by way of the other two.
            for worker in (self._background, self._journal_worker, self._writer_worker):
                worker.close()
            self._recovered.close()
