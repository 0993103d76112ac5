"""Changes of a topic's route in the catalog: what each step compares and sets."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from laminar.wire.key_route import LOGICAL_PARTITIONS, Route
from membership import catalog_rules, placement_rules, replica_rules, route_rules
from membership.catalog import Catalog, NotEnabled
from membership.records import (
    CatalogState,
    KeyRange,
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
    CloseChange,
    CreateTopic,
    DeleteTopic,
    MarkRemoved,
    ReclaimPartition,
    RemoveNode,
    ReplaceReplica,
)
from membership.tables import encoded
from tests.membership.routes import (
    NODES,
    begin,
    changed,
    do,
    group,
    made,
    ranges,
    sealed,
    topic,
    under_way,
    with_topic,
)
from tests.membership.test_catalog import Group

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
