"""Bodies of appends: from a content type to records or batches (INTERFACES.md, section 1).

Body types that are not Laminar's are values; Laminar's are envelopes. So a bare
``curl -d 'hi'`` appends one record of two bytes, whatever type curl says it has.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from laminar.arrow_read import read_stream
from laminar.batch import BatchError, Buffer, check_directory, split, verify
from laminar.http.errors import Problem
from laminar.http.head import decode_percent
from laminar.http.messages import Request
from laminar.http.records import Limits, Records
from laminar.http.times import LATEST_MS, parse_time

BATCH_TYPE: Final = "application/vnd.laminar.batch"
ARROW_TYPE: Final = "application/vnd.apache.arrow.stream"
JSON_TYPE: Final = "application/json"
NDJSON_TYPE: Final = "application/x-ndjson"
ENVELOPES_TYPE: Final = "application/vnd.laminar.records+json"
ENVELOPE_LINES_TYPE: Final = "application/vnd.laminar.records+ndjson"

# A batch of another size than records on their own: unfolded it may be this many times the body's limit.
_UNFOLDS: Final = 16


class Append:
    """What an append carries: records to be joined at the door, or whole batches."""

    __slots__ = ("frames", "records")

    def __init__(self, records: Records | None, frames: list[memoryview]) -> None:
        self.records = records
        self.frames = frames


def parse_append(request: Request, *, limits: Limits) -> Append:
    """Read a body by its content type. Raises 400, 413 or 422 naming the field, the value and the limit."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    parser = _PARSERS.get(kind)
    if parser is None:
        records = _value(request)
    elif kind == BATCH_TYPE:
        return Append(None, _batches(request.body, limits))
    else:
        records = parser(request)
    records.check(limits)
    return Append(records, [])


def _batches(body: Buffer, limits: Limits) -> list[memoryview]:
    if memoryview(body).readonly:
        body = bytearray(body)  # a leader stamps batches in place
    try:
        frames = split(body)
        for frame in frames:
            verify(frame)
            header = check_directory(
                frame,
                max_records=limits.max_records,
                max_record_bytes=limits.max_record_bytes,
                max_plain_bytes=limits.max_body_bytes * _UNFOLDS,
            )
            if header.kind != 0:
                raise Problem(
                    "invalid", "only batches of records are appended", field="kind", value=header.kind
                )
    except BatchError as error:
        raise _batch_problem(error) from error
    if not frames:
        raise Problem("invalid", "an append has at least one batch", field="body", value=0, limit=1)
    return frames


def _batch_problem(error: BatchError) -> Problem:
    code = {"bad_checksum": "bad_checksum", "too_large": "too_large"}.get(error.code, "malformed")
    return Problem(code, str(error), field=error.field, value=error.value, limit=error.limit)


def _value(request: Request, value: Buffer | None = None) -> Records:
    """One record: the body as it is; key, tag and headers from the query and the head."""
    headers = request.headers
    fields: dict[str, bytes] = {}
    tag: str | None = None
    if "laminar-tag" in headers:
        tag = decode_percent(headers["laminar-tag"], field="laminar-tag")
    for name, text in headers.items():
        if name.startswith("laminar-header-"):
            fields[name[15:]] = text.encode("latin-1")
    tag = request.query.get("tag", tag)
    key = request.query.get("key")
    timestamp = request.query.get("timestamp")
    return Records(
        [request.body if value is None else value],
        keys=[key.encode()] if key is not None else None,
        tags=[tag] if tag is not None else None,
        headers=[fields] if fields else None,
        timestamps=[parse_time(timestamp, field="timestamp")] if timestamp is not None else None,
    )


def _json(request: Request) -> Records:
    """One record: the JSON text as sent, once it is known to be JSON."""
    try:
        msgspec.json.decode(request.body, type=msgspec.Raw)
        msgspec.json.decode(request.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem("malformed", f"the body is not JSON: {error}", field="body") from error
    return _value(request)


def _ndjson(request: Request) -> Records:
    """A record a line; empty lines are none. JSON pointers may pick key and tag."""
    key_from = request.query.get("key_from")
    tag_from = request.query.get("tag_from")
    values: list[Buffer] = []
    keys: list[bytes | None] = []
    tags: list[str | None] = []
    for number, line in enumerate(bytes(request.body).split(b"\n"), start=1):
        text = line.rstrip(b"\r")
        if not text.strip():
            continue
        try:
            document = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Problem(
                "malformed", f"line {number} is not JSON: {error}", field=f"line {number}", value=text
            ) from error
        values.append(text)
        if key_from is not None:
            key = _pick(document, key_from, "key_from")
            keys.append(None if key is None else _text_of(key).encode())
        if tag_from is not None:
            tag = _pick(document, tag_from, "tag_from")
            tags.append(None if tag is None else _text_of(tag))
    return Records(
        values, keys=keys if key_from is not None else None, tags=tags if tag_from is not None else None
    )


def _pick(document: Any, pointer: str, field: str) -> Any:
    """What a JSON pointer (RFC 6901) names; None when there is no such thing."""
    if pointer and not pointer.startswith("/"):
        raise Problem("invalid", "a JSON pointer begins with /", field=field, value=pointer)
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(document, dict):
            document = document.get(name)
        elif isinstance(document, list) and name.isdigit() and int(name) < len(document):
            document = document[int(name)]
        else:
            return None
    return document


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    value: str | None = None
    value_json: msgspec.Raw | None = None
    value_base64: str | None = None
    key: str | None = None
    key_base64: str | None = None
    tag: str | None = None
    headers: dict[str, str] | None = None
    timestamp: int | str | None = None


_envelope_decoder = msgspec.json.Decoder(_Envelope)
_envelopes_decoder = msgspec.json.Decoder(list[_Envelope])


def _envelopes(request: Request) -> Records:
    body = bytes(request.body)
    try:
        if body.lstrip()[:1] == b"{":
            envelopes = [_envelope_decoder.decode(body)]
        else:
            envelopes = _envelopes_decoder.decode(body)
    except msgspec.ValidationError as error:
        raise Problem("invalid", str(error), field="body") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem("malformed", f"the body is not JSON: {error}", field="body") from error
    return _opened(envelopes, "records[{}]", 0)


def _envelope_lines(request: Request) -> Records:
    envelopes = []
    for number, line in enumerate(bytes(request.body).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            envelopes.append(_envelope_decoder.decode(line))
        except msgspec.ValidationError as error:
            raise Problem("invalid", f"line {number}: {error}", field=f"line {number}", value=line) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Problem(
                "malformed", f"line {number} is not JSON: {error}", field=f"line {number}", value=line
            ) from error
    return _opened(envelopes, "line {}", 1)


def _opened(envelopes: list[_Envelope], place: str, first: int) -> Records:
    values: list[Buffer] = []
    keys: list[bytes | None] = []
    tags: list[str | None] = []
    headers: list[Mapping[str, bytes] | None] = []
    timestamps: list[int | None] = []
    for number, envelope in enumerate(envelopes, start=first):
        where = place.format(number)
        values.append(_value_of(envelope, where))
        keys.append(_key_of(envelope, where))
        tags.append(envelope.tag)
        fields = envelope.headers
        headers.append({name: text.encode() for name, text in fields.items()} if fields else None)
        timestamps.append(_timestamp_of(envelope.timestamp, where))
    return Records(
        values,
        keys=keys if any(key is not None for key in keys) else None,
        tags=tags if any(tag is not None for tag in tags) else None,
        headers=headers if any(headers) else None,
        timestamps=timestamps if any(stamp is not None for stamp in timestamps) else None,
    )


def _value_of(envelope: _Envelope, where: str) -> bytes:
    given = [name for name in ("value", "value_json", "value_base64") if getattr(envelope, name) is not None]
    if len(given) != 1:
        raise Problem(
            "invalid",
            "a record has one of value, value_json and value_base64",
            field=where,
            value=", ".join(given) or "none of them",
        )
    if envelope.value is not None:
        return envelope.value.encode()
    if envelope.value_json is not None:
        return bytes(envelope.value_json)
    assert envelope.value_base64 is not None
    return _from_base64(envelope.value_base64, f"{where}.value_base64")


def _key_of(envelope: _Envelope, where: str) -> bytes | None:
    if envelope.key is not None and envelope.key_base64 is not None:
        raise Problem("invalid", "a record has one key", field=f"{where}.key")
    if envelope.key_base64 is not None:
        return _from_base64(envelope.key_base64, f"{where}.key_base64")
    return envelope.key.encode() if envelope.key is not None else None


def _timestamp_of(given: int | str | None, where: str) -> int | None:
    if given is None:
        return None
    if isinstance(given, str):
        return parse_time(given, field=f"{where}.timestamp")
    if not 0 <= given <= LATEST_MS:
        raise Problem("invalid", "a time lies between 1970 and 9999", field=f"{where}.timestamp", value=given)
    return given


def _from_base64(text: str, field: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Problem("invalid", f"not base64: {error}", field=field, value=text) from error


def _arrow(request: Request) -> Records:
    """Columns `value` and, if there, `key`, `tag`, `timestamp`, `headers`."""
    try:
        parts = [
            Records(
                list(rows.values),
                keys=rows.keys,
                tags=rows.tags,
                headers=list(rows.headers) if rows.headers is not None else None,
                timestamps=rows.timestamps,
            )
            for rows in read_stream(request.body)
        ]
    except BatchError as error:
        raise _batch_problem(error) from error
    parts = [part for part in parts if len(part)]
    if not parts:
        raise Problem("invalid", "an append has at least one record", field="records", value=0, limit=1)
    return Records.concat(parts)


_PARSERS: Final[Mapping[str, Callable[[Request], Records]]] = {
    BATCH_TYPE: _value,
    JSON_TYPE: _json,
    NDJSON_TYPE: _ndjson,
    ENVELOPES_TYPE: _envelopes,
    ENVELOPE_LINES_TYPE: _envelope_lines,
    ARROW_TYPE: _arrow,
}
