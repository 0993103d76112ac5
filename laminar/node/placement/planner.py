"""The planner: the catalog leader's steps from the placement that is to the one that is wanted.

`plan` compares each partition's replicas with its wanted set (`wanted`) and returns the steps to begin now,
each a command of the catalog that names the partition's version and its reason. It reads the catalog and what
the leader has seen of the nodes, and nothing else. The rules (docs/consensus.md#placement), in order of
precedence:

1. A replica that is dead, lost or rolled back is replaced.
2. A partition with too few replicas gets all that it lacks at once.
3. A replica on a draining node moves; then one of a pinned partition; then one that the rank places
   elsewhere.
4. A partition with too many replicas loses one.

A partition has one step at a time. But a dead or lost replica is replaced also while another one leaves: that
one may be waiting for it. Steps 3 and 4 are voluntary: at most `MOVES_AT_ONCE` partitions of the cluster take
one. A move waits until every replica of the partition is on a node that is present, so an absent one comes
back or is replaced; a partition loses a replica only if all others are present. A node gets at most `AT_ONCE`
new replicas at a time, and only when it is settled (`presence`). While more than one node in four is gone
nothing begins: then the network, or this leader, is more likely at fault than the nodes.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from laminar.node.placement.wanted import Wanted, wanted_number
from membership.records import CatalogState, PartitionRecord, ReplicaRecord
from membership.replica_rules import MOST_LEAVING, leaving_by_choice
from membership.requests import AddReplicas, RemoveReplica, ReplaceReplica

AT_ONCE = 2
"""Most new replicas that a node gets at a time."""

MOVES_AT_ONCE = 8
"""Most partitions of the cluster that take a voluntary step at a time."""

# While more than one node in this many is gone, nothing begins.
GONE_PART = 4

Step = AddReplicas | RemoveReplica | ReplaceReplica


class Precedence(enum.IntEnum):
    """The order in which steps get their share of what may be done at once."""

    REPLACE = 0
    GROW = 1
    DRAIN = 2
    PIN = 3
    RANK = 4
    SHRINK = 5


class Planned(NamedTuple):
    """A step, and the nodes that get a replica by it."""

    precedence: Precedence
    step: Step
    nodes: Sequence[str]


def too_many_gone(state: CatalogState, gone: Collection[str], *, voting: Collection[str] = ()) -> bool:
    """Return whether too many nodes are gone for an automatic step.

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
    wanted: Wanted,
    *,
    gone: Collection[str],
    present: Collection[str],
    settled: Collection[str],
    voting: Collection[str] = (),
) -> list[Step]:
    """Return the steps to begin now; empty while too many nodes are gone.

    `wanted` answers for `state` without the nodes in `gone`. `gone` have been absent for long, `present` are
    seen now, `settled` have been seen for a while and may get replicas. `voting` as in `too_many_gone`.
    """
    if gone and too_many_gone(state, gone, voting=voting):
        return []
    planner = _Planner(state, wanted, gone=set(gone), present=set(present), settled=set(settled) - set(gone))
    found = [
        planned
        for key, partition in state.partitions.items()
        if (planned := planner.step(key, partition)) is not None
    ]
    found.sort(key=lambda planned: (planned.precedence, planned.step.partition))
    return planner.within_budgets(found)


class _Planner:
    """One round of planning."""

    def __init__(
        self, state: CatalogState, wanted: Wanted, *, gone: set[str], present: set[str], settled: set[str]
    ) -> None:
        self._state = state
        self._wanted = wanted
        self._gone = gone
        self._present = present
        self._settled = settled

    # -- one partition -------------------------------------------------------------------

    def step(self, key: str, partition: PartitionRecord) -> Planned | None:
        """Return the step that a partition needs next; None if it needs none, or none can begin now."""
        if partition.state != "live":
            return None
        if any(self._why_unfit(each) for each in partition.replicas):
            return self._replacement(key, partition)  # without a node for it, other steps wait as well
        if partition.leaving or not all(each.made for each in partition.replicas):
            return None
        number = wanted_number(self._state, partition)
        if len(partition.replicas) < number:
            return self._growth(key, partition, number)
        if len(partition.replicas) > number:
            return self._shrinking(key, partition)
        return self._move(key, partition)

    def _replacement(self, key: str, partition: PartitionRecord) -> Planned | None:
        if len(partition.leaving) >= MOST_LEAVING:
            return None
        for replica in partition.replicas:
            why = self._why_unfit(replica)
            if why is None:
                continue
            others = [each for each in partition.replicas if each is not replica]
            if replica.made and not all(each.made for each in others):
                continue
            node = self._place_for(partition, replica, others)
            if node is None:
                continue
            because = f"replica {replica.replica_id} on {replica.node} is {why}"
            step = ReplaceReplica(
                key, partition.group, partition.version, replica.replica_id, why, node, because
            )
            return Planned(Precedence.REPLACE, step, [node])
        return None

    def _why_unfit(self, replica: ReplicaRecord) -> Literal["dead", "lost"] | None:
        node = self._state.nodes.get(replica.node)
        if replica.node in self._gone or node is None:
            return "dead"
        if replica.lost or node.rolled_back or node.store_id != replica.store_id:
            return "lost"
        return None

    def _place_for(
        self, partition: PartitionRecord, replica: ReplicaRecord, others: Sequence[ReplicaRecord]
    ) -> str | None:
        """Return the best settled node for the successor of a replica."""
        taken = {each.node for each in others} | {each.node for each in leaving_by_choice(partition)}
        ranked = [*self._wanted.nodes(partition), *self._wanted.order(partition)]
        free = [node for node in dict.fromkeys(ranked) if node not in taken and node in self._settled]
        if not others and len(free) > 1 and replica.node in free:
            # The group has no other replica that could remove the lost one, and a node holds only one replica
            # of a group: so another node gets the new one.
            free.remove(replica.node)
        return free[0] if free else None

    def _growth(self, key: str, partition: PartitionRecord, number: int) -> Planned | None:
        held = {each.node for each in partition.replicas}
        missing = number - len(held)
        new = [node for node in self._wanted.nodes(partition) if node not in held][:missing]
        if any(node in self._present and node not in self._settled for node in new):
            return None  # soon it will be: all that are missing are to come at once
        new = [node for node in new if node in self._settled]
        if not new:
            return None
        because = f"{number} replicas are asked for, it has {len(held)}"
        step = AddReplicas(key, partition.group, partition.version, new, because)
        return Planned(Precedence.GROW, step, new)

    def _shrinking(self, key: str, partition: PartitionRecord) -> Planned | None:
        extra = self._out_of_place(partition)
        if not extra:
            return None
        replica = extra[0]
        if not all(each.node in self._present for each in partition.replicas if each is not replica):
            return None
        number = wanted_number(self._state, partition)
        because = f"{number} replicas are asked for, it has {len(partition.replicas)}"
        step = RemoveReplica(key, partition.group, partition.version, replica.replica_id, because)
        return Planned(Precedence.SHRINK, step, [])

    def _move(self, key: str, partition: PartitionRecord) -> Planned | None:
        wanted = self._wanted.nodes(partition)
        held = {each.node for each in partition.replicas}
        if held.issuperset(wanted):
            return None
        new = [node for node in wanted if node not in held and node in self._settled]
        extra = self._out_of_place(partition)
        if not new or not extra or not held <= self._present:
            return None
        precedence, because = self._why_moved(partition, extra[0], new[0])
        step = ReplaceReplica(
            key, partition.group, partition.version, extra[0].replica_id, "moved", new[0], because
        )
        return Planned(precedence, step, [new[0]])

    def _why_moved(
        self, partition: PartitionRecord, replica: ReplicaRecord, node: str
    ) -> tuple[Precedence, str]:
        if self._state.nodes[replica.node].draining:
            return Precedence.DRAIN, f"{replica.node} is draining"
        if partition.pin is not None:
            return Precedence.PIN, f"pinned by {partition.pin.owner}: {partition.pin.reason}"
        return Precedence.RANK, f"{node} has a better rank than {replica.node}"

    def _out_of_place(self, partition: PartitionRecord) -> list[ReplicaRecord]:
        """Return the replicas outside of the wanted set: draining nodes' first, then the worst ranked."""
        wanted = set(self._wanted.nodes(partition))
        order = {node: place for place, node in enumerate(self._wanted.order(partition))}
        extra = [each for each in partition.replicas if each.node not in wanted]
        return sorted(
            extra,
            key=lambda each: (
                not self._state.nodes[each.node].draining,
                each.node in self._present,
                -order.get(each.node, len(order)),
            ),
        )

    # -- all partitions ------------------------------------------------------------------

    def within_budgets(self, found: Sequence[Planned]) -> list[Step]:
        """Return the steps that may begin beside those that are under way."""
        filling = Counter(
            replica.node
            for partition in self._state.partitions.values()
            if partition.state == "live"
            for replica in partition.replicas
            if not replica.made
        )
        moving = sum(
            any(each.why == "moved" for each in partition.leaving)
            for partition in self._state.partitions.values()
        )
        steps: list[Step] = []
        for precedence, step, nodes in found:
            voluntary = precedence >= Precedence.DRAIN
            if any(filling[node] >= AT_ONCE for node in nodes) or (voluntary and moving >= MOVES_AT_ONCE):
                continue
            filling.update(nodes)
            moving += voluntary
            steps.append(step)
        return steps
