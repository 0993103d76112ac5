"""Requests as an application sees them and responses as it makes them.

`Response.encode` is the only place where a status line is written. A receipt is
on the hot path: an application that answers the same headers again and again
encodes them once (`encode_headers`) and passes the block, so that a response
costs one join.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, ClassVar, Final, Protocol, TypeAlias

import msgspec

from laminar.http.protocol.flows import Flow
from laminar.http.protocol.request_head import RequestHead

Buffer: TypeAlias = bytes | bytearray | memoryview
Body: TypeAlias = Buffer | Sequence[Buffer] | AsyncIterator[Buffer]

# A body above this is decompressed and parsed in another thread, while the loop serves other connections.
OFF_LOOP_BYTES: Final = 256 * 1024

USUAL_ANSWER_BYTES: Final = 64 * 1024

JSON_TYPE: Final = "application/json"

_REASONS: Final = {status.value: status.phrase for status in HTTPStatus}
STATUS_LINES: Final = {
    status: f"HTTP/1.1 {status} {reason}\r\n".encode("ascii") for status, reason in _REASONS.items()
}
_JSON_BLOCK: Final = b"Content-Type: application/json\r\n"

# In every answer. No browser shall guess another type for a record that a page can link to, tell others the
# address of a record, or lend an answer to a page of another site.
SAFE_BLOCK: Final = (
    b"X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n"
    b"Cross-Origin-Resource-Policy: same-origin\r\n"
)
# In every answer that is no `Page`: shown by a browser it runs nothing, loads nothing and has no origin.
SANDBOX_BLOCK: Final = b"Content-Security-Policy: default-src 'none'; sandbox\r\n"


def status_line(status: int) -> bytes:
    """Return the status line with its CR LF."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def encode_headers(headers: Iterable[tuple[str, str]]) -> bytes:
    """Return headers as they are sent. A line break in one would be a second header: asserted."""
    block = "".join([f"{name}: {value}\r\n" for name, value in headers]).encode("latin-1", "replace")
    assert block.count(b"\n") == block.count(b"\r\n") == block.count(b"\r"), block
    return block


class Request:
    """One request. Its headers and query must not be changed: requests with equal heads share them.

    `body` is empty in `Application.head`; in `Application.handle` it is complete and decoded from its
    ``Content-Encoding``. `connection` has `peer` and an attribute `context` for the application. `parsed` is
    the result of `Application.parse` for a large body, else None. `Application` sets `answer_bytes` if a read
    may have a large answer: then the requests pipelined after it wait until there is room for more answers.
    Without it reads by GET and HEAD count as `USUAL_ANSWER_BYTES`, and no other request is a read.
    `Application.handle` sets `ends_with_peer` if its coroutine is to be cancelled when the peer is gone, as
    that of a read by GET always is, or closes its side.
    """

    __slots__ = (
        "answer_bytes",
        "body",
        "connection",
        "ends_with_peer",
        "head",
        "headers",
        "method",
        "parsed",
        "path",
        "query",
        "segments",
        "target",
    )

    def __init__(self, head: RequestHead, body: Buffer, connection: Connection) -> None:
        self.head = head
        self.method = head.method
        self.target = head.target
        self.path = head.path
        self.segments = head.segments
        self.query = head.query
        self.headers = head.headers
        self.body = body
        self.connection = connection
        self.parsed: Any = None
        self.answer_bytes = 0
        self.ends_with_peer = False

    @property
    def peer(self) -> str:
        """The other end: ``host:port``, or ``unix``."""
        return self.connection.peer

    @property
    def content_length(self) -> int | None:
        """Length announced for the body, before decoding; None if it comes chunked."""
        return None if self.head.chunked else self.head.content_length

    def __repr__(self) -> str:
        return f"<Request {self.method} {self.target}>"


class Connection(Protocol):
    """The connection of a request, as far as an application may know it."""

    context: Any

    @property
    def flow(self) -> Flow | None:
        """The flow to which the connection belongs; None if it belongs to none and waits for no turn."""

    def join(self, flow: Flow) -> None:
        """Assign the connection to a flow, in place of the one before."""

    def read_refusal(self) -> tuple[int, int] | None:
        """Return how many reads of this flow are under way, and the limit, if one more is too many.

        That is counted. None: there is room.
        """

    @property
    def peer(self) -> str:
        """The other end: ``host:port``, or ``unix``."""

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """The client's certificate that the handshake of TLS has verified; None if it showed none."""


class Response:
    """An answer. `header_block` is headers already encoded; it comes before `headers`.

    A `body` of several buffers is written without joining; an async iterator
    is sent chunked (or until the connection's end in HTTP/1.0), unless its
    `length` is known. An `endless` one is ended when the peer closes its side
    or the server drains. `close` ends the connection after it. After a refusal by
    `Application.head` the connection is not read for `mute_s` seconds.
    """

    is_page: ClassVar[bool] = False
    """Whether a browser may show it as a page of this server, by a policy among its own headers."""

    __slots__ = ("body", "close", "endless", "header_block", "headers", "length", "mute_s", "status")

    def __init__(
        self,
        status: int = 200,
        headers: Sequence[tuple[str, str]] = (),
        body: Body = b"",
        *,
        header_block: bytes = b"",
        close: bool = False,
        length: int | None = None,
        endless: bool = False,
    ) -> None:
        self.endless = endless
        self.status = status
        self.headers = headers
        self.body = body
        self.header_block = header_block
        self.close = close
        self.length = length
        self.mute_s = 0.0

    @classmethod
    def json(cls, value: Any, status: int = 200, *, headers: Sequence[tuple[str, str]] = ()) -> Response:
        """Return a JSON answer of anything msgspec can write, with a newline for terminals."""
        return cls(status, headers, msgspec.json.encode(value) + b"\n", header_block=_JSON_BLOCK)

    def __repr__(self) -> str:
        return f"<Response {self.status}>"


class Later:
    """An answer that is made from a future's result only when it is its turn to be sent.

    Many futures may resolve at once, as those of all appends of one sync do; making all their answers at that
    moment would hold the loop. Use it for changes only: the server does not cancel the future, which others
    may await too.
    """

    __slots__ = ("future", "make")

    def __init__(self, future: asyncio.Future[Any], make: Callable[[Any], Response]) -> None:
        self.future = future
        self.make = make

    def __await__(self) -> Generator[Any, None, Response]:
        result = yield from asyncio.shield(self.future).__await__()
        return self.make(result)


class Page(Response):
    """An answer that is a page of the server itself, or a file of one, with a `Content-Security-Policy`."""

    __slots__ = ()
    is_page: ClassVar[bool] = True


class Application(Protocol):
    """The application that a server serves. Errors of its methods are answered by the server's `on_error`."""

    def head(self, request: Request) -> Response | None:
        """Check a head before its body is read: return None to go on, or a response that refuses it.

        The body of a refused request is not read. `WAIT` means that the connection has joined a flow that has
        used up its share of this turn: the head is given once more in the next one.
        """
        ...

    def parse(self, request: Request) -> Any:
        """Parse a body that is too large to be read on the event loop; called in another thread.

        The result becomes `request.parsed`. The method must not use state that the event loop changes.
        """
        ...

    def handle(self, request: Request) -> Response | Awaitable[Response]:
        """Answer a request whose body is complete, at once, by a future, or `Later`.

        For a returned coroutine the server makes a task.
        """
        ...


WAIT: Final = Response()
"""Not an answer: see `Application.head`."""

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
