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
    """A node as operators see it: what it announces, what was commanded, and what is on it.

    `version` is that of the last command, and its ETag. What is null is not known at the moment.
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
    """A merge patch of a node (RFC 7396): null makes what the node announces count again."""

    weight: Annotated[float, Meta(ge=0, le=MAX_WEIGHT)] | UnsetType | None = UNSET
    zone: Annotated[str, Meta(max_length=MAX_REASON)] | UnsetType | None = UNSET


class RemovedNode(Answer):
    """A node that was removed from the cluster."""

    node: str
    state: Literal["removed"] = field(default="removed")


class NewPin(Request):
    """An explicit placement that is to hold from now on.

    As many nodes as the topic has replicas, unless `allow_other_number`.
    """

    nodes: Annotated[list[str], Meta(min_length=1, max_length=MAX_REPLICAS)]
    reason: _Reason
    allow_other_number: bool = False


class PlacementPin(Answer):
    """An explicit placement: these nodes hold the partition, whatever their rank is."""

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
    """A change that is under way: the catalog wants something that is not so yet.

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
    """A page of the list of operations; `next` is there if there are more."""

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
    """What the balance by load would do, or with `done` did, and why; with `none`, why nothing.

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
    """An operation whose wanted state was set back; what it had done already is undone by the planner."""

    id: str
    state: Literal["cancelled"] = field(default="cancelled")
