"""JSON and newline-delimited JSON (NDJSON) as values of records: the text is stored as it was sent.

A line is checked, never rewritten. Keys and tags may be taken from the lines by JSON pointers (RFC 6901);
only then are the lines decoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from laminar.batch import Buffer
from laminar.http.api.problems import Problem
from laminar.http.api.records import Records, too_many_records

# Walks over a value without building it. It checks everything but UTF-8.
_walker: Final = msgspec.json.Decoder(msgspec.Raw)
_decoder: Final = msgspec.json.Decoder()
_INDEX: Final = re.compile(r"(?:0|[1-9][0-9]{0,9})\Z", re.ASCII)


def check_json(text: Buffer, *, field: str) -> None:
    """Raise 400 `malformed` if `text` is not one JSON value in UTF-8; `field` is the error's field."""
    try:
        str(text, "utf-8")
        _walker.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(text, error, field=field) from error


def not_json(text: Buffer, error: Exception, *, field: str) -> Problem:
    """Return the problem (400 `malformed`) for text that is not JSON, with the reason."""
    return Problem("malformed", f"{field} is not JSON: {error}", field=field, value=text)


def each_line(body: Buffer, *, max_records: int) -> Iterator[tuple[str, bytes]]:
    """Yield (name, bytes without line end) of each non-empty line; the name is ``line N``, from 1.

    Raises 413 for more than `max_records` non-empty lines. A body with more than twice this number of lines,
    empty ones included, is refused before a line is read: empty lines cost time too.
    """
    text = bytes(body)
    ends = text.count(b"\n")
    if ends > 2 * max_records:
        raise Problem(
            "too_large", "the body has too many lines", field="lines", value=ends, limit=2 * max_records
        )
    count = 0
    for number, line in enumerate(text.split(b"\n"), start=1):
        line = line.strip(b" \t\r")
        if line:
            count += 1
            if count > max_records:
                raise too_many_records(count, max_records)
            yield f"line {number}", line


def parse_lines(body: Buffer, *, key_from: str | None, tag_from: str | None, max_records: int) -> Records:
    """Return the records in an NDJSON body: each line is the value of one record.

    `key_from` and `tag_from` are JSON pointers to the key and the tag in each line. A text that they find is
    used as it is, and anything else as its JSON; if they find nothing, or null, the record has no key or tag.
    Raises 400 `malformed`, naming the first line that is not JSON, and 413 for too many lines.
    """
    key_of = _picker(key_from, "key_from")
    tag_of = _picker(tag_from, "tag_from")
    values: list[Buffer] = []
    keys: list[bytes | None] | None = None if key_of is None else []
    tags: list[str | None] | None = None if tag_of is None else []
    for name, text in each_line(body, max_records=max_records):
        values.append(text)
        if key_of is None and tag_of is None:
            check_json(text, field=name)
            continue
        try:
            document = _decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise not_json(text, error, field=name) from error
        if key_of is not None and keys is not None:
            key = key_of(document)
            keys.append(None if key is None else key.encode())
        if tag_of is not None and tags is not None:
            tags.append(tag_of(document))
    return Records(values, keys=keys, tags=tags)


def _picker(pointer: str | None, field: str) -> Callable[[Any], str | None] | None:
    """Return a function that returns, as text, what `pointer` names in a document; None without a pointer.

    Raises 422 `invalid` if `pointer` is not a JSON pointer.
    """
    if pointer is None:
        return None
    if (pointer and not pointer.startswith("/")) or re.search(r"~(?![01])", pointer):
        raise Problem(
            "invalid",
            "a JSON pointer begins with / and has ~ only as ~0 and ~1",
            field=field,
            value=pointer,
            hint="For example /origin, or /tags/0.",
        )
    parts = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]

    def pick(document: Any) -> str | None:
        for part in parts:
            if isinstance(document, dict):
                document = document.get(part)
            elif isinstance(document, list) and _INDEX.match(part) and int(part) < len(document):
                document = document[int(part)]
            else:
                return None
        if document is None or isinstance(document, str):
            return document
        return msgspec.json.encode(document).decode()

    return pick
