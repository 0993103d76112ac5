"""A catalog with one partition on the nodes a, b and c."""

from __future__ import annotations

from membership.records import (
    CatalogState,
    NodeRecord,
    PartitionRecord,
    ReplicaRecord,
    TopicRecord,
)

GROUP = b"g" * 16


def node(name: str) -> NodeRecord:
    return NodeRecord(name, name.encode() * 16, name, 1, [2], [3, 4], 5, 1)


def state_of(*nodes: str) -> CatalogState:
    replicas = [ReplicaRecord(i + 1, n, n.encode() * 16, made=True) for i, n in enumerate("abc")]
    return CatalogState(
        version=10,
        nodes={name: node(name) for name in nodes},
        topics={"t": TopicRecord("t", 1, 3, {}, 1, 5)},
        partitions={"t/0": PartitionRecord("t", 0, GROUP, "live", replicas, 1, version=7)},
        next_replica_id=4,
    )
