"""The half of a server's connection that writes answers: in order, and no faster than the peer reads.

Exchanges (requests and their answers) wait in a deque. When the first one is done, it and all done ones
directly after it are written together, as many as the connection's flow has left of its turn. A large body is
written in pieces, each when the transport has room; a streamed body is written by a task. This half knows
nothing of reading. `Connection` is the other half; it is called when there is room for further requests.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, cast

from laminar.http.protocol.chunked import LAST_CHUNK, encode_chunk
from laminar.http.protocol.errors import HttpError
from laminar.http.protocol.flows import Flow
from laminar.http.protocol.messages import (
    CONTINUE,
    STATUS_LINES,
    Buffer,
    Response,
    encode_headers,
    status_line,
)
from laminar.http.protocol.request_head import RequestHead
from laminar.http.server.state import ServerState

log = logging.getLogger("laminar.http")

# Below this, head and body of an answer are joined: a copy is cheaper than another buffer to write.
JOINED_BODY_BYTES: Final = 65536
# Larger bodies leave in pieces of about this size, as the peer takes them.
PIECE_BYTES: Final = 1 << 20


class Exchange:
    """A request and its answer, from when the request was passed on until the answer is written.

    `result` is the answer, or a future of it. If `make` is not None, it makes the answer from the future's
    result. `reserved` is the number of bytes counted in the budget of bodies for the request, and `held` that
    in the budget of answers for the answer, once it is made. For a read that is not answered yet, `expected`
    is the largest size of the answer in bytes, and `flow` is the flow that counts the read. If
    `ends_with_peer` is set, the future is cancelled when the peer closes its side.
    """

    __slots__ = (
        *("began_s", "ends_with_peer", "expected", "flow", "head", "held"),
        *("make", "reserved", "result"),
    )

    def __init__(
        self,
        head: RequestHead,
        result: asyncio.Future[Any] | Response,
        reserved: int = 0,
        began_s: float = 0.0,
    ) -> None:
        self.head = head
        self.began_s = began_s
        self.result = result
        self.make: Callable[[Any], Response] | None = None
        self.reserved = reserved
        self.ends_with_peer = False
        self.expected = 0
        self.flow: Flow | None = None
        self.held = 0


# Placeholder in the queue for an interim answer.
GO_ON: Final = Response(100)

# A cache of Content-Length headers: receipts have few lengths.
_length_lines: Final[dict[int, bytes]] = {}
_LONGEST_KEPT_LENGTH: Final = 4096


class ResponseWriter:
    """The writer of one connection's answers, in the order of the requests.

    It calls `on_room` when further requests may begin, because answers were written, if `room_awaited` tells
    that some may be waiting for that; and `on_end` when the last answer of the connection is written.
    """

    __slots__ = (
        "_end",
        "_endless",
        "_resume",
        "_room",
        "_server",
        "_stream",
        "_unwritten",
        "_unwritten_held",
        "_waits_turn",
        "address",
        "expected_bytes",
        "flow",
        "held_bytes",
        "out",
        "paused",
        "pending",
        "reserved_bytes",
        "room_awaited",
        "stopped",
        "transport",
        "write_callback",
        "written_bytes",
    )

    def __init__(
        self, server: ServerState, *, on_room: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        self.transport: asyncio.Transport | None = None  # None before and after the connection
        self.flow: Flow | None = None  # the connection's
        self._waits_turn = False
        self.address = ""
        self._server = server
        self._room = on_room
        self.room_awaited = False
        self._end = on_end
        self.pending: deque[Exchange] = deque()
        self.expected_bytes = 0  # the sum of `Exchange.expected`, over reads whose answer is not made
        self.held_bytes = 0  # bytes of large answers that are made and not sent
        self.out: list[bytes] = []
        self._unwritten: deque[Buffer] = deque()  # rest of a large answer, its exchange done
        self._unwritten_held = 0
        self._stream: asyncio.Task[None] | None = None
        self._endless = False  # the stream has no end by itself
        self._resume: asyncio.Event | None = None
        self.write_callback = self._write_due
        self.stopped = False  # no further request is taken; the last answer says so
        self.reserved_bytes = 0  # of bodies that are not answered yet
        self.written_bytes = 0
        self.paused = False

    @property
    def busy(self) -> bool:
        """Whether an answer is outstanding or being sent."""
        return bool(self.pending or self._unwritten or self._stream is not None)

    @property
    def ends_with_peer(self) -> bool:
        """Whether an answer is outstanding or being sent that is useless once the peer sends nothing more."""
        return self._endless or any(exchange.ends_with_peer for exchange in self.pending)

    @property
    def unwritten_bytes(self) -> int:
        """Number of bytes of answers that were not passed to the kernel yet."""
        assert self.transport is not None
        return self.transport.get_write_buffer_size() + sum(map(len, self._unwritten))

    def abort(self) -> None:
        """Cut the connection; answers not yet sent are lost."""
        if self.transport is not None:
            self.transport.abort()

    # -- The queue --------------------------------------------------------------------------

    def answer(self, head: RequestHead, response: Response, reserved: int = 0, began_s: float = 0.0) -> None:
        """Send an answer at once, or after the outstanding answers of earlier requests.

        `reserved` is the number of body bytes to return to the budget; `began_s` is the time
        (`perf_counter`) at which the request began, 0.0 if just now.
        """
        if head.close or response.close:
            self.stopped = True
        exchange = Exchange(head, response, reserved, began_s)
        response = self._hold(exchange, response)
        if self.pending or self._unwritten or self._stream is not None:
            self.pending.append(exchange)
            return
        if reserved:
            self.release(reserved)
        self._write(exchange, response)

    def _hold(self, exchange: Exchange, response: Response) -> Response:
        """Count a large answer in the budget, or replace it by a refusal; return the answer to be sent."""
        size = _size_of(response)
        if size > JOINED_BODY_BYTES:
            try:
                self._server.check_answer(self.address, size)
            except HttpError as error:
                response = self._server.answer_error(error, exchange.head)
            else:
                self._server.answers.take(self.address, size)
                self.held_bytes += size
                exchange.held = size
        exchange.result = response
        return response

    def _let_go(self, held: int) -> None:
        """Stop counting a large answer that was sent or abandoned."""
        self.held_bytes -= held
        self._server.answers.give(self.address, held)

    def begin_read(self, exchange: Exchange, expected: int) -> None:
        """Count a read that has begun, whose answer may have `expected` bytes."""
        exchange.expected, exchange.flow = expected, self.flow
        self.expected_bytes += expected
        self._server.reads += 1
        if exchange.flow is not None:
            exchange.flow.reads += 1

    def _end_read(self, exchange: Exchange) -> None:
        """Stop counting a read: its answer is made, or no one waits for it."""
        if not exchange.expected:
            return
        self.expected_bytes -= exchange.expected
        exchange.expected = 0
        self._server.reads -= 1
        if exchange.flow is not None:
            exchange.flow.reads -= 1
            exchange.flow = None

    def made(self, exchange: Exchange) -> None:
        """Count the answer of a read in the budget when its future is done; it may be sent much later."""
        future = exchange.result
        if self.transport is not None and isinstance(future, asyncio.Future):
            self._take_made(exchange, future)
        self._write_due()

    def _take_made(self, exchange: Exchange, future: asyncio.Future[Any]) -> Response:
        self._end_read(exchange)
        return self._hold(exchange, self._outcome(exchange, future))

    def take_turn(self) -> None:
        """Write the answers that are due, as many as the connection's flow may in a turn of the loop."""
        self._waits_turn = False
        if self.transport is not None:
            self._write_due()

    def _write_due(self, _done: object = None) -> None:
        """Write the answers that are due: that of the first exchange, and of all done ones after it.

        If the flow has used up its share of this turn, the rest is written in the next turn.
        """
        if self._waits_turn:
            return
        pending, flow = self.pending, self.flow
        while pending and not self._unwritten and self._stream is None:
            exchange = pending[0]
            result = exchange.result
            if not isinstance(result, Response) and not result.done():
                break
            if flow is not None:
                if flow.is_spent:
                    self._waits_turn = True
                    self._server.turns.wait(flow, self)
                    break
                self._server.turns.take(flow, 1)
            response = result if isinstance(result, Response) else self._take_made(exchange, result)
            pending.popleft()
            if exchange.reserved:
                self.release(exchange.reserved)
            self._write(exchange, response)
        self.flush()
        if self.room_awaited:
            self._room()

    def release(self, reserved: int) -> None:
        """Return the bytes that were reserved for a body to the budget."""
        self.reserved_bytes -= reserved
        self._server.bodies.give(self.address, reserved)

    def abandon(self) -> None:
        """Drop the answers to a peer that is gone; requests that change something are still carried out.

        Reads, and requests with `ends_with_peer`, are cancelled.
        """
        pending, self.pending = self.pending, deque()
        for exchange in pending:
            self._end_read(exchange)
            result = exchange.result
            if isinstance(result, asyncio.Future):
                if exchange.ends_with_peer or exchange.head.method in ("GET", "HEAD"):
                    result.cancel()
                else:
                    result.add_done_callback(_note_failure)
        if self._stream is not None:
            self._stream.cancel()
        if self._resume is not None:
            self._resume.set()
        self._unwritten.clear()
        if self.reserved_bytes:
            self.release(self.reserved_bytes)
        if self.held_bytes:
            self._let_go(self.held_bytes)

    def _outcome(self, exchange: Exchange, future: asyncio.Future[Any]) -> Response:
        """Return the answer of a done future, or the answer to its error."""
        error = failure_of(future)
        if error is not None:
            return self._server.answer_error(error, exchange.head)
        try:
            result = future.result()
            if exchange.make is not None:
                return exchange.make(result)
            response: Response = result
            return response
        except Exception as failed:  # noqa: BLE001  # answered, and logged
            return self._server.answer_error(failed, exchange.head)

    # -- Writing ----------------------------------------------------------------------------

    def _write(self, exchange: Exchange, response: Response) -> None:
        """Encode an answer into `out`; begin to write a large body, and begin a task for a streamed one.

        `Exchange.held` bytes are counted for it until all of it is given to the transport.
        """
        head, held = exchange.head, exchange.held
        if response is GO_ON:
            self.out.append(CONTINUE)
            return
        server = self._server
        if response.close or server.draining:
            self.stopped = True
        # Only the last one says `close`: what is owed after it was taken, and is answered.
        close = head.close or (self.stopped and not self.pending)
        status = response.status
        counts = server.counts
        if status < 300:
            counts.responses_2xx += 1
        else:
            counts.answered(status)
        if server.on_answer is not None:
            began_s = exchange.began_s
            server.on_answer(head, status, time.perf_counter() - began_s if began_s else 0.0)
        body = response.body
        parts: Sequence[Buffer]
        if isinstance(body, (bytes, bytearray, memoryview)):
            parts, size = (body,), len(body)
        elif isinstance(body, AsyncIterator):
            self._begin_stream(head, response, body, close)
            return
        else:
            parts, size = body, sum([len(part) for part in body])
        block = self._block(head, response, close)
        if status == 204 or status == 304 or status < 200:
            block.append(b"\r\n")
            size = 0
        else:
            block.append(_length_lines.get(size) or _length_line(size))
            if head.method == "HEAD":
                size = 0
        large = size > JOINED_BODY_BYTES
        if size and not large:
            block.extend(cast("Sequence[bytes]", parts))
        joined = b"".join(block)
        self.out.append(joined)
        if large:
            self.written_bytes += len(joined) + size
            counts.bytes_out += len(joined) + size
            self.flush_joined()
            self._unwritten.extend(_pieces(parts))
            self._unwritten_held = held
            self._write_rest()
        else:
            if held:
                self._let_go(held)
            self.written_bytes += len(joined)
            counts.bytes_out += len(joined)

    def _block(self, head: RequestHead, response: Response, close: bool) -> list[bytes]:
        """Return status line and headers, without the framing of the body."""
        status = response.status
        block = [
            STATUS_LINES.get(status) or status_line(status),
            response.header_block,
            self._server.page_block if response.is_page else self._server.date_block,
        ]
        if response.headers:
            block.append(encode_headers(response.headers))
        if head.wants_socket_header:
            block.append(self._socket_line())
        if close:
            block.append(b"Connection: close\r\n")
        elif not head.http11:
            block.append(b"Connection: keep-alive\r\n")
        return block

    def _socket_line(self) -> bytes:
        """Return a header with the shard of the connection's socket and the CPU of its last packets."""
        shard = self._server.shard
        sock = self.transport.get_extra_info("socket") if self.transport is not None else None
        if shard is None or sock is None or sock.family == socket.AF_UNIX:
            return b""
        cpu = sock.getsockopt(socket.SOL_SOCKET, socket.SO_INCOMING_CPU)
        return b"Laminar-Socket: shard=%d; cpu=%d\r\n" % (shard, cpu)

    def flush(self) -> None:
        """Write all collected answers together; call `on_end` if the last answer is written."""
        if self.out:
            self.flush_joined()
        if self.stopped and not self.busy and self.transport is not None:
            self._end()

    def flush_joined(self) -> None:
        """Write the collected small answers to the transport in one call."""
        out = self.out
        if self.transport is not None:
            self.transport.write(out[0] if len(out) == 1 else b"".join(out))
        out.clear()

    def _write_rest(self) -> None:
        """Write pieces of a large answer until the transport's buffer is full, or none is left."""
        while self._unwritten and not self.paused and self.transport is not None:
            self.transport.write(self._unwritten.popleft())
        if self._unwritten_held and not self._unwritten:
            self._let_go(self._unwritten_held)
            self._unwritten_held = 0

    def resume(self) -> None:
        """Write the rest of a large answer, then further answers: the transport has room again."""
        self.paused = False
        if self._resume is not None:
            self._resume.set()
        if self._unwritten:
            self._write_rest()
            if self._unwritten:
                return
        self._write_due()

    # -- Streams ----------------------------------------------------------------------------

    def _begin_stream(
        self, head: RequestHead, response: Response, body: AsyncIterator[Buffer], close: bool
    ) -> None:
        length = response.length
        chunked = head.http11 and length is None
        if not chunked and length is None:
            self.stopped = close = True
        block = self._block(head, response, close)
        if chunked:
            block.append(b"Transfer-Encoding: chunked\r\n")
        block.append(b"\r\n" if length is None else _length_line(length))
        self.out.append(b"".join(block))
        self.flush_joined()
        self._endless = response.endless
        if self._endless:
            self._notice_silence()
        self._stream = asyncio.get_running_loop().create_task(
            self._send_stream(head, body, chunked=chunked, length=length), name=f"stream {head.target}"
        )

    def _notice_silence(self) -> None:
        """Ask the kernel to end the connection if its peer acknowledges no bytes for `write_timeout_s`.

        Otherwise a stream would be sent for a quarter of an hour to a machine that is gone.
        """
        sock = self.transport.get_extra_info("socket") if self.transport is not None else None
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            wait_ms = round(1000 * self._server.limits.write_timeout_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, wait_ms)

    def end_stream(self) -> None:
        """End the answer that is being sent, if it is an `endless` one, and then the connection."""
        if self._endless and self._stream is not None:
            self.stopped = True
            self._stream.cancel()

    async def _send_stream(
        self, head: RequestHead, body: AsyncIterator[Buffer], *, chunked: bool, length: int | None
    ) -> None:
        """Send the parts that the iterator yields, then close it."""
        cancelled: asyncio.CancelledError | None = None
        try:
            await self._send_parts(head, body, chunked=chunked, length=length)
        except asyncio.CancelledError as error:
            cancelled = error
        close = getattr(body, "aclose", None)
        if close is not None:
            await close()
        self._stream = None
        self._endless = False
        if cancelled is not None:
            raise cancelled
        self._write_due()

    async def _send_parts(
        self, head: RequestHead, body: AsyncIterator[Buffer], *, chunked: bool, length: int | None
    ) -> None:
        """Send what the iterator yields. A failure cuts the connection: a short body would look whole."""
        sent = 0
        try:
            if head.method != "HEAD":
                async for part in body:
                    await self._writable()
                    sent += len(part)
                    assert length is None or sent <= length, f"{sent} bytes of a body of {length}"
                    self._write_pieces(encode_chunk(part) if chunked else [part])
                assert length is None or sent == length, f"{sent} bytes of a body of {length}"
                if chunked:
                    self._write_pieces([LAST_CHUNK])
        except asyncio.CancelledError:
            if self.transport is None or not self._endless:
                raise
            # The server drains. What was sent is whole, so the body ends as one that is.
            if chunked:
                self._write_pieces([LAST_CHUNK])
        except Exception:
            log.exception("streaming the answer to %s %s failed", head.method, head.target)
            self.abort()

    def _write_pieces(self, pieces: Sequence[Buffer]) -> None:
        for piece in pieces:
            if self.transport is not None and len(piece):
                self.transport.write(piece)
                self.written_bytes += len(piece)
                self._server.counts.bytes_out += len(piece)

    async def _writable(self) -> None:
        while self.paused and self.transport is not None:
            self._resume = asyncio.Event()
            await self._resume.wait()


def _size_of(response: Response) -> int:
    """Return the size in bytes of a body that is in memory; 0 for a streamed body."""
    body = response.body
    if isinstance(body, (bytes, bytearray, memoryview)):
        return len(body)
    return 0 if isinstance(body, AsyncIterator) else sum([len(part) for part in body])


def _length_line(size: int) -> bytes:
    line = b"Content-Length: %d\r\n\r\n" % size
    if size < _LONGEST_KEPT_LENGTH:
        _length_lines[size] = line
    return line


def _pieces(parts: Sequence[Buffer]) -> list[Buffer]:
    pieces: list[Buffer] = []
    for part in parts:
        if len(part) <= PIECE_BYTES:
            if len(part):
                pieces.append(part)
            continue
        view = memoryview(part)
        pieces += [view[at : at + PIECE_BYTES] for at in range(0, len(view), PIECE_BYTES)]
    return pieces


def failure_of(future: asyncio.Future[Any]) -> BaseException | None:
    """Return the error to answer for a future that is done and has no result; None if it has a result."""
    if future.cancelled():
        # Not 503, after which a client repeats the request: it may have been carried out.
        return HttpError(504, "outcome_unknown", "the request was abandoned")
    return future.exception()


def _note_failure(future: asyncio.Future[Any]) -> None:
    """Log the failure of a request whose client is gone."""
    if not future.cancelled() and future.exception() is not None:
        log.info("a request whose client is gone failed: %r", future.exception())
