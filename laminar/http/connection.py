"""The server's side of one HTTP/1.1 connection: bytes in, requests out, answers back in order.

A head is found, looked up among the last ones (or parsed), shown to the
application, and its body collected: small ones come with their head, larger
ones of known length are received straight into their own buffer, chunked ones
go through the decoder. What `handle` returns is a `Response` or a future; the
exchanges wait in a deque, and whenever the first is done, all that are done
behind it leave in one write. No task is made unless the application asks for
one (a coroutine) or streams a body.

Timers belong to the server, which sweeps over its connections: `sweep` compares
two counters with what they were a window ago.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from laminar.http.chunked import LAST_CHUNK, ChunkedDecoder, ChunkedError, TooLargeError, encode_chunk
from laminar.http.content import decode_content
from laminar.http.errors import Problem
from laminar.http.head import LONGEST_HEAD_BYTES, RequestHead
from laminar.http.messages import CONTINUE, Buffer, Request, Response, encode_headers, status_line

if TYPE_CHECKING:
    from laminar.http.server import HttpServer

log = logging.getLogger("laminar.http")

# Below this, head and body of an answer are joined: a copy is cheaper than another buffer to write.
JOINED_BODY_BYTES = 65536
# What so small a body costs beside its request isn't worth counting.
UNCOUNTED_BODY_BYTES = 4096
# Larger bodies leave in pieces of about this size, as the peer takes them.
PIECE_BYTES = 1 << 20
# Behind a refusal the rest of the request is thrown away for a while: a socket
# closed over unread bytes resets the connection, and with it the answer.
LINGER_BYTES = 16 << 20

Pending: TypeAlias = "tuple[RequestHead, asyncio.Future[Response] | Response, int]"


class Phase(Enum):
    """What the next byte from the peer belongs to."""

    HEAD = "head"
    BODY = "body"  # of known length, into `_body`
    CHUNKED = "chunked"
    LINGER = "linger"  # to nothing: an answer with `Connection: close` was given


class Connection(asyncio.BufferedProtocol):
    """One accepted connection; made by `HttpServer.protocol_factory`."""

    __slots__ = (
        "_at_eof",
        "_body",
        "_body_view",
        "_chunked",
        "_filled",
        "_head",
        "_last_answer",
        "_linger_left",
        "_lingering",
        "_mark_drained",
        "_mark_received",
        "_out",
        "_pending",
        "_phase",
        "_received",
        "_reserved",
        "_resume",
        "_server",
        "_settle_callback",
        "_since_s",
        "_stream",
        "_stuck",
        "_tail",
        "_unwritten",
        "_written",
        "context",
        "paused_reading",
        "paused_writing",
        "transport",
    )

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self.transport: asyncio.Transport | None = None
        self.context: Any = None
        self._phase = Phase.HEAD
        self._tail = b""  # bytes that came and aren't used yet
        self._head: RequestHead | None = None  # of the body being received
        self._body = bytearray()
        self._body_view: memoryview | None = None
        self._filled = 0
        self._chunked: ChunkedDecoder | None = None
        self._pending: deque[Pending] = deque()
        self._out: list[bytes] = []
        self._unwritten: deque[Buffer] = deque()  # rest of a large answer, its exchange done
        self._stream: asyncio.Task[None] | None = None
        self._resume: asyncio.Event | None = None
        self._settle_callback = self._settle
        self._last_answer = False  # nothing that comes is read any more
        self._at_eof = False
        self._linger_left = LINGER_BYTES
        self._lingering = False
        self._reserved = 0
        self.paused_reading = False
        self.paused_writing = False
        self._since_s = 0.0  # when the present window of `sweep` began
        self._mark_received = 0
        self._mark_drained = 0
        self._received = 0
        self._written = 0
        self._stuck = False

    # -- What the event loop calls ------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A peer connected."""
        self.transport = cast(asyncio.Transport, transport)
        limits = self._server.limits
        self.transport.set_write_buffer_limits(high=limits.write_high_bytes, low=limits.write_high_bytes // 4)
        self._since_s = asyncio.get_running_loop().time()  # the server's own is old while nobody is connected
        self._server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone. Reads that nobody waits for are given up; changes run to their end."""
        self._last_answer = True
        self.transport = None
        pending, self._pending = self._pending, deque()
        for head, result, _ in pending:
            if isinstance(result, asyncio.Future):
                if head.method in ("GET", "HEAD"):
                    result.cancel()
                else:
                    result.add_done_callback(_forget)
        if self._stream is not None:
            self._stream.cancel()
        if self._resume is not None:
            self._resume.set()
        self._unwritten.clear()
        self._server.release(self._reserved)
        self._reserved = 0
        self._body_view = None
        self._server.closed(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: the body's own buffer, or the one that all connections share."""
        if self._body_view is not None:
            return self._body_view[self._filled :]
        return self._server.scratch

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` have come into the buffer given last."""
        self._received += nbytes
        self._server.counts.bytes_in += nbytes
        if self._body_view is not None:
            self._filled += nbytes
            if self._filled == len(self._body):
                self._body_received()
            self._flush()
            return
        if self._phase is Phase.LINGER:
            self._linger_left -= nbytes
            if self._linger_left < 0:
                self.abort()
            return
        data = self._server.scratch[:nbytes].tobytes()
        self._consume(self._tail + data if self._tail else data)
        self._flush()

    def eof_received(self) -> bool:
        """The peer sends nothing more; what it asked for is still answered."""
        self._at_eof = True
        return self._busy

    def pause_writing(self) -> None:
        """More than the high mark waits to be sent: no new requests until it is gone."""
        self.paused_writing = True
        self._pause_reading()

    def resume_writing(self) -> None:
        """The peer took its bytes."""
        self.paused_writing = False
        if self._resume is not None:
            self._resume.set()
        if self._unwritten:
            self._write_rest()
            if self._unwritten:
                return
        self._settle()
        self._go_on()

    # -- Requests -------------------------------------------------------------------------

    @property
    def peer(self) -> str:
        """``host:port`` of the other end, or ``unix``."""
        name = self.transport.get_extra_info("peername") if self.transport is not None else None
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "unix"

    @property
    def _busy(self) -> bool:
        return bool(self._pending or self._unwritten or self._stream is not None)

    @property
    def idle(self) -> bool:
        """True between requests: nothing begun, nothing owed."""
        return self._phase is Phase.HEAD and not self._tail and not self._busy

    def _consume(self, data: bytes) -> None:
        """Take as many requests as `data` holds; what is left over becomes the tail."""
        server = self._server
        position = 0
        size = len(data)
        self._tail = b""
        while position < size and not self._last_answer:
            if self._phase is Phase.CHUNKED:
                position = self._feed_chunked(data, position)
                continue
            if self.paused_writing or len(self._pending) >= server.limits.max_pipelined:
                self._pause_reading()
                break
            end = data.find(b"\r\n\r\n", position)
            if end < 0:
                position = self._unfinished_head(data, position)
                break
            if end - position < 2:  # empty lines before a request are to be skipped (RFC 9112, 2.2)
                position += 2
                continue
            end += 4
            raw = data[position:end]
            position = end
            try:
                head = server.heads.get(raw)
                if head is None:
                    head = self._parse(raw)
            except Problem as problem:
                server.counts.refused += 1
                self._answer_last(RequestHead("GET", "/", {}), Response.problem(problem))
                break
            position = self._begin(head, data, position)
        if position < size and not self._last_answer and self._body_view is None:
            self._tail = data[position:]

    def _parse(self, raw: bytes) -> RequestHead:
        if len(raw) > LONGEST_HEAD_BYTES:
            raise _head_too_large(len(raw))
        return self._server.heads.parse(raw.lstrip(b"\r\n") if raw[0] in b"\r\n" else raw)

    def _unfinished_head(self, data: bytes, position: int) -> int:
        """Refuse what can't become a head, at once rather than by a time-out."""
        while data.startswith(b"\r\n", position):
            position += 2
        size = len(data) - position
        problem: Problem | None = None
        if size > LONGEST_HEAD_BYTES:
            problem = _head_too_large(size)
        elif size and not (65 <= data[position] <= 90 or data[position] == 13):
            problem = Problem(
                "malformed", "no HTTP request", field="head", value=data[position : position + 20]
            )
        elif data.find(b"\n\n", position) >= 0 or data.find(b"\n\r\n", position) >= 0:
            problem = Problem("malformed", "lines end with CR LF", field="head")
        if problem is not None:
            self._server.counts.refused += 1
            self._answer_last(RequestHead("GET", "/", {}), Response.problem(problem))
        return position

    def _begin(self, head: RequestHead, data: bytes, position: int) -> int:
        """A head has come: ask the application, then take or await its body. Returns the new position."""
        server = self._server
        server.counts.requests += 1
        length = head.content_length
        request = Request(head, b"", self)
        try:
            refusal = server.draining_response() if server.draining else None
            if refusal is None and (length or head.chunked):
                server.check_body(head)
            if refusal is None:
                refusal = server.app.head(request)
        except Problem as problem:
            refusal = Response.problem(problem)
        except Exception as error:  # noqa: BLE001  # logged there; other requests go on
            refusal = _bug(request, error)
        if refusal is not None:
            server.counts.refused += 1
            whole = not head.chunked and len(data) - position >= length
            if not whole:
                self._answer_last(head, refusal)
                return len(data)
            self._answer(head, refusal)
            return position + length
        if not length and not head.chunked:
            self._dispatch(request)
            return position
        self._head = head
        if head.chunked:
            self._chunked = ChunkedDecoder(limit_bytes=server.limits.max_body_bytes)
            self._phase = Phase.CHUNKED
            self._since_s, self._mark_received = server.now_s, self._received
            self._continue(head)
            return position
        rest = len(data) - position
        if rest >= length:
            request.body = data[position : position + length]
            self._head = None
            if length < UNCOUNTED_BODY_BYTES:
                self._dispatch(request)
            else:
                self._reserve(length)
                self._dispatch(request, reserved=length)
            return position + length
        self._reserve(length)
        self._body = bytearray(length)
        self._body_view = memoryview(self._body)
        self._body_view[:rest] = data[position:]
        self._filled = rest
        self._phase = Phase.BODY
        self._since_s, self._mark_received = server.now_s, self._received
        self._continue(head)
        return len(data)

    def _continue(self, head: RequestHead) -> None:
        """Ask for the body, if the client waits for that; in its turn, as any answer."""
        if not head.expects_continue:
            return
        if self._busy:
            self._pending.append((head, _GO_ON, 0))
        else:
            self._out.append(CONTINUE)

    def _reserve(self, size: int) -> None:
        self._reserved += size
        self._server.reserve(size)

    def _body_received(self) -> None:
        """The body of known length is whole."""
        assert self._head is not None
        head, body = self._head, self._body
        self._head, self._body, self._body_view = None, bytearray(), None
        self._filled = 0
        self._phase = Phase.HEAD
        self._dispatch(Request(head, body, self), reserved=len(body))

    def _feed_chunked(self, data: bytes, position: int) -> int:
        decoder, head = self._chunked, self._head
        assert decoder is not None and head is not None
        before = len(decoder.body)
        try:
            position = decoder.feed(data, position)
            grown = len(decoder.body) - before
            self._server.check_budget(grown)
            self._reserve(grown)
        except TooLargeError as error:
            problem = Problem("too_large", field="body", value=error.received_bytes, limit=error.limit_bytes)
        except ChunkedError as error:
            problem = Problem("malformed", str(error), field="body")
        except Problem as error:
            problem = error
        else:
            if decoder.done:
                self._chunked, self._head, self._phase = None, None, Phase.HEAD
                self._dispatch(Request(head, decoder.body, self), reserved=len(decoder.body))
            return position
        self._chunked, self._head = None, None
        self._server.counts.refused += 1
        self._answer_last(head, Response.problem(problem))
        return len(data)

    def _dispatch(self, request: Request, *, reserved: int = 0) -> None:
        """Hand a whole request to the application and keep or write its answer."""
        try:
            if "content-encoding" in request.headers and len(request.body):
                request.body = decode_content(
                    request.body,
                    request.headers["content-encoding"],
                    limit_bytes=self._server.limits.max_body_bytes,
                )
            result = self._server.app.handle(request)
        except Problem as problem:
            result = Response.problem(problem)
        except Exception as error:  # noqa: BLE001  # logged there; other requests go on
            result = _bug(request, error)
        if isinstance(result, Response):
            self._answer(request.head, result, reserved)
            return
        future = _as_future(result)
        self._pending.append((request.head, future, reserved))
        if request.head.close:
            self._last_answer = True
        future.add_done_callback(self._settle_callback)

    # -- Answers --------------------------------------------------------------------------

    def _answer(self, head: RequestHead, response: Response, reserved: int = 0) -> None:
        """Answer at once, or behind those that are owed before."""
        if head.close or response.close:
            self._last_answer = True
        if self._busy:
            self._pending.append((head, response, reserved))
        else:
            self._release(reserved)
            self._write(head, response)

    def _answer_last(self, head: RequestHead, response: Response) -> None:
        """Answer, and read nothing more: where the next request begins can't be known or isn't wanted."""
        response = Response(
            response.status, response.headers, response.body, header_block=response.header_block, close=True
        )
        self._body_view = None
        self._last_answer = True
        if self._phase is not Phase.HEAD:
            self._release(self._reserved - sum(reserved for _, _, reserved in self._pending))
        self._phase = Phase.LINGER
        self._answer(head, response)

    def _settle(self, _done: object = None) -> None:
        """Write the answers that are due: the first exchange and all done ones behind it."""
        pending = self._pending
        while pending and not self._unwritten and self._stream is None:
            head, result, reserved = pending[0]
            if isinstance(result, Response):
                response = result
            elif result.done():
                response = _outcome(head, result)
            else:
                break
            pending.popleft()
            self._release(reserved)
            self._write(head, response)
        self._flush()
        if self.paused_reading or self._tail or self._at_eof:
            self._go_on()

    def _release(self, reserved: int) -> None:
        if reserved:
            self._reserved -= reserved
            self._server.release(reserved)

    def _write(self, head: RequestHead, response: Response) -> None:
        """Encode an answer into `_out`; a large body is begun, a streamed one gets its task."""
        if response is _GO_ON:
            self._out.append(CONTINUE)
            return
        server = self._server
        status = response.status
        server.counts.answered(status)
        close = response.close or head.close or server.draining
        if close:
            self._last_answer = True
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
        if status >= 200 and status != 204 and status != 304:
            block += b"Content-Length: %d\r\n\r\n" % size
        else:
            block += b"\r\n"
            size = 0
        server.counts.bytes_out += len(block) + size
        self._written += len(block) + size
        if head.method == "HEAD" or not size:
            self._out.append(block)
        elif size <= JOINED_BODY_BYTES:
            self._out.append(block)
            self._out.extend(cast("Sequence[bytes]", parts))
        else:
            self._out.append(block)
            self._flush_joined()
            self._unwritten.extend(_pieces(parts))
            self._write_rest()

    def _block(self, head: RequestHead, response: Response, close: bool) -> bytes:
        block = status_line(response.status) + response.header_block + self._server.date_block
        if response.headers:
            block += encode_headers(response.headers)
        if close:
            block += b"Connection: close\r\n"
        elif not head.http11:
            block += b"Connection: keep-alive\r\n"
        return block

    def _flush(self) -> None:
        """Write what this turn made, together; close behind the last answer."""
        if self._out:
            self._flush_joined()
        if self._last_answer and not self._busy and self.transport is not None:
            self._finish()

    def _flush_joined(self) -> None:
        out, self._out = self._out, []
        if self.transport is not None:
            self.transport.write(out[0] if len(out) == 1 else b"".join(out))

    def _write_rest(self) -> None:
        """Write pieces of a large answer until the transport has enough."""
        while self._unwritten and not self.paused_writing and self.transport is not None:
            self.transport.write(self._unwritten.popleft())

    def _finish(self) -> None:
        """The last answer is written: end our side; the peer's is read out for a while if it may go on."""
        assert self.transport is not None
        if self._phase is not Phase.LINGER or self._at_eof:
            if not self.transport.is_closing():
                self.transport.close()
        elif not self._lingering:
            self._lingering = True
            self._since_s = self._server.now_s
            self.transport.write_eof()
            self._resume_reading()

    def _begin_stream(
        self, head: RequestHead, response: Response, body: AsyncIterator[Buffer], close: bool
    ) -> None:
        chunked = head.http11
        if not chunked:
            self._last_answer = close = True
        block = self._block(head, response, close)
        if chunked:
            block += b"Transfer-Encoding: chunked\r\n"
        self._out.append(block + b"\r\n")
        self._flush_joined()
        empty = head.method == "HEAD"
        loop = asyncio.get_running_loop()
        self._stream = loop.create_task(self._send_stream(head, body, chunked=chunked, empty=empty))

    async def _send_stream(
        self, head: RequestHead, body: AsyncIterator[Buffer], *, chunked: bool, empty: bool
    ) -> None:
        """Send what the iterator gives, no faster than the peer takes it. A failure cuts the connection:
        a body that just ended would look whole."""
        try:
            if not empty:
                async for part in body:
                    await self._writable()
                    if self.transport is None:
                        return
                    for piece in encode_chunk(part) if chunked else [part]:
                        self.transport.write(piece)
                        self._written += len(piece)
                        self._server.counts.bytes_out += len(piece)
                if chunked and self.transport is not None:
                    self.transport.write(LAST_CHUNK)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("streaming the answer to %s %s failed", head.method, head.target)
            self.abort()
        finally:
            close = getattr(body, "aclose", None)
            if close is not None:
                await close()
            self._stream = None
        self._settle()
        self._go_on()

    async def _writable(self) -> None:
        while self.paused_writing and self.transport is not None:
            self._resume = asyncio.Event()
            await self._resume.wait()

    # -- Pauses and ends ------------------------------------------------------------------

    def _pause_reading(self) -> None:
        if self.paused_reading or self._at_eof or self._body_view is not None:
            return
        if self.transport is not None and not self.transport.is_closing():
            self.paused_reading = True
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        if self.paused_reading and self.transport is not None and not self.transport.is_closing():
            self.paused_reading = False
            if not self._at_eof:
                self.transport.resume_reading()

    def _go_on(self) -> None:
        """There is room again: take the requests that waited in the tail, then read on."""
        if self.paused_writing or len(self._pending) >= self._server.limits.max_pipelined:
            return
        if self._tail:
            self._consume(self._tail)
        if not self.paused_writing and len(self._pending) < self._server.limits.max_pipelined:
            self._resume_reading()
        self._flush()
        if self._at_eof and not self._busy and self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Cut the connection, with whatever is still owed."""
        if self.transport is not None:
            self.transport.abort()

    def drain(self) -> None:
        """Close now if idle, else behind the answers that are owed."""
        if self.idle and self.transport is not None:
            self._last_answer = True
            self.transport.close()

    def sweep(self, now_s: float) -> None:
        """Look for a peer that stands still. Called about every second, or more often with short limits."""
        limits = self._server.limits
        if self.transport is None:
            return
        waiting = self.transport.get_write_buffer_size()
        if waiting or self._unwritten:
            self._sweep_writing(now_s, self._written - waiting - sum(map(len, self._unwritten)))
            return
        self._stuck = False
        elapsed_s = now_s - self._since_s
        if self._phase is Phase.LINGER:
            if elapsed_s > limits.linger_s and not self._busy:
                self.abort()
        elif self._phase is not Phase.HEAD:
            if elapsed_s > limits.body_timeout_s:
                if self._received - self._mark_received < limits.floor_bytes_per_s * elapsed_s:
                    self._too_slow("body", limits.body_timeout_s)
                self._since_s, self._mark_received = now_s, self._received
        elif self._busy or (self._received != self._mark_received and not self._tail):
            self._since_s, self._mark_received = now_s, self._received
        elif self._tail:
            # A head has begun. Its window starts with the first sweep that sees it, and no byte prolongs it.
            if self._mark_received != -1:
                self._since_s, self._mark_received = now_s, -1
            elif elapsed_s > limits.head_timeout_s:
                self._too_slow("head", limits.head_timeout_s)
        elif elapsed_s > limits.idle_timeout_s:
            self.transport.close()

    def _sweep_writing(self, now_s: float, drained: int) -> None:
        limits = self._server.limits
        if not self._stuck:
            self._stuck = True
            self._since_s, self._mark_drained = now_s, drained
            return
        elapsed_s = now_s - self._since_s
        if elapsed_s > limits.write_timeout_s:
            if drained - self._mark_drained < limits.floor_bytes_per_s * elapsed_s:
                self._server.counts.slow_readers += 1
                self.abort()
            self._since_s, self._mark_drained = now_s, drained

    def _too_slow(self, what: str, limit_s: float) -> None:
        self._server.counts.timed_out += 1
        problem = Problem("too_slow", f"the {what} came too slowly", field=what, limit=round(limit_s * 1000))
        head = self._head or RequestHead("GET", "/", {})
        self._head, self._chunked = None, None
        self._answer_last(head, Response.problem(problem))
        self._flush()


# Stands in the queue for an interim answer.
_GO_ON: Final = Response(100)


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


def _head_too_large(size: int) -> Problem:
    return Problem(
        "headers_too_large", "the head is too large", field="head", value=size, limit=LONGEST_HEAD_BYTES
    )


def _as_future(result: Awaitable[Response]) -> asyncio.Future[Response]:
    return asyncio.ensure_future(result)


def _outcome(head: RequestHead, future: asyncio.Future[Response]) -> Response:
    """What a done future says, as an answer."""
    if future.cancelled():
        return Response.problem(Problem("draining", "the request was given up", outcome="unknown"))
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, Problem):
        return Response.problem(error)
    return _bug(head, error)


def _bug(request: Request | RequestHead, error: BaseException) -> Response:
    """A mistake of ours: logged under an id that the answer names."""
    identity = uuid.uuid4().hex[:12]
    log.error("bug %s in %s %s", identity, request.method, request.path, exc_info=error)
    return Response.problem(Problem("bug", f"see {identity} in the log of this node"))


def _forget(future: asyncio.Future[Response]) -> None:
    """Take note of a failure that nobody is left to hear of."""
    if not future.cancelled() and future.exception() is not None:
        log.info("a request whose client is gone failed: %r", future.exception())
