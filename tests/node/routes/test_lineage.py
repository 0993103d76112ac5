"""What a topic's record says of the partitions before and after each other, over changes of its route."""

from __future__ import annotations

from laminar.node.routes import lineage
from membership.records import CatalogState, Seal
from membership.requests import CloseChange, ReclaimPartition, ReportSeal
from tests.membership.routes import begin, do, made, topic, under_way, with_topic


def seal_all(state: CatalogState) -> CatalogState:
    """Close the change under way, and report the seals of its inputs."""
    change = under_way(state)
    state, _ = do(made(state), CloseChange("t", change.id))
    for held in change.inputs:
        group = state.partitions[f"t/{held.number}"].group
        seal = Seal(index=9, end_offset=held.number * 10, time_ms=7)
        state, _ = do(state, ReportSeal("t", change.id, held.number, group, seal))
    return state


def split_then_merged() -> CatalogState:
    """Return a topic of 2 partitions: 0 was split to 2 and 3, then 3 and 1 were merged to 4."""
    state, _ = do(with_topic(2), begin(0, cuts=(10_000,)))
    state, _ = do(seal_all(state), begin(3, 1, after=1, seed=200))
    return seal_all(state)


def test_ancestors_come_oldest_first_and_by_logical_partition() -> None:
    record = topic(split_then_merged())
    assert lineage.ancestors_of(record, 4) == [0, 3, 1]
    assert lineage.ancestors_of(record, 4, logical=20_000) == [0, 3]
    assert lineage.ancestors_of(record, 4, logical=50_000) == [1]
    assert lineage.ancestors_of(record, 2) == [0]
    assert lineage.ancestors_of(record, 0) == []
    assert lineage.inputs_of(record, 4) == [3, 1]
    assert lineage.outputs_of(record, 0) == [2, 3]
    assert [lineage.opened_in(record, number) for number in range(5)] == [0, 0, 1, 1, 2]


def test_what_is_reclaimed_is_no_ancestor_any_more() -> None:
    state = split_then_merged()
    state, result = do(state, ReclaimPartition("t", 0, state.partitions["t/0"].group, 9))
    assert result.ok
    record = topic(state)
    assert lineage.ancestors_of(record, 4) == [3, 1]
    assert lineage.ancestors_of(record, 2) == []
    assert lineage.inputs_of(record, 2) == [0]
    assert lineage.state_of(record, 0) == "reclaimed"
    assert lineage.seal_of(record, 0) == Seal(9, 0, 7)


def test_states_along_a_change() -> None:
    state, _ = do(with_topic(2), begin(0, cuts=(10_000,)))
    states = [[lineage.state_of(topic(state), number) for number in range(4)]]
    change = under_way(state)
    closing, _ = do(made(state), CloseChange("t", change.id))
    states.append([lineage.state_of(topic(closing), number) for number in range(4)])
    assert lineage.outputs_of(topic(closing), 0) == []
    states.append([lineage.state_of(topic(seal_all(state)), number) for number in range(4)])
    assert states == [
        ["open", "open", "waiting", "waiting"],
        ["sealing", "open", "waiting", "waiting"],
        ["sealed", "open", "open", "open"],
    ]


def test_the_lineages_of_all_partitions_are_those_of_each() -> None:
    begun, _ = do(with_topic(2), begin(0, cuts=(10_000,)))
    split = seal_all(begun)
    merging, _ = do(split, begin(3, 1, after=1, seed=200))
    for state in (with_topic(2), begun, split, merging, split_then_merged()):
        record = topic(state)
        found = lineage.lineages_of(record)
        assert list(found) == list(record.all_numbers)
        for number, each in found.items():
            assert each.status == lineage.state_of(record, number)
            assert each.inputs == lineage.inputs_of(record, number)
            assert each.outputs == lineage.outputs_of(record, number)
    assert [(each.range.first, each.range.size) for each in found.values()] == [
        (0, 32_768),
        (32_768, 32_768),
        (0, 10_000),
        (10_000, 22_768),
        (10_000, 55_536),
    ]


def test_a_weak_change_has_no_ancestors_to_be_read_first() -> None:
    state, _ = do(with_topic(2), begin(0, cuts=(10_000,), order="weak"))
    state, _ = do(seal_all(state), begin(3, 1, after=1, seed=200))
    record = topic(seal_all(state))
    assert lineage.ancestors_of(record, 4) == [0, 3, 1]
    assert lineage.ancestors_of(record, 4, only_strict=True) == [3, 1]
    assert lineage.ancestors_of(record, 2, only_strict=True) == []
