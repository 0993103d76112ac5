"""One partition's log as its replica sees it: what it holds, and what of it is durable.

Loop side: every change takes effect in memory at once and is recorded for the journal; the files follow in
the writer's thread. A log does not decide anything: it obeys the leader's segment borders, refuses what
does not chain, and knows neither Raft nor the records in a batch. Invariants:

1. `first_index == start.index + 1`, and entries are dense from there to `last_index`.
2. A frame leaves memory only when it is in its segment.
3. `durable_index` counts an entry of a `commit` log when its own journal record is synced, and one of an
   `interval` log when that is written; `synced_index` counts both when they are on disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from crc32c import crc32c

from laminar.batch.header import HEADER_CRC_AT, HEADER_SIZE, LOG_FIELDS, Flag, Kind
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
from laminar.log.segment.segment import Segment

_OPENS_SEGMENT = int(Flag.OPENS_SEGMENT)
# Plain numbers are packed faster than members of an enumeration.
_FULL = int(RecordKind.FULL)
_CONFIGURATION = int(Kind.CONFIGURATION)
EMPTY = LogStart()


class Log:
    """See the module. Made by `Storage`; call it from the loop's thread only."""

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
        """`segments` come from recovery: dense, durable, and reaching back to `start`."""
        self.log_id = files.log_id
        self.name = files.name
        self.files = files
        self.recovering = recovering
        # That it may have forgotten no more than an `interval` log's last, unsynced entries.
        self.power_lost = power_lost
        self.incarnation = incarnation
        self.least_term = least_term
        self.policy = files.policy
        # What of it is damaged, and must not be served.
        self.quarantine = Quarantine()
        # Puts the bytes of a damaged entry back; set by the registry of damage of an open storage.
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
        # (running number, last index, offset behind it) of each append that does not count yet, oldest first;
        # and of each of an `interval` log that is not synced.
        self._undurable: deque[tuple[int, int, int]] = deque()
        self._unsynced: deque[tuple[int, int, int]] = deque()
        self.durable_index = self.last_index
        # Where what is synced ends, while anything is in `_unsynced`.
        self._synced_index, self._synced_offset = self.last_index, self.next_offset
        # Whether entries count when they are written. Never in recovery: what it appends, it syncs.
        self._interval = False
        # Whether the journal says that entries may be acknowledged before they are synced.
        self._told_unsynced = False

    def _offer_lookups(self) -> None:
        """Offer what the parts of the log answer as its own methods, without a call in between."""
        entries, reader = self._entries, self._reader
        self.term = entries.term
        self.index_entry, self.find_index_entry = entries.index_entry, entries.find_index_entry
        self.segment_of, self.sealed = entries.segment_of, entries.sealed
        self.index_of_offset, self.find_offset = entries.index_of_offset, entries.find_offset
        self.index_of_time, self.find_time = entries.index_of_time, entries.find_time
        self.find_tagged, self.find_shown = entries.find_tagged, entries.find_shown
        self.read_nowait, self.read, self.read_here = reader.read_nowait, reader.read, reader.read_here
        self.value_nowait, self.digest = reader.value_nowait, reader.digest
        self.found_damaged = reader.found_damaged

    def __repr__(self) -> str:
        return (
            f"<Log {self.name} {self.first_index}..{self.last_index} term {self.last_term} "
            f"durable {self.durable_index}{' recovering' if self.recovering else ''}>"
        )

    @property
    def start(self) -> LogStart:
        """The entry before the first."""
        return self._entries.start

    @property
    def first_index(self) -> int:
        return self._entries.first_index

    @property
    def last_index(self) -> int:
        return self._entries.last_index

    @property
    def last_term(self) -> int:
        """The term of the last entry, or of the one before the first in an empty log."""
        return self._entries.last_term

    @property
    def next_offset(self) -> int:
        """The offset after the last record, durable or not."""
        return self._entries.next_offset

    @property
    def last_append_time_ms(self) -> int:
        return self._entries.last_append_time_ms

    @property
    def size_bytes(self) -> int:
        """Bytes in its segments."""
        return self._entries.size_bytes

    @property
    def truncations(self) -> int:
        """Raised by whatever makes an answer read from the files doubtful."""
        return self._entries.truncations

    @property
    def replaying(self) -> bool:
        """Whether what is read of this log comes from the disk these days: then `read` keeps a pace."""
        return self._reader.replaying

    @property
    def segment_first_indexes(self) -> list[int]:
        """The first index of each segment, lowest first."""
        return [segment.first_index for segment in self._entries.segments]

    def sealed_segments(self) -> list[Segment]:
        """All segments but the last: nothing is appended to them any more."""
        return self._entries.segments[:-1]

    def segments(self) -> list[Segment]:
        """All segments, the oldest first; the last is written to."""
        return self._entries.segments[:]

    def watch_damage(
        self,
        *,
        on_damage: Callable[[Damage], None],
        repairer: Callable[[int, Buffer], Awaitable[None]],
    ) -> None:
        """Call `on_damage` with each damage that a read finds, once; `repairer` puts bytes back."""
        self._reader.on_damage = on_damage
        self.repairer = repairer

    async def repair(self, index: int, frame: Buffer) -> None:
        """Put the bytes of a damaged entry back, from another replica; rules: `DamageRegistry.repair`.

        Raises `RepairRefused` for bytes that are not the missing ones, and `DiskError`.
        """
        assert self.repairer is not None, f"{self!r} has no registry of damage: it is not of an open storage"
        await self.repairer(index, frame)

    @property
    def failure(self) -> StorageError | None:
        """A failed segment write or sync stops this log alone; everybody else goes on."""
        return self.files.failure

    @property
    def synced_index(self) -> int:
        """Up to here it survives a power loss of this machine. Of a `commit` log the same as durable."""
        return min(self._synced_index, self.durable_index) if self._unsynced else self.durable_index

    @property
    def unsynced_records(self) -> int:
        """Records of an `interval` log that a power loss of this machine may take."""
        return max(self.next_offset - self._synced_offset, 0) if self._unsynced else 0

    @property
    def written_index(self) -> int:
        """Entries up to here lie in their segments; of a log that failed nothing is known to.

        What was cut counts until it is written, too: so it may be less than what is there.
        """
        if self.files.failure is not None:
            return self.start.index
        first = self._changes.first_unwritten(self)
        return self.last_index if first is None else min(first - 1, self.last_index)

    @property
    def segment_full(self) -> bool:
        """Whether the leader should let the next entry open a segment."""
        segments = self._entries.segments
        return bool(segments) and segments[-1].size >= self._segment_size_bytes

    # Changes

    def append(self, frames: Sequence[Buffer]) -> None:
        """Add stamped frames at the end; they are in memory at once, durable when a later `sync` is done.

        The frames are kept by reference and must not change any more. Header checksum, index, previous
        term, offsets and time are checked; bodies are the caller's to verify, where they came in.
        Raises `BrokenChain` for the first frame that does not fit (those before it stay appended).
        """
        self._check_works()
        entries = self._entries
        last_index, last_term = entries.last_index, entries.last_term
        next_offset, last_time = entries.next_offset, entries.last_append_time_ms
        changes, interval = self._changes, self._interval
        must_sync = not interval
        if interval and not self._told_unsynced:
            self._tell_unsynced()
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
                if kind == _CONFIGURATION:
                    # Who lost the last interval asks all voters it knows of: it must not forget who they are.
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
                changes.touched[self] = None
                changes.must_sync |= must_sync
                if changes.on_record is not None:
                    changes.on_record()

    def _tell_unsynced(self) -> None:
        """Durable before the first entry is acknowledged: a start after a loss of power then knows."""
        self._told_unsynced = True
        self._changes.record(record_head(RecordKind.UNSYNCED, self.log_id, 0), b"", Unsynced(self.files))

    def _note_unsynced(self, number: int) -> None:
        if not self._unsynced:
            self._synced_index = self.durable_index
            self._synced_offset = self._offset_after(self.durable_index)
        self._unsynced.append((number, self.last_index, self.next_offset))
        self._changes.unsynced[self] = None

    def _offset_after(self, index: int) -> int:
        """The offset behind an entry that was appended lately, or behind the log's start."""
        return self.start.offset if index <= self.start.index else self.index_entry(index).next_offset

    def _check_works(self) -> None:
        """A failed log takes no change any more: its records are carried from checkpoint to checkpoint as
        they are.
        """
        if self.files.failure is not None:
            raise self.files.failure

    def _open_segment(self, first_index: int, first_offset: int, begun_ms: int) -> Segment:
        segment = Segment(first_index, self.files.new_segment(first_index), first_offset=first_offset)
        segment.begun_ms = begun_ms
        self._entries.add_segment(segment)
        return segment

    def truncate(self, index: int) -> None:
        """Remove entry `index` and all after it. Only entries that were not committed.

        Raises `StorageError` when the log has failed; so do the other changes.
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
        self.durable_index = min(self.durable_index, index - 1)
        self._forget_from(index, self._undurable, self.durable_index)
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
        """Forget what waits from `index` on: a later completion must not count it."""
        while waiting and waiting[-1][1] >= index:
            number, _, _ = waiting.pop()
            if index - 1 > (waiting[-1][1] if waiting else done_index):
                waiting.append((number, index - 1, self.next_offset))

    def set_start(self, *, index: int, term: int, offset: int, time_ms: int = 0) -> None:
        """Let the log begin behind `index`, which it holds with that term, or with which an empty log begins.

        `time_ms` is the append time of that entry; taken from the log where it holds the entry.
        """
        if (index, term, offset) == (self.start.index, self.start.term, self.start.offset):
            return
        self._check_works()
        fresh = not self._entries.segments and self.start == EMPTY
        if not fresh:
            assert self.start.index < index <= self.last_index, f"start at {index} of {self!r}"
            row = self.index_entry(index)
            if row.kind != UNKNOWN_KIND:
                # What is damaged here says nothing; the caller knows it from the group.
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
            self._changes.touched[self] = None

    def set_recovering(
        self, *, recovering: bool, incarnation: int, power_lost: bool = False, least_term: int = 0
    ) -> None:
        """Record that this replica may have forgotten something (or no longer), and its incarnation.

        `least_term`: it takes part in no term before this one, in which it may have voted for what it does
        not know of. It is recorded with the mark and never falls.
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
        """Take over what is recorded of the replica whose log this one will replace."""
        self.set_recovering(
            recovering=old.recovering,
            incarnation=old.incarnation,
            power_lost=old.power_lost,
            least_term=old.least_term,
        )

    def set_policy(self, policy: FlushPolicy) -> None:
        """Go on under another flush policy: it holds for what is appended from now on."""
        self._check_works()
        self.policy = policy
        self._interval = policy.is_interval
        self._told_unsynced &= policy.is_interval
        self._changes.record(
            record_head(RecordKind.POLICY, self.log_id, POLICY.size),
            POLICY.pack(policy.interval_ms, policy.interval_records),
            Policy(self.files, policy),
        )

    # Called by the storage

    def begin(self) -> None:
        """Recovery is over: the flush policy counts from now on."""
        self._interval = self.policy.is_interval

    def stop_clean(self) -> None:
        """Everything is synced, and a last checkpoint says so. What is appended nevertheless tells before."""
        self._told_unsynced = False

    def counts_up_to(self, number: int) -> None:
        """All changes up to the running `number` are as durable as they must be to count."""
        waiting = self._undurable
        while waiting and waiting[0][0] <= number:
            self.durable_index = waiting.popleft()[1]

    def synced_up_to(self, number: int) -> bool:
        """All changes up to the running `number` are durable. Returns whether all of this log is synced."""
        waiting = self._unsynced
        while waiting and waiting[0][0] <= number:
            _, self._synced_index, self._synced_offset = waiting.popleft()
        return not waiting

    def evict_frame(self, index: int, frame: Buffer) -> None:
        """Let a frame go that is in its segment, if it is still the one at that index."""
        if self._recent.get(index) is frame:
            del self._recent[index]

    def detach(self) -> None:
        """The log is deleted or replaced: what is read of its files from now on says nothing."""
        self._entries.truncations += 1
        self._changes.unsynced.pop(self, None)

    def grown(self, segment: Segment, size: int) -> None:
        """A repair has put bytes behind those that a segment had: it has `size` now, if that is more."""
        if size > segment.size:
            self._entries.size_bytes += size - segment.size
            segment.size = size

    def close(self) -> None:
        """Close its files. After the writer and the readers are done."""
        for segment in self._entries.segments:
            segment.file.close()
