"""The rules of changes to the wanted placement: nodes drained and removed, partitions grown and pinned.

One pure function for each request, as in `catalog_rules`. Each compares the version of the record that it
changes with the version in the request, so if two administrators decide at the same time, one is refused.
Which node *should* hold what is decided by the proposer: the planner of the catalog's leader, or an operator.
These rules refuse only what would break an invariant:

1. A partition is changed by one step at a time: no step begins while a replica is leaving or is not made yet.
2. A node holds at most one replica of a partition, and gets none while it is draining.
3. A partition keeps at least one replica, and as many as are asked for.
4. A node is removed only when no replica is recorded for it, and its store is never accepted again.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from msgspec.structs import replace

from membership.changes import Change, next_state, same_state
from membership.records import (
    CatalogState,
    LeavingReplica,
    NodeRecord,
    PartitionRecord,
    ReplicaRecord,
    Tombstone,
)
from membership.requests import (
    AddReplicas,
    AlterNode,
    AlterTopic,
    ChangePlacement,
    PinPartition,
    PreferLeaders,
    RemoveNode,
    RemoveReplica,
)

MAX_REMOVED_STORES = 1024
"""Most store ids of removed nodes that are kept; the oldest are dropped."""

MAX_TEXT = 200
"""Most characters of a zone, and of a pin's owner and reason."""


def change_placement(state: CatalogState, request: ChangePlacement) -> Change:
    """Perform one change of the wanted placement: dispatch on the kind of the request."""
    match request.change:
        case AddReplicas() as add:
            return add_replicas(state, add)
        case RemoveReplica() as remove:
            return remove_replica(state, remove)
        case PreferLeaders() as prefer:
            return prefer_leaders(state, prefer)
        case PinPartition() as pin:
            return pin_partition(state, pin)
        case AlterTopic() as topic:
            return alter_topic(state, topic)
        case AlterNode() as node:
            return alter_node(state, node)
        case RemoveNode() as gone:
            return remove_node(state, gone)


# -- steps of the planner --------------------------------------------------------------------


def add_replicas(state: CatalogState, request: AddReplicas) -> Change:
    """Add replicas to a partition, all at once; its leader makes them voters when they have caught up."""
    partition, refusal = _at_version(state, request.partition, request.version, request.group)
    if partition is None:
        return refusal
    held = [replica.node for replica in partition.replicas]
    wanted = _wanted_number(state, partition)
    unfit = [node for node in request.nodes if not _may_hold(state, node) or node in held]
    if unfit or not request.nodes or len(set(request.nodes)) != len(request.nodes):
        return same_state(
            state, "conflict", f"{request.nodes} cannot hold further replicas: unfit are {unfit}"
        )
    if len(held) + len(request.nodes) > wanted:
        return same_state(state, "conflict", f"{len(held)} replicas, {wanted} are asked for")
    first = state.next_replica_id
    new = [
        ReplicaRecord(first + number, node, state.nodes[node].store_id)
        for number, node in enumerate(request.nodes)
    ]
    after = replace(
        partition,
        replicas=[*partition.replicas, *new],
        newest_replica_id=new[-1].replica_id,
        why=request.because,
    )
    return _with_partition(state, request.partition, after, next_replica_id=first + len(new))


def remove_replica(state: CatalogState, request: RemoveReplica) -> Change:
    """Mark a replica of a partition that has too many as leaving; the group's leader then removes it."""
    partition, refusal = _at_version(state, request.partition, request.version, request.group)
    if partition is None:
        return refusal
    wanted = _wanted_number(state, partition)
    if len(partition.replicas) <= max(wanted, 1):
        return same_state(state, "conflict", f"{len(partition.replicas)} replicas, {wanted} are asked for")
    old = next((each for each in partition.replicas if each.replica_id == request.replica_id), None)
    if old is None:
        return same_state(state, "conflict", f"replica {request.replica_id} is not in its place any more")
    after = replace(
        partition,
        replicas=[each for each in partition.replicas if each is not old],
        leaving=[LeavingReplica(old, "moved")],
        newest_replica_id=max(partition.newest_replica_id, *(r.replica_id for r in partition.replicas)),
        why=request.because,
    )
    return _with_partition(state, request.partition, after)


def _at_version(
    state: CatalogState, key: str, version: int, group: bytes | None = None
) -> tuple[PartitionRecord | None, Change]:
    """Return the partition if it has this version and a step may begin on it; else None and the refusal."""
    partition = state.partitions.get(key)
    if partition is None or group not in (None, partition.group):
        return None, same_state(state, "absent", f"no such group as {key}")
    if partition.version != version:
        return None, same_state(state, "conflict", f"version is {partition.version}")
    if group is not None:
        if partition.state != "live":
            return None, same_state(state, "conflict", "the partition is still being created")
        if partition.leaving or not all(each.made for each in partition.replicas):
            return None, same_state(state, "conflict", "another step of this partition is under way")
    return partition, same_state(state, "unchanged")


def _wanted_number(state: CatalogState, partition: PartitionRecord) -> int:
    """Return how many replicas a partition should have."""
    return state.topics[partition.topic].replicas if partition.pin is None else len(partition.pin.nodes)


def _may_hold(state: CatalogState, name: str) -> bool:
    """Return whether a node may get replicas."""
    node = state.nodes.get(name)
    return node is not None and not node.draining and not node.rolled_back


def prefer_leaders(state: CatalogState, request: PreferLeaders) -> Change:
    """Record the preferred leaders; partitions without a replica on the chosen node are skipped.

    A partition keeps its version, so that a step that was decided before stays valid.
    """
    changed = {}
    for key, node in request.nodes.items():
        partition = state.partitions.get(key)
        if partition is None or partition.preferred_leader == node:
            continue
        if node in [replica.node for replica in partition.replicas]:
            changed[key] = replace(partition, preferred_leader=node)
    if not changed:
        return same_state(state, "unchanged")
    return next_state(state, "updated", {}, partitions=state.partitions | changed)


# -- what operators ask for ------------------------------------------------------------------


def pin_partition(state: CatalogState, request: PinPartition) -> Change:
    """Pin a partition to nodes, or unpin it; the planner moves its replicas."""
    partition, refusal = _at_version(state, request.partition, request.version)
    if partition is None:
        return refusal
    pin = request.pin
    if pin == partition.pin:
        return same_state(state, "unchanged")
    if pin is not None:
        unknown = sorted(set(pin.nodes) - state.nodes.keys())
        if unknown or not pin.nodes or len(set(pin.nodes)) != len(pin.nodes):
            return same_state(
                state, "invalid", f"a pin needs known nodes, each once; {unknown} of {pin.nodes} are not"
            )
        draining = [name for name in pin.nodes if not _may_hold(state, name)]
        if draining:
            return same_state(state, "invalid", f"a pin to nodes that may hold nothing: {draining}")
        if not pin.owner or len(pin.owner) > MAX_TEXT or not pin.reason or len(pin.reason) > MAX_TEXT:
            return same_state(
                state, "invalid", f"a pin needs an owner and a reason of at most {MAX_TEXT} characters"
            )
    return _with_partition(state, request.partition, replace(partition, pin=pin))


def alter_topic(state: CatalogState, request: AlterTopic) -> Change:
    """Change a topic's number of replicas and settings; the planner grows or shrinks its partitions."""
    topic = state.topics.get(request.name)
    if topic is None:
        return same_state(state, "absent", f"no topic {request.name!r}")
    if request.version != topic.version:
        return same_state(state, "conflict", f"version is {topic.version}", topic=topic)
    replicas = topic.replicas if request.replicas is None else request.replicas
    merged = topic.settings | request.changes
    settings = {name: value for name, value in merged.items() if value is not None}
    fewest = settings.get("min_replicas", 1)
    if replicas < 1 or (isinstance(fewest, int) and fewest > replicas):
        return same_state(state, "invalid", f"{replicas} replicas with min_replicas {fewest}")
    after = replace(topic, replicas=replicas, settings=settings, version=state.version + 1)
    if (replicas, settings) == (topic.replicas, topic.settings):
        return same_state(state, "unchanged", topic=topic)
    return next_state(state, "updated", {"topic": after}, topics=state.topics | {topic.name: after})


def alter_node(state: CatalogState, request: AlterNode) -> Change:
    """Change the fields of a node's record that an operator sets: drained or not, weight, zone."""
    node = state.nodes.get(request.node)
    if node is None:
        return same_state(state, "absent", f"no node {request.node!r}")
    if node.version != request.version:
        return same_state(state, "conflict", f"version is {node.version}", node=node)
    after = node
    if request.draining is not msgspec.UNSET:
        after = replace(after, draining=request.draining)
    if request.set_weight is not msgspec.UNSET:
        weight = request.set_weight
        if weight is not None and not (weight >= 0 and math.isfinite(weight)):
            return same_state(state, "invalid", f"weight {weight}")
        after = replace(after, set_weight=weight)
    if request.set_zone is not msgspec.UNSET:
        if request.set_zone is not None and len(request.set_zone) > MAX_TEXT:
            return same_state(state, "invalid", f"a zone has at most {MAX_TEXT} characters")
        after = replace(after, set_zone=request.set_zone)
    if after == node:
        return same_state(state, "unchanged", node=node)
    after = replace(after, version=state.version + 1)
    return next_state(state, "updated", {"node": after}, nodes=state.nodes | {node.node: after})


def remove_node(state: CatalogState, request: RemoveNode) -> Change:
    """Remove a drained node: a new store may register under its name, its own store never again."""
    node = state.nodes.get(request.node)
    if node is None:
        return same_state(state, "absent", f"no node {request.node!r}")
    if node.version != request.version:
        return same_state(state, "conflict", f"version is {node.version}", node=node)
    if not node.draining:
        return same_state(state, "conflict", f"{node.node!r} is not draining")
    held = _held_by(state, node)
    if held:
        holds = f"{node.node!r} still holds, or is pinned to hold, {len(held)} partitions: {held[:3]}"
        return same_state(state, "conflict", holds)
    partitions = {
        key: replace(
            partition, removed=[each for each in partition.removed if each.store_id != node.store_id]
        )
        for key, partition in state.partitions.items()
        if any(each.store_id == node.store_id for each in partition.removed)
    }
    return next_state(
        state,
        "deleted",
        {"node": node},
        nodes=state.nodes.changed({node.node: None}),
        partitions=state.partitions | partitions,
        tombstones=state.tombstones.changed(_without_store(state, node.store_id)),
        removed_stores=[*state.removed_stores, node.store_id][-MAX_REMOVED_STORES:],
    )


def _held_by(state: CatalogState, node: NodeRecord) -> list[str]:
    """Return, sorted, the partitions that have a replica recorded on the node, or are pinned to it."""
    return sorted(
        key
        for key, partition in state.partitions.items()
        if any(each.node == node.node for each in partition.replicas)
        or any(each.replica.node == node.node for each in partition.leaving)
        or (partition.pin is not None and node.node in partition.pin.nodes)
    )


def _without_store(state: CatalogState, store_id: bytes) -> dict[str, Tombstone | None]:
    """Return the tombstones, by key, without the replicas of a store that will report nothing any more.

    Only those that change; None for a tombstone that has no other replicas.
    """
    changed: dict[str, Tombstone | None] = {}
    for key, stone in state.tombstones.items():
        left = [each for each in stone.replicas if each.store_id != store_id]
        if not left:
            changed[key] = None
        elif len(left) < len(stone.replicas):
            changed[key] = replace(stone, replicas=left)
    return changed


def _with_partition(state: CatalogState, key: str, partition: PartitionRecord, **fields: Any) -> Change:
    partition = replace(partition, version=state.version + 1)
    return next_state(state, "updated", {}, partitions=state.partitions | {key: partition}, **fields)
