"""Answers of the catalog to requests."""

from __future__ import annotations

from typing import Literal

import msgspec

from laminar.node.placement.load import Load
from laminar.node.routes.messages import RouteProgress
from membership.requests import Result


class NodeBalance(msgspec.Struct, frozen=True):
    """A node's load and score (its largest share of a measure; 1 is fair); None without a recent report."""

    node: str
    weight: float
    load: Load | None = None
    score: float | None = None
    measure: str | None = None


class BalanceAnswer(msgspec.Struct, frozen=True):
    """The move that the balance would make next, or (with `done`) has just made, or the reason for none."""

    threshold: float
    hours: str
    move: Literal["none", "swap_leaders", "pin", "unpin"]
    partitions: list[str]
    because: str
    done: bool
    nodes: list[NodeBalance]


class CatalogAnswer(msgspec.Struct, frozen=True):
    """The answer to a request. `error` is empty, `no_leader`, `unknown` or a code of the HTTP error table."""

    result: Result | None = None
    error: str = ""
    detail: str = ""
    leader: str = ""
    version: int = 0
    creating: list[bytes] = []
    deleted: list[bytes] = []
    joining: list[int] = []
    removed: list[int] = []
    kept: list[int] = []
    """Ids of the replicas that groups of the request go on with after an operator accepted a loss."""
    voters: list[str] = []
    """Of a `ConfirmRequest`: the nodes that vote in group 0."""
    # Of the HTTP problem. With `too_few_nodes`: the replicas asked for, and the nodes that are alive (of a
    # topic that is altered: that may hold replicas). With `quota`: the partitions or channels that there
    # would be, and the most there may be.
    value: int = 0
    limit: int = 0
    balance: BalanceAnswer | None = None
    """Of a `BalanceRequest`."""
    progress: RouteProgress | None = None
    """Of a `RouteProgressRequest`."""
    what: str = ""
    """With `quota`, where it is a principal's: the name of its limit."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CatalogAnswer)


def encode_answer(answer: CatalogAnswer) -> bytes:
    """Return an answer encoded, for `decode_answer`."""
    return _encoder.encode(answer)


def decode_answer(payload: bytes) -> CatalogAnswer:
    """Decode a controller's answer to a request."""
    return _decoder.decode(payload)
