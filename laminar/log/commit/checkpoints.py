"""Checkpoints: they save the state of all logs while commits and segment writes go on.

A checkpoint has three steps. *Begin*, in the writer's thread and between two frames: capture the state of all
logs, and the list of the files and directories that were changed and not synced (*dirty*). *Sync and write*,
in the background thread: sync these, then write the document. *End*, in the writer's thread: note the
outcome; if the checkpoint failed, all of them are dirty again. One checkpoint runs at a time; a request made
while it runs gets the next.

Why the captured state may be older than the files: a checkpoint names what was in the files when the state
was captured, and every byte of that was written before the syncs began. What the writer does to the files
meanwhile comes from records of a higher LSN. These are durable in the journal already, and the journal from
the captured place on is kept. So a truncation or deletion in between removes only what recovery removes again
when it replays that record: the files are as if the change had come just after the checkpoint.

A log whose segment failed stays in the checkpoint in the state of the last durable checkpoint. Its records
since then are *carried*: before the document is written, they are written again into new frames, tagged with
the LSN of the new checkpoint. They count only for a recovery that begins at that checkpoint; one that begins
at an older checkpoint reads the originals. For this, every record of that log must have passed the writer, so
no checkpoint begins between a failure and that moment.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from laminar.log.commit.journal import Journal, Written, journal_name, journal_numbers
from laminar.log.commit.segment_writer import SegmentWriter
from laminar.log.commit.snapshot import Snapshot
from laminar.log.disk.disk import Buffer, Disk
from laminar.log.disk.errors import DiskError, StorageError
from laminar.log.disk.threads import SerialExecutor
from laminar.log.format.journal_codec import (
    BLOCK_SIZE,
    CARRIED,
    HEAD_SIZE,
    RECORD,
    FrameFlag,
    RecordKind,
    decode_frame,
    decode_records,
    record_head,
)

Done = Callable[[StorageError | None], None]
# The kinds of records to carry: those that change an existing log. Whether a log exists is not carried, as
# the checkpoint says it, or a later record.
_OF_LOGS = frozenset(
    (
        RecordKind.FULL,
        RecordKind.TRUNCATE,
        RecordKind.LOG_START,
        RecordKind.UNSYNCED,
        RecordKind.MARK,
        RecordKind.POLICY,
        RecordKind.CARRIED,
    )
)


def carried_pieces(
    disk: Disk, store: str, journal: Journal, snapshot: Snapshot, max_bytes: int
) -> Iterator[list[Buffer]]:
    """Yield the records of the carried (failed) logs, to be written again into new journal frames.

    Each list is the content of one frame, of about `max_bytes`: the head and payload of each record in turn.
    """
    piece: list[Buffer] = []
    room = max_bytes
    for kind, key, payload in _records_of(disk, store, journal, snapshot):
        size = RECORD.size + CARRIED.size + len(payload)
        if piece and size > room:
            yield piece
            piece, room = [], max_bytes
        room -= size
        head = record_head(RecordKind.CARRIED, key, CARRIED.size + len(payload))
        piece += (head + CARRIED.pack(snapshot.place.lsn, kind), bytes(payload))
    if piece:
        yield piece


def _records_of(
    disk: Disk, store: str, journal: Journal, snapshot: Snapshot
) -> Iterator[tuple[RecordKind, int, memoryview]]:
    """Yield (kind, log id, payload) of the carried logs' records between two checkpoints.

    The records come in the order in which a recovery from the older checkpoint applies them.

    Raises:
        DiskError: The journal cannot be read as far as the newer checkpoint.
    """
    since, until = snapshot.since, snapshot.place
    lsn = since.lsn
    for number in journal_numbers(disk, store):
        if not since.file_number <= number <= until.file_number:
            continue
        start = since.end_position if number == since.file_number else 0
        file = disk.open(os.path.join(store, journal_name(number)))
        try:
            data = memoryview(file.pread(max(file.size() - start, 0), start))
        finally:
            file.close()
        position = 0
        while position < len(data) and lsn < until.lsn:
            head = decode_frame(data, position, generation=journal.generation, seed=journal.seed)
            if head is None or head.lsn <= lsn:
                position += BLOCK_SIZE
                continue
            lsn = head.lsn
            body = data[position + HEAD_SIZE : position + HEAD_SIZE + head.length]
            position += head.stored_size
            if head.flags & FrameFlag.TWIN:
                continue
            for kind, key, payload in decode_records(body, head.records):
                if key not in snapshot.carried or kind not in _OF_LOGS:
                    continue
                if kind is RecordKind.CARRIED:
                    tagged, inner = CARRIED.unpack_from(payload)
                    if tagged == since.lsn:
                        yield RecordKind(inner), key, payload[CARRIED.size :]
                else:
                    yield kind, key, payload
    if lsn < until.lsn:
        raise DiskError("read", store, errno.EIO, f"the journal ends at LSN {lsn}, before {until.lsn}")


@dataclass(slots=True)
class _Run:
    """One checkpoint in progress.

    `waiting` are the callbacks to call at its end. `pieces` yields the records of failed logs that are still
    to be carried (written into the journal again), a frame at a time. `carried_to` is the journal place of
    the last frame that was written for that; None before the first.
    """

    snapshot: Snapshot
    waiting: list[Done]
    pieces: Iterator[list[Buffer]] = field(default_factory=lambda: iter(()))
    carried_to: Written | None = None


class Checkpointer:
    """The runner of a storage's checkpoints, one at a time. Methods are for the segment writer's thread."""

    def __init__(
        self,
        writer: SegmentWriter,
        *,
        disk: Disk,
        store: str,
        max_frame_bytes: int,
        journal_worker: SerialExecutor,
        background: SerialExecutor,
        after_synced_frames: Callable[[Callable[[], None]], None],
        on_failed: Callable[[], None],
        on_bug: Callable[[BaseException], None],
    ) -> None:
        """Make a checkpointer for the logs of `writer`.

        `after_synced_frames` runs a function in the writer's thread when the writer has written every frame
        that was in the journal at the time of the call. `on_failed` is called in the writer's thread if a
        checkpoint could not be made. `on_bug` is called with an error that is a mistake in the program, in
        the thread in which it happened: the process must end.
        """
        self._writer = writer
        self._disk = disk
        self._store = store
        self._max_frame_bytes = max_frame_bytes
        self._journal_worker = journal_worker
        self._background = background
        self._behind_frames = after_synced_frames
        self._on_failed = on_failed
        self._on_bug = on_bug
        self._running = False
        self._waiting: list[Done] = []

    def request(self, done: Done | None = None) -> None:
        """Begin a checkpoint now, or when the one in progress has ended.

        `done` is called at the end of the new checkpoint, with None or the error because of which it could
        not be made.
        """
        if done is not None:
            self._waiting.append(done)
        if self._running:
            return
        try:
            self._writer.prepare_checkpoint()
        except DiskError as error:
            self._writer.failed_checkpoints += 1
            asked, self._waiting = self._waiting, []
            for done in asked:
                done(error)
            self._on_failed()
            return
        if self._writer.moving:
            return  # `resume_after_failure` requests it again
        snapshot = self._writer.begin_checkpoint()
        waiting, self._waiting = self._waiting, []
        self._running = True
        self._submit(self._background, self._sync, _Run(snapshot, waiting))

    def resume_after_failure(self, log_id: int) -> None:
        """Allow checkpoints again after a log failed; call it when its last record has passed the writer."""
        self._writer.moving.discard(log_id)
        self.request()

    def _submit(self, worker: SerialExecutor, step: Callable[[_Run], None], run: _Run) -> None:
        worker.submit(partial(self._perform, step, run))

    def _perform(self, step: Callable[[_Run], None], run: _Run) -> None:
        try:
            step(run)
        except BaseException as error:
            self._on_bug(error)
            if not isinstance(error, Exception):
                raise

    # In the background

    def _sync(self, run: _Run) -> None:
        snapshot = run.snapshot
        self._writer.sync(snapshot)
        if any(log_id not in snapshot.carried for log_id in list(self._writer.failed)):
            # A log has failed since: the captured state names what is not durable in it. The next
            # checkpoint will carry its records.
            self._behind_frames(partial(self._put_off, run))
            return
        if snapshot.carried:
            journal = self._writer.journal
            run.pieces = carried_pieces(self._disk, self._store, journal, snapshot, self._max_frame_bytes)
        self._carry(run)

    def _carry(self, run: _Run) -> None:
        try:
            piece = next(run.pieces, None)
            if piece is not None:
                self._submit(self._journal_worker, partial(self._write_piece, piece), run)
                return
            self._writer.write_checkpoint(run.snapshot)
        except DiskError as error:
            # A full or failing disk: `Storage.refusal` names the journal if this persists.
            self._behind_frames(partial(self._end, run, error))
        else:
            self._behind_frames(partial(self._end, run, None))

    # In the journal's thread

    def _write_piece(self, piece: list[Buffer], run: _Run) -> None:
        journal = self._writer.journal
        run.carried_to = journal.write(piece, records=len(piece) // 2, hard_states=[])
        journal.mark_end()
        self._submit(self._background, self._carry, run)

    # In the writer's thread

    def _put_off(self, run: _Run) -> None:
        """Drop this checkpoint, because a log failed during its syncs, and request a new one.

        The new checkpoint begins when the last record of that log has passed the writer.
        """
        self._writer.end_checkpoint(run.snapshot, written=False)
        self._running = False
        self._waiting = run.waiting + self._waiting
        self.request()

    def _end(self, run: _Run, error: DiskError | None) -> None:
        # Every frame in the journal when this was requested is applied by now, those before the
        # carried ones too.
        if run.carried_to is not None:
            self._writer.passed(run.carried_to)
        self._writer.end_checkpoint(run.snapshot, written=error is None)
        self._running = False
        for done in run.waiting:
            done(error)
        if error is not None:
            self._on_failed()
        if self._waiting:
            self.request()
