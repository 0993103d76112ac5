"""The catalog's requests, which commands carry, and their results.

The proposer decides all that depends on a clock, on randomness or on which nodes are alive, and puts it into
the request. This module has only the fields; `catalog_rules` and the other modules `*_rules`
say what they change. Requests are JSON text in the log of group 0, so new fields go last and
have defaults.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from membership.boot_history import BootRecord
from membership.records import AcceptedLoss, Grant, NodeRecord, Pin, Seal, Setting, TopicRecord


class FoundCluster(msgspec.Struct, frozen=True):
    """Give the cluster its id, once."""

    cluster_id: bytes


class RegisterNode(msgspec.Struct, frozen=True):
    """Record a node, or, with `known`, change the record of a known node.

    `former` are the boot records of the folder's earlier starts: one that the catalog has, then those that it
    may not have.
    """

    record: NodeRecord
    known: bool = False
    former: list[BootRecord] = []


class CreateTopic(msgspec.Struct, frozen=True):
    """Record a topic with its placement.

    Both by partition number: `groups` has each partition's group id (16 random bytes), and `placement` the
    names of its nodes, best first.
    """

    name: str
    partitions: int
    replicas: int
    settings: dict[str, Setting]
    groups: list[bytes]
    placement: list[list[str]]
    created_ms: int
    owner: str = ""
    """The principal that creates it; empty: none."""


class MarkMade(msgspec.Struct, frozen=True):
    """A node's report that it has created its replicas of these groups: they are durably in its manifest."""

    node: str
    store_id: bytes
    groups: list[bytes]


class MarkRemoved(msgspec.Struct, frozen=True):
    """A node's report that it has deleted its replicas of these groups, whose topics were deleted."""

    node: str
    store_id: bytes
    groups: list[bytes]


class DeleteTopic(msgspec.Struct, frozen=True):
    """Delete a topic; if `version` is given, only if that is the topic's version."""

    name: str
    deleted_ms: int
    version: int | None = None


class UpdateTopicSettings(msgspec.Struct, frozen=True):
    """Change settings (None removes one) of a topic that still has this version."""

    name: str
    changes: dict[str, Setting | None]
    version: int


class ReplaceReplica(msgspec.Struct, frozen=True, tag="replace"):
    """Replace a replica by a new one on `node`, if the partition still has this `version`."""

    partition: str
    group: bytes
    version: int
    replica_id: int
    why: Literal["dead", "lost", "moved"]
    node: str
    because: str = ""
    """The reason as text for people."""


class ReportRemovals(msgspec.Struct, frozen=True, tag="report"):
    """A leader's report that its group has committed the removal of these replicas, which were leaving."""

    partition: str
    group: bytes
    removed: list[int]


class ReportReplicas(msgspec.Struct, frozen=True, tag="replicas"):
    """A node's report on its own replicas: the ids of those created (and not empty), lost, and deleted."""

    node: str
    store_id: bytes
    made: list[int] = []
    lost: list[int] = []
    deleted: list[int] = []


class ReportRolledBack(msgspec.Struct, frozen=True, tag="rolled_back"):
    """A node's report that its folder is an older copy of one whose newest boot record was `known`."""

    node: str
    store_id: bytes
    known: BootRecord


class AcceptLoss(msgspec.Struct, frozen=True, tag="accept_loss"):
    """Let a group go on without its majority, as an operator has decided; `version` is the partition's."""

    partition: str
    group: bytes
    version: int
    loss: AcceptedLoss


ReplicaChange = AcceptLoss | ReplaceReplica | ReportRemovals | ReportReplicas | ReportRolledBack


class ChangeReplicas(msgspec.Struct, frozen=True):
    """A request for one step of moving replicas from node to node."""

    change: ReplicaChange


class AddReplicas(msgspec.Struct, frozen=True, tag="add"):
    """Add replicas to a live partition, one on each of `nodes`, if it still has this `version`."""

    partition: str
    group: bytes
    version: int
    nodes: list[str]
    because: str = ""


class RemoveReplica(msgspec.Struct, frozen=True, tag="remove"):
    """Remove a replica from a live partition that has too many, if the partition still has this `version`."""

    partition: str
    group: bytes
    version: int
    replica_id: int
    because: str = ""


class PreferLeaders(msgspec.Struct, frozen=True, tag="prefer"):
    """Set preferred leaders: a node for each "topic/number". Partitions that no longer exist are skipped."""

    nodes: dict[str, str]


class PinPartition(msgspec.Struct, frozen=True, tag="pin"):
    """Bind a partition's placement to nodes (None: unbind it), if it still has this `version`."""

    partition: str
    version: int
    pin: Pin | None


class AlterTopic(msgspec.Struct, frozen=True, tag="topic"):
    """Change a topic's number of replicas and settings, if it still has this `version`.

    `replicas` None leaves the number of replicas as it is; a setting of None removes it.
    """

    name: str
    version: int
    replicas: int | None
    changes: dict[str, Setting | None] = {}


class AlterNode(msgspec.Struct, frozen=True, tag="node"):
    """Change the fields of a node that an operator sets, if it still has this `version`.

    A field that is left out keeps its value. None for `set_weight` or `set_zone` restores what the node
    announces.
    """

    node: str
    version: int
    draining: bool | msgspec.UnsetType = msgspec.UNSET
    set_weight: float | msgspec.UnsetType | None = msgspec.UNSET
    set_zone: str | msgspec.UnsetType | None = msgspec.UNSET


class RemoveNode(msgspec.Struct, frozen=True, tag="remove_node"):
    """Remove a drained node without replicas, if it still has this `version`. Its store never comes back."""

    node: str
    version: int


PlacementChange = (
    AddReplicas | RemoveReplica | PreferLeaders | PinPartition | AlterTopic | AlterNode | RemoveNode
)


class ChangePlacement(msgspec.Struct, frozen=True):
    """A request for one change of the wanted placement, or for one step towards it."""

    change: PlacementChange


class BeginChange(msgspec.Struct, frozen=True, tag="begin"):
    """Begin to replace neighbouring partitions by new ones, if the topic's route still has version `after`.

    `inputs` are the partitions to be replaced. `cuts`, ascending, are the logical partitions at which their
    range is cut into the ranges of the outputs (the new partitions): no cut gives one output. `groups` and
    `placement` are those of the outputs, as in `CreateTopic`, in the order of their ranges.
    """

    topic: str
    after: int
    inputs: list[int]
    cuts: list[int]
    groups: list[bytes]
    placement: list[list[str]]
    order: Literal["strict", "weak"]
    begun_ms: int
    wait_ms: int
    abandon: bool = False
    force: bool = False


class CloseChange(msgspec.Struct, frozen=True, tag="close"):
    """Let the inputs of a change (the partitions that end) be sealed, for good.

    With `force`, or if the change was begun with `force`, its outputs take records without waiting for the
    seals.
    """

    topic: str
    id: int
    force: bool = False


class CancelChange(msgspec.Struct, frozen=True, tag="cancel"):
    """Cancel a change of a topic's route that is not closing yet: none of its inputs is sealed."""

    topic: str
    id: int
    cancelled_ms: int


class ReportSeal(msgspec.Struct, frozen=True, tag="report_seal"):
    """A leader's report that the seal of its partition (an input of a change) is committed and synced."""

    topic: str
    id: int
    number: int
    group: bytes
    seal: Seal


class ReclaimPartition(msgspec.Struct, frozen=True, tag="reclaim"):
    """Delete a sealed partition that nothing reads any more; the proposer has checked that it is empty."""

    topic: str
    number: int
    group: bytes
    reclaimed_ms: int


RouteStep = BeginChange | CloseChange | CancelChange | ReportSeal | ReclaimPartition


class ChangeRoute(msgspec.Struct, frozen=True):
    """A request for one step of a change of a topic's route, or for the reclaiming of an ended partition."""

    step: RouteStep


class CreateChannel(msgspec.Struct, frozen=True, tag="create_channel"):
    """Create a channel of a topic; `settings` as in `ChannelRecord`."""

    topic: str
    name: str
    settings: dict[str, Any]


class UpdateChannel(msgspec.Struct, frozen=True, tag="update_channel"):
    """Replace all settings of a channel that still has this version."""

    topic: str
    name: str
    version: int
    settings: dict[str, Any]


class DeleteChannel(msgspec.Struct, frozen=True, tag="delete_channel"):
    """Delete a channel of a topic, if it still has this id."""

    topic: str
    name: str
    id: int


ChannelStep = CreateChannel | UpdateChannel | DeleteChannel


class ChangeChannel(msgspec.Struct, frozen=True):
    """A request for one change of a topic's channels."""

    step: ChannelStep


class CreateCredential(msgspec.Struct, frozen=True, tag="create_credential"):
    """Record a credential under a new id; with `only_if_none` only while there is no credential at all."""

    id: str
    name: str
    grants: list[Grant]
    salt: bytes
    digest: bytes
    created_ms: int
    expires_ms: int = 0
    certificate: str = ""
    only_if_none: bool = False


class RevokeCredential(msgspec.Struct, frozen=True, tag="revoke_credential"):
    """Delete the credential of this id: requests that prove it are refused from then on."""

    id: str


AccessStep = CreateCredential | RevokeCredential


class ChangeAccess(msgspec.Struct, frozen=True):
    """A request for one change of the credentials."""

    step: AccessStep


class ChangeLimits(msgspec.Struct, frozen=True):
    """Replace a principal's limits if they still have `version` (0: none are set); {} removes them."""

    principal: str
    limits: dict[str, int]
    version: int


Outcome = Literal[
    "created",
    "updated",
    "deleted",
    "marked",
    "exists",
    "unchanged",
    "already_exists",
    "store_changed",
    "rolled_back",
    "removed",
    "absent",
    "conflict",
    "invalid",
    "failed",
    "quota",
]


class Result(msgspec.Struct, frozen=True):
    """The outcome of a command, and the catalog's `version` after it.

    created, updated, deleted, marked: the catalog was changed. exists, unchanged: it was as requested already
    (a retry gets this). already_exists: the name is taken. store_changed: another data directory under a
    known name. rolled_back: an older copy of the data directory that is known. removed: the data directory of
    a node that was removed from the cluster. absent: no such topic, node, partition, channel or credential.
    conflict: the request was decided on an outdated state. invalid: the request contradicts itself or the
    state. failed: a bug in applying it; nothing changed. quota: the topic, the cluster or a principal would
    exceed a limit.
    """

    outcome: Outcome
    version: int
    detail: str = ""
    node: NodeRecord | None = None
    topic: TopicRecord | None = None
    groups: list[bytes] = []
    """Of mark_made: the groups that are live now. Of delete_topic and change_route: those that have a
    tombstone now. Of mark_removed: those whose last replica is removed now.
    """

    what: str = ""
    """Of quota, where it is a principal's: the name of the limit that is reached."""
    value: int = 0
    """How many of that there would be."""
    limit: int = 0

    @property
    def ok(self) -> bool:
        """Whether the state is now as the command requested."""
        return self.outcome in ("created", "updated", "deleted", "marked", "exists", "unchanged")
