"""The client's side of HTTP/1.1: one connection, and a few functions on top.

`HttpConnection.request` may be called again before it returns: requests leave
in the order of the calls and answers are matched in that order (pipelining). It
follows no redirects and repeats nothing; it says, when it fails, whether
anything of the request can have been executed (`HttpError.outcome`), which is
what whoever decides about repeating needs to know. Works on asyncio and uvloop,
over TCP and abstract Unix sockets. `laminar.http.pool` keeps connections.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final, TypeAlias, cast

from laminar.http.chunked import LAST_CHUNK, ChunkedDecoder, ChunkedError, encode_chunk
from laminar.http.endings import (
    BadResponse,
    ClientResponse,
    ConnectFailed,
    ConnectionLost,
    Endpoint,
    HttpError,
    Outcome,
    RequestTimeout,
)
from laminar.http.head import BadResponseHead, ResponseHead, parse_response_head
from laminar.http.messages import Buffer

__all__ = [
    "BadResponse",
    "ClientResponse",
    "ConnectFailed",
    "ConnectionLost",
    "Endpoint",
    "Headers",
    "HttpConnection",
    "HttpError",
    "Outcome",
    "RequestBody",
    "RequestTimeout",
    "fetch_once",
]

Headers: TypeAlias = Mapping[str, str] | Sequence[tuple[str, str]]
RequestBody: TypeAlias = Buffer | Sequence[Buffer] | AsyncIterator[Buffer]

LONGEST_HEAD_BYTES: Final = 65536
# The largest answer that is collected; a server that sends more is not one of ours.
LARGEST_ANSWER_BYTES: Final = 1 << 30
# Below this, head and body leave in one buffer.
JOINED_BODY_BYTES: Final = 65536
_SCRATCH_BYTES: Final = 65536


class _Exchange:
    """A request whose answer is awaited."""

    __slots__ = ("answer", "head_only", "sent")

    def __init__(self, answer: asyncio.Future[ClientResponse], *, head_only: bool) -> None:
        self.answer = answer
        self.head_only = head_only
        self.sent = False  # True once a byte of it was handed to the transport


class HttpConnection(asyncio.BufferedProtocol):
    """One connection; made by `open`. Not usable any more once `usable` is False."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.usable = False
        self._transport: asyncio.Transport | None = None
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._tail = b""
        self._head: ResponseHead | None = None
        self._body = bytearray()
        self._body_view: memoryview | None = None
        self._filled = 0
        self._chunked: ChunkedDecoder | None = None
        self._exchanges: deque[_Exchange] = deque()
        self._paused = False
        self._writable: asyncio.Future[None] | None = None
        self._sending = asyncio.Lock()
        self._heads: dict[bytes, ResponseHead] = {}
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(
        cls, url: str | Endpoint, *, timeout: float = 10.0, ssl_context: ssl.SSLContext | None = None
    ) -> HttpConnection:
        """Connect; `ConnectFailed` or `RequestTimeout` (both ``not_sent``) if that doesn't work."""
        endpoint = Endpoint.parse(url) if isinstance(url, str) else url
        loop = asyncio.get_running_loop()
        connection = cls(endpoint)
        try:
            async with asyncio.timeout(timeout):
                if endpoint.unix_name:
                    sock = await _connect_abstract(endpoint.unix_name)
                    await loop.create_unix_connection(lambda: connection, sock=sock)
                else:
                    context = ssl_context or (True if endpoint.tls else None)
                    await loop.create_connection(
                        lambda: connection, endpoint.host, endpoint.port, ssl=context
                    )
        except TimeoutError as error:
            raise RequestTimeout(
                f"no connection to {endpoint} within {timeout} s", outcome="not_sent"
            ) from error
        except OSError as error:
            raise ConnectFailed(f"no connection to {endpoint}: {error}") from error
        return connection

    @property
    def outstanding(self) -> int:
        """Requests whose answers are awaited."""
        return len(self._exchanges)

    def __repr__(self) -> str:
        state = "usable" if self.usable else "closed"
        return f"<HttpConnection {self.endpoint} {state}, {self.outstanding} outstanding>"

    # -- Requests -------------------------------------------------------------------------

    async def request(
        self,
        method: str,
        target: str,
        *,
        headers: Headers = (),
        body: RequestBody = b"",
        timeout: float | None = None,
    ) -> ClientResponse:
        """Send a request and await its answer. `timeout` in seconds covers both.

        A body of several buffers is written without joining them, an async
        iterator chunked. Raises `HttpError`; an answer of any status is none.
        """
        loop = asyncio.get_running_loop()
        exchange = _Exchange(loop.create_future(), head_only=method == "HEAD")
        try:
            async with asyncio.timeout(timeout):
                if isinstance(body, (bytes, bytearray, memoryview)) and not self._sending.locked():
                    self._begin(exchange)
                    self._send_small(self._encode(method, target, headers, len(body)), body)
                else:
                    await self._send_large(exchange, method, target, headers, body)
                return await exchange.answer
        except asyncio.CancelledError:
            self._give_up(exchange)
            raise
        except TimeoutError as error:
            if isinstance(error, HttpError):
                raise
            self._give_up(exchange)
            raise RequestTimeout(
                f"{method} {target}: no answer from {self.endpoint} within {timeout} s",
                outcome="unknown" if exchange.sent else "not_sent",
            ) from error
        finally:
            if exchange.answer.done() and not exchange.answer.cancelled():
                exchange.answer.exception()  # taken note of, also when sending failed first

    def _begin(self, exchange: _Exchange) -> None:
        if not self.usable:
            raise ConnectionLost(f"the connection to {self.endpoint} is closed", outcome="not_sent")
        exchange.sent = True
        self._exchanges.append(exchange)

    def _encode(self, method: str, target: str, headers: Headers, length: int | None) -> bytes:
        pairs = headers.items() if isinstance(headers, Mapping) else headers
        lines = [f"{method} {target} HTTP/1.1\r\nHost: {self.endpoint.authority}\r\n"]
        lines += [f"{name}: {value}\r\n" for name, value in pairs]
        if length is None:
            lines.append("Transfer-Encoding: chunked\r\n")
        elif length or method not in ("GET", "HEAD", "DELETE"):
            lines.append(f"Content-Length: {length}\r\n")
        head = "".join(lines)
        assert head.count("\n") == head.count("\r\n") == len(lines) + 1, head
        return head.encode("latin-1") + b"\r\n"

    def _send_small(self, head: bytes, body: Buffer) -> None:
        assert self._transport is not None
        if not len(body):
            self._transport.write(head)
        elif len(body) <= JOINED_BODY_BYTES:
            self._transport.write(b"".join((head, body)))
        else:
            self._transport.write(head)
            self._transport.write(body)

    async def _send_large(
        self, exchange: _Exchange, method: str, target: str, headers: Headers, body: RequestBody
    ) -> None:
        """One at a time, each no faster than the server takes it; stop early if it has answered already."""
        async with self._sending:
            self._begin(exchange)
            chunked = isinstance(body, AsyncIterator)
            length: int | None = None
            if isinstance(body, (bytes, bytearray, memoryview)):
                body = [body]
            if not isinstance(body, AsyncIterator):
                length = sum(len(part) for part in body)
            try:
                self._write(self._encode(method, target, headers, length))
                if isinstance(body, AsyncIterator):
                    async for part in body:
                        for piece in encode_chunk(part):
                            self._write(piece)
                        if not await self._may_go_on(exchange):
                            return
                else:
                    for part in body:
                        self._write(part)
                        if not await self._may_go_on(exchange):
                            return
                if chunked:
                    self._write(LAST_CHUNK)
            except BaseException:
                # Half a request is on the wire: whatever follows would be taken for its body.
                self.abort()
                raise

    async def _may_go_on(self, exchange: _Exchange) -> bool:
        """Wait for room. False when the answer came before the end of the request."""
        while self._paused and not exchange.answer.done():
            if self._writable is None or self._writable.done():
                self._writable = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._writable, exchange.answer), return_when=asyncio.FIRST_COMPLETED)
        if exchange.answer.done():
            self.usable = False
            if self._transport is not None:
                self._transport.close()
            return False
        return True

    def _write(self, data: Buffer) -> None:
        if self._transport is not None and len(data):
            self._transport.write(data)

    def _give_up(self, exchange: _Exchange) -> None:
        """Nobody waits for this answer any more: take no new requests, close when no one waits at all."""
        exchange.answer.cancel()
        if not exchange.sent:
            return
        self.usable = False
        if all(waiting.answer.done() for waiting in self._exchanges):
            self._reset()

    def _reset(self) -> None:
        """Cut the connection so that the server hears it at once: a mere end might only end our sending,
        and a long poll would be kept up for nobody."""
        if self._transport is not None and not self.endpoint.unix_name:
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()

    # -- What the event loop calls ----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self._transport = cast(asyncio.Transport, transport)
        self.usable = True

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, and with it every answer still awaited."""
        head, exchange = self._head, self._exchanges[0] if self._exchanges else None
        unframed = head is not None and not head.chunked and head.content_length is None
        if exc is None and head is not None and exchange is not None and unframed:
            self._answered(self._body)  # a body that ends with the connection
        reason = f"the connection to {self.endpoint} was lost" + (f": {exc}" if exc else "")
        self._fail(ConnectionLost, reason)
        self._transport = None
        if not self._closed.done():
            self._closed.set_result(None)

    def pause_writing(self) -> None:
        """The transport has enough."""
        self._paused = True

    def resume_writing(self) -> None:
        """The transport has room again."""
        self._paused = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: the body's own buffer if its length is known."""
        if self._body_view is not None:
            return self._body_view[self._filled :]
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` have come into the buffer given last."""
        if self._body_view is not None:
            self._filled += nbytes
            if self._filled == len(self._body):
                self._answered(self._body)
            return
        data = self._scratch[:nbytes].tobytes()
        try:
            self._consume(self._tail + data if self._tail else data)
        except (BadResponseHead, ChunkedError) as error:
            self._fail(BadResponse, f"{self.endpoint}: {error}")
            self.abort()

    def eof_received(self) -> bool:
        """The server sends nothing more."""
        self.usable = False
        return False

    def _consume(self, data: bytes) -> None:
        position = 0
        self._tail = b""
        while position < len(data):
            if self._chunked is not None:
                position = self._chunked.feed(data, position)
                if self._chunked.done:
                    self._answered(self._chunked.body)
            elif self._head is not None:  # a body that ends with the connection
                self._body += data[position:]
                if len(self._body) > LARGEST_ANSWER_BYTES:
                    raise BadResponseHead(f"an answer of more than {LARGEST_ANSWER_BYTES} bytes")
                return
            elif not self._exchanges:
                raise BadResponseHead("an answer to nothing")
            else:
                end = data.find(b"\r\n\r\n", position)
                if end < 0:
                    if len(data) - position > LONGEST_HEAD_BYTES:
                        raise BadResponseHead(f"a head of more than {LONGEST_HEAD_BYTES} bytes")
                    self._tail = data[position:]
                    return
                end += 4
                position = self._take_head(data[position:end], data, end)

    def _take_head(self, raw: bytes, data: bytes, position: int) -> int:
        head = self._heads.get(raw)
        if head is None:
            head = parse_response_head(raw)
            if len(self._heads) >= 64:
                self._heads.clear()
            self._heads[raw] = head
        if head.status < 200:
            if head.status == 101:
                raise BadResponseHead("a switch of protocols nobody asked for")
            return position  # an interim answer, like 100 Continue
        self._head = head
        length = head.content_length
        if self._exchanges[0].head_only or head.status in (204, 304) or length == 0:
            self._answered(b"")
        elif head.chunked:
            self._chunked = ChunkedDecoder(limit_bytes=LARGEST_ANSWER_BYTES)
        elif length is None:
            head.close = True
            self.usable = False
            self._body = bytearray()
        elif length > LARGEST_ANSWER_BYTES:
            raise BadResponseHead(f"an answer of {length} bytes")
        elif len(data) - position >= length:
            self._answered(data[position : position + length])
            return position + length
        else:
            self._body = bytearray(length)
            self._body_view = memoryview(self._body)
            self._filled = len(data) - position
            self._body_view[: self._filled] = data[position:]
            return len(data)
        return position

    def _answered(self, body: Buffer) -> None:
        """The first exchange's answer is whole."""
        head = self._head
        assert head is not None
        self._head, self._chunked, self._body_view = None, None, None
        self._body = bytearray()
        exchange = self._exchanges.popleft()
        if not exchange.answer.done():
            exchange.answer.set_result(ClientResponse(head.status, head.headers, body))
        if head.close:
            # RFC 9112, 9.6: the server won't process what came behind this request.
            self._fail(ConnectionLost, f"{self.endpoint} closed the connection", outcome="not_sent")
            if self._transport is not None:
                self._transport.close()

    def _fail(self, kind: type[HttpError], reason: str, *, outcome: Outcome = "unknown") -> None:
        self.usable = False
        self._head, self._chunked, self._body_view = None, None, None
        exchanges, self._exchanges = self._exchanges, deque()
        for exchange in exchanges:
            if exchange.answer.done():
                continue
            if kind is BadResponse:
                exchange.answer.set_exception(BadResponse(reason))
            else:
                exchange.answer.set_exception(kind(reason, outcome=outcome))
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._paused = False

    # -- Ends -------------------------------------------------------------------------------

    def abort(self) -> None:
        """Cut the connection; what is awaited fails."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def retire(self) -> None:
        """Take no new requests; close once the answers awaited have come."""
        self.usable = False
        if self._transport is not None and not self._exchanges:
            self._transport.close()

    async def close(self) -> None:
        """Close, and wait until it is."""
        self.usable = False
        if self._transport is not None:
            self._transport.close()
            await self._closed

    async def __aenter__(self) -> HttpConnection:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


async def _connect_abstract(name: str) -> socket.socket:
    """A connected socket: uvloop would cut the path at its leading NUL."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, "\0" + name)
    except BaseException:
        sock.close()
        raise
    return sock


async def fetch_once(
    url: str,
    method: str,
    target: str,
    *,
    headers: Headers = (),
    body: RequestBody = b"",
    timeout: float = 10.0,
) -> ClientResponse:
    """One request on a connection of its own, `timeout` seconds over all."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout
    async with await HttpConnection.open(url, timeout=timeout) as connection:
        return await connection.request(
            method,
            target,
            headers=[
                *(headers.items() if isinstance(headers, Mapping) else headers),
                ("Connection", "close"),
            ],
            body=body,
            timeout=max(0.001, deadline_s - loop.time()),
        )
