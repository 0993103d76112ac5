"""Changes of a topic's route in any order of steps, with what else happens to the topic."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from membership import catalog_rules, placement_rules, route_rules
from membership.records import (
    CatalogState,
    RouteChange,
    RouteRecord,
    Seal,
)
from membership.requests import (
    AlterTopic,
    BeginChange,
    CancelChange,
    ChangePlacement,
    CloseChange,
    CreateTopic,
    DeleteTopic,
    MarkMade,
    MarkRemoved,
    ReclaimPartition,
    RegisterNode,
    ReportSeal,
    Result,
    RouteStep,
)
from membership.tables import encoded
from tests.membership.routes import (
    NODES,
    do,
    group,
    made,
    topic,
    under_way,
)
from tests.membership.test_catalog import node


class Changes(RuleBasedStateMachine):
    """Any steps of changes in any order, with what else happens to a topic."""

    def __init__(self) -> None:
        super().__init__()
        self.bounds = {
            name: getattr(route_rules, name) for name in ("MOST_PARTITIONS", "MOST_ENDS", "MOST_KEPT_ENDS")
        }
        route_rules.MOST_PARTITIONS, route_rules.MOST_ENDS, route_rules.MOST_KEPT_ENDS = 14, 3, 9
        self.state = CatalogState()
        self.groups = 0
        self.used: set[int] = set()
        self.routes: dict[int, RouteRecord] = {}
        self.closing: set[int] = set()
        self.cancelled: set[int] = set()
        self.parents: dict[int, list[int]] = {}
        self.reclaimed: set[int] = set()
        self.ends: dict[int, Seal] = {}

    def teardown(self) -> None:
        for name, value in self.bounds.items():
            setattr(route_rules, name, value)

    @initialize(partitions=st.integers(1, 4))
    def create(self, partitions: int) -> None:
        if not self.state.nodes:
            for name in NODES:
                self.state, _ = catalog_rules.register_node(self.state, RegisterNode(node(name)))
        request = CreateTopic(
            "t", partitions, 2, {}, self.new_groups(partitions), [NODES[:2]] * partitions, 1
        )
        self.state, result = catalog_rules.create_topic(self.state, request)
        assert result.outcome == "created"
        self.used = set(range(partitions))
        self.routes = {0: route_rules.route_of(topic(self.state))}
        self.closing, self.cancelled, self.reclaimed = set(), set(), set()
        self.parents, self.ends = {number: [] for number in range(partitions)}, {}

    def new_groups(self, count: int) -> list[bytes]:
        self.groups += count
        return [group(1_000 + self.groups - at) for at in range(count)]

    def follow(self, step: RouteStep) -> Result:
        before = topic(self.state)
        after, result = do(self.state, step)
        assert result.outcome != "failed"
        now = after.topics["t"]
        if route_rules.route_of(now) != route_rules.route_of(before):
            assert isinstance(step, (ReportSeal, CloseChange)) and before.change is not None
            change = (now.changes or [])[-1]
            assert change.id == before.change.id and now.route is not None
            assert change.version == now.route.version == route_rules.route_of(before).version + 1
            assert change.force or [each.number for each in change.inputs] == sorted(
                change.seals, key=[each.number for each in change.inputs].index
            )
            if isinstance(step, ReportSeal):
                assert not change.force and step.number not in before.change.seals
            self.routes[now.route.version] = now.route
        self.state = after
        return result

    # Steps.

    def drawn(self, data: st.DataObject, *, old: bool = False) -> BeginChange:
        """Return a change of the present route, or one that was decided on an older one."""
        route = route_rules.route_of(topic(self.state))
        at = data.draw(st.integers(0, len(route.ranges) - 1))
        inputs = route.ranges[at : at + data.draw(st.integers(1, 3))]
        cuts: list[int] = []
        if len(inputs) == 1 and inputs[0].size > 4:
            # A cut at a bound is refused.
            inside = st.integers(inputs[0].first, inputs[0].first + inputs[0].size)
            cuts = sorted(data.draw(st.sets(inside, max_size=3)))
        order: Literal["strict", "weak"] = "weak" if data.draw(st.integers(0, 2)) == 0 else "strict"
        return BeginChange(
            "t",
            route.version - old,
            data.draw(st.permutations([each.number for each in inputs])),
            cuts,
            self.new_groups(len(cuts) + 1),
            [data.draw(st.permutations(NODES))[:2] for _ in range(len(cuts) + 1)],
            order,
            5,
            10,
            force=order == "weak" and data.draw(st.booleans()),
        )

    @rule(data=st.data(), old=st.sampled_from([False, False, False, True]))
    def begin(self, data: st.DataObject, old: bool) -> None:
        before, step = topic(self.state).change, self.drawn(data, old=old)
        result = self.follow(step)
        if result.outcome == "created":
            assert before is None and not old
            for output in under_way(self.state).outputs:
                assert output.number not in self.used, "a number is given once"
                self.used.add(output.number)
                self.parents[output.number] = step.inputs

    @rule(data=st.data(), steps=st.integers(1, 6))
    def go_on(self, data: st.DataObject, steps: int) -> None:
        """Make the next steps, as a driver would: to the end, or not quite."""
        for _ in range(steps):
            change = topic(self.state).change
            if change is None:
                self.begin(data, old=False)
                self.state = made(self.state)
            elif change.state == "preparing":
                self.state = made(self.state)
                self.closed(change.id, force=False)
            else:
                left = [each.number for each in change.inputs if each.number not in change.seals]
                self.sealed(change, data.draw(st.sampled_from(left)), end=1)

    def change_ids(self) -> list[int]:
        change = topic(self.state).change
        known = [each.id for each in topic(self.state).changes or ()] + sorted(self.cancelled)
        return ([] if change is None else [change.id] * 4) + known + [1, self.state.version + 1]

    @rule(data=st.data(), force=st.sampled_from([False, False, True]))
    def close(self, data: st.DataObject, force: bool) -> None:
        self.closed(data.draw(st.sampled_from(self.change_ids())), force=force)

    def closed(self, change_id: int, *, force: bool) -> None:
        result = self.follow(CloseChange("t", change_id, force))
        if result.outcome == "updated":
            assert change_id not in self.cancelled
            self.closing.add(change_id)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        change_id = data.draw(st.sampled_from(self.change_ids()))
        result = self.follow(CancelChange("t", change_id, 9))
        if result.outcome == "deleted":
            self.cancelled.add(change_id)
        if result.ok:
            assert change_id not in self.closing

    @rule(data=st.data(), end=st.integers(0, 2), late=st.booleans())
    def seal(self, data: st.DataObject, end: int, late: bool) -> None:
        change = topic(self.state).change
        kept = topic(self.state).changes or []
        if change is None or late:
            if not kept:
                return
            change = data.draw(st.sampled_from(kept))
        number = data.draw(st.sampled_from([each.number for each in change.inputs] + [0]))
        self.sealed(change, number, end=end)

    def sealed(self, change: RouteChange, number: int, *, end: int) -> None:
        record = self.state.partitions.get(f"t/{number}")
        found = group(1) if record is None else record.group
        result = self.follow(ReportSeal("t", change.id, number, found, Seal(3, end, 7)))
        if result.outcome == "updated":
            assert change.id in self.closing and number not in self.ends
            self.ends[number] = Seal(3, end, 7)

    @rule(data=st.data(), ends=st.booleans())
    def reclaim(self, data: st.DataObject, ends: bool) -> None:
        left = [number for number in self.ends if number not in self.reclaimed]
        number = data.draw(st.sampled_from(left[:2] if ends and left else sorted(self.used)))
        record = self.state.partitions.get(f"t/{number}")
        found = group(1) if record is None else record.group
        result = self.follow(ReclaimPartition("t", number, found, 9))
        if result.outcome == "deleted":
            assert number in self.ends
            assert all(each in self.reclaimed for each in self.parents[number])
            self.reclaimed.add(number)

    # What else happens.

    @rule(name=st.sampled_from(NODES))
    def make(self, name: str) -> None:
        groups = [each.group for each in self.state.partitions.values()]
        self.state, _ = catalog_rules.mark_made(self.state, MarkMade(name, name.encode(), groups))

    @rule()
    def make_all(self) -> None:
        self.state = made(self.state)

    @rule(name=st.sampled_from(NODES))
    def remove(self, name: str) -> None:
        groups = [bytes.fromhex(key) for key in self.state.tombstones]
        self.state, _ = catalog_rules.mark_removed(self.state, MarkRemoved(name, name.encode(), groups))

    @rule(replicas=st.integers(1, 3))
    def alter(self, replicas: int) -> None:
        change = AlterTopic("t", topic(self.state).version, replicas)
        self.state, _ = placement_rules.change_placement(self.state, ChangePlacement(change))

    @precondition(lambda self: len(self.used) > 12)
    @rule(partitions=st.integers(1, 4))
    def delete_and_create(self, partitions: int) -> None:
        self.state, _ = catalog_rules.delete_topic(self.state, DeleteTopic("t", 9))
        assert not self.state.partitions
        self.create(partitions)

    # What always holds.

    @invariant()
    def every_route_covers_every_logical_partition_once(self) -> None:
        for route in self.known_routes():
            assert 0 == route.ranges[0].first
            assert all(one.first + one.size == next_.first for one, next_ in pairwise(route.ranges))
            assert route_rules.LOGICAL_PARTITIONS == route.ranges[-1].first + route.ranges[-1].size
            assert all(each.size > 0 for each in route.ranges)
            assert len({each.number for each in route.ranges}) == len(route.ranges)

    @invariant()
    def the_history_has_the_routes_that_there_were(self) -> None:
        found = self.known_routes()
        versions = [each.version for each in found]
        assert versions == list(range(max(self.routes), max(self.routes) - len(found), -1))
        assert [self.routes[version] for version in versions] == found

    def known_routes(self) -> list[RouteRecord]:
        return list(route_rules.kept_routes(topic(self.state)))

    @invariant()
    def what_takes_records_is_there_and_what_is_listed_is_recorded(self) -> None:
        record = topic(self.state)
        assert {f"t/{number}" for number in record.all_numbers} == set(self.state.partitions)
        assert list(record.all_numbers) == sorted(record.all_numbers) and len(set(record.all_numbers)) == len(
            record.all_numbers
        )
        assert [each.number for each in self.state.partitions_of("t")] == list(record.all_numbers)
        outputs = set() if record.change is None else {each.number for each in record.change.outputs}
        current = {each.number for each in route_rules.route_of(record).ranges}
        assert current <= set(record.all_numbers) and not current & outputs
        assert set(record.numbers) == set(record.all_numbers) - outputs >= current
        assert set(record.all_numbers) <= self.used and (record.next_partition or record.partitions) > max(
            self.used
        )
        assert len(record.all_numbers) <= route_rules.MOST_PARTITIONS
        for each in [] if record.change is None else record.change.outputs:
            assert self.state.partitions[f"t/{each.number}"].group == each.group

    @invariant()
    def no_record_outlives_its_order(self) -> None:
        record = topic(self.state)
        change = record.change
        done = {each.id for each in record.changes or ()}
        live = set() if change is None or change.state != "closing" else {change.id}
        known = {each for each in self.closing if not done or each >= min(done)}
        assert known <= done | live, "a change that was closing is gone"
        assert change is None or change.force or len(change.seals) < len(change.inputs)
        for each in [*(record.changes or ()), *([] if change is None else [change])]:
            assert all(self.ends[number] == seal for number, seal in each.seals.items())

    @invariant()
    def what_is_kept_is_bounded(self) -> None:
        changes = topic(self.state).changes or []
        ends = sum(len(each.inputs) for each in changes)
        assert ends <= route_rules.MOST_KEPT_ENDS
        if ends > route_rules.MOST_ENDS:
            assert any(each.number not in self.reclaimed for each in changes[0].inputs)
        change = topic(self.state).change
        known = {n for each in [*changes, *([] if change is None else [change])] for n in each.seals}
        assert {n for n in self.ends if f"t/{n}" in self.state.partitions} <= known

    @invariant()
    def identities_are_given_once_and_all_is_encoded(self) -> None:
        ids = [r.replica_id for p in self.state.partitions.values() for r in p.replicas]
        ids += [r.replica_id for stone in self.state.tombstones.values() for r in stone.replicas]
        assert len(ids) == len(set(ids)) and all(0 < each < self.state.next_replica_id for each in ids)
        groups = {each.group.hex() for each in self.state.partitions.values()}
        assert len(groups) == len(self.state.partitions) and not groups & set(self.state.tombstones)
        assert msgspec.msgpack.decode(encoded(self.state), type=CatalogState) == self.state


TestChanges = Changes.TestCase
TestChanges.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
