"""Requests between the shards of a cluster, and errors that keep their form on the way.

A shard that is asked for what another one owns passes the request on: over an abstract Unix
socket inside the node, over TCP to another node, both by the node transport. What comes
back is the other's answer, or its `Problem`, as it said it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from laminar.batch import Buffer
from laminar.http.api.problems import Outcome, Problem
from laminar.http.protocol.messages import Request, Response
from laminar.node.transport.transport import (
    Address,
    CallTimeout,
    Peer,
    PeerLost,
    RemoteError,
    TransportError,
)

FORWARDED = "laminar-forwarded"
# A part of an append to a topic, from the shard that took it apart; its batch carries a key or does not.
PART = "laminar-part"
KEYED, PLAIN = "keyed", "plain"
# About the first connection, about a coding that is taken off by now, or nothing that a client may say.
_LEFT_BEHIND = frozenset(
    {
        "connection",
        "content-encoding",
        "content-length",
        "expect",
        PART,
        "laminar-redirect",
        "transfer-encoding",
    }
)
_encoder = msgspec.msgpack.Encoder()


class PassedRequest(msgspec.Struct, frozen=True, array_like=True):
    """An HTTP request as one shard hands it to another."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytearray
    """Its own copy, as batches are stamped in place."""


_passed_decoder = msgspec.msgpack.Decoder(PassedRequest)


class PassedResponse(msgspec.Struct, frozen=True, array_like=True):
    """The other shard's answer."""

    status: int
    headers: list[tuple[str, str]]
    block: bytes
    body: memoryview


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    """Either an answer or a problem."""

    status: int
    payload: msgspec.Raw


_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)


def encode_passed(request: Request) -> bytes:
    """A request as the payload of an `http` call, marked so that nobody passes it on again, except a replica
    that asks its leader for what lies past its own end: that is marked as passed on twice.
    """
    headers = {name: value for name, value in request.headers.items() if name not in _LEFT_BEHIND}
    headers[FORWARDED] = "2" if FORWARDED in request.headers else "1"
    return _encoder.encode((request.method, request.target, headers, request.body))


def decode_passed(payload: bytes) -> PassedRequest:
    """The payload of an `http` call."""
    return _passed_decoder.decode(payload)


def encode_response(response: Response) -> tuple[int, list[tuple[str, str]], bytes, Buffer]:
    """An answer, its parts joined: what is decoded as a `PassedResponse`."""
    body = response.body
    if not isinstance(body, (bytes, bytearray, memoryview)):
        assert isinstance(body, (list, tuple)), "a streamed answer is not passed on"
        body = b"".join(body)
    return response.status, list(response.headers), response.header_block, body


def decode_response(passed: PassedResponse) -> Response:
    """The other shard's answer as ours."""
    return Response(passed.status, passed.headers, passed.body, header_block=passed.block)


class Forwarder:
    """The connection of a request that another shard passed on."""

    def __init__(self, peer: Peer) -> None:
        self.context: Any = None
        self._peer = peer

    @property
    def peer(self) -> str:
        """Which process passed it on."""
        return f"{self._peer.node}/{self._peer.role}"


Handler = Callable[[Peer, bytes], Awaitable[Any]]


def answering(handler: Handler) -> Callable[[Peer, bytes], Awaitable[bytes]]:
    """A transport method out of `handler`: its result is encoded, a `Problem` keeps its form."""

    async def method(peer: Peer, payload: bytes) -> bytes:
        try:
            result = await handler(peer, payload)
        except Problem as problem:
            return _encoder.encode((problem.status, problem.document()))
        return _encoder.encode((0, result))

    return method


class Caller(Protocol):
    """A transport, as far as it makes calls."""

    async def call(self, address: Address, method: str, payload: bytes, *, timeout: float) -> bytes:
        """See `Transport.call`."""
        raise NotImplementedError


class Exchange:
    """Asks other shards."""

    def __init__(self, transport: Caller) -> None:
        self._transport = transport

    async def ask(self, address: Address, method: str, payload: Any, *, kind: Any, timeout_s: float) -> Any:
        """The other shard's answer, decoded as `kind`; raises its `Problem`, or one of ours.

        A lost connection before anything was sent is `no_leader` with outcome `not_applied`;
        afterwards nobody can tell: outcome `unknown`.
        """
        encoded = payload if isinstance(payload, bytes) else _encoder.encode(payload)
        try:
            answer = await self._transport.call(address, method, encoded, timeout=timeout_s)
        except PeerLost as error:
            outcome: Outcome = "unknown" if error.sent else "not_applied"
            raise Problem("no_leader", str(error), outcome=outcome, retry_after_ms=100) from error
        except CallTimeout as error:
            raise Problem("outcome_unknown", str(error)) from error
        except RemoteError as error:
            if error.code == "overloaded":  # said before anything was done
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
