"""The lists of groups that periodic checks look at: those that were awake (not quiesced) since the last look.

A quiesced group appends nothing, commits nothing and changes no leader, so a check that found nothing to do
there need not look again: an idle process does the same work however many groups it has. Some quiesced groups
must be checked all the same, because something becomes due by time alone; a check names these by its function
`keep`.

A group is put on every list when the driver starts to run its replica, when it wakes, and when its replica is
removed. As a safeguard each group is put on every list once in `ROUND_S` anyway, a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from laminar.node.consensus.replica import Replica

ROUND_S = 60
"""Each group is looked at once in this time (seconds), quiesced or not."""


class HasReplica(Protocol):
    """An object that belongs to one group, such as its partition; lists return these objects."""

    @property
    def replica(self) -> Replica:
        """This process's replica of the group."""


Member = TypeVar("Member", bound=HasReplica)


class AwakeList(Generic[Member]):
    """The list of one check: the groups that it has to look at, in the order in which they were added."""

    __slots__ = ("_groups", "_keep", "_members")

    def __init__(self, members: Mapping[bytes, Member], keep: Callable[[Member], bool]) -> None:
        self._members = members
        self._keep = keep
        self._groups: dict[bytes, None] = dict.fromkeys(members)

    def add(self, group: bytes) -> None:
        """Put a group on the list, so that the check looks at it next time."""
        self._groups[group] = None

    def take(self) -> list[Member]:
        """Return the members (groups) to check now.

        Quiesced ones are taken off the list, unless `keep` returns True for them.
        """
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
    """All lists of one process, and the groups that are still to be put on them in this round."""

    def __init__(self) -> None:
        self._lists: list[AwakeList[HasReplica]] = []
        # Groups that are still to be put on the lists in this round, and how many of them are due.
        self._round: list[bytes] = []
        self._credit = 0.0

    def list_of(self, members: Mapping[bytes, Member], keep: Callable[[Member], bool]) -> AwakeList[Member]:
        """Return a new list of the groups of `members` for one check.

        `keep(member)` returns whether the check must look at the group even while it is quiesced.
        """
        made = AwakeList(members, keep)
        self._lists.append(made)  # type: ignore[arg-type]  # only its `add` is called here
        return made

    def woken(self, group: bytes) -> None:
        """Put a group on every list: its replica was added, has woken, or was removed."""
        for each in self._lists:
            each.add(group)

    def remind(self, groups: Mapping[bytes, object], *, passed_s: float) -> None:
        """Put some of `groups` on every list, so that each gets there once in `ROUND_S`.

        `passed_s` is the time since the last call, which decides how many are due now.
        """
        self._credit += len(groups) * passed_s / ROUND_S
        while self._credit >= 1:
            self._credit -= 1
            if not self._round:
                self._round = list(groups)
            self.woken(self._round.pop())
