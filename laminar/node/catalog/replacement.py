"""Which replicas get a new place: the catalog leader's part of replacement (docs/consensus.md#replacement).

`plan` decides from the catalog alone and from the nodes that are gone for long. A replica is given another
place when its node is gone, when its node reports that it is lost, or when its node has come back with
another store or with an older copy of it. Nothing is planned while more than one node in four is gone: then
the network, or this leader, is more likely at fault than the nodes. (Nodes of which everything was replaced
before do not count.) A step carries the version of the partition that it was decided on. Of each partition
one replica is replaced at a time, and each node gets at most `AT_ONCE` new replicas at a time.

`Absence` is the leader's own measure: a node is gone when neither gossip nor group 0 has seen it for the
whole of `replace_after_ms`. A new leader begins to count at zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from membership.records import (
    CatalogState,
    PartitionRecord,
    ReplicaRecord,
)
from membership.requests import (
    ReplaceReplica,
)
from router import partition_hash, place

AT_ONCE = 2
# While more than one node in this many is gone, nothing is replaced.
GONE_PART = 4


class Absence:
    """The time since when each node has not been seen, in ms of the monotonic clock."""

    def __init__(self) -> None:
        self._since_ms: dict[str, int] = {}

    def observe(self, absent: Iterable[str], *, now_ms: int) -> None:
        """Record that the nodes in `absent` are not seen now, and that all others are."""
        self._since_ms = {node: self._since_ms.get(node, now_ms) for node in absent}

    def longer_than(self, ms: int, *, now_ms: int) -> set[str]:
        """Return the nodes that have been absent for `ms` or longer; none where `ms` is 0."""
        return {node for node, since_ms in self._since_ms.items() if ms and now_ms - since_ms >= ms}

    def forget(self) -> None:
        """Clear the record, because another node leads now."""
        self._since_ms = {}


def too_many_gone(state: CatalogState, gone: Collection[str], *, voting: Collection[str] = ()) -> bool:
    """Return whether too many nodes are gone for an automatic replacement.

    A node that is gone does not count once all its replicas have been replaced, so one that died a year ago
    does not prevent the replacements of today. Nor does a node count of which an operator has abandoned a
    replica: that decision says that it is gone for good. `voting`: the nodes of the catalog's voters.
    """
    holding = set(voting)
    decided: set[str] = set()
    for partition in state.partitions.values():
        # An abandoned replica is gone for good: its node holds nothing of it that counts.
        holding.update(replica.node for replica in partition.replicas if not replica.abandoned)
        holding.update(each.replica.node for each in partition.leaving)
        decided.update(each.node for each in (*partition.replicas, *partition.removed) if each.abandoned)
        decided.update(each.replica.node for each in partition.leaving if each.replica.abandoned)
    abandoned = (set(gone) - holding) | (set(gone) & decided)
    counted = state.nodes.keys() - abandoned
    return GONE_PART * len(counted & set(gone)) > len(counted)


def plan(
    state: CatalogState,
    *,
    gone: Collection[str],
    weights: Mapping[str, float],
    voting: Collection[str] = (),
) -> list[ReplaceReplica]:
    """Return the replacements to begin now; empty while too many nodes are gone.

    `gone`: nodes that have been absent for long. `weights`: the placement weights of the nodes that may take
    replicas. `voting` as in `too_many_gone`.
    """
    if too_many_gone(state, gone, voting=voting):
        return []
    busy = Counter(
        replica.node
        for partition in state.partitions.values()
        if partition.state == "live"
        for replica in partition.replicas
        if not replica.made
    )
    steps = []
    for key, partition in state.partitions.items():
        step = _step(state, key, partition, gone=gone, weights=weights)
        if step is not None and busy[step.node] < AT_ONCE:
            busy[step.node] += 1
            steps.append(step)
    return steps


def _step(
    state: CatalogState,
    key: str,
    partition: PartitionRecord,
    *,
    gone: Collection[str],
    weights: Mapping[str, float],
) -> ReplaceReplica | None:
    if partition.state != "live" or partition.leaving:
        return None
    for replica in partition.replicas:
        why = _why(state, replica, gone)
        others = [each for each in partition.replicas if each is not replica]
        if why is None or not all(each.made for each in others):
            continue
        taken = {each.node for each in others} | set(gone)
        free = {node: weight for node, weight in weights.items() if node not in taken}
        if not others and len(free) > 1:
            # The group has no other replica that could remove the lost one, and a node holds only one replica
            # of a group: so another node gets the new one.
            free.pop(replica.node, None)
        best = place(partition_hash(partition.topic, partition.number), free, 1)
        if best:
            return ReplaceReplica(key, partition.group, partition.version, replica.replica_id, why, best[0])
    return None


def _why(
    state: CatalogState, replica: ReplicaRecord, gone: Collection[str]
) -> Literal["dead", "lost", "moved"] | None:
    node = state.nodes.get(replica.node)
    if replica.node in gone or node is None:
        return "dead"
    if replica.lost or node.rolled_back or node.store_id != replica.store_id:
        return "lost"
    return None
