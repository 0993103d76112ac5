"""The live members of consumer groups, as the leader of one partition knows them.

A group's name selects one partition. The group's members report regularly to that partition's leader, which
answers with the list of live members. The list is not in the log. A new leader begins without members, and
answers for the longest session time of the members that the group is *rebalancing*: members that have not
reported to it yet may still be alive. When a change of the topic's route moves the group to another
partition, that partition's leader begins in the same way. The list decides only which partitions a member
tries to own; the owner of each partition is in the partition's log
(`laminar.node.partition.state.cursors`).
"""

from __future__ import annotations

import msgspec

from laminar.http.api.problems import Problem

MOST_GROUPS = 1000
MOST_MEMBERS = 1000
MOST_IN_ALL_GROUPS = 10_000


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A member of a consumer group.

    A member is alive until `session_ms` after `seen_s`, the time of its last report by the leader's monotonic
    clock. All members of a group have the same `mode`.
    """

    member: str
    mode: str
    session_ms: int
    seen_s: float

    def lives(self, now_s: float) -> bool:
        """Return whether the member's session has not ended at `now_s`."""
        return now_s < self.seen_s + self.session_ms / 1000


class GroupMembers:
    """The members of all groups whose names select one partition, while this replica leads it."""

    __slots__ = ("_groups", "_led_s", "_opened_index")

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, Member]] = {}
        self._led_s = 0.0
        self._opened_index = 0

    def led(self, now_s: float) -> None:
        """Note that this replica leads from `now_s` on, and clear the list; members will report again."""
        self._groups.clear()
        self._led_s = now_s

    def opened(self, index: int, now_s: float) -> None:
        """Note that entry `index` opened this partition, so that members may report here from now on.

        Until then members report to another partition's leader. So the first call for an index clears the
        list like a new leader.
        """
        if index != self._opened_index:
            self._opened_index = index
            self.led(now_s)

    def renew(self, group: str, member: Member, *, now_s: float) -> None:
        """Add `member`, or extend its session.

        Raises:
            Problem: 409 if live members have another mode; 429 if there are too many members or groups.
        """
        members = self._living(group, now_s)
        for other in members.values():
            if other.mode != member.mode and other.member != member.member:
                raise Problem(
                    "already_exists",
                    f"group {group!r} has members of another mode",
                    field="mode",
                    value=member.mode,
                    limit=other.mode,
                    outcome="not_applied",
                )
        if member.member not in members and len(members) >= MOST_MEMBERS:
            raise Problem("quota", "the group has too many members", field="member", limit=MOST_MEMBERS)
        if member.member not in members and self._count(now_s) >= MOST_IN_ALL_GROUPS:
            raise Problem(
                "quota", "the partition has too many members", field="member", limit=MOST_IN_ALL_GROUPS
            )
        if group not in self._groups:
            if len(self._groups) >= MOST_GROUPS:
                for each in list(self._groups):
                    self._living(each, now_s)
            if len(self._groups) >= MOST_GROUPS:
                raise Problem("quota", "the partition has too many groups", field="group", limit=MOST_GROUPS)
            self._groups[group] = members
        members[member.member] = member

    def leave(self, group: str, member: str) -> None:
        """Remove a member, if the group has it."""
        members = self._groups.get(group, {})
        members.pop(member, None)
        if not members:
            self._groups.pop(group, None)

    def members(self, group: str, *, now_s: float) -> list[Member]:
        """Return the group's live members, sorted by name."""
        living = self._living(group, now_s)
        return [living[name] for name in sorted(living)]

    def is_rebalancing(self, group: str, *, now_s: float) -> bool:
        """Return whether the group may still have members that only the previous leader knew.

        True until the longest session time of its live members has passed since this replica became leader.
        """
        longest_ms = max((each.session_ms for each in self._living(group, now_s).values()), default=0)
        return now_s < self._led_s + longest_ms / 1000

    def _count(self, now_s: float) -> int:
        """Return the number of members of all groups.

        Members whose sessions have ended are included if the number is below the limit even so.
        """
        count = sum(map(len, self._groups.values()))
        if count < MOST_IN_ALL_GROUPS:
            return count
        return sum(len(self._living(group, now_s)) for group in list(self._groups))

    def _living(self, group: str, now_s: float) -> dict[str, Member]:
        members = self._groups.get(group, {})
        for name in [each.member for each in members.values() if not each.lives(now_s)]:
            del members[name]
        if not members:
            self._groups.pop(group, None)
        return members
