"""The groups that a periodic check looks at: those that are awake, or have been since it last looked.

A quiesced group appends nothing, commits nothing and changes no leader, so a check that found nothing to do
there need not look again: an idle process does the same work however many groups it has. A check says by its
`keep` which groups it goes on looking at while they are quiesced, because time alone makes something due.

A group is on each list from when it is driven. It comes back when it wakes, and when it is driven no longer.
Whatever was forgotten above, each group comes back once in `ROUND_S` all the same, a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from laminar.node.consensus.replica import Replica

ROUND_S = 60
"""Each group is looked at once in this time, quiesced or not."""


class HasReplica(Protocol):
    """What a list has for a group."""

    @property
    def replica(self) -> Replica:
        """The replica of the group here."""


Member = TypeVar("Member", bound=HasReplica)


class AwakeList(Generic[Member]):
    """The groups that one check looks at, in the order in which they came."""

    __slots__ = ("_groups", "_keep", "_members")

    def __init__(self, members: Mapping[bytes, Member], keep: Callable[[Member], bool]) -> None:
        self._members = members
        self._keep = keep
        self._groups: dict[bytes, None] = dict.fromkeys(members)

    def add(self, group: bytes) -> None:
        """Have the check look at a group."""
        self._groups[group] = None

    def take(self) -> list[Member]:
        """Return what to look at now; forget what is quiesced, unless `keep` holds for it."""
        found: list[Member] = []
        forgotten: list[bytes] = []
        for group in self._groups:
            member = self._members.get(group)
            if member is None:
                forgotten.append(group)
                continue
            found.append(member)
            if member.replica.core.quiesced and not self._keep(member):
                forgotten.append(group)
        for group in forgotten:
            del self._groups[group]
        return found


class Awake:
    """The lists of one process."""

    def __init__(self) -> None:
        self._lists: list[AwakeList[HasReplica]] = []
        # Groups still to come back in this round, and how many are due.
        self._round: list[bytes] = []
        self._credit = 0.0

    def list_of(self, members: Mapping[bytes, Member], keep: Callable[[Member], bool]) -> AwakeList[Member]:
        """Return a list of the groups of `members`; `keep` as described in the module's head."""
        made = AwakeList(members, keep)
        self._lists.append(made)  # type: ignore[arg-type]  # only its `add` is called here
        return made

    def woken(self, group: bytes) -> None:
        """Note that a group is driven from now on, has woken, or is driven no longer."""
        for each in self._lists:
            each.add(group)

    def remind(self, groups: Mapping[bytes, object], *, passed_s: float) -> None:
        """Put as many of `groups` on every list as are due `passed_s` after the call before."""
        self._credit += len(groups) * passed_s / ROUND_S
        while self._credit >= 1:
            self._credit -= 1
            if not self._round:
                self._round = list(groups)
            self.woken(self._round.pop())
