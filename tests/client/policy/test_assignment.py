"""Who reads which partition: members agree without talking, and nothing is taken from who lives."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from laminar.client.policy.assignment import Members, Place, moves, reader_of, wanted

NAMES = [f"member-{number}" for number in range(8)]


def test_members_agree_whatever_order_they_hear_of_each_other_in() -> None:
    """And each partition is wanted by exactly one."""
    for partition in range(50):
        assert reader_of("t", partition, NAMES) == reader_of("t", partition, NAMES[::-1])
    members = Members(live=frozenset(NAMES))

    wishes = [wanted(name, "t", range(50), members) for name in NAMES]

    assert sorted(each for wish in wishes for each in wish) == list(range(50))


def test_who_comes_or_goes_moves_only_what_it_wins_or_loses() -> None:
    """No partition changes between two others."""
    before = {partition: reader_of("t", partition, NAMES) for partition in range(200)}
    after = {partition: reader_of("t", partition, NAMES[1:]) for partition in range(200)}

    assert {NAMES[0]} == {before[each] for each in before if before[each] != after[each]}


def test_partitions_are_spread_over_the_members() -> None:
    """Within what chance does to 4,000 draws."""
    counts = Counter(reader_of("t", partition, NAMES) for partition in range(4000))

    assert NAMES == sorted(counts) and all(400 < count < 600 for count in counts.values())


def test_an_assignment_is_the_same_in_all_versions() -> None:
    """Members of two versions would fight over what they see differently."""
    told = [reader_of("flights", partition, ["a", "b", "c"]) for partition in range(8)]

    assert ["a", "c", "b", "c", "b", "b", "b", "b"] == told


MEMBERS = Members(live=frozenset(["me", "other"]))


def test_what_is_free_or_left_by_the_dead_is_claimed_at_once() -> None:
    """From who it is seen to belong to; what a live member owns is waited for."""
    places = {
        0: Place(position=5),
        1: Place(position=5, owner="dead"),
        2: Place(position=5, owner="other"),
        3: Place(position=5, owner="me"),
    }

    plan = moves("me", held=[], wants=range(5), places=places, members=MEMBERS)

    assert {0: "", 1: "dead", 3: "me", 4: ""} == plan.claim
    assert plan.waits and not plan.release


def test_while_a_roster_forms_members_keep_what_they_have() -> None:
    """Who is not there may not have come by yet; what is free may still be claimed."""
    forming = Members(live=frozenset(["me"]), forming=True)
    places = {0: Place(position=5, owner="absent"), 1: Place(position=5)}

    plan = moves("me", held=[7], wants=[0, 1], places=places, members=forming)

    assert ({1: ""}, frozenset(), True) == (plan.claim, plan.release, plan.waits)


def test_what_another_is_to_read_is_given_up() -> None:
    """And nothing is waited for by who has all it wants."""
    plan = moves("me", held=[1, 2, 3], wants=[2], places={}, members=MEMBERS)

    assert (frozenset([1, 3]), {}, False) == (plan.release, plan.claim, plan.waits)


@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_members_that_come_and_go_end_with_each_partition_owned_once(
    rng: random.Random, partitions: int
) -> None:
    """Whatever they had before, two rounds after the last change; and nobody takes what a live one owns."""
    live = set(rng.sample(NAMES, rng.randint(1, 5)))
    owners = {each: rng.choice(["", *NAMES]) for each in range(partitions)}
    members = Members(live=frozenset(live))
    for _ in range(2):
        for me in rng.sample(sorted(live), len(live)):
            places = {each: Place(position=0, owner=owner) for each, owner in owners.items()}
            held = [each for each, owner in owners.items() if owner == me]
            wants = wanted(me, "t", range(partitions), members)
            plan = moves(me, held=held, wants=wants, places=places, members=members)
            for partition in plan.release:
                owners[partition] = ""
            for partition, owner in plan.claim.items():
                assert owners[partition] == owner and owner not in live
                owners[partition] = me

    assert owners == {each: reader_of("t", each, live) for each in range(partitions)}
