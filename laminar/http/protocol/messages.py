"""The interface between a server and its application: requests, responses, and the methods to answer them.

An application that sends the same headers with many responses encodes them once (`encode_headers`) and passes
the bytes as a `header_block`. That makes receipts of appends, the most frequent responses, cheap.
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

# A body above this is decompressed and parsed in another thread, while the loop serves other connections; but
# not one of which the application says that it is parsed fast.
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
    """Return the status line of a response, as bytes with CR LF."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def encode_headers(headers: Iterable[tuple[str, str]]) -> bytes:
    """Return headers as the bytes of a response, each line with CR LF.

    It asserts that no header has a line break, which would begin another header.
    """
    block = "".join([f"{name}: {value}\r\n" for name, value in headers]).encode("latin-1", "replace")
    assert block.count(b"\n") == block.count(b"\r\n") == block.count(b"\r"), block
    return block


class Request:
    """One request. Its headers and query must not be changed: requests with equal heads share them.

    `body` is empty in `Application.head`; in `Application.handle` it is complete and decoded from its
    ``Content-Encoding``. `connection` is the connection on which the request came. `parsed` is the result of
    `Application.parse` for a body that was parsed in a thread, else None.

    The application may set two attributes. `answer_bytes` is the largest size of a read's answer: the server
    begins no further request of the connection while its reads may have too many bytes of answers. Without it
    a GET or HEAD counts as a read of `USUAL_ANSWER_BYTES`, and another request as no read. `ends_with_peer`
    tells the server to cancel the coroutine of `Application.handle` as soon as the peer closes its side; that
    of a GET is in any case cancelled when the connection is lost.
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
        """The client's address as ``host:port``, or ``unix`` for a Unix socket."""
        return self.connection.peer

    @property
    def content_length(self) -> int | None:
        """Length of the encoded body in bytes, as the head announces it; None if the body comes chunked."""
        return None if self.head.chunked else self.head.content_length

    def __repr__(self) -> str:
        return f"<Request {self.method} {self.target}>"


class Connection(Protocol):
    """The connection of a request, as an application uses it; `context` is for data of the application."""

    context: Any

    @property
    def flow(self) -> Flow | None:
        """The flow (all requests of one client) of the connection; without one it waits for no turns."""

    def join(self, flow: Flow) -> None:
        """Assign the connection to `flow`, and remove it from the flow that it had before."""

    def read_refusal(self) -> tuple[int, int] | None:
        """Return why the connection's flow may not begin another read; None if it may.

        The reason is (number of its reads in progress, limit). A refusal is counted.
        """

    @property
    def peer(self) -> str:
        """The client's address as ``host:port``, or ``unix`` for a Unix socket."""

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """The client's certificate that the handshake of TLS has verified; None if it showed none."""


class Response:
    """The answer to a request.

    `header_block` has headers that are already encoded; it is sent before `headers`. A `body` of several
    buffers is written without joining them. A body that is an async iterator is sent chunked (to an HTTP/1.0
    client: up to the end of the connection), unless its `length` is given. Such a body is `endless` if it has
    no end by itself; it is ended when the peer closes its side or the server drains. With `close` the
    connection is closed after the answer. `mute_s` is for a refusal by `Application.head` because of a rate
    limit: the server begins no request of the connection for this number of seconds.
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
        """Return an answer with `value`, encoded by msgspec, as its JSON body, which ends with a newline."""
        return cls(status, headers, msgspec.json.encode(value) + b"\n", header_block=_JSON_BLOCK)

    def __repr__(self) -> str:
        return f"<Response {self.status}>"


class Later:
    """An answer that is made from the result of a future when the answer can be sent, not when that is done.

    Many futures may be done at once, as those of all appends of one sync are; making all their answers at
    that moment would block the loop. Use it for requests that change something, not for reads: the server
    never cancels the future, because other requests may await it too.
    """

    __slots__ = ("future", "make")

    def __init__(self, future: asyncio.Future[Any], make: Callable[[Any], Response]) -> None:
        self.future = future
        self.make = make

    def __await__(self) -> Generator[Any, None, Response]:
        result = yield from asyncio.shield(self.future).__await__()
        return self.make(result)


class Page(Response):
    """An answer that is a page of the server itself, or a file of a page.

    It needs a `Content-Security-Policy` among its headers; other answers get the strictest one.
    """

    __slots__ = ()
    is_page: ClassVar[bool] = True


class Application(Protocol):
    """The application that a server serves. Errors of its methods are answered by the server's `on_error`."""

    def head(self, request: Request) -> Response | None:
        """Check a head before its body is read: return None to go on, or a response that refuses it.

        The body of a refused request is not read. The application returns `WAIT` if it has assigned the
        connection to a flow that has used up its share of this turn: the server then calls this method with
        the same head again in the next turn.
        """
        ...

    def parses_long(self, request: Request) -> bool:
        """Return whether parsing a large body may take longer than the event loop's other work may wait.

        The body is complete and not compressed. It is not called for a small one.
        """
        ...

    def parse(self, request: Request) -> Any:
        """Parse a body that would take too long to parse on the event loop; called in another thread.

        The result becomes `request.parsed`. The method must not use state that the event loop changes.
        """
        ...

    def handle(self, request: Request) -> Response | Awaitable[Response]:
        """Return the answer to a request whose body is complete, or an awaitable of the answer.

        That is a future, a `Later`, or a coroutine, for which the server makes a task.
        """
        ...


WAIT: Final = Response()
"""Not an answer: see `Application.head`."""

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
