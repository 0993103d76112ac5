"""Majorities and votes, as pure functions of the replicas' answers (paper 5.2, 5.3, 5.4.2).

They know neither messages nor logs nor terms. They have a module of their own because all safety depends on
them: the tests compare each function with a slow, obvious one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum


class Outcome(Enum):
    """The result of one round of votes, by the answers so far."""

    PENDING = "pending"
    WON = "won"
    LOST = "lost"


def majority(size: int) -> int:
    """Return how many of `size` voters are a majority."""
    return size // 2 + 1


def agreed_value(values: list[int]) -> int:
    """Return the highest value that a majority has reached, given one value per voter; reorders the list.

    It is used for match indexes (the result is committed) and for numbers of rounds (the result is
    confirmed). Without voters it is 0, because there is no majority.
    """
    size = len(values)
    if size == 0:
        return 0
    values.sort()
    # A majority of q has reached the q-th highest value, which is at size - q = (size - 1) // 2.
    return values[(size - 1) >> 1]


def vote_outcome(voters: Collection[int], grants: Mapping[int, tuple[bool, bool]]) -> Outcome:
    """Return whether the answers `replica id -> (granted, recovering)` win or lose a vote, or neither yet.

    The vote is won with the grants of a majority of the voters, without those of recovering ones: a
    recovering voter may have forgotten what it acknowledged, so its grant counts as absent
    (docs/consensus.md#recovering). The vote is lost when no further answer can win it. Answers of replicas
    that are not in `voters` are ignored.
    """
    needed = majority(len(voters))
    trusted = silent = 0
    for voter in voters:
        answer = grants.get(voter)
        if answer is None:
            silent += 1
        elif answer[0]:
            trusted += not answer[1]
    if trusted >= needed:
        return Outcome.WON if voters else Outcome.LOST
    return Outcome.LOST if trusted + silent < needed else Outcome.PENDING


class VoteTally:
    """The answers to one round of votes, by voter."""

    __slots__ = ("_grants", "_voters")

    def __init__(self, voters: tuple[int, ...]) -> None:
        self._voters = voters
        self._grants: dict[int, tuple[bool, bool]] = {}

    def record(self, replica_id: int, *, granted: bool, recovering: bool) -> None:
        """Record an answer. A later one withdraws neither a grant nor that the voter is recovering."""
        before = self._grants.get(replica_id)
        if before is not None:
            granted = granted or before[0]
            recovering = recovering or before[1]
        self._grants[replica_id] = (granted, recovering)

    def outcome(self) -> Outcome:
        """Return whether the answers so far win or lose the round."""
        return vote_outcome(self._voters, self._grants)
