"""Parse records in JSON envelopes: objects with a member for each part of a record.

The members are `value` (text), `value_json` (any JSON, stored as written) or `value_base64`; `key` or
`key_base64`; `tag`; `headers` and `headers_base64`; `timestamp`; `deliver_at` or `delay_ms`; `trace_id`. A
fetch answers records with the same members, so that they can be appended unchanged.
"""

from __future__ import annotations

import base64
import binascii
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec

from laminar.batch import Buffer
from laminar.http.api.limits import Limits
from laminar.http.api.ndjson import each_line, not_json
from laminar.http.api.problems import Problem
from laminar.http.api.records import Records, too_many_records
from laminar.http.api.timestamps import delivery_time, parse_time, parse_trace_id


class _Budget(threading.local):
    """How many more envelopes the body that this thread parses may have."""

    left = 0


_budget: Final = _Budget()
_SPENT: Final = "the body has too many envelopes"
# Names to texts; read once their size is known to be one that headers may have.
_Texts = Annotated[
    msgspec.Raw,
    msgspec.Meta(extra_json_schema={"type": ["object", "null"], "additionalProperties": {"type": "string"}}),
]


class Envelope(msgspec.Struct, forbid_unknown_fields=True):
    """One record in JSON: an object with a member for each part of the record."""

    value: str | None = None
    value_json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    value_base64: str | None = None
    key: str | None = None
    key_base64: str | None = None
    tag: str | None = None
    headers: _Texts | msgspec.UnsetType = msgspec.UNSET
    headers_base64: _Texts | msgspec.UnsetType = msgspec.UNSET
    timestamp: int | str | None = None
    deliver_at: int | str | None = None
    delay_ms: int | None = None
    trace_id: str | None = None

    def __post_init__(self) -> None:
        # The decoder calls this after each envelope, so too many are refused before all of them are in
        # memory.
        _budget.left -= 1
        if _budget.left < 0:
            raise ValueError(_SPENT)


class Envelopes(msgspec.Struct, forbid_unknown_fields=True):
    """Several records in JSON, in the form in which a fetch answers them."""

    records: list[Envelope]
    next_offset: int | None = None  # a fetch's answer may be sent back as it is


_one: Final = msgspec.json.Decoder(Envelope)
_many: Final = msgspec.json.Decoder(list[Envelope])
_document: Final = msgspec.json.Decoder(Envelopes)
_text_map: Final = msgspec.json.Decoder(dict[str, str] | None)
# JSON writes a byte as up to six (\\u0000), and each header adds quotes, a colon and a comma.
_UNFOLDS: Final = 16
_PLACE: Final = re.compile(r" - at `\$(?P<path>[^`]*)`\Z")


def parse_envelopes(body: Buffer, limits: Limits, *, now_ms: int) -> Records:
    """Return the records in a body: one envelope, a list of envelopes, or ``{"records": [...]}``.

    `now_ms` is the time in ms to which a `delay_ms` is added. Raises 400 if the body is not JSON, 422 for a
    wrong value, naming its place, and 413 as soon as there are more records than `limits` allow.
    """
    _budget.left = limits.max_records
    start = bytes(body[:64]).lstrip(b" \t\r\n")
    try:
        str(body, "utf-8")
        if start.startswith(b"["):
            return _open(_many.decode(body), "[{}]", limits, now_ms)
        if re.search(rb'\A\s*\{\s*"records"', bytes(body[:256])):
            return _open(_document.decode(body).records, "records[{}]", limits, now_ms)
        return _open([_one.decode(body)], "record", limits, now_ms)
    except msgspec.ValidationError as error:
        if _budget.left < 0:
            raise too_many_records(limits.max_records + 1, limits.max_records) from error
        raise _invalid(error, "body") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(body, error, field="body") from error


def parse_envelope_lines(body: Buffer, limits: Limits, *, now_ms: int) -> Records:
    """Return the records in a body that has one envelope on each line.

    Raises as `parse_envelopes` does, naming the first line that is wrong.
    """
    envelopes: list[Envelope] = []
    names: list[str] = []
    for name, text in each_line(body, max_records=limits.max_records):
        _budget.left = 1
        try:
            str(text, "utf-8")
            envelopes.append(_one.decode(text))
        except msgspec.ValidationError as error:
            raise _invalid(error, name) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise not_json(text, error, field=name) from error
        names.append(name)
    return _open(envelopes, names, limits, now_ms)


def _invalid(error: msgspec.ValidationError, whole: str) -> Problem:
    """Return the problem for an envelope with a wrong value, which names the value's place.

    `msgspec` names the place as ``$[3].key``; in a line, the line's name replaces the ``$``.
    """
    text = str(error)
    place = _PLACE.search(text)
    path = place["path"] if place else ""
    field = path.lstrip(".") or whole if whole == "body" else whole + path
    return Problem("invalid", text[: place.start()] if place else text, field=field)


def _open(envelopes: Sequence[Envelope], names: str | Sequence[str], limits: Limits, now_ms: int) -> Records:
    values: list[Buffer] = []
    keys: list[bytes | None] = []
    tags: list[str | None] = []
    headers: list[Mapping[str, bytes] | None] = []
    timestamps: list[int | None] = []
    delivery_times: list[int | None] = []
    traces: list[bytes | None] = []
    for row, envelope in enumerate(envelopes):
        name = names.format(row) if isinstance(names, str) else names[row]
        values.append(_value(envelope, name))
        keys.append(_key(envelope, name))
        tags.append(envelope.tag)
        headers.append(_headers(envelope, name, limits))
        stamp = envelope.timestamp
        timestamps.append(None if stamp is None else parse_time(stamp, field=f"{name}.timestamp"))
        delivery_times.append(
            delivery_time(envelope.deliver_at, envelope.delay_ms, now_ms=now_ms, name=f"{name}.")
        )
        trace = envelope.trace_id
        traces.append(None if trace is None else parse_trace_id(trace, field=f"{name}.trace_id"))
    return Records(
        values,
        keys=keys if any(key is not None for key in keys) else None,
        tags=tags if any(tag is not None for tag in tags) else None,
        headers=headers if any(headers) else None,
        timestamps=timestamps if any(stamp is not None for stamp in timestamps) else None,
        delivery_times=delivery_times if any(time is not None for time in delivery_times) else None,
        trace_ids=traces if any(trace is not None for trace in traces) else None,
    )


def _value(envelope: Envelope, name: str) -> bytes:
    given = []
    if envelope.value is not None:
        given.append("value")
    if envelope.value_json is not msgspec.UNSET:
        given.append("value_json")
    if envelope.value_base64 is not None:
        given.append("value_base64")
    if len(given) != 1:
        raise Problem(
            "invalid",
            "a record must have exactly one of value, value_json and value_base64",
            field=name,
            value=", ".join(given) or "none of them",
        )
    if envelope.value is not None:
        return envelope.value.encode()
    if envelope.value_base64 is not None:
        return _from_base64(envelope.value_base64, f"{name}.value_base64")
    assert isinstance(envelope.value_json, msgspec.Raw)
    return bytes(envelope.value_json).strip(b" \t\r\n")


def _key(envelope: Envelope, name: str) -> bytes | None:
    if envelope.key_base64 is None:
        return None if envelope.key is None else envelope.key.encode()
    if envelope.key is not None:
        raise Problem("invalid", "a record may have one of key and key_base64", field=f"{name}.key")
    return _from_base64(envelope.key_base64, f"{name}.key_base64")


def _headers(envelope: Envelope, name: str, limits: Limits) -> dict[str, bytes] | None:
    plain = _texts(envelope.headers, f"{name}.headers", limits)
    coded = _texts(envelope.headers_base64, f"{name}.headers_base64", limits)
    if not plain and not coded:
        return None
    fields = {field: text.encode() for field, text in plain.items()}
    for field, text in coded.items():
        if field in fields:
            raise Problem("invalid", "a header is given twice", field=f"{name}.headers_base64.{field}")
        fields[field] = _from_base64(text, f"{name}.headers_base64.{field}")
    return fields


def _texts(raw: msgspec.Raw | msgspec.UnsetType, field: str, limits: Limits) -> dict[str, str]:
    if raw is msgspec.UNSET:
        return {}
    size, most = len(memoryview(raw)), _UNFOLDS * limits.max_headers_bytes
    if size > most:
        raise Problem("too_large", f"{field} is too large", field=field, value=size, limit=most)
    try:
        return _text_map.decode(raw) or {}
    except msgspec.ValidationError as error:
        raise _invalid(error, field) from error


def _from_base64(text: str, field: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Problem("invalid", f"not base64: {error}", field=field, value=text) from error
