"""One partition's log as its replica sees it: what it holds, and what of it is durable.

Loop side: every change takes effect in memory at once and is recorded for the journal; the files follow in
the writer's thread. A log does not decide anything: it obeys the leader's segment borders, refuses what
does not chain, and knows neither Raft nor the records in a batch. Invariants:

1. `first_index == start.index + 1`, and entries are dense from there to `last_index`.
2. A frame leaves memory only when it is in its segment.
3. `durable_index` never counts an entry whose own journal record is not synced.
"""

from __future__ import annotations

import asyncio
import hashlib
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence

from crc32c import crc32c

from laminar.log import reading
from laminar.log.codec import MARK, PAIR, START, RecordKind, record_head
from laminar.log.disk import Buffer
from laminar.log.errors import BrokenChain, EntriesGone, StorageError
from laminar.log.pending import Cut, Mark, Recorder, Start, Write
from laminar.log.rows import HEADER, HEADER_CRC_POSITION, HEADER_SIZE, Row, pack_row
from laminar.log.segment import Segment, SegmentFile
from laminar.log.state import LogFiles, LogStart

# A digest is made in pieces, so that other reads get their turn.
_DIGEST_PIECE_BYTES = 4 * 1024 * 1024
_OPENS_SEGMENT = 1
EMPTY = LogStart()


class Log:
    """See the module. Made by `Storage`; call it from the loop's thread only."""

    def __init__(
        self,
        files: LogFiles,
        recorder: Recorder,
        readers: reading.Readers,
        *,
        segment_size_bytes: int,
        start: LogStart = EMPTY,
        segments: Sequence[Segment] = (),
        recovering: bool = False,
        incarnation: int = 0,
    ) -> None:
        """`segments` come from recovery: dense, durable, and reaching back to `start`."""
        self.log_id = files.log_id
        self.name = files.name
        self.files = files
        self.start = start
        self.recovering = recovering
        self.incarnation = incarnation
        # Raised by whatever makes an answer read from the files doubtful.
        self.changes = 0
        self._recorder = recorder
        self._readers = readers
        self._segment_size_bytes = segment_size_bytes
        self._segments = list(segments)
        self._firsts = [segment.first_index for segment in self._segments]
        self._recent: dict[int, Buffer] = {}
        # (running number, last index) of each append that is not known to be durable, oldest first.
        self._undurable: deque[tuple[int, int]] = deque()
        self.size_bytes = sum(segment.size for segment in self._segments)
        self.last_append_time_ms = start.time_ms
        self._set_end()
        self.durable_index = self.last_index

    def __repr__(self) -> str:
        return (
            f"<Log {self.name} {self.first_index}..{self.last_index} term {self.last_term} "
            f"durable {self.durable_index}{' recovering' if self.recovering else ''}>"
        )

    def _set_end(self) -> None:
        """Take the end of the log from its last row."""
        if self._segments:
            segment = self._segments[-1]
            last = segment.row(segment.last_index)
            self.last_index, self.last_term = last.index, last.term
            self.next_offset = last.base_offset + last.count
            self.last_append_time_ms = last.append_time_ms
        else:
            self.last_index, self.last_term = self.start.index, self.start.term
            self.next_offset, self.last_append_time_ms = self.start.offset, self.start.time_ms

    # What it holds

    @property
    def failure(self) -> StorageError | None:
        """A failed segment write or sync stops this log alone; everybody else goes on."""
        return self.files.failure

    @property
    def first_index(self) -> int:
        return self.start.index + 1

    @property
    def segment_full(self) -> bool:
        """Whether the leader should let the next entry open a segment."""
        return bool(self._segments) and self._segments[-1].size >= self._segment_size_bytes

    @property
    def segment_first_indexes(self) -> list[int]:
        """The first index of each segment, lowest first."""
        return list(self._firsts)

    def term(self, index: int) -> int | None:
        """The term of an entry, or of the one before the first; None outside. Unknown (damaged): None too."""
        if index == self.last_index:
            return self.last_term
        if index == self.start.index:
            return self.start.term
        if not self.start.index < index <= self.last_index:
            return None
        return self._segment_of(index).term(index) or None

    def row(self, index: int) -> Row:
        """What the index knows of an entry that the log holds."""
        assert self.start.index < index <= self.last_index, f"row {index} of {self!r}"
        return self._segment_of(index).row(index)

    def _segment_of(self, index: int) -> Segment:
        last = self._segments[-1]
        if index >= last.first_index:
            return last
        return self._segments[bisect_right(self._firsts, index) - 1]

    def index_of_offset(self, offset: int) -> int | None:
        """The entry that holds the record at `offset`; None when none does (yet, or any more)."""
        if not self.start.offset <= offset < self.next_offset:
            return None
        place = bisect_right(
            self._segments, offset, key=lambda segment: segment.row(segment.first_index).base_offset
        )
        segment = self._segments[max(place - 1, 0)]
        entries = range(max(segment.first_index, self.first_index), segment.last_index + 1)
        found = bisect_right(entries, offset, key=lambda index: segment.row(index).next_offset)
        return entries[found] if found < len(entries) else None

    def index_of_time(self, time_ms: int) -> int:
        """The first entry appended at `time_ms` or later; `last_index + 1` when there is none."""
        entries = range(self.first_index, self.last_index + 1)
        return self.first_index + bisect_left(
            entries, time_ms, key=lambda index: self.row(index).append_time_ms
        )

    # Changes

    def append(self, frames: Sequence[Buffer]) -> None:
        """Add stamped frames at the end; they are in memory at once, durable when a later `sync` is done.

        The frames are kept by reference and must not change any more. Header checksum, index, previous
        term, offsets and time are checked; bodies are the caller's to verify, where they came in.
        Raises `BrokenChain` for the first frame that does not fit (those before it stay appended).
        """
        if self.files.failure is not None:
            raise self.files.failure
        last_index, last_term = self.last_index, self.last_term
        next_offset, last_time = self.next_offset, self.last_append_time_ms
        recorder = self._recorder
        segment = self._segments[-1] if self._segments else None
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
                ) = HEADER.unpack_from(frame)
                size = HEADER_SIZE + body_length
                if (
                    index != last_index + 1
                    or prev_term != last_term
                    or base_offset != next_offset
                    or term < last_term
                    or time_ms < last_time
                    or len(frame) != size
                    or crc32c(memoryview(frame)[:HEADER_CRC_POSITION]) != header_crc
                ):
                    raise BrokenChain(
                        f"a frame of {self.name} with index {index}, term {term}, previous term {prev_term}, "
                        f"offset {base_offset}, time {time_ms} and {len(frame)} of {size} bytes does not "
                        f"follow index {last_index}, term {last_term}, offset {next_offset}, "
                        f"time {last_time}; or its header is damaged"
                    )
                if segment is None or flags & _OPENS_SEGMENT:
                    segment = self._open_segment(index)
                position = segment.size
                row = pack_row(term, base_offset, position, time_ms, tag_mask, count, size, kind)
                segment.rows += row
                segment.size = position + size
                self._recent[index] = frame
                number = recorder.record(
                    record_head(RecordKind.FULL, self.log_id, size),
                    frame,
                    Write(self.files, segment.file, index, position, frame, row),
                )
                recorder.remember(self, index, frame)
                self.size_bytes += size
                last_index, last_term, next_offset, last_time = index, term, base_offset + count, time_ms
        finally:
            if last_index != self.last_index:
                self.last_index, self.last_term = last_index, last_term
                self.next_offset, self.last_append_time_ms = next_offset, last_time
                self._undurable.append((number, last_index))
                recorder.touched.add(self)

    def _open_segment(self, first_index: int) -> Segment:
        segment = Segment(first_index, self.files.new_segment(first_index))
        self._segments.append(segment)
        self._firsts.append(first_index)
        return segment

    def truncate(self, index: int) -> None:
        """Cut entry `index` and all behind it. Only entries that were not committed."""
        assert self.start.index < index, f"truncation at {index} of {self!r}: it would cut the log's start"
        if index > self.last_index:
            return
        cut_term = self.term(index)
        removed: list[SegmentFile] = []
        while self._segments and self._segments[-1].first_index >= index:
            self._firsts.pop()
            segment = self._segments.pop()
            self.size_bytes -= segment.size
            removed.append(segment.file)
        kept = self._segments[-1] if self._segments else None
        if kept is not None and kept.last_index >= index:
            before = kept.size
            kept.cut(index)
            self.size_bytes -= before - kept.size
        for gone in range(index, self.last_index + 1):
            self._recent.pop(gone, None)
        self.changes += 1
        self._set_end()
        self._undurable_before(index)
        self._recorder.record(
            record_head(RecordKind.TRUNCATE, self.log_id, PAIR.size),
            PAIR.pack(index, cut_term or 0),
            Cut(
                self.files,
                index,
                self.last_term,
                self.next_offset,
                kept.file if kept is not None else None,
                kept.size if kept is not None else 0,
                kept.count if kept is not None else 0,
                tuple(removed),
            ),
        )

    def _undurable_before(self, index: int) -> None:
        """Forget what waits for durability from `index` on: a later completion must not count it."""
        self.durable_index = min(self.durable_index, index - 1)
        waiting = self._undurable
        while waiting and waiting[-1][1] >= index:
            number, _ = waiting.pop()
            if index - 1 > (waiting[-1][1] if waiting else self.durable_index):
                waiting.append((number, index - 1))

    def set_start(self, *, index: int, term: int, offset: int, time_ms: int = 0) -> None:
        """Let the log begin behind `index`, which it holds with that term, or with which an empty log begins.

        `time_ms` is the append time of that entry; taken from the log where it holds the entry.
        """
        if (index, term, offset) == (self.start.index, self.start.term, self.start.offset):
            return
        fresh = not self._segments and self.start == EMPTY
        if not fresh:
            assert self.start.index < index <= self.last_index, f"start at {index} of {self!r}"
            row = self.row(index)
            assert (row.term, row.next_offset) == (term, offset), (
                f"start {index}, {term}, {offset}: {row}, {self!r}"
            )
            time_ms = row.append_time_ms
        start = LogStart(index, term, offset, time_ms)
        removed: list[SegmentFile] = []
        while self._segments and self._segments[0].last_index <= index:
            segment = self._segments.pop(0)
            self._firsts.pop(0)
            self.size_bytes -= segment.size
            removed.append(segment.file)
        for gone in range(self.first_index, index + 1):
            self._recent.pop(gone, None)
        self.start = start
        self.changes += 1
        self._set_end()
        number = self._recorder.record(
            record_head(RecordKind.LOG_START, self.log_id, START.size),
            START.pack(start.index, start.term, start.offset, start.time_ms),
            Start(self.files, start, tuple(removed)),
        )
        if fresh:
            self._undurable.append((number, index))
            self._recorder.touched.add(self)

    def mark(self, *, recovering: bool, incarnation: int, boot_id: bytes = bytes(16)) -> None:
        """Record that this replica may have forgotten something (or no longer), and its incarnation."""
        assert incarnation >= self.incarnation, (
            f"incarnation {incarnation} of {self!r} after {self.incarnation}"
        )
        self.recovering = recovering
        self.incarnation = incarnation
        self._recorder.record(
            record_head(RecordKind.MARK, self.log_id, MARK.size),
            MARK.pack(recovering, incarnation, boot_id),
            Mark(self.files, recovering, incarnation),
        )

    # Completions, called by the storage

    def durable_up_to(self, number: int) -> None:
        """All changes up to the running `number` are durable."""
        waiting = self._undurable
        while waiting and waiting[0][0] <= number:
            self.durable_index = waiting.popleft()[1]

    def forget(self, index: int, frame: Buffer) -> None:
        """Let a frame go that is in its segment, if it is still the one at that index."""
        if self._recent.get(index) is frame:
            del self._recent[index]

    # Reading

    def read_nowait(self, first_index: int, last_index: int, *, max_bytes: int) -> list[Buffer] | None:
        """Whole frames from `first_index` on, at least one, then up to `max_bytes`; None: ask `read`.

        Every frame that comes from a file is verified. Raises `DamagedRange` when the first frame is
        damaged; frames before a damaged one are returned.
        """
        frames: list[Buffer] = []
        room = max_bytes
        index = self._check_range(first_index, last_index)
        while index <= last_index and (room > 0 or not frames):
            frame = self._recent.get(index)
            if frame is not None:
                if frames and len(frame) > room:
                    break
                frames.append(frame)
                room -= len(frame)
                index += 1
                continue
            piece = self._piece(index, last_index, room if frames else max_bytes, at_least_one=not frames)
            if not piece.rows:
                break
            found = self._readers.read_nowait(piece)
            if found is None:
                return frames or None
            if not found:
                if frames:
                    return frames
                raise piece.damage()
            frames += found
            if len(found) < len(piece.rows):
                break
            room -= piece.size
            index += len(found)
        return frames

    async def read(self, first_index: int, last_index: int, *, max_bytes: int) -> list[Buffer]:
        """As `read_nowait`, waiting for the disk in a reader thread where it must be asked.

        Raises `EntriesGone` when the entries are cut while they are read.
        """
        while True:
            found = self.read_nowait(first_index, last_index, max_bytes=max_bytes)
            if found is not None:
                return found
            piece = self._piece(first_index, last_index, max_bytes, at_least_one=True)
            before = self.changes
            try:
                frames = await self._readers.read(piece)
            except StorageError:
                if before == self.changes:
                    raise
                frames = []
            if before == self.changes:
                if not frames:
                    raise piece.damage()
                return frames
            # A truncation may have taken the bytes away while they were read: what came says nothing.
            last_index = min(last_index, self.last_index)
            if not self.first_index <= first_index <= last_index:
                raise EntriesGone(f"entry {first_index} of {self.name} was cut while it was read")

    def _check_range(self, first_index: int, last_index: int) -> int:
        assert self.first_index <= first_index <= last_index <= self.last_index, (
            f"read of {first_index}..{last_index} from {self!r}"
        )
        return first_index

    def _piece(self, index: int, last_index: int, max_bytes: int, *, at_least_one: bool) -> reading.Piece:
        """A contiguous range of one segment, up to `max_bytes`, that is in its file."""
        segment = self._segment_of(index)
        rows: list[Row] = []
        size = 0
        for each in range(index, min(last_index, segment.last_index) + 1):
            row = segment.row(each)
            if size + row.size > max_bytes and not (at_least_one and not rows):
                break
            if rows and each in self._recent:
                break
            rows.append(row)
            size += row.size
        return reading.Piece(segment.file, rows, size)

    async def digest(self, last_index: int) -> str:
        """SHA-256 (hex) over the frames from the first to `last_index`, back to back."""
        digest = hashlib.sha256()
        loop = asyncio.get_running_loop()
        index = self.first_index
        while index <= last_index:
            frames = await self.read(index, last_index, max_bytes=_DIGEST_PIECE_BYTES)
            await loop.run_in_executor(self._readers.executor, _update, digest, frames)
            index += len(frames)
        return digest.hexdigest()

    def close(self) -> None:
        """Close its files. After the writer and the readers are done."""
        for segment in self._segments:
            segment.file.close()


def _update(digest: hashlib._Hash, frames: Sequence[Buffer]) -> None:
    for frame in frames:
        digest.update(frame)
