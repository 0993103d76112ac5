"""The cluster as operators see and change it: nodes, placement, operations, balance."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, UnsetType, field

from laminar.http.api.documents.partitions import LeavingReplica
from laminar.http.api.documents.shared import MAX_REPLICAS, Answer, Count, Request

# Most characters of a pin's reason, and of a zone.
MAX_REASON: Final = 200
MAX_WEIGHT: Final = 1000

_Reason = Annotated[str, Meta(min_length=1, max_length=MAX_REASON)]


class AdminNode(Answer):
    """A node as operators see it: what it announces, what an operator set, and what it holds.

    `version` is that of the last command, and its ETag. A member that is null is unknown at the moment.
    """

    node: str
    url: str
    status: str
    alive: bool
    zone: str
    announced_zone: str
    set_zone: str | None
    weight: float
    announced_weight: float
    set_weight: float | None
    code_version: Count
    draining: bool
    replicas: Count
    leads: Count | None
    catalog_voter: bool | None
    drain_waits_for: list[str]
    drain_blocked_by: list[str]
    safe_to_stop: bool
    version: int


class AdminNodes(Answer):
    """The nodes of the cluster as operators see them."""

    nodes: list[AdminNode]


class NodePatch(Request):
    """A merge patch of a node (RFC 7396); null restores the value that the node announces."""

    weight: Annotated[float, Meta(ge=0, le=MAX_WEIGHT)] | UnsetType | None = UNSET
    zone: Annotated[str, Meta(max_length=MAX_REASON)] | UnsetType | None = UNSET


class RemovedNode(Answer):
    """A node that was removed from the cluster."""

    node: str
    state: Literal["removed"] = field(default="removed")


class NewPin(Request):
    """Request to pin a partition to nodes.

    `nodes` must be as many as the topic has replicas, unless `allow_other_number` is true.
    """

    nodes: Annotated[list[str], Meta(min_length=1, max_length=MAX_REPLICAS)]
    reason: _Reason
    allow_other_number: bool = False


class PlacementPin(Answer):
    """A pin: these nodes hold the partition, whatever their rank is."""

    nodes: list[str]
    owner: str
    reason: str


class NewLeader(Request):
    """The node that should lead a partition."""

    node: str


class PlacedReplica(Answer):
    """A replica of a partition as the catalog records it."""

    node: str
    replica: Count
    made: bool
    lost: bool
    abandoned: bool


class PartitionPlacement(Answer):
    """Where a partition is, and where it should be, as the catalog records it."""

    topic: str
    partition: Count
    state: Literal["creating", "live"]
    version: int
    replicas: list[PlacedReplica]
    leaving: list[LeavingReplica]
    wanted: list[str]
    pin: PlacementPin | None
    preferred_leader: str | None
    why: str


class Operation(Answer):
    """A change that is under way: the actual state differs from the one that the catalog wants.

    `done` of `total` are partitions of the cluster that the node does not hold (drain), partitions with as
    many replicas as asked for (replicas), nodes of the pin or of the wanted set that hold the partition
    (pin, move), or replicas (join, leave).
    """

    id: str
    kind: Literal["drain", "replicas", "pin", "move", "join", "leave"]
    what: str
    done: Count
    total: Count
    why: str
    blocked_by: list[str]
    cancel: str


class OperationPage(Answer):
    """A page of the list of operations; it has `next` if there are more."""

    operations: list[Operation]
    next: str | UnsetType = UNSET


class NodeLoad(Answer):
    """A node's load. Rates are averages of about a minute."""

    appended_bytes_per_s: float
    written_bytes_per_s: float
    read_bytes_per_s: float
    requests_per_s: float
    stored_bytes: float


class NodeBalance(Answer):
    """A node's load and score: the largest of its shares, that of `measure`. Null: not reported."""

    node: str
    weight: float
    score: float | None
    measure: str | None
    load: NodeLoad | None


class Balance(Answer):
    """The next step of the balance by load, or the one `done`, with the reason; `none`: why there is none.

    `threshold` and `hours` are the settings of the catalog's leader.
    """

    threshold: float
    hours: str
    move: Literal["none", "swap_leaders", "pin", "unpin"]
    partitions: list[str]
    because: str
    done: bool
    nodes: list[NodeBalance]


class CancelledOperation(Answer):
    """A cancelled operation: the former state is wanted again, and the planner undoes what was done."""

    id: str
    state: Literal["cancelled"] = field(default="cancelled")
