"""The part of a server that its connections use: limits, counters, budgets and the answers to errors.

The two halves of a connection, `reader` and `writer`, depend on this module and not on `HttpServer`, which
makes the connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from laminar.http.protocol.messages import Application, Response
from laminar.http.protocol.request_head import RequestHead, RequestHeads
from laminar.http.server.budget import Budget
from laminar.http.server.mutes import Mutes
from laminar.http.server.turns import Turns

_T = TypeVar("_T")


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a server; times in seconds, sizes in bytes."""

    max_body_bytes: int = 64 << 20
    # Bytes of bodies from their announcement until their answer: of all connections, and of one address.
    body_budget_bytes: int = 512 << 20
    body_share_bytes: int = 256 << 20
    # Bytes of answers above 64 KiB, from when they are made until they are sent: of all connections, of one
    # address, and of one connection.
    answer_budget_bytes: int = 256 << 20
    answer_share_bytes: int = 128 << 20
    connection_answer_bytes: int = 32 << 20
    # Bytes of bodies of one connection that wait for their answers. Above it, the connection reads no further
    # request.
    connection_budget_bytes: int = 64 << 20
    max_connections: int = 10_000
    # Requests of one connection that may wait for their answers.
    max_pipelined: int = 1024
    # Reads that are not answered yet, beyond which none is let in that waits for something to come.
    max_reads: int = 4096
    write_high_bytes: int = 1 << 20
    idle_timeout_s: float = 75.0
    head_timeout_s: float = 10.0
    # A connection is ended if over this time its peer sent less of a body than the floor (`body_timeout_s`),
    # or took less of the answers (`write_timeout_s`).
    body_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    floor_bytes_per_s: int = 1024
    # A large body or answer must be transferred within about this time: for it the floor is higher.
    transfer_timeout_s: float = 120.0
    linger_s: float = 2.0


class Counts:
    """Counters of a server since its start, as plain integers; the server's metrics are made from them."""

    __slots__ = (
        "bytes_in",
        "bytes_out",
        "connections",
        "displaced",
        "muted",
        "reads_refused",
        "refused",
        "requests",
        "responses_2xx",
        "responses_3xx",
        "responses_4xx",
        "responses_5xx",
        "slow_readers",
        "timed_out",
        "tls_failed",
    )

    def __init__(self) -> None:
        self.connections = 0
        self.displaced = 0
        self.muted = 0
        self.reads_refused = 0
        self.requests = 0
        self.refused = 0
        self.timed_out = 0
        self.slow_readers = 0
        self.tls_failed = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.responses_2xx = 0
        self.responses_3xx = 0
        self.responses_4xx = 0
        self.responses_5xx = 0

    def answered(self, status: int) -> None:
        """Count an answer under the class of its status (2xx to 5xx)."""
        if status < 300:
            self.responses_2xx += 1
        elif status < 400:
            self.responses_3xx += 1
        elif status < 500:
            self.responses_4xx += 1
        else:
            self.responses_5xx += 1


class ServedConnection(Protocol):
    """The methods of a connection that its server calls."""

    def abort(self) -> None:
        """Cut the connection; answers not yet sent are lost."""
        ...

    def drain(self) -> None:
        """Close the connection if it is idle, else after its outstanding answers."""
        ...

    def sweep(self, now_s: float) -> None:
        """End the connection if its peer has stalled for too long."""
        ...


class ServerState(Protocol):
    """The part of a server that its connections use. Everything belongs to one event loop."""

    app: Application
    # Called with the head, the status and the time (s) of each answer, when it is encoded.
    on_answer: Callable[[RequestHead, int, float], None] | None
    limits: ServerLimits
    counts: Counts
    heads: RequestHeads
    # Every read fills it and every `buffer_updated` empties it, with nothing in between.
    scratch: memoryview
    bodies: Budget
    answers: Budget
    turns: Turns
    reads: int  # that have begun and have no answer yet
    mutes: Mutes
    draining: bool
    # What all answers have in their heads, and what those have that are a `Page`.
    date_block: bytes
    page_block: bytes
    now_s: float
    shard: int | None

    def opened(self, connection: ServedConnection) -> None:
        """Register an accepted connection; if there are too many, abort one of a stranger, or this one."""
        ...

    def known(self, connection: ServedConnection) -> None:
        """Note that a connection's client has proved a principal: it no longer counts as a stranger's."""
        ...

    def closed(self, connection: ServedConnection) -> None:
        """Remove a connection that has ended."""
        ...

    def check_body(self, head: RequestHead, address: str) -> None:
        """Raise `HttpError` if the body that `head` announces is too large or has an unknown coding.

        It is also raised if the budget of `address`, or that of all clients, has no room for the body.
        """
        ...

    def check_budget(self, address: str, size: int, *, of: int = 0) -> None:
        """Raise `HttpError` 503 if the budget has no room for `size` bytes of a body of `of` bytes."""
        ...

    def check_answer(self, address: str, size: int) -> None:
        """Raise `HttpError` 503 if an answer of `size` bytes would exceed the budget of unsent answers."""
        ...

    def draining_response(self, head: RequestHead) -> Response:
        """Return the answer to a request that comes while the server drains: 503, and the connection ends."""
        ...

    def answer_error(self, error: BaseException, head: RequestHead) -> Response:
        """Return the answer to a request that failed; an unexpected error is logged."""
        ...

    def off_loop(self, job: Callable[..., _T], *arguments: Any) -> asyncio.Future[_T]:
        """Run `job` in one of the threads for large bodies and answers; return a future of its result."""
        ...
