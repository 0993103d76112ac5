"""Scan a segment frame by frame, checking every byte, and go on after damage.

It only reads, and decides nothing about repair. It is for the verification of a folder, which reports the
frames that are intact and the bytes that are not. A start uses `laminar.log.segment.index_rebuild` instead,
which reads headers only. An unreadable sector counts as zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from laminar.batch import HEADER_SIZE, MAGIC, BatchError, Buffer, Header, verify, verify_header
from laminar.log.disk.disk import File
from laminar.log.format.index_entry import ROW_SIZE, IndexEntry, row_is_whole, unpack_row
from laminar.log.segment.index_rebuild import read_damaged

_WINDOW_BYTES = 8 << 20


@dataclass(slots=True)
class IntactFrame:
    """An intact frame (both checksums are right), and the index row that it should have."""

    header: Header
    row: IndexEntry


@dataclass(slots=True)
class Gap:
    """Damaged bytes in place of the frames of the entries `first_index` to `last_index`, both included.

    `last_index` is None if no intact frame follows: then the gap extends to the end of the file, and the
    number of its entries is unknown. `why` describes the damage. `row` is the index row of a gap of one
    entry, from its intact header or an intact row of the index; None if neither is left.
    """

    first_index: int
    last_index: int | None
    position: int
    size: int
    why: str
    row: IndexEntry | None = None


class Window:
    """A reader of the first `size` bytes of a file, from front to back: it reads large ranges at once."""

    def __init__(self, file: File, size: int) -> None:
        self._file = file
        self._size = size
        self._start = 0
        self._data = memoryview(b"")

    def view(self, position: int, size: int) -> memoryview:
        """Return a view of up to `size` bytes at `position`; fewer at the end of the file."""
        size = min(size, self._size - position)
        if not self._start <= position or position + size > self._start + len(self._data):
            wanted = min(max(size, _WINDOW_BYTES), self._size - position)
            self._data = memoryview(read_damaged(self._file, wanted, position))
            self._start = position
        return self._data[position - self._start : position - self._start + size]


def scan_frames(
    file: File, *, size: int, first_index: int, hints: Buffer = b""
) -> Iterator[IntactFrame | Gap]:
    """Yield every intact frame and every gap in the first `size` bytes, in order.

    The first frame should be that of entry `first_index`. `hints` are the rows of the segment's index: where
    a header is damaged, the intact row of its entry tells where the next frame begins.
    """
    window = Window(file, size)
    position, index = 0, first_index
    while position < size:
        try:
            header = verify_header(window.view(position, HEADER_SIZE))
        except BatchError as error:
            hole = _gap(window, size, hints, position, index, first_index, str(error))
        else:
            row = row_of(header, position)
            if position + row.size > size:
                hole = Gap(
                    row.index,
                    None,
                    position,
                    size - position,
                    "the frame ends after the end of the file",
                    row,
                )
            else:
                try:
                    verify(window.view(position, row.size))
                    yield IntactFrame(header, row)
                    position, index = position + row.size, row.index + 1
                    continue
                except BatchError as error:
                    hole = Gap(row.index, row.index, position, row.size, str(error), row)
        yield hole
        if hole.last_index is None:
            return
        position, index = hole.position + hole.size, hole.last_index + 1


def _gap(
    window: Window, size: int, hints: Buffer, position: int, index: int, first_index: int, why: str
) -> Gap:
    """Return the gap that begins with a damaged header at `position`, where entry `index` should be.

    The gap ends where an intact index row of that entry says that it ends; without one, at the next intact
    header of a later entry, or at the end of the file.
    """
    slot = index - first_index
    if len(hints) >= (slot + 1) * ROW_SIZE and row_is_whole(hints, slot):
        row = unpack_row(hints, slot, index)
        if row.position == position and HEADER_SIZE <= row.size <= size - position:
            return Gap(index, index, position, row.size, why, row)
    at = position + 1
    while at + HEADER_SIZE <= size:
        piece = bytes(window.view(at, _WINDOW_BYTES // 2))
        found = piece.find(MAGIC)
        while found >= 0:
            try:
                header = verify_header(window.view(at + found, HEADER_SIZE))
            except BatchError:
                pass
            else:
                if index < header.index <= index + (at + found - position) // HEADER_SIZE:
                    return Gap(index, header.index - 1, position, at + found - position, why)
            found = piece.find(MAGIC, found + 1)
        at += max(len(piece) - len(MAGIC) + 1, 1)
    return Gap(index, None, position, size - position, why)


def row_of(header: Header, position: int) -> IndexEntry:
    """Return the index row that the frame with `header` at `position` should have."""
    return IndexEntry(
        index=header.index,
        term=header.term,
        base_offset=header.base_offset,
        count=header.count,
        position=position,
        size=header.frame_size,
        append_time_ms=header.append_time_ms,
        kind=int(header.kind),
        tag_mask=header.tag_mask,
    )
