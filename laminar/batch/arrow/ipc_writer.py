"""A writer of the Arrow stream format without pyarrow; it also exports the names of ``ipc_reader``.

The metadata of a record batch is a small template into which numbers are written. The body of the message is
the frame itself, so values go from the log to the socket uncopied; only columns that a frame does not hold
(offsets, times in microseconds) are written after it. Nothing here knows sockets. No node loads pyarrow,
which is an extra that starts threads and takes tens of megabytes. Format:
arrow.apache.org/docs/format/Columnar.html, "IPC Streaming Format", and Message.fbs, Schema.fbs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

from laminar.batch.arrow.flatbuffers import Scalar, Structs, Table, encode
from laminar.batch.arrow.ipc_reader import (
    BINARY,
    CONTINUATION,
    INT,
    MAP,
    METADATA_V5,
    PREFIX,
    RECORD_BATCH,
    SCHEMA,
    STRUCT,
    TIMESTAMP,
    UTF8,
    Rows,
    read_stream,
)
from laminar.batch.batch import Batch
from laminar.batch.columns import NULLS, Column, Entry, bitmap, presence
from laminar.batch.header import Buffer

__all__ = [
    "COLUMNS",
    "END",
    "FIELDS",
    "Field",
    "Rows",
    "Type",
    "batch_parts",
    "fields",
    "read_stream",
    "record_batch_message",
    "schema_message",
    "write_stream",
]

COLUMNS = ("offset", "timestamp", "key", "value", "tag")
END = b"\xff\xff\xff\xff\0\0\0\0"


class Type(Enum):
    """The Arrow types that Laminar's columns have."""

    INT64 = "int64"
    TIMESTAMP = "timestamp[us, tz=UTC]"
    BINARY = "binary"
    UTF8 = "utf8"
    HEADERS = "map<utf8, binary>"


class Field(NamedTuple):
    """A column of a stream: its name and type. Every column is nullable."""

    name: str
    type: Type


FIELDS = {
    "offset": Field("offset", Type.INT64),
    "timestamp": Field("timestamp", Type.TIMESTAMP),
    "key": Field("key", Type.BINARY),
    "value": Field("value", Type.BINARY),
    "tag": Field("tag", Type.UTF8),
    "headers": Field("headers", Type.HEADERS),
}


def fields(columns: Sequence[str] | None = None) -> list[Field]:
    """Return the fields of the named columns, in that order; by default all but ``headers``.

    Headers are left out by default because they cost a loop over the records. Raises ValueError for a name
    that is no column.
    """
    try:
        return [FIELDS[name] for name in (COLUMNS if columns is None else columns)]
    except KeyError as error:
        raise ValueError(f"no Arrow column {error}; there are {', '.join(FIELDS)}") from None


def schema_message(wanted: Sequence[Field]) -> bytes:
    """Return the first message of a stream: its schema."""
    return _schema_message(tuple(wanted))


@lru_cache(maxsize=64)
def _schema_message(wanted: tuple[Field, ...]) -> bytes:
    tables = [_field_table(name, kind) for name, kind in wanted]
    schema = Table(Scalar("h", 0), tables)
    metadata, _ = encode(Table(Scalar("h", METADATA_V5), Scalar("B", SCHEMA), schema, Scalar("q", 0)))
    return PREFIX.pack(CONTINUATION, len(metadata)) + metadata


def _field_table(name: str, kind: Type, *, nullable: bool = True) -> Table:
    children: list[Table] = []
    if kind is Type.INT64:
        number, parameters = INT, Table(Scalar("i", 64), Scalar("?", True))
    elif kind is Type.TIMESTAMP:
        number, parameters = TIMESTAMP, Table(Scalar("h", 2), "UTC")  # unit 2: microseconds
    elif kind is Type.HEADERS:
        number, parameters = MAP, Table(Scalar("?", False))
        pair = [_field_table("key", Type.UTF8, nullable=False), _field_table("value", Type.BINARY)]
        children = [Table("entries", Scalar("?", False), Scalar("B", STRUCT), Table(), None, pair)]
    else:
        number, parameters = UTF8 if kind is Type.UTF8 else BINARY, Table()
    return Table(name, Scalar("?", nullable), Scalar("B", number), parameters, None, children)


class _Template(NamedTuple):
    message: bytes
    body_length_at: int
    length_at: int
    nodes_at: int
    buffers_at: int


@lru_cache(maxsize=64)
def _template(nodes: int, buffers: int) -> _Template:
    batch = Table(Scalar("q", 0), Structs(nodes, bytes(16 * nodes)), Structs(buffers, bytes(16 * buffers)))
    metadata, places = encode(
        Table(Scalar("h", METADATA_V5), Scalar("B", RECORD_BATCH), batch, Scalar("q", 0))
    )
    message, record_batch, nodes_place, buffers_place = places
    prefix = PREFIX.pack(CONTINUATION, len(metadata))
    return _Template(
        prefix + metadata,
        len(prefix) + message[3],
        len(prefix) + record_batch[0],
        len(prefix) + nodes_place[0],
        len(prefix) + buffers_place[0],
    )


def record_batch_message(
    length: int, nodes: Sequence[tuple[int, int]], buffers: Sequence[tuple[int, int]], body_length: int
) -> bytearray:
    """Return the metadata of a record batch of `length` records, to be followed by `body_length` bytes.

    `nodes` are (number of cells, number of nulls) of each column, followed by those of its children.
    `buffers` are (position in the body, size in bytes), in the same order and for each column the validity
    first. Positions and `body_length` must be multiples of 8.
    """
    assert body_length % 8 == 0, f"a body of {body_length} bytes"
    template = _template(len(nodes), len(buffers))
    message = bytearray(template.message)
    struct.pack_into("<q", message, template.body_length_at, body_length)
    struct.pack_into("<q", message, template.length_at, length)
    struct.pack_into(f"<{2 * len(nodes)}q", message, template.nodes_at, *chain.from_iterable(nodes))
    struct.pack_into(f"<{2 * len(buffers)}q", message, template.buffers_at, *chain.from_iterable(buffers))
    return message


def write_stream(batches: Iterable[Batch], columns: Sequence[str] | None = None) -> list[Buffer]:
    """Return a whole stream, as buffers to be sent in order; the frames among them are not copied.

    `columns` as in `fields`.
    """
    wanted = fields(columns)
    parts: list[Buffer] = [schema_message(wanted)]
    for batch in batches:
        parts += batch_parts(batch, wanted)
    parts.append(END)
    return parts


def batch_parts(batch: Batch, wanted: Sequence[Field], rows: Sequence[int] | None = None) -> list[Buffer]:
    """Return one record batch of a stream: its metadata, the frame, and columns that are not in the frame.

    With `rows` only the records at these positions in the batch, which are copied instead of the frame: for a
    fetch that begins or ends inside a batch, or that filters. The list is empty if there are no records.
    """
    length = len(batch) if rows is None else len(rows)
    if length == 0:
        return []
    body = _Body(batch, rows, length)
    for field in wanted:
        body.add(field)
    parts: list[Buffer] = [
        record_batch_message(length, body.nodes, body.buffers, body.size),
        *body.parts,
    ]
    return parts


class _Body:
    """The body of a record batch in the making: the frame if it is used whole, then the other columns.

    Each part is padded to a multiple of 8 bytes.
    """

    def __init__(self, batch: Batch, rows: Sequence[int] | None, length: int) -> None:
        self.batch = batch
        self.rows = rows
        self.length = length
        self.nodes: list[tuple[int, int]] = []
        self.buffers: list[tuple[int, int]] = []
        self.parts: list[Buffer] = []
        self.size = 0
        self._zeros: int | None = None
        if rows is None:
            self._put(batch.frame)

    def add(self, field: Field) -> None:
        """Add one column: its null count and its buffers."""
        if field.name == "offset":
            base = self.batch.base_offset
            rows = range(self.length) if self.rows is None else self.rows
            self._add_fixed([base + row for row in rows])
        elif field.name == "timestamp":
            self._add_timestamps()
        elif field.name == "headers":
            self._add_headers()
        else:
            self._add_variable(Column[field.name.upper()])

    def _put(self, data: Buffer) -> tuple[int, int]:
        place = (self.size, len(data))
        self.parts.append(data)
        self.size += len(data)
        if self.size % 8:
            self.parts.append(bytes(-self.size % 8))
            self.size += -self.size % 8
        return place

    def _add_fixed(self, numbers: Sequence[int]) -> None:
        self.nodes.append((self.length, 0))
        self.buffers += [(0, 0), self._put(struct.pack(f"<{self.length}q", *numbers))]

    def _add_timestamps(self) -> None:
        if self.batch.entry(Column.TIMESTAMP) is None:
            self.nodes.append((self.length, 0))
            microseconds = struct.pack("<q", self.batch.header.append_time_ms * 1000)
            self.buffers += [(0, 0), self._put(microseconds * self.length)]
            return
        times = self.batch.timestamps
        if self.rows is not None:
            times = [times[row] for row in self.rows]
        self._add_fixed([time * 1000 for time in times])

    def _add_variable(self, column: Column) -> None:
        if column is Column.TAG:
            self.batch.check_text()
        entry = self.batch.entry(column)
        cells = self.batch.cells(column)
        if entry is None or cells is None or (column is Column.VALUE and self.batch.is_large):
            # All cells are null: the same zeros serve as validity and offsets of every such column.
            if self._zeros is None:
                self._zeros, _ = self._put(bytes(4 * (self.length + 1)))
            self.nodes.append((self.length, self.length))
            self.buffers += [
                (self._zeros, (self.length + 7) // 8),
                (self._zeros, 4 * (self.length + 1)),
                (self._zeros, 0),
            ]
        elif self.rows is None:
            self._add_whole(entry, cells[1])
        else:
            self._add_picked(entry, cells)

    def _add_whole(self, entry: Entry, plain: memoryview) -> None:
        self.nodes.append((self.length, entry.null_count))
        size = (self.length + 7) // 8 if entry.flags & NULLS else 0
        self.buffers += [
            (entry.validity_position, size),
            (entry.offsets_position, 4 * (self.length + 1)),
            self._put(plain) if entry.codec else (entry.position, entry.plain_length),
        ]

    def _add_picked(self, entry: Entry, cells: tuple[tuple[int, ...], memoryview]) -> None:
        ends, plain = cells
        assert self.rows is not None
        chosen = [plain[ends[row] : ends[row + 1]] for row in self.rows]
        present = presence(self.batch.frame, entry, len(self.batch))
        digits = "".join([present[row] for row in self.rows]) if present else ""
        self.nodes.append((self.length, digits.count("0")))
        self.buffers += [
            self._put(bitmap(digits)) if "0" in digits else (0, 0),
            self._put(_offsets(map(len, chosen))),
            self._put(b"".join(chosen)),
        ]

    def _add_headers(self) -> None:
        cells = self.batch.headers or [{}] * len(self.batch)
        chosen = cells if self.rows is None else [cells[row] for row in self.rows]
        digits = "".join("1" if fields else "0" for fields in chosen)
        self.nodes.append((self.length, digits.count("0")))
        self.buffers += [
            self._put(bitmap(digits)) if "0" in digits else (0, 0),
            self._put(_offsets(map(len, chosen))),
        ]
        names = [name.encode() for fields in chosen for name in fields]
        values = [value for fields in chosen for value in fields.values()]
        self.nodes += [(len(names), 0)] * 3  # the pairs, and each half of them
        self.buffers.append((0, 0))
        for half in (names, values):
            self.buffers += [(0, 0), self._put(_offsets(map(len, half))), self._put(b"".join(half))]


def _offsets(lengths: Iterable[int]) -> bytes:
    ends = list(accumulate(lengths, initial=0))
    return struct.pack(f"<{len(ends)}i", *ends)
