"""Bodies of fetches: committed batches as JSON, NDJSON, an Arrow stream, or as they are."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, Final

import msgspec

from laminar.arrow_ipc import END, FIELDS, batch_parts, fields, schema_message
from laminar.batch import Batch, Buffer, Record, tag_bit
from laminar.http.errors import Problem
from laminar.http.messages import Request
from laminar.http.payload import ARROW_TYPE, BATCH_TYPE, JSON_TYPE, NDJSON_TYPE
from laminar.http.times import format_time

_COLUMNS: Final = ("offset", "timestamp", "key", "value", "tag", "headers")


class FetchFormat(Enum):
    """What a fetch may be answered as; the value is its media type."""

    BATCH = BATCH_TYPE
    ARROW = ARROW_TYPE
    NDJSON = NDJSON_TYPE
    JSON = JSON_TYPE


_BY_TYPE: Final = {format_.value: format_ for format_ in FetchFormat} | {
    "*/*": FetchFormat.JSON,
    "application/*": FetchFormat.JSON,
}


class Fetched(msgspec.Struct, frozen=True):
    """A body, and where to go on."""

    content_type: str
    body: Sequence[Buffer]
    next_offset: int


def fetch_format(request: Request) -> FetchFormat:
    """The first of the accepted types that can be produced; JSON if nothing was said. Raises 406."""
    accepted = request.headers.get("accept", "*/*")
    for offer in accepted.split(","):
        format_ = _BY_TYPE.get(offer.partition(";")[0].strip().lower())
        if format_ is not None:
            return format_
    known = ", ".join(format_.value for format_ in FetchFormat)
    raise Problem("not_acceptable", "records cannot be had so", field="accept", value=accepted, limit=known)


def encode_fetch(
    format_: FetchFormat,
    frames: Sequence[Buffer],
    *,
    offset: int,
    to: int,
    limit: int,
    tag: str | None,
    wanted: str | None,
) -> Fetched:
    """Records of `frames` from `offset` on, below `to`, at most `limit`, all or those with `tag`.

    `wanted` names columns, separated by commas. Whole batches may begin before `offset`, and with a
    tag only those that may hold it are sent: their reader looks again. `next_offset` is behind all
    that was looked at, also where nothing matched, so that a filtered reader gets on.
    """
    columns = _columns(wanted)
    if format_ is FetchFormat.BATCH:
        return _as_batches(frames, offset=offset, to=to, tag=tag)
    batches = [Batch(frame, verified=True) for frame in frames]
    picked, next_offset = _pick(batches, offset=offset, to=to, limit=limit, tag=tag)
    if format_ is FetchFormat.ARROW:
        return Fetched(format_.value, _as_arrow(picked, columns), next_offset)
    rows = (_document(record, columns) for batch, rows in picked for record in _records(batch, rows))
    if format_ is FetchFormat.NDJSON:
        lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
        return Fetched(format_.value, [lines], next_offset)
    document = {"records": list(rows), "next_offset": next_offset}
    return Fetched(format_.value, [msgspec.json.encode(document)], next_offset)


def _columns(wanted: str | None) -> list[str] | None:
    if wanted is None:
        return None
    names = [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in _COLUMNS:
            raise Problem("invalid", "no such field", field="fields", value=name, limit=", ".join(_COLUMNS))
    return names


def _as_batches(frames: Sequence[Buffer], *, offset: int, to: int, tag: str | None) -> Fetched:
    bit = tag_bit(tag) if tag is not None else 0
    body: list[Buffer] = []
    next_offset = offset
    for frame in frames:
        header = Batch(frame, verified=True).header
        if header.base_offset >= to:
            break
        next_offset = header.base_offset + header.count
        if tag is None or header.tag_mask & bit:
            body.append(frame)
    return Fetched(BATCH_TYPE, body, max(offset, next_offset))


_Picked = list[tuple[Batch, Sequence[int]]]


def _pick(
    batches: Sequence[Batch], *, offset: int, to: int, limit: int, tag: str | None
) -> tuple[_Picked, int]:
    """Positions to be sent of each batch, and the offset behind all that was looked at."""
    picked: _Picked = []
    next_offset = offset
    for batch in batches:
        base = batch.base_offset
        first, last = max(0, offset - base), min(len(batch), to - base)
        if last <= first:
            continue
        rows: Sequence[int] = range(first, last)
        next_offset = base + last
        if tag is not None:
            rows = [row for row in batch.tagged(tag) if first <= row < last]
        if len(rows) > limit:
            rows = rows[:limit]
            next_offset = base + rows[-1] + 1
        if rows:
            picked.append((batch, rows))
        limit -= len(rows)
        if limit == 0:
            break
    return picked, next_offset


def _as_arrow(picked: _Picked, columns: Sequence[str] | None) -> list[Buffer]:
    chosen = fields(columns if columns is not None else [name for name in FIELDS if name != "headers"])
    parts: list[Buffer] = [schema_message(chosen)]
    for batch, rows in picked:
        whole = isinstance(rows, range) and len(rows) == len(batch)
        parts += batch_parts(batch, chosen, None if whole else rows)
    parts.append(END)
    return parts


def _records(batch: Batch, rows: Sequence[int]) -> Iterator[Record]:
    records = list(batch.records())
    return (records[row] for row in rows)


def _document(record: Record, columns: Sequence[str] | None) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for name in columns if columns is not None else _COLUMNS:
        if name == "offset":
            document["offset"] = record.offset
        elif name == "timestamp":
            document["timestamp"] = format_time(record.timestamp)
        elif name == "tag":
            if record.tag is not None:
                document["tag"] = record.tag
        elif name == "headers":
            if record.headers:
                document["headers"] = {
                    field: value.decode("utf-8", "backslashreplace")
                    for field, value in record.headers.items()
                }
        else:
            cell = record.key if name == "key" else record.value
            if cell is not None:
                _put(document, name, bytes(cell))
    return document


def _put(document: dict[str, Any], name: str, cell: bytes) -> None:
    try:
        document[name] = cell.decode()
    except UnicodeDecodeError:
        document[name + "_base64"] = base64.b64encode(cell).decode()
