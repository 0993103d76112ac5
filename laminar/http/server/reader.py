"""The half of a server's connection that reads: bytes in, requests to the application.

A head is found, looked up among the last ones (or parsed), shown to the
application, and its body collected: small ones come with their head, larger
ones of known length are received straight into their own buffer, chunked ones
go through the decoder. What `handle` returns, a `Response` or a future, goes to
the answering half (`Outbound`). No task is made unless the application asks for
one, by a coroutine.

Timers belong to the server, which sweeps over its connections: `sweep` asks the
connection's `Patience` whether its peer has stood still for too long.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from enum import Enum
from typing import TYPE_CHECKING, Final, cast

from laminar.http.api.problems import Problem
from laminar.http.protocol.chunked import ChunkedDecoder, ChunkedError, TooLargeError
from laminar.http.protocol.content_encoding import decode_content
from laminar.http.protocol.messages import CONTINUE, OFF_LOOP_BYTES, Application, Request, Response
from laminar.http.protocol.request_head import (
    LONGEST_HEAD_BYTES,
    RequestHead,
    fault_of_unfinished_head,
    head_too_large,
)
from laminar.http.protocol.timeouts import Patience
from laminar.http.server.budget import address_of
from laminar.http.server.writer import GO_ON, Exchange, Outbound, bug

if TYPE_CHECKING:
    from laminar.http.server.server import HttpServer

# Behind a refusal the rest of the request is thrown away for a while: a socket
# closed over unread bytes resets the connection, and with it the answer.
LINGER_BYTES: Final = 16 << 20
# What so small a body costs beside its request isn't worth counting.
UNCOUNTED_BODY_BYTES: Final = 4096
# Stands where no head could be read: what was asked isn't known, but an answer is due.
_NO_HEAD: Final = RequestHead("GET", "/", {})


class Phase(Enum):
    """What the next byte from the peer belongs to."""

    HEAD = "head"
    BODY = "body"  # of known length, into `_body`
    CHUNKED = "chunked"
    LINGER = "linger"  # to nothing: the last answer has been given


class Connection(Outbound):
    """One accepted connection; made by `HttpServer.protocol_factory`."""

    __slots__ = (
        "_body",
        "_body_view",
        "_chunked",
        "_filled",
        "_head",
        "_linger_left",
        "_lingering",
        "_patience",
        "_phase",
        "_preparing",
        "_received",
    )

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server)
        self._phase = Phase.HEAD
        self._head: RequestHead | None = None  # of the body being received
        self._body = bytearray()
        self._body_view: memoryview | None = None
        self._filled = 0
        self._chunked: ChunkedDecoder | None = None
        self._linger_left = LINGER_BYTES
        self._lingering = False
        self._preparing = False  # a large body is parsed: nothing that comes after it is begun
        self._received = 0
        self._patience = Patience(server.now_s)

    # -- What the event loop calls ------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A peer connected."""
        self.transport = cast(asyncio.Transport, transport)
        high = self._server.limits.write_high_bytes
        self.transport.set_write_buffer_limits(high=high, low=high // 4)
        self._address = address_of(transport.get_extra_info("peername"))
        self._server.opened(self)
        self._patience.restart(self._server.now_s, received=0)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stopped = True
        self.transport = None
        self._body_view = None
        self._tail = b""
        self._give_up_pending()
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
        elif self._phase is Phase.LINGER:
            self._linger_left -= nbytes
            if self._linger_left < 0:
                self.abort()
            return
        else:
            data = self._server.scratch[:nbytes].tobytes()
            self._consume(self._tail + data if self._tail else data)
        if self._stopped:
            self._flush()
        elif self._out:
            self._flush_joined()

    def eof_received(self) -> bool:
        """The peer sends nothing more; what it asked for is still answered."""
        self._at_eof = True
        return self._busy

    def pause_writing(self) -> None:
        """More than the high mark waits to be sent: no new requests until it is gone."""
        self.paused_writing = True
        self._pause_reading()

    # -- Requests -------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """True between requests: nothing begun, nothing owed."""
        return self._phase is Phase.HEAD and not self._tail and not self._busy

    @property
    def _has_room(self) -> bool:
        limits = self._server.limits
        return (
            not self.paused_writing
            and not self._preparing
            and len(self._pending) < limits.max_pipelined
            and self._reserved < limits.connection_budget_bytes
            and self._expected + self._held < limits.connection_answer_bytes
        )

    def _consume(self, data: bytes) -> None:
        """Take as many requests as `data` holds; what is left over becomes the tail."""
        server = self._server
        position = 0
        size = len(data)
        self._tail = b""
        while position < size and not self._stopped:
            if self._phase is Phase.CHUNKED:
                position = self._feed_chunked(data, position)
                continue
            if not self._has_room:
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
            head = server.heads.get(raw)
            if head is None:
                try:
                    head = self._parse(raw)
                except Problem as problem:
                    server.counts.refused += 1
                    self._answer_last(_NO_HEAD, Response.problem(problem))
                    break
            position = self._begin(head, data, position)
        if position < size and not self._stopped and self._body_view is None:
            self._tail = data[position:]

    def _parse(self, raw: bytes) -> RequestHead:
        if len(raw) > LONGEST_HEAD_BYTES:
            raise head_too_large(len(raw))
        return self._server.heads.parse(raw.lstrip(b"\r\n"))

    def _unfinished_head(self, data: bytes, position: int) -> int:
        """Refuse what can't become a head, at once rather than by a time-out."""
        while data.startswith(b"\r\n", position):
            position += 2
        problem = fault_of_unfinished_head(data, position)
        if problem is not None:
            self._server.counts.refused += 1
            self._answer_last(_NO_HEAD, Response.problem(problem))
        return position

    def _begin(self, head: RequestHead, data: bytes, position: int) -> int:
        """A head has come: ask the application, then take or await its body. Returns the new position."""
        server = self._server
        server.counts.requests += 1
        length = head.content_length
        request = Request(head, b"", self)
        try:
            refusal = server.draining_response() if server.draining else None
            if refusal is None:
                if length >= UNCOUNTED_BODY_BYTES or head.chunked or head.coding:
                    server.check_body(head, self._address)
                refusal = server.app.head(request)
        except Problem as problem:
            refusal = Response.problem(problem)
        except Exception as error:  # noqa: BLE001  # logged there; other requests go on
            refusal = bug(request, error)
        if refusal is not None:
            return self._refuse(head, refusal, data, position)
        if head.chunked:
            self._chunked = ChunkedDecoder(limit_bytes=server.limits.max_body_bytes)
            self._await_body(head, Phase.CHUNKED)
            return position
        rest = len(data) - position
        if rest >= length:
            if length:
                request.body = data[position : position + length]
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
        self._await_body(head, Phase.BODY)
        return len(data)

    def _refuse(self, head: RequestHead, refusal: Response, data: bytes, position: int) -> int:
        """Answer without the body: skip it if it is here already, else end the connection."""
        self._server.counts.refused += 1
        if head.chunked or len(data) - position < head.content_length:
            self._answer_last(head, refusal)
            return len(data)
        self._answer(head, refusal)
        return position + head.content_length

    def _await_body(self, head: RequestHead, phase: Phase) -> None:
        """The body comes next; if the client waits to be asked for it, ask, in turn like any answer."""
        self._head = head
        self._phase = phase
        self._patience.restart(self._server.now_s, received=self._received)
        if not head.expects_continue:
            return
        if self._busy:
            self._pending.append(Exchange(head, GO_ON))
        else:
            self._out.append(CONTINUE)

    def _reserve(self, size: int) -> None:
        self._reserved += size
        self._server.bodies.take(self._address, size)

    def _body_received(self) -> None:
        """The body of known length is whole."""
        assert self._head is not None
        head, body = self._head, self._body
        self._head, self._body, self._body_view = None, bytearray(), None
        self._phase = Phase.HEAD
        self._dispatch(Request(head, body, self), reserved=len(body))

    def _feed_chunked(self, data: bytes, position: int) -> int:
        decoder, head = self._chunked, self._head
        assert decoder is not None and head is not None
        before = len(decoder.body)
        try:
            position = decoder.feed(data, position)
            grown = len(decoder.body) - before
            self._server.check_budget(self._address, grown, of=len(decoder.body))
            self._reserve(grown)
        except TooLargeError as error:
            problem = Problem("too_large", "the body is too large", field="body", value=error.received_bytes)
            problem.limit = error.limit_bytes
        except ChunkedError as error:
            problem = Problem("malformed", str(error), field="body")
        except Problem as error:
            problem = error
        else:
            if decoder.done:
                self._chunked, self._head, self._phase = None, None, Phase.HEAD
                self._dispatch(Request(head, decoder.body, self), reserved=len(decoder.body))
            return position
        self._server.counts.refused += 1
        self._answer_last(head, Response.problem(problem))
        return len(data)

    def _dispatch(self, request: Request, *, reserved: int = 0) -> None:
        """A request is whole: take the coding off its body, and hand it over."""
        coding, size = request.head.coding, len(request.body)
        if size <= OFF_LOOP_BYTES and not (coding and size):
            self._hand_over(request, reserved)
            return
        if size <= OFF_LOOP_BYTES:
            try:
                request.body = decode_content(request.body, coding, limit_bytes=OFF_LOOP_BYTES)
            except Problem as problem:
                if problem.code != "too_large":
                    self._answer(request.head, Response.problem(problem), reserved)
                    return
            else:
                self._hand_over(request, reserved)
                return
        self._prepare(request, reserved)

    def _prepare(self, request: Request, reserved: int) -> None:
        """Read a large body in another thread. Its place among the answers is taken now."""
        server = self._server
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._pending.append(Exchange(request.head, answer, reserved))
        if request.head.close:
            self._stopped = True
        answer.add_done_callback(self._settle_callback)
        self._preparing = True
        job = server.off_loop(_read_body, server.app, request, server.limits.max_body_bytes)
        job.add_done_callback(lambda job: self._prepared(request, answer, job))

    def _prepared(
        self, request: Request, answer: asyncio.Future[Response], job: asyncio.Future[None]
    ) -> None:
        """The body is read: hand the request over, then go on with what came after it.

        As any change that is taken up, it is carried out for a peer that is gone by now.
        """
        self._preparing = False
        try:
            job.result()
            if self.transport is not None:
                self._reserve_unfolded(answer, len(request.body))
            result = self._server.app.handle(request)
        except asyncio.CancelledError:
            answer.cancel()
        except Exception as error:  # noqa: BLE001  # answered by `_outcome`, as a bug if it is one
            _settle_by(answer, error)
        else:
            if isinstance(result, Response):
                _settle_by(answer, result)
            else:
                future = result if isinstance(result, asyncio.Future) else asyncio.ensure_future(result)
                future.add_done_callback(lambda done: _copy(done, answer))
        if self.transport is not None:
            self._go_on()

    def _reserve_unfolded(self, answer: asyncio.Future[Response], size: int) -> None:
        """Count a body that was coded as what it has become."""
        last = self._pending[-1]
        assert last.result is answer, "a request was begun while a body was parsed"
        if size > last.reserved:
            self._server.check_budget(self._address, size - last.reserved, of=size)
            self._reserve(size - last.reserved)
            last.reserved = size

    def _hand_over(self, request: Request, reserved: int) -> None:
        """Give a whole request to the application and write or keep its answer."""
        head = request.head
        try:
            result = self._server.app.handle(request)
        except Problem as problem:
            result = Response.problem(problem)
        except Exception as error:  # noqa: BLE001  # logged there; other requests go on
            result = bug(request, error)
        if isinstance(result, Response):
            self._answer(head, result, reserved)
            return
        future = result if isinstance(result, asyncio.Future) else asyncio.ensure_future(result)
        exchange = Exchange(head, future, reserved)
        self._pending.append(exchange)
        if head.close:
            self._stopped = True
        if head.method == "GET" or head.method == "HEAD":
            exchange.expected = request.answer_bytes
            self._expected += request.answer_bytes
            future.add_done_callback(lambda done: self._made(exchange))
        else:
            future.add_done_callback(self._settle_callback)

    # -- Ends -----------------------------------------------------------------------------

    def _answer_last(self, head: RequestHead, response: Response) -> None:
        """Answer, and take nothing more: where the next request begins isn't known or isn't wanted."""
        owed = sum([exchange.reserved for exchange in self._pending])
        if self._reserved > owed:
            self._release(self._reserved - owed)
        self._body_view, self._chunked, self._head = None, None, None
        self._phase = Phase.LINGER
        self._stopped = True
        self._answer(head, response)

    def _finish(self) -> None:
        """The last answer is written: end our side; the peer's is read out for a while if it may go on."""
        assert self.transport is not None
        if self._phase is not Phase.LINGER or self._at_eof:
            self.transport.close()
        elif not self._lingering:
            self._lingering = True
            self._patience.restart(self._server.now_s, received=self._received)
            self.transport.write_eof()
            self._resume_reading()

    def drain(self) -> None:
        """Close now if idle, else behind the answers that are owed."""
        if self.idle and self.transport is not None:
            self._stopped = True
            self.transport.close()

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
        if not self._has_room:
            return
        if self._tail:
            self._consume(self._tail)
        # A body that has begun is read to its end, also where it leaves no room for another.
        if self._phase is not Phase.HEAD or self._has_room:
            self._resume_reading()
        self._flush()
        if self._at_eof and not self._busy and self.transport is not None:
            self.transport.close()

    # -- Standing still -------------------------------------------------------------------

    def sweep(self, now_s: float) -> None:
        """Look for a peer that stands still. Called about every second, more often with short limits."""
        if self.transport is None:
            return
        patience, limits = self._patience, self._server.limits
        floor: float = limits.floor_bytes_per_s
        waiting = self.transport.get_write_buffer_size() + sum(map(len, self._unwritten))
        if waiting:
            drained = self._written - waiting
            window_s = limits.write_timeout_s
            floor = max(floor, waiting / limits.transfer_timeout_s)
            if patience.over_writing(now_s, drained=drained, window_s=window_s, floor_bytes_per_s=floor):
                self._server.counts.slow_readers += 1
                self._reset()
            return
        patience.written()
        received = self._received
        if self._phase is Phase.LINGER:
            if patience.over(now_s, limit_s=limits.linger_s) and not self._busy:
                self.abort()
        elif self._phase is not Phase.HEAD:
            window_s = limits.body_timeout_s
            if self._head is not None:
                floor = max(floor, self._head.content_length / limits.transfer_timeout_s)
            if patience.over_body(now_s, received=received, window_s=window_s, floor_bytes_per_s=floor):
                self._too_slow("body", window_s)
        elif self._busy:
            patience.restart(now_s, received=received)
        elif self._tail:
            if patience.over_head(now_s, limit_s=limits.head_timeout_s):
                self._too_slow("head", limits.head_timeout_s)
        elif patience.over_idle(now_s, received=received, limit_s=limits.idle_timeout_s):
            self.transport.close()

    def _reset(self) -> None:
        """Cut the connection, and let the kernel throw away what it still has for the peer."""
        sock = self.transport.get_extra_info("socket") if self.transport is not None else None
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()

    def _too_slow(self, what: str, limit_s: float) -> None:
        self._server.counts.timed_out += 1
        problem = Problem("too_slow", f"the {what} came too slowly", field=what, limit=round(limit_s * 1000))
        self._answer_last(self._head or _NO_HEAD, Response.problem(problem))
        self._flush()


def _read_body(app: Application, request: Request, limit_bytes: int) -> None:
    """In the thread for large bodies."""
    coding = request.head.coding
    if coding:
        request.body = decode_content(request.body, coding, limit_bytes=limit_bytes)
    request.parsed = app.parse(request)


def _settle_by(answer: asyncio.Future[Response], outcome: Response | Exception) -> None:
    """Unless nobody waits for it any more."""
    if answer.done():
        return
    if isinstance(outcome, Response):
        answer.set_result(outcome)
    else:
        answer.set_exception(outcome)


def _copy(done: asyncio.Future[Response], answer: asyncio.Future[Response]) -> None:
    if done.cancelled():
        answer.cancel()
        return
    error = done.exception()
    if error is None:
        _settle_by(answer, done.result())
    elif isinstance(error, Exception):
        _settle_by(answer, error)
    else:
        raise error
