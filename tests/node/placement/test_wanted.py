"""The wanted set: fair to weights, spread over zones, and little moved when nodes change."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from laminar.node.placement.wanted import Wanted, wanted_nodes
from membership.records import CatalogState, Pin
from router import place
from tests.membership.nodes import node, state_of

PARTITIONS = 1000
LARGEST_ERROR = 0.10


def cluster(
    weights: dict[str, float], *, topic: str = "t", replicas: int = 3, partitions: int = PARTITIONS
) -> CatalogState:
    base = state_of(*"abc")
    nodes = {name: replace(node(name), weight=weight) for name, weight in weights.items()}
    record = replace(base.partitions["t/0"], topic=topic)
    records = {f"{topic}/{n}": replace(record, number=n) for n in range(partitions)}
    topics = {topic: replace(base.topics["t"], name=topic, partitions=partitions, replicas=replicas)}
    return replace(base, nodes=nodes, partitions=records, topics=topics)


def held(state: CatalogState) -> Counter[str]:
    wanted = Wanted(state)
    return Counter(name for each in state.partitions.values() for name in wanted.nodes(each))


@pytest.mark.parametrize("topic", ["t", "orders", "_transactions"])
def test_nodes_of_one_weight_hold_as_much_of_a_thousand_partitions(topic: str) -> None:
    even = held(cluster(dict.fromkeys("abcde", 1.0), topic=topic))
    assert all(abs(count - 600) <= LARGEST_ERROR * 600 for count in even.values()), even


@pytest.mark.parametrize("topic", ["t", "orders", "_transactions"])
def test_single_replicas_follow_the_weights(topic: str) -> None:
    """Of 5,000: a share of a thousand partitions differs from its weight by 5 % (one standard deviation)."""
    weights = {"a": 1.0, "b": 1.0, "c": 2.0}
    found = held(cluster(weights, topic=topic, replicas=1, partitions=5 * PARTITIONS))
    for name, weight in weights.items():
        ideal = 5 * PARTITIONS * weight / sum(weights.values())
        assert abs(found[name] - ideal) <= LARGEST_ERROR * ideal, (name, found, ideal)


@pytest.mark.parametrize("nodes", [3, 4, 9])
def test_a_joining_node_takes_its_share_and_nothing_else_moves(nodes: int) -> None:
    names = [f"n{number}" for number in range(nodes + 1)]
    before = cluster(dict.fromkeys(names[:-1], 1.0), replicas=3)
    after = cluster(dict.fromkeys(names, 1.0), replicas=3)
    wanted_before, wanted_after = Wanted(before), Wanted(after)
    taken = 0
    for partition in before.partitions.values():
        new = set(wanted_after.nodes(partition)) - set(wanted_before.nodes(partition))
        assert new <= {names[-1]}
        taken += len(new)
    ideal = 3 * PARTITIONS / (nodes + 1)
    assert abs(taken - ideal) <= LARGEST_ERROR * ideal, (taken, ideal)


@settings(deadline=None)
@given(
    zones=st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(["", "x", "y", "z"]), min_size=1),
    hashed=st.integers(0, 2**32 - 1),
    number=st.integers(1, 5),
)
def test_no_zone_holds_two_replicas_while_another_holds_none(
    zones: dict[str, str], hashed: int, number: int
) -> None:
    chosen = place(hashed, dict.fromkeys(zones, 1.0), number, zones=zones)
    assert len(chosen) == len(set(chosen)) == min(number, len(zones))
    own = {name: zones[name] or name for name in zones}  # a node without a zone is one of its own
    counts = Counter(own[name] for name in chosen)
    left = {own[name] for name in zones if name not in chosen}
    assert all(counts[zone] >= max(counts.values()) - 1 for zone in left)


def test_nodes_that_do_not_belong_hold_nothing_whether_they_are_alive_or_not() -> None:
    state = state_of(*"abcdef")
    partition = state.partitions["t/0"]
    home = wanted_nodes(state, partition)
    for change in ({"draining": True}, {"set_weight": 0.0}, {"rolled_back": True}):
        changed = replace(state, nodes=state.nodes | {home[0]: replace(node(home[0]), **change)})
        now = wanted_nodes(changed, partition)
        assert home[0] not in now and now[:2] == home[1:]
    assert wanted_nodes(state, partition, unfit=[home[0]])[:2] == home[1:]


def test_a_pin_is_followed_in_its_order_and_filled_by_rank() -> None:
    state = state_of(*"abcdef")
    home = wanted_nodes(state, state.partitions["t/0"])
    away = sorted(set("abcdef") - set(home))
    pinned = replace(state.partitions["t/0"], pin=Pin([away[1], away[0]], "operator", "test"))
    assert wanted_nodes(state, pinned) == [away[1], away[0]]
    assert wanted_nodes(state, pinned, unfit=[away[1]]) == [away[0], home[0]]


def test_an_answer_that_was_computed_before_is_given_while_the_same_nodes_belong() -> None:
    """And never for other nodes, zones or numbers of replicas."""
    state = state_of(*"abcd")
    wanted = Wanted(state)
    partition = state.partitions["t/0"]
    first = wanted.nodes(partition)
    wanted.follow(replace(state, version=99))
    assert wanted.nodes(partition) is first
    wanted.follow(state, unfit=[first[0]])
    assert first[0] not in wanted.nodes(partition)
    fewer = replace(state, topics={"t": replace(state.topics["t"], replicas=1)})
    wanted.follow(fewer)
    assert wanted.nodes(partition) == first[:1]
