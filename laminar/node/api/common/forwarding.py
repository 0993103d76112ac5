"""Forwarding of requests between shards, and of the problems that answer them.

A shard that is asked for a partition of another shard passes the request on: over an abstract Unix socket
inside the node, over TCP to another node, both by the node transport. The answer, or the `Problem`, comes
back as the other shard gave it.

What a client's request makes another shard do has with it who asks: so it takes the principal's turns there
(`laminar.node.api.common.passed_turns`), and the trace has who it was. An HTTP request has it in itself, the
steps of cursors, groups and the like (`IN_TURNS`) in an envelope, `for_principal`; no message has it besides.
Where a step is carried out, here or there, `who_asks` says it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextvars import ContextVar, copy_context
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import msgspec

from laminar.batch import Buffer
from laminar.http.api.problems import Outcome, Problem
from laminar.http.protocol.flows import Flow
from laminar.http.protocol.messages import Request, Response
from laminar.node.access.principals import ANYONE, principal_of
from laminar.node.partition.partition import Partition
from laminar.node.trace.mode import is_traced
from laminar.node.trace.ring import Who
from laminar.node.transport.transport import (
    Address,
    CallTimeout,
    Peer,
    PeerLost,
    RemoteError,
    TransportError,
)
from membership.catalog_rules import LIMITS_SINCE

FORWARDED = "laminar-forwarded"
# Header of one partition's part of an append to a topic, from the shard that split it. Its value says whether
# the part's batch carries an idempotency key.
PART = "laminar-part"
KEYED, PLAIN = "keyed", "plain"
# Headers that are not passed on: they are about the client's connection, about a coding that was removed when
# the body was read, or reserved for shards.
_LEFT_BEHIND = frozenset(
    {
        "connection",
        "content-encoding",
        "content-length",
        "authorization",
        "expect",
        PART,
        "laminar-redirect",
        "transfer-encoding",
    }
)
FOR_PRINCIPAL: Final = "for_principal"
IN_TURNS: Final = frozenset(
    (
        "channel_aside",
        "channel_ended",
        "channel_receive",
        "channel_seek",
        "channel_settle",
        "channel_states",
        "cursor",
        "delayed",
        "delayed_list",
        "describe",
        "group",
        "look_up",
        "search_bounds",
        "search_scan",
        "sinks",
        "take_cursor",
    )
)
"""Methods that clients' requests call, each as often as its client likes."""

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


class _Asking(NamedTuple):
    """Whose request a task works on, and whether another shard has passed that on.

    Not the request itself: a link that a task opens, or what it leaves behind, keeps its context.
    """

    who: Who
    is_passed: bool


_asking: ContextVar[_Asking | None] = ContextVar("asking", default=None)


def ask_for(who: Who | None, *, is_passed: bool = False) -> None:
    """Have all that this task does from now on be done for a client; None: for no one.

    What `is_passed` has had its turn: the calls that it needs are made without one, or many that wait for
    each other at two shards could use up the client's share of both.
    """
    _asking.set(None if who is None else _Asking(who, is_passed))


def asking(who: Who, answer: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Return a task for an answer to a client, which asks other shards on its behalf."""
    context = copy_context()
    context.run(ask_for, who)
    return asyncio.get_running_loop().create_task(answer, context=context)


def who_asks() -> Who | None:
    """Return the client on whose behalf this task works; None: a node does so of its own accord."""
    asks = _asking.get()
    return None if asks is None else asks.who


class ForPrincipal(msgspec.Struct, frozen=True, array_like=True):
    """A call of a method that a principal's request makes.

    `address` is where that came from, without the port, and `node` the one that was asked; empty: the one
    that passes it on.
    """

    principal: str
    method: str
    payload: bytes
    address: str = ""
    node: str = ""

    def who(self, peer: Peer) -> Who:
        """Return who asks, as the process `peer` says."""
        return Who(self.principal, self.address, self.node or peer.node)


_for_principal_decoder = msgspec.msgpack.Decoder(ForPrincipal)


def decode_for_principal(payload: bytes) -> ForPrincipal:
    """Decode the payload of a `for_principal` call."""
    return _for_principal_decoder.decode(payload)


class PassedRequest(msgspec.Struct, frozen=True, array_like=True):
    """An HTTP request on its way from one shard to another."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytearray
    """A copy that the receiver may change: a leader stamps batches in place."""
    principal: str = ""
    """Who asks, as the shard that took the request has found; empty where none is asked for."""
    address: str = ""
    """Where the request came from, without the port."""


_passed_decoder = msgspec.msgpack.Decoder(PassedRequest)


class PassedResponse(msgspec.Struct, frozen=True, array_like=True):
    """The answer of the shard that a request was passed on to."""

    status: int
    headers: list[tuple[str, str]]
    block: bytes
    body: memoryview


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The answer of a method: its result with status 0, or a problem's document with its HTTP status."""

    status: int
    payload: msgspec.Raw


_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)


def host_of(peer: str) -> str:
    """Return an address without its port."""
    host, colon, _ = peer.rpartition(":")
    return host if colon else peer


def encode_passed(request: Request) -> bytes:
    """Encode a request as the payload of an `http` call.

    It is marked as forwarded, so the other shard does not forward it again. The one exception is a
    replica that asks its leader for records past its own end: it marks the request as forwarded twice.
    """
    headers = {name: value for name, value in request.headers.items() if name not in _LEFT_BEHIND}
    headers[FORWARDED] = "2" if FORWARDED in request.headers else "1"
    passed = (request.method, request.target, headers, request.body)
    principal, connection = principal_of(request), request.connection
    address = connection.address if isinstance(connection, Forwarder) else host_of(connection.peer)
    name = "" if principal is ANYONE else principal.name
    if address:
        return _encoder.encode((*passed, name, address))
    return _encoder.encode((*passed, name) if name else passed)


def decode_passed(payload: bytes) -> PassedRequest:
    """Decode the payload of an `http` call."""
    return _passed_decoder.decode(payload)


def encode_response(response: Response) -> tuple[int, list[tuple[str, str]], bytes, Buffer]:
    """Encode an answer, its body joined, as `PassedResponse` decodes it."""
    body = response.body
    if not isinstance(body, (bytes, bytearray, memoryview)):
        assert isinstance(body, (list, tuple)), "a streamed answer is not passed on"
        body = b"".join(body)
    return response.status, list(response.headers), response.header_block, body


def decode_response(passed: PassedResponse) -> Response:
    """Return the other shard's answer as this shard's."""
    return Response(passed.status, passed.headers, passed.body, header_block=passed.block)


class Forwarder:
    """The stand-in for a client's connection in a request that another shard passed on.

    `address` is the client's, without the port, as that shard says.
    """

    def __init__(self, peer: Peer, address: str = "") -> None:
        self.address = address
        self.context: Any = None
        self.flow: Flow | None = None
        self._peer = peer

    def join(self, flow: Flow) -> None:
        """Do nothing: the request has had its turn at the shard that took it."""

    def read_refusal(self) -> None:
        """Return None: the shard that took the request has looked for room."""

    @property
    def node(self) -> str:
        """The node that passed the request on."""
        return self._peer.node

    @property
    def peer(self) -> str:
        """The process that passed the request on, as `node/role`."""
        return f"{self._peer.node}/{self._peer.role}"

    @property
    def certificate(self) -> None:
        """None: the shard that took the request has looked at its client."""
        return None


def requester_of(request: Request, node: str) -> Who:
    """Return who makes a request that `node`, this one, carries out or passes on, for the trace."""
    connection, name = request.connection, principal_of(request).name
    if isinstance(connection, Forwarder):
        return Who(name, connection.address, connection.node)
    return Who(name, host_of(connection.peer), node)


def requester_if_traced(request: Request, node: str, *settings: Mapping[str, object]) -> Who | None:
    """Return who makes a request about a topic, or a channel of it; None if their settings trace nothing."""
    return requester_of(request, node) if is_traced(*settings) else None


def requester_for(partition: Partition) -> Who | None:
    """Return who asks for a step on a partition, for its trace; None if it has none."""
    return None if partition.context.trace is None else who_asks()


Step = Callable[[Peer, bytes], Awaitable[Any]]


def answering(handler: Step) -> Callable[[Peer, bytes], Awaitable[bytes]]:
    """Make a transport method of `handler`: encode its result, or the `Problem` that it raises."""

    async def method(peer: Peer, payload: bytes) -> bytes:
        ask_for(None)  # a request may have opened the link, and what comes on that runs in its context
        try:
            result = await handler(peer, payload)
        except Problem as problem:
            return encode_problem(problem)
        return _encoder.encode((0, result))

    return method


def encode_problem(problem: Problem) -> bytes:
    """Return the answer of a method that raised a problem."""
    return _encoder.encode((problem.status, problem.document()))


class Caller(Protocol):
    """The part of a transport that makes calls."""

    async def call(self, address: Address, method: str, payload: bytes, *, timeout: float) -> bytes:
        """Call `method` of the process at `address` and return its answer."""
        raise NotImplementedError


class Exchange:
    """The caller of other shards' methods."""

    def __init__(self, transport: Caller, *, code_version: Callable[[], int] = lambda: 0) -> None:
        """`code_version` returns the one that all nodes know."""
        self._transport = transport
        self._code_version = code_version

    async def ask(self, address: Address, method: str, payload: Any, *, kind: Any, timeout_s: float) -> Any:
        """Call `method` of the shard at `address` and return its answer, decoded as `kind`.

        Raises:
            Problem: the one with which the other shard answered. `no_leader` if the connection was lost:
                outcome `not_applied` if nothing was sent, else `unknown`. `outcome_unknown` if no answer
                came in `timeout_s`.
        """
        encoded = payload if isinstance(payload, bytes) else _encoder.encode(payload)
        asks = _asking.get() if method in IN_TURNS else None
        if asks is not None and not asks.is_passed and self._code_version() >= LIMITS_SINCE:
            who = asks.who
            encoded = _encoder.encode(ForPrincipal(who.principal, method, encoded, who.address, who.node))
            method = FOR_PRINCIPAL
        try:
            answer = await self._transport.call(address, method, encoded, timeout=timeout_s)
        except PeerLost as error:
            outcome: Outcome = "unknown" if error.sent else "not_applied"
            raise Problem("no_leader", str(error), outcome=outcome, retry_after_ms=100) from error
        except CallTimeout as error:
            raise Problem("outcome_unknown", str(error)) from error
        except RemoteError as error:
            if error.code == "overloaded":  # the other process refused it before doing anything
                raise Problem("overloaded", f"{address}: {error}", outcome="not_applied") from error
            if error.code == "too_large":
                raise Problem("too_large", f"{address}: {error}", field="body") from error
            if error.code == "timeout":
                raise Problem("outcome_unknown", f"{address}: {error}") from error
            raise Problem("internal_error", f"{address}: {error}") from error
        except TransportError as error:
            raise Problem("no_leader", str(error), outcome="unknown", retry_after_ms=100) from error
        envelope = _envelope_decoder.decode(answer)
        if envelope.status:
            document = msgspec.msgpack.decode(envelope.payload)
            raise Problem.decode(msgspec.json.encode(document), status=envelope.status)
        return msgspec.msgpack.decode(envelope.payload, type=kind)
