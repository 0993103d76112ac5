"""A process's view of the cluster: a copy of the catalog, and the nodes that are alive.

The controller makes this view and pushes it to the node's shards whenever it changes; a shard never asks the
catalog on the data path. A view may lag behind the catalog, so nothing is decided from it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from laminar.node.runtime.boot import CONTROLLER, Role
from laminar.node.transport.transport import Address, TcpAddress, UnixAddress
from membership.boot_history import BootRecord
from membership.catalog_delta import CatalogDelta, VersionGap, changed_by, delta_between
from membership.records import (
    CatalogState,
    CredentialRecord,
    LimitRecord,
    NodeRecord,
    PartitionRecord,
    TopicRecord,
)
from router import owner_shard, partition_hash

# Most answers of `partition_address` that are kept: those of deleted partitions are not used any more.
MOST_ADDRESSES = 1_000_000
NO_CREDENTIALS: Mapping[str, CredentialRecord] = MappingProxyType({})
NO_LIMITS: Mapping[str, LimitRecord] = MappingProxyType({})

GAP = b"gap"
"""A shard's answer to an update of another view than its own."""


class ViewMessage(msgspec.Struct, array_like=True):
    """The view as the controller pushes it: cluster id, catalog, and gossip's status of each node."""

    cluster_id: bytes
    catalog: CatalogState
    statuses: dict[str, str]
    catalog_leader: str = ""
    boots: dict[str, BootRecord] = {}
    """By node: the newest boot record of its data folder that the catalog has ever had."""
    confirmed: bool = False
    """The catalog has confirmed, since this node's start, that this node's data folder is no older copy."""
    epoch: bytes = b""
    """Names the last recovery of the catalog; empty for none."""
    code_version: int = 0
    """The code version that the cluster has enabled."""


class ViewUpdate(msgspec.Struct, array_like=True):
    """The change from one view to the next: a delta of the catalog, and the new values of all other fields.

    Both views are of one `epoch`: no recovery of the catalog lies between them.
    """

    catalog: CatalogDelta
    statuses: dict[str, str]
    catalog_leader: str
    boots: dict[str, BootRecord]
    confirmed: bool
    epoch: bytes
    code_version: int

    @classmethod
    def between(cls, before: ViewMessage, after: ViewMessage) -> ViewUpdate | None:
        """Return the update that turns one view into another; None if their epochs or clusters differ."""
        if (before.epoch, before.cluster_id) != (after.epoch, after.cluster_id):
            return None
        return cls(
            catalog=delta_between(before.catalog, after.catalog),
            statuses=after.statuses,
            catalog_leader=after.catalog_leader,
            boots=after.boots,
            confirmed=after.confirmed,
            epoch=after.epoch,
            code_version=after.code_version,
        )

    def applied_to(self, view: ViewMessage) -> ViewMessage:
        """Return the view after this change.

        Raises:
            VersionGap: the change belongs to another view (of another epoch or version).
        """
        if view.epoch != self.epoch:
            raise VersionGap(view.catalog.version, self.catalog.since)
        return ViewMessage(
            cluster_id=view.cluster_id,
            catalog=changed_by(view.catalog, self.catalog),
            statuses=self.statuses,
            catalog_leader=self.catalog_leader,
            boots=self.boots,
            confirmed=self.confirmed,
            epoch=self.epoch,
            code_version=self.code_version,
        )


class View:
    """A process's copy of the cluster's metadata: answers questions about nodes, topics and addresses."""

    def __init__(self, *, node: str, unix_name: Callable[[Role], str]) -> None:
        self.node = node
        self._unix_name = unix_name
        self.message: ViewMessage | None = None
        # The answers of `partition_address`, which every Raft message needs: kept until the nodes change.
        self._addresses: dict[tuple[str, str, int], Address | None] = {}
        self._addresses_of: Mapping[str, NodeRecord] | None = None

    @property
    def is_confirmed(self) -> bool:
        """Whether the view is at least as new as this node's start, so what it lacks did not exist then."""
        return self.message is not None and self.message.confirmed

    @property
    def cluster_id(self) -> bytes | None:
        """The cluster's id, once known."""
        return self.message.cluster_id if self.message is not None else None

    @property
    def version(self) -> int:
        """The catalog's version in this view; 0 before the first."""
        return self.message.catalog.version if self.message is not None else 0

    @property
    def code_version(self) -> int:
        """The code version that the cluster has enabled; 0 before the first view."""
        return self.message.code_version if self.message is not None else 0

    @property
    def credentials(self) -> Mapping[str, CredentialRecord]:
        """All credentials by id: the same object as long as none changes."""
        return self.message.catalog.credentials if self.message is not None else NO_CREDENTIALS

    @property
    def limits(self) -> Mapping[str, LimitRecord]:
        """The limits by principal: the same object as long as none changes."""
        return self.message.catalog.limits if self.message is not None else NO_LIMITS

    def limit(self, principal: str, name: str) -> int | None:
        """Return the value of the limit `name` that is set for a principal; None if there is none."""
        return self.message.catalog.limit(principal, name) if self.message is not None else None

    def nodes(self) -> Mapping[str, NodeRecord]:
        """Return all nodes by name."""
        return self.message.catalog.nodes if self.message is not None else {}

    def alive(self, node: str) -> bool:
        """Return whether gossip counts a node as alive or suspect; this node itself always."""
        if node == self.node:
            return True
        return self.message is not None and self.message.statuses.get(node) in ("alive", "suspect")

    def topics(self) -> Mapping[str, TopicRecord]:
        """Return all topics by name."""
        return self.message.catalog.topics if self.message is not None else {}

    def partition(self, topic: str, number: int) -> PartitionRecord | None:
        """Return a partition's record, or None if the view has none."""
        if self.message is None:
            return None
        return self.message.catalog.partitions.get(f"{topic}/{number}")

    def partitions(self) -> Mapping[str, PartitionRecord]:
        """Return all partitions by "topic/number"."""
        return self.message.catalog.partitions if self.message is not None else {}

    def partitions_of(self, topic: str) -> list[PartitionRecord]:
        """Return a topic's partitions by number; empty if the view has no such topic."""
        return [] if self.message is None else self.message.catalog.partitions_of(topic)

    def shard_on(self, node: str, topic: str, number: int) -> int | None:
        """Return the shard of a node that owns a partition; None for an unknown node."""
        record = self.nodes().get(node)
        return None if record is None else owner_shard(partition_hash(topic, number), record.shards)

    def address(self, node: str, role: int) -> Address | None:
        """Return where a process listens for its peers: role 0 is the controller, k+1 shard k.

        For a process of this node it is a Unix socket. None for an unknown node or role.
        """
        if node == self.node:
            return UnixAddress(self._unix_name(CONTROLLER if role == 0 else role - 1))
        record = self.nodes().get(node)
        if record is None or role >= len(record.peer_ports):
            return None
        return TcpAddress(record.host, record.peer_ports[role])

    def shard_url(self, node: str, shard: int) -> str | None:
        """Return the HTTP URL of a shard's own port; None for an unknown node or shard."""
        record = self.nodes().get(node)
        if record is None or shard >= len(record.shard_http_ports):
            return None
        return f"{record.scheme}://{host_in_url(record.host)}:{record.shard_http_ports[shard]}"

    def partition_address(self, node: str, topic: str, number: int) -> Address | None:
        """Return where the shard that owns a partition on `node` listens for its peers; None if unknown."""
        nodes = self.message.catalog.nodes if self.message is not None else None
        if self._addresses_of is not nodes or len(self._addresses) > MOST_ADDRESSES:
            self._addresses_of = nodes
            self._addresses = {}
        key = (node, topic, number)
        if key not in self._addresses:
            shard = self.shard_on(node, topic, number)
            self._addresses[key] = None if shard is None else self.address(node, shard + 1)
        return self._addresses[key]

    def partition_url(self, node: str, topic: str, number: int) -> str | None:
        """Return the HTTP URL of the shard that owns a partition on `node`; None if unknown."""
        shard = self.shard_on(node, topic, number)
        return None if shard is None else self.shard_url(node, shard)


def host_in_url(host: str) -> str:
    """Return a host as it is written in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
