"""Documents for operators: nodes, the placement of partitions, operations, and the balance by load."""

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
    """A node as operators see it: what it announces, what an operator has set, and what is on it.

    `leads` and `catalog_voter` are null if they are unknown at the moment. While the node drains,
    `drain_waits_for` has sentences on what is still on it, and `drain_blocked_by` on why that cannot end;
    `safe_to_stop` tells that it is drained. `version` is that of the last command about the node, and the
    ETag of this document.
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
    """Request to change a node's weight or zone, as a merge patch (RFC 7396).

    Null restores the value that the node announces.
    """

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
    """A pin: the partition's replicas are on these nodes, instead of those that placement would choose."""

    nodes: list[str]
    owner: str
    reason: str


class NewLeader(Request):
    """Request to make a node the leader of a partition."""

    node: str


class PlacedReplica(Answer):
    """A replica of a partition as the catalog records it.

    `made` tells that the replica was created on its node. `lost` tells that its data are lost, and
    `abandoned` that its group goes on without it for good.
    """

    node: str
    replica: Count
    made: bool
    lost: bool
    abandoned: bool


class PartitionPlacement(Answer):
    """The placement of a partition as the catalog records it: `replicas` are, and `wanted` should be.

    `leaving` are replaced replicas that are still members of the group. `pin` and `preferred_leader` are null
    if there is none.
    """

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
    """A change of placement that is in progress: the cluster differs from the state that the catalog wants.

    `done` of `total` is its progress. It counts, by kind: partitions of the cluster that are not on the node
    (drain); partitions with as many replicas as wanted (replicas); nodes of the pin or of the wanted set that
    have the partition (pin, move); replicas (join, leave).
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
    """A page of the list of operations, with `next` if there are more; `total` counts those of all pages."""

    operations: list[Operation]
    total: int
    next: str | UnsetType = UNSET


class NodeLoad(Answer):
    """The load of a node. Rates are averages over about a minute."""

    appended_bytes_per_s: float
    written_bytes_per_s: float
    read_bytes_per_s: float
    requests_per_s: float
    stored_bytes: float


class NodeBalance(Answer):
    """A node's load, and its score in the balance by load.

    The score is the largest of the node's shares of the cluster's load; `measure` names the kind of load that
    it is the share of. All three are null if the node has not reported.
    """

    node: str
    weight: float
    score: float | None
    measure: str | None
    load: NodeLoad | None


class Balance(Answer):
    """The next step of the balance by load, which moves leaders or replicas away from the most loaded node.

    If `done` is true, the step was carried out just now. `because` is the reason for the step; if `move` is
    `none`, it is the reason why there is no step. `threshold` and `hours` are settings of the catalog's
    leader.
    """

    threshold: float
    hours: str
    move: Literal["none", "swap_leaders", "pin", "unpin"]
    partitions: list[str]
    because: str
    done: bool
    nodes: list[NodeBalance]


class CancelledOperation(Answer):
    """A cancelled operation: the former placement is wanted again, and what was done is undone."""

    id: str
    state: Literal["cancelled"] = field(default="cancelled")
