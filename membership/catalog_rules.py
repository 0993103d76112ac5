"""The rules of the catalog's changes: one pure function for each command. Here are those of nodes and topics.

``rule(state, request) -> (state afterwards, result)``. A rule checks the request against the state, and
returns either the same state or a new one with the next version. It reads no clock and draws no random
number, because every node applies it by itself and must get the same state. How commands are encoded,
committed and applied is in `catalog` and `replicated`. Invariants:

1. A replica id is given once: `next_replica_id` only grows.
2. A group id, once seen (also in a tombstone), is never taken for another group.
3. A partition goes `creating` -> `live` -> tombstone (the record of a deleted group), never back.
4. A channel's id is given once, and its `FIXED` settings stay for its life (`channel_rules`).
5. A credential never changes: it is made, and revoked (`credential_rules`).
6. A principal owns no more objects in the catalog than its limits allow, also if it sends two requests at
   once. Lowered limits remove nothing (`limit_rules`).
"""

from __future__ import annotations

import math
from typing import Literal

from msgspec.structs import replace

from membership.boot_history import BootRecord, contradicts, newer
from membership.changes import Change, next_state, same_state
from membership.limit_rules import LIMITS_SINCE, over_limit
from membership.records import (
    CatalogState,
    NodeRecord,
    PartitionRecord,
    ReplicaRecord,
    Tombstone,
    TopicRecord,
)
from membership.requests import (
    CreateTopic,
    DeleteTopic,
    FoundCluster,
    MarkMade,
    MarkRemoved,
    RegisterNode,
    UpdateTopicSettings,
)

GROUP_ID_BYTES = 16

REFUSE_TOO_OLD = 2
"""From this code version on, a node whose program does not know the enabled version is not registered."""


def found_cluster(state: CatalogState, request: FoundCluster) -> Change:
    """Give the cluster its id, once; the same id again changes nothing."""
    if not request.cluster_id:
        return same_state(state, "invalid", "an empty cluster id")
    if state.cluster_id:
        same = state.cluster_id == request.cluster_id
        return same_state(state, "exists" if same else "already_exists")
    return next_state(state, "created", {}, cluster_id=request.cluster_id)


def register_node(state: CatalogState, request: RegisterNode, *, enabled: int = 0) -> Change:
    """Record a node, or change its addresses, shards or announced weight and zone.

    Refused are another store under a known name, an older copy of the known store, and the store of a removed
    node. Also refused is a node whose program does not know `enabled`, the code version that the cluster has
    enabled, because it could not apply the catalog's commands.
    """
    record = request.record
    if enabled >= REFUSE_TOO_OLD and record.code_version < enabled:
        # "invalid" is an outcome that older programs can decode.
        return same_state(state, "invalid", too_old(record.node, record.code_version, enabled=enabled))
    if record.store_id in state.removed_stores:
        return same_state(
            state, "removed", f"this data directory is of a node {record.node!r} that was removed"
        )
    known = state.nodes.get(record.node)
    if known is None and request.known:
        return same_state(state, "absent", f"no node {record.node!r}")
    if known is not None and known.store_id != record.store_id:
        return same_state(
            state, "store_changed", f"{record.node!r} is known with another data directory", node=known
        )
    if known is not None and contradicts(_lives(request), known.boot):
        return same_state(state, "rolled_back", _how_old(record, known), node=known)
    wrong = _wrong_node(state, request)
    if wrong:
        return same_state(state, "invalid", wrong)

    next_replica_id = state.next_replica_id
    if known is not None:
        # A late message may show an earlier boot record.
        record = replace(
            kept_by_command(record, known),
            catalog_replica=known.catalog_replica,
            boot=newer(record.boot, known.boot),
        )
    elif record.catalog_replica == 0:
        record = replace(record, catalog_replica=next_replica_id)
    next_replica_id = max(next_replica_id, record.catalog_replica + 1)
    if record == known:
        return same_state(state, "exists", node=known)
    return next_state(
        state,
        "created" if known is None else "updated",
        {"node": record},
        nodes=state.nodes | {record.node: record},
        next_replica_id=next_replica_id,
    )


def too_old(node: str, code_version: int, *, enabled: int) -> str:
    """Return the reason for which a node with this code version is refused, as text for people."""
    return (
        f"the program of node {node!r} is too old: it knows code version {code_version}, and the cluster has "
        f"enabled {enabled}: start it with a program as new as that of the other nodes"
    )


def kept_by_command(record: NodeRecord, known: NodeRecord) -> NodeRecord:
    """Return a node's new registration, with the fields that only commands change copied from `known`."""
    return replace(
        record,
        draining=known.draining,
        set_weight=known.set_weight,
        set_zone=known.set_zone,
        version=known.version,
    )


def _lives(request: RegisterNode) -> list[BootRecord]:
    life = request.record.boot
    return request.former if life is None else [*request.former, life]


def _how_old(record: NodeRecord, known: NodeRecord) -> str:
    assert known.boot is not None
    number = record.boot.number if record.boot is not None else 0
    return (
        f"the data directory of {record.node!r} is an older copy: it begins start {number} of a history that "
        f"is not the one the cluster knows up to start {known.boot.number}, tick {known.boot.tick}"
    )


def _wrong_node(state: CatalogState, request: RegisterNode) -> str:
    record = request.record
    if not record.node or not record.store_id:
        return "a node needs a name and a store id"
    if not (record.weight >= 0 and math.isfinite(record.weight)):
        return f"weight {record.weight}"
    if record.shards < 1 or len(record.shard_http_ports) != record.shards:
        return f"{record.shards} shards with {len(record.shard_http_ports)} HTTP ports"
    if len(record.peer_ports) != record.shards + 1:
        return f"{record.shards} shards with {len(record.peer_ports)} peer ports"
    other = next((n for n in state.nodes.values() if n.store_id == record.store_id), None)
    if other is not None and other.node != record.node:
        return f"this data directory is known as {other.node!r}"
    given = record.catalog_replica
    if given < 0 or (record.node not in state.nodes and 0 < given < state.next_replica_id):
        return f"catalog replica {given} was given before; the next is {state.next_replica_id}"
    return ""


def create_topic(state: CatalogState, request: CreateTopic, *, enabled: int = LIMITS_SINCE) -> Change:
    """Record a topic, its placement, and its partitions in state `creating`; assign their replica ids.

    `enabled` is the code version enabled at this entry of the log: before `LIMITS_SINCE` no topic has an
    owner.
    """
    wrong = _wrong_topic(request)
    if wrong:
        return same_state(state, "invalid", wrong)
    known = state.topics.get(request.name)
    if known is not None:
        wanted = (request.partitions, request.replicas, request.settings)
        same = wanted == (known.partitions, known.replicas, known.settings)
        return same_state(state, "exists" if same else "already_exists", topic=known)
    conflict = _conflict_of_topic(state, request)
    if conflict:
        return same_state(state, "conflict", conflict)
    owner = request.owner if enabled >= LIMITS_SINCE else ""
    over = over_limit(state, owner, topics=1, partitions=request.partitions)
    if over is not None:
        return state, over

    replica_id = state.next_replica_id
    partitions = {}
    for number, (group, nodes) in enumerate(zip(request.groups, request.placement, strict=True)):
        replicas = []
        for node in nodes:
            replicas.append(ReplicaRecord(replica_id, node, state.nodes[node].store_id))
            replica_id += 1
        partitions[f"{request.name}/{number}"] = PartitionRecord(
            request.name, number, group, "creating", replicas, request.created_ms
        )
    topic = TopicRecord(
        request.name,
        request.partitions,
        request.replicas,
        request.settings,
        request.created_ms,
        state.version + 1,
        owner=owner,
    )
    return next_state(
        state,
        "created",
        {"topic": topic},
        topics=state.topics | {topic.name: topic},
        partitions=state.partitions | partitions,
        next_replica_id=replica_id,
    )


def _wrong_topic(request: CreateTopic) -> str:
    if not request.name or request.partitions < 1 or request.replicas < 1:
        return "a topic needs a name, a partition and a replica"
    if len(request.groups) != request.partitions or len(request.placement) != request.partitions:
        return (
            f"{request.partitions} partitions, {len(request.groups)} groups, {len(request.placement)} places"
        )
    if any(len(group) != GROUP_ID_BYTES or not any(group) for group in request.groups):
        return f"a group id is {GROUP_ID_BYTES} bytes and not zero"
    if len(set(request.groups)) != len(request.groups):
        return "two partitions with one group id"
    for nodes in request.placement:
        if not 1 <= len(nodes) <= request.replicas or len(set(nodes)) != len(nodes):
            return f"{request.replicas} replicas placed on {nodes}"
    return ""


def _conflict_of_topic(state: CatalogState, request: CreateTopic) -> str:
    absent = {node for nodes in request.placement for node in nodes} - state.nodes.keys()
    if absent:
        return f"placed on unknown nodes {sorted(absent)}"
    if any(state.partition_of_group(each) or each.hex() in state.tombstones for each in request.groups):
        return "a group id was used before"
    return ""


def mark_made(state: CatalogState, request: MarkMade) -> Change:
    """Record that a node has created its replicas; the last replica to be created makes a partition live.

    Groups that aren't known, and replicas that were promised to another store, are skipped.
    """
    found = map(state.partition_of_group, dict.fromkeys(request.groups))
    asked = [partition for partition in found if partition is not None]
    changed = {}
    for partition in asked:
        if partition.state != "creating":
            continue
        replicas = [
            replace(r, made=True) if (r.node, r.store_id) == (request.node, request.store_id) else r
            for r in partition.replicas
        ]
        if replicas == partition.replicas:
            continue
        now: Literal["creating", "live"] = "live" if all(r.made for r in replicas) else "creating"
        changed[f"{partition.topic}/{partition.number}"] = replace(partition, replicas=replicas, state=now)
    made = {partition.group for partition in changed.values() if partition.state == "live"}
    live = [each.group for each in asked if each.state == "live" or each.group in made]
    if not changed:
        return same_state(state, "unchanged", groups=live)
    return next_state(state, "marked", {"groups": live}, partitions=state.partitions | changed)


def delete_topic(state: CatalogState, request: DeleteTopic) -> Change:
    """Remove a topic and leave a tombstone for each of its groups, those of a change under way as well."""
    topic = state.topics.get(request.name)
    if topic is None:
        return same_state(state, "absent", f"no topic {request.name!r}")
    if request.version is not None and request.version != topic.version:
        return same_state(state, "conflict", f"version is {topic.version}", topic=topic)
    gone = state.partitions_of(request.name)
    tombstones = {p.group.hex(): tombstone_of(p, request.deleted_ms, state.version + 1) for p in gone}
    return next_state(
        state,
        "deleted",
        {"topic": topic, "groups": [p.group for p in gone]},
        topics=state.topics.changed({request.name: None}),
        partitions=state.partitions.changed({f"{p.topic}/{p.number}": None for p in gone}),
        tombstones=state.tombstones | tombstones,
    )


def tombstone_of(partition: PartitionRecord, deleted_ms: int, version: int) -> Tombstone:
    """Return the record of a deleted group: it lists the replicas whose nodes have data to delete."""
    replicas = [*partition.replicas, *(each.replica for each in partition.leaving), *partition.removed]
    return Tombstone(partition.topic, partition.number, partition.group, replicas, deleted_ms, version)


def mark_removed(state: CatalogState, request: MarkRemoved) -> Change:
    """Record that a node removed its replicas of deleted groups; the last one removes the tombstone."""
    changed: dict[str, Tombstone] = {}
    for key in (group.hex() for group in request.groups):
        stone = state.tombstones.get(key)
        if stone is None:
            continue
        left = [r for r in stone.replicas if (r.node, r.store_id) != (request.node, request.store_id)]
        if left != stone.replicas:
            changed[key] = replace(stone, replicas=left)
    if not changed:
        return same_state(state, "unchanged")
    finished = [stone.group for stone in changed.values() if not stone.replicas]
    stones = {key: stone if stone.replicas else None for key, stone in changed.items()}
    tombstones = state.tombstones.changed(stones)
    return next_state(state, "marked", {"groups": finished}, tombstones=tombstones)


def update_topic_settings(state: CatalogState, request: UpdateTopicSettings) -> Change:
    """Change settings of a topic if its version is the request's; a value of None removes a setting."""
    topic = state.topics.get(request.name)
    if topic is None:
        return same_state(state, "absent", f"no topic {request.name!r}")
    if request.version != topic.version:
        return same_state(state, "conflict", f"version is {topic.version}", topic=topic)
    merged = topic.settings | request.changes
    settings = {name: value for name, value in merged.items() if value is not None}
    if settings == topic.settings:
        return same_state(state, "unchanged", topic=topic)
    topic = replace(topic, settings=settings, version=state.version + 1)
    return next_state(state, "updated", {"topic": topic}, topics=state.topics | {topic.name: topic})
