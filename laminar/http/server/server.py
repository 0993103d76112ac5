"""The HTTP/1.1 server of one event loop: what its connections share.

Limits, budgets, counters, the last heads, one receive buffer, one timer. It
opens no socket itself: the listening sockets belong to the supervisor, and
`protocol_factory` goes to `loop.create_server`. Tests and embedded nodes use
`serve`, which does that.

Body bytes are counted from the moment they are announced until the answer, large
answers from when they are made until they are sent: over all connections, and
for each address. What clients announce, or don't take, can't fill more memory
than the two budgets.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from typing import Any, TypeVar

import msgspec

from laminar.http.api.problems import Problem
from laminar.http.protocol.content_encoding import check_coding
from laminar.http.protocol.messages import Application, Response
from laminar.http.protocol.request_head import RequestHead, RequestHeads
from laminar.http.server.budget import Budget
from laminar.http.server.reader import Connection

_T = TypeVar("_T")
SCRATCH_BYTES = 256 * 1024


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a server; times in seconds, sizes in bytes."""

    max_body_bytes: int = 64 << 20
    # Bodies that came or were announced, until their answers: of all connections, and of one address.
    body_budget_bytes: int = 512 << 20
    body_share_bytes: int = 256 << 20
    # Answers above 64 KiB, from when they are made until they are sent: likewise, and of one connection.
    answer_budget_bytes: int = 256 << 20
    answer_share_bytes: int = 128 << 20
    connection_answer_bytes: int = 32 << 20
    # Bodies of one connection that wait for their answers: above it no further request of it is read.
    connection_budget_bytes: int = 64 << 20
    max_connections: int = 10_000
    # Requests of one connection that may wait for their answers.
    max_pipelined: int = 1024
    write_high_bytes: int = 1 << 20
    idle_timeout_s: float = 75.0
    head_timeout_s: float = 10.0
    # A body below the floor over this time is given up; likewise a reader.
    body_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    floor_bytes_per_s: int = 1024
    # What is announced, or waits to be taken, comes or goes within about this time: its floor is higher.
    transfer_timeout_s: float = 120.0
    linger_s: float = 2.0


class Counts:
    """Plain integers, counted where things happen."""

    __slots__ = (
        "bytes_in",
        "bytes_out",
        "connections",
        "refused",
        "requests",
        "responses_2xx",
        "responses_3xx",
        "responses_4xx",
        "responses_5xx",
        "slow_readers",
        "timed_out",
    )

    def __init__(self) -> None:
        self.connections = 0
        self.requests = 0
        self.refused = 0
        self.timed_out = 0
        self.slow_readers = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.responses_2xx = 0
        self.responses_3xx = 0
        self.responses_4xx = 0
        self.responses_5xx = 0

    def answered(self, status: int) -> None:
        """Count an answer by its class."""
        if status < 300:
            self.responses_2xx += 1
        elif status < 400:
            self.responses_3xx += 1
        elif status < 500:
            self.responses_4xx += 1
        else:
            self.responses_5xx += 1


class HttpServer:
    """Serves `app` on every connection that `protocol_factory` is called for."""

    def __init__(
        self, app: Application, limits: ServerLimits | None = None, *, shard: int | None = None
    ) -> None:
        self.app = app
        self.shard = shard
        self.limits = limits or ServerLimits()
        self.counts = Counts()
        self.heads = RequestHeads()
        # Every read fills it and every `buffer_updated` empties it, with nothing in between.
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.draining = False
        self.date_block = b""
        self.now_s = 0.0
        self._connections: set[Connection] = set()
        self.bodies = Budget(self.limits.body_budget_bytes, self.limits.body_share_bytes)
        self.answers = Budget(self.limits.answer_budget_bytes, self.limits.answer_share_bytes)
        self._listeners: list[asyncio.Server] = []
        # Two threads: large bodies and answers wait for each other, and never for the loop.
        self._off_loop = ThreadPoolExecutor(2, "http-large")
        self._timer: asyncio.TimerHandle | None = None
        self._empty: asyncio.Future[None] | None = None
        limits_s = (
            self.limits.idle_timeout_s,
            self.limits.head_timeout_s,
            self.limits.body_timeout_s,
            self.limits.write_timeout_s,
            self.limits.linger_s,
        )
        self._period_s = min(1.0, min(limits_s) / 4)

    def protocol_factory(self) -> Connection:
        """A connection's protocol, for `loop.create_server` and `create_unix_server`."""
        return Connection(self)

    async def serve(self, sock: socket.socket, *, backlog: int = 1024) -> asyncio.Server:
        """Accept on a bound socket, TCP or Unix, until `drain`."""
        loop = asyncio.get_running_loop()
        if sock.family == socket.AF_UNIX:
            listener = await loop.create_unix_server(self.protocol_factory, sock=sock, backlog=backlog)
        else:
            listener = await loop.create_server(self.protocol_factory, sock=sock, backlog=backlog)
        self._listeners.append(listener)
        return listener

    async def drain(self, *, timeout_s: float = 10.0) -> bool:
        """Accept nothing more, answer what was asked, close; True if all were answered in time."""
        self.draining = True
        for listener in self._listeners:
            listener.close()
        for connection in list(self._connections):
            connection.drain()
        if self._connections:
            self._empty = asyncio.get_running_loop().create_future()
            try:
                await asyncio.wait_for(self._empty, timeout_s)
            except TimeoutError:
                for connection in list(self._connections):
                    connection.abort()
                return False
            finally:
                self._stop_timer()
                self._off_loop.shutdown(wait=False, cancel_futures=True)
        self._stop_timer()
        self._off_loop.shutdown(wait=False, cancel_futures=True)
        return True

    def off_loop(self, job: Callable[..., _T], *arguments: Any) -> asyncio.Future[_T]:
        """Run `job` in a thread for large bodies and answers."""
        return asyncio.get_running_loop().run_in_executor(self._off_loop, job, *arguments)

    def statistics(self) -> dict[str, int]:
        """All counters, and what is open and reserved now."""
        counted = {name: getattr(self.counts, name) for name in Counts.__slots__}
        return counted | {
            "open_connections": len(self._connections),
            "reserved_bytes": self.bodies.held_bytes,
            "answer_bytes": self.answers.held_bytes,
        }

    # -- For connections ------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        """A connection was accepted; beyond the limit it is closed at once."""
        self.counts.connections += 1
        if self._timer is None:
            self._note_time()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._period_s, self._tick)
        self._connections.add(connection)
        if len(self._connections) > self.limits.max_connections:
            connection.abort()

    def closed(self, connection: Connection) -> None:
        """A connection is gone."""
        self._connections.discard(connection)
        if not self._connections and self._empty is not None and not self._empty.done():
            self._empty.set_result(None)

    def check_body(self, head: RequestHead, address: str) -> None:
        """Refuse, by its head, a body that is too large, coded strangely, or beyond the budget."""
        length = head.content_length
        if length > self.limits.max_body_bytes:
            raise Problem(
                "too_large",
                "the body is too large",
                field="content-length",
                value=length,
                limit=self.limits.max_body_bytes,
            )
        coding = head.headers.get("content-encoding")
        if coding is not None:
            check_coding(coding)
        self.check_budget(address, length)

    def check_budget(self, address: str, size: int, *, of: int = 0) -> None:
        """Refuse what would pass the budget for bodies not yet answered; `of` a body of that size."""
        limit = self.bodies.lacks(address, size, of=of)
        if limit is not None:
            raise Problem(
                "overloaded", "too many body bytes are waiting", field="body_bytes", value=size, limit=limit
            )

    def check_answer(self, address: str, size: int) -> None:
        """Refuse to keep an answer that would pass the budget for those that are not sent yet."""
        limit = self.answers.lacks(address, size)
        if limit is not None:
            raise Problem(
                "overloaded",
                "too many answers wait to be sent",
                field="answer_bytes",
                value=size,
                limit=limit,
            )

    def draining_response(self) -> Response:
        """What requests get that come while we go down."""
        response = Response.problem(Problem("draining", "this node is going down"))
        response.close = True
        return response

    def _note_time(self) -> None:
        self.now_s = asyncio.get_running_loop().time()
        # No browser shall guess another type for a record that a page can link to.
        date = formatdate(time.time(), usegmt=True)
        self.date_block = f"Date: {date}\r\nX-Content-Type-Options: nosniff\r\n".encode("ascii")

    def _tick(self) -> None:
        """Once a period, while there are connections: the time, and who stands still."""
        self._note_time()
        for connection in list(self._connections):
            connection.sweep(self.now_s)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._period_s, self._tick) if self._connections else None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
