"""Preferred leaders: spread by weight, and kept where they are while that is fair."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from laminar.node.placement.preferred_leaders import MOST_CHANGES, transfer
from laminar.node.placement.wanted import wanted_nodes
from membership.records import CatalogState, ReplicaRecord
from tests.membership.nodes import node, state_of
from tests.node.placement.at_once import choose


def cluster(nodes: str, partitions: int, *, replicas: int = 3) -> CatalogState:
    """Return a catalog whose partitions are on their wanted sets, without preferred leaders."""
    base = state_of(*nodes)
    topic = replace(base.topics["t"], partitions=partitions, replicas=replicas)
    state = replace(base, topics={"t": topic})
    placed = {}
    for n in range(partitions):
        partition = replace(base.partitions["t/0"], number=n, group=n.to_bytes(16, "big"))
        names = wanted_nodes(state, partition)
        records = [
            ReplicaRecord(3 * n + i, each, each.encode() * 16, made=True) for i, each in enumerate(names)
        ]
        placed[f"t/{n}"] = replace(partition, replicas=records)
    return replace(state, partitions=placed)


def chosen(state: CatalogState, **more: set[str]) -> CatalogState:
    """Apply the choice, in as many rounds as it takes."""
    for _ in range(50):
        changes = choose(state, **more)
        if not changes:
            return state
        partitions = {
            key: replace(state.partitions[key], preferred_leader=node) for key, node in changes.items()
        }
        state = replace(state, partitions=state.partitions | partitions)
    raise AssertionError("the choice does not come to rest")


def counts(state: CatalogState) -> Counter[str]:
    return Counter(each.preferred_leader for each in state.partitions.values())


@pytest.mark.parametrize("partitions", [7, 60, 1000])
@pytest.mark.parametrize("nodes", ["abc", "abcde"])
def test_each_node_leads_as_many_as_the_others_but_one(nodes: str, partitions: int) -> None:
    led = counts(chosen(cluster(nodes, partitions)))
    assert sum(led.values()) == partitions
    assert max(led.values()) - min(led[name] for name in nodes) <= 1, led


def test_leaders_follow_weights() -> None:
    state = cluster("abc", 400)
    state = replace(state, nodes=state.nodes | {"a": replace(node("a"), set_weight=2.0)})
    led = counts(chosen(state))
    assert led == {"a": 200, "b": 100, "c": 100}


def test_what_is_even_stays_as_it_is() -> None:
    """Also what another one chose: two partitions that swapped their leaders are not swapped back."""
    state = chosen(cluster("abc", 60))
    keys = list(state.partitions)
    swapped = {
        key: replace(state.partitions[key], preferred_leader=state.partitions[other].preferred_leader)
        for key, other in zip(keys, reversed(keys), strict=True)
    }
    changed = sum(each != state.partitions[key] for key, each in swapped.items())
    assert changed > 20 and choose(replace(state, partitions=state.partitions | swapped)) == {}


@pytest.mark.parametrize("partitions", [1, 2, 7, 60])
def test_what_an_operator_transfers_stays_where_it_was_put(partitions: int) -> None:
    """The former leader gets a partition in exchange, where one node would lead too many."""
    state = chosen(cluster("abcd", partitions))
    alone = exchanged = 0
    for key, partition in state.partitions.items():
        for replica in partition.replicas:
            changes = transfer(state, key, replica.node)
            after = replace(
                state,
                partitions=state.partitions
                | {k: replace(state.partitions[k], preferred_leader=leader) for k, leader in changes.items()},
            )
            if counts(state)[partition.preferred_leader] > counts(state)[replica.node]:
                assert changes == {key: replica.node}  # both lead as many as before, the other way round
            alone += len(changes) == 1
            exchanged += len(changes) == 2
            assert len(changes) <= 2 and changes[key] == replica.node
            for other, leader in changes.items():
                assert leader in [each.node for each in after.partitions[other].replicas]
            if partitions >= 60 or len(changes) == 2:
                assert choose(after) == {}, changes
    assert alone and (exchanged or partitions < 7)


def test_a_transfer_exchanges_nothing_with_a_node_that_goes_and_nothing_that_is_not_made() -> None:
    state = chosen(cluster("abc", 6))
    key = next(key for key, each in state.partitions.items() if each.preferred_leader == "a")
    assert len(transfer(state, key, "b")) == 2 and transfer(state, key, "a") == {key: "a"}
    draining = replace(state, nodes=state.nodes | {"a": replace(node("a"), draining=True)})
    assert transfer(draining, key, "b") == {key: "b"}
    growing = {
        k: replace(each, replicas=[replace(r, made=r.node != "a") for r in each.replicas])
        for k, each in state.partitions.items()
    }
    assert transfer(replace(state, partitions=growing), key, "b") == {key: "b"}


def test_a_node_that_leaves_hands_over_only_what_it_leads() -> None:
    before = chosen(cluster("abcde", 100))
    draining = replace(before, nodes=before.nodes | {"c": replace(node("c"), draining=True)})
    after = chosen(draining)
    led = counts(after)
    assert led["c"] == 0 and max(led.values()) - min(led[name] for name in "abde") <= 1
    moved = [key for key, each in after.partitions.items() if each != before.partitions[key]]
    assert len(moved) <= counts(before)["c"] * 2

    assert choose(before) == {}
    gone = counts(chosen(before, unfit={"c"}))
    assert gone["c"] == 0


def test_a_partition_that_grows_is_led_where_it_is_and_counts_there() -> None:
    """Else its leadership would go to the first replica that is made, and on to the next."""
    state = cluster("abc", 12)
    growing = {
        key: replace(each, replicas=[replace(r, made=r.node == "a") for r in each.replicas])
        for key, each in list(state.partitions.items())[:8]
    }
    changes = choose(replace(state, partitions=state.partitions | growing))
    assert changes.keys() == state.partitions.keys() - growing.keys()
    assert Counter(changes.values()) == {"b": 2, "c": 2}


def test_a_replica_that_is_not_made_or_lost_is_not_preferred() -> None:
    state = cluster("abc", 12)
    partitions = {
        key: replace(
            each,
            replicas=[replace(r, made=r.node != "b", lost=r.node == "c") for r in each.replicas],
            preferred_leader="c",
        )
        for key, each in state.partitions.items()
    }
    assert counts(chosen(replace(state, partitions=partitions))) == {"a": 12}


def test_a_chain_of_hand_overs_reaches_a_node_that_shares_nothing_with_the_fullest() -> None:
    """a shares partitions with b alone, b with c."""
    base = cluster("abc", 1)
    first = base.partitions["t/0"]

    def on(key: int, names: str, leader: str) -> tuple[str, object]:
        records = [ReplicaRecord(i, name, name.encode() * 16, made=True) for i, name in enumerate(names)]
        return f"t/{key}", replace(first, number=key, replicas=records, preferred_leader=leader)

    pairs = [on(n, "ab", "a") for n in range(4)] + [on(4 + n, "bc", "b") for n in range(2)]
    state = replace(base, partitions=dict(pairs))
    assert counts(chosen(state)) == {"a": 2, "b": 2, "c": 2}


def test_one_answer_is_bounded() -> None:
    assert len(choose(cluster("abc", MOST_CHANGES + 50))) == MOST_CHANGES
