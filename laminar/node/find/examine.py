"""Examine batches that a search has read: find the matching records, and tell how far it came.

All work of a search for each record is done here. It runs in a reader thread.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from laminar.batch import Batch, BatchError, Buffer, Column, Record
from laminar.batch.large_record import size_of
from laminar.http.api.fetch_body import record_document
from laminar.node.find.where import Where, judge, let_others_run

MOST_SKIPPED: Final = 64
"""The most ranges of offsets that one call reports as not searched; it ends there."""
_BATCHES: Final = 32
"""After this number of batches it lets another thread run."""
_BEFORE: Final = ("offset", "timestamp", "key", "tag", "headers", "deliver_at", "trace_id")


class Found(msgspec.Struct, frozen=True, array_like=True):
    """A matching record: its offset, the time (ms) of its append, and its JSON document."""

    offset: int
    time_ms: int
    document: bytes


class Skipped(msgspec.Struct, frozen=True, array_like=True):
    """Offsets from `start` to before `end` that were not searched, and why."""

    start: int
    end: int
    why: str


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """The parameters of a search: conditions, order, the most records, and the most bytes of each value."""

    where: Where
    newest: bool
    limit: int
    value_bytes: int
    most_bytes: int
    """The approximate limit of bytes of documents; at least one record is returned."""


class Examined(msgspec.Struct):
    """The result for records from `low` to before `high`; `is_full` says that it ended early, at a limit."""

    low: int
    high: int
    found: list[Found] = []
    skipped: list[Skipped] = []
    is_full: bool = False


def examine(partition: int, frames: Sequence[Buffer], low: int, high: int, wanted: Wanted) -> Examined:
    """Return the matching records of these batches, from offset `low` to before `high`.

    The found and the skipped are in the order of the search.
    """
    result = Examined(low, low) if not wanted.newest else Examined(high, high)
    size = 0
    for start, end, judged in _judged(frames, low, high, wanted):
        if isinstance(judged, Skipped):
            result.skipped.append(judged)
        elif judged is not None:
            batch, row = judged
            document = encode(partition, batch, row, value_bytes=wanted.value_bytes)
            if result.found and size + len(document) > wanted.most_bytes:
                result.is_full = True
                return result
            size += len(document)
            result.found.append(Found(start, batch.header.append_time_ms, document))
        if wanted.newest:
            result.low = start
        else:
            result.high = end
        if len(result.found) >= wanted.limit or len(result.skipped) >= MOST_SKIPPED:
            result.is_full = (result.low, result.high) != (low, high)
            return result
    result.low, result.high = low, high
    return result


def _judged(
    frames: Sequence[Buffer], low: int, high: int, wanted: Wanted
) -> Iterator[tuple[int, int, tuple[Batch, int] | Skipped | None]]:
    """Yield ranges of offsets (first, end) in the order of the search, each with its result.

    The result is a matching record (batch and row), or a skipped range, or None for records that do not
    match.
    """
    for place, frame in enumerate(reversed(frames) if wanted.newest else frames):
        if place % _BATCHES == _BATCHES - 1:
            let_others_run()
        batch = Batch(frame, verified=True)
        base = batch.base_offset
        rows = range(max(0, low - base), min(len(batch), high - base))
        if not rows:
            continue
        try:
            judged = judge(batch, wanted.where, rows)
            if judged.wanted:
                _read_all(batch)
            unreadable = set(judged.unreadable)
            for row in sorted([*judged.wanted, *unreadable], reverse=wanted.newest):
                at = base + row
                if row in unreadable:
                    yield at, at + 1, Skipped(at, at + 1, "unreadable")
                else:
                    yield at, at + 1, (batch, row)
        except BatchError:
            yield base + rows.start, base + rows.stop, Skipped(base + rows.start, base + rows.stop, "damaged")
            continue
        yield base + rows.start, base + rows.stop, None


def _read_all(batch: Batch) -> None:
    """Raise `BatchError` if a column of the answer cannot be read."""
    _ = batch.keys, batch.tags, batch.headers, batch.timestamps, batch.delivery_times, batch.trace_ids
    if not batch.is_large:
        batch.cells(Column.VALUE)


def encode(partition: int, batch: Batch, row: int, *, value_bytes: int) -> bytes:
    """Return the JSON document of a record: as in fetches, with at most `value_bytes` of its value."""
    record = Record(batch, row, batch.base_offset + row, b"")
    document: dict[str, Any] = {"partition": partition, **record_document(record, batch, _BEFORE)}
    if batch.is_large:
        # The value of a large record is not in its batch: it is asked for by the record's offset.
        document |= {"size": size_of(batch), "truncated": True}
        return msgspec.json.encode(document)
    value = batch.value(row)
    shown = bytes(value[:value_bytes])
    cut = len(shown) < len(value)
    document["size"] = len(value)
    try:
        document["value"] = shown.decode()
    except UnicodeDecodeError as error:
        # A character may lie across the cut.
        if cut and error.reason == "unexpected end of data":
            document["value"] = shown[: error.start].decode()
        else:
            document["value_base64"] = base64.b64encode(shown).decode()
    document["truncated"] = cut
    return msgspec.json.encode(document)
