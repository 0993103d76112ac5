"""The catalog's records: the agreed metadata of the cluster, as immutable values.

This module has only their fields; `catalog_rules` says how they change. They are encoded with msgpack for
snapshots and for the shard processes, so new fields go last and have defaults. A change makes a new
`CatalogState`, which shares the unchanged records with the old one; a caller may keep the old one.

In topics and partitions, fields that have their defaults are not encoded, which saves a fifth of the bytes.
An older program, which does not know such a field, then reads the same bytes as before.

No record can be part of a cycle of references, so the garbage collector does not visit them (`gc=False`):
else it would visit some ten objects for each topic, and block the event loop meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
from msgspec.structs import force_setattr

from membership.boot_history import BootRecord
from membership.tables import Indexed, Table

Setting = int | str


class NodeRecord(msgspec.Struct, frozen=True, gc=False):
    """One node: its identity, and where its processes listen.

    `store_id` is drawn when its data directory is formatted: a node of the same name with another store id is
    another node, which has none of this one's data. `peer_ports` has the controller's port first, then one
    for each shard. `catalog_replica` is the node's replica id in group 0; 0 in a registration asks the
    catalog for one. `boot` is the newest known boot record of the folder (see `boot_history`). `rolled_back`
    says that the folder was found to be an older copy of itself; its replicas do not count until a newer
    folder registers.
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
    zone: str = ""
    """The failure domain (rack, room, region) that the node announces; empty: none."""
    code_version: int = 0
    """The highest code version that the node's program knows."""
    draining: bool = False
    """Whether the node is to be emptied: it leads nothing, holds nothing, and does not vote in group 0."""
    set_weight: float | None = None
    """A weight by command, in place of the announced one; None: none."""
    set_zone: str | None = None
    """A zone by command, in place of the announced one; None: none."""
    version: int = 0
    """The catalog's version at the last command about this node; 0: none yet.

    The next command names it, and is refused if it is not the current one.
    """
    tls: bool = False
    """Whether its HTTP ports speak TLS, as its URLs say."""

    @property
    def scheme(self) -> str:
        """The scheme of the node's URLs: http or https."""
        return "https" if self.tls else "http"

    @property
    def effective_weight(self) -> float:
        """The share of replicas that the node should hold, relative to other nodes."""
        return self.weight if self.set_weight is None else self.set_weight

    @property
    def effective_zone(self) -> str:
        """The failure domain (zone) over which placement spreads replicas; empty: none."""
        return self.zone if self.set_zone is None else self.set_zone


class ReplicaRecord(msgspec.Struct, frozen=True, gc=False):
    """One replica of a partition: an id that is never reused, and the store it was promised to.

    `made` says that the node has reported the replica as created: durably in its manifest.
    """

    replica_id: int
    node: str
    store_id: bytes
    made: bool = False
    lost: bool = False
    """Whether its node reported that it may have forgotten what it promised: it is to be replaced."""
    abandoned: bool = False
    """Whether its group goes on without it by an operator's decision: it never takes part in it again."""


class LeavingReplica(msgspec.Struct, frozen=True, gc=False):
    """A replica that another one replaces, and that is still a member of the group.

    `why` is the reason. A "dead" or "lost" replica leaves the group before the new one joins, a "moved" one
    after that.
    """

    replica: ReplicaRecord
    why: Literal["dead", "lost", "moved"]


class AcceptedLoss(msgspec.Struct, frozen=True, gc=False):
    """An operator's decision: the group lost its majority for good and goes on with one replica's log.

    `kept` is the id of that replica, `abandoned` are those of the others. The log of the kept
    replica ended with entry `last_index` of `last_term`, and `kept_offset` was the offset after its last
    record: later records, which only the others held, are lost.
    """

    kept: int
    abandoned: list[int]
    last_index: int
    last_term: int
    kept_offset: int
    decided_ms: int
    version: int = 0
    """The catalog's version with this decision."""


class Pin(msgspec.Struct, frozen=True, gc=False):
    """An explicit placement of a partition: these nodes hold it, instead of those that the rank chooses.

    `owner` names the person or part of the program that decided it, `reason` is a text for people.
    """

    nodes: list[str]
    owner: str
    reason: str


class PartitionRecord(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One partition and its group. `state` is `creating` until all replicas are created, then `live`."""

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
    losses: list[AcceptedLoss] = []
    """Operators' decisions to go on without a majority, oldest first."""
    newest_replica_id: int = 0
    """The highest replica id that the partition was ever given, also of a replica that left.

    0 in records without it: then it is the highest of `replicas`.
    """
    preferred_leader: str = ""
    """The node that should lead the group, if it holds a voter; empty: none chosen yet."""
    pin: Pin | None = None
    """The explicit placement; None: placement by rank."""
    why: str = ""
    """The reason of the last change of `replicas`, as text for people; empty: unchanged since creation."""
    origin: int = 0
    """The id of the change of the topic's route that made it; 0: it was made with its topic."""
    first: int = 0
    """The first of its logical partitions; only of one that a change made."""
    size: int = 0
    """How many logical partitions it has; 0: those that route 0 gives it."""

    @property
    def highest_replica_id(self) -> int:
        """The highest replica id that the partition has had: a higher id belongs to a later placement.

        A lower id that is neither among `replicas` nor leaving was removed, and is never used again.
        """
        members = (*self.replicas, *(each.replica for each in self.leaving))
        return max(self.newest_replica_id, *(each.replica_id for each in members))


class KeyRange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A partition's number, and its range of logical partitions (hash values of keys): first and count."""

    number: int
    first: int
    size: int


class RouteRecord(msgspec.Struct, frozen=True, gc=False):
    """A route of a topic: which partition holds which logical partitions, as ranges in ascending order."""

    version: int
    ranges: list[KeyRange]


class Output(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An output: a partition that a change of a route creates, with its number, its range and its group."""

    number: int
    first: int
    size: int
    group: bytes

    @property
    def range(self) -> KeyRange:
        """The output's key range in the route that the change leads to."""
        return KeyRange(self.number, self.first, self.size)


class Seal(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The end of a sealed partition: index and time of the entry that seals it, and its end offset."""

    index: int
    end_offset: int
    time_ms: int


class RouteChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A change of a topic's route: neighbouring *inputs* end, and *outputs* follow over the same range.

    `id` is the catalog's version at the begin of the change, and `version` the version of the new route.
    Inputs and outputs are in the order of their ranges. A `preparing` change may be cancelled. In a `closing`
    one the inputs are being sealed, which is final. When it is `done`, its route has become the topic's.
    """

    id: int
    version: int
    inputs: list[KeyRange]
    outputs: list[Output]
    order: Literal["strict", "weak"]
    """Whether the order of each key is kept over the change."""
    state: Literal["preparing", "closing", "done"]
    begun_ms: int
    wait_ms: int
    """How long it may be `preparing`."""
    abandon: bool = False
    """Whether stages and uploads that are in its way are dropped when that time is over."""
    force: bool = False
    """Whether it is `done` at its close, before its inputs are sealed; only if its order is weak."""
    seals: dict[int, Seal] = {}
    """By number the inputs that are sealed, as their leaders reported."""


class ChannelRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A channel of a topic: a named queue of its records (docs/channels.md).

    `id` is the catalog's version at its creation, so a channel that is deleted and made again under its name
    is another one; `version` is that of its last change. `settings` has only the settings that differ from
    their defaults; `laminar.wire.channels` defines their meaning and limits.
    """

    id: int
    version: int
    settings: dict[str, Any]
    whole_from: int
    """The lowest number of a partition that took no records yet when the channel was created.

    In that one and later ones it begins with the first record, whatever its settings say: what comes there
    would have come to the channel in the partitions before them.
    """


class TopicRecord(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One topic: its settings, partitions, route, channels and change under way.

    `partitions` is the number of partitions at its creation. `version` is the catalog's version at its last
    change: never the same for two states of a name.
    """

    name: str
    partitions: int
    replicas: int
    settings: dict[str, Setting]
    created_ms: int
    version: int
    next_partition: int = 0
    """The lowest number that no partition ever had; 0: `partitions`, as none was added."""
    listed: list[int] | None = None
    """The numbers of the partitions that exist, rising; None: those from 0 to below `partitions`."""
    route: RouteRecord | None = None
    """The present route; None: route 0, equal ranges over the partitions of the creation."""
    changes: list[RouteChange] | None = None
    """The changes that are done, oldest first, without the oldest of all; None: none."""
    change: RouteChange | None = None
    """The change that is under way; None: none."""
    channels: dict[str, ChannelRecord] | None = None
    """The channels by name; None: none."""
    owner: str = ""
    """The principal that created it, whose limits count it; empty: none, as of topics of older programs."""

    @property
    def all_numbers(self) -> Sequence[int]:
        """The numbers of the partitions that exist, rising; they may have gaps."""
        return range(self.partitions) if self.listed is None else self.listed

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the partitions that take or took records: all but the outputs of a change under way.

        These are shown to clients, and used for lookups by partition. An output has no records before its
        change is done, and may have no leader yet.
        """
        if self.change is None:
            return self.all_numbers
        outputs = {each.number for each in self.change.outputs}
        return [number for number in self.all_numbers if number not in outputs]


class Tombstone(msgspec.Struct, frozen=True, gc=False):
    """The record of a deleted partition's group: only because of it a node deletes a replica's data.

    The tombstone is kept until every replica in `replicas` is reported removed.
    """

    topic: str
    number: int
    group: bytes
    replicas: list[ReplicaRecord]
    deleted_ms: int
    version: int


class Grant(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A role on all names that begin with `prefix`, which may be empty: on all names (docs/security.md)."""

    role: str
    prefix: str


class CredentialRecord(msgspec.Struct, frozen=True, gc=False):
    """A credential of the principal `name`, with the grants of requests that prove it.

    `id` is public: 16 hexadecimal digits. For a token `digest` is the SHA-256 over `salt` and the token's
    secret bytes. For a client certificate `certificate` is its subject name, and salt and digest are empty.
    Several credentials may have one name.
    """

    id: str
    name: str
    grants: list[Grant]
    salt: bytes
    digest: bytes
    created_ms: int
    expires_ms: int = 0
    """When it ends; 0: never."""
    version: int = 0
    """The catalog's version at its creation."""
    certificate: str = ""


class LimitRecord(msgspec.Struct, frozen=True, gc=False):
    """The limits of a principal. The record of `principal` "*" is for each principal without one of its own.

    `limits` has the limits that are set, by name (`limit_rules.LIMITS`); a missing one is unlimited.
    """

    principal: str
    limits: dict[str, int]
    version: int = 0
    """The catalog's version at its last change; the next one names it."""


ANY_PRINCIPAL = "*"
"""The name of the record of limits that holds for each principal without one of its own."""


class PartitionTable(Indexed[PartitionRecord]):
    """The partitions by "topic/number"; found also by their group's id, and by the ids of their replicas."""

    KEYS: ClassVar = {
        "group": lambda partition: (partition.group,),
        # Of a replica that is leaving nothing is reported by id.
        "replica": lambda partition: [each.replica_id for each in (*partition.replicas, *partition.removed)],
    }

    __slots__ = ()


if TYPE_CHECKING:
    _Nodes = Table[str, NodeRecord]
    _Topics = Table[str, TopicRecord]
    _Partitions = PartitionTable
    _Tombstones = Table[str, Tombstone]
    _Credentials = Table[str, CredentialRecord]
    _Limits = Table[str, LimitRecord]
else:  # what msgspec decodes, and `CatalogState.__post_init__` makes tables of
    _Nodes = Mapping[str, NodeRecord]
    _Topics = Mapping[str, TopicRecord]
    _Partitions = Mapping[str, PartitionRecord]
    _Tombstones = Mapping[str, Tombstone]
    _Credentials = Mapping[str, CredentialRecord]
    _Limits = Mapping[str, LimitRecord]


class CatalogState(msgspec.Struct, frozen=True):
    """The whole catalog. `version` grows by one with each change and only then.

    Keys: `nodes` by name, `topics` by name, `partitions` by "topic/number", `tombstones` by the group id in
    hex, `credentials` by id, `limits` by principal. All six become `tables.Table`, whatever mappings they
    are given as; their order has no meaning.
    """

    cluster_id: bytes = b""
    version: int = 0
    nodes: _Nodes = Table()
    topics: _Topics = Table()
    partitions: _Partitions = PartitionTable()
    next_replica_id: int = 1
    tombstones: _Tombstones = Table()
    removed_stores: list[bytes] = []
    """Store ids of removed nodes, oldest first: their data folders are never accepted again."""
    credentials: _Credentials = Table()
    limits: _Limits = Table()

    if TYPE_CHECKING:

        def __init__(
            self,
            cluster_id: bytes = b"",
            version: int = 0,
            nodes: Mapping[str, NodeRecord] = ...,
            topics: Mapping[str, TopicRecord] = ...,
            partitions: Mapping[str, PartitionRecord] = ...,
            next_replica_id: int = 1,
            tombstones: Mapping[str, Tombstone] = ...,
            removed_stores: list[bytes] = ...,
            credentials: Mapping[str, CredentialRecord] = ...,
            limits: Mapping[str, LimitRecord] = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        kinds = (
            *(("nodes", Table), ("topics", Table), ("partitions", PartitionTable)),
            *(("tombstones", Table), ("credentials", Table), ("limits", Table)),
        )
        for name, kind in kinds:
            records = getattr(self, name)
            if not isinstance(records, kind):
                force_setattr(self, name, kind(records))

    def limit(self, principal: str, name: str) -> int | None:
        """Return a limit of a principal: from its own record, else from that of "*"; None if unlimited."""
        record = self.limits.get(principal) or self.limits.get(ANY_PRINCIPAL)
        return None if record is None else record.limits.get(name)

    def partitions_of(self, topic: str) -> list[PartitionRecord]:
        """Return the topic's partitions by number; empty when there is no such topic."""
        record = self.topics.get(topic)
        return [] if record is None else [self.partitions[f"{topic}/{n}"] for n in record.all_numbers]

    def partition_of_group(self, group: bytes) -> PartitionRecord | None:
        """Return the partition that a group belongs to; None if there is none."""
        return self.partitions.find("group", group)

    def partition_of_replica(self, replica_id: int) -> PartitionRecord | None:
        """Return the partition that a replica belongs to or was removed from; None if there is none."""
        return self.partitions.find("replica", replica_id)
