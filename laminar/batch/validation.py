"""Validation of a client's batch before it is acknowledged: everything that readers rely on later.

A batch that is acknowledged is never changed, and every reader of its partition meets it. So a cell that
cannot be read must be refused here: later it would stop each reader that asks for it. It takes about 30 ns
for each cell of a variable column, about 400 ns for each tag and each record's headers, which are decoded one
by one, and about 1 ns for each byte that is decompressed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import add, or_, sub

import mmh3
import msgspec

from laminar.batch.columns import (
    VARIABLE,
    Codec,
    Column,
    Entry,
    presence,
    read_directory,
    read_ends,
    read_times,
    too_large,
    unfold,
    unsupported_codec,
)
from laminar.batch.header import BatchError, Buffer, Header, malformed

_HEADERS = msgspec.msgpack.Decoder(dict[str, bytes])
# Cells are first checked in runs of this number: if a whole run is within the limit of one cell, each cell
# is.
_RUN = 64

# Limits up to which the batches of a body are checked in the event loop, together: about a millisecond or two
# for each. The first is of columns that are compressed, and of headers.
_UNFOLDED_HERE_BYTES = 64 << 10
_DECODED_HERE = 2048

Ends = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLimits:
    """The largest sizes of the parts of one record, in bytes; that of headers includes names and values."""

    max_key_bytes: int
    max_tag_bytes: int
    max_headers_bytes: int


def check_batch(
    frame: Buffer,
    limits: CellLimits,
    *,
    max_records: int,
    max_record_bytes: int,
    max_plain_bytes: int,
    header: Header | None = None,
) -> int:
    """Check a verified frame from a client: its directory, then every cell.

    Return how many bytes its columns have when they are decompressed. `header` is the frame's header, if the
    caller has read it.

    Raises:
        BatchError: something is wrong. The error names a cell by its record's position in the batch, such as
            ``records[3].tag``.
    """
    header, entries, ends = _check_directory(
        frame,
        header or Header.unpack(frame),
        max_records=max_records,
        max_record_bytes=max_record_bytes,
        max_plain_bytes=max_plain_bytes,
    )
    if entries[Column.VALUE].codec:
        unfold(frame, entries[Column.VALUE])
    for column, most in ((Column.KEY, limits.max_key_bytes), (Column.TAG, limits.max_tag_bytes)):
        if column in entries:
            _check_lengths(ends[column], most, column.name.lower())
    if Column.KEY in entries and entries[Column.KEY].codec:
        unfold(frame, entries[Column.KEY])
    if Column.TAG in entries:
        _check_tags(frame, header, entries, ends[Column.TAG])
    if Column.HEADERS in entries:
        _check_headers(frame, header, entries[Column.HEADERS], ends[Column.HEADERS], limits.max_headers_bytes)
    return sum(entry.plain_length for entry in entries.values())


def check_directory(
    frame: Buffer, *, max_records: int, max_record_bytes: int, max_plain_bytes: int
) -> Header:
    """Check the directory and limits of a verified frame, the first part of `check_batch`; return its header.

    It checks the number of records, the size of each with its key, tag and headers, and the size of all when
    decompressed. It checks offsets, which are never compressed: those of each column must begin at 0, never
    fall, and end at its plain length. It checks that times are in range. Nothing is decompressed, and no
    other cell is read.

    Raises:
        BatchError: something is wrong.
    """
    return _check_directory(
        frame,
        Header.unpack(frame),
        max_records=max_records,
        max_record_bytes=max_record_bytes,
        max_plain_bytes=max_plain_bytes,
    )[0]


def _check_directory(
    frame: Buffer, header: Header, *, max_records: int, max_record_bytes: int, max_plain_bytes: int
) -> tuple[Header, Mapping[int, Entry], Mapping[int, Ends]]:
    # Checked first, because what is unpacked below takes memory by this count.
    if header.count > max_records:
        raise too_large("records", header.count, max_records)
    entries = read_directory(frame, header)
    plain_bytes = 0
    for entry in entries.values():
        if entry.column in _KNOWN and entry.codec not in (Codec.NONE, Codec.ZSTD):
            raise unsupported_codec(entry.codec)
        plain_bytes += entry.plain_length
    if plain_bytes > max_plain_bytes:
        raise too_large("plain_bytes", plain_bytes, max_plain_bytes)
    tagged = {header.tag_mask != 0, Column.TAG in entries, Column.TAG_HASH in entries}
    if len(tagged) > 1:
        raise malformed("tag_mask", f"{header.tag_mask:#x}", "as the tag columns say", "batch")
    every_ends = {
        entry.column: read_ends(frame, entry, header.count)
        for entry in entries.values()
        if entry.flags & VARIABLE
    }
    for column in (Column.TIMESTAMP, Column.DELIVERY_TIME):
        if column in entries:
            read_times(frame, entries[column], header.count)
    if sum(ends[-1] for ends in every_ends.values()) > max_record_bytes:
        largest = max(_record_sizes(list(every_ends.values())))
        if largest > max_record_bytes:
            raise too_large("record_bytes", largest, max_record_bytes)
    return header, entries, every_ends


_KNOWN = frozenset(Column)


def _record_sizes(every_ends: Sequence[Ends]) -> Iterable[int]:
    sizes: Iterable[int] = map(sub, every_ends[0][1:], every_ends[0])
    for ends in every_ends[1:]:
        sizes = map(add, sizes, map(sub, ends[1:], ends))
    return sizes


def _check_lengths(ends: Ends, most: int, name: str) -> None:
    runs = (*ends[::_RUN], ends[-1])
    if ends[-1] <= most or max(map(sub, runs[1:], runs)) <= most:
        return
    for row, (start, end) in enumerate(pairwise(ends)):
        if end - start > most:
            raise too_large(f"records[{row}].{name}", end - start, most)


def _cells(frame: Buffer, entry: Entry, ends: Ends) -> list[bytes]:
    """Return the cells of a variable column."""
    plain = bytes(unfold(frame, entry))
    return [plain[start:end] for start, end in pairwise(ends)]


def takes_long(batches: Iterable[tuple[Buffer, Header | None]]) -> bool:
    """Return whether `check_batch` of all may take longer than about 2 ms, so that it should run in a thread.

    Each batch is its frame, which need not be verified, and its header, if the caller has read it. Only the
    directories are read; a batch whose directory is wrong counts for nothing, as it is refused at once.
    """
    unfolded_bytes = decoded = 0
    for frame, header in batches:
        try:
            header = header or Header.unpack(frame)
            entries = read_directory(frame, header)
        except BatchError:
            continue
        # One record may have as many headers as fit into the bytes of all.
        unfolded_bytes += sum(
            entry.plain_length for entry in entries.values() if entry.codec or entry.column == Column.HEADERS
        )
        decoded += header.count * ((Column.TAG in entries) + (Column.HEADERS in entries))
        if unfolded_bytes > _UNFOLDED_HERE_BYTES or decoded > _DECODED_HERE:
            return True
    return False


def _check_tags(frame: Buffer, header: Header, entries: Mapping[int, Entry], ends: Ends) -> None:
    """Check that each tag is UTF-8, and that its hash and its bit in the header are right.

    A wrong hash or bit would hide the record from a filter, which reads these first.
    """
    cells = _cells(frame, entries[Column.TAG], ends)
    hashes: dict[bytes, int] = {}
    for cell in set(cells):
        try:
            cell.decode()
        except UnicodeDecodeError:
            raise malformed(f"records[{cells.index(cell)}].tag", repr(cell), "UTF-8", "batch") from None
        hashes[cell] = mmh3.hash64(cell, signed=False)[0]
    stored = struct.unpack_from(f"<{header.count}Q", frame, entries[Column.TAG_HASH].position)
    expected = tuple(map(hashes.__getitem__, cells))
    if expected != stored:
        row = next(row for row, found in enumerate(stored) if found != expected[row])
        raise malformed(f"records[{row}].tag", f"{stored[row]:#x}", f"{expected[row]:#x}", "tag hash")
    wanted = reduce(or_, (1 << (value & 63) for cell, value in hashes.items() if cell), 0)
    if wanted & ~header.tag_mask:
        raise malformed("tag_mask", f"{header.tag_mask:#x}", f"{wanted:#x}", "batch")


def _check_headers(frame: Buffer, header: Header, entry: Entry, ends: Ends, most: int) -> None:
    """Check that each record's headers, if any, are one msgpack map of text to bytes within the limit."""
    present = presence(frame, entry, header.count)
    decode = _HEADERS.decode
    for row, cell in enumerate(_cells(frame, entry, ends)):
        if present is not None and present[row] == "0":
            continue
        try:
            fields = decode(cell)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            field = f"records[{row}].headers"
            raise malformed(field, str(error), "a map of text to bytes", "batch") from None
        # A map in msgpack takes more bytes than its names and values.
        if len(cell) > most:
            size = sum(len(name.encode()) + len(value) for name, value in fields.items())
            if size > most:
                raise too_large(f"records[{row}].headers", size, most)
