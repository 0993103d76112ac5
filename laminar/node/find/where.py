"""The conditions of a search on records.

Cheap conditions are checked first; each is checked on a record's own bytes.

The input is a batch, the output are positions of records in it. A record matches, does not match, or is
unreadable: its value is needed, but it is larger than a batch, or too large to be parsed as JSON beside other
requests.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from laminar.batch import Batch, Column, tag_bit

MAX_JSON_BYTES: Final = 1 << 20
"""A larger value is not parsed as JSON: that would block the process for milliseconds."""
_PIECE_BYTES: Final = 256 * 1024
# The cost of examining a record in addition to its bytes, expressed in bytes.
_ROW_BYTES: Final = 1024
_raws = msgspec.json.Decoder(dict[str, msgspec.Raw])
_lists = msgspec.json.Decoder(list[msgspec.Raw])


class JsonEquals(msgspec.Struct, frozen=True, array_like=True):
    """A condition: the value, as JSON, has this text, number, boolean or null at `path`."""

    path: list[str]
    equals: str | int | float | bool | None


class Where(msgspec.Struct, frozen=True, array_like=True):
    """The conditions of a search: a record matches if it meets all that are given."""

    key: bytes | None = None
    trace_id: bytes | None = None
    tag: str | None = None
    headers: dict[str, bytes] = {}
    contains: bytes | None = None
    json: JsonEquals | None = None

    @property
    def reads_values(self) -> bool:
        """Whether a condition needs the value of a record."""
        return self.contains is not None or self.json is not None


class Judged(NamedTuple):
    """The positions in a batch of the records that match, and of those whose value could not be checked."""

    wanted: Sequence[int]
    unreadable: Sequence[int] = ()


def judge(batch: Batch, where: Where, rows: range) -> Judged:
    """Return which of these records (`rows`) of a batch match, in order.

    Raises:
        BatchError: a column that a condition needs cannot be read in this batch.
    """
    found: Sequence[int] = rows
    if where.tag is not None:
        tagged = batch.tagged(where.tag) if batch.header.tag_mask & tag_bit(where.tag) else []
        found = [row for row in tagged if row in rows]
    if where.key is not None and found:
        found = _with_key(batch, where.key, found)
    if where.trace_id is not None and found:
        found = _with_trace_id(batch, where.trace_id, found)
    if where.headers and found:
        found = _with_headers(batch, where.headers, found)
    if not found or not where.reads_values:
        return Judged(found)
    if batch.is_large:
        return Judged((), found)
    unreadable: Sequence[int] = ()
    if where.contains is not None:
        found = _containing(batch, where.contains, found)
    if where.json is not None:
        found, unreadable = _with_json(batch, where.json, found)
    return Judged(found, unreadable)


def _with_key(batch: Batch, key: bytes, rows: Sequence[int]) -> Sequence[int]:
    plain = batch.plain(Column.KEY)
    if plain is None or not holds(plain, key):
        return ()
    keys = batch.keys or []
    return [row for row in rows if keys[row] == key]


def _with_trace_id(batch: Batch, trace_id: bytes, rows: Sequence[int]) -> Sequence[int]:
    if batch.entry(Column.TRACE_ID) is None:
        return ()
    traces = batch.trace_ids or []
    return [row for row in rows if traces[row] == trace_id]


def _with_headers(batch: Batch, wanted: Mapping[str, bytes], rows: Sequence[int]) -> Sequence[int]:
    plain = batch.plain(Column.HEADERS)
    if plain is None or not all(holds(plain, value) for value in wanted.values()):
        return ()
    headers = batch.headers or []
    return [row for row in rows if wanted.items() <= headers[row].items()]


def _containing(batch: Batch, part: bytes, rows: Sequence[int]) -> Sequence[int]:
    plain = batch.plain(Column.VALUE)
    if plain is None or not holds(plain, part):
        return ()
    return [row for row in rows if holds(batch.value(row), part)]


def _with_json(batch: Batch, wanted: JsonEquals, rows: Sequence[int]) -> Judged:
    found: list[int] = []
    unreadable: list[int] = []
    since = 0
    for row in rows:
        value = bytes(batch.value(row))
        if len(value) > MAX_JSON_BYTES:
            unreadable.append(row)
        elif _has(value, wanted):
            found.append(row)
        since += len(value) + _ROW_BYTES
        if since > _PIECE_BYTES:
            since = 0
            let_others_run()
    return Judged(found, unreadable)


def let_others_run() -> None:
    """Let another thread of the process run now, if one waits for the interpreter.

    Otherwise the event loop would have to wait for the interpreter's switch interval, 5 ms, which is too
    long.
    """
    time.sleep(0)


def holds(data: memoryview, part: bytes) -> bool:
    """Return whether `data` contains `part`; other threads may run in between."""
    step = max(_PIECE_BYTES, 2 * len(part))
    overlap = max(len(part) - 1, 0)
    return any(part in bytes(data[at : at + step + overlap]) for at in range(0, max(len(data), 1), step))


def _has(value: bytes, wanted: JsonEquals) -> bool:
    """Return whether `value` is JSON that meets the condition. If a name occurs twice, the last counts."""
    found = value
    try:
        # Decoded from bytes, without a copy as text: invalid UTF-8 is refused only in the parts that are
        # decoded.
        for step in wanted.path:
            start = found.lstrip(b" \t\r\n")[:1]
            if start == b"{":
                inner = _raws.decode(found).get(step)
            elif start == b"[" and step.isascii() and step.isdecimal() and len(step) < 10:
                inner = next(iter(_lists.decode(found)[int(step) :][:1]), None)
            else:
                return False
            if inner is None:
                return False
            found = bytes(inner)
        return _equal(msgspec.json.decode(found), wanted.equals)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def _equal(found: Any, wanted: Any) -> bool:
    """Return whether two JSON values are equal: 7 is 7.0, and 1 is not true."""
    return isinstance(found, bool) == isinstance(wanted, bool) and bool(found == wanted)
