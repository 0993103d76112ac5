"""A segment as the loop sees it: its size, and its index rows.

In memory stay only its last rows, and those that are not in its index file yet. Older rows are read from that
file in chunks, into a cache that all logs of a storage share. So a log of any size takes little memory, and
opening it reads one row for each segment. The loop's thread only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial

from laminar.log.disk.disk import Buffer
from laminar.log.format.index_entry import (
    ROW_SIZE,
    IndexEntry,
    row_next_offset,
    row_offset,
    row_offsets,
    row_term,
    unpack_frame_row,
    unpack_frame_rows,
    unpack_row,
    whole_rows,
)
from laminar.log.key_index.layout import Covered
from laminar.log.segment.index_rebuild import load_chunk
from laminar.log.segment.segment_file import CHUNK_ROWS, Chunk, SegmentFile

# At least this number of rows at the end stays in memory. More are kept for a while, up to `_TAIL_BYTES`, so
# that they are released many at a time.
_TAIL_ROWS = 128
_TAIL_BYTES = 4 * _TAIL_ROWS * ROW_SIZE
# A search guesses this many times, then it bisects.
_GUESSES = 4


class IndexNotCached(Exception):
    """The wanted index rows are not in memory: read chunk `number` of `segment`, then repeat the lookup.

    `Segment.load` reads the chunk in the loop's thread. To read it in another thread, call `load_chunk` there
    with the result of `Segment.chunk`, and pass the rows to `Segment.loaded`.
    """

    def __init__(self, segment: Segment, number: int) -> None:
        super().__init__(number)
        self.segment = segment
        self.number = number


def _slot_of_offset(rows: Buffer, offset: int) -> int:
    """Return the number (from 0) of the first of these rows whose records end after `offset`.

    There must be such a row.
    """
    count = len(rows) // ROW_SIZE
    first = row_offset(rows, 0)
    span = row_next_offset(rows, count - 1) - first
    if span > 0:
        guess = min(max(offset - first, 0) * count // span, count - 1)
        start, records = row_offsets(rows, guess)
        if start <= offset < start + records:
            return guess
    return bisect_right(range(count), offset, key=partial(row_next_offset, rows))


class Segment:
    """A segment as the loop knows it: its `size` in bytes, and its index rows.

    `tail` has the last rows, at least one, except before the first entry is added. `held_from` is the number
    (from 0) of the first of them; the rows before that one are in the index file.
    """

    __slots__ = (
        "begun_ms",
        "compared_chunks",
        "file",
        "first_index",
        "first_offset",
        "held_from",
        "indexed",
        "size",
        "tail",
        "truncations",
    )

    def __init__(self, first_index: int, file: SegmentFile, *, first_offset: int) -> None:
        self.first_index = first_index
        self.first_offset = first_offset
        # The append time of its first entry; 0 if unknown, after a start.
        self.begun_ms = 0
        self.file = file
        self.tail = bytearray()
        self.held_from = 0
        self.size = 0
        # How often the loop has truncated it; `SegmentFile.truncations` follows.
        self.truncations = 0
        # The sections of its key index, as it was last seen; None: not read yet. It is a hint.
        self.indexed: tuple[str, ...] | None = None
        # Numbers of the chunks whose rows were checked against the frames, after a read had found a frame
        # that was not what its row says. Each is checked once.
        self.compared_chunks: set[int] = set()

    def hold(self, rows: Buffer, *, held_from: int = 0) -> None:
        """Set the rows in memory to `rows`, and `size` to the end of the last frame.

        `held_from` is the number of rows before these, which are in the index file only.
        """
        self.tail = bytearray(rows)
        self.held_from = held_from
        last = self.last_row
        self.size = last.position + last.size

    @property
    def count(self) -> int:
        """Number of entries."""
        return self.held_from + len(self.tail) // ROW_SIZE

    @property
    def last_index(self) -> int:
        """Index of the last entry."""
        return self.first_index + self.held_from + len(self.tail) // ROW_SIZE - 1

    @property
    def last_row(self) -> IndexEntry:
        """Index entry of the last entry; always in memory."""
        return unpack_row(self.tail, len(self.tail) // ROW_SIZE - 1, self.last_index)

    @property
    def next_offset(self) -> int:
        """Offset after the last record."""
        return row_next_offset(self.tail, len(self.tail) // ROW_SIZE - 1)

    @property
    def last_term(self) -> int:
        """Term of the last entry (0: unknown)."""
        return row_term(self.tail, len(self.tail) // ROW_SIZE - 1)

    @property
    def covered(self) -> Covered:
        """The identity of the sealed segment, as its key index must name it to be valid."""
        return Covered(
            *(self.file.log_id, self.first_index, self.last_index, self.last_term),
            *(self.first_offset, self.next_offset, self.size),
        )

    def rows_at(self, slot: int) -> tuple[Buffer, int]:
        """Return a buffer of rows in memory that has the row of `slot`, and that row's number in the buffer.

        Raises:
            IndexNotCached: The row is not in memory.
        """
        held = slot - self.held_from
        if held >= 0:
            return self.tail, held
        number, place = slot // CHUNK_ROWS, slot % CHUNK_ROWS
        chunk = self.file.rows_cache.get(self.file, number)
        # The chunk may have been cached when the file held fewer rows of it.
        if chunk is None or len(chunk) <= place * ROW_SIZE:
            chunk = self._load_nowait(number)
        return chunk, place

    def index_entry_nowait(self, index: int) -> IndexEntry:
        """Return the unpacked index row of entry `index`.

        Raises:
            IndexNotCached: The row is not in memory.
        """
        rows, place = self.rows_at(index - self.first_index)
        return unpack_row(rows, place, index)

    def rows(self, first_index: int, last_index: int) -> Iterator[IndexEntry]:
        """Yield the unpacked index rows of the entries from `first_index` to `last_index`, both included.

        Raises `IndexNotCached` at a row that is not in memory.
        """
        index = first_index
        while index <= last_index:
            rows, place = self.rows_at(index - self.first_index)
            for slot in range(place, min(len(rows) // ROW_SIZE, place + last_index - index + 1)):
                yield unpack_row(rows, slot, index)
                index += 1

    def frame_rows(self, first_index: int, last_index: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the rows of a range of entries, each as (term, position, size, kind).

        Both ends are included. This is faster than `rows`, which makes an object for each row.

        Raises:
            IndexNotCached: A row is not in memory.
        """
        index = first_index
        while index <= last_index:
            rows, place = self.rows_at(index - self.first_index)
            count = min(len(rows) // ROW_SIZE - place, last_index - index + 1)
            yield from unpack_frame_rows(rows, place, count)
            index += count

    def index_entry(self, index: int) -> IndexEntry:
        """Return the unpacked index row of entry `index`; may wait for a read of the index file.

        Raises:
            DiskError: The file cannot be read.
        """
        try:
            return self.index_entry_nowait(index)
        except IndexNotCached as cold:
            self.load(cold.number)
            return self.index_entry_nowait(index)

    def term(self, index: int) -> int:
        """Return the term of an entry (0: unknown); may wait for a read of the index file."""
        return self.index_entry(index).term

    def chunk(self, number: int) -> Chunk:
        """Return the description of chunk `number`, with which another thread can read the rows."""
        count = min(CHUNK_ROWS, self.held_from - number * CHUNK_ROWS)
        assert count > 0, f"chunk {number} of {self.file.path}, which holds {self.held_from} rows"
        return Chunk(self.file, number, count, self.truncations, self.last_index, self.size, self.next_offset)

    def _load_nowait(self, number: int) -> bytes:
        chunk = self.chunk(number)
        data = self.file.read_rows_nowait(chunk.slot, chunk.count)
        if data is None or whole_rows(data, chunk.count) < chunk.count:
            raise IndexNotCached(self, number)
        rows = bytes(data)
        self.file.rows_cache.put(self.file, number, rows)
        return rows

    def load(self, number: int) -> None:
        """Read a chunk of rows into the cache, in this thread; damaged rows are rebuilt from the frames.

        Raises:
            DiskError: The files cannot be read.
        """
        chunk = self.chunk(number)
        self.loaded(chunk, load_chunk(chunk))

    def loaded(self, chunk: Chunk, rows: bytes) -> None:
        """Cache the rows of `chunk`, unless the segment was truncated since `chunk` was made."""
        if chunk.truncations == self.truncations:
            self.file.rows_cache.put(self.file, chunk.number, rows)

    def run(self, first_index: int, last_index: int, wanted: Callable[[Buffer, int], int]) -> tuple[int, int]:
        """Return the first run of entries whose rows are `wanted`: (its first index, index after its last).

        If no row is wanted, both are the index after the last entry examined. Only rows that lie together in
        memory are examined: so if both are the same and not above `last_index`, call it again from there.

        Raises:
            IndexNotCached: The row of `first_index` is not in memory.
        """
        rows, place = self.rows_at(first_index - self.first_index)
        limit = min(len(rows) // ROW_SIZE, place + last_index - first_index + 1)
        slot = place
        while slot < limit and not wanted(rows, slot):
            slot += 1
        end = slot
        while end < limit and wanted(rows, end):
            end += 1
        return first_index + slot - place, first_index + end - place

    def index_of_offset(self, offset: int) -> int:
        """Return the index of the entry that holds the record at `offset`, which must be in this segment.

        Raises:
            IndexNotCached: Rows that are needed are not in memory.
        """
        low_offset, high_offset = self.first_offset, row_offset(self.tail, 0)
        if offset >= high_offset:
            return self.first_index + self.held_from + _slot_of_offset(self.tail, offset)
        # Batches of one log hold about the same number of records, so a guess finds the right chunk
        # at once.
        low, high = 0, (self.held_from - 1) // CHUNK_ROWS
        guesses = 0
        while True:
            if guesses < _GUESSES:
                span = max(high_offset - low_offset, 1)
                number = low + max(offset - low_offset, 0) * (high - low + 1) // span
                number = min(number, high)
            else:
                number = (low + high) // 2
            guesses += 1
            rows = self._whole_chunk(number)
            first, end_offset = row_offset(rows, 0), row_next_offset(rows, len(rows) // ROW_SIZE - 1)
            if end_offset <= offset:
                assert number < high, f"offset {offset} is not in {self.file.path}"
                low, low_offset = number + 1, end_offset
            elif first <= offset or number == low:
                return self.first_index + number * CHUNK_ROWS + _slot_of_offset(rows, offset)
            else:
                # It lies before, or (after a gap of damaged entries) this is the first entry
                # that ends after it.
                high, high_offset = number - 1, first
                before = self._whole_chunk(high)
                if row_next_offset(before, len(before) // ROW_SIZE - 1) <= offset:
                    return self.first_index + number * CHUNK_ROWS

    def frame_of_offset(
        self, offset: int, end_offset: int
    ) -> tuple[int, tuple[int, int, int, int, int]] | None:
        """Return the index of the entry with the record at `offset`, and its row (see `unpack_frame_row`).

        None if no entry of this segment holds the record. `end_offset` is the offset after the segment's
        records. For reads of single records this is faster than `index_of_offset`: it first guesses the row,
        which is right if all batches have about the same number of records, and searches only if it is not.

        Raises:
            IndexNotCached: Rows that are needed are not in memory.
        """
        first_offset = self.first_offset
        count = self.held_from + len(self.tail) // ROW_SIZE
        slot = (offset - first_offset) * count // (end_offset - first_offset)
        rows, place = self.rows_at(slot)
        found = unpack_frame_row(rows, place * ROW_SIZE)
        if found[1] <= offset < found[1] + found[3]:
            return self.first_index + slot, found
        index = self.index_of_offset(offset)
        if index > self.last_index:
            return None
        rows, place = self.rows_at(index - self.first_index)
        found = unpack_frame_row(rows, place * ROW_SIZE)
        return (index, found) if found[1] <= offset else None

    def _whole_chunk(self, number: int) -> Buffer:
        """Return all rows of chunk `number`, from the cache or the page cache."""
        return self.rows_at(min((number + 1) * CHUNK_ROWS, self.held_from) - 1)[0]

    def is_unverified(self, index: int) -> bool:
        """Return whether an entry's row comes from the index file and was not checked against the frames."""
        slot = index - self.first_index
        return slot < self.held_from and slot // CHUNK_ROWS not in self.compared_chunks

    def suspect(self, row: IndexEntry) -> Chunk:
        """Return the chunk that holds `row`, which may be wrong: `check_chunk` compares it with the frame."""
        return self.chunk((row.index - self.first_index) // CHUNK_ROWS)

    def verified(self, chunk: Chunk, rows: bytes | None) -> None:
        """Note that a chunk was compared with the frames; `rows` are rebuilt ones, None if it was right."""
        if chunk.truncations == self.truncations:
            self.compared_chunks.add(chunk.number)
            if rows is not None:
                self.loaded(chunk, rows)

    def add(self, row: bytes, end: int) -> None:
        """Add the packed row of one entry, whose frame ends at position `end`."""
        self.tail += row
        self.size = end
        if len(self.tail) > _TAIL_BYTES:
            self.evict_entries()

    def evict_entries(self) -> None:
        """Drop rows from memory that the index file has, except the last ones."""
        if self.file.truncations != self.truncations:
            return  # the file still holds rows that were cut
        kept = min(self.file.rows_written, self.count - _TAIL_ROWS)
        if kept > self.held_from:
            del self.tail[: (kept - self.held_from) * ROW_SIZE]
            self.held_from = kept

    def replace_rows(self, index: int, rows: bytes) -> None:
        """Replace rows in memory, from entry `index` on, by those that a repair wrote to the index file."""
        slot = index - self.first_index
        for number in range(slot // CHUNK_ROWS, (slot + len(rows) // ROW_SIZE - 1) // CHUNK_ROWS + 1):
            self.file.rows_cache.drop(self.file, number)
        held = max(self.held_from - slot, 0) * ROW_SIZE
        if held < len(rows):
            at = (slot - self.held_from) * ROW_SIZE + held
            self.tail[at : at + len(rows) - held] = rows[held:]

    def truncate(self, index: int) -> None:
        """Remove entry `index` and all after it; at least one must be left. May read the index file."""
        assert index > self.first_index, f"cut of {index} would empty the segment {self.first_index}"
        slot = index - self.first_index
        last = self.index_entry(index - 1)
        if slot <= self.held_from:
            rows, place = self.rows_at(slot - 1)
            self.tail = bytearray(rows[place * ROW_SIZE : (place + 1) * ROW_SIZE])
            for number in range((slot - 1) // CHUNK_ROWS, (self.held_from - 1) // CHUNK_ROWS + 1):
                self.file.rows_cache.drop(self.file, number)
                self.compared_chunks.discard(number)
            self.held_from = slot - 1
        else:
            del self.tail[(slot - self.held_from) * ROW_SIZE :]
        self.size = last.position + last.size
        self.indexed = None
        self.truncations += 1
