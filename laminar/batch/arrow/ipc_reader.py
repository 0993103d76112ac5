"""A reader of Arrow streams that clients send: it returns the columns from which batches are built.

It accepts the few types in which a value, a key, a tag, a time and headers may come. Other types and columns
are refused, with an error that names them and what is accepted; no column is dropped silently. No length in
the stream is trusted. The counterpart is ``ipc_writer``, which also exports `read_stream`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from laminar.batch.arrow.flatbuffers import Reader
from laminar.batch.header import BatchError, Buffer

CONTINUATION = 0xFFFFFFFF
METADATA_V4, METADATA_V5 = 3, 4
SCHEMA, RECORD_BATCH = 1, 3
PREFIX = struct.Struct("<II")
# The number of headers that a record may have, on average over the records that may come.
HEADERS_A_ROW = 16
INT, BINARY, UTF8, TIMESTAMP, LIST, STRUCT, MAP = 2, 4, 5, 10, 12, 13, 17

_TYPE_NAMES = [
    "none",
    "null",
    "int",
    "floating_point",
    "binary",
    "utf8",
    "bool",
    "decimal",
    "date",
    "time",
    "timestamp",
    "interval",
    "list",
    "struct",
    "union",
    "fixed_size_binary",
    "fixed_size_list",
    "map",
    "duration",
    "large_binary",
    "large_utf8",
    "large_list",
    "run_end_encoded",
    "binary_view",
    "utf8_view",
    "list_view",
    "large_list_view",
]
_MESSAGE_NAMES = {2: "a dictionary batch", 4: "a tensor", 5: "a sparse tensor"}
# By unit (s, ms, µs, ns): the factor and the divisor that turn a number of it into ms.
_MILLISECONDS = ((1000, 1), (1, 1), (1, 1000), (1, 1_000_000))


@dataclass(slots=True)
class Rows:
    """The records of one record batch, by column, as `laminar.batch.build` takes them. Times are ms."""

    values: list[bytes]
    keys: list[bytes | None] | None = None
    timestamps: list[int | None] | None = None
    tags: list[str | None] | None = None
    headers: list[dict[str, bytes] | None] | None = None

    def __len__(self) -> int:
        return len(self.values)


class _Cursor:
    """A cursor over the nodes and buffers of one record batch, which are in the order of the schema's fields.

    Each method reads the next ones, and raises `BatchError` if they are missing or wrong. `max_rows` is how
    many records may still come; None means any number.
    """

    def __init__(self, batch: Reader, body: memoryview, max_rows: int | None) -> None:
        self.body = body
        self.max_rows = max_rows
        self.nodes = list(batch.structs(1, "<qq"))
        self.places = list(batch.structs(2, "<qq"))
        self.nodes.reverse()
        self.places.reverse()

    def node(self, most: int = 1) -> tuple[int, int]:
        """Return (length, null count) of the next field; refuse more than `most` cells for each row."""
        if not self.nodes:
            raise _malformed("nodes", "fewer than the schema's fields")
        length, null_count = self.nodes.pop()
        if length < 0:
            raise _malformed("length", length)
        if self.max_rows is not None and length > most * self.max_rows:
            raise _too_many(length, most * self.max_rows)
        return length, null_count

    def buffer(self) -> memoryview:
        if not self.places:
            raise _malformed("buffers", "fewer than the schema's fields have")
        position, size = self.places.pop()
        if position < 0 or size < 0 or position + size > len(self.body):
            raise _malformed("buffer", f"{size} bytes at {position} of a body of {len(self.body)}")
        return self.body[position : position + size]

    def presence(self, length: int, null_count: int) -> str | None:
        """Return a text with one character for each cell, "0" for null, else "1"; None if no cell is null."""
        bitmap = self.buffer()
        if null_count == 0:
            return None
        size = (length + 7) // 8
        if len(bitmap) < size:
            raise _malformed("validity", f"{len(bitmap)} bytes for {length} cells")
        return f"{int.from_bytes(bitmap[:size], 'little'):0{length}b}"[::-1][:length]

    def ends(self, length: int) -> tuple[int, ...]:
        """Return `length` + 1 offsets that never fall; the first may be above 0, as of a sliced array."""
        buffer = self.buffer()
        if length == 0:
            return (0,)
        if len(buffer) < 4 * (length + 1):
            raise _malformed("offsets", f"{len(buffer)} bytes for {length} cells")
        ends = struct.unpack_from(f"<{length + 1}i", buffer)
        if ends[0] < 0 or sorted(ends) != list(ends):
            raise _malformed("offsets", f"{ends[0]} to {ends[-1]}, not in order")
        return ends

    def cells(self, most: int = 1) -> list[bytes | None]:
        """Return the cells of a column of binary or utf8, None for null; `most` as for `node`."""
        length, null_count = self.node(most)
        present = self.presence(length, null_count)
        ends = self.ends(length)
        data = bytes(self.buffer())
        if ends[-1] > len(data):
            raise _malformed("offsets", f"to {ends[-1]} in {len(data)} bytes")
        cells = [data[start:end] for start, end in pairwise(ends)]
        if present is None:
            return list(cells)
        return [cell if bit == "1" else None for cell, bit in zip(cells, present, strict=True)]

    def numbers(self) -> list[int | None]:
        """Return the numbers of a column of 64-bit integers, None for null."""
        length, null_count = self.node()
        present = self.presence(length, null_count)
        buffer = self.buffer()
        if len(buffer) < 8 * length:
            raise _malformed("data", f"{len(buffer)} bytes for {length} numbers")
        numbers = struct.unpack_from(f"<{length}q", buffer)
        if present is None:
            return list(numbers)
        return [number if bit == "1" else None for number, bit in zip(numbers, present, strict=True)]

    def headers(self) -> list[dict[str, bytes] | None]:
        """Return the cells of a column of maps, or lists of pairs, of text to bytes; None for null.

        If a cell has two pairs of one name, the last one is used.
        """
        length, null_count = self.node()
        present = self.presence(length, null_count)
        ends = self.ends(length)
        entries, struct_nulls = self.node(HEADERS_A_ROW)
        self.presence(entries, struct_nulls)
        names, values = self.cells(HEADERS_A_ROW), self.cells(HEADERS_A_ROW)
        if not len(names) == len(values) == entries or ends[-1] > entries:
            raise _malformed("headers", f"{len(names)} names, {len(values)} values, offsets to {ends[-1]}")
        found: list[dict[str, bytes] | None] = []
        for row, (start, end) in enumerate(pairwise(ends)):
            if present is not None and present[row] == "0":
                found.append(None)
                continue
            fields: dict[str, bytes] = {}
            for name, value in zip(names[start:end], values[start:end], strict=True):
                if name is None or value is None:
                    raise _malformed("headers", f"null in record {row}")
                fields[_text(name, "headers")] = value
            found.append(fields)
        return found


class _Plan(NamedTuple):
    """How one field of the schema is read: its `name`, its Arrow `type`, and the `unit` of a timestamp."""

    name: str
    type: int
    unit: int


def read_stream(buffer: Buffer, *, max_rows: int | None = None) -> Iterator[Rows]:
    """Yield the records of each record batch of a whole stream; batches without records are left out.

    Columns: ``value`` (binary or utf8, never null) and, optionally, ``key`` (the same), ``tag`` (utf8),
    ``timestamp`` (any unit; int64 is ms; without a zone it is UTC) and ``headers`` (map of utf8 to binary or
    utf8).

    Raises:
        BatchError: ``unsupported`` for other columns, types, dictionaries and compression; ``malformed`` for
            bytes that are not such a stream, or that continue after its end; ``too_large`` for more than
            `max_rows` rows, or more record batches than a tenth of that and one, before the rest is read.
    """
    plans: list[_Plan] | None = None
    left = max_rows
    for number, (message, body) in enumerate(_messages(memoryview(buffer))):
        if max_rows is not None and number > 1 + max_rows // 10:
            raise _too_many(number, 1 + max_rows // 10, field="record_batches")
        kind = message.scalar(1, "B")
        header = message.table(2)
        if header is None:
            raise _malformed("header", "missing")
        if kind == SCHEMA:
            if plans is not None:
                raise _malformed("message", "a second schema")
            plans = _plans(header)
        elif kind != RECORD_BATCH:
            raise _unsupported("message", _MESSAGE_NAMES.get(kind, f"kind {kind}"), "record batches")
        elif plans is None:
            raise _malformed("message", "a record batch before the schema")
        else:
            rows = _rows(plans, header, body, left)
            if left is not None:
                left -= len(rows)
            if rows.values:
                yield rows
    if plans is None:
        raise _malformed("message", "no schema")


def _messages(view: memoryview) -> Iterator[tuple[Reader, memoryview]]:
    position = 0
    while position < len(view):
        if len(view) - position < PREFIX.size:
            raise _malformed("length", f"{len(view) - position} bytes left over")
        mark, metadata_length = PREFIX.unpack_from(view, position)
        if mark != CONTINUATION:
            raise _malformed("continuation", f"{mark:#010x} at byte {position}")
        position += PREFIX.size
        if metadata_length == 0:
            if position != len(view):
                raise _malformed("length", f"{len(view) - position} bytes after the end of the stream")
            return
        metadata = view[position : position + metadata_length]
        message = Reader.root(metadata)
        version = message.scalar(0, "h")
        if version not in (METADATA_V4, METADATA_V5):
            raise _unsupported("version", version, "V4 or V5")
        body_length = message.scalar(3, "q")
        position += metadata_length
        if body_length < 0 or body_length > len(view) - position:
            raise _malformed("body_length", f"{body_length} of {len(view) - position} bytes left")
        yield message, view[position : position + body_length]
        position += body_length


def _plans(schema: Reader) -> list[_Plan]:
    if schema.scalar(0, "h"):
        raise _unsupported("endianness", "big", "little")
    plans = [_plan(field) for field in schema.tables(1)]
    names = [plan.name for plan in plans]
    if len(set(names)) < len(names):
        raise _malformed("column", f"a name occurs twice: {', '.join(names)}")
    if "value" not in names:
        raise _malformed("column", f"{', '.join(names) or 'nothing'}: the column value is missing")
    return plans


_ACCEPTED = {
    "value": ((BINARY, UTF8), "binary or utf8"),
    "key": ((BINARY, UTF8), "binary or utf8"),
    "tag": ((UTF8,), "utf8"),
    "timestamp": ((TIMESTAMP, INT), "timestamp or int64"),
    "headers": ((MAP, LIST), "map of utf8 to binary"),
}


def _plan(field: Reader) -> _Plan:
    name = field.string(0) or ""
    if name not in _ACCEPTED:
        raise _unsupported("column", repr(name), ", ".join(_ACCEPTED))
    numbers, words = _ACCEPTED[name]
    unit = 1
    number = field.scalar(2, "B")
    if field.table(4) is not None:
        raise _unsupported(name, "dictionary", words)
    parameters = field.table(3)
    if number not in numbers or parameters is None:
        raise _unsupported(name, _type_name(number), words)
    if number == TIMESTAMP:
        unit = parameters.scalar(0, "h")
        if not 0 <= unit < len(_MILLISECONDS):
            raise _malformed("unit", unit)
    elif number == INT:
        if (parameters.scalar(0, "i"), parameters.scalar(1, "?", False)) != (64, True):
            raise _unsupported(name, "another int", words)
    elif number in (MAP, LIST):
        _check_headers(field, words)
    return _Plan(name, number, unit)


def _check_headers(field: Reader, words: str) -> None:
    entries = field.tables(5)
    if len(entries) != 1 or entries[0].scalar(2, "B") != STRUCT:
        raise _unsupported("headers", "a list of something else", words)
    pair = entries[0].tables(5)
    types = [child.scalar(2, "B") for child in pair]
    if len(types) != 2 or types[0] != UTF8 or types[1] not in (BINARY, UTF8):
        raise _unsupported("headers", f"a map of {', '.join(map(_type_name, types))}", words)
    if any(child.table(4) is not None for child in pair):
        raise _unsupported("headers", "dictionary", words)


def _rows(plans: Sequence[_Plan], batch: Reader, body: memoryview, max_rows: int | None) -> Rows:
    if batch.table(3) is not None:
        raise _unsupported("compression", "compressed buffers", "buffers without")
    length = batch.scalar(0, "q")
    cursor = _Cursor(batch, body, max_rows)
    rows = Rows([])
    for name, kind, unit in plans:
        if name == "value":
            values = cursor.cells()
            rows.values = [value for value in values if value is not None]
            if len(rows.values) < len(values):
                raise _malformed("value", f"null in record {values.index(None)}")
            found = len(values)
        elif name == "key":
            rows.keys = cursor.cells()
            found = len(rows.keys)
        elif name == "tag":
            rows.tags = [None if tag is None else _text(tag, "tag") for tag in cursor.cells()]
            found = len(rows.tags)
        elif name == "timestamp":
            times, per = _MILLISECONDS[unit] if kind == TIMESTAMP else (1, 1)
            rows.timestamps = [
                None if number is None else number * times // per for number in cursor.numbers()
            ]
            found = len(rows.timestamps)
        else:
            rows.headers = cursor.headers()
            found = len(rows.headers)
        if found != length:
            raise _malformed(name, f"{found} cells in a batch of {length}")
    if cursor.nodes or cursor.places:
        raise _malformed("buffers", "more than the schema's fields have")
    return rows


def _text(raw: bytes, field: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise _malformed(field, str(error)) from None


def _type_name(number: int) -> str:
    return _TYPE_NAMES[number] if number < len(_TYPE_NAMES) else f"type {number}"


def _too_many(value: int, limit: int, *, field: str = "records") -> BatchError:
    return BatchError(
        "too_large",
        f"Arrow stream: {field} is {value}, at most {limit}",
        field=field,
        value=value,
        limit=limit,
    )


def _malformed(field: str, value: object) -> BatchError:
    return BatchError("malformed", f"Arrow stream: {field} is wrong: {value}", field=field, value=value)


def _unsupported(field: str, value: object, accepted: str) -> BatchError:
    message = f"Arrow stream: {field} is {value}; accepted: {accepted}"
    return BatchError("unsupported", message, field=field, value=value, limit=accepted)
