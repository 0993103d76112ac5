"""Records as text and text as records, for produce and consume. Pure functions.

A format is compiled once into a function from record to bytes, because it is used for millions of lines.
"""

from __future__ import annotations

import base64
import datetime
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from laminar.cli.errors import Failed, UsageError

DEFAULT_FORMAT = r"%v\n"
PLACES = (
    "%t topic, %p partition, %o offset, %k key, %v value, %T time, %g tag, %h headers, %i trace id, "
    "%% percent"
)
_ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}


class Record(Protocol):
    """The parts of a record that can be shown."""

    @property
    def topic(self) -> str:
        """The record's topic."""

    @property
    def partition(self) -> int:
        """Number of its partition."""

    @property
    def offset(self) -> int:
        """Its offset."""

    @property
    def key(self) -> bytes | None:
        """Its key; None if it has none."""

    @property
    def raw(self) -> bytes:
        """The bytes of its value, as stored."""

    @property
    def large_bytes(self) -> int | None:
        """Size of its value if it is larger than a batch, else None."""

    @property
    def tag(self) -> str | None:
        """Its tag; None if it has none."""

    @property
    def trace_id(self) -> str | None:
        """Its trace id in hexadecimal digits; None if it has none."""

    @property
    def timestamp(self) -> int:
        """Its time in ms since the epoch."""

    @property
    def headers(self) -> Mapping[str, bytes]:
        """Its headers; empty if it has none."""


Show = Callable[[Record], bytes]


def rfc3339(time_ms: int) -> str:
    """Return epoch milliseconds as an RFC 3339 time in UTC."""
    moment = datetime.datetime.fromtimestamp(time_ms / 1000, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _headers(record: Record) -> bytes:
    return b",".join(name.encode() + b"=" + value for name, value in record.headers.items())


_SHOWN: Mapping[str, Show] = {
    "t": lambda record: record.topic.encode(),
    "p": lambda record: b"%d" % record.partition,
    "o": lambda record: b"%d" % record.offset,
    "k": lambda record: record.key or b"",
    "v": lambda record: record.raw,
    "T": lambda record: rfc3339(record.timestamp).encode(),
    "g": lambda record: (record.tag or "").encode(),
    "h": _headers,
    "i": lambda record: (record.trace_id or "").encode(),
}


def compile_format(text: str) -> Show:
    r"""Return a function from record to bytes, for text like ``%p %o %k %v\n``.

    Raises:
        UsageError: for an unknown placeholder.
    """
    parts: list[bytes | Show] = []
    characters = iter(text)
    for character in characters:
        if character == "%":
            place = next(characters, "")
            if place != "%" and place not in _SHOWN:
                raise UsageError(f"--format: %{place} is unknown; known are {PLACES}")
            parts.append(b"%" if place == "%" else _SHOWN[place])
        elif character == "\\":
            escape = next(characters, "\\")
            parts.append(_ESCAPES.get(escape, b"\\" + escape.encode()))
        else:
            parts.append(character.encode())
    return lambda record: b"".join([part if isinstance(part, bytes) else part(record) for part in parts])


def as_json(record: Record) -> bytes:
    """Return a record as one line of JSON; bytes that are not UTF-8 are ``..._base64``, as over HTTP."""
    shown: dict[str, Any] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": rfc3339(record.timestamp),
    }
    if record.key is not None:
        shown |= _text_or_base64("key", record.key)
    if record.tag is not None:
        shown["tag"] = record.tag
    if record.trace_id is not None:
        shown["trace_id"] = record.trace_id
    if record.headers:
        shown["headers"] = {name: value.decode("utf-8", "replace") for name, value in record.headers.items()}
    large_bytes = record.large_bytes
    value = _text_or_base64("value", record.raw) if large_bytes is None else {"value_bytes": large_bytes}
    return msgspec.json.encode(shown | value) + b"\n"


def _text_or_base64(name: str, raw: bytes) -> dict[str, str]:
    try:
        return {name: raw.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(raw).decode()}


class Pointer:
    """A JSON pointer (RFC 6901) that picks a key, a tag or a trace id out of a line."""

    def __init__(self, text: str, *, flag: str) -> None:
        if text and not text.startswith("/"):
            raise UsageError(f"{flag}: a JSON pointer begins with /, not {text!r}")
        self._names = [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]
        self._text = text
        self._flag = flag

    def pick(self, line: bytes, *, number: int) -> str | None:
        """Return the value that the pointer names in a line, as text; None if it is null or missing.

        `number` is the number of the line, for error messages.
        """
        try:
            found: Any = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise Failed(
                f"line {number} is not JSON, so {self._flag} {self._text} finds nothing: {error}"
            ) from None
        for name in self._names:
            if isinstance(found, dict):
                found = found.get(name)
            elif isinstance(found, list) and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            else:
                return None
        if found is None or isinstance(found, str):
            return found
        return msgspec.json.encode(found).decode()
