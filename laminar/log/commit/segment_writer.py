"""The segment writer: it writes what the journal has made durable into segments, where readers find it.

It carries out the actions of each synced journal frame in order (an *action* is what a journal record does to
the files of a log), so bytes of truncated entries are never written after newer ones. Between two frames it
knows the state of all logs that a checkpoint may record, and which files must be synced before it. It runs in
a thread of its own, which gets frames from the journal's thread. It does not know the loop.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from laminar.log.commit.journal import Journal, Written
from laminar.log.commit.snapshot import Snapshot
from laminar.log.disk.disk import Buffer, Disk
from laminar.log.disk.document import Document
from laminar.log.disk.errors import DiskError
from laminar.log.format.checkpoint_state import (
    Checkpoint,
    HardState,
    LogEnd,
    LogState,
    empty_state,
    encode_checkpoint,
)
from laminar.log.format.index_entry import unpack_row
from laminar.log.format.settings import StorageSettings
from laminar.log.partition_log.changes import (
    Action,
    Create,
    Delete,
    MoveLogStart,
    Policy,
    Replace,
    SetRecovering,
    Truncate,
    Unsynced,
    Vote,
    Write,
)
from laminar.log.segment.loading import Loaded
from laminar.log.segment.log_files import LogFiles
from laminar.log.segment.segment_file import SegmentFile

_log = logging.getLogger("laminar.storage")


@dataclass(slots=True)
class _Group:
    """Consecutive frames of one segment, with their index rows, to be written by one call."""

    files: LogFiles
    position: int
    frames: list[Buffer]
    rows: list[bytes]
    last_index: int


@dataclass(slots=True)
class _Batch:
    """The actions of some synced journal frames that are still to be carried out.

    `place` is where the last of the frames ends in the journal, and `journal_bytes` is their size. `groups`
    are writes that were taken from `actions` already and come before the rest, but are not in their files
    yet. `done` is called after the last action.
    """

    actions: deque[Action]
    place: Written
    journal_bytes: int
    done: Callable[[], None]
    groups: dict[SegmentFile, _Group] = field(default_factory=dict)


class _DiskFull(Exception):
    """The disk is full: the current action must be carried out again as a whole when there is room."""


class SegmentWriter:
    """The writer of the segments of all logs of a storage.

    It also has what a checkpoint records: the state of each log's files, and the replicas' hard states (terms
    and votes) as of the last frame applied. Its methods are for its own thread, except `sync` and
    `write_checkpoint`, which run in the background thread.
    """

    def __init__(
        self,
        disk: Disk,
        *,
        store: str,
        logs_directory: str,
        journal: Journal,
        place: Written,
        settings: StorageSettings,
    ) -> None:
        """Make a writer; `place` is the end of the last journal frame whose actions are carried out."""
        self._disk = disk
        self._logs_directory = logs_directory
        self._trash = os.path.join(os.path.dirname(logs_directory), "trash")
        self.journal = journal
        self._place = place
        self._settings = settings
        self._document = Document(disk, store, "checkpoint")
        self.logs: dict[int, LogFiles] = {}
        self.hard_states: dict[int, HardState] = {}
        self.lost: set[int] = set()
        self.replaced: dict[int, int] = {}
        self._dirty: dict[SegmentFile, LogFiles] = {}
        # Those of `_dirty` whose file may still wait for a sync, and so is open; the oldest first.
        self._waiting: dict[SegmentFile, LogFiles] = {}
        # By path; the log that owns the directory, or None if several share it.
        self._dirty_directories: dict[str, LogFiles | None] = {}
        # Directories of removed logs that the disk has refused to move.
        self._to_trash: dict[str, None] = {}
        # Logs whose segments failed; and the ids of those among them whose last record has not passed the
        # writer yet.
        self.failed: dict[int, LogFiles] = {}
        self.moving: set[int] = set()
        # What is to be carried out, in order; more than one only while the disk is full. No checkpoint is
        # made then, as `logs` may already count entries that are not in their files yet.
        self._batches: deque[_Batch] = deque()
        self._batch_bytes = 0
        self.is_full = False
        # Whether an action that finds the disk full waits for room. In a start it does not: the start fails,
        # and is retried.
        self.waits = False
        # Files and directories (by log id) that were removed early, to make room.
        self._removed: set[SegmentFile] = set()
        self._gone: set[int] = set()
        # Called with a log that has failed, in the thread in which it failed.
        self.on_failed: Callable[[LogFiles], None] | None = None
        # The last durable checkpoint: its place, and the state of each log in it.
        self._checkpointed = place
        self._held: dict[int, LogState] = {}
        self._boot_id = disk.boot_id()
        # Bytes of journal since the last checkpoint, and at how many the next one is due.
        self.journal_bytes = 0
        self._due_bytes = settings.checkpoint_due_bytes
        self.checkpoints = 0
        self.failed_checkpoints = 0

    # Actions

    def apply(
        self,
        actions: Iterable[Action],
        place: Written,
        journal_bytes: int,
        *,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """Carry out the actions of synced journal frames, then call `done`.

        `place` is the end of the last frame, `journal_bytes` the size of all. If the disk is full, the
        actions wait, and all later ones after them, until `resume` finds room; nothing is lost, because all
        of it is in the journal. If more bytes wait than memory may hold, the logs that lack room fail.
        """
        batch = _Batch(deque(actions), place, journal_bytes, done)
        self._batches.append(batch)
        self._batch_bytes += journal_bytes
        self.resume(batch.actions if self.is_full else None)
        if self._batch_bytes > self._settings.max_unwritten_bytes // 2:
            waits, self.waits = self.waits, False
            try:
                self.resume()
            finally:
                self.waits = waits

    def resume(self, new: Iterable[Action] | None = None) -> bool:
        """Carry out the waiting actions as far as the disk has room; return whether none is left.

        `new` are the actions that have just arrived, if nothing else has changed since the last attempt: then
        the others are tried again only if `new` has removals, which make room.
        """
        if self.is_full and not self._make_room(new) and new is not None and self.waits:
            return False
        while self._batches:
            batch = self._batches[0]
            try:
                self._carry_out(batch)
            except _DiskFull as error:
                if not self.is_full:
                    self.is_full = True
                    _log.error("the disk is full, segments wait in the journal until it has room: %s", error)
                return False
            self._place = batch.place
            self.journal_bytes += batch.journal_bytes
            self._batches.popleft()
            self._batch_bytes -= batch.journal_bytes
            batch.done()
        if self.is_full:
            self.is_full = False
            self._removed.clear()
            self._gone.clear()
            if self.waits:
                _log.warning("the disk has room again: what waited is in its segments")
        return True

    def _make_room(self, new: Iterable[Action] | None) -> bool:
        """Carry out removals of files before the writes that wait for room; return whether any was removed.

        In their order the removals would come after those writes, and so never. Their journal records are
        durable, so a start would remove the files as well. Writes that wait for a removed file are dropped.
        `new` are the actions to look at; None: all that wait.
        """
        before = len(self._removed) + len(self._gone)
        for action in new or (action for batch in self._batches for action in batch.actions):
            try:
                if isinstance(action, MoveLogStart) and action.files.failure is None:
                    for segment in action.removed:
                        if segment not in self._removed:
                            segment.remove()
                            self._removed.add(segment)
                elif isinstance(action, Delete | Replace):
                    files = action.old if isinstance(action, Replace) else action.files
                    if files.log_id not in self._gone:
                        files.resources.files.forget_in(files.directory)
                        if self._is_in_trash(files.directory):
                            self._gone.add(files.log_id)
            except DiskError as error:
                _log.debug("no room is made now: %s", error)  # the action comes again in its order
        return len(self._removed) + len(self._gone) > before

    def _carry_out(self, batch: _Batch) -> None:
        """Carry out the actions that are left in a batch; each is removed from it when it is done.

        Raises:
            _DiskFull: There is no room; the rest may be retried.
        """
        actions, groups = batch.actions, batch.groups
        while actions:
            action = actions[0]
            if type(action) is Write:
                group = groups.get(action.segment)
                if group is None:
                    groups[action.segment] = _Group(
                        action.files, action.position, [action.frame], [action.row], action.index
                    )
                else:
                    group.frames.append(action.frame)
                    group.rows.append(action.row)
                    group.last_index = action.index
            else:
                # An action that changes files must find them as the records before it left
                # them.
                if not isinstance(action, Vote):
                    self._flush(groups)
                self._apply(action)
            actions.popleft()
        self._flush(groups)

    def stop_clean(self) -> None:
        """Mark every log as synced, for the last checkpoint of a clean shutdown.

        Call it only when all frames of the journal are durable.
        """
        for files in self.logs.values():
            files.unsynced = False

    def _flush(self, groups: dict[SegmentFile, _Group]) -> None:
        self._make_directories(groups.values())
        while groups:
            segment = next(iter(groups))
            self._write(segment, groups[segment])
            del groups[segment]

    def _write(self, segment: SegmentFile, group: _Group) -> None:
        files = group.files
        last = unpack_row(group.rows[-1], 0, group.last_index)
        files.end_index = last.index
        files.end_term = last.term
        files.end_offset = last.next_offset
        files.end_position = last.position + last.size
        files.segment = segment.first_index
        if files.failure is not None or segment in self._removed or files.log_id in self._gone:
            return
        try:
            self.make_directory(files)
            if not segment.exists:
                self._dirty_directories[files.directory] = files
            segment.write(group.position, group.frames, group.rows, self._settings.writeback_bytes)
        except DiskError as error:
            self._refused(files, error)
        else:
            self._add_dirty(segment, files)

    def _make_directories(self, groups: Iterable[_Group]) -> None:
        """Make the directories of all logs in `groups` that have none yet, with one sync for all.

        One by one, the directories of ten thousand new logs would take twenty thousand syncs, and commits
        would wait for this thread meanwhile.
        """
        new = {
            files.directory: files
            for files in (group.files for group in groups)
            if not files.made and files.failure is None and files.log_id not in self._gone
        }
        if len(new) < 2:
            return
        try:
            self._disk.make_directories(list(new))
        except DiskError as error:
            if error.operation.startswith("sync"):
                # It covered all of them, and a second sync might succeed without having written anything.
                for files in new.values():
                    self._fail(files, error)
            return  # else each log tries its own, and fails or waits alone
        for files in new.values():
            files.made = True

    def make_directory(self, files: LogFiles) -> None:
        """Make the log's directory, unless it exists; called with the log's first entry."""
        if not files.made:
            self._disk.make_directory(files.directory)
            files.made = True

    def _add_dirty(self, segment: SegmentFile, files: LogFiles) -> None:
        """Add a segment to those that the next checkpoint syncs.

        If more files than `unsynced_limit` wait for a sync, the oldest are synced now: a waiting file stays
        open, and the number of open files is limited.
        """
        self._dirty[segment] = files
        self._waiting[segment] = files
        while len(self._waiting) > files.resources.files.unsynced_limit:
            oldest = next(iter(self._waiting))
            owner = self._waiting.pop(oldest)
            if owner.failure is None and oldest.unsynced:
                try:
                    oldest.sync_data()
                except DiskError as error:
                    self._fail(owner, error)

    def _waits_for_room(self, error: DiskError) -> bool:
        """Return whether the failed operation is retried when there is room, instead of failing its log.

        That is so only if a write found no room, which has changed nothing that counts. After a failed sync
        it is unknown what is on the disk, whatever the error says.
        """
        return self.waits and error.is_full and not error.operation.startswith("sync")

    def _refused(self, files: LogFiles, error: DiskError) -> None:
        if self._waits_for_room(error):
            raise _DiskFull(str(error)) from error
        self._fail(files, error)

    def _fail(self, files: LogFiles, error: DiskError) -> None:
        """Stop a log whose segment failed; its records are carried from checkpoint to checkpoint.

        The page cache of its files is not trusted again, even if a later sync succeeds. The background
        thread, which syncs, calls this too: each step is one operation, which other threads see whole.
        """
        if files.failure is None and self.logs.get(files.log_id) is files:
            files.failure = error
            self.moving.add(files.log_id)
            self.failed[files.log_id] = files
            if self.on_failed is not None:
                self.on_failed(files)

    def _apply(self, action: Action) -> None:
        if isinstance(action, Vote):
            self.hard_states[action.replica_id] = HardState(action.term, action.vote)
        elif isinstance(action, Create):
            self.logs[action.files.log_id] = action.files
        elif isinstance(action, Truncate):
            self._truncate(action)
        elif isinstance(action, MoveLogStart):
            self._start(action)
        elif isinstance(action, SetRecovering):
            action.files.recovering = action.recovering
            action.files.power_lost = action.power_lost
            action.files.incarnation = action.incarnation
            action.files.least_term = action.least_term
        elif isinstance(action, Unsynced):
            action.files.unsynced = True
        elif isinstance(action, Policy):
            action.files.policy = action.policy
            action.files.unsynced &= action.policy.is_interval
        elif isinstance(action, Delete):
            self.hard_states.pop(action.replica_id, None)
            self.lost.discard(action.replica_id)
            self.move_to_trash(action.files)
        elif isinstance(action, Replace):
            old = action.old.log_id
            self.replaced = {
                key: action.files.log_id if to == old else to for key, to in self.replaced.items()
            }
            self.replaced[old] = action.files.log_id
            self.move_to_trash(action.old)

    def _truncate(self, action: Truncate) -> None:
        files = action.files
        files.end_index = action.index - 1
        files.end_term = action.end_term
        files.end_offset = action.end_offset
        files.segment = action.segment.first_index if action.segment is not None else 0
        files.end_position = action.position
        if files.failure is not None or files.log_id in self._gone:
            return
        try:
            self._remove(files, action.removed)
            if action.segment is not None and action.segment not in self._removed:
                action.segment.truncate(action.position, action.rows)
                self._add_dirty(action.segment, files)
        except DiskError as error:
            self._refused(files, error)

    def _start(self, action: MoveLogStart) -> None:
        files = action.files
        files.start = action.start
        if action.start.index >= files.end_index:
            end = action.start
            files.end_index, files.end_term, files.end_offset = end.index, end.term, end.offset
            files.segment = files.end_position = 0
        if files.failure is not None:
            return
        try:
            self._remove(files, action.removed)
        except DiskError as error:
            self._refused(files, error)

    def _remove(self, files: LogFiles, removed: Iterable[SegmentFile]) -> None:
        for segment in removed:
            segment.remove()
            self._dirty.pop(segment, None)
            self._waiting.pop(segment, None)
            self._dirty_directories[files.directory] = files

    def move_to_trash(self, files: LogFiles) -> None:
        """Move a removed log's directory to the trash, where it is kept for a day."""
        self.logs.pop(files.log_id, None)
        self.failed.pop(files.log_id, None)
        self.moving.discard(files.log_id)
        for segment in [segment for segment, owner in self._dirty.items() if owner is files]:
            del self._dirty[segment]
            self._waiting.pop(segment, None)
            segment.forget()
        files.resources.files.forget_in(files.directory)
        self._dirty_directories.pop(files.directory, None)
        if not self._is_in_trash(files.directory):
            self._to_trash[files.directory] = None
            _log.warning("%s: its folder %s cannot be moved to the trash now", files.name, files.directory)

    def _is_in_trash(self, directory: str) -> bool:
        """Move a directory to the trash; return True if it is not in its place any more.

        If the disk refuses (it may be full), the move is tried again before the next checkpoint: a removal,
        which makes room, must not end the process.
        """
        try:
            if self._disk.exists(directory):
                self._disk.make_directory(self._trash)
                self._disk.rename(directory, os.path.join(self._trash, os.path.basename(directory)))
                self._dirty_directories[self._logs_directory] = None
                self._dirty_directories[self._trash] = None
        except DiskError as error:
            _log.debug("%s cannot be moved: %s", directory, error)
            return False
        return True

    # Recovery

    def adopt(self, files: LogFiles, loaded: Loaded, end: LogEnd) -> None:
        """Add a log whose segments recovery has found, and make its files agree with what was found.

        Stale and unreadable segments are removed, rebuilt indexes are written, and the last segment is cut
        after the entry that `end` names.
        """
        self.logs[files.log_id] = files
        files.end_index, files.end_term, files.end_offset = end.index, end.term, end.offset
        self._dirty_directories[self._logs_directory] = None
        self._remove(files, loaded.stale + loaded.unreadable)
        for segment in loaded.rebuilt:
            if segment not in loaded.segments:
                continue  # it became stale
            segment.file.make_missing()
            segment.file.rewrite_index(segment.tail)
            self._add_dirty(segment.file, files)
        if loaded.segments:
            last = loaded.segments[-1]
            files.segment, files.end_position = last.first_index, last.size
            if last.file.data().size() != last.size:
                last.file.truncate(last.size, last.count)
                self._add_dirty(last.file, files)

    def apply_recovered(self, actions: Iterable[Action]) -> None:
        """Carry out the actions of the records that recovery read from the former generation's journal."""
        self.apply(actions, self._place, 0)
        for files in self.logs.values():
            if files.made:
                self._dirty_directories[files.directory] = files
        self.journal_bytes = 0

    # Checkpoints: `laminar.log.commit.checkpoints` says which step runs where.

    def due(self) -> bool:
        """Return whether a checkpoint is due, according to the bytes of journal since the last checkpoint."""
        return self.journal_bytes >= self._due_bytes

    def checkpoint(self) -> None:
        """Make a whole checkpoint and wait for it; only during a start, when no other thread runs.

        Raises:
            DiskError: The checkpoint cannot be made, or a segment cannot be written or synced.
        """
        self.prepare_checkpoint()
        snapshot = self.begin_checkpoint()
        self.sync(snapshot)
        for files in self.failed.values():
            assert files.failure is not None, f"{files.name} is listed as failed without a reason"
            raise files.failure
        self.write_checkpoint(snapshot)
        self.end_checkpoint(snapshot, written=True)

    def prepare_checkpoint(self) -> None:
        """Write everything to the files that the checkpoint's sync must cover. The writer's thread.

        Logs may fail in it. So call `begin_checkpoint` only afterwards, and only if no log is in `moving`
        (failed logs whose last record the writer has not passed yet).

        Raises:
            DiskError: Segments wait for room on the disk.
        """
        if self._batches:
            raise DiskError("write", self._logs_directory, errno.ENOSPC, "segments wait for room")
        # Also the pause before the next attempt, if this one fails.
        self._due_bytes = self.journal_bytes + self._settings.checkpoint_due_bytes // 4
        for segment, files in self._dirty.items():
            try:
                if files.failure is None:
                    segment.prepare_sync()
            except DiskError as error:
                if self._waits_for_room(error):
                    raise
                self._fail(files, error)
        for directory in list(self._to_trash):
            if self._is_in_trash(directory):
                del self._to_trash[directory]
        # A log that was deleted while its sync failed in the background must not delay checkpoints.
        for log_id in list(self.failed):
            if log_id not in self.logs:
                del self.failed[log_id]
                self.moving.discard(log_id)

    def begin_checkpoint(self) -> Snapshot:
        """Return the state of all logs, and the files to sync, which then are not dirty. Writer's thread."""
        dirty, self._dirty = self._dirty, {}
        directories, self._dirty_directories = self._dirty_directories, {}
        return Snapshot(
            checkpoint=self._capture(),
            place=self._place,
            since=self._checkpointed,
            journal_bytes=self.journal_bytes,
            dirty=dirty,
            directories=directories,
            carried=frozenset(self.failed),
        )

    def _capture(self) -> Checkpoint:
        return Checkpoint(
            generation=self.journal.generation,
            seed=self.journal.seed,
            lsn=self._place.lsn,
            journal_file=self._place.file_number,
            journal_position=self._place.end_position,
            logs=[
                files.state() if log_id not in self.failed else self._held_state(files)
                for log_id, files in self.logs.items()
            ],
            hard_states=dict(self.hard_states),
            lost=sorted(self.lost),
            replaced=dict(self.replaced),
            journal_size=self._place.file_size,
            boot_id=self._boot_id,
        )

    def _held_state(self, files: LogFiles) -> LogState:
        """Return the state of a failed log in the last durable checkpoint; if it has none, an empty state."""
        held = self._held.get(files.log_id)
        return held if held is not None else empty_state(files.log_id, files.name)

    def sync(self, snapshot: Snapshot) -> None:
        """Sync the files and directories that the snapshot names. Blocks; the background thread, or a start.

        A log whose file cannot be synced fails, and is in `failed` afterwards.

        Raises:
            DiskError: A directory that several logs share cannot be synced: no checkpoint must be written.
        """
        # One after the other: all at once would delay the journal's own syncs (docs/decisions/0009).
        for segment, files in snapshot.dirty.items():
            try:
                if files.failure is None and segment.exists:
                    segment.sync()
            except DiskError as error:
                self._fail(files, error)
        for directory, owner in snapshot.directories.items():
            try:
                if owner is None or owner.failure is None:
                    self._disk.sync_directory(directory)
            except DiskError as error:
                if error.is_missing:
                    continue  # its log was deleted meanwhile, by a record after the snapshot
                if owner is None:
                    raise
                self._fail(owner, error)

    def passed(self, place: Written) -> None:
        """Note that all frames of the journal up to `place` are applied, so a checkpoint may cover them."""
        if place.lsn > self._place.lsn and not self._batches:
            self._place = place

    def write_checkpoint(self, snapshot: Snapshot) -> None:
        """Write the document of the checkpoint, then remove or reuse the journal files that it covers.

        Raises:
            DiskError: The document cannot be written, perhaps because the disk is full. The former checkpoint
                and all of the journal after it are as they were.
        """
        self._document.write(encode_checkpoint(snapshot.checkpoint))
        self.journal.delete_before(snapshot.place.file_number)

    def end_checkpoint(self, snapshot: Snapshot, *, written: bool) -> None:
        """Note whether a checkpoint was `written`; if not, its files are dirty again. The writer's thread."""
        if written:
            self._held = {state.log_id: state for state in snapshot.checkpoint.logs}
            self._checkpointed = snapshot.place
            self.journal_bytes -= snapshot.journal_bytes
            self._due_bytes = self._settings.checkpoint_due_bytes
            self.checkpoints += 1
            return
        self.failed_checkpoints += 1
        for segment, files in snapshot.dirty.items():
            if self.logs.get(files.log_id) is files and segment.exists:
                self._dirty[segment] = files
        for directory, owner in snapshot.directories.items():
            if owner is None or self.logs.get(owner.log_id) is owner:
                self._dirty_directories[directory] = owner
