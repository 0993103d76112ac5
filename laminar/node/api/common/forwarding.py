"""Forward requests between shards, with the identity of the client, and return answers and problems.

A shard that is asked for a partition of another shard passes the request on: over an abstract Unix socket
inside the node, over TCP to another node, both by the node transport. The answer, or the `Problem`, comes
back as the other shard gave it.

Work that a client's request causes at another shard names its requester: so it counts for the fair share of
the principal there (`laminar.node.api.common.passed_turns`), and the trace can name the client. A forwarded
HTTP request has a field for the requester; the steps of cursors, groups and the like (`IN_TURNS`) have an
envelope around them, the call `for_principal`. Messages themselves do not name the requester. The code that
carries out a step, here or there, gets the requester from `who_asks`.
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
from membership.limit_rules import LIMITS_SINCE

FORWARDED = "laminar-forwarded"
# Header of one partition's part of an append to a topic, from the shard that split it. Its value says whether
# the part's batch carries an idempotency key.
PART = "laminar-part"
KEYED, PLAIN = "keyed", "plain"
# Headers that are not forwarded: they are about the client's connection, about a coding that was removed when
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
"""Transport methods that clients' requests call at any rate, so that they must wait for a fair share."""

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


class _Asking(NamedTuple):
    """The client on whose behalf a task works, and whether another shard has forwarded the request.

    It does not refer to the request itself: connections and tasks that a task creates inherit its context,
    and would retain the request.
    """

    who: Who
    is_passed: bool


_asking: ContextVar[_Asking | None] = ContextVar("asking", default=None)


def ask_for(who: Who | None, *, is_passed: bool = False) -> None:
    """Set the client on whose behalf this task works from now on; None for no client.

    With `is_passed` the request has already waited for its turn at this shard. The calls that it makes need
    no further turn: else requests that wait for each other at two shards could use up the client's share of
    both.
    """
    _asking.set(None if who is None else _Asking(who, is_passed))


def asking(who: Who, answer: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Return a task that computes an answer to a client; calls to other shards name this client."""
    context = copy_context()
    context.run(ask_for, who)
    return asyncio.get_running_loop().create_task(answer, context=context)


def who_asks() -> Who | None:
    """Return the client on whose behalf this task works; None if it works for the node itself."""
    asks = _asking.get()
    return None if asks is None else asks.who


class ForPrincipal(msgspec.Struct, frozen=True, array_like=True):
    """The payload of a `for_principal` call: the call of `method` on behalf of a principal's request.

    `address` is the client's, without the port. `node` is the node that the client asked; empty if that is
    the node that makes this call.
    """

    principal: str
    method: str
    payload: bytes
    address: str = ""
    node: str = ""

    def who(self, peer: Peer) -> Who:
        """Return the client on whose behalf `peer` makes the call."""
        return Who(self.principal, self.address, self.node or peer.node)


_for_principal_decoder = msgspec.msgpack.Decoder(ForPrincipal)


def decode_for_principal(payload: bytes) -> ForPrincipal:
    """Decode the payload of a `for_principal` call."""
    return _for_principal_decoder.decode(payload)


class PassedRequest(msgspec.Struct, frozen=True, array_like=True):
    """The payload of an `http` call: an HTTP request that one shard forwards to another."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytearray
    """A copy that the receiver may change: a leader stamps batches in place."""
    principal: str = ""
    """The principal, as proven to the shard that took the request; empty without access control."""
    address: str = ""
    """The address of the client, without the port."""


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
    """Return an answer in the form that `PassedResponse` decodes, with its body joined."""
    body = response.body
    if not isinstance(body, (bytes, bytearray, memoryview)):
        assert isinstance(body, (list, tuple)), "a streamed answer is not passed on"
        body = b"".join(body)
    return response.status, list(response.headers), response.header_block, body


def decode_response(passed: PassedResponse) -> Response:
    """Return the answer of another shard as the `Response` with which this shard answers."""
    return Response(passed.status, passed.headers, passed.body, header_block=passed.block)


class Forwarder:
    """The stand-in for a client's connection in a request that another shard forwarded.

    `address` is the client's, without the port, as the other shard reports it.
    """

    def __init__(self, peer: Peer, address: str = "") -> None:
        self.address = address
        self.context: Any = None
        self.flow: Flow | None = None
        self._peer = peer

    def join(self, flow: Flow) -> None:
        """Do nothing: the shard that took the request counts the client's connections."""

    def read_refusal(self) -> None:
        """Return None: the shard that took the request limits its reads."""

    @property
    def node(self) -> str:
        """The node that forwarded the request."""
        return self._peer.node

    @property
    def peer(self) -> str:
        """The process that forwarded the request, as `node/role`."""
        return f"{self._peer.node}/{self._peer.role}"

    @property
    def certificate(self) -> None:
        """Always None: the shard that took the request has checked its client."""
        return None


def requester_of(request: Request, node: str) -> Who:
    """Return the requester of a request at this node, `node`, for the trace and for other shards."""
    connection, name = request.connection, principal_of(request).name
    if isinstance(connection, Forwarder):
        return Who(name, connection.address, connection.node)
    return Who(name, host_of(connection.peer), node)


def requester_if_traced(request: Request, node: str, *settings: Mapping[str, object]) -> Who | None:
    """Return the requester of a request; None if no `settings` (of topic or channel) enable the trace."""
    return requester_of(request, node) if is_traced(*settings) else None


def requester_for(partition: Partition) -> Who | None:
    """Return the client on whose behalf this task works; None if the partition has no trace."""
    return None if partition.context.trace is None else who_asks()


Step = Callable[[Peer, bytes], Awaitable[Any]]


def answering(handler: Step) -> Callable[[Peer, bytes], Awaitable[bytes]]:
    """Return a transport method that calls `handler` and encodes its result or its `Problem`."""

    async def method(peer: Peer, payload: bytes) -> bytes:
        ask_for(None)  # a request may have opened this connection; calls that arrive on it run in its context
        try:
            result = await handler(peer, payload)
        except Problem as problem:
            return encode_problem(problem)
        return _encoder.encode((0, result))

    return method


def encode_problem(problem: Problem) -> bytes:
    """Return the encoded answer of a transport method that raised a problem."""
    return _encoder.encode((problem.status, problem.document()))


class Caller(Protocol):
    """The part of `Transport` that `Exchange` uses."""

    async def call(self, address: Address, method: str, payload: bytes, *, timeout: float) -> bytes:
        """Call `method` of the process at `address` and return its answer."""
        raise NotImplementedError


class Exchange:
    """Calls methods of other shards; answers that are problems are raised here."""

    def __init__(self, transport: Caller, *, code_version: Callable[[], int] = lambda: 0) -> None:
        """Create the exchange; `code_version` returns the code version that the cluster has enabled."""
        self._transport = transport
        self._code_version = code_version

    async def ask(self, address: Address, method: str, payload: Any, *, kind: Any, timeout_s: float) -> Any:
        """Call `method` of the shard at `address` and return its answer, decoded as `kind`.

        Raises:
            Problem: the problem with which the other shard answered. `no_leader` if the connection was lost:
                outcome `not_applied` if nothing was sent, else `unknown`. `outcome_unknown` if no answer came
                in `timeout_s`.
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
