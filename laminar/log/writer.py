"""The segments' single writer: what the journal has made durable, put where readers look for it.

It applies the actions of each synced frame in their order, so bytes of a truncated suffix can never land
behind newer ones, and makes checkpoints in between. It runs in one thread of its own, behind the journal:
however long a checkpoint's syncs take, commits go on. It does not know the loop or who waits for what.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from laminar.log.disk import Buffer, Disk
from laminar.log.document import Document
from laminar.log.errors import DiskError
from laminar.log.index import Loaded
from laminar.log.journal import Journal, Written
from laminar.log.pending import Action, Create, Cut, Delete, Mark, Replace, Start, Vote, Write
from laminar.log.rows import unpack_row
from laminar.log.segment import SegmentFile
from laminar.log.settings import StorageSettings
from laminar.log.state import Checkpoint, HardState, LogEnd, LogFiles, encode_checkpoint


@dataclass(slots=True)
class _Group:
    """Frames that go one behind the other into one segment."""

    files: LogFiles
    position: int
    frames: list[Buffer]
    rows: list[bytes]
    last_index: int


class Writer:
    """Logs as their files have them, and the hard states of the same moment."""

    def __init__(
        self,
        disk: Disk,
        *,
        home: str,
        logs_directory: str,
        journal: Journal,
        place: Written,
        settings: StorageSettings,
    ) -> None:
        """`place` is the end of the last frame whose actions are applied already."""
        self._disk = disk
        self._logs_directory = logs_directory
        self._trash = os.path.join(os.path.dirname(logs_directory), "trash")
        self.journal = journal
        self._place = place
        self._settings = settings
        self._document = Document(disk, home, "checkpoint")
        self.logs: dict[int, LogFiles] = {}
        self.hard_states: dict[int, HardState] = {}
        self.lost: set[int] = set()
        self.replaced: dict[int, int] = {}
        self._dirty: dict[SegmentFile, LogFiles] = {}
        self._dirty_directories: set[str] = set()
        # Bytes of journal since the last checkpoint, and at how many the next one is due.
        self.journal_bytes = 0
        self._due_bytes = settings.checkpoint_bytes
        self.checkpoints = 0
        self.failed_checkpoints = 0

    # Actions

    def apply(self, actions: Iterable[Action], place: Written) -> None:
        """Carry out the actions of a synced frame that ends at `place`."""
        groups: dict[SegmentFile, _Group] = {}
        for action in actions:
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
                # What changes files must find them as the records before it left them.
                if not isinstance(action, Vote):
                    self._flush(groups)
                    groups = {}
                self._apply(action)
        self._flush(groups)
        self._place = place
        self.journal_bytes += place.size

    def _flush(self, groups: dict[SegmentFile, _Group]) -> None:
        for segment, group in groups.items():
            self._write(segment, group)

    def _write(self, segment: SegmentFile, group: _Group) -> None:
        files = group.files
        last = unpack_row(group.rows[-1], 0, group.last_index)
        files.end_index = last.index
        files.end_term = last.term
        files.end_offset = last.next_offset
        files.end_position = last.position + last.size
        files.segment = segment.first_index
        if files.failure is not None:
            return
        try:
            self.make_directory(files)
            if segment.write(group.position, group.frames, group.rows, self._settings.writeback_bytes):
                self._dirty_directories.add(files.directory)
            self._dirty[segment] = files
        except DiskError as error:
            self._fail(files, error)

    def make_directory(self, files: LogFiles) -> None:
        """The log's directory, made with its first entry."""
        if not files.made:
            self._disk.make_directory(files.directory)
            files.made = True

    def _fail(self, files: LogFiles, error: DiskError) -> None:
        """A segment failed: this log stops. Its records are in the journal: no checkpoint may pass them."""
        files.failure = error

    def _apply(self, action: Action) -> None:
        if isinstance(action, Vote):
            self.hard_states[action.replica_id] = HardState(action.term, action.vote)
        elif isinstance(action, Create):
            self.logs[action.files.log_id] = action.files
        elif isinstance(action, Cut):
            self._cut(action)
        elif isinstance(action, Start):
            self._start(action)
        elif isinstance(action, Mark):
            action.files.recovering = action.recovering
            action.files.incarnation = action.incarnation
        elif isinstance(action, Delete):
            self.move_to_trash(action.files)
        elif isinstance(action, Replace):
            old = action.old.log_id
            self.replaced = {
                key: action.files.log_id if to == old else to for key, to in self.replaced.items()
            }
            self.replaced[old] = action.files.log_id
            self.move_to_trash(action.old)

    def _cut(self, action: Cut) -> None:
        files = action.files
        files.end_index = action.index - 1
        files.end_term = action.end_term
        files.end_offset = action.end_offset
        files.segment = action.segment.first_index if action.segment is not None else 0
        files.end_position = action.position
        if files.failure is not None:
            return
        try:
            self._remove(files, action.removed)
            if action.segment is not None:
                action.segment.cut(action.position, action.rows)
                self._dirty[action.segment] = files
        except DiskError as error:
            self._fail(files, error)

    def _start(self, action: Start) -> None:
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
            self._fail(files, error)

    def _remove(self, files: LogFiles, removed: Iterable[SegmentFile]) -> None:
        for segment in removed:
            segment.remove()
            self._dirty.pop(segment, None)
            self._dirty_directories.add(files.directory)

    def move_to_trash(self, files: LogFiles) -> None:
        """The log is no more; its files may be looked at for a day."""
        self.logs.pop(files.log_id, None)
        for segment in [segment for segment, owner in self._dirty.items() if owner is files]:
            del self._dirty[segment]
        self._dirty_directories.discard(files.directory)
        if self._disk.exists(files.directory):
            self._disk.make_directory(self._trash)
            self._disk.rename(files.directory, os.path.join(self._trash, os.path.basename(files.directory)))
            self._dirty_directories.add(self._logs_directory)
            self._dirty_directories.add(self._trash)

    # Recovery

    def adopt(self, files: LogFiles, loaded: Loaded, end: LogEnd) -> None:
        """Take over a log as its segments were found: what is stale goes, the files end where it does."""
        self.logs[files.log_id] = files
        files.end_index, files.end_term, files.end_offset = end.index, end.term, end.offset
        self._dirty_directories.add(self._logs_directory)
        self._remove(files, loaded.stale)
        for segment in loaded.made_anew:
            segment.file.rewrite_index(segment.rows)
            self._dirty[segment.file] = files
        if loaded.segments:
            last = loaded.segments[-1]
            files.segment, files.end_position = last.first_index, last.size
            if last.file.data().size() != last.size:
                last.file.cut(last.size, last.count)
                self._dirty[last.file] = files

    def apply_recovered(self, actions: Iterable[Action]) -> None:
        """Carry out actions that come from the journal of a former generation."""
        self.apply(actions, self._place)
        for files in self.logs.values():
            if files.made:
                self._dirty_directories.add(files.directory)
        self.journal_bytes = 0

    # Checkpoints

    def due(self) -> bool:
        """Enough journal was written since the last checkpoint."""
        return self.journal_bytes >= self._due_bytes

    def checkpoint(self) -> None:
        """Sync what the segments hold, write the checkpoint, and delete the journal files it stands for.

        Raises `DiskError` when the checkpoint itself cannot be written (a full disk): the former one and
        all of the journal still stand, and it may be tried again later.
        """
        # Also the pause before the next try, if this one fails.
        self._due_bytes = self.journal_bytes + self._settings.checkpoint_bytes // 4
        dirty = list(self._dirty.items())
        for work in (SegmentFile.start_writeback, SegmentFile.sync):
            for segment, files in dirty:
                try:
                    if files.failure is None:
                        work(segment)
                except DiskError as error:
                    self._fail(files, error)
        for segment, _ in dirty:
            del self._dirty[segment]
        for directory in list(self._dirty_directories):
            self._disk.sync_directory(directory)
            self._dirty_directories.discard(directory)
        if any(files.failure is not None for files in self.logs.values()):
            # The failed log's records are in the journal only: its files must stay.
            self.failed_checkpoints += 1
            return
        self._document.write(encode_checkpoint(self.snapshot()))
        self.journal.delete_before(self._place.file_number)
        self.journal_bytes = 0
        self._due_bytes = self._settings.checkpoint_bytes
        self.checkpoints += 1

    def snapshot(self) -> Checkpoint:
        return Checkpoint(
            generation=self.journal.generation,
            seed=self.journal.seed,
            lsn=self._place.lsn,
            journal_file=self._place.file_number,
            journal_position=self._place.end_position,
            logs=[files.state() for files in self.logs.values()],
            hard_states=dict(self.hard_states),
            lost=sorted(self.lost),
            replaced=dict(self.replaced),
        )
