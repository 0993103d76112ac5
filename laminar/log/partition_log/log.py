"""One partition's log as its replica sees it: its entries, and which of them are durable.

Every change takes effect in memory at once and is recorded for the journal; the files follow in the segment
writer's thread. A log begins a new segment where the leader's frame says so, refuses a frame that does not
follow its end, and knows neither Raft nor the records in a batch. The loop's thread only. Invariants:

1. `first_index == start.index + 1`, and there is an entry at each index from there to `last_index`.
2. A frame leaves memory only when it is in its segment.
3. `durable_index` includes an entry of a `commit` log when its own journal record is synced, and an entry of
   an `interval` log when its journal record is written; `synced_index` includes either when it is synced.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from laminar.batch.header import HEADER_CRC_AT, HEADER_SIZE, LOG_FIELDS, Flag, Kind
from laminar.checksum import crc32c
from laminar.log.disk.disk import Buffer
from laminar.log.disk.errors import BrokenChain, StorageError
from laminar.log.format.checkpoint_state import LogStart
from laminar.log.format.flush_policy import FlushPolicy
from laminar.log.format.index_entry import UNKNOWN_KIND, pack_row
from laminar.log.format.journal_codec import (
    PAIR,
    POLICY,
    RECORD,
    START,
    RecordKind,
    RecoveryReason,
    encode_mark,
    record_head,
)
from laminar.log.partition_log.changes import (
    ChangeQueue,
    MoveLogStart,
    Policy,
    SetRecovering,
    Truncate,
    Unsynced,
    Write,
)
from laminar.log.partition_log.entries import LogEntries
from laminar.log.partition_log.readers import SegmentReader
from laminar.log.partition_log.reads import LogReader
from laminar.log.segment.log_files import LogFiles
from laminar.log.segment.quarantine import Damage, Quarantine
from laminar.log.segment.segment import IndexNotCached, Segment

_OPENS_SEGMENT = int(Flag.OPENS_SEGMENT)
_SYNCED = int(Flag.SYNCED)
# Plain numbers are packed faster than members of an enumeration.
_FULL = int(RecordKind.FULL)
_CONFIGURATION = int(Kind.CONFIGURATION)
EMPTY = LogStart()


class Log:
    """The log of one partition's replica, to which entries are added; made by `Storage`.

    Its methods to find and read entries are those of its parts, `LogEntries` and `LogReader`.
    """

    def __init__(
        self,
        files: LogFiles,
        changes: ChangeQueue,
        readers: SegmentReader,
        *,
        segment_size_bytes: int,
        start: LogStart = EMPTY,
        segments: Sequence[Segment] = (),
        recovering: bool = False,
        power_lost: bool = False,
        incarnation: int = 0,
        least_term: int = 0,
    ) -> None:
        """Make a log with the `segments` that recovery found: durable, without gaps from `start` on.

        A segment of `segment_size_bytes` or more is full (`segment_full`). The last four arguments are
        explained at `set_recovering`.
        """
        self.log_id = files.log_id
        self.name = files.name
        self.files = files
        self.recovering = recovering
        # Whether it is recovering only because a power loss may have taken an `interval` log's last,
        # unsynced entries.
        self.power_lost = power_lost
        self.incarnation = incarnation
        self.least_term = least_term
        self.policy = files.policy
        # The damaged entries, which are never served.
        self.quarantine = Quarantine()
        # Puts the bytes of a damaged entry back; set by the damage registry of an open storage.
        self.repairer: Callable[[int, Buffer], Awaitable[None]] | None = None
        self._changes = changes
        self._segment_size_bytes = segment_size_bytes
        self._entries = LogEntries(
            readers, log_id=files.log_id, name=files.name, start=start, segments=segments
        )
        # Frames in memory, by index.
        self._recent: dict[int, Buffer] = {}
        self._reader = LogReader(
            self._entries, self._recent, self.quarantine, readers, directory=files.directory
        )
        self._offer_lookups()
        # Oldest first, (running number, last index, offset after it) of each append that does not count
        # yet; in `_unsynced`, of each append to an `interval` log that is not synced yet.
        self._undurable: deque[tuple[int, int, int]] = deque()
        self._unsynced: deque[tuple[int, int, int]] = deque()
        self._durable_index = self.last_index
        # The end of what is synced, while anything is in `_unsynced`.
        self._synced_index, self._synced_offset = self.last_index, self.next_offset
        # Whether entries count when they are written. False until `begin`, as recovery syncs what it appends.
        self._interval = False
        # Whether the journal says that entries may be acknowledged before they are synced.
        self._noted_unsynced = False

    def _offer_lookups(self) -> None:
        """Make methods of the log's parts attributes of the log, which saves a call at each use."""
        entries, reader = self._entries, self._reader
        self.term, self.size, self.offset_after = entries.term, entries.size, entries.offset_after
        self.index_entry, self.find_index_entry = entries.index_entry, entries.find_index_entry
        self.segment_of, self.sealed = entries.segment_of, entries.sealed
        self.sealed_at = entries.sealed_at
        self.index_of_offset, self.find_offset = entries.index_of_offset, entries.find_offset
        self.index_of_time, self.find_time = entries.index_of_time, entries.find_time
        self.find_tagged, self.find_shown = entries.find_tagged, entries.find_shown
        self.find_kinds = entries.find_kinds
        self.read_nowait, self.read, self.read_here = reader.read_nowait, reader.read, reader.read_here
        self.read_promptly, self.in_thread = reader.read_promptly, reader.in_thread
        self.value_nowait, self.digest = reader.value_nowait, reader.digest
        self.found_damaged = reader.found_damaged

    def __repr__(self) -> str:
        return (
            f"<Log {self.name} {self.first_index}..{self.last_index} term {self.last_term} "
            f"durable {self._durable_index}{' recovering' if self.recovering else ''}>"
        )

    @property
    def start(self) -> LogStart:
        """The start of the log: index, term and time of the entry before the first, and the first offset."""
        return self._entries.start

    @property
    def first_index(self) -> int:
        """Index of the first entry."""
        return self._entries.first_index

    @property
    def last_index(self) -> int:
        """Index of the last entry, durable or not."""
        return self._entries.last_index

    @property
    def last_term(self) -> int:
        """Term of the last entry, or of the one before the first in an empty log."""
        return self._entries.last_term

    @property
    def next_offset(self) -> int:
        """Offset after the last record, durable or not."""
        return self._entries.next_offset

    @property
    def last_append_time_ms(self) -> int:
        """Append time of the last entry, in ms since the epoch."""
        return self._entries.last_append_time_ms

    @property
    def size_bytes(self) -> int:
        """Size of the log's segments in bytes."""
        return self._entries.size_bytes

    @property
    def truncations(self) -> int:
        """Number of truncations, trims and replacements; if it changes, a read in progress may be wrong."""
        return self._entries.truncations

    @property
    def replaying(self) -> bool:
        """Whether recent reads of this log came from the disk; `read` is throttled during commits then."""
        return self._reader.replaying

    @property
    def segment_first_indexes(self) -> list[int]:
        """First index of each segment, lowest first."""
        return [segment.first_index for segment in self._entries.segments]

    def sealed_segments(self) -> list[Segment]:
        """Return all segments but the last: nothing is appended to them any more."""
        return self._entries.segments[:-1]

    def segments(self) -> list[Segment]:
        """Return all segments, the oldest first; the last is the active one."""
        return self._entries.segments[:]

    def appended_before(self, offset: int) -> int | None:
        """Return when the record at `offset` was appended (ms since the epoch), or an earlier time.

        The earlier time is that at which the record's segment began; it is returned if the append time is not
        in memory. None if neither is known. The disk is not read.
        """
        segments = self._entries.segments
        place = bisect_right(segments, offset, key=lambda segment: segment.first_offset) - 1
        if place < 0 or offset >= self.next_offset:
            return None
        segment = segments[place]
        try:
            return segment.index_entry_nowait(segment.index_of_offset(offset)).append_time_ms
        except IndexNotCached:
            before_ms = segments[place - 1].last_row.append_time_ms if place else None
            return segment.begun_ms or before_ms

    def watch_damage(
        self,
        *,
        on_damage: Callable[[Damage], None],
        repairer: Callable[[int, Buffer], Awaitable[None]],
    ) -> None:
        """Report each damaged range that a read finds to `on_damage`; let `repair` call `repairer`."""
        self._reader.on_damage = on_damage
        self.repairer = repairer

    async def repair(self, index: int, frame: Buffer) -> None:
        """Replace the bytes of a damaged entry with `frame`, which comes from another replica.

        `DamageRegistry.repair` checks and writes the frame, which is durable on return.

        Raises:
            RepairRefused: The frame is not the missing one.
            DiskError: The frame cannot be written.
        """
        assert self.repairer is not None, f"{self!r} has no registry of damage: it is not of an open storage"
        await self.repairer(index, frame)

    @property
    def failure(self) -> StorageError | None:
        """The error of a failed write or sync of a segment, which has stopped this log alone; else None."""
        return self.files.failure

    @property
    def durable_index(self) -> int:
        """Index of the last entry that may be acknowledged, according to the flush policy (invariant 3)."""
        self._take_counted()
        return self._durable_index

    def _take_counted(self) -> None:
        waiting, counted = self._undurable, self._changes.counted
        while waiting and waiting[0][0] <= counted:
            self._durable_index = waiting.popleft()[1]

    @property
    def synced_index(self) -> int:
        """Index of the last entry that survives a power loss; in a `commit` log it is `durable_index`."""
        durable_index = self.durable_index
        return min(self._synced_index, durable_index) if self._unsynced else durable_index

    @property
    def unsynced_records(self) -> int:
        """Number of records of an `interval` log that a power loss of this machine may take."""
        return max(self.next_offset - self._synced_offset, 0) if self._unsynced else 0

    @property
    def written_index(self) -> int:
        """Index of the last entry up to which all entries are certainly in their segments.

        In a failed log that is `start.index`. The result may be too low, because a frame that was truncated
        before it was written still counts as not written.
        """
        if self.files.failure is not None:
            return self.start.index
        first = self._changes.first_unwritten(self)
        return self.last_index if first is None else min(first - 1, self.last_index)

    @property
    def segment_full(self) -> bool:
        """Whether the last segment is full: then the leader should mark the next entry to begin a segment."""
        segments = self._entries.segments
        return bool(segments) and segments[-1].size >= self._segment_size_bytes

    # Changes

    def append(self, frames: Sequence[Buffer]) -> None:
        """Add frames at the end: in memory at once, durable when a later `Storage.sync` is done.

        The frames must be stamped: their headers have the index, term, offset and time that the leader gave
        them. They are kept by reference and must not change any more. Each header is checked, and whether it
        follows the entry before; bodies must have been verified on arrival.

        Raises:
            BrokenChain: A frame does not follow the end of the log; those before it stay appended.
            StorageError: The log has failed.
        """
        self._check_works()
        self._take_counted()  # so that it does not pile up
        entries = self._entries
        last_index, last_term = entries.last_index, entries.last_term
        next_offset, last_time = entries.next_offset, entries.last_append_time_ms
        changes, interval = self._changes, self._interval
        must_sync = not interval
        if interval and not self._noted_unsynced:
            self._record_unsynced()
        segment = entries.segments[-1] if entries.segments else None
        try:
            for frame in frames:
                if len(frame) < HEADER_SIZE:
                    raise BrokenChain(f"a frame of {len(frame)} bytes for {self!r}")
                (
                    kind,
                    flags,
                    index,
                    term,
                    prev_term,
                    base_offset,
                    count,
                    body_length,
                    time_ms,
                    tag_mask,
                    header_crc,
                ) = LOG_FIELDS.unpack_from(frame)
                size = HEADER_SIZE + body_length
                if (
                    index != last_index + 1
                    or prev_term != last_term
                    or base_offset != next_offset
                    or term < last_term
                    or time_ms < last_time
                    or len(frame) != size
                    or crc32c(frame[:HEADER_CRC_AT]) != header_crc
                ):
                    raise BrokenChain(
                        f"a frame of {self.name} with index {index}, term {term}, previous term {prev_term}, "
                        f"offset {base_offset}, time {time_ms} and {len(frame)} of {size} bytes does not "
                        f"follow index {last_index}, term {last_term}, offset {next_offset}, "
                        f"time {last_time}; or its header is damaged"
                    )
                if segment is None or flags & _OPENS_SEGMENT:
                    segment = self._open_segment(index, next_offset, time_ms)
                position = segment.size
                row = pack_row(term, base_offset, position, time_ms, tag_mask, count, size, kind)
                segment.add(row, position + size)
                self._recent[index] = frame
                write = Write(self.files, segment.file, index, position, frame, row)
                head = RECORD.pack(_FULL, 0, 0, size, self.log_id)
                number = changes.record_batch(self, index, head, frame, write)
                if kind == _CONFIGURATION or flags & _SYNCED:
                    # A replica that lost its last interval asks all voters that it knows
                    # of, so a configuration must be durable even in an `interval` log.
                    must_sync = True
                entries.size_bytes += size
                last_index, last_term, next_offset, last_time = index, term, base_offset + count, time_ms
        finally:
            if last_index != entries.last_index:
                entries.last_index, entries.last_term = last_index, last_term
                entries.next_offset, entries.last_append_time_ms = next_offset, last_time
                self._undurable.append((number, last_index, next_offset))
                if interval:
                    self._note_unsynced(number)
                changes.must_sync |= must_sync
                if changes.on_record is not None:
                    changes.on_record()

    def _record_unsynced(self) -> None:
        """Record in the journal that entries may be acknowledged before they are synced.

        It is called before the first such entry, and the record is durable before that entry may be
        acknowledged. So a start after a power loss knows that acknowledged entries may be missing.
        """
        self._noted_unsynced = True
        self._changes.record(record_head(RecordKind.UNSYNCED, self.log_id, 0), b"", Unsynced(self.files))

    def _note_unsynced(self, number: int) -> None:
        if not self._unsynced:
            self._synced_index = self.durable_index
            self._synced_offset = self._offset_after(self.durable_index)
        self._unsynced.append((number, self.last_index, self.next_offset))
        self._changes.unsynced[self] = None
        self._changes.touched[self] = None

    def _offset_after(self, index: int) -> int:
        """Return the offset after an entry; the log's first offset for an entry before its start."""
        return self.start.offset if index <= self.start.index else self.index_entry(index).next_offset

    def _check_works(self) -> None:
        """Raise the error of a failed log, which accepts no more changes; do nothing for another log.

        The journal records of a failed log are carried from checkpoint to checkpoint unchanged.
        """
        if self.files.failure is not None:
            raise self.files.failure

    def _open_segment(self, first_index: int, first_offset: int, begun_ms: int) -> Segment:
        segment = Segment(first_index, self.files.new_segment(first_index), first_offset=first_offset)
        segment.begun_ms = begun_ms
        self._entries.add_segment(segment)
        return segment

    def truncate(self, index: int) -> None:
        """Remove entry `index` and all after it, which must not be committed.

        Raises:
            StorageError: The log has failed.
        """
        self._check_works()
        assert self.start.index < index, f"truncation at {index} of {self!r}: it would cut the log's start"
        if index > self.last_index:
            return
        cut_term = self.term(index)
        last_index = self.last_index
        removed = self._entries.remove_from(index)
        for gone in range(index, last_index + 1):
            self._recent.pop(gone, None)
        kept = self._entries.segments[-1] if self._entries.segments else None
        self.quarantine.truncate(index)
        self._durable_index = min(self.durable_index, index - 1)
        self._forget_from(index, self._undurable, self._durable_index)
        self._synced_index = min(self._synced_index, index - 1)
        self._synced_offset = min(self._synced_offset, self.next_offset)
        self._forget_from(index, self._unsynced, self._synced_index)
        cut = Truncate(
            self.files,
            index,
            self.last_term,
            self.next_offset,
            kept.file if kept is not None else None,
            kept.size if kept is not None else 0,
            kept.count if kept is not None else 0,
            tuple(removed),
        )
        head = record_head(RecordKind.TRUNCATE, self.log_id, PAIR.size)
        self._changes.record(head, PAIR.pack(index, cut_term or 0), cut)

    def _forget_from(self, index: int, waiting: deque[tuple[int, int, int]], done_index: int) -> None:
        """Remove entries from `index` on from `waiting`, so that no later completion counts them.

        An append that is cut in the middle stays, with the entries before `index`; `done_index` is the last
        entry before all that waits.
        """
        while waiting and waiting[-1][1] >= index:
            number, _, _ = waiting.pop()
            if index - 1 > (waiting[-1][1] if waiting else done_index):
                waiting.append((number, index - 1, self.next_offset))

    def set_start(self, *, index: int, term: int, offset: int, time_ms: int = 0) -> None:
        """Trim the log: make it begin after entry `index`, whose term is `term`.

        The log must hold that entry, unless the log is new and empty. `offset` is the offset after the entry;
        `time_ms` is its append time, which is used only if the log lacks the entry or the entry is damaged.
        """
        if (index, term, offset) == (self.start.index, self.start.term, self.start.offset):
            return
        self._check_works()
        fresh = not self._entries.segments and self.start == EMPTY
        if not fresh:
            assert self.start.index < index <= self.last_index, f"start at {index} of {self!r}"
            row = self.index_entry(index)
            if row.kind != UNKNOWN_KIND:
                # Of a damaged entry term and offset are unknown here; the caller has them from the
                # group.
                assert (row.term, row.next_offset) == (term, offset), (
                    f"start {index}, {term}, {offset}: {row}, {self!r}"
                )
                time_ms = row.append_time_ms
        start = LogStart(index, term, offset, time_ms)
        for gone in [held for held in self._recent if held <= index]:
            del self._recent[gone]
        removed = self._entries.move_start(start)
        self.quarantine.trim_before(index)
        head = record_head(RecordKind.LOG_START, self.log_id, START.size)
        payload = START.pack(start.index, start.term, start.offset, start.time_ms)
        number = self._changes.record(head, payload, MoveLogStart(self.files, start, tuple(removed)))
        if fresh:
            self._undurable.append((number, index, offset))

    def set_recovering(
        self, *, recovering: bool, incarnation: int, power_lost: bool = False, least_term: int = 0
    ) -> None:
        """Record whether this replica may have forgotten what it acknowledged, and its incarnation.

        `power_lost` tells that it may have forgotten only the last interval. The replica takes part in no
        term below `least_term`, because it may have forgotten a vote in such a term (0: none); the recorded
        number never falls.
        """
        self._check_works()
        assert incarnation >= self.incarnation, (
            f"incarnation {incarnation} of {self!r} after {self.incarnation}"
        )
        self.recovering, self.power_lost = recovering, recovering and power_lost
        self.incarnation = incarnation
        self.least_term = max(self.least_term, least_term)
        why = RecoveryReason.NO
        if self.recovering:
            why = RecoveryReason.POWER_LOST if self.power_lost else RecoveryReason.DAMAGED
        payload = encode_mark(why, incarnation=self.incarnation, least_term=self.least_term)
        self._changes.record(
            record_head(RecordKind.MARK, self.log_id, len(payload)),
            payload,
            SetRecovering(self.files, self.recovering, self.power_lost, self.incarnation, self.least_term),
        )

    def copy_recovering(self, old: Log) -> None:
        """Set the recovery state of this log to that of `old`, which this log will replace."""
        self.set_recovering(
            recovering=old.recovering,
            incarnation=old.incarnation,
            power_lost=old.power_lost,
            least_term=old.least_term,
        )

    def set_policy(self, policy: FlushPolicy) -> None:
        """Set the flush policy for what is appended from now on."""
        self._check_works()
        self.policy = policy
        self._interval = policy.is_interval
        self._noted_unsynced &= policy.is_interval
        self._changes.record(
            record_head(RecordKind.POLICY, self.log_id, POLICY.size),
            POLICY.pack(policy.interval_ms, policy.interval_records),
            Policy(self.files, policy),
        )

    # Called by the storage

    def begin(self) -> None:
        """Apply the flush policy to appends from now on; recovery, which syncs everything, has ended."""
        self._interval = self.policy.is_interval

    def stop_clean(self) -> None:
        """Prepare for a clean end, when everything is synced and a last checkpoint will record that.

        If there is another append, it first records again that entries may be unsynced.
        """
        self._noted_unsynced = False

    def synced_up_to(self, number: int) -> bool:
        """Note that the changes up to running `number` are synced; return whether all of this log's are."""
        waiting = self._unsynced
        while waiting and waiting[0][0] <= number:
            _, self._synced_index, self._synced_offset = waiting.popleft()
        return not waiting

    def evict_frame(self, index: int, frame: Buffer) -> None:
        """Drop a frame from memory, because it is in its segment, if it is still the one at `index`."""
        if self._recent.get(index) is frame:
            del self._recent[index]

    def detach(self) -> None:
        """Note that the log is deleted or replaced, so that reads in progress do not trust its files."""
        self._entries.truncations += 1
        self._changes.unsynced.pop(self, None)

    def grown(self, segment: Segment, size: int) -> None:
        """Note the size in bytes of a segment's file, if a repair of damaged entries has made it longer."""
        if size > segment.size:
            self._entries.size_bytes += size - segment.size
            segment.size = size

    def close(self) -> None:
        """Close the log's files. Call it only when the segment writer and the readers have ended."""
        for segment in self._entries.segments:
            segment.file.close()
