"""Parse the bodies of appends into records or batches, according to their content type (docs/protocol.md).

A body whose content type is not one of Laminar's own is the value of one record. A body of one of Laminar's
types describes records or batches. So a bare ``curl -d 'hi'`` appends one record of two bytes, whatever
content type curl sends. Errors in a body are answered with what is wrong: 400 if it cannot be read, 422 if a
value is not allowed, 413 if something is too large.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from urllib.parse import unquote_to_bytes

from laminar.batch import (
    Batch,
    BatchError,
    Buffer,
    CellLimits,
    Kind,
    check_batch,
    split,
    split_headers,
    takes_long,
)
from laminar.batch.arrow.ipc_reader import read_stream
from laminar.batch.columns import says_only_values
from laminar.batch.header import (
    BATCH_TYPE,
    NO_PRODUCER,
    Flag,
    Header,
    count_of,
    has_more_frames,
    is_one_frame,
    set_producer,
    verify_body,
)
from laminar.http.api.json_envelope import parse_envelope_lines, parse_envelopes
from laminar.http.api.limits import Limits
from laminar.http.api.ndjson import check_json, parse_lines
from laminar.http.api.problem_response import problem_of
from laminar.http.api.problems import Problem
from laminar.http.api.records import Records
from laminar.http.api.timestamps import delivery_time, parse_time, parse_trace_id
from laminar.http.protocol.errors import HttpError
from laminar.http.protocol.messages import OFF_LOOP_BYTES, Request
from laminar.http.protocol.request_head import decode_percent
from laminar.wire.delayed import MAX_DELAY_MS
from laminar.wire.trace import TRACEPARENT

ARROW_TYPE: Final = "application/vnd.apache.arrow.stream"
JSON_TYPE: Final = "application/json"
NDJSON_TYPE: Final = "application/x-ndjson"
ENVELOPES_TYPE: Final = "application/vnd.laminar.records+json"
ENVELOPE_LINES_TYPE: Final = "application/vnd.laminar.records+ndjson"

_PARSED_HERE_BYTES: Final = 1 << 20
_PARSED_HERE_RECORDS: Final = 1 << 16
_PARSED_HERE_FRAMES: Final = 64
_DELAY: Final = re.compile(r"[0-9]{1,15}\Z", re.ASCII)

_CODES: Final = {"bad_checksum": "bad_checksum", "too_large": "too_large"}


class Append:
    """The content of an append: `records` for the append batcher to join into a batch, or whole `frames`.

    `headers` are the headers of the frames, if they are parsed already. `places` is for an append to a topic:
    the logical partition of each record's key (None for a record without a key).
    """

    __slots__ = ("frames", "headers", "places", "records")

    def __init__(
        self, records: Records | None, frames: list[memoryview], headers: Sequence[Header] = ()
    ) -> None:
        self.records = records
        self.frames = frames
        self.headers = headers
        self.places: list[int | None] | None = None


def parse_append(
    request: Request, *, limits: Limits, now_ms: Callable[[], int], keyed: bool = False
) -> Append:
    """Parse the body of an append according to its content type.

    Raises 400, 413 or 422, naming the field, the value and the limit. `keyed` tells that the request comes
    from another shard: then batches keep their idempotency keys; from a client's batches they are removed.
    `now_ms` returns the node's time in ms, to which the delays of records are added.
    """
    return _parse(request, media_type(request), limits, now_ms, keyed)


def parse_if_short(
    request: Request, *, limits: Limits, now_ms: Callable[[], int], keyed: bool = False
) -> Append | None:
    """Return the decoded records of an append, or None if parsing may take longer than about 2 ms."""
    kind = media_type(request)
    return None if _takes_long(request.body, kind) else _parse(request, kind, limits, now_ms, keyed)


def _parse(request: Request, kind: str, limits: Limits, now_ms: Callable[[], int], keyed: bool) -> Append:
    if kind == BATCH_TYPE:
        return Append(None, *read_batches(request.body, limits, keyed=keyed))
    records = _PARSERS.get(kind, _value)(request, limits, now_ms)
    parent = request.headers.get(TRACEPARENT)
    if parent is not None or records.headers is not None:
        records.trace(parent)
    records.check(limits)
    return Append(records, [])


def parses_long(request: Request) -> bool:
    """Return whether `parse_append` may take longer than about 2 ms, so that it should run in a thread."""
    return request.parsed is None and _takes_long(request.body, media_type(request))


def _takes_long(body: Buffer, kind: str) -> bool:
    if kind != BATCH_TYPE:
        return len(body) > OFF_LOOP_BYTES
    if len(body) > _PARSED_HERE_BYTES:
        return True
    if is_one_frame(body) and says_only_values(body):
        # As most are; if that is wrong, it is refused before anything is decoded.
        return count_of(body) > _PARSED_HERE_RECORDS
    if len(body) > OFF_LOOP_BYTES or has_more_frames(body, _PARSED_HERE_FRAMES):
        return True
    try:
        return takes_long(split_headers(body))
    except BatchError:
        return False


def media_type(request: Request) -> str:
    """Return the content type of a request's body, in lower case and without parameters; "" if missing."""
    kind = request.headers.get("content-type", "")
    if kind not in _PARSERS and kind != BATCH_TYPE:
        kind = kind.partition(";")[0].strip().lower()
    return kind


def read_batches(
    body: Buffer, limits: Limits, *, keyed: bool = False
) -> tuple[list[memoryview], list[Header]]:
    """Return the frames of a body of batches, and their headers; each is verified and within the limits.

    Decompressed, all batches together may not be larger than a body may be, because readers, followers and
    later leaders have the decompressed bytes in memory. Raises 400, 413 or 422, naming the field. `keyed` is
    explained at `parse_append`.
    """
    plain_bytes = 0
    cells = CellLimits(
        max_key_bytes=limits.max_key_bytes,
        max_tag_bytes=limits.max_tag_bytes,
        max_headers_bytes=limits.max_headers_bytes,
    )
    try:
        frames, headers = [], []
        for place, (frame, header) in enumerate(split_headers(body)):
            verify_body(frame, header)
            frames.append(frame)
            headers.append(header)
            if header.kind != Kind.DATA:
                raise Problem(
                    "invalid", "only batches of records are appended", field="kind", value=int(header.kind)
                )
            if header.flags & Flag.LARGE:
                raise Problem(
                    "invalid",
                    "this batch stands for a record whose value is elsewhere: it was fetched",
                    field="flags",
                    value=header.flags,
                    hint="GET .../records/{offset} reads the value, an upload appends it.",
                )
            plain_bytes += check_batch(
                frame,
                cells,
                max_records=limits.max_records,
                max_record_bytes=limits.max_record_bytes,
                max_plain_bytes=limits.max_body_bytes - plain_bytes,
                header=header,
            )
            if header.flags & Flag.KEYED and not keyed:
                # The batch was fetched and is appended again. Its idempotency key is that of the first
                # append, not of this request.
                frames[place] = _without_key(frame)
                headers[place] = Header.unpack(frames[place])
    except BatchError as error:
        raise batch_problem(error) from error
    if not frames:
        raise Problem("invalid", "an append has at least one batch", field="body", value=0, limit=1)
    return frames, headers


def all_marked(body: Buffer) -> bool:
    """Return whether every batch in a body has a producer id. Raises 400 if the body has no whole batches."""
    try:
        return all(Header.unpack(frame).producer_id != NO_PRODUCER for frame in split(body))
    except BatchError as error:
        raise batch_problem(error) from error


def records_of(frames: Sequence[memoryview]) -> Records:
    """Return the records in the frames from `read_batches`, to be split by key or joined into one batch.

    Raises 422 for a batch with a producer id, which must be appended to one partition unchanged.
    """
    parts = []
    for frame in frames:
        batch = Batch(frame, verified=True)
        if batch.header.producer_id != NO_PRODUCER:
            raise Problem(
                "invalid",
                "a batch with a producer id belongs to one partition: append it there",
                field="producer_id",
                value=batch.header.producer_id.hex(),
            )
        parts.append(Records.of_batch(batch))
    return Records.concat(parts)


def _without_key(frame: memoryview) -> memoryview:
    own = memoryview(bytearray(frame))
    set_producer(own, producer_id=NO_PRODUCER, epoch=0, sequence=0, keyed=False)
    return own


def batch_problem(error: BatchError) -> Problem:
    """Return the problem for a client's batch that is damaged or not allowed."""
    return Problem(
        _CODES.get(error.code, "malformed"),
        str(error),
        field=error.field,
        value=error.value,
        limit=_plain(error.limit),
    )


def _plain(limit: object) -> object:
    """Return a limit in the form of a JSON document: numbers and texts unchanged, anything else as text."""
    return limit if limit is None or isinstance(limit, (int, float, str)) else str(limit)


def _value(request: Request, limits: Limits, now_ms: Callable[[], int]) -> Records:
    """Return one record: its value is the body; its key, tag, times and headers are in query and head."""
    query = request.query
    headers = request.headers
    fields: dict[str, bytes] | None = None
    for name in headers:
        if name.startswith("laminar-header-"):
            fields = fields or {}
            fields[_percent_decoded(name[15:], field=name)] = unquote_to_bytes(
                headers[name].encode("latin-1")
            )
    tag = query.get("tag")
    if tag is None and "laminar-tag" in headers:
        tag = _percent_decoded(headers["laminar-tag"], field="laminar-tag")
    key = query.get("key")
    timestamp = query.get("timestamp")
    trace = query.get("trace_id")
    due_ms = None
    if "deliver_at" in query or "delay_ms" in query:
        delay = query.get("delay_ms")
        if delay is not None and not _DELAY.match(delay):
            raise Problem(
                "invalid",
                "a delay is a whole number of milliseconds",
                field="delay_ms",
                value=delay[:80],
                limit=MAX_DELAY_MS,
            )
        delay_ms = None if delay is None else int(delay)
        due_ms = delivery_time(query.get("deliver_at"), delay_ms, now_ms=now_ms())
    return Records(
        [request.body],
        keys=None if key is None else [key.encode()],
        tags=None if tag is None else [tag],
        headers=None if fields is None else [fields],
        timestamps=None if timestamp is None else [parse_time(timestamp, field="timestamp")],
        delivery_times=None if due_ms is None else [due_ms],
        trace_ids=None if trace is None else [parse_trace_id(trace, field="trace_id")],
    )


def _json(request: Request, limits: Limits, now_ms: Callable[[], int]) -> Records:
    """Return one record whose value is the body as it was sent, after checking that the body is JSON."""
    check_json(request.body, field="body")
    return _value(request, limits, now_ms)


def _ndjson(request: Request, limits: Limits, now_ms: Callable[[], int]) -> Records:
    return parse_lines(
        request.body,
        key_from=request.query.get("key_from"),
        tag_from=request.query.get("tag_from"),
        max_records=limits.max_records,
    )


def _arrow(request: Request, limits: Limits, now_ms: Callable[[], int]) -> Records:
    """Return the records of an Arrow stream.

    The stream must have the column `value`, and may have `key`, `tag`, `timestamp` and `headers`.
    """
    try:
        parts = [
            Records(
                list(rows.values),
                keys=rows.keys,
                tags=rows.tags,
                headers=list(rows.headers) if rows.headers is not None else None,
                timestamps=rows.timestamps,
            )
            for rows in read_stream(request.body, max_rows=limits.max_records)
            if len(rows)
        ]
    except BatchError as error:
        raise batch_problem(error) from error
    return Records.concat(parts) if parts else Records([])


_PARSERS: Final[Mapping[str, Callable[[Request, Limits, Callable[[], int]], Records]]] = {
    JSON_TYPE: _json,
    NDJSON_TYPE: _ndjson,
    ENVELOPES_TYPE: lambda request, limits, now_ms: parse_envelopes(request.body, limits, now_ms=now_ms()),
    ENVELOPE_LINES_TYPE: lambda request, limits, now_ms: parse_envelope_lines(
        request.body, limits, now_ms=now_ms()
    ),
    ARROW_TYPE: _arrow,
}


def _percent_decoded(text: str, *, field: str) -> str:
    try:
        return decode_percent(text, field=field)
    except HttpError as error:
        raise problem_of(error) from error
