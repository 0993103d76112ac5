"""Heads of responses, as a pure function from bytes.

A regular expression parses them: httptools' parser with the missing checks is no faster and accepts more
(docs/decisions/0017-own-http.md). It is strict, because a client that guesses may take one answer's body for
the next answer. Reference: RFC 9112, sections 4 to 6; tests compare it with h11.
"""

from __future__ import annotations

import re
from typing import Final

# The whole head in one pass: a check of each line would cost more than taking it apart.
_HEAD: Final = re.compile(
    rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [\t -~\x80-\xff]*)?\r\n"
    rb"(?:[A-Za-z0-9!#$%&'*+.^_`|~-]+:[\t -~\x80-\xff]*\r\n)*\r\n\Z"
)
# Given twice, these would be read differently by two readers.
_SINGLE: Final = frozenset({"content-length", "content-type", "transfer-encoding"})


class ResponseHead:
    """A status line and its headers (lower-case names, repeated ones joined by ``", "``).

    `content_length` is None if the body is chunked or ends with the connection.
    """

    __slots__ = ("chunked", "close", "content_length", "headers", "status")

    def __init__(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.headers = headers
        self.content_length: int | None = None
        self.chunked = False
        self.close = False


class BadResponseHead(ValueError):
    """The bytes that a server sent are not the head of an HTTP/1.x response."""


def parse_response_head(data: bytes) -> ResponseHead:
    """Return the response head in `data`, one whole head with its empty line.

    Raises `BadResponseHead` if `data` is not a valid head.
    """
    match = _HEAD.match(data)
    if match is None:
        raise BadResponseHead(f"no head of a response: {data[:80]!r}")
    lines = data.decode("latin-1").split("\r\n")[1:-2]
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip(" \t")
    if len(headers) < len(lines):
        headers = _join_repeated(lines)
    head = ResponseHead(int(match[2]), headers)
    if "connection" in headers or match[1] == b"0":
        options = {option.strip(" \t") for option in headers.get("connection", "").lower().split(",")}
        head.close = "close" in options or (match[1] == b"0" and "keep-alive" not in options)
    coding = headers.get("transfer-encoding")
    length = headers.get("content-length")
    if coding is not None:
        # Chunked in HTTP/1.0 is faulty framing (RFC 9112, 6.1).
        if coding.lower() != "chunked" or length is not None or match[1] == b"0":
            raise BadResponseHead(f"body framed as {coding[:40]!r} with length {length}")
        head.chunked = True
    elif length is not None:
        if not (length.isascii() and length.isdigit()) or len(length) > 18:
            raise BadResponseHead(f"Content-Length {length[:40]!r}")
        head.content_length = int(length)
    return head


def _join_repeated(lines: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        name, value = name.lower(), value.strip(" \t")
        if name in headers:
            if name in _SINGLE:
                raise BadResponseHead(f"the header {name} occurs twice")
            value = f"{headers[name]}, {value}"
        headers[name] = value
    return headers
