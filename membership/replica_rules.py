"""The rules of replica moves in the catalog: one pure function for each step.

The group's own log says which replicas are its members. The catalog says which ones should be, and what nodes
and leaders have reported: the new replica is *made* (its node has created it); the old one is *leaving* until
its group's leader reports that its removal is committed, then *removed* until its node has deleted its data.
A replica id that left never comes back. The functions are rules as in `catalog_rules`.
"""

from __future__ import annotations

from msgspec.structs import replace

from membership.changes import Change, next_state, same_state
from membership.records import (
    CatalogState,
    LeavingReplica,
    PartitionRecord,
    ReplicaRecord,
)
from membership.requests import (
    AcceptLoss,
    ChangeReplicas,
    ReplaceReplica,
    ReportRemovals,
    ReportReplicas,
    ReportRolledBack,
)

# Most entries in `PartitionRecord.removed`, the replicas that their nodes have not reported as deleted; the
# oldest are dropped. A node that is away for more moves than that keeps its replica's data until an operator
# deletes it.
MAX_REMOVED = 32

MOST_LEAVING = 2
"""Most replicas of a partition that leave at a time: one of them by choice at most."""


def change_replicas(state: CatalogState, request: ChangeReplicas) -> Change:
    """Perform one step of a replica move: dispatch on the kind of the request."""
    match request.change:
        case AcceptLoss() as word:
            return accept_loss(state, word)
        case ReplaceReplica() as step:
            return replace_replica(state, step)
        case ReportRemovals() as report:
            return report_removals(state, report)
        case ReportReplicas() as own:
            return report_replicas(state, own)
        case ReportRolledBack() as old:
            return report_rolled_back(state, old)


def accept_loss(state: CatalogState, request: AcceptLoss) -> Change:
    """Record an operator's decision: a group goes on with one replica, and the others are abandoned.

    Nothing changes if the result is `absent` (there is no such group), `conflict` (the partition's version is
    not the request's) or `invalid` (the group is not live, or the request names other replicas than it has).
    """
    partition = state.partitions.get(request.partition)
    if partition is None or partition.group != request.group:
        return same_state(state, "absent", f"no such group as {request.partition}")
    if partition.version != request.version:
        return same_state(state, "conflict", f"version is {partition.version}")
    kept, gone = request.loss.kept, set(request.loss.abandoned)
    known = {r.replica_id: r for r in partition.replicas}
    members = known.keys() | {each.replica.replica_id for each in partition.leaving}
    if partition.state != "live" or kept not in known or known[kept].abandoned or not gone:
        return same_state(state, "invalid", f"replica {kept} cannot go on without {sorted(gone)}")
    if kept in gone or not gone <= members:
        return same_state(state, "invalid", f"{sorted(gone)} are not the others of {members}")
    version = state.version + 1
    partition = replace(
        partition,
        replicas=[
            replace(r, lost=True, abandoned=True) if r.replica_id in gone else r for r in partition.replicas
        ],
        losses=[*partition.losses, replace(request.loss, version=version)],
        version=version,
    )
    return next_state(state, "updated", {}, partitions=state.partitions | {request.partition: partition})


def replace_replica(state: CatalogState, request: ReplaceReplica) -> Change:
    """Replace a replica by a new one on the node of the request.

    The result is `conflict`, and nothing changes, if the partition's version is not the request's.
    """
    partition = state.partitions.get(request.partition)
    if partition is None or partition.group != request.group:
        return same_state(state, "absent", f"no such group as {request.partition}")
    if partition.version != request.version:
        return same_state(state, "conflict", f"version is {partition.version}")
    why_not = _why_not(state, partition, request)
    if why_not:
        return same_state(state, "conflict", why_not)
    version = state.version + 1
    new = ReplicaRecord(state.next_replica_id, request.node, state.nodes[request.node].store_id)
    old = next(r for r in partition.replicas if r.replica_id == request.replica_id)
    partition = replace(
        partition,
        replicas=[new if r is old else r for r in partition.replicas],
        leaving=[*partition.leaving, LeavingReplica(old, request.why)],
        version=version,
        newest_replica_id=new.replica_id,
        why=request.because,
    )
    return next_state(
        state,
        "updated",
        {},
        partitions=state.partitions | {request.partition: partition},
        next_replica_id=state.next_replica_id + 1,
    )


def leaving_by_choice(partition: PartitionRecord) -> list[ReplicaRecord]:
    """Return the replicas that are moved away: they leave only after the new replicas have become voters."""
    return [each.replica for each in partition.leaving if each.why == "moved"]


def _why_not(state: CatalogState, partition: PartitionRecord, request: ReplaceReplica) -> str:
    if partition.state != "live":
        return "the partition is still being created"
    # The group removes a dead or lost one first, and the one that leaves by choice may be waiting for it.
    if len(partition.leaving) >= (1 if request.why == "moved" else MOST_LEAVING):
        return "another replica is leaving"
    if request.replica_id not in [r.replica_id for r in partition.replicas]:
        return f"replica {request.replica_id} is not in its place any more"
    others = [r for r in partition.replicas if r.replica_id != request.replica_id]
    old = next(r for r in partition.replicas if r.replica_id == request.replica_id)
    if old.made and not all(r.made for r in others):
        return "another replica is still being made"  # one that is not made itself has never voted
    holding = [r.node for r in (*others, *leaving_by_choice(partition))]
    if request.node not in state.nodes or request.node in holding:
        return f"{request.node} is not known, or holds a replica already"
    if state.nodes[request.node].draining:
        return f"{request.node} is draining"
    return ""


def report_removals(state: CatalogState, request: ReportRemovals) -> Change:
    """Record removals that a group has committed; the nodes may then delete these replicas.

    The report may come late, or twice: it stays true, because a removed replica id is never used again.
    """
    partition = state.partitions.get(request.partition)
    if partition is None or partition.group != request.group:
        return same_state(state, "absent")
    gone = [each for each in partition.leaving if each.replica.replica_id in request.removed]
    if not gone:
        return same_state(state, "unchanged")
    partition = replace(
        partition,
        leaving=[each for each in partition.leaving if each not in gone],
        removed=[*partition.removed, *(each.replica for each in gone)][-MAX_REMOVED:],
        version=state.version + 1,
    )
    return next_state(state, "marked", {}, partitions=state.partitions | {request.partition: partition})


def report_replicas(state: CatalogState, request: ReportReplicas) -> Change:
    """Record a node's report about its own replicas: which were created, lost or deleted."""

    def own(replica: ReplicaRecord, ids: list[int]) -> bool:
        # A replica may be lost together with its store, so the node may report that with another store id;
        # the other two reports only count with the replica's own.
        return replica.node == request.node and replica.replica_id in ids

    changed = {}
    for key, partition in _partitions_of(state, [*request.made, *request.lost, *request.deleted]).items():
        replicas = [
            replace(
                r,
                made=r.made or (own(r, request.made) and r.store_id == request.store_id),
                lost=r.lost or own(r, request.lost),
            )
            for r in partition.replicas
        ]
        removed = [
            r for r in partition.removed if not (own(r, request.deleted) and r.store_id == request.store_id)
        ]
        if replicas != partition.replicas or removed != partition.removed:
            changed[key] = replace(partition, replicas=replicas, removed=removed, version=state.version + 1)
    if not changed:
        return same_state(state, "unchanged")
    return next_state(state, "marked", {}, partitions=state.partitions | changed)


def _partitions_of(state: CatalogState, replica_ids: list[int]) -> dict[str, PartitionRecord]:
    found = (state.partition_of_replica(each) for each in replica_ids)
    return {f"{each.topic}/{each.number}": each for each in found if each is not None}


def report_rolled_back(state: CatalogState, request: ReportRolledBack) -> Change:
    """Record a node's report that its folder is an older copy.

    Nothing changes if the catalog's boot record of the node is not the one that the report contradicts: a
    newer folder has registered since.
    """
    node = state.nodes.get(request.node)
    if node is None:
        return same_state(state, "absent", f"no node {request.node!r}")
    if node.store_id != request.store_id or node.boot != request.known or node.rolled_back:
        return same_state(state, "unchanged")
    nodes = state.nodes | {node.node: replace(node, rolled_back=True)}
    return next_state(state, "marked", {}, nodes=nodes)
