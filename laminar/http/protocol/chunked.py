"""The chunked transfer coding, as a pure decoder (RFC 9112, section 7.1).

`feed` takes bytes, appends the data to the body, and returns the position where it stopped: the bytes after
the last chunk belong to the next request. httptools cannot do that: it reads on into the next pipelined
request. The decoder is strict: a length has one to eight hexadecimal digits, every line ends with CR LF, and
extensions and trailers are limited. For if two readers disagree about the end of a body, a request can be
smuggled past one of them.
"""

from __future__ import annotations

import re
from typing import Final

# A line of the coding itself: a length with its extensions, or a trailer field.
LONGEST_LINE_BYTES: Final = 4096
# All trailer fields together.
LONGEST_TRAILER_BYTES: Final = 16384
# The coding may take this many bytes, plus the size of the data: lengths, line ends, extensions, trailers.
# A chunk of one byte costs its reader as much as one of a thousand.
MOST_OVERHEAD_BYTES: Final = 65536
# A trailer field: a name, a colon, a value without control bytes.
_FIELD: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*\Z")
_HEX: Final = frozenset(b"0123456789abcdefABCDEF")


class ChunkedError(ValueError):
    """The body does not follow the chunked coding, so the bytes after it cannot be read as a request."""


class TooLargeError(ChunkedError):
    """The body exceeds `limit_bytes`; `received_bytes` is the sum of the chunk lengths announced so far."""

    def __init__(self, received_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"chunked body of at least {received_bytes} bytes; the limit is {limit_bytes}")
        self.received_bytes = received_bytes
        self.limit_bytes = limit_bytes


class ChunkedDecoder:
    """A decoder of one chunked body.

    `body` has the data decoded so far. `done` is true when the final chunk and its trailer were read.
    """

    __slots__ = (
        "_line",
        "_overhead_bytes",
        "_remaining",
        "_state",
        "_trailer_bytes",
        "body",
        "done",
        "limit_bytes",
    )

    _LENGTH, _DATA, _END_OF_DATA, _TRAILER = range(4)

    def __init__(self, *, limit_bytes: int) -> None:
        self.body = bytearray()
        self.done = False
        self.limit_bytes = limit_bytes
        self._state = self._LENGTH
        self._remaining = 0
        self._line = b""  # the part of a line that has come so far
        self._trailer_bytes = 0
        self._overhead_bytes = 0

    def feed(self, data: bytes, position: int = 0) -> int:
        """Decode the bytes of `data` from `position` on; return the position after the last byte used.

        All of `data` is used unless the body ends within it.

        Raises:
            TooLargeError: with the next chunk the body would exceed the limit; raised before its data come.
            ChunkedError: the coding is malformed, or needs many more bytes than the data itself.
        """
        assert not self.done, "fed after its end"
        end = len(data)
        while position < end:
            if self._state == self._DATA:
                taken = min(self._remaining, end - position)
                self.body += data[position : position + taken]
                self._remaining -= taken
                position += taken
                if self._remaining == 0:
                    self._state = self._END_OF_DATA
                continue
            begun = position
            line, position = self._take_line(data, position)
            self._overhead_bytes += position - begun
            if self._overhead_bytes > MOST_OVERHEAD_BYTES + len(self.body):
                raise ChunkedError(
                    f"{self._overhead_bytes} bytes of coding for {len(self.body)} bytes of data"
                )
            if line is None:
                break
            if self._state == self._LENGTH:
                self._begin_chunk(line)
            elif self._state == self._END_OF_DATA:
                if line:
                    raise ChunkedError("a chunk is longer than its length said")
                self._state = self._LENGTH
            elif not line:
                self.done = True
                break
            else:
                if not _FIELD.match(line):
                    raise ChunkedError(f"{line[:20]!r} is no trailer field")
                self._trailer_bytes += len(line) + 2
                if self._trailer_bytes > LONGEST_TRAILER_BYTES:
                    raise ChunkedError(f"trailer longer than {LONGEST_TRAILER_BYTES} bytes")
        return position

    def _take_line(self, data: bytes, position: int) -> tuple[bytes | None, int]:
        """Return the next line without its CR LF, or None if it hasn't ended yet (its part is kept)."""
        most = position + LONGEST_LINE_BYTES + 2
        at = data.find(b"\n", position, most)
        part = data[position : at + 1] if at >= 0 else data[position:most]
        line = self._line + part
        if len(line) > LONGEST_LINE_BYTES:
            raise ChunkedError(f"line longer than {LONGEST_LINE_BYTES} bytes")
        if self._state == self._END_OF_DATA and not b"\r\n".startswith(line):
            raise ChunkedError("a chunk is longer than its length said")
        position += len(part)
        if at < 0:
            self._line = line
            return None, position
        self._line = b""
        if not line.endswith(b"\r\n") or b"\r" in line[:-2]:
            raise ChunkedError("a line does not end with CR LF")
        return line[:-2], position

    def _begin_chunk(self, line: bytes) -> None:
        digits, _, extension = line.partition(b";")
        digits = digits.rstrip(b" \t") if extension else digits
        if not 1 <= len(digits) <= 8 or not _HEX.issuperset(digits):
            raise ChunkedError(f"chunk length {digits[:20]!r} is not one to eight hexadecimal digits")
        length = int(digits, 16)
        promised = len(self.body) + length
        if promised > self.limit_bytes:
            raise TooLargeError(promised, self.limit_bytes)
        self._remaining = length
        self._state = self._DATA if length else self._TRAILER


def encode_chunk(data: bytes | bytearray | memoryview) -> list[bytes | bytearray | memoryview]:
    """Return the buffers of one chunk with `data`; an empty list for empty data, which would end the body."""
    return [b"%x\r\n" % len(data), data, b"\r\n"] if len(data) else []


LAST_CHUNK: Final = b"0\r\n\r\n"
