"""The planner's steps, from the catalog and from what its leader has seen of the nodes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from msgspec.structs import replace

from laminar.node.placement.planner import AT_ONCE, MOVES_AT_ONCE, Step, too_many_gone
from laminar.node.placement.presence import Presence
from laminar.node.placement.wanted import Wanted, wanted_nodes
from membership.placement_rules import change_placement
from membership.records import AcceptedLoss, CatalogState, LeavingReplica, Pin, ReplicaRecord
from membership.replica_rules import change_replicas
from membership.requests import (
    AcceptLoss,
    AddReplicas,
    ChangePlacement,
    ChangeReplicas,
    RemoveReplica,
    ReplaceReplica,
)
from tests.membership.nodes import node, state_of
from tests.node.placement.at_once import plan


def planned(
    state: CatalogState,
    *,
    gone: Collection[str] = (),
    absent: Collection[str] = (),
    new: Collection[str] = (),
) -> list[Step]:
    """Plan with all nodes settled but those that are gone, absent for a moment, or new."""
    present = state.nodes.keys() - set(gone) - set(absent)
    return plan(state, Wanted(state, unfit=gone), gone=gone, present=present, settled=present - set(new))


def perform(state: CatalogState, step: Step) -> CatalogState:
    """Commit a step, which the catalog must accept."""
    if isinstance(step, ReplaceReplica):
        after, result = change_replicas(state, ChangeReplicas(step))
    else:
        after, result = change_placement(state, ChangePlacement(step))
    assert result.outcome == "updated", result
    return after


def carried_out(state: CatalogState) -> CatalogState:
    """Do what the groups' leaders and the nodes would do of all steps: made, and no longer leaving."""
    return replace(
        state,
        partitions={
            key: replace(
                partition, replicas=[replace(each, made=True) for each in partition.replicas], leaving=[]
            )
            for key, partition in state.partitions.items()
        },
    )


def until_quiet(state: CatalogState, **seen: Any) -> tuple[CatalogState, list[Step]]:
    """Plan and carry out until nothing is left to do; return the steps."""
    steps: list[Step] = []
    for _ in range(1000):
        now = planned(state, **seen)
        if not now:
            return state, steps
        for step in now:
            state = perform(state, step)
        steps += now
        state = carried_out(state)
    raise AssertionError("the planner does not come to rest")


def nodes_of(state: CatalogState, key: str = "t/0") -> set[str]:
    return {each.node for each in state.partitions[key].replicas}


def many(state: CatalogState, number: int, *, placed: bool = True) -> CatalogState:
    """Return the state with `number` partitions like its first, each on its wanted set if `placed`."""
    first = state.partitions["t/0"]
    partitions = {}
    for n in range(number):
        partition = replace(first, number=n, group=n.to_bytes(16, "big"))
        if placed:
            wanted = wanted_nodes(state, partition)
            replicas = [
                ReplicaRecord(3 * n + i + 1, name, state.nodes[name].store_id, made=True)
                for i, name in enumerate(wanted)
            ]
            partition = replace(partition, replicas=replicas)
        partitions[f"t/{n}"] = partition
    topic = replace(state.topics["t"], partitions=number)
    return replace(state, partitions=partitions, topics={"t": topic}, next_replica_id=3 * number + 1)


def at_home(state: CatalogState) -> CatalogState:
    """Return the state with its partition on its wanted set."""
    return many(state, 1)


# -- replacement -------------------------------------------------------------------------


def test_a_dead_and_a_lost_replica_are_replaced_on_the_best_node_without_one() -> None:
    state = state_of(*"abcd")
    [step] = planned(state, gone={"c"})
    assert isinstance(step, ReplaceReplica)
    assert (step.replica_id, step.why, step.node, step.version) == (3, "dead", "d", 7)

    record = state.partitions["t/0"]
    three = state_of(*"abc")
    lost = replace(record, replicas=[*record.replicas[:2], replace(record.replicas[2], lost=True)])
    [step] = planned(replace(three, partitions={"t/0": lost}))
    assert isinstance(step, ReplaceReplica)
    assert (step.replica_id, step.why, step.node) == (3, "lost", "c")  # its node may take a new one

    other_store = replace(three, nodes=three.nodes | {"c": replace(node("c"), store_id=b"z" * 16)})
    assert [step.why for step in planned(other_store) if isinstance(step, ReplaceReplica)] == ["lost"]


@pytest.mark.parametrize(("nodes", "elsewhere"), [("abc", True), ("a", False)])
def test_an_only_replica_that_is_lost_is_replaced_on_another_node(nodes: str, elsewhere: bool) -> None:
    """Nothing could remove it from its own node first, and a node holds one replica of a group."""
    state = state_of(*nodes)
    record = state.partitions["t/0"]
    only = replace(record, replicas=[replace(record.replicas[0], lost=True)])
    [step] = planned(replace(state, partitions={"t/0": only}))
    assert isinstance(step, ReplaceReplica)
    assert (1, "lost", elsewhere) == (step.replica_id, step.why, step.node != "a")


def test_nothing_begins_while_more_than_one_node_in_four_is_gone() -> None:
    """Then it is the network."""
    state = state_of(*"abcd")
    assert not too_many_gone(state, {"c"}) and too_many_gone(state, {"c", "d"})
    assert planned(state, gone={"c", "d"}) == []
    assert too_many_gone(state_of(*"abc"), {"c"})
    # Nodes that could hold what is lost are there: what holds the steps back is the number of those gone.
    state = many(state_of(*"abcdefgh"), 20)
    assert planned(state, gone=set("ab")) != [] and planned(state, gone=set("abc")) == []


def test_a_replacement_comes_before_all_other_steps_of_its_partition() -> None:
    """A partition that lacks a copy neither moves nor shrinks; without a node for it, it waits."""
    state = state_of(*"abc")
    record = replace(state.partitions["t/0"], pin=Pin(["a", "b"], "operator", "test"))
    lost = replace(record, replicas=[*record.replicas[:2], replace(record.replicas[2], lost=True)])
    assert planned(replace(state, partitions={"t/0": lost}), new={"a", "b", "c"}) == []


def test_a_node_that_gets_its_first_replica_and_dies_is_replaced_though_another_is_not_made() -> None:
    """Else a partition whose two new nodes die at once would wait for ever."""
    state = state_of(*"abcdef")
    record = state.partitions["t/0"]
    growing = replace(
        record,
        replicas=[
            record.replicas[0],
            ReplicaRecord(2, "b", b"b" * 16),
            ReplicaRecord(3, "c", b"c" * 16),
        ],
    )
    state = replace(state, partitions={"t/0": growing}, nodes=state.nodes | {n: node(n) for n in "gh"})
    [step] = planned(state, gone={"b", "c"})
    assert isinstance(step, ReplaceReplica) and step.replica_id in (2, 3)
    perform(state, step)


# -- growth and shrinking ----------------------------------------------------------------


def test_a_partition_that_was_born_small_gets_all_that_it_lacks_at_once() -> None:
    state = state_of(*"abc")
    record = state.partitions["t/0"]
    small = replace(state, partitions={"t/0": replace(record, replicas=record.replicas[:1])})
    [step] = planned(small)
    assert isinstance(step, AddReplicas) and sorted(step.nodes) == ["b", "c"]
    after = perform(small, step)
    assert planned(after) == []  # one step at a time
    assert nodes_of(after) == set("abc")
    assert planned(carried_out(after)) == []


def test_growth_waits_for_a_node_that_settles_but_not_for_one_that_is_absent() -> None:
    state = state_of(*"abc")
    record = state.partitions["t/0"]
    small = replace(state, partitions={"t/0": replace(record, replicas=record.replicas[:1])})
    assert planned(small, new={"c"}) == []
    [step] = planned(small, absent={"c"})
    assert isinstance(step, AddReplicas) and step.nodes == ["b"]


def test_a_topic_that_asks_for_fewer_replicas_loses_the_worst_ranked_one_by_one() -> None:
    state = state_of(*"abc")
    state = replace(state, topics={"t": replace(state.topics["t"], replicas=1)})
    after, steps = until_quiet(state)
    assert [type(step) for step in steps] == [RemoveReplica, RemoveReplica]
    assert nodes_of(after) == set(wanted_nodes(state, state.partitions["t/0"]))


@pytest.mark.parametrize("busy", ["leaving", "not made", "creating"])
def test_a_partition_has_one_step_at_a_time(busy: str) -> None:
    """Where it is pinned elsewhere, and where it is to have fewer."""
    state = at_home(state_of(*"abcdef"))
    record = state.partitions["t/0"]
    away = [*sorted(nodes_of(state))[:2], min(set("abcdef") - nodes_of(state))]
    for pin in (Pin(away, "operator", "test"), Pin(away[:1], "operator", "test")):
        pinned = replace(record, pin=pin)
        assert planned(replace(state, partitions={"t/0": pinned})) != []
        if busy == "leaving":
            left = LeavingReplica(ReplicaRecord(9, "z", b"z" * 16), "moved")
            pinned = replace(pinned, leaving=[left])
        elif busy == "not made":
            *others, last = pinned.replicas
            pinned = replace(pinned, replicas=[*others, replace(last, made=False)])
        else:
            pinned = replace(pinned, state="creating")
        assert planned(replace(state, partitions={"t/0": pinned})) == []


def test_a_move_whose_new_node_dies_goes_elsewhere() -> None:
    """But not to the node that the moved one leaves: it is there until its successor votes."""
    state = at_home(state_of(*"abcdef"))
    home = sorted(nodes_of(state))
    away, *others = sorted(set("abcdef") - set(home))
    pin = Pin([*home[:2], away], "operator", "test")
    state = replace(state, partitions={"t/0": replace(state.partitions["t/0"], pin=pin)})
    [step] = planned(state)
    moving = perform(state, step)
    for made in (False, True):
        replicas = [replace(each, made=each.made or made) for each in moving.partitions["t/0"].replicas]
        arriving = replace(moving, partitions={"t/0": replace(moving.partitions["t/0"], replicas=replicas)})
        assert planned(arriving, absent={away}) == []
        [step] = planned(arriving, gone={away})
        assert isinstance(step, ReplaceReplica) and (step.why, step.node in others) == ("dead", True)
        after = perform(arriving, step)
        assert planned(after, gone={away}) == []
        assert [each.why for each in after.partitions["t/0"].leaving] == ["moved", "dead"]


def test_nothing_is_removed_while_one_that_stays_is_absent() -> None:
    """With it the last copy, or the majority, could go."""
    state = state_of(*"abc")
    state = replace(state, topics={"t": replace(state.topics["t"], replicas=2)})
    [kept, other] = wanted_nodes(state, state.partitions["t/0"])
    assert planned(state, absent={kept}) == []
    assert planned(state, absent=set("abc") - {kept, other}) != []


# -- moves -------------------------------------------------------------------------------


def test_a_draining_node_is_emptied_and_a_pin_to_it_gives_way() -> None:
    state = many(state_of(*"abcd"), 20)
    state = replace(state, nodes=state.nodes | {"c": replace(node("c"), draining=True)})
    after, steps = until_quiet(state)
    assert steps and all(isinstance(step, ReplaceReplica) and step.why == "moved" for step in steps)
    assert all("draining" in step.because for step in steps)
    assert all("c" not in nodes_of(after, key) for key in after.partitions)
    assert all(len(each.replicas) == 3 for each in after.partitions.values())

    pinned = replace(state.partitions["t/0"], pin=Pin(["a", "b", "c"], "operator", "test"))
    after, _ = until_quiet(replace(state, partitions={"t/0": pinned}))
    assert nodes_of(after) == set("abd")


def test_a_node_whose_folder_is_an_older_copy_is_not_wanted() -> None:
    state = state_of(*"abcd")
    for name in "abcd":
        old = replace(state, nodes=state.nodes | {name: replace(node(name), rolled_back=True)})
        assert set(wanted_nodes(old, old.partitions["t/0"])) == set("abcd") - {name}


def test_what_is_wanted_follows_the_nodes() -> None:
    """What was computed before stays only while the same nodes belong."""
    state = state_of(*"abcd")
    wanted = Wanted(state)
    former = wanted.nodes(state.partitions["t/0"])
    changed = replace(state, nodes=state.nodes | {former[0]: replace(node(former[0]), draining=True)})
    wanted.follow(changed)
    assert former[0] not in wanted.nodes(changed.partitions["t/0"])


def test_a_drain_for_which_too_few_nodes_are_left_moves_nothing() -> None:
    """Two nodes cannot hold three replicas; none is given up for it."""
    state = state_of(*"abc")
    state = replace(state, nodes=state.nodes | {"c": replace(node("c"), draining=True)})
    assert planned(state) == []


def test_a_pinned_partition_goes_to_its_nodes_and_back_when_it_is_unpinned() -> None:
    state = at_home(state_of(*"abcdef"))
    home = nodes_of(state)
    away = sorted(set("abcdef") - home)
    record = replace(state.partitions["t/0"], pin=Pin(away, "operator", "a test"))
    there, steps = until_quiet(replace(state, partitions={"t/0": record}))
    assert nodes_of(there) == set(away) and all("a test" in step.because for step in steps)
    unpinned = replace(there.partitions["t/0"], pin=None)
    back, _ = until_quiet(replace(there, partitions={"t/0": unpinned}))
    assert nodes_of(back) == home


@pytest.mark.parametrize("change", ["join", "weight", "zone"])
def test_partitions_follow_nodes_that_join_and_weights_and_zones_that_change(change: str) -> None:
    state = many(state_of(*"abcd"), 40)
    if change == "join":
        nodes = state.nodes | {"e": node("e")}
    elif change == "weight":
        nodes = state.nodes | {"a": replace(node("a"), set_weight=4.0)}
    else:
        zones = dict(zip("abcd", ("x", "x", "y", "z"), strict=True))
        nodes = state.nodes | {name: replace(node(name), set_zone=zone) for name, zone in zones.items()}
    changed = replace(state, nodes=nodes)
    after, steps = until_quiet(changed)
    assert steps
    for key, partition in after.partitions.items():
        assert nodes_of(after, key) == set(wanted_nodes(changed, partition)), key
    if change == "zone":
        assert all(len(nodes_of(after, key) & {"a", "b"}) == 1 for key in after.partitions)


def test_a_voluntary_move_waits_until_every_replica_is_present() -> None:
    """An absent one comes back or is replaced: its absence alone moves nothing."""
    state = at_home(state_of(*"abcdef"))
    home = sorted(nodes_of(state))
    away = [*home[:2], min(set("abcdef") - set(home))]
    record = replace(state.partitions["t/0"], pin=Pin(away, "operator", "test"))
    state = replace(state, partitions={"t/0": record})
    assert planned(state) != []
    assert planned(state, absent={home[0]}) == planned(state, absent={home[2]}) == []


def test_a_node_that_comes_and_goes_moves_nothing() -> None:
    """It is neither gone nor settled."""
    state = many(state_of(*"abcd"), 20)
    presence = Presence()
    for beat in range(200):
        now_ms = beat * 1000
        absent = {"c"} if beat % 4 < 2 else set()
        presence.observe(state.nodes, absent=absent, now_ms=now_ms)
        gone = presence.gone(10_000, now_ms=now_ms)
        settled = presence.settled(5_000, now_ms=now_ms)
        wanted = Wanted(state, unfit=gone)
        assert plan(state, wanted, gone=gone, present=presence.present(), settled=settled) == []
    joined = replace(state, nodes=state.nodes | {"e": node("e")})
    wanted = Wanted(joined)
    assert plan(joined, wanted, gone=(), present=set("abcde"), settled=set("abcd")) == []


# -- budgets -----------------------------------------------------------------------------


def test_a_node_gets_two_new_replicas_at_a_time() -> None:
    """So that the making of many starves nobody; the next come when these are made."""
    state = many(state_of(*"abcd"), 30)
    steps = planned(state, gone={"c"})
    assert steps and all(isinstance(step, ReplaceReplica) for step in steps)
    given = [step.node for step in steps if isinstance(step, ReplaceReplica)]
    assert max(given.count(name) for name in "abd") == AT_ONCE


def test_replicas_that_nothing_fills_keep_no_others_waiting() -> None:
    """Partitions whose only replica died with a node wait for an operator, the others for a copy."""
    state = many(state_of(*"abcd"), 30)
    alone = {
        key: replace(partition, replicas=[replace(partition.replicas[0], node="c")])
        for key, partition in state.partitions.items()
        if partition.number < 10
    }
    state = replace(state, partitions=state.partitions | alone)

    def until_stuck(state: CatalogState) -> tuple[CatalogState, int]:
        """Carry out all steps but those of partitions that have no leader; return how many these are."""
        stuck = 0
        while steps := planned(state, gone={"c"}):
            for step in steps:
                state = perform(state, step)
                stuck += step.partition in alone
            made = carried_out(state).partitions
            others = {key: partition for key, partition in made.items() if key not in alone}
            state = replace(state, partitions=state.partitions | others)
        return state, stuck

    state, stuck = until_stuck(state)
    left = {key for key in state.partitions if "c" in nodes_of(state, key)}
    assert left and left < alone.keys() and len(alone) - len(left) == stuck <= 3 * AT_ONCE

    # An operator decides: each goes on with what is new, which is made by that.
    for key in alone.keys() - left:
        partition = state.partitions[key]
        gone = [each.replica.replica_id for each in partition.leaving]
        loss = AcceptedLoss(partition.replicas[0].replica_id, gone, 0, 0, 0, 0)
        word = AcceptLoss(key, partition.group, partition.version, loss)
        state, result = change_replicas(state, ChangeReplicas(word))
        assert result.outcome == "updated", result
    decided = {key: carried_out(state).partitions[key] for key in alone.keys() - left}
    state, stuck = until_stuck(replace(state, partitions=state.partitions | decided))
    assert stuck


def test_voluntary_moves_of_the_whole_cluster_are_bounded_and_replacements_come_first() -> None:
    names = [f"n{n:02}" for n in range(40)]
    base = state_of(*"abc")
    state = many(replace(base, nodes={name: node(name) for name in names}), 200)
    half = {name: replace(node(name), draining=number % 2 == 0) for number, name in enumerate(names)}
    draining = replace(state, nodes=half)
    assert len(planned(draining)) == MOVES_AT_ONCE

    under_way = replace(
        draining.partitions["t/0"], leaving=[LeavingReplica(ReplicaRecord(9999, "n00", b"x"), "moved")]
    )
    busy = replace(draining, partitions=draining.partitions | {"t/0": under_way})
    assert len(planned(busy)) == MOVES_AT_ONCE - 1

    steps = planned(draining, gone={"n01"})
    whys = [step.why for step in steps if isinstance(step, ReplaceReplica)]
    assert whys == sorted(whys) and whys.count("moved") == MOVES_AT_ONCE  # dead ones first


# -- presence ----------------------------------------------------------------------------


def test_absence_and_presence_count_from_the_last_change() -> None:
    """A node that is seen in between begins anew; zero means never."""
    presence = Presence()
    presence.observe("cd", absent=["c"], now_ms=0)
    presence.observe("cd", absent=["c", "d"], now_ms=500)
    assert presence.gone(1000, now_ms=1000) == {"c"}
    presence.observe("cd", absent=["d"], now_ms=1000)
    assert presence.settled(500, now_ms=1400) == set() and presence.settled(400, now_ms=1400) == {"c"}
    presence.observe("cd", absent=["c", "d"], now_ms=1500)
    assert presence.gone(1000, now_ms=1600) == {"d"}
    assert presence.gone(0, now_ms=10**9) == set()
    presence.forget()
    assert presence.gone(1000, now_ms=10**9) == set() and presence.present() == set()
