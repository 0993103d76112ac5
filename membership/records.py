"""The catalog's records: what the cluster has agreed on, as immutable values.

Shapes only; `catalog_rules` says how they change. They are encoded with msgpack for snapshots and for the
shard processes, so fields are added last and with a default. A change makes a new `CatalogState` which shares
what didn't change, so a caller may keep the one it has.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from membership.boot_history import BootRecord

Setting = int | str


class NodeRecord(msgspec.Struct, frozen=True):
    """One node: its identity, and where its processes listen.

    `store_id` is made when its data directory is formatted: another one under the same name is another node,
    which holds nothing of what this one held. `peer_ports` has the controller's first, then one for each
    shard. `catalog_replica` is its replica id in group 0; 0 in a registration asks the catalog for one.
    `boot` is the newest start of this folder that is known (see `boot_history`). `rolled_back`: the node has
    found that its folder is an older copy; it holds nothing that counts until a newer folder registers.
    """

    node: str
    store_id: bytes
    host: str
    http_port: int
    shard_http_ports: list[int]
    peer_ports: list[int]
    gossip_port: int
    shards: int
    weight: float = 1.0
    catalog_replica: int = 0
    boot: BootRecord | None = msgspec.field(default=None, name="life")
    rolled_back: bool = False


class ReplicaRecord(msgspec.Struct, frozen=True):
    """One replica of a partition: an id that is never reused, and the store it was promised to.

    `made` is the node's report that the replica is in its manifest, durably.
    """

    replica_id: int
    node: str
    store_id: bytes
    reason: Literal["rank", "pin"] = "rank"
    made: bool = False
    lost: bool = False
    """The node's report that it cannot vouch for what this replica once promised: it is to be replaced."""
    abandoned: bool = msgspec.field(default=False, name="given_up")
    """By an operator's decision its group goes on without it: if it comes back, it takes no part any more."""


class LeavingReplica(msgspec.Struct, frozen=True):
    """A replica whose place was given to another, and which is still a member of the group.

    One that is dead or lost is removed before the new one is added; one that is moved, after.
    """

    replica: ReplicaRecord
    why: Literal["dead", "lost", "moved"]


class AcceptedLoss(msgspec.Struct, frozen=True):
    """An operator's decision: the group lost its majority for good and goes on with one replica's log.

    `kept` is that replica, `abandoned` the others. It was at `last_index` of `last_term`, and `kept_offset`
    was the offset after its last record: what only the others held after it is lost.
    """

    kept: int
    abandoned: list[int] = msgspec.field(name="given_up")
    last_index: int
    last_term: int
    kept_offset: int
    decided_ms: int
    version: int = 0
    """The catalog's version with this decision."""


class PartitionRecord(msgspec.Struct, frozen=True):
    """One partition and its group. `creating` until every replica is made, then `live` for good."""

    topic: str
    number: int
    group: bytes
    state: Literal["creating", "live"]
    replicas: list[ReplicaRecord]
    created_ms: int
    version: int = 0
    """The catalog's version at the last change of its placement: the next change is decided on it."""
    leaving: list[LeavingReplica] = []
    removed: list[ReplicaRecord] = []
    """Replicas whose removal is committed, by report of the group's leader: their nodes delete them."""
    configuration_index: int = 0
    """Index of the newest configuration entry of the group that was reported."""
    losses: list[AcceptedLoss] = []
    """Each operator's decision to go on without its majority, in order."""


class TopicRecord(msgspec.Struct, frozen=True):
    """One topic.

    `version` is the catalog's version at its last change: never the same for two states of a name.
    """

    name: str
    partitions: int
    replicas: int
    settings: dict[str, Setting]
    created_ms: int
    version: int


class Tombstone(msgspec.Struct, frozen=True):
    """A deleted partition's group: without it no node deletes data.

    Kept until every replica in `replicas` is reported removed.
    """

    topic: str
    number: int
    group: bytes
    replicas: list[ReplicaRecord]
    deleted_ms: int
    version: int


class CatalogState(msgspec.Struct, frozen=True):
    """The whole catalog. `version` grows by one with each change and only then.

    Keys: `nodes` by name, `topics` by name, `partitions` by "topic/number", `tombstones` by the group id in
    hex.
    """

    cluster_id: bytes = b""
    version: int = 0
    nodes: dict[str, NodeRecord] = {}
    topics: dict[str, TopicRecord] = {}
    partitions: dict[str, PartitionRecord] = {}
    next_replica_id: int = 1
    tombstones: dict[str, Tombstone] = {}

    def partitions_of(self, topic: str) -> list[PartitionRecord]:
        """Return the topic's partitions by number; empty when there is no such topic."""
        record = self.topics.get(topic)
        return [] if record is None else [self.partitions[f"{topic}/{n}"] for n in range(record.partitions)]


# Requests: what a command carries (as JSON text). Everything that depends on a clock, on randomness or on who
# is alive was decided by the proposer and is in here.


class FoundCluster(msgspec.Struct, frozen=True):
    """Name the cluster, once."""

    cluster_id: bytes


class RegisterNode(msgspec.Struct, frozen=True):
    """Record a node, or, with `known`, change what is recorded of it.

    `former`: the boot records before the record's own that the catalog may not have, after one that it has.
    """

    record: NodeRecord
    known: bool = False
    former: list[BootRecord] = []


class CreateTopic(msgspec.Struct, frozen=True):
    """A topic with its placement: for each partition 16 random bytes and the nodes, best first."""

    name: str
    partitions: int
    replicas: int
    settings: dict[str, Setting]
    groups: list[bytes]
    placement: list[list[str]]
    created_ms: int


class MarkMade(msgspec.Struct, frozen=True):
    """A node's report that its replicas of these groups are durably in its manifest."""

    node: str
    store_id: bytes
    groups: list[bytes]


class MarkRemoved(msgspec.Struct, frozen=True):
    """A node's report that its replicas of these deleted groups are gone."""

    node: str
    store_id: bytes
    groups: list[bytes]


class DeleteTopic(msgspec.Struct, frozen=True):
    """Delete a topic; with `version`, only in that version."""

    name: str
    deleted_ms: int
    version: int | None = None


class UpdateTopicSettings(msgspec.Struct, frozen=True):
    """Change settings (null takes one away) of a topic that still has this version."""

    name: str
    changes: dict[str, Setting | None]
    version: int


class ReplaceReplica(msgspec.Struct, frozen=True, tag="replace"):
    """Give the place of a replica to a new one on `node`; decided on the partition in this `version`."""

    partition: str
    group: bytes
    version: int
    replica_id: int
    why: Literal["dead", "lost", "moved"]
    node: str


class ReportConfiguration(msgspec.Struct, frozen=True, tag="report"):
    """A leader's report of the group's members by the entry at `index`, which is committed."""

    partition: str
    group: bytes
    index: int
    members: list[int]


class ReportReplicas(msgspec.Struct, frozen=True, tag="replicas"):
    """A node's report of its own replicas, by id: made (and not empty), lost, or deleted after a removal."""

    node: str
    store_id: bytes
    made: list[int] = []
    lost: list[int] = []
    deleted: list[int] = []


class ReportRolledBack(msgspec.Struct, frozen=True, tag="rolled_back"):
    """A node's report that its folder is an older copy than the one that was at `known`."""

    node: str
    store_id: bytes
    known: BootRecord


class AcceptLoss(msgspec.Struct, frozen=True, tag="accept_loss"):
    """An operator's decision on the partition in this `version`: go on without a majority."""

    partition: str
    group: bytes
    version: int
    loss: AcceptedLoss


ReplicaChange = AcceptLoss | ReplaceReplica | ReportConfiguration | ReportReplicas | ReportRolledBack


class ChangeReplicas(msgspec.Struct, frozen=True):
    """A request for one step of moving replicas from node to node."""

    change: ReplicaChange


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
    "absent",
    "conflict",
    "invalid",
    "failed",
]


class Result(msgspec.Struct, frozen=True):
    """The outcome of a command. `version` is the catalog's after it.

    created, updated, deleted, marked: changed. exists, unchanged: it was so already (a retry sees this).
    already_exists: the name is taken. store_changed: another data directory under a known name.
    rolled_back: an older copy of the data directory that is known. absent: no such topic or node. conflict:
    decided on an outdated state. invalid: makes no sense. failed: a mistake of ours in applying it; nothing
    changed.
    """

    outcome: Outcome
    version: int
    detail: str = ""
    node: NodeRecord | None = None
    topic: TopicRecord | None = None
    groups: list[bytes] = []
    """Of mark_made: those live now. Of delete_topic: those with a tombstone now. Of mark_removed: those whose
    last replica is gone.
    """

    @property
    def ok(self) -> bool:
        """Whether the state is now as the command wanted it."""
        return self.outcome in ("created", "updated", "deleted", "marked", "exists", "unchanged")
