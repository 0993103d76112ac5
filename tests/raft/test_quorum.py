"""Majorities against their slow, obvious twins."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from raft.quorum import Outcome, agreed_value, majority, vote_outcome


def slow_agreed_value(values: list[int]) -> int:
    """The highest candidate that more than half of the voters have reached."""
    reached = [v for v in values if 2 * sum(other >= v for other in values) > len(values)]
    return max(reached, default=0)


def slow_outcome(voters: list[int], grants: dict[int, tuple[bool, bool]]) -> Outcome:
    """Try every way in which the silent voters may still answer."""

    def is_won(answers: dict[int, tuple[bool, bool]]) -> bool:
        given = [answers[voter] for voter in voters if voter in answers]
        unmarked = sum(granted and not recovering for granted, recovering in given)
        return 2 * unmarked > len(voters)

    if is_won(grants):
        return Outcome.WON
    silent = [voter for voter in voters if voter not in grants]
    futures = product([(True, False), (True, True), (False, False)], repeat=len(silent))
    if any(is_won({**grants, **dict(zip(silent, future, strict=True))}) for future in futures):
        return Outcome.PENDING
    return Outcome.LOST


@given(st.lists(st.integers(0, 9), max_size=7))
def test_the_agreed_value_is_what_a_majority_has_reached(values: list[int]) -> None:
    """The value at the middle of the sorted list is the highest that a majority has reached."""
    assert slow_agreed_value(values) == agreed_value(list(values))


@given(
    st.integers(1, 5),
    st.dictionaries(st.integers(1, 7), st.tuples(st.booleans(), st.booleans()), max_size=7),
)
def test_a_ballot_is_decided_as_soon_as_it_can_be_and_not_before(
    size: int, grants: dict[int, tuple[bool, bool]]
) -> None:
    """Won, lost or pending exactly as trying out every further answer says; strangers don't count."""
    voters = list(range(1, size + 1))

    assert slow_outcome(voters, grants) is vote_outcome(voters, grants)


def test_a_marked_voter_counts_as_absent() -> None:
    """Unmarked grants of a majority win, and nothing else (docs/consensus.md#recovering)."""
    assert vote_outcome([1, 2, 3], {1: (True, False), 2: (True, True)}) is Outcome.PENDING
    assert vote_outcome([1, 2, 3], {1: (True, False), 2: (True, True), 3: (True, True)}) is Outcome.LOST
    assert vote_outcome([1, 2, 3], {1: (True, False), 2: (True, True), 3: (True, False)}) is Outcome.WON


def test_two_majorities_always_meet() -> None:
    """What all of Raft rests on."""
    assert all(2 * majority(size) > size >= majority(size) for size in range(1, 20))
