"""One HTTP/1.1 connection of the client, with requests pipelined.

It exists beside `laminar.http.client` for what a log's client needs and a general one
should not do: several appends of a partition on their way on one connection, answered in
order, by callback, without a task each; and answers of known length received straight into
their own buffer. It decides nothing about retries: a request ends in an `Answer` or in a
`ConnectionFailed`, which says whether any of it may have reached the server.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import msgspec

Buffer = bytes | bytearray | memoryview

_HEAD_BUFFER_BYTES = 64 << 10
# Below this, head and body are joined into one write: a system call costs more than the copy.
_JOIN_BYTES = 32 << 10
MAX_ANSWER_BYTES = 256 << 20


class ConnectionFailed(Exception):
    """No answer. ``sent``: some of the request may have been acted on."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


@dataclass(slots=True)
class Answer:
    """A response: header names in lower case, the body whole."""

    status: int
    headers: dict[str, str]
    body: Buffer

    def json(self) -> Any:
        """The body as JSON; {} when there is none or it is none."""
        try:
            return msgspec.json.decode(self.body) if self.body else {}
        except msgspec.DecodeError:
            return {}


OnAnswer = Callable[[Answer | None, ConnectionFailed | None], None]


@dataclass(slots=True)
class _Waiting:
    on_answer: OnAnswer
    bodyless: bool
    deadline: float


@dataclass(frozen=True, slots=True)
class Target:
    """Where a URL leads. ``path`` is set for Unix sockets (abstract names begin with NUL)."""

    host: str
    port: int
    path: str | None
    tls: bool

    @classmethod
    def of(cls, url: str) -> Target:
        """Read ``http://host:port``, ``https://…``, ``unix:@name``, ``unix:/path``, ``http+unix://…``.

        ValueError for anything else.
        """
        if url.startswith("unix:"):
            return cls("localhost", 0, _unix_path(url[5:]), False)
        parts = urlsplit(url)
        if parts.scheme == "http+unix":
            return cls("localhost", 0, _unix_path(unquote(parts.netloc + parts.path)), False)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not a URL of a node: {url!r}")
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), None, tls)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.path is not None else f"{host}:{self.port}"


def _unix_path(name: str) -> str:
    name = name.removeprefix("//")
    return "\0" + name[1:] if name.startswith("@") else name


class Connection(asyncio.BufferedProtocol):
    """An open connection. `request` may be called again before the answers came."""

    def __init__(self, url: str, loop: asyncio.AbstractEventLoop) -> None:
        self.url = url
        self.closed = False
        self.idle_since = 0.0
        self.lost: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[_Waiting] = deque()
        self._head = bytearray(_HEAD_BUFFER_BYTES)
        self._head_view = memoryview(self._head)
        self._held = 0  # bytes of `_head` that are filled
        self._body: memoryview | None = None
        self._body_filled = 0
        self._answer: Answer | None = None
        self._chunks: list[bytes] | None = None  # a body of unknown length, in pieces
        self._chunked = False
        self._to_close = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def outstanding(self) -> int:
        return len(self._waiting)

    def request(
        self,
        head: bytes,
        body: Sequence[Buffer],
        on_answer: OnAnswer,
        *,
        timeout_s: float,
        bodyless: bool = False,
    ) -> None:
        """Send a request; `on_answer` is called once, after the answers of all before it.

        `head` is the request line and all headers with the empty line. After `timeout_s` without
        its answer the connection is given up, with everything on it.
        """
        transport = self._transport
        assert transport is not None and not self.closed, f"request on a closed connection to {self.url}"
        self._waiting.append(_Waiting(on_answer, bodyless, self._loop.time() + timeout_s))
        if self._timer is None:
            self._timer = self._loop.call_later(timeout_s, self._check_deadline)
        if sum(map(len, body)) <= _JOIN_BYTES:
            transport.write(b"".join((head, *body)))
        else:
            transport.write(head)
            for part in body:
                transport.write(part)

    def abort(self, reason: str = "closed") -> None:
        """Drop the connection; what was outstanding fails with `reason`."""
        if self._transport is not None:
            self._transport.abort()
        self._end(reason)

    # -- asyncio's side ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: uvloop's transports are not of this class.
        self._transport = cast(asyncio.Transport, transport)
        # In-flight bytes are bounded by the windows above us, so nothing waits for the
        # transport's water marks.
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: BaseException | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
        if self._answer is not None and self._chunks is not None and not self._chunked and exc is None:
            self._finish(b"".join(self._chunks))  # a body that ends with the connection
        self._end(str(exc) if exc is not None else "the server closed the connection")

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._body is not None:
            return self._body[self._body_filled :]
        if self._held == len(self._head):
            self._grow()
        return self._head_view[self._held :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._body is not None:
            self._body_filled += nbytes
            if self._body_filled == len(self._body):
                self._finish(self._body)
            return
        self._held += nbytes
        try:
            self._parse()
        except ValueError as fault:
            self.abort(f"not an HTTP answer: {fault}")

    def _grow(self) -> None:
        # Only a head or a chunked body without its end fills the buffer.
        if len(self._head) >= MAX_ANSWER_BYTES:
            raise BufferError(f"an answer of {self.url} is over {MAX_ANSWER_BYTES} bytes")
        grown = bytearray(len(self._head) * 2)
        grown[: self._held] = self._head_view[: self._held]
        self._head = grown
        self._head_view = memoryview(grown)

    # -- answers -------------------------------------------------------------------------------

    def _parse(self) -> None:
        """Take every answer that is whole; leave the rest at the buffer's begin."""
        position = 0
        while position < self._held and not self.closed:
            if self._answer is not None:
                taken = self._parse_open_body(position)
                if taken == 0:
                    break
                position += taken
                continue
            end = self._head.find(b"\r\n\r\n", position, self._held)
            if end < 0:
                break
            position = self._parse_head(position, end)
        if position:
            rest = self._held - position
            if rest:
                self._head[:rest] = self._head[position : self._held]
            self._held = rest

    def _parse_head(self, position: int, end: int) -> int:
        """Read one head; returns the position behind what was taken of the body as well."""
        lines = self._head[position:end].decode("latin-1").split("\r\n")
        version, _, rest = lines[0].partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(f"status line {lines[0]!r}")
        status = int(rest[:3])
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        position = end + 4
        if status < 200:
            return position
        if not self._waiting:
            raise ValueError("an answer that nobody asked for")
        self._to_close = headers.get("connection", "").lower() == "close" or version == "HTTP/1.0"
        self._answer = Answer(status, headers, b"")
        if self._waiting[0].bodyless or status in (204, 304):
            self._finish(b"")
        elif "chunked" in headers.get("transfer-encoding", "").lower():
            self._chunks, self._chunked = [], True
        elif "content-length" in headers:
            return self._begin_body(position, int(headers["content-length"]))
        else:
            self._chunks, self._chunked = [], False
        return position

    def _begin_body(self, position: int, length: int) -> int:
        if not 0 <= length <= MAX_ANSWER_BYTES:
            raise ValueError(f"Content-Length {length}")
        held = self._held - position
        if held >= length:
            self._finish(bytes(self._head_view[position : position + length]))
            return position + length
        # What is still to come is received into the body's own buffer, without a copy.
        body = memoryview(bytearray(length))
        body[:held] = self._head_view[position : self._held]
        self._body = body
        self._body_filled = held
        return self._held

    def _parse_open_body(self, position: int) -> int:
        """Take a chunk (or whatever came, where the connection's end is the body's)."""
        assert self._chunks is not None
        if not self._chunked:
            self._chunks.append(bytes(self._head_view[position : self._held]))
            return self._held - position
        line_end = self._head.find(b"\r\n", position, self._held)
        if line_end < 0:
            return 0
        size = int(bytes(self._head_view[position:line_end]).split(b";")[0], 16)
        if size == 0:
            # Trailers are not used by our server; they would end with an empty line as well.
            end = self._head.find(b"\r\n\r\n", line_end, self._held)
            if end < 0:
                return 0
            self._finish(b"".join(self._chunks))
            return end + 4 - position
        begin, end = line_end + 2, line_end + 2 + size
        if self._held < end + 2:
            return 0
        self._chunks.append(bytes(self._head_view[begin:end]))
        return end + 2 - position

    def _finish(self, body: Buffer) -> None:
        answer, self._answer = self._answer, None
        assert answer is not None
        self._body = None
        self._chunks = None
        answer.body = body
        waiting = self._waiting.popleft()
        if not self._waiting:
            self.idle_since = self._loop.time()
        if self._to_close:
            self.closed = True
        waiting.on_answer(answer, None)
        if self._to_close:
            self.abort("the server closed the connection after an earlier answer")

    def _check_deadline(self) -> None:
        self._timer = None
        if not self._waiting or self.closed:
            return
        left_s = self._waiting[0].deadline - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check_deadline)
            return
        self.abort(f"{self.url} did not answer in time")

    def _end(self, reason: str) -> None:
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._answer = None
        self._body = None
        waiting, self._waiting = self._waiting, deque()
        for each in waiting:
            each.on_answer(None, ConnectionFailed(reason, sent=True))


def head_bytes(method: str, target: str, authority: str, headers: Mapping[str, str]) -> bytes:
    """A request's head up to the empty line. `headers` must hold Content-Length for a body."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {authority}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    text = "\r\n".join(lines) + "\r\n\r\n"
    assert text.count("\r\n\r\n") == 1 and "\n" not in text.replace("\r\n", ""), "a header holds a line break"
    return text.encode("latin-1")
