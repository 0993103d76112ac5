"""Changes of a topic's route in the catalog: what each step compares and sets, in any order of steps."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from laminar.wire.key_route import LOGICAL_PARTITIONS, Route
from membership import catalog_rules, placement_rules, replica_rules, route_rules
from membership.catalog import Catalog, NotEnabled
from membership.records import (
    CatalogState,
    KeyRange,
    RouteChange,
    RouteRecord,
    Seal,
    TopicRecord,
)
from membership.requests import (
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
    ReclaimPartition,
    RegisterNode,
    RemoveNode,
    ReplaceReplica,
    ReportSeal,
    Result,
    RouteStep,
)
from membership.tables import encoded
from tests.membership.test_catalog import Group, node

NODES = ["a", "b", "c"]
MADE = ("created", "updated", "deleted", "marked")


def group(number: int) -> bytes:
    return number.to_bytes(16, "big")


def do(state: CatalogState, step: RouteStep) -> tuple[CatalogState, Result]:
    """Perform a step as the log has it, twice: the second time it has been done already."""
    request = msgspec.json.decode(msgspec.json.encode(ChangeRoute(step)), type=ChangeRoute)
    after, result = route_rules.change_route(state, request)
    assert (result.outcome in MADE) == (after is not state) and after.version == result.version
    if after is not state:
        assert after.version == state.version + 1
        again, repeated = route_rules.change_route(after, request)
        assert again is after and repeated.outcome == "exists"
    return after, result


def made(state: CatalogState) -> CatalogState:
    """Let all nodes make all replicas."""
    groups = [each.group for each in state.partitions.values()]
    for name in NODES:
        state, _ = catalog_rules.mark_made(state, MarkMade(name, name.encode(), groups))
    return state


def with_topic(partitions: int = 3) -> CatalogState:
    state = CatalogState()
    for name in NODES:
        state, _ = catalog_rules.register_node(state, RegisterNode(node(name)))
    groups = [group(number + 1) for number in range(partitions)]
    request = CreateTopic("t", partitions, 3, {}, groups, [NODES] * partitions, 1)
    state, result = catalog_rules.create_topic(state, request)
    assert result.outcome == "created"
    return made(state)


def begin(
    *inputs: int, after: int = 0, cuts: tuple[int, ...] = (), seed: int = 100, **more: Any
) -> BeginChange:
    wanted: dict[str, Any] = {
        "groups": [group(seed + at) for at in range(len(cuts) + 1)],
        "placement": [NODES] * (len(cuts) + 1),
        "order": "strict",
        "begun_ms": 5,
        "wait_ms": 60_000,
    }
    return BeginChange("t", after, list(inputs), list(cuts), **(wanted | more))


def topic(state: CatalogState) -> TopicRecord:
    return state.topics["t"]


def under_way(state: CatalogState) -> RouteChange:
    change = topic(state).change
    assert change is not None
    return change


def sealed(state: CatalogState, *, number: int, end_offset: int = 812) -> ReportSeal:
    """Return the report of an input's leader for the change under way."""
    record = state.partitions[f"t/{number}"]
    return ReportSeal("t", under_way(state).id, number, record.group, Seal(7, end_offset, 1_000))


def changed(state: CatalogState, request: BeginChange) -> CatalogState:
    """Carry a change out to its end."""
    state, result = do(state, request)
    assert result.outcome == "created", result.detail
    state, result = do(made(state), CloseChange("t", under_way(state).id))
    for number in request.inputs:
        if topic(state).change is not None:
            state, result = do(state, sealed(state, number=number))
    assert topic(state).change is None, result.detail
    return state


def ranges(state: CatalogState) -> list[tuple[int, int, int]]:
    return [(each.number, each.first, each.size) for each in route_rules.route_of(topic(state)).ranges]


# -- one step after the other ----------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 2, 3, 7, 256, 1000])
def test_route_0_is_the_one_that_clients_compute(partitions: int) -> None:
    record = TopicRecord("t", partitions, 3, {}, 1, 1)
    held = {
        each.number: range(each.first, each.first + each.size) for each in route_rules.route_of(record).ranges
    }

    assert Route.even(partitions).ranges() == held
    assert LOGICAL_PARTITIONS == route_rules.LOGICAL_PARTITIONS


def test_a_partition_splits_and_its_parts_are_merged_again() -> None:
    """Numbers are new each time; what was sealed is listed until it is reclaimed, inputs before outputs."""
    state = with_topic(2)
    state = changed(state, begin(1, cuts=(40_000,)))
    assert [(0, 0, 32_768), (2, 32_768, 7_232), (3, 40_000, 25_536)] == ranges(state)
    state = changed(state, begin(2, 3, after=1, seed=200))
    assert [(0, 0, 32_768), (4, 32_768, 32_768)] == ranges(state)
    assert ([0, 1, 2, 3, 4], 5, 2) == (
        topic(state).listed,
        topic(state).next_partition,
        topic(state).partitions,
    )
    record = state.partitions["t/4"]
    assert (32_768, 32_768, "live") == (record.first, record.size, record.state)
    assert (topic(state).changes or [])[1].id == record.origin

    for ended in (1, 2, 3):
        assert "not partitions of the route" in do(state, begin(ended, after=2, seed=300))[1].detail
    for number, outcome in ((3, "conflict"), (0, "conflict"), (1, "deleted"), (2, "deleted"), (3, "deleted")):
        record = state.partitions[f"t/{number}"]
        state, result = do(state, ReclaimPartition("t", number, record.group, 9))
        assert (number, outcome) == (number, result.outcome), result.detail
        if outcome == "deleted":
            assert [record.group] == result.groups and record.group.hex() in state.tombstones
    assert [0, 4] == topic(state).listed
    assert [2, 1, 0] == [each.version for each in route_rules.kept_routes(topic(state))]
    assert {1: Seal(7, 812, 1_000)} == (topic(state).changes or [])[0].seals


def test_a_change_waits_for_its_outputs_and_for_the_last_seal() -> None:
    """Nobody sees a route between: the command that reports the last seal makes it current."""
    state = with_topic()
    before = ranges(state)
    state, result = do(state, begin(1, 2, order="weak"))
    change = under_way(state)
    assert ("created", change.id, 1) == (result.outcome, result.version, change.version)
    assert [KeyRange(1, 21_846, 21_845), KeyRange(2, 43_691, 21_845)] == change.inputs
    assert ([0, 1, 2, 3], [0, 1, 2]) == (topic(state).all_numbers, topic(state).numbers)
    assert "conflict" == do(state, CloseChange("t", change.id))[1].outcome, "not made yet"
    assert "conflict" == do(state, sealed(state, number=1))[1].outcome, "not closing yet"
    state, result = do(made(state), CloseChange("t", change.id))
    assert ("updated", "closing") == (result.outcome, under_way(state).state)
    state, _ = do(state, sealed(state, number=2))
    assert (before, {2: Seal(7, 812, 1_000)}) == (ranges(state), under_way(state).seals)

    state, result = do(state, sealed(state, number=1, end_offset=3))

    assert result.topic is not None and result.topic.change is None and result.topic.route is not None
    assert [*before[:1], (3, 21_846, 43_690)] == ranges(state)
    assert ["done"] == [each.state for each in topic(state).changes or ()]


def test_what_is_closing_is_never_cancelled_and_what_is_done_neither() -> None:
    state, _ = do(with_topic(), begin(0, cuts=(5,)))
    change = under_way(state)
    state, _ = do(made(state), CloseChange("t", change.id))
    assert "conflict" == do(state, CancelChange("t", change.id, 9))[1].outcome
    state, _ = do(state, sealed(state, number=0))
    assert "conflict" == do(state, CancelChange("t", change.id, 9))[1].outcome
    assert "exists" == do(state, CloseChange("t", change.id))[1].outcome


def test_a_cancelled_change_leaves_tombstones_and_its_numbers_are_gone() -> None:
    """Then another change may begin, with the next numbers; the old one's steps find nothing."""
    before = with_topic()
    state, _ = do(before, begin(0, cuts=(5,)))
    change = under_way(state)

    state, result = do(made(state), CancelChange("t", change.id, 9))

    assert ("deleted", [group(100), group(101)]) == (result.outcome, result.groups)
    assert {group(100).hex(), group(101).hex()} == set(state.tombstones)
    assert 3 == len(state.tombstones[group(100).hex()].replicas)
    assert (ranges(before), [0, 1, 2]) == (ranges(state), topic(state).listed)
    assert "absent" == do(state, CloseChange("t", change.id))[1].outcome
    assert "conflict" == do(state, begin(1))[1].outcome, "the groups of the tombstones"
    state, result = do(state, begin(1, seed=200))
    assert ("created", 5) == (result.outcome, under_way(state).outputs[0].number)
    for name in NODES:
        state, _ = catalog_rules.mark_removed(
            state, MarkRemoved(name, name.encode(), [group(100), group(101)])
        )
    assert not state.tombstones


@pytest.mark.parametrize(
    ("request_", "outcome", "detail"),
    [
        (begin(0, after=1), "conflict", "route is 0"),
        (begin(), "invalid", "not partitions"),
        (begin(0, 0), "invalid", "each once"),
        (begin(0, 3), "invalid", "not partitions"),
        (begin(0, 2), "invalid", "not neighbours"),
        (begin(0, 1, cuts=(5,)), "invalid", "merged to one"),
        (begin(0, cuts=(0,)), "invalid", "do not rise inside 0 to 21845"),
        (begin(0, cuts=(21_846,)), "invalid", "do not rise"),
        (begin(0, cuts=(5, 5)), "invalid", "do not rise"),
        (begin(0, groups=[]), "invalid", "0 groups"),
        (begin(0, placement=[]), "invalid", "0 places"),
        (begin(0, groups=[bytes(16)]), "invalid", "group id"),
        (begin(0, cuts=(5,), groups=[group(9), group(9)]), "invalid", "one group id"),
        (begin(0, groups=[group(1)]), "conflict", "used before"),
        (begin(0, placement=[[]]), "invalid", "placed on"),
        (begin(0, placement=[["a", "a"]]), "invalid", "placed on"),
        (begin(0, placement=[["a", "d"]]), "conflict", "not known, or draining: ['d']"),
        (begin(0, force=True), "invalid", "strict"),
        (begin(0, wait_ms=-1), "invalid", "wait_ms"),
        (replace(begin(0), topic="u"), "absent", "no topic"),
    ],
)
def test_what_cannot_be_a_change_is_refused(request_: BeginChange, outcome: str, detail: str) -> None:
    state = with_topic()
    after, result = do(state, request_)

    assert after is state and outcome == result.outcome and detail in result.detail, result.detail


def test_of_two_changes_at_a_time_one_is_refused_and_the_same_one_exists() -> None:
    """The same, asked again with other groups, while it is under way and after."""
    state, _ = do(with_topic(), begin(0, cuts=(5,)))
    assert "conflict" == do(state, begin(1, seed=200))[1].outcome
    assert "conflict" == do(state, begin(0, cuts=(6,), seed=200))[1].outcome
    assert "exists" == do(state, begin(0, cuts=(5,), seed=200))[1].outcome
    state, _ = do(made(state), CloseChange("t", under_way(state).id))
    state, _ = do(state, sealed(state, number=0))
    assert "exists" == do(state, begin(0, cuts=(5,), seed=300))[1].outcome
    assert "conflict" == do(state, begin(1, seed=300))[1].outcome


def test_a_draining_node_gets_no_output_and_one_that_holds_an_output_is_not_removed() -> None:
    """An output in `creating` is a partition as any: the catalog's other rules see it so."""
    state = with_topic()
    version = state.nodes["c"].version
    draining, _ = placement_rules.change_placement(
        state, ChangePlacement(AlterNode("c", version, draining=True))
    )
    assert "draining: ['c']" in do(draining, begin(0))[1].detail
    state, _ = do(state, begin(0, placement=[["c"]]))
    state, _ = placement_rules.change_placement(
        state, ChangePlacement(AlterNode("c", version, draining=True))
    )
    without = {key: replace(each, replicas=[]) for key, each in state.partitions.items() if key != "t/3"}
    state = replace(state, partitions=state.partitions | without)
    removal = RemoveNode("c", state.nodes["c"].version)
    _, result = placement_rules.change_placement(state, ChangePlacement(removal))
    assert ("conflict", True) == (result.outcome, "t/3" in result.detail)
    output = state.partitions["t/3"]
    step = ReplaceReplica("t/3", output.group, output.version, output.replicas[0].replica_id, "moved", "a")
    _, result = replica_rules.change_replicas(state, ChangeReplicas(step))
    assert ("conflict", True) == (result.outcome, "being created" in result.detail)


@pytest.mark.parametrize("phase", ["preparing", "closing", "done"])
def test_a_topic_that_is_deleted_in_a_change_leaves_nothing(phase: str) -> None:
    """Its inputs and outputs are tombstones; what comes late finds no topic, or another one of the name."""
    state, _ = do(with_topic(), begin(0, cuts=(5,)))
    report, change = sealed(state, number=0), under_way(state).id
    if phase != "preparing":
        state, _ = do(made(state), CloseChange("t", change))
    if phase == "done":
        state, _ = do(state, report)

    state, result = catalog_rules.delete_topic(state, DeleteTopic("t", 9))

    assert "deleted" == result.outcome and not state.partitions and not state.topics
    assert 5 == len(state.tombstones) == len(result.groups)
    for step in (report, CloseChange("t", change), CancelChange("t", change, 9), begin(0)):
        assert "absent" == do(state, step)[1].outcome
    groups = [group(50 + number) for number in range(3)]
    state, _ = catalog_rules.create_topic(state, CreateTopic("t", 3, 3, {}, groups, [NODES] * 3, 1))
    assert "absent" == do(state, report)[1].outcome
    assert (0, None, [0, 1, 2]) == (
        topic(state).next_partition,
        topic(state).change,
        list(topic(state).numbers),
    )


def test_a_forced_change_does_not_wait_and_takes_the_seals_later() -> None:
    """Only a weak one; what has no seal is not reclaimed, and neither is what succeeded it."""
    state, _ = do(with_topic(), begin(0, 1, order="weak"))
    change = under_way(state)
    report = sealed(state, number=1)
    state, _ = do(made(state), CloseChange("t", change.id))
    state, result = do(state, CloseChange("t", change.id, force=True))
    assert ("updated", [(3, 0, 43_691)]) == (result.outcome, ranges(state)[:1])
    state = changed(state, begin(3, after=1, cuts=(5,), seed=200))
    for number in (0, 1, 3):
        record = state.partitions[f"t/{number}"]
        assert "conflict" == do(state, ReclaimPartition("t", number, record.group, 9))[1].outcome
    state, result = do(state, report)
    assert ("updated", {1: report.seal}) == (result.outcome, (topic(state).changes or [])[0].seals)
    state, result = do(state, ReclaimPartition("t", 1, group(2), 9))
    assert "deleted" == result.outcome
    assert "conflict" == do(state, ReclaimPartition("t", 3, group(100), 9))[1].outcome, "partition 0 is there"

    strict, _ = do(with_topic(), begin(0))
    assert "invalid" == do(made(strict), CloseChange("t", under_way(strict).id, force=True))[1].outcome
    forced, _ = do(with_topic(), begin(0, order="weak", force=True))
    forced, _ = do(made(forced), CloseChange("t", under_way(forced).id))
    assert topic(forced).change is None and 1 == route_rules.route_of(topic(forced)).version


def test_the_end_that_is_recorded_stands() -> None:
    """A leader that sealed again, after a loss, is told; so is one of another group."""
    state, _ = do(with_topic(), begin(0, 1))
    state, _ = do(made(state), CloseChange("t", under_way(state).id))
    report = sealed(state, number=0)
    assert "absent" == do(state, replace(report, group=group(2)))[1].outcome
    assert "absent" == do(state, replace(report, number=2))[1].outcome
    assert "absent" == do(state, replace(report, id=report.id + 1))[1].outcome
    assert "invalid" == do(state, replace(report, seal=Seal(0, 0, 0)))[1].outcome
    state, _ = do(state, report)
    result = do(state, replace(report, seal=Seal(9, 813, 2_000)))[1]
    assert ("conflict", True) == (result.outcome, "ended at offset 812" in result.detail)


def test_a_topics_partitions_and_its_kept_ends_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also against one who splits and never reclaims; what is reclaimed is forgotten beyond the bound."""
    monkeypatch.setattr(route_rules, "MOST_PARTITIONS", 8)
    monkeypatch.setattr(route_rules, "MOST_ENDS", 2)
    monkeypatch.setattr(route_rules, "MOST_KEPT_ENDS", 5)
    state = with_topic(1)
    for version in range(3):
        state = changed(state, begin(version, after=version, seed=100 + version))
    assert "quota" == do(state, begin(3, after=3, cuts=(1, 2, 3, 4), seed=200))[1].outcome
    for version in (3, 4):
        state = changed(state, begin(version, after=version, seed=100 + version))
    assert "quota" == do(state, begin(5, after=5, seed=200))[1].outcome
    assert "partitions [0]" in do(state, begin(5, after=5, seed=200))[1].detail
    for number in range(4):
        record = state.partitions[f"t/{number}"]
        state, _ = do(state, ReclaimPartition("t", number, record.group, 9))
    assert [4, 5] == [each.version for each in topic(state).changes or ()]
    assert [5, 4, 3] == [each.version for each in route_rules.kept_routes(topic(state))]
    assert "absent" == do(state, CancelChange("t", 1, 9))[1].outcome, "forgotten, not cancelled"
    state = changed(state, begin(5, after=5, seed=200))
    assert [5, 6] == [each.version for each in topic(state).changes or ()]


def test_other_commands_leave_a_change_as_it_is() -> None:
    """And the version that they compare has moved."""
    state, _ = do(with_topic(), begin(0))
    change, version = under_way(state), topic(state).version
    state, result = placement_rules.change_placement(state, ChangePlacement(AlterTopic("t", version, 2)))
    assert ("updated", change) == (result.outcome, under_way(state))
    assert (
        "exists"
        == catalog_rules.create_topic(
            state, CreateTopic("t", 3, 2, {}, [group(n) for n in (70, 71, 72)], [NODES[:2]] * 3, 1)
        )[1].outcome
    )


# -- what older programs know ----------------------------------------------------------------


async def test_no_step_is_proposed_before_every_program_knows_it() -> None:
    """An older program would stop at the command."""
    own = Group(apply_first=True)
    own.catalogs = [Catalog(own)]
    for version in (0, 1, 2):
        if version:
            await own.catalogs[0].enable(version)
        proposed = len(own.log)
        with pytest.raises(NotEnabled):
            await own.catalogs[0].change_route(CancelChange("t", 1, 1))
        assert proposed == len(own.log)
    await own.catalogs[0].enable(3)
    assert "absent" == (await own.catalogs[0].change_route(CancelChange("t", 1, 1))).outcome


def test_records_without_a_change_have_no_field_that_an_older_program_lacks() -> None:
    """So they cost it, and us, nothing; and what it writes is read as a topic of route 0."""
    state = with_topic()
    whole = msgspec.msgpack.decode(encoded(state))
    fields = {name for each in whole["topics"].values() for name in each}
    assert {"name", "partitions", "replicas", "settings", "created_ms", "version"} == fields
    assert not {name for each in whole["partitions"].values() for name in each} & {"origin", "first", "size"}

    read = msgspec.msgpack.decode(encoded(state), type=CatalogState)

    assert state == read
    assert "created" == do(read, begin(0))[1].outcome


# -- any steps in any order ------------------------------------------------------------------


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
