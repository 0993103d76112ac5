"""The planner: the catalog leader's steps from the present placement to the wanted one.

`Planner` compares each partition's replicas with its wanted set (`wanted`) and returns the steps to begin
now, each a command of the catalog that names the partition's version and its reason. It reads the catalog and
what the leader has seen of the nodes, and nothing else. The rules (docs/consensus.md#placement), in order of
precedence:

1. A replica that is dead, lost or rolled back is replaced.
2. A partition with too few replicas gets all that it lacks at once.
3. A replica on a draining node moves; then one of a pinned partition; then one that the rank places
   elsewhere.
4. A partition with too many replicas loses one.

A partition has one step at a time. But a dead or lost replica is replaced even while another replica leaves:
its leaving may be waiting for the replacement. Steps 3 and 4 are voluntary: at most `MOVES_AT_ONCE`
partitions of the cluster take one. A move waits until every replica of the partition is on a node that is
present, so an absent one comes back or is replaced; a partition loses a replica only if all others are
present. A node gets at most `AT_ONCE` new replicas at a time, and only when it is settled (`presence`). Those
of partitions without a majority are counted apart: nothing fills them before an operator decides. While more
than one node in four is gone nothing begins: then the network, or this leader, is more likely at fault than
the nodes.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Literal, NamedTuple

from laminar.node.placement.preferred_leaders import Leaders
from laminar.node.placement.wanted import Wanted, belonging_weights, wanted_number
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
    """The urgency of a step, most urgent first: steps are begun in this order while the limits allow it."""

    REPLACE = 0
    GROW = 1
    DRAIN = 2
    PIN = 3
    RANK = 4
    SHRINK = 5


class Planned(NamedTuple):
    """A step that a partition needs, with its urgency, and the nodes that get a new replica by it."""

    precedence: Precedence
    step: Step
    nodes: Sequence[str]
    stuck: bool = False
    """No majority of the partition is there that could fill them."""


class Totals:
    """Counts of replicas by node, for the rules that limit steps in the whole cluster."""

    def __init__(self) -> None:
        self.holding: Counter[str] = Counter()
        """By node, the replicas that it holds or has promised to hold."""
        self.decided: Counter[str] = Counter()
        """By node, the replicas that an operator has abandoned."""
        self.filling: Counter[str] = Counter()
        """By node, the new replicas of live partitions that are not made yet."""
        self.stuck: Counter[str] = Counter()
        """By node, such replicas of partitions without a majority: nothing fills them."""
        self.moving = 0
        """Partitions of which a replica leaves by choice."""

    def add(self, partition: PartitionRecord, number: int = 1, *, stuck: bool = False) -> None:
        """Add a partition to the counts (`stuck`: it has no majority); with `number` -1 take it out again."""
        leaving = [each.replica for each in partition.leaving]
        filling = self.stuck if stuck else self.filling
        for each in partition.replicas:
            # An abandoned replica is gone for good: its node holds nothing of it that counts.
            if not each.abandoned:
                self.holding[each.node] += number
            if not each.made and partition.state == "live":
                filling[each.node] += number
        for each in leaving:
            self.holding[each.node] += number
        for each in (*partition.replicas, *partition.removed, *leaving):
            if each.abandoned:
                self.decided[each.node] += number
        if any(each.why == "moved" for each in partition.leaving):
            self.moving += number

    def too_many_gone(
        self, state: CatalogState, gone: Collection[str], *, voting: Collection[str] = ()
    ) -> bool:
        """Return whether too many nodes are gone for an automatic step (as the function `too_many_gone`)."""
        holding = {*voting, *(+self.holding)}
        abandoned = (set(gone) - holding) | (set(gone) & set(+self.decided))
        counted = state.nodes.keys() - abandoned
        return GONE_PART * len(counted & set(gone)) > len(counted)


def too_many_gone(state: CatalogState, gone: Collection[str], *, voting: Collection[str] = ()) -> bool:
    """Return whether too many nodes are gone for an automatic step.

    A node that is gone does not count once all its replicas have been replaced, so one that died a year ago
    does not prevent the replacements of today. Nor does a node count if an operator has abandoned a replica
    on it: by that decision the node is gone for good. `voting` are the nodes that vote in group 0; they
    count.
    """
    totals = Totals()
    for partition in state.partitions.values():
        totals.add(partition)
    return totals.too_many_gone(state, gone, voting=voting)


class Planner:
    """Finds the steps to begin for each new catalog state; only partitions that changed are examined again.

    Call `follow` with a state, then `look` until it returns False, then `steps`. `wanted`, the wanted sets,
    is updated to each state by `follow`.
    """

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._state = CatalogState()
        self._gone: frozenset[str] = frozenset()
        self._present: frozenset[str] = frozenset()
        self._settled: frozenset[str] = frozenset()
        self._nodes: object = None
        self.leaders = Leaders()
        self._totals = Totals()
        # With whether it was stuck when it was counted.
        self._looked_at: dict[str, tuple[PartitionRecord, bool]] = {}
        self._pending: dict[str, None] = {}
        self._found: dict[str, Planned] = {}

    # -- one state after the other -------------------------------------------------------

    def follow(
        self,
        state: CatalogState,
        *,
        gone: Collection[str],
        present: Collection[str],
        settled: Collection[str],
    ) -> None:
        """Plan for `state` from now on. If the nodes changed, all partitions are examined again.

        `gone` have been absent for long, `present` are seen now, `settled` have been seen for a while and may
        get replicas.
        """
        nodes = {
            name: (node.store_id, node.draining, node.rolled_back, node.effective_weight, node.effective_zone)
            for name, node in state.nodes.items()
        }
        seen = (nodes, frozenset(gone), frozenset(present), frozenset(settled) - frozenset(gone))
        before, self._state = self._state, state
        concerns_all = seen != (self._nodes, self._gone, self._present, self._settled)
        if concerns_all:
            self._nodes, self._gone, self._present, self._settled = seen
            self._pending |= dict.fromkeys(state.partitions)
            self.leaders.begin(belonging_weights(state, unfit=gone))
        self._wanted.follow(state, unfit=gone)
        if concerns_all and not before.partitions:
            return
        self._pending |= dict.fromkeys(state.partitions.changes_since(before.partitions))
        for topic, record in state.topics.changes_since(before.topics).items():
            if record is not None:
                self._pending |= {f"{topic}/{number}": None for number in record.all_numbers}

    def look(self, number: int) -> bool:
        """Examine at most `number` partitions; return whether there are more."""
        for key in list(islice(self._pending, number)):
            del self._pending[key]
            self._found.pop(key, None)
            known, partition = self._looked_at.pop(key, None), self._state.partitions.get(key)
            self.leaders.look(key, partition)
            if known is not None:
                self._totals.add(known[0], -1, stuck=known[1])
            if partition is not None:
                self._looked_at[key] = partition, self.is_stuck(partition)
                self._totals.add(partition, stuck=self._looked_at[key][1])
                planned = self.step(key, partition)
                if planned is not None:
                    self._found[key] = planned
        return bool(self._pending)

    @property
    def begun(self) -> bool:
        """Whether `follow` has been called."""
        return self._nodes is not None

    @property
    def waiting(self) -> int:
        """How many partitions need a step."""
        return len(self._found)

    def steps(self, *, voting: Collection[str] = ()) -> list[Step]:
        """Return the steps to begin now. Call it only after `look` has returned False.

        `voting` are the nodes that vote in group 0 (`too_many_gone`).
        """
        assert not self._pending
        if self._gone and self._totals.too_many_gone(self._state, self._gone, voting=voting):
            return []
        found = sorted(self._found.values(), key=lambda planned: (planned.precedence, planned.step.partition))
        return self.within_budgets(found)

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
            return Planned(Precedence.REPLACE, step, [node], self.is_stuck(partition))
        return None

    def is_stuck(self, partition: PartitionRecord) -> bool:
        """Return whether a partition has no majority, as far as the catalog knows: so it has no leader.

        Every replica that is reported as created counts as a voter, until its removal is reported or an
        operator has abandoned it.
        """
        abandoned = {each for loss in partition.losses for each in loss.abandoned}
        members = [each for each in partition.replicas if each.made] + [
            each.replica for each in partition.leaving
        ]
        voters = [each for each in members if each.replica_id not in abandoned]
        fit = sum(self._why_unfit(each) is None for each in voters)
        return bool(voters) and 2 * fit <= len(voters)

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
        """Return the best settled node for the successor of a replica; None if no node fits."""
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
        """Return those of the steps `found` that the limits on steps under way let begin now."""
        counts = self._totals.filling.copy(), self._totals.stuck.copy()
        moving = self._totals.moving
        steps: list[Step] = []
        for precedence, step, nodes, stuck in found:
            voluntary, filling = precedence >= Precedence.DRAIN, counts[stuck]
            if any(filling[node] >= AT_ONCE for node in nodes) or (voluntary and moving >= MOVES_AT_ONCE):
                continue
            filling.update(nodes)
            moving += voluntary
            steps.append(step)
        return steps
