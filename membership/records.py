"""The catalog's records: what the cluster has agreed on, as immutable values.

This module has only their fields; `catalog_rules` says how they change. They are encoded with msgpack for
snapshots and for the shard processes, so new fields go last and have defaults. A change makes a new
`CatalogState`, which shares the unchanged records with the old one; a caller may keep the old one.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from membership.boot_history import BootRecord

Setting = int | str


class NodeRecord(msgspec.Struct, frozen=True):
    """One node: its identity, and where its processes listen.

    `store_id` is made when its data directory is formatted: a node of the same name with another store id is
    another node, which holds nothing of what this one held. `peer_ports` has the controller's port first,
    then one for each shard. `catalog_replica` is its replica id in group 0; 0 in a registration asks the
    catalog for one. `boot` is the newest start of this folder that is known (see `boot_history`).
    `rolled_back`: the node has found that its folder is an older copy; its replicas do not count until a
    newer folder registers.
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
    boot: BootRecord | None = None
    rolled_back: bool = False


class ReplicaRecord(msgspec.Struct, frozen=True):
    """One replica of a partition: an id that is never reused, and the store it was promised to.

    `made` is the node's report that the replica is in its manifest, durably.
    """

    replica_id: int
    node: str
    store_id: bytes
    made: bool = False
    lost: bool = False
    """Whether its node reported that it may have forgotten what it promised: it is to be replaced."""
    abandoned: bool = False
    """Whether its group goes on without it by an operator's decision: it never takes part in it again."""


class LeavingReplica(msgspec.Struct, frozen=True):
    """A replica that another one replaces, and that is still a member of the group.

    `why` is the reason: "dead" or "lost", then it leaves the group before the new replica joins; or "moved",
    then it leaves after that.
    """

    replica: ReplicaRecord
    why: Literal["dead", "lost", "moved"]


class AcceptedLoss(msgspec.Struct, frozen=True):
    """An operator's decision: the group lost its majority for good and goes on with one replica's log.

    `kept` is the id of that replica, `abandoned` are those of the others. Its log ended with entry
    `last_index` of `last_term`, and `kept_offset` was the offset after its last record: later records, which
    only the others held, are lost.
    """

    kept: int
    abandoned: list[int]
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
    """The catalog's version at the last change of this partition's replicas.

    A request for the next change names it, and is refused if it is not the current one.
    """
    leaving: list[LeavingReplica] = []
    removed: list[ReplicaRecord] = []
    """Replicas whose removal the group has committed, as its leader reported: their nodes delete them."""
    configuration_index: int = 0
    """Index of the group's newest configuration entry that its leader has reported."""
    losses: list[AcceptedLoss] = []
    """Operators' decisions to go on without a majority, oldest first."""


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
    """The record of a deleted partition's group; a node deletes a replica's data only if there is one.

    It is kept until every replica in `replicas` is reported removed.
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
    """Record a topic with its placement.

    By partition number: `groups` has 16 random bytes, the group id, and `placement` the nodes, best first.
    """

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


class ReportConfiguration(msgspec.Struct, frozen=True, tag="report"):
    """A leader's report of its group's members, as in the committed configuration entry at `index`."""

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
    """A node's report that its folder is an older copy of one whose newest boot record was `known`."""

    node: str
    store_id: bytes
    known: BootRecord


class AcceptLoss(msgspec.Struct, frozen=True, tag="accept_loss"):
    """Let a group go on without a majority, by an operator's decision on the partition in this `version`."""

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
    rolled_back: an older copy of the data directory that is known. absent: no such topic, node or partition.
    conflict: decided on an outdated state. invalid: the request contradicts itself or the state. failed: a
    bug in applying it; nothing changed.
    """

    outcome: Outcome
    version: int
    detail: str = ""
    node: NodeRecord | None = None
    topic: TopicRecord | None = None
    groups: list[bytes] = []
    """Of mark_made: the groups that are live now. Of delete_topic: those that have a tombstone now. Of
    mark_removed: those whose last replica is removed now.
    """

    @property
    def ok(self) -> bool:
        """Whether the state is now as the command wanted it."""
        return self.outcome in ("created", "updated", "deleted", "marked", "exists", "unchanged")
