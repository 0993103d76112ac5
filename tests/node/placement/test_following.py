"""A planner that follows the catalog from change to change says what a new one says of the last state."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from laminar.node.placement.planner import Planned, Planner, Step, Totals
from laminar.node.placement.slices import SLICE
from laminar.node.placement.wanted import Wanted
from membership import catalog_rules
from membership.catalog_delta import changed_by, delta_between
from membership.placement_rules import change_placement
from membership.records import CatalogState, PartitionRecord, ReplicaRecord, Seal, TopicRecord
from membership.replica_rules import change_replicas
from membership.requests import (
    AddReplicas,
    AlterNode,
    AlterTopic,
    BeginChange,
    CancelChange,
    ChangePlacement,
    ChangeReplicas,
    ChangeRoute,
    CloseChange,
    CreateTopic,
    DeleteTopic,
    MarkMade,
    MarkRemoved,
    PreferLeaders,
    ReclaimPartition,
    RegisterNode,
    RemoveReplica,
    ReplaceReplica,
    ReportRemovals,
    ReportReplicas,
    ReportSeal,
    RouteStep,
)
from membership.route_rules import change_route, route_of
from tests.membership.nodes import node
from tests.node.placement.at_once import choose, plan

NODES = "abcdef"
_numbers = st.integers(0, 10**6)


class Follower(RuleBasedStateMachine):
    """Commands of nodes, operators and the planner itself, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.state = CatalogState()
        self.copy = CatalogState()
        self.planner = Planner(Wanted(self.state))
        self.away: set[str] = set()
        self.made = 0
        for name in "abcd":
            self.change(catalog_rules.register_node, RegisterNode(node(name)))

    def change(self, rule: Any, request: Any) -> None:
        self.state, _ = rule(self.state, request)

    def pick(self, number: int, among: Any) -> Any:
        found = sorted(among)
        return found[number % len(found)] if found else None

    @rule(number=_numbers)
    def a_node_registers(self, number: int) -> None:
        self.change(catalog_rules.register_node, RegisterNode(node(self.pick(number, NODES))))

    @rule(number=_numbers, draining=st.booleans(), weight=st.sampled_from([None, 0.5, 2.0]))
    def a_node_is_altered(self, number: int, draining: bool, weight: float | None) -> None:
        record = self.state.nodes[self.pick(number, self.state.nodes)]
        alter = AlterNode(record.node, record.version, draining=draining, set_weight=weight)
        self.change(change_placement, ChangePlacement(alter))

    @rule(number=_numbers)
    def a_node_goes_or_comes(self, number: int) -> None:
        self.away ^= {self.pick(number, self.state.nodes)}

    @rule(number=_numbers, partitions=st.integers(1, 3), replicas=st.integers(1, 3))
    def a_topic_is_made(self, number: int, partitions: int, replicas: int) -> None:
        self.made += 1
        nodes = sorted(self.state.nodes)
        placement = [
            [nodes[(number + i + n) % len(nodes)] for i in range(replicas)] for n in range(partitions)
        ]
        groups = [(1000 * self.made + n).to_bytes(16, "big") for n in range(1, partitions + 1)]
        name = f"t{self.made}"
        self.change(
            catalog_rules.create_topic, CreateTopic(name, partitions, replicas, {}, groups, placement, 1)
        )

    @rule(number=_numbers)
    def a_topic_is_deleted(self, number: int) -> None:
        name = self.pick(number, self.state.topics)
        if name is not None:
            self.change(catalog_rules.delete_topic, DeleteTopic(name, 1))

    @rule(number=_numbers, replicas=st.integers(1, 4))
    def a_topic_is_altered(self, number: int, replicas: int) -> None:
        name = self.pick(number, self.state.topics)
        if name is not None:
            alter = AlterTopic(name, self.state.topics[name].version, replicas)
            self.change(change_placement, ChangePlacement(alter))

    @rule(number=_numbers, steps=st.integers(1, 3))
    def a_route_changes(self, number: int, steps: int) -> None:
        """A partition is split, or a change goes on, or is given up: outputs are partitions as any."""
        name = self.pick(number, self.state.topics)
        for _ in range(steps if name is not None else 0):
            self.change(change_route, ChangeRoute(self.step_of_a_change(name, number)))

    def step_of_a_change(self, name: str, number: int) -> RouteStep:
        topic = self.state.topics[name]
        change, route = topic.change, route_of(topic)
        if change is None:
            sealed = [n for each in topic.changes or () for n in each.seals if n in topic.numbers]
            if sealed and number % 3 == 0:
                return ReclaimPartition(
                    name, sealed[0], self.state.partitions[f"{name}/{sealed[0]}"].group, 1
                )
            held = route.ranges[number % len(route.ranges)]
            self.made += 1
            groups = [(1000 * self.made + n).to_bytes(16, "big") for n in range(2)]
            nodes = [self.pick(number + n, self.state.nodes) for n in range(2)]
            cut = held.first + held.size // 2
            placement = [[each] for each in nodes]
            return BeginChange(
                name, route.version, [held.number], [cut], groups, placement, "strict", begun_ms=1, wait_ms=1
            )
        if change.state == "preparing":
            cancel = number % 5 == 0
            return CancelChange(name, change.id, 1) if cancel else CloseChange(name, change.id)
        held = change.inputs[0]
        record = self.state.partitions[f"{name}/{held.number}"]
        return ReportSeal(name, change.id, held.number, record.group, Seal(1, 0, 1))

    @rule()
    def the_nodes_report_what_they_made(self) -> None:
        for name in sorted(self.state.nodes.keys() - self.away):
            self.report(name)

    def report(self, name: str) -> None:
        store = self.state.nodes[name].store_id
        records = list(self.state.partitions.values())
        own = [r.replica_id for each in records for r in each.replicas if r.node == name]
        deleted = [r.replica_id for each in records for r in each.removed if r.node == name]
        self.change(catalog_rules.mark_made, MarkMade(name, store, [each.group for each in records]))
        self.change(change_replicas, ChangeReplicas(ReportReplicas(name, store, made=own, deleted=deleted)))
        stones = [stone.group for stone in self.state.tombstones.values()]
        self.change(catalog_rules.mark_removed, MarkRemoved(name, store, stones))

    @rule(number=_numbers)
    def a_replica_is_lost(self, number: int) -> None:
        key = self.pick(number, self.state.partitions)
        if key is not None:
            replica = self.state.partitions[key].replicas[0]
            report = ReportReplicas(replica.node, b"another", lost=[replica.replica_id])
            self.change(change_replicas, ChangeReplicas(report))

    @rule()
    def leaders_report_removals(self) -> None:
        for key, partition in sorted(self.state.partitions.items()):
            gone = [each.replica.replica_id for each in partition.leaving]
            self.change(change_replicas, ChangeReplicas(ReportRemovals(key, partition.group, gone)))

    @rule()
    def the_planner_acts(self) -> None:
        for step in self.steps():
            self.perform(step)
        self.follow()
        self.change(change_placement, ChangePlacement(PreferLeaders(self.planner.leaders.missing())))

    def perform(self, step: Step) -> None:
        if isinstance(step, ReplaceReplica):
            self.change(change_replicas, ChangeReplicas(step))
        else:
            assert isinstance(step, AddReplicas | RemoveReplica)
            self.change(change_placement, ChangePlacement(step))

    def follow(self) -> None:
        present = self.state.nodes.keys() - self.away
        self.planner.follow(self.state, gone=self.away, present=present, settled=present)
        while self.planner.look(2):
            pass

    def steps(self) -> list[Step]:
        self.follow()
        return self.planner.steps(voting="abc")

    @invariant()
    def it_says_what_a_new_one_says(self) -> None:
        present = self.state.nodes.keys() - self.away
        wanted = Wanted(self.state, unfit=self.away)
        new = plan(self.state, wanted, gone=self.away, present=present, settled=present, voting="abc")
        assert self.steps() == new
        totals = Totals()
        for partition in self.state.partitions.values():
            totals.add(partition, stuck=self.planner.is_stuck(partition))
        kept = self.planner._totals
        assert (+kept.holding, +kept.decided) == (totals.holding, totals.decided)
        assert (+kept.filling, +kept.stuck, kept.moving) == (totals.filling, totals.stuck, totals.moving)

    @invariant()
    def nothing_is_chosen_where_its_counts_are_even_and_complete(self) -> None:
        self.follow()
        leaders = self.planner.leaders
        chosen = choose(self.state, unfit=self.away)
        missing = leaders.missing()
        assert missing.keys() <= chosen.keys() | {
            key for key, node in missing.items() if self.state.partitions[key].preferred_leader == node
        }
        assert missing or leaders.uneven() or not chosen

    @invariant()
    def a_copy_follows_by_what_changed(self) -> None:
        """And it is the state that the whole table would say, indexes included."""
        self.copy = changed_by(self.copy, delta_between(self.copy, self.state))
        assert self.copy == self.state
        partition: PartitionRecord
        for key, partition in self.state.partitions.items():
            assert f"{partition.topic}/{partition.number}" == key
            assert self.state.partition_of_group(partition.group) is partition
            for replica in (*partition.replicas, *partition.removed):
                assert self.state.partition_of_replica(replica.replica_id) is partition
        assert self.state.partition_of_group(b"unknown") is None


TestFollower = Follower.TestCase
TestFollower.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def _many(number: int) -> CatalogState:
    replicas = [ReplicaRecord(i + 1, name, name.encode() * 16, made=True) for i, name in enumerate("abc")]
    return CatalogState(
        version=1,
        nodes={name: node(name) for name in "abc"},
        topics={"t": TopicRecord("t", number, 3, {}, 1, 1)},
        partitions={
            f"t/{n}": PartitionRecord(
                "t", n, n.to_bytes(16, "big"), "live", replicas, 1, preferred_leader="a"
            )
            for n in range(number)
        },
    )


def test_only_changed_partitions_are_looked_at_again() -> None:
    """All of them when a node drains; after a change of one, that one."""
    state = _many(3 * SLICE)
    planner, seen = Planner(Wanted(state)), list[str]()
    step = planner.step

    def seeing(key: str, partition: PartitionRecord) -> Planned | None:
        seen.append(key)
        return step(key, partition)

    planner.step = seeing  # type: ignore[method-assign]

    def looked(state: CatalogState) -> int:
        seen.clear()
        planner.follow(state, gone=(), present="abc", settled="abc")
        slices = 1
        while planner.look(SLICE):
            slices += 1
        assert slices >= len(seen) / SLICE
        return len(seen)

    assert looked(state) == 3 * SLICE and looked(state) == 0
    changed = {"t/7": replace(state.partitions["t/7"], preferred_leader="b")}
    assert looked(replace(state, partitions=state.partitions | changed)) == 1
    assert looked(state) == 1
    more = {"t": replace(state.topics["t"], replicas=2)}
    assert looked(replace(state, topics=state.topics | more)) == 3 * SLICE
    looked(state)
    addresses = {"a": replace(node("a"), http_port=99)}
    assert looked(replace(state, nodes=state.nodes | addresses)) == 0
    draining = {"a": replace(node("a"), draining=True)}
    assert looked(replace(state, nodes=state.nodes | draining)) == 3 * SLICE
