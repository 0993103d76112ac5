"""The half of a server's connection that reads: it makes requests from bytes, and passes them on.

For each request it finds the head, looks it up in the cache of heads or parses it, passes it to the
application, and collects the body. Small bodies arrive with their head; larger ones of known length are
received directly into a buffer of their own; chunked ones are decoded. The result of the application's
`handle`, a `Response` or a future, is passed to the writing half (`ResponseWriter`). A task is made only if
the application returns a coroutine.

The server has the only timer, and calls `sweep` of each connection, which asks the connection's
`StallDetector` whether its peer has stalled for too long.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import socket
import struct
import termios
import time
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, cast

from laminar.http.protocol.chunked import ChunkedDecoder, ChunkedError, TooLargeError
from laminar.http.protocol.content_encoding import decode_content
from laminar.http.protocol.errors import HttpError
from laminar.http.protocol.flows import ALONE, REQUEST, REQUEST_SHIFT, Flow
from laminar.http.protocol.messages import (
    CONTINUE,
    OFF_LOOP_BYTES,
    USUAL_ANSWER_BYTES,
    WAIT,
    Application,
    Later,
    Request,
    Response,
)
from laminar.http.protocol.request_head import (
    LONGEST_HEAD_BYTES,
    RequestHead,
    fault_of_unfinished_head,
    head_too_large,
)
from laminar.http.protocol.timeouts import StallDetector
from laminar.http.server.budget import address_of
from laminar.http.server.state import ServerState
from laminar.http.server.writer import GO_ON, Exchange, ResponseWriter

# After a refusal, up to this number of bytes of the request are read and discarded: closing a socket with
# unread bytes would reset the connection, and the peer could lose the answer.
LINGER_BYTES: Final = 16 << 20
# A body this small costs little beside its request, so it is not counted.
UNCOUNTED_BODY_BYTES: Final = 4096
# Bytes that are read at once for a flow that has used up its turn, or on a connection that was muted.
WAITING_BYTES: Final = 4096
# Reads in progress that a flow may have, for each that there is room for.
FREE_SHARE: Final = 4
# Most bytes of a refused body that are awaited and discarded.
SKIPPED_BYTES: Final = 65536
# Substitute for a head that could not be read, for which an answer is due.
_NO_HEAD: Final = RequestHead("GET", "/", {})


class Phase(Enum):
    """What a connection expects to receive next: a head, a body, or bytes to be discarded."""

    HEAD = "head"
    BODY = "body"  # of known length, into `_body`
    CHUNKED = "chunked"
    LINGER = "linger"  # to nothing: the last answer has been given


class Connection(asyncio.BufferedProtocol):
    """The protocol of one accepted connection, for asyncio; created by `HttpServer.protocol_factory`.

    It reads requests and passes them to the application; its `ResponseWriter` sends the answers in order.
    """

    __slots__ = (
        "_at_eof",
        "_body",
        "_body_view",
        "_chunked",
        "_ending",
        "_filled",
        "_head",
        "_is_shared",
        "_is_stranger",
        "_is_tls",
        "_linger_left",
        "_lingering",
        "_muted",
        "_paused_reading",
        "_phase",
        "_preparing",
        "_received",
        "_server",
        "_stalls",
        "_tail",
        "_to_skip",
        "_waits_turn",
        "_was_muted",
        "_writer",
        "context",
        "flow",
        "transport",
    )

    def __init__(self, server: ServerState) -> None:
        self.context: Any = None  # the application's
        self.flow: Flow | None = None  # the application says which, with the first head
        self.transport: asyncio.Transport | None = None
        self._server = server
        self._writer = ResponseWriter(server, on_room=self._go_on, on_end=self._finish)
        self._at_eof = False
        self._is_shared = False  # by several flows, as the connection of a proxy is
        self._is_stranger = True
        self._is_tls = False
        self._ending = False  # closed by the loop, which has waited for the peer for a whole idle time
        self._tail = b""  # bytes that came and aren't used yet
        self._paused_reading = False
        self._waits_turn = False
        self._muted = False  # no request is begun for a while: one was too many
        self._was_muted = False
        self._phase = Phase.HEAD
        self._head: RequestHead | None = None  # of the body being received
        self._body = bytearray()
        self._body_view: memoryview | None = None
        self._filled = 0
        self._chunked: ChunkedDecoder | None = None
        self._to_skip = 0  # bytes of a refused body that are still to come
        self._linger_left = LINGER_BYTES
        self._lingering = False
        self._preparing = False  # a large body is parsed: nothing that comes after it is begun
        self._received = 0
        self._stalls = StallDetector(server.now_s)

    # -- What the event loop calls ------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the new connection with the server, and keep its transport."""
        self.transport = cast(asyncio.Transport, transport)
        self._is_tls = transport.get_extra_info("sslcontext") is not None
        high = self._server.limits.write_high_bytes
        self.transport.set_write_buffer_limits(high=high, low=high // 4)
        self._writer.transport = self.transport
        self._writer.address = address_of(transport.get_extra_info("peername"))
        self._server.opened(self)
        self._stalls.restart(self._server.now_s, received=0)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the ended connection from the server, and abandon its outstanding answers."""
        self._writer.stopped = True
        self.transport = self._writer.transport = None
        self._body_view = None
        self._tail = b""
        if self.flow is not None:
            if self._muted:
                self._muted = False
                self._server.mutes.drop(self.flow, self)
            self._server.turns.leave(self.flow)
            self.flow = self._writer.flow = None
        self._writer.abandon()
        self._server.closed(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer of the next bytes: the body's own, or the one that all connections share."""
        if self._body_view is not None:
            return self._body_view[self._filled :]
        # What comes is kept until the flow's next turn, or may have to be refused, request by request.
        if self._was_muted or (self.flow is not None and self.flow.is_spent):
            return self._server.scratch[:WAITING_BYTES]
        return self._server.scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Process the `nbytes` that were received into the buffer that `get_buffer` returned last."""
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
        writer = self._writer
        if writer.stopped:
            writer.flush()
        elif writer.out:
            writer.flush_joined()

    def eof_received(self) -> bool:
        """Note that the peer has closed its side; return True to keep the connection open for writing.

        That is so while answers are outstanding, except with TLS (the loop closes the connection), and except
        if one of the requests has `ends_with_peer` set: a peer that was killed looks the same.
        """
        self._at_eof = self._writer.room_awaited = True
        busy = self._writer.busy or self._waits_turn
        return not self._is_tls and busy and not self._writer.ends_with_peer

    def pause_writing(self) -> None:
        """Stop reading and beginning requests: more bytes of answers wait than the transport's high mark."""
        self._writer.paused = True
        self._pause_reading()

    def resume_writing(self) -> None:
        """Write further answers and begin requests again: few bytes of answers wait to be sent."""
        self._writer.resume()

    def join(self, flow: Flow) -> None:
        """Assign this connection to `flow`, and remove it from the flow that it had before."""
        if self.transport is None:
            return
        if self.flow is not None:
            self._server.turns.leave(self.flow)
            self._is_shared = self._is_shared or not (self.flow.are_strangers or flow.are_strangers)
        self.flow = self._writer.flow = flow
        self._server.turns.join(flow)
        if self._is_stranger and not flow.are_strangers:
            self._is_stranger = False
            self._server.known(self)

    def take_turn(self) -> None:
        """Begin the requests that have arrived, up to the flow's share of this turn of the loop."""
        self._waits_turn = False
        self._go_on()

    def read_refusal(self) -> tuple[int, int] | None:
        """Return why the connection's flow may not begin another read; None if it may.

        The reason is (number of its reads in progress, limit). The limit is a multiple of the reads that the
        server still has room for: a flow that is alone can have four fifths of the server's `max_reads`.
        Without a flow both numbers are the server's. A refusal is counted.
        """
        server, flow = self._server, self.flow
        under_way, most = server.reads, server.limits.max_reads
        if flow is not None:
            under_way, most = flow.reads, FREE_SHARE * max(0, most - under_way)
        if under_way < most:
            return None
        server.counts.reads_refused += 1
        return under_way, most

    @property
    def peer(self) -> str:
        """The peer's address as ``host:port``, or ``unix`` for a Unix socket."""
        name = self.transport.get_extra_info("peername") if self.transport is not None else None
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "unix"

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """The client's certificate, which the handshake of TLS has verified; None if it showed none.

        As `ssl.SSLSocket.getpeercert` gives it.
        """
        return (self.transport.get_extra_info("peercert") or None) if self.transport is not None else None

    def abort(self) -> None:
        """Cut the connection; answers not yet sent are lost."""
        self._writer.abort()

    # -- Requests -------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no request has begun and no answer is outstanding."""
        return self._phase is Phase.HEAD and not self._tail and not self._writer.busy

    @property
    def _has_room(self) -> bool:
        limits, writer = self._server.limits, self._writer
        return (
            not writer.paused
            and not self._preparing
            and not self._waits_turn
            and not self._muted
            and len(writer.pending) < limits.max_pipelined
            and writer.reserved_bytes < limits.connection_budget_bytes
            and writer.expected_bytes + writer.held_bytes < limits.connection_answer_bytes
        )

    def _consume(self, data: bytes) -> None:
        """Begin all requests in `data`; keep bytes that are incomplete or must wait in `_tail`."""
        server = self._server
        position = begun = 0
        size = len(data)
        if self._to_skip:
            position = min(self._to_skip, size)
            self._to_skip -= position
        self._tail = b""
        while position < size and not self._writer.stopped:
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
            if end == position:  # empty lines before a request are to be skipped (RFC 9112, 2.2)
                position += 2
                continue
            flow = self.flow
            if flow is not None:
                if flow.is_spent:
                    self._await_turn(flow)
                    break
            elif begun == ALONE:
                self._await_pass()
                break
            start = position
            end += 4
            raw = data[position:end]
            position = end
            head = server.heads.get(raw)
            if head is None:
                try:
                    head = self._parse(raw)
                except HttpError as error:
                    server.counts.refused += 1
                    self._answer_last(_NO_HEAD, server.answer_error(error, _NO_HEAD))
                    break
            position = self._begin(head, data, position)
            if position < 0:  # the connection's flow has had its turn
                position = start
                break
            begun += 1
        if position < size and not self._writer.stopped and self._body_view is None:
            self._tail = data[position:]
            self._writer.room_awaited = True

    def _await_turn(self, flow: Flow) -> None:
        """Begin no request until the flow's next turn; if bytes arrive before, reading is paused."""
        self._waits_turn = True
        self._server.turns.wait(flow, self)

    def _await_pass(self) -> None:
        """Begin no further request until the loop has served all other sockets (if there is no flow)."""
        self._waits_turn = True
        asyncio.get_running_loop().call_soon(self.take_turn)

    def _mute(self, flow: Flow, wait_s: float) -> None:
        """Begin no request for `wait_s` seconds or more, after one was refused because of the rate limit.

        If bytes arrive before then, reading is paused; a client that waits as the refusal asks notices
        nothing. Each refusal costs the loop time: otherwise a client that ignores them would keep it busy.
        """
        self._muted = self._was_muted = True
        self._server.counts.muted += 1
        self._server.mutes.mute(flow, self, wait_s)

    def unmute(self) -> None:
        """Begin requests again after a pause by `_mute`, first those that arrived during it."""
        if self._muted and self.flow is not None:
            self._muted = False
            self._server.mutes.drop(self.flow, self)
            self._go_on()

    def _parse(self, raw: bytes) -> RequestHead:
        if len(raw) > LONGEST_HEAD_BYTES:
            raise head_too_large(len(raw))
        while raw.startswith(b"\r\n"):
            raw = raw[2:]
        return self._server.heads.parse(raw)

    def _unfinished_head(self, data: bytes, position: int) -> int:
        """Answer an error if the bytes from `position` cannot become a head; return where the head begins."""
        while data.startswith(b"\r\n", position):
            position += 2
        error = fault_of_unfinished_head(data, position)
        if error is not None:
            self._server.counts.refused += 1
            self._answer_last(_NO_HEAD, self._server.answer_error(error, _NO_HEAD))
        return position

    def _begin(self, head: RequestHead, data: bytes, position: int) -> int:
        """Pass a head to the application, then take or await the body; return the position after the request.

        Return -1 if the head must wait for the next turn: the request's flow has used up its share.
        """
        server = self._server
        server.counts.requests += 1
        length = head.content_length
        request = Request(head, b"", self)
        try:
            refusal = server.draining_response(head) if server.draining else None
            if refusal is None:
                if length >= UNCOUNTED_BODY_BYTES or head.chunked or head.coding:
                    server.check_body(head, self._writer.address)
                refusal = server.app.head(request)
        except Exception as error:  # noqa: BLE001  # answered, and logged if unexpected; other requests go on
            refusal = server.answer_error(error, head)
        flow = self.flow
        if flow is not None:
            if refusal is WAIT:
                server.counts.requests -= 1
                self._await_turn(flow)
                return -1
            server.turns.take(flow, REQUEST + REQUEST * (length >> REQUEST_SHIFT))
        if refusal is not None:
            return self._refuse(head, refusal, data, position)
        if flow is None and self._is_stranger:
            self._is_stranger = False
            server.known(self)
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
        """Send a refusal without using the body; return the position after the bytes of the request.

        A body that has arrived already is skipped; otherwise the connection ends after the answer. But a
        client that only exceeds its rate keeps its connection also while a small body is still on its way,
        because a new connection would cost more than the refusal.
        """
        self._server.counts.refused += 1
        rest = len(data) - position - head.content_length
        stays = refusal.mute_s > 0 and not (head.close or self._at_eof)
        is_skipped = stays and -rest <= SKIPPED_BYTES and not head.expects_continue
        if head.chunked or (rest < 0 and not is_skipped):
            self._answer_last(head, refusal)
            return len(data)
        self._writer.answer(head, refusal)
        self._to_skip = max(0, -rest)
        # Who has sent more than is kept gets its other refusals at once. What others ask waits for no one.
        flow = self.flow
        if stays and flow is not None and not self._is_shared:
            if flow.left > 0:  # its other connections go on in later turns
                self._server.turns.take(flow, flow.left)
            if rest <= WAITING_BYTES:
                self._mute(flow, refusal.mute_s)
        return min(len(data), position + head.content_length)

    def _await_body(self, head: RequestHead, phase: Phase) -> None:
        """Note that a body is awaited; if the client expects 100 Continue, send it after earlier answers."""
        self._head = head
        self._phase = phase
        self._stalls.restart(self._server.now_s, received=self._received)
        if not head.expects_continue:
            return
        if self._writer.busy:
            self._writer.pending.append(Exchange(head, GO_ON))
        else:
            self._writer.out.append(CONTINUE)

    def _reserve(self, size: int) -> None:
        self._writer.reserved_bytes += size
        self._server.bodies.take(self._writer.address, size)

    def _body_received(self) -> None:
        """Dispatch the request whose body of known length is complete."""
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
            self._server.check_budget(self._writer.address, grown, of=len(decoder.body))
            self._reserve(grown)
        except TooLargeError as large:
            error = HttpError(413, "too_large", "the body is too large", field="body")
            error.value, error.limit = large.received_bytes, large.limit_bytes
        except ChunkedError as malformed:
            error = HttpError(400, "malformed", str(malformed), field="body")
        except HttpError as refused:
            error = refused
        else:
            if decoder.done:
                self._chunked, self._head, self._phase = None, None, Phase.HEAD
                self._dispatch(Request(head, decoder.body, self), reserved=len(decoder.body))
            return position
        self._server.counts.refused += 1
        self._answer_last(head, self._server.answer_error(error, head))
        return len(data)

    def _dispatch(self, request: Request, *, reserved: int = 0) -> None:
        """Decode the body of a complete request, and hand the request over."""
        coding, size = request.head.coding, len(request.body)
        if not (coding and size) and (size <= OFF_LOOP_BYTES or not self._server.app.parses_long(request)):
            self._hand_over(request, reserved)
            return
        if size <= OFF_LOOP_BYTES:
            try:
                request.body = decode_content(request.body, coding, limit_bytes=OFF_LOOP_BYTES)
            except HttpError as error:
                if error.reason != "too_large":
                    self._writer.answer(
                        request.head, self._server.answer_error(error, request.head), reserved
                    )
                    return
            else:
                self._hand_over(request, reserved)
                return
        self._prepare(request, reserved)

    def _prepare(self, request: Request, reserved: int) -> None:
        """Decode and parse a large body in another thread; queue its answer now, to keep the order."""
        server = self._server
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._writer.pending.append(Exchange(request.head, answer, reserved, time.perf_counter()))
        if request.head.close:
            self._writer.stopped = True
        answer.add_done_callback(self._writer.write_callback)
        self._preparing = True
        job = server.off_loop(_read_body, server.app, request, server.limits.max_body_bytes)
        job.add_done_callback(lambda job: self._prepared(request, answer, job))

    def _prepared(
        self, request: Request, answer: asyncio.Future[Response], job: asyncio.Future[None]
    ) -> None:
        """Pass a request whose large body was parsed to the application; then begin the requests after it.

        The request is passed on even if the peer is gone by now.
        """
        self._preparing = False
        try:
            job.result()
            if self.transport is not None:
                self._reserve_unfolded(answer, len(request.body))
            result = self._server.app.handle(request)
        except asyncio.CancelledError:
            answer.cancel()
        except Exception as error:  # noqa: BLE001  # answered, and logged if unexpected, by the writer
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
        """Count a decoded body with its real size. Raises `HttpError` if the budget has no room for it."""
        last = self._writer.pending[-1]
        assert last.result is answer, "a request was begun while a body was parsed"
        if size > last.reserved:
            self._server.check_budget(self._writer.address, size - last.reserved, of=size)
            self._reserve(size - last.reserved)
            last.reserved = size

    def _hand_over(self, request: Request, reserved: int) -> None:
        """Pass a whole request to the application, and write its answer or queue the future of it."""
        head, began_s = request.head, time.perf_counter()
        try:
            result = self._server.app.handle(request)
        except Exception as error:  # noqa: BLE001  # answered, and logged if unexpected; other requests go on
            result = self._server.answer_error(error, head)
        if isinstance(result, Response):
            self._writer.answer(head, result, reserved, began_s)
            return
        if type(result) is Later:
            future = result.future
            exchange = Exchange(head, future, reserved, began_s)
            exchange.make = result.make
        else:
            future = result if isinstance(result, asyncio.Future) else asyncio.ensure_future(result)
            exchange = Exchange(head, future, reserved, began_s)
            exchange.ends_with_peer = request.ends_with_peer
        self._writer.pending.append(exchange)
        if head.close:
            self._writer.stopped = True
        if request.answer_bytes or head.method == "GET" or head.method == "HEAD":
            self._writer.begin_read(exchange, request.answer_bytes or USUAL_ANSWER_BYTES)
            future.add_done_callback(lambda done: self._writer.made(exchange))
        else:
            future.add_done_callback(self._writer.write_callback)

    # -- Ends -----------------------------------------------------------------------------

    def _answer_last(self, head: RequestHead, response: Response) -> None:
        """Send `response` as the last answer of this connection, and begin no further request.

        It is for errors after which it is unknown where the next request begins, and for refused bodies.
        """
        owed = sum([exchange.reserved for exchange in self._writer.pending])
        if self._writer.reserved_bytes > owed:
            self._writer.release(self._writer.reserved_bytes - owed)
        self._body_view, self._chunked, self._head = None, None, None
        self._phase = Phase.LINGER
        self._writer.stopped = True
        self._writer.answer(head, response)

    def _finish(self) -> None:
        """End our side after the last answer; read and discard what the peer still sends, for a while."""
        assert self.transport is not None
        if self._phase is not Phase.LINGER or self._at_eof:
            self.transport.close()
        elif not self._lingering:
            self._lingering = True
            self._stalls.restart(self._server.now_s, received=self._received)
            if not self._is_tls:  # which ends both directions together
                self.transport.write_eof()
            self._resume_reading()

    def drain(self) -> None:
        """Close the connection if it is idle, else after its outstanding answers; end an endless answer."""
        if self.idle and self.transport is not None:
            self._writer.stopped = True
            self.transport.close()
        self.unmute()
        self._writer.end_stream()

    def _pause_reading(self) -> None:
        if self._paused_reading or self._at_eof or self._body_view is not None:
            return
        if self.transport is not None and not self.transport.is_closing():
            self._paused_reading = self._writer.room_awaited = True
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._paused_reading and self.transport is not None and not self.transport.is_closing():
            self._paused_reading = False
            if not self._at_eof:
                self.transport.resume_reading()

    def _go_on(self) -> None:
        """Begin the requests that wait in `_tail`, if limits allow it again; then resume reading."""
        if not (self._paused_reading or self._tail or self._at_eof):
            self._writer.room_awaited = False
            return
        if not self._has_room:
            return
        if self._tail:
            self._consume(self._tail)
        # A body that has begun is read to its end, even if there is no room for a further request.
        if self._phase is not Phase.HEAD or self._has_room:
            self._resume_reading()
        self._writer.flush()
        busy = self._writer.busy or self._waits_turn
        if self._at_eof and not busy and self.transport is not None:
            self.transport.close()

    # -- Stalled peers --------------------------------------------------------------------

    def sweep(self, now_s: float) -> None:
        """End the connection of a stalled peer. Called about every second, more often with short limits."""
        if self.transport is None:
            return
        if self._is_tls and self.transport.is_closing() and self._all_is_sent(self.transport):
            # The loop waits for the peer's end as well, which one that is asleep does not send.
            self.abort()
            return
        stalls, limits = self._stalls, self._server.limits
        floor = float(limits.floor_bytes_per_s)
        waiting = self._writer.unwritten_bytes
        if waiting:
            drained = self._writer.written_bytes - waiting
            window_s = limits.write_timeout_s
            floor = max(floor, waiting / limits.transfer_timeout_s)
            if stalls.over_writing(now_s, drained=drained, window_s=window_s, floor_bytes_per_s=floor):
                self._server.counts.slow_readers += 1
                self._reset()
            return
        stalls.written()
        received = self._received
        if self._phase is Phase.LINGER:
            if stalls.over(now_s, limit_s=limits.linger_s) and not self._writer.busy:
                self.abort()
        elif self._phase is not Phase.HEAD:
            window_s = limits.body_timeout_s
            if self._head is not None:
                floor = max(floor, self._head.content_length / limits.transfer_timeout_s)
            if stalls.over_body(now_s, received=received, window_s=window_s, floor_bytes_per_s=floor):
                self._time_out("body", window_s)
        elif self._writer.busy or self._waits_turn or self._muted:
            stalls.restart(now_s, received=received)
        elif self._tail:
            if stalls.over_head(now_s, limit_s=limits.head_timeout_s):
                self._time_out("head", limits.head_timeout_s)
        elif stalls.over_idle(now_s, received=received, limit_s=limits.idle_timeout_s):
            self._end_idle(self.transport, now_s)

    def _end_idle(self, transport: asyncio.Transport, now_s: float) -> None:
        """Close an idle connection; cut it if it was closed before and has still not ended.

        When the peer ends TCP without ending TLS, the loop closes as well, and would wait for ever for a peer
        that does not read the rest.
        """
        if self._ending and transport.is_closing():
            self._server.counts.slow_readers += 1
            self._reset()
            return
        self._ending = self._is_tls
        self._stalls.restart(now_s, received=self._received)
        transport.close()

    def _all_is_sent(self, transport: asyncio.Transport) -> bool:
        """Return whether the peer's machine has received all bytes sent, or the connection is lost already.

        With TLS the loop does not count the bytes that it has encrypted; while it holds any of them, the
        kernel holds some too.
        """
        sock = transport.get_extra_info("socket")
        if sock is None:  # a turn of the loop before it says so
            return True
        in_kernel = array.array("i", [0])
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, in_kernel)
        return in_kernel[0] == 0 and self._writer.unwritten_bytes == 0

    def _reset(self) -> None:
        """Reset the connection, so that the kernel discards the bytes that it still holds for the peer."""
        sock = self.transport.get_extra_info("socket") if self.transport is not None else None
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()

    def _time_out(self, what: str, limit_s: float) -> None:
        self._server.counts.timed_out += 1
        head = self._head or _NO_HEAD
        error = HttpError(
            408, "request_timeout", f"the {what} came too slowly", field=what, limit=round(limit_s * 1000)
        )
        self._answer_last(head, self._server.answer_error(error, head))
        self._writer.flush()


def _read_body(app: Application, request: Request, limit_bytes: int) -> None:
    """Decode and parse a large body, in another thread."""
    coding = request.head.coding
    if coding:
        request.body = decode_content(request.body, coding, limit_bytes=limit_bytes)
    request.parsed = app.parse(request)


def _settle_by(answer: asyncio.Future[Response], outcome: Response | Exception) -> None:
    """Resolve `answer`, unless it is resolved or cancelled already."""
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
