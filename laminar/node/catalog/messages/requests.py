"""Requests to the catalog, from any process of any node.

They are msgspec structs, never pickled calls: only bytes from the log of group 0 reach PySyncObj's decoder.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from laminar.node.placement.load import LoadReport
from membership.boot_history import BootRecord
from membership.records import NodeRecord, Setting
from membership.requests import (
    AccessStep,
    CancelChange,
    ChannelStep,
    PlacementChange,
    ReclaimPartition,
    ReplicaChange,
    ReportSeal,
)


class TopicRequest(msgspec.Struct, frozen=True, tag="create_topic"):
    """Create a topic; its placement is computed by the catalog's leader over the nodes alive.

    Errors: `too_few_nodes` if fewer nodes are alive than `replicas`, unless `allow_fewer_replicas`; `quota`
    if the cluster would have too many partitions, or the owner more than its limits allow.
    """

    name: str
    partitions: int
    replicas: int
    settings: dict[str, Setting]
    allow_fewer_replicas: bool = False
    owner: str = ""
    """The principal whose limits count the topic; empty: none."""


class DeleteTopicRequest(msgspec.Struct, frozen=True, tag="delete_topic"):
    """Delete a topic, if it still has this version; with None, in any version."""

    name: str
    version: int | None


class TopicSettingsRequest(msgspec.Struct, frozen=True, tag="settings"):
    """Change some of a topic's settings, if the topic still has this version; None removes a setting."""

    name: str
    changes: dict[str, Setting | None]
    version: int


class MadeRequest(msgspec.Struct, frozen=True, tag="made"):
    """Report that a node has created its replicas of these groups, durably."""

    node: str
    store_id: bytes
    groups: list[bytes]


class RemovedRequest(msgspec.Struct, frozen=True, tag="removed"):
    """Report that a node has deleted its replicas of these groups, whose topics were deleted."""

    node: str
    store_id: bytes
    groups: list[bytes]


class NodeRequest(msgspec.Struct, frozen=True, tag="node"):
    """Register a node, or its new addresses. `former` are boot records of earlier starts (`RegisterNode`)."""

    record: NodeRecord
    former: list[BootRecord] = []


class ConfirmRequest(msgspec.Struct, frozen=True, tag="confirm"):
    """Ask for the present state of these groups: the leader confirms with a majority that it still leads.

    The answer lists the groups in creation (`creating`) and the deleted ones (`deleted`); and, of the groups'
    replicas, those still to be created (`joining`), those removed for good (`removed`), and those with which
    a group goes on after an accepted loss (`kept`). Without groups it only has the catalog's newest version.
    """

    groups: list[bytes]


class ReplicaRequest(msgspec.Struct, frozen=True, tag="replicas"):
    """Perform one step of moving replicas from node to node."""

    change: ReplicaChange


class PlacementRequest(msgspec.Struct, frozen=True, tag="placement"):
    """Perform one change of the wanted placement of nodes, topics or partitions, by an operator.

    Errors: `not_enabled` while a node's program does not know the command; `node_in_use` if the node to be
    removed is still used; `too_few_nodes` if a topic asks for more replicas than there are nodes for, unless
    `allow_fewer_replicas`.
    """

    change: PlacementChange
    allow_fewer_replicas: bool = False


class LoadRequest(msgspec.Struct, frozen=True, tag="load"):
    """Report a node's newest load to the catalog's leader, which keeps it in memory for the balance."""

    report: LoadReport


class BalanceRequest(msgspec.Struct, frozen=True, tag="balance"):
    """Ask for the next move of the balance by load; with `act` it is carried out."""

    act: bool = False


class ChannelRequest(msgspec.Struct, frozen=True, tag="channel"):
    """Create, change or delete a channel of a topic, as `Catalog.change_channel` does.

    Errors: `not_enabled` while a node's program does not know channels; `quota` if the topic or the cluster
    would have too many channels (`value` is that number).
    """

    step: ChannelStep


class AccessRequest(msgspec.Struct, frozen=True, tag="access"):
    """Create or revoke a credential, as `Catalog.change_access` does.

    Errors: `not_enabled` while a node's program does not know credentials; `quota` if there would be too
    many.
    """

    step: AccessStep


class LimitsRequest(msgspec.Struct, frozen=True, tag="limits"):
    """Replace a principal's limits if they still have this version, as `Catalog.change_limits` does.

    Errors: `not_enabled` while a node's program does not know limits; `quota` if too many principals would
    have limits of their own.
    """

    principal: str
    limits: dict[str, int]
    version: int


class RouteRequest(msgspec.Struct, frozen=True, tag="route"):
    """One step of a change of a topic's route, as `Catalog.change_route` performs it."""

    step: CancelChange | ReportSeal | ReclaimPartition


class BeginRouteRequest(msgspec.Struct, frozen=True, tag="begin_route"):
    """Begin a change of a topic's route; `BeginChange` has the fields of the same names.

    The catalog's leader places the outputs on nodes that are alive. If `avoid` names nodes, no output is
    placed there, and the outputs are pinned to the chosen nodes, so that the planner moves none to an avoided
    node later. With `force`, if the same change is already closing, it no longer waits for its seals.

    Errors: `not_enabled` while a node's program does not know routes; `too_few_nodes` and `quota` as for the
    creation of a topic; `in_progress` while another change of the topic is under way; `precondition_failed`
    if `after` is not the version of the topic's route (`limit` is that version); `invalid`.
    """

    topic: str
    after: int
    inputs: list[int]
    cuts: list[int]
    order: Literal["strict", "weak"]
    wait_ms: int
    abandon: bool = False
    force: bool = False
    avoid: list[str] = []


class RouteProgressRequest(msgspec.Struct, frozen=True, tag="route_progress"):
    """Ask what the change of a topic's route waits for, and how the last one ended."""

    topic: str


CatalogRequest = (
    TopicRequest
    | DeleteTopicRequest
    | TopicSettingsRequest
    | MadeRequest
    | RemovedRequest
    | NodeRequest
    | ConfirmRequest
    | ReplicaRequest
    | PlacementRequest
    | LoadRequest
    | BalanceRequest
    | RouteRequest
    | BeginRouteRequest
    | RouteProgressRequest
    | ChannelRequest
    | AccessRequest
    | LimitsRequest
)


_encoder = msgspec.msgpack.Encoder()


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    passed_on: bool
    request: CatalogRequest


_decoder = msgspec.msgpack.Decoder(_Envelope)


def encode_request(request: CatalogRequest, *, passed_on: bool = False) -> bytes:
    """Return a request encoded for a call of a controller's `catalog` method."""
    return _encoder.encode(_Envelope(passed_on, request))


def decode_request(payload: bytes) -> tuple[CatalogRequest, bool]:
    """Return a request, and whether a controller has forwarded it already.

    Raises:
        msgspec.ValidationError: the request is that of a newer program.
    """
    envelope = _decoder.decode(payload)
    return envelope.request, envelope.passed_on
