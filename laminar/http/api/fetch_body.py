"""Encode the answers of fetches: committed batches as JSON, NDJSON, an Arrow stream, or unchanged."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, Final

import msgspec

from laminar.batch import (
    BATCH_TYPE,
    Batch,
    Buffer,
    Column,
    Record,
    SplitFrame,
    header_of,
    tag_bit,
    whole,
)
from laminar.batch.arrow.ipc_writer import END, FIELDS, batch_parts, fields, schema_message
from laminar.batch.header import fields as header_fields
from laminar.batch.large_record import size_of
from laminar.batch.projection import project
from laminar.batch.validation import takes_long
from laminar.http.api.append_body import ARROW_TYPE, JSON_TYPE, NDJSON_TYPE
from laminar.http.api.problems import Problem
from laminar.http.api.timestamps import format_time
from laminar.http.protocol.messages import Request

_COLUMNS: Final = ("offset", "timestamp", "key", "value", "tag", "headers", "deliver_at", "trace_id")
# By the name in `fields`, the columns of a batch. An offset needs no column: the header has it.
_OF_BATCH: Final = {
    "offset": (),
    "timestamp": (Column.TIMESTAMP,),
    "key": (Column.KEY,),
    "value": (Column.VALUE,),
    "tag": (Column.TAG_HASH, Column.TAG),
    "headers": (Column.HEADERS,),
    "deliver_at": (Column.DELIVERY_TIME,),
    "trace_id": (Column.TRACE_ID,),
}

_RECORDS: Final = header_fields("base_offset", "count", "tag_mask")

# Default limit, in bytes, of the text or columns of an answer that is not made of whole batches.
MOST_SHOWN_BYTES: Final = 32 << 20
# If the batches have more bytes or records than this, the answer is made in another thread.
_SHOWN_HERE_BYTES: Final = 64 * 1024
_SHOWN_HERE_RECORDS: Final = 500


class FetchFormat(Enum):
    """The formats of the answer to a fetch; the value of each is its media type."""

    BATCH = BATCH_TYPE
    ARROW = ARROW_TYPE
    NDJSON = NDJSON_TYPE
    JSON = JSON_TYPE


_QUALITY: Final = re.compile(r"[01](?:\.[0-9]{0,3})?\Z", re.ASCII)
_BY_TYPE: Final = {format_.value: format_ for format_ in FetchFormat} | {
    "*/*": FetchFormat.JSON,
    "application/*": FetchFormat.JSON,
}


class Fetched(msgspec.Struct, frozen=True):
    """The encoded answer to a fetch: its content type and body, and the offset from which to fetch next."""

    content_type: str
    body: Sequence[Buffer]
    next_offset: int


def fetch_format(request: Request) -> FetchFormat:
    """Return the format that the request's `Accept` header prefers among those that Laminar produces.

    Without that header it is JSON. Raises 406 if the header allows none of them.
    """
    accepted = request.headers.get("accept")
    if accepted is None:
        return FetchFormat.JSON
    found = _BY_TYPE.get(accepted)
    if found is not None:
        return found
    best: tuple[float, FetchFormat] | None = None
    for offer in accepted.split(","):
        kind, *parameters = [part.strip().lower() for part in offer.split(";")]
        found = _BY_TYPE.get(kind)
        weight = _weight(parameters)
        if found is not None and weight > 0 and (best is None or weight > best[0]):
            best = weight, found
    if best is not None:
        return best[1]
    raise Problem(
        "not_acceptable",
        "Accept lists no supported media type",
        field="accept",
        value=accepted,
        limit=", ".join(format_.value for format_ in FetchFormat),
    )


def _weight(parameters: Sequence[str]) -> float:
    """Return the weight ``q`` of a type in `Accept` (RFC 9110, 12.4.2): 1 if missing, 0 if not a number."""
    for parameter in parameters:
        if parameter.startswith("q="):
            return float(parameter[2:]) if _QUALITY.match(parameter[2:]) else 0.0
    return 1.0


def encode_fetch(
    format_: FetchFormat,
    frames: Sequence[Buffer | SplitFrame],
    *,
    offset: int,
    to: int,
    limit: int,
    tag: str | None,
    wanted: str | None,
    examined_to: int = 0,
    most_bytes: int = MOST_SHOWN_BYTES,
) -> Fetched:
    """Encode the records of `frames` with offsets from `offset` to below `to`, `limit` of them at most.

    With `tag`, only records with this tag are encoded. `wanted` names columns, separated by commas; batches
    are then sent without the other columns. In the batch format, batches are sent whole: they may begin
    before `offset`, and with a tag all batches are sent that may contain it, so their reader filters again.

    `next_offset` of the result is the offset after all records that were examined, even if none matched, so
    that a reader with a tag makes progress. If the caller has already left out batches without the tag,
    `examined_to` is the offset up to which it has examined them.

    In the other formats the answer ends after `most_bytes` of text, or before the batch with which the
    decompressed batches would exceed `most_bytes`. The first batch, or record, is always included.

    Raises:
        BatchError: a batch cannot be decoded although its checksums are right: its producer wrote it so.
    """
    columns = _columns(wanted, format_)
    if format_ is FetchFormat.BATCH:
        picked, next_offset = _whole_batches(
            frames, offset=offset, to=to, limit=limit, tag=tag, examined_to=examined_to
        )
        body = _as_they_are(picked) if columns is None else _narrowed(picked, columns)
        return Fetched(BATCH_TYPE, body, next_offset)
    batches = [Batch(whole(frame), verified=True) for frame in frames]
    rows, next_offset = _pick(
        batches, offset=offset, to=to, limit=limit, tag=tag, examined_to=examined_to, most_bytes=most_bytes
    )
    if format_ is FetchFormat.ARROW:
        return Fetched(format_.value, _as_arrow(rows, columns), next_offset)
    lines, next_offset = _lines(rows, columns, next_offset, most_bytes)
    if format_ is FetchFormat.NDJSON:
        return Fetched(format_.value, [b"\n".join([*lines, b""])], next_offset)
    text = b'{"records":[%b],"next_offset":%d}\n' % (b",".join(lines), next_offset)
    return Fetched(format_.value, [text], next_offset)


def shows_long(format_: FetchFormat, frames: Sequence[Buffer | SplitFrame], wanted: str | None) -> bool:
    """Return whether `encode_fetch` may take longer than about 2 ms, so that it should run in a thread."""
    if format_ is FetchFormat.BATCH:
        return wanted is not None
    return (
        sum(map(len, frames)) > _SHOWN_HERE_BYTES
        or sum(_RECORDS.unpack_from(header_of(frame))[1] for frame in frames) > _SHOWN_HERE_RECORDS
        or takes_long((whole(frame), None) for frame in frames)
    )


def _lines(
    picked: _Picked, columns: list[str] | None, next_offset: int, most_bytes: int
) -> tuple[list[bytes], int]:
    """Return records as JSON texts, and the offset from which to fetch next.

    That is `next_offset`, or the offset of the first record that was left out because of `most_bytes`.
    """
    lines: list[bytes] = []
    size = 0
    for batch, rows in picked:
        for record in _records(batch, rows):
            if size >= most_bytes:
                return lines, record.offset
            lines.append(msgspec.json.encode(record_document(record, batch, columns)))
            size += len(lines[-1])
    return lines, next_offset


def check_fields(wanted: str | None, format_: FetchFormat) -> None:
    """Raise 422 if `wanted`, the parameter `fields`, has a name that is not a column in this format.

    Call it before the request waits for records, so that a wrong request is refused at once.
    """
    _columns(wanted, format_)


def _columns(wanted: str | None, format_: FetchFormat) -> list[str] | None:
    if wanted is None:
        return None
    known: Iterable[str] = _OF_BATCH if format_ is FetchFormat.BATCH else _COLUMNS
    if format_ is FetchFormat.ARROW:
        known = FIELDS
    names = [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in known:
            raise Problem("invalid", "no such field", field="fields", value=name, limit=", ".join(known))
    return names


def _as_they_are(frames: Sequence[Buffer | SplitFrame]) -> list[Buffer]:
    """Return the buffers of frames; no bytes are copied."""
    body: list[Buffer] = []
    for frame in frames:
        if isinstance(frame, SplitFrame):
            body += frame.head, frame.body
        else:
            body.append(frame)
    return body


def _narrowed(frames: Sequence[Buffer | SplitFrame], columns: Sequence[str]) -> list[Buffer]:
    keep = {column for name in columns for column in _OF_BATCH[name]}
    return [project(whole(frame), keep) for frame in frames]


def _whole_batches(
    frames: Sequence[Buffer | SplitFrame],
    *,
    offset: int,
    to: int,
    limit: int,
    tag: str | None,
    examined_to: int,
) -> tuple[list[Buffer | SplitFrame], int]:
    """Return the batches to be sent, and the offset after all records that were examined."""
    bit = tag_bit(tag) if tag is not None else 0
    picked: list[Buffer | SplitFrame] = []
    next_offset = offset
    for frame in frames:
        base_offset, count, tag_mask = _RECORDS.unpack_from(header_of(frame))
        if base_offset >= to or limit <= 0:
            break
        next_offset = base_offset + count
        if tag is None or tag_mask & bit:
            picked.append(frame)
            limit -= count
    else:
        next_offset = max(next_offset, min(examined_to, to))
    return picked, max(offset, next_offset)


_Picked = list[tuple[Batch, Sequence[int]]]


def _pick(
    batches: Sequence[Batch],
    *,
    offset: int,
    to: int,
    limit: int,
    tag: str | None,
    examined_to: int,
    most_bytes: int,
) -> tuple[_Picked, int]:
    """Return the rows to be sent of each batch, and the offset after all records that were examined.

    Batches are examined until their decompressed bytes together would exceed `most_bytes`, but at least one.
    """
    picked: _Picked = []
    next_offset = offset
    unfolded = 0
    for batch in batches:
        base = batch.base_offset
        first, last = max(0, offset - base), min(len(batch), to - base)
        if last <= first:
            continue
        size = sum(entry.plain_length for entry in batch.directory().values())
        if unfolded and unfolded + size > most_bytes:
            break
        unfolded += size
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
    else:
        next_offset = max(next_offset, min(examined_to, to))
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
    base = batch.base_offset
    if isinstance(rows, range):
        return batch.records(base + rows.start, base + rows.stop)
    records = list(batch.records(base + rows[0], base + rows[-1] + 1))
    return (records[row - rows[0]] for row in rows)


def record_document(record: Record, batch: Batch, columns: Sequence[str] | None = None) -> dict[str, Any]:
    """Return a record of a batch as a JSON object, as answers have it, with `columns` (None: all)."""
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
            for field, value in record.headers.items():
                _put(document, "headers", value, field)
        elif name == "deliver_at":
            if record.delivery_time is not None:
                document["deliver_at"] = format_time(record.delivery_time)
        elif name == "trace_id":
            if record.trace_id is not None:
                document["trace_id"] = record.trace_id.hex()
        elif name == "value" and batch.is_large:
            # The value of a large record is not in its batch: it is requested by the record's offset.
            document["value_bytes"] = size_of(batch)
        else:
            cell = record.key if name == "key" else record.value
            if cell is not None:
                _put(document, name, bytes(cell))
    return document


def _put(document: dict[str, Any], name: str, cell: bytes, field: str | None = None) -> None:
    """Add bytes to a JSON object: under `name` if they are text, else in base64 under ``name_base64``.

    With `field`, they are added under that name to the object at `name` or ``name_base64``.
    """
    try:
        shown = cell.decode()
    except UnicodeDecodeError:
        name += "_base64"
        shown = base64.b64encode(cell).decode()
    if field is None:
        document[name] = shown
    else:
        document.setdefault(name, {})[field] = shown
