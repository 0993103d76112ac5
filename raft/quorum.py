"""Majorities, as pure functions over what the replicas have said.

They know nothing of messages or logs. They are apart because everything rests on them: each has a slow,
obvious twin in the tests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum


class Outcome(Enum):
    """How a ballot stands."""

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


def ballot_outcome(voters: Collection[int], grants: Mapping[int, tuple[bool, bool]]) -> Outcome:
    """Whether the answers `replica id -> (granted, marked)` decide a ballot among `voters`.

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
