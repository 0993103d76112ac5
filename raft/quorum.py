"""Majorities and votes, as pure functions over what the replicas have said (paper 5.2, 5.3, 5.4.2).

They know neither messages nor logs nor terms. They are apart because everything rests on them: each function
has a slow, obvious twin in the tests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum


class Outcome(Enum):
    """What the answers to one round of votes decide."""

    PENDING = "pending"
    WON = "won"
    LOST = "lost"


def majority(size: int) -> int:
    """How many of `size` voters are a majority."""
    return size // 2 + 1


def agreed_value(values: list[int]) -> int:
    """The highest value that a majority has reached, given one value per voter; reorders the list.

    Serves match indexes (what is committed) and confirmation rounds (what is confirmed) alike. 0 for no
    voters: nobody can agree to anything.
    """
    size = len(values)
    if size == 0:
        return 0
    values.sort()
    # A majority of q has reached the q-th highest value, which stands at size - q = (size - 1) // 2.
    return values[(size - 1) >> 1]


def vote_outcome(voters: Collection[int], grants: Mapping[int, tuple[bool, bool]]) -> Outcome:
    """Whether the answers `replica id -> (granted, marked)` decide a round of votes among `voters`.

    Won with unmarked grants of a majority: a marked voter may have forgotten what it acknowledged, so its
    grant counts as absent (docs/consensus.md#marks). Lost when no further answer can change that. Answers of
    others than `voters` don't count.
    """
    needed = majority(len(voters))
    unmarked = silent = 0
    for voter in voters:
        answer = grants.get(voter)
        if answer is None:
            silent += 1
        elif answer[0]:
            unmarked += not answer[1]
    if unmarked >= needed:
        return Outcome.WON if voters else Outcome.LOST
    return Outcome.LOST if unmarked + silent < needed else Outcome.PENDING


class VoteTally:
    """The answers to one round, by voter."""

    __slots__ = ("_grants", "_voters")

    def __init__(self, voters: tuple[int, ...]) -> None:
        self._voters = voters
        self._grants: dict[int, tuple[bool, bool]] = {}

    def record(self, replica_id: int, *, granted: bool, marked: bool) -> None:
        """Record an answer. A grant is never withdrawn by a later answer, and neither is a mark."""
        before = self._grants.get(replica_id)
        if before is not None:
            granted = granted or before[0]
            marked = marked or before[1]
        self._grants[replica_id] = (granted, marked)

    def outcome(self) -> Outcome:
        """Return whether the answers so far win or lose the round."""
        return vote_outcome(self._voters, self._grants)
