"""Batches with fewer columns than were appended, for readers that need only keys, times or tags.

A projected batch is a batch like any other, with the same index and offsets, and checksums of its own. It
makes answers smaller, and is never stored nor replicated. The caller decides which columns a reader gets.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from laminar.batch.columns import NULLS, VARIABLE, Cells, Codec, Column, Entry, assemble, read_directory
from laminar.batch.header import Buffer, Flag, Header, replace_body


def project(frame: Buffer, keep: Container[int]) -> bytearray:
    """Return a copy of a verified batch of records with only the columns whose numbers are in `keep`.

    If values are not kept, each record has an empty value. Compressed columns stay compressed. The stub of a
    record larger than a batch is returned whole, because its headers are needed.

    Raises:
        BatchError: the directory is wrong.
    """
    header = Header.unpack(frame)
    if header.flags & Flag.LARGE:
        return bytearray(frame)
    entries = read_directory(frame, header)
    return replace_body(frame, assemble(list(cells_of(frame, entries, header.count, keep))))


def cells_of(
    frame: Buffer, entries: Mapping[int, Entry], count: int, keep: Container[int]
) -> Iterator[Cells]:
    """Yield the columns in `keep` as stored, by rising number. Values that are not kept become empty."""
    view = memoryview(frame)
    for number, entry in entries.items():
        if number in keep:
            validity = entry.validity_position
            offsets = entry.offsets_position
            yield Cells(
                entry.column,
                entry.codec,
                entry.width,
                bytes(view[validity : validity + (count + 7) // 8]) if entry.flags & NULLS else b"",
                bytes(view[offsets : offsets + 4 * (count + 1)]) if entry.flags & VARIABLE else b"",
                (view[entry.position : entry.position + entry.stored_length],),
                entry.stored_length,
                entry.plain_length,
                entry.null_count,
            )
        elif number == Column.VALUE:
            # A record has a value, so each batch has the column.
            yield Cells(Column.VALUE, Codec.NONE, 0, b"", bytes(4 * (count + 1)), (), 0, 0, 0)
