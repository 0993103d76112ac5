"""The HTTP/1.1 server of one event loop, with the state that its connections share.

The connections share limits, budgets, counters, a cache of parsed request heads, one receive buffer and one
timer. The server opens no socket: the listening sockets belong to the supervisor, which passes
`protocol_factory` to `loop.create_server`. Tests and embedded nodes use `serve`, which does that.

Two budgets limit the memory that clients can fill, over all connections and for each address. The bytes of a
body count from their announcement until the answer; those of a large answer from when it is made until it is
sent.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from typing import Any, TypeVar

from laminar.http.protocol.content_encoding import check_coding
from laminar.http.protocol.errors import HttpError
from laminar.http.protocol.messages import SAFE_BLOCK, SANDBOX_BLOCK, Application, Response
from laminar.http.protocol.request_head import RequestHead, RequestHeads
from laminar.http.server.budget import Budget
from laminar.http.server.mutes import Mutes
from laminar.http.server.reader import Connection
from laminar.http.server.state import Counts, ServedConnection, ServerLimits
from laminar.http.server.turns import Turns

_T = TypeVar("_T")
log = logging.getLogger("laminar.http")
SCRATCH_BYTES = 256 * 1024


def plain_answer(error: BaseException) -> Response | None:
    """Return the answer to an `HttpError`, with the error as plain text; None for any other exception."""
    if not isinstance(error, HttpError):
        return None
    headers = [("Content-Type", "text/plain; charset=utf-8"), *error.headers]
    return Response(error.status, headers, f"{error}\n".encode())


class HttpServer:
    """A server that passes the requests of all its connections to one application, `app`.

    A connection belongs to the server if its protocol comes from `protocol_factory`.
    """

    def __init__(
        self,
        app: Application,
        limits: ServerLimits | None = None,
        *,
        shard: int | None = None,
        on_error: Callable[[BaseException], Response | None] = plain_answer,
        on_answer: Callable[[RequestHead, int, float], None] | None = None,
    ) -> None:
        """Make a server of `app`, without connections.

        `on_error` returns the answer to an error (to each `HttpError` at least), or None for an unexpected
        one. `on_answer` is called with the head, the status and the time (s) of each answer.
        """
        self.app = app
        self._on_error = on_error
        self.on_answer = on_answer
        self.shard = shard
        self.limits = limits or ServerLimits()
        self.counts = Counts()
        self.heads = RequestHeads()
        # Every read fills it and every `buffer_updated` empties it, with nothing in between.
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.draining = False
        self.date_block = self.page_block = b""
        self.now_s = 0.0
        self._connections: set[ServedConnection] = set()
        # Those of which the application has let in no request, or only of strangers: the oldest first.
        self._strangers: dict[ServedConnection, None] = {}
        self.bodies = Budget(self.limits.body_budget_bytes, self.limits.body_share_bytes)
        self.answers = Budget(self.limits.answer_budget_bytes, self.limits.answer_share_bytes)
        self.turns = Turns()
        self.mutes = Mutes()
        self.reads = 0
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
        """Return the protocol of a new connection: pass this method to the loop's `create_server`."""
        return Connection(self)

    async def serve(self, sock: socket.socket, *, backlog: int = 1024) -> asyncio.Server:
        """Accept connections on a bound TCP or Unix socket until `drain`; return asyncio's listener."""
        loop = asyncio.get_running_loop()
        if sock.family == socket.AF_UNIX:
            listener = await loop.create_unix_server(self.protocol_factory, sock=sock, backlog=backlog)
        else:
            listener = await loop.create_server(self.protocol_factory, sock=sock, backlog=backlog)
        self._listeners.append(listener)
        return listener

    async def drain(self, *, timeout_s: float = 10.0) -> bool:
        """Stop the server: accept no connection, answer all requests that have begun, and close.

        Return whether all of them were answered in `timeout_s`; if not, the other connections are cut.
        """
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
        """Run `job` in one of the threads for large bodies and answers; return a future of its result."""
        return asyncio.get_running_loop().run_in_executor(self._off_loop, job, *arguments)

    def statistics(self) -> dict[str, int]:
        """Return all counters, and gauges: open connections, and bytes of bodies and answers held."""
        counted = {name: getattr(self.counts, name) for name in Counts.__slots__}
        return counted | {
            "open_connections": len(self._connections),
            "reserved_bytes": self.bodies.held_bytes,
            "answer_bytes": self.answers.held_bytes,
            "reads": self.reads,
            "turns": self.turns.turns,
            "waits_for_turn": self.turns.waits,
        }

    # -- For connections ------------------------------------------------------------------

    def opened(self, connection: ServedConnection) -> None:
        """Register an accepted connection; if there are more than `max_connections`, abort one.

        It aborts the oldest connection of a stranger (a client that has not proved a principal), or the new
        one if there is no such connection. Otherwise strangers could exclude all others by idle connections.
        """
        self.counts.connections += 1
        if self._timer is None:
            self._note_time()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._period_s, self._tick)
        self._connections.add(connection)
        if len(self._connections) > self.limits.max_connections:
            stranger = next(iter(self._strangers), None)
            if stranger is None:
                connection.abort()
                return
            self.counts.displaced += 1
            del self._strangers[stranger]
            stranger.abort()
        self._strangers[connection] = None

    def known(self, connection: ServedConnection) -> None:
        """Note that a connection's client has proved a principal: it no longer counts as a stranger's."""
        self._strangers.pop(connection, None)

    def closed(self, connection: ServedConnection) -> None:
        """Remove a connection that has ended."""
        self._connections.discard(connection)
        self._strangers.pop(connection, None)
        if not self._connections and self._empty is not None and not self._empty.done():
            self._empty.set_result(None)

    def check_body(self, head: RequestHead, address: str) -> None:
        """Refuse a body by its head, before it is read.

        Raises `HttpError` if the body is too large (413), has an unknown coding (415), or if the budget has
        no room for it (503).
        """
        length = head.content_length
        if length > self.limits.max_body_bytes:
            raise HttpError(
                413,
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
        """Raise `HttpError` 503 if `size` more body bytes would exceed the budget.

        `of` is the size of the whole body, if these bytes are a part of one.
        """
        limit = self.bodies.lacks(address, size, of=of)
        if limit is not None:
            raise HttpError(
                503,
                "overloaded",
                "too many body bytes are waiting",
                field="body_bytes",
                value=size,
                limit=limit,
            )

    def check_answer(self, address: str, size: int) -> None:
        """Raise `HttpError` 503 if an answer of `size` bytes would exceed the budget of unsent answers."""
        limit = self.answers.lacks(address, size)
        if limit is not None:
            raise HttpError(
                503,
                "overloaded",
                "too many answers wait to be sent",
                field="answer_bytes",
                value=size,
                limit=limit,
            )

    def draining_response(self, head: RequestHead) -> Response:
        """Return the answer to a request that comes while the server drains: 503, and the connection ends."""
        response = self.answer_error(HttpError(503, "draining", "this node is stopping"), head)
        response.close = True
        return response

    def answer_error(self, error: BaseException, head: RequestHead) -> Response:
        """Return the answer to a request that failed.

        An unexpected error is logged under an id, and the answer names the id.
        """
        response = self._on_error(error)
        if response is None:
            identity = uuid.uuid4().hex[:12]
            log.error("bug %s in %s %s", identity, head.method, head.path, exc_info=error)
            detail = f"see {identity} in the log of this node"
            response = self._on_error(HttpError(500, "internal_error", detail))
        assert response is not None, "an `on_error` that answers no HttpError"
        return response

    def _note_time(self) -> None:
        self.now_s = asyncio.get_running_loop().time()
        date = formatdate(time.time(), usegmt=True)
        self.page_block = f"Date: {date}\r\n".encode("ascii") + SAFE_BLOCK
        self.date_block = self.page_block + SANDBOX_BLOCK

    def _tick(self) -> None:
        """Update the time and end stalled connections, once a period while there are connections."""
        self._note_time()
        for connection in list(self._connections):
            connection.sweep(self.now_s)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._period_s, self._tick) if self._connections else None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
