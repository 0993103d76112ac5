"""The client's side of HTTP/1.1: one connection, with requests pipelined.

It suits a log's client: several appends to a partition can be in progress on one connection; their answers
come in order, by callbacks, without a task for each; and answers of known length are received directly into
their own buffer. It follows no redirects and repeats nothing: a request ends in an `Answer` or in a
`ConnectionFailed`, which says whether the server may have acted on it. It works on asyncio and uvloop, over
TCP, TLS and Unix sockets. `laminar.client.net.pool` decides which connection is used for which request.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from laminar.http.client.source_port import connect_to_shard
from laminar.http.client.tls import SYSTEM, Trust
from laminar.http.protocol.answer import Answer, Buffer, ConnectionFailed, OnAnswer, Target
from laminar.http.protocol.chunked import ChunkedDecoder
from laminar.http.protocol.response_head import ResponseHead, parse_response_head
from laminar.unzeroed import new_bytearray

# Bytes received of an answer before its body's length is known; no head is longer.
HEAD_BUFFER_BYTES: Final = 64 << 10
# Below this, head and body are joined into one write: a system call costs more than the copy.
JOINED_BODY_BYTES: Final = 32 << 10
# A server that sends more is not one of ours.
MAX_ANSWER_BYTES: Final = 256 << 20

_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_ports: Final = random.Random()


@dataclass(slots=True)
class _Waiting:
    on_answer: OnAnswer
    bodyless: bool
    deadline: float


class ClientConnection(asyncio.BufferedProtocol):
    """An open connection. `request` may be called again before earlier answers have come."""

    def __init__(self, url: str, loop: asyncio.AbstractEventLoop) -> None:
        self.url = url
        self.closed = False
        self.idle_since = 0.0
        self.lost: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._heard = False  # whether a byte has come
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[_Waiting] = deque()
        self._buffer = bytearray(HEAD_BUFFER_BYTES)
        self._buffer_view = memoryview(self._buffer)
        self._held = 0  # bytes of `_buffer` that are filled
        # The head of the answer whose body is being received. The body is one of the next: of known length,
        # chunked, or up to the end of the connection.
        self._head: ResponseHead | None = None
        self._body: memoryview | None = None
        self._body_filled = 0
        self._chunked: ChunkedDecoder | None = None
        self._body_to_end: bytearray | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<ClientConnection {self.url} {state}, {self.outstanding} outstanding>"

    @property
    def outstanding(self) -> int:
        """The number of requests whose answers are awaited."""
        return len(self._waiting)

    # -- requests --------------------------------------------------------------------------

    def request(
        self,
        head: bytes,
        body: Sequence[Buffer],
        on_answer: OnAnswer,
        *,
        timeout_s: float,
        bodyless: bool = False,
    ) -> None:
        """Send a request; `on_answer` is called once, with the answer or the failure, in order of requests.

        `head` is the request line and all headers with the empty line. `bodyless` tells that the answer has
        no body, as that to HEAD. If the answer does not come within `timeout_s`, the connection is closed,
        and every request on it fails. If the connection is closed already, this raises `ConnectionFailed`
        (not sent), and `on_answer` is not called.
        """
        transport = self._transport
        if transport is None or self.closed:
            raise ConnectionFailed(f"the connection to {self.url} is closed", sent=False)
        self._waiting.append(_Waiting(on_answer, bodyless, self._loop.time() + timeout_s))
        if self._timer is None:
            self._timer = self._loop.call_later(timeout_s, self._check_deadline)
        # The callers limit the bytes in flight by their windows, so the transport's high-water mark is not
        # used.
        if sum(map(len, body)) <= JOINED_BODY_BYTES:
            transport.write(b"".join((head, *body)))
        else:
            transport.write(head)
            for part in body:
                transport.write(part)

    async def ask(
        self, head: bytes, body: Sequence[Buffer] = (), *, timeout_s: float, bodyless: bool = False
    ) -> Answer:
        """Send a request and return its answer; raise `ConnectionFailed` if no answer came.

        The parameters are those of `request`. If the caller is cancelled, the connection is closed, and every
        request on it fails.
        """
        result: asyncio.Future[Answer] = self._loop.create_future()

        def on_answer(answer: Answer | None, failure: ConnectionFailed | None) -> None:
            if result.done():
                return
            if answer is not None:
                result.set_result(answer)
            else:
                assert failure is not None
                result.set_exception(failure)

        self.request(head, body, on_answer, timeout_s=timeout_s, bodyless=bodyless)
        try:
            return await result
        except asyncio.CancelledError:
            self.abort("cancelled")
            raise

    def abort(self, reason: str = "closed") -> None:
        """Cut the connection; outstanding requests fail with `reason`: the server may have acted on them."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            sock = transport.get_extra_info("socket") if self._waiting else None
            if sock is not None and _is_tcp(sock):
                # With a reset the server notices at once that no answer is awaited. After a plain end of file
                # it could still answer, so it would go on with a long poll in vain.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            transport.abort()
        self._end(reason, sent=True)

    # -- asyncio's side --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport of the new connection, and send small writes at once (TCP_NODELAY)."""
        # Not asserted: uvloop's transports are not of this class.
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and _is_tcp(sock):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def eof_received(self) -> bool:
        """Finish the answer whose body ends with the connection, if there is one; fail all other requests."""
        if self._body_to_end is not None:
            self._finish(self._body_to_end)
        self.abort("the server closed the connection" + self._perhaps_tls)
        return False

    def connection_lost(self, exc: BaseException | None) -> None:
        """Fail the outstanding requests: the connection has ended."""
        if not self.lost.done():
            self.lost.set_result(None)
        reason = "the connection was closed" if exc is None else str(exc) + self._perhaps_tls
        self._end(reason, sent=True)

    @property
    def _perhaps_tls(self) -> str:
        """Return a hint for the error's text if the server sent nothing: its port may be one for TLS."""
        unheard = not self._heard and self.url.startswith("http://")
        return " before its first answer; is it https://?" if unheard else ""

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer of the next bytes: the body's own, or the connection's."""
        if self._body is not None:
            return self._body[self._body_filled :]
        return self._buffer_view[self._held :]

    def buffer_updated(self, nbytes: int) -> None:
        """Process the `nbytes` that were received into the buffer that `get_buffer` returned last."""
        self._heard = True
        if self._body is not None:
            self._body_filled += nbytes
            if self._body_filled == len(self._body):
                self._finish(self._body)
            return
        self._held += nbytes
        try:
            self._parse()
            if self._held == len(self._buffer):
                raise ValueError(f"a head of more than {HEAD_BUFFER_BYTES} bytes")
        except ValueError as fault:
            self._held = 0
            self.abort(f"{self.url} gave no HTTP answer: {fault}")

    # -- answers ---------------------------------------------------------------------------

    def _parse(self) -> None:
        """Finish all complete answers in the buffer; move the bytes of an incomplete body to its own buffer.

        The beginning of an incomplete head stays in the buffer.
        """
        position = 0
        while position < self._held and not self.closed:
            if self._chunked is not None:
                position += self._chunked.feed(bytes(self._buffer_view[position : self._held]))
                if self._chunked.done:
                    self._finish(self._chunked.body)
            elif self._body_to_end is not None:
                self._body_to_end += self._buffer_view[position : self._held]
                position = self._held
                if len(self._body_to_end) > MAX_ANSWER_BYTES:
                    raise ValueError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
            else:
                end = self._buffer.find(b"\r\n\r\n", position, self._held)
                if end < 0:
                    break
                end += 4
                position = self._take_head(bytes(self._buffer_view[position:end]), end)
        if self.closed:
            self._held = 0
        elif position:
            rest = self._held - position
            if rest:
                self._buffer[:rest] = self._buffer[position : self._held]
            self._held = rest

    def _take_head(self, raw: bytes, position: int) -> int:
        """Read one head, and the bytes of its body that have arrived; return the position after them."""
        head = parse_response_head(raw)
        if not self._waiting:
            raise ValueError("an answer without a request")
        if head.status < 200:
            if head.status == 101:
                raise ValueError("a switch of protocols that was not asked for")
            return position  # an interim answer, like 100 Continue
        self._head = head
        length = head.content_length
        if self._waiting[0].bodyless or head.status in (204, 304):
            self._finish(b"")
        elif head.chunked:
            self._chunked = ChunkedDecoder(limit_bytes=MAX_ANSWER_BYTES)
        elif length is None:
            self._body_to_end = bytearray()
        elif length > MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of {length} bytes")
        elif self._held - position >= length:
            self._finish(bytes(self._buffer_view[position : position + length]))
            return position + length
        else:
            # What is still to come is received into the body's own buffer, without a copy. No one sees the
            # buffer before it is full.
            self._body = memoryview(new_bytearray(length))
            self._body_filled = self._held - position
            self._body[: self._body_filled] = self._buffer_view[position : self._held]
            return self._held
        return position

    def _finish(self, body: Buffer) -> None:
        """Complete the first waiting request with its answer, whose body is `body`."""
        head = self._head
        assert head is not None, "a body without its head"
        self._head = self._body = self._chunked = self._body_to_end = None
        waiting = self._waiting.popleft()
        if not self._waiting:
            self.idle_since = self._loop.time()
        if head.close:
            self.closed = True
        waiting.on_answer(Answer(head.status, head.headers, body), None)
        if head.close:
            if self._transport is not None:
                self._transport.abort()
            # RFC 9112, 9.6: the server does not process what came after this request.
            self._end(f"{self.url} closed the connection after an earlier answer", sent=False)

    def _check_deadline(self) -> None:
        self._timer = None
        if not self._waiting or self.closed:
            return
        left_s = self._waiting[0].deadline - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check_deadline)
            return
        self.abort(f"{self.url} did not answer in time")

    def _end(self, reason: str, *, sent: bool) -> None:
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._head = self._body = self._chunked = self._body_to_end = None
        waiting, self._waiting = self._waiting, deque()
        for each in waiting:
            each.on_answer(None, ConnectionFailed(reason, sent=sent))


def head_bytes(method: str, target: str, authority: str, headers: Mapping[str, str]) -> bytes:
    """Return the head of a request as bytes, with the empty line at its end.

    `authority` is the value of `Host`. If the request has a body, `headers` must have its Content-Length.
    """
    lines = [f"{method} {target} HTTP/1.1", f"Host: {authority}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    text = "\r\n".join(lines) + "\r\n\r\n"
    assert text.count("\r\n\r\n") == 1 and "\n" not in text.replace("\r\n", ""), "a header holds a line break"
    return text.encode("latin-1")


async def open_connection(
    url: str, *, timeout_s: float, shard: tuple[int, int] | None = None, trust: Trust = SYSTEM
) -> ClientConnection:
    """Open a connection to `url`; raise `ConnectionFailed` (not sent) if that fails or takes too long.

    `shard` is (number, number of shards): through a node's shared port the connection then leads to that
    shard. The server of a URL with https must have a certificate that `trust` accepts; if not, `TlsFailed`
    is raised.
    """
    target = Target.of(url)
    tls = trust.context() if target.tls else None
    loop = asyncio.get_running_loop()
    connection = ClientConnection(url, loop)
    try:
        async with asyncio.timeout(timeout_s):
            if target.path is not None:
                # Connected by hand: uvloop knows no abstract names.
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                try:
                    await loop.sock_connect(sock, target.path)
                except BaseException:
                    sock.close()
                    raise
                await loop.create_unix_connection(lambda: connection, sock=sock)
            elif shard is not None:
                sock = await connect_to_shard(
                    target.host, target.port, shard=shard[0], shards=shard[1], rng=_ports
                )
                await loop.create_connection(
                    lambda: connection,
                    sock=sock,
                    ssl=tls,
                    server_hostname=target.host if target.tls else None,
                )
            else:
                await loop.create_connection(lambda: connection, target.host, target.port, ssl=tls)
    except TimeoutError:
        raise ConnectionFailed(f"{url} did not accept a connection in time", sent=False) from None
    except ssl.SSLError as fault:
        refused = trust.refused(url, fault)
        raise refused or ConnectionFailed(f"{url}: {fault}", sent=False) from None
    except OSError as fault:
        raise ConnectionFailed(f"{url}: {fault}", sent=False) from None
    return connection


async def ask_once(
    url: str,
    method: str,
    target: str,
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    trust: Trust = SYSTEM,
) -> Answer:
    """Send one request without a body on a new connection, and return the answer.

    Raises `ConnectionFailed` if that takes longer than `timeout_s` in all.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    head = head_bytes(method, target, Target.of(url).authority, {"Connection": "close", **(headers or {})})
    connection = await open_connection(url, timeout_s=timeout_s, trust=trust)
    try:
        left_s = max(0.001, deadline - loop.time())
        return await connection.ask(head, timeout_s=left_s, bodyless=method == "HEAD")
    finally:
        connection.abort()
        await connection.lost


def _is_tcp(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6)
