"""Read a log's frames without ever blocking the loop on a cold file.

What memory does not have is read by a reader thread; every frame that comes from a file is verified.
`LogEntries` finds where entries lie.
"""

from __future__ import annotations

import asyncio
import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import msgspec

from laminar.batch import verified_value
from laminar.log.disk.disk import Buffer
from laminar.log.disk.errors import DamagedRange, EntriesTrimmed, StorageError
from laminar.log.format.index_entry import UNKNOWN_KIND, IndexEntry, is_frame_of, row_place
from laminar.log.partition_log.entries import FIRST_OFFSET, LogEntries
from laminar.log.partition_log.read_ahead import MOST_BYTES as AHEAD_BYTES
from laminar.log.partition_log.read_ahead import SequentialReadDetector
from laminar.log.partition_log.readers import ReadRange, SegmentReader, intact_frames, read_frames
from laminar.log.segment.index_rebuild import check_chunk
from laminar.log.segment.quarantine import Damage, Quarantine
from laminar.log.segment.segment import IndexNotCached

P = ParamSpec("P")
T = TypeVar("T")

# Bytes of one read from the disk: large enough for its speed, small enough that others get their turn.
_MOST_BYTES = 4 * 1024 * 1024
# The kernel reads far ahead of a sequential reader: after a read that had to wait, at least this many further
# bytes count as read from the disk too, although they are in memory when asked for.
_REPLAY_BYTES = 64 * 1024 * 1024


class LogReader:
    """The reader of one log's frames: from memory, the page cache, or by a thread. The loop's thread only."""

    def __init__(
        self,
        entries: LogEntries,
        recent: dict[int, Buffer],
        quarantine: Quarantine,
        readers: SegmentReader,
        *,
        directory: str,
    ) -> None:
        """Make the reader of the log that owns `entries`, `recent` and `quarantine`.

        `recent` has the frames in memory, by index. `directory` is the log's, for errors to name.
        """
        self._entries = entries
        self._recent = recent
        self._quarantine = quarantine
        self._readers = readers
        self._directory = directory
        # Called once with each damaged range that a read finds.
        self.on_damage: Callable[[Damage], None] | None = None
        self._sequences = SequentialReadDetector()
        self._replay_bytes = 0

    def read_nowait(self, first_index: int, last_index: int, *, max_bytes: int) -> list[Buffer] | None:
        """Return the frames from `first_index` on that can be read without waiting, or None.

        None means that `read` must be used. Otherwise there is at least one frame, and as many more as
        `max_bytes` allow; there may be fewer than requested. Every frame that comes from a file is verified.
        Frames before a damaged one are returned.

        Raises:
            DamagedRange: The first frame is damaged.
        """
        entries = self._entries
        assert entries.first_index <= first_index <= last_index <= entries.last_index, (
            f"read of {first_index}..{last_index} from {entries!r}"
        )
        if max_bytes < AHEAD_BYTES and first_index not in self._recent:
            small = self._read_small(first_index, last_index, max_bytes)
            if small:
                return small
        frames: list[Buffer] = []
        room = max_bytes
        index = first_index
        while index <= last_index and (room > 0 or not frames):
            frame = self._recent.get(index)
            if frame is not None:
                if frames and len(frame) > room:
                    break
                frames.append(frame)
                room -= len(frame)
                index += 1
                continue
            found = self._run(index, last_index, room, at_least_one=not frames)
            if not found:
                if frames or found is None:
                    return frames or None
                return self._first_range(index, last_index, max_bytes)
            frames += found
            index += len(found)
            if index > last_index:
                break
            if index not in self._recent and index != entries.segment_of(index).first_index:
                break  # what ended this run would end the next one at once
            room -= sum(map(len, found))
        return frames

    def _run(self, index: int, last_index: int, max_bytes: int, *, at_least_one: bool) -> list[Buffer] | None:
        """Return the intact frames from `index` on, by one read from the page cache; None: use a thread.

        The frames are those of one segment that are not in memory, up to `max_bytes`. The list is empty if
        `max_bytes` has no room or the first frame is damaged. With `at_least_one` the first frame may be
        larger. This does the work of `_piece` and of the read after it, without an object for each row, which
        would take as long as all the rest.
        """
        if self._quarantine:
            if self._quarantine.at(index) is not None:
                return []
            last_index = self._quarantine.intact_up_to(index, last_index)
        segment = self._entries.segment_of(index)
        recent, following, size = self._recent, index, 0
        places: list[tuple[int, int, int]] = []
        try:
            for term, position, frame_size, kind in segment.frame_rows(
                index, min(last_index, segment.last_index)
            ):
                if size + frame_size > max_bytes and (places or not at_least_one):
                    break
                if kind == UNKNOWN_KIND or (places and following in recent):
                    break
                places.append((term, position, frame_size))
                size += frame_size
                following += 1
        except IndexNotCached:
            if not places:
                return None
        if not places:
            return []
        data = self._readers.frame_nowait(segment.file, places[0][1], size)
        return None if data is None else intact_frames(data, index, places)

    def _first_range(self, index: int, last_index: int, max_bytes: int) -> list[Buffer] | None:
        """Return the first frames of a read for which `_run` returned none.

        None means that a thread must read the frames, or compare their index rows with them.

        Raises:
            DamagedRange: The first frame is damaged.
        """
        try:
            piece = self._piece(index, last_index, max_bytes, at_least_one=True)
        except IndexNotCached:
            return None
        found = self._readers.read_nowait(piece)
        if found or found is None or self._is_unverified(piece):
            return found or None
        raise self.found_damaged(piece)

    def _read_small(self, first_index: int, last_index: int, max_bytes: int) -> list[Buffer] | None:
        """Return the frames of a small read, if they are undamaged and can be read without waiting.

        In every other case the result is None or empty, and the caller uses the general way.
        """
        entries = self._entries
        ahead = self._readers.ahead
        frame = ahead.get(entries.log_id, entries.truncations, first_index)
        if frame is None:
            wide = self._sequences.bytes_at(first_index)
            if not wide and first_index == last_index and not self._quarantine:
                return self._read_one(first_index)
            found = self._run(
                first_index,
                entries.last_index if wide else last_index,
                max(max_bytes, wide),
                at_least_one=True,
            )
            return self._asked_for(found, first_index, last_index, max_bytes, wide) if found else None
        frames: list[Buffer] = []
        size, index = 0, first_index
        while frame is not None and (not frames or size + len(frame) <= max_bytes):
            frames.append(frame)
            size += len(frame)
            index += 1
            frame = ahead.get(entries.log_id, entries.truncations, index) if index <= last_index else None
        self._sequences.stopped(index - 1, took_bytes=self._sequences.bytes_at(first_index))
        return frames

    def value_nowait(self, offset: int) -> memoryview | None:
        """Return the value of the record at `offset`, if that needs no wait; its batch is verified.

        None if the value is not in memory, if it is compressed or damaged, and if there is no such record:
        `find_offset`, `read` and `Batch.value` then give the value or the reason. They always give the same
        value; this takes 5 µs instead of 15 with batches of 4 KiB, because it makes no objects on the way.
        """
        entries = self._entries
        if self._quarantine or not entries.start.offset <= offset < entries.next_offset:
            return None
        segment, end_offset = entries.segments[-1], entries.next_offset
        if offset < segment.first_offset:
            place = bisect_right(entries.segments, offset, key=FIRST_OFFSET)
            if not place:
                return None
            segment, end_offset = entries.segments[place - 1], entries.segments[place].first_offset
        try:
            found = segment.frame_of_offset(offset, end_offset)
        except IndexNotCached:
            return None
        if found is None:
            return None
        index, (term, base_offset, position, _, size) = found
        frame = self._recent.get(index) or self._readers.frame_nowait(segment.file, position, size)
        return verified_value(frame, index, term, offset - base_offset) if frame is not None else None

    def _read_one(self, index: int) -> list[Buffer] | None:
        """Return the frame of a single entry, or None as `_read_small` does.

        This is the most frequent read, so it is done without the objects of the general way.
        """
        segment = self._entries.segment_of(index)
        try:
            rows, place = segment.rows_at(index - segment.first_index)
        except IndexNotCached:
            return None
        term, position, size = row_place(rows, place)
        frame = self._readers.frame_nowait(segment.file, position, size)
        if frame is None or not is_frame_of(frame, index, term):
            return None
        self._sequences.stopped(index, took_bytes=0)
        return [frame]

    def _asked_for(
        self, frames: list[Buffer], first_index: int, last_index: int, max_bytes: int, wide: int
    ) -> list[Buffer]:
        """Return those of `frames` that were requested; cache all of them if more was read (`wide`).

        `wide` is the number of bytes to which the read was extended; 0 if it was not.
        """
        if wide:
            self._readers.ahead.put(self._entries.log_id, self._entries.truncations, first_index, frames)
        count = size = 0
        for frame in frames[: last_index - first_index + 1]:
            size += len(frame)
            if count and size > max_bytes:
                break
            count += 1
        self._sequences.stopped(first_index + count - 1, took_bytes=wide)
        return frames[:count]

    @property
    def replaying(self) -> bool:
        """Whether recent reads of this log came from the disk; `read` is throttled during commits then."""
        return self._replay_bytes > 0

    async def read(self, first_index: int, last_index: int, *, max_bytes: int) -> list[Buffer]:
        """Return the frames from `first_index` on; let a reader thread wait for the disk if necessary.

        The number of frames is that of `read_nowait`: at least one, and as many more as `max_bytes` allow.

        Raises:
            EntriesTrimmed: The entries were removed while they were read.
            DamagedRange: The first frame is damaged.
            StorageError: The file cannot be read.
        """
        entries = self._entries
        while True:
            found = self.read_nowait(first_index, last_index, max_bytes=max_bytes)
            if found is not None:
                size = sum(map(len, found))
                await self._readers.yield_to_loop(size, replaying=self.replaying)
                self._replay_bytes = max(0, self._replay_bytes - size)
                return found
            before = entries.truncations
            self._replay_bytes = _REPLAY_BYTES
            try:
                most = self._readers.cold_bytes(min(max_bytes, _MOST_BYTES))
                frames = await self._read_cold(first_index, last_index, most)
            except DamagedRange:
                raise
            except StorageError:
                if before == entries.truncations:
                    raise
                frames = []
            if before == entries.truncations:
                if frames:
                    return frames
                continue
            # A truncation may have removed the bytes while they were read: ignore what came.
            last_index = min(last_index, entries.last_index)
            if not entries.first_index <= first_index <= last_index:
                raise EntriesTrimmed(f"entry {first_index} of {entries.name} was removed while it was read")

    async def read_promptly(self, first_index: int, last_index: int, *, max_bytes: int) -> list[Buffer]:
        """Return frames like `read`, but without yielding to other tasks if no wait is needed.

        Raises:
            EntriesTrimmed: The first entry was trimmed, before this call or while it waits.
            DamagedRange: The first frame is damaged.
            StorageError: The file cannot be read.
        """
        entries = self._entries
        if first_index < entries.first_index:
            raise EntriesTrimmed(f"entry {first_index} of {entries.name} is trimmed")
        if not self._replay_bytes:
            found = self.read_nowait(first_index, last_index, max_bytes=max_bytes)
            if found is not None:
                return found
        return await self.read(first_index, last_index, max_bytes=max_bytes)

    def read_here(self, first_index: int, last_index: int, *, max_bytes: int) -> list[Buffer]:
        """Return frames like `read`, but block the caller's thread: for tools and tests without a loop."""
        while True:
            found = self.read_nowait(first_index, last_index, max_bytes=max_bytes)
            if found is not None:
                return found
            try:
                piece = self._piece(first_index, last_index, max_bytes, at_least_one=True)
            except IndexNotCached as cold:
                cold.segment.load(cold.number)
                continue
            frames = read_frames(piece)
            if frames:
                return frames
            segment, row = self._entries.segment_of(first_index), piece.rows[0]
            if not segment.is_unverified(first_index):
                raise self.found_damaged(piece)
            chunk = segment.suspect(row)
            segment.verified(chunk, check_chunk(chunk, row))

    async def _read_cold(self, first_index: int, last_index: int, max_bytes: int) -> list[Buffer]:
        """Return frames read by a thread; an empty list if it read or rebuilt index rows: then try again."""
        entries = self._entries
        wide = self._sequences.bytes_at(first_index) if max_bytes < AHEAD_BYTES else 0
        cold: IndexNotCached | None = None
        try:
            piece = self._piece(
                first_index,
                entries.last_index if wide else last_index,
                max(max_bytes, wide),
                at_least_one=True,
            )
        except IndexNotCached as missing:
            cold = missing
        if cold is not None:
            await self._readers.load(cold, reader=entries.log_id)
            return []
        before = entries.truncations
        frames = await self._readers.read(piece, reader=entries.log_id)
        if not frames and before == entries.truncations:
            if not self._is_unverified(piece):
                raise self.found_damaged(piece)
            await self._readers.compare(entries.segment_of(first_index), piece.rows[0], reader=entries.log_id)
        if not frames or before != entries.truncations or max_bytes >= AHEAD_BYTES:
            return frames
        return self._asked_for(frames, first_index, last_index, max_bytes, wide)

    def _is_unverified(self, piece: ReadRange) -> bool:
        """Return whether the first index row of a range was never checked, so that it may be wrong."""
        index = piece.rows[0].index
        return self._entries.segment_of(index).is_unverified(index)

    def _piece(self, index: int, last_index: int, max_bytes: int, *, at_least_one: bool) -> ReadRange:
        """Return the range to read from `index` on: undamaged entries of one segment, up to `max_bytes`.

        The range ends before an entry whose frame is in memory, and before an entry whose row is not in
        memory. With `at_least_one` the first entry may be larger than `max_bytes`; else the range may be
        empty.

        Raises:
            DamagedRange: The first entry is damaged.
            IndexNotCached: The row of the first entry is not in memory.
        """
        if self._quarantine:
            damage = self._quarantine.at(index)
            if damage is not None:
                raise damage.error(self._directory)
            last_index = self._quarantine.intact_up_to(index, last_index)
        segment = self._entries.segment_of(index)
        rows: list[IndexEntry] = []
        size = 0
        try:
            for row in segment.rows(index, min(last_index, segment.last_index)):
                if size + row.size > max_bytes and not (at_least_one and not rows):
                    break
                if rows and row.index in self._recent:
                    break
                rows.append(row)
                size += row.size
        except IndexNotCached:
            if not rows:
                raise
        return ReadRange(segment.file, rows, size)

    def found_damaged(self, piece: ReadRange) -> DamagedRange:
        """Record the first entry of a range as damaged, report it, and return the error for its reader."""
        damage = piece.damage()
        if piece.rows[0].kind == UNKNOWN_KIND:
            damage = self._whole_unknown(damage)
        if self._quarantine.add(damage) and self.on_damage is not None:
            self.on_damage(damage)
        return damage.error(self._directory)

    def _whole_unknown(self, damage: Damage) -> Damage:
        """Return the damage widened to the whole run of unknown entries in the segment.

        Entries of which neither header nor row is left lie in one run, whose first row has all its bytes.
        """
        segment = self._entries.segment_of(damage.first_index)
        first = last = damage.first_index
        while first > segment.first_index and segment.index_entry(first - 1).kind == UNKNOWN_KIND:
            first -= 1
        while last < segment.last_index and segment.index_entry(last + 1).kind == UNKNOWN_KIND:
            last += 1
        row = segment.index_entry(first)
        return msgspec.structs.replace(
            damage,
            first_index=first,
            last_index=last,
            term=0,
            first_offset=row.base_offset,
            next_offset=segment.index_entry(last).next_offset,
            position=row.position,
            size=row.size,
        )

    async def in_thread(self, size_bytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `work`, called in a reader thread when it is this log's turn.

        `size_bytes` is the memory that `work` uses, which counts against the limit of all reads.
        """
        return await self._readers.in_turn(self._entries.log_id, size_bytes, work, *args, **kwargs)

    async def digest(self, last_index: int) -> str:
        """Return the SHA-256 (hex) of the frames from the first to `last_index`, back to back.

        Raises:
            EntriesTrimmed: Entries were trimmed before they were read.
        """
        entries = self._entries
        digest = hashlib.sha256()
        loop = asyncio.get_running_loop()
        index = entries.first_index
        while index <= last_index:
            if index < entries.first_index:
                raise EntriesTrimmed(
                    f"entry {index} of {entries.name} was trimmed while the log was digested"
                )
            frames = await self.read(index, last_index, max_bytes=_MOST_BYTES)
            await loop.run_in_executor(self._readers.executor, _update, digest, frames)
            index += len(frames)
        return digest.hexdigest()


def _update(digest: hashlib._Hash, frames: Sequence[Buffer]) -> None:
    for frame in frames:
        digest.update(frame)
