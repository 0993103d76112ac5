"""Who is a live member of which group, as a leader is told: sessions, modes, and a new leader's patience."""

from __future__ import annotations

import pytest

from laminar.http.api.problems import Problem
from laminar.node.partition.state import group_members as rosters
from laminar.node.partition.state.group_members import GroupMembers, Member


def member(name: str, at_s: float, *, mode: str = "clustering", session_ms: int = 6000) -> Member:
    return Member(name, mode, session_ms, at_s)


def names(found: GroupMembers, group: str, now_s: float) -> list[str]:
    return [each.member for each in found.members(group, now_s=now_s)]


def test_a_member_lives_for_one_session_after_it_was_seen() -> None:
    """Each its own; members of other groups are others."""
    found = GroupMembers()
    found.led(0)
    found.renew("g", member("b", 100, session_ms=2000), now_s=100)
    found.renew("g", member("a", 100), now_s=100)
    found.renew("h", member("c", 100), now_s=100)

    assert ["a", "b"] == names(found, "g", 101.9)
    assert ["a"] == names(found, "g", 102)
    found.renew("g", member("a", 105.9), now_s=105.9)
    assert ["a"] == names(found, "g", 111.8)
    assert ([], []) == (names(found, "g", 112), names(found, "h", 106))


def test_a_member_that_leaves_is_gone_at_once() -> None:
    """Twice does no harm."""
    found = GroupMembers()
    found.renew("g", member("a", 1), now_s=1)

    found.leave("g", "a")
    found.leave("g", "a")

    assert [] == names(found, "g", 1)


def test_a_new_leader_is_forming_for_the_longest_session() -> None:
    """Until then a member that is not there may be one that has not come by yet."""
    found = GroupMembers()
    found.renew("g", member("a", 50), now_s=50)
    found.led(100)

    assert [] == names(found, "g", 100)
    found.renew("g", member("b", 101), now_s=101)
    assert found.is_rebalancing("g", now_s=105.9)
    found.renew("g", member("c", 102, session_ms=9000), now_s=102)
    assert found.is_rebalancing("g", now_s=106) and found.is_rebalancing("g", now_s=107.9)
    assert not found.is_rebalancing("g", now_s=109)


def test_a_group_has_one_mode_at_a_time() -> None:
    """The other is refused while a member of the first lives."""
    found = GroupMembers()
    found.renew("g", member("a", 1), now_s=1)

    with pytest.raises(Problem) as refused:
        found.renew("g", member("b", 2, mode="broadcast"), now_s=2)
    found.renew("g", member("b", 8, mode="broadcast"), now_s=8)

    assert ("already_exists", "mode", "clustering") == (
        refused.value.code,
        refused.value.field,
        refused.value.limit,
    )
    assert ["b"] == names(found, "g", 8)


def test_rosters_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is over makes room; what lives is refused by nobody's coming."""
    monkeypatch.setattr(rosters, "MOST_GROUPS", 2)
    monkeypatch.setattr(rosters, "MOST_MEMBERS", 2)
    found = GroupMembers()
    for group, name in (("g", "a"), ("g", "b"), ("h", "a")):
        found.renew(group, member(name, 1), now_s=1)

    for group, name in (("g", "c"), ("i", "a")):
        with pytest.raises(Problem) as refused:
            found.renew(group, member(name, 2), now_s=2)
        assert ("quota", 2) == (refused.value.code, refused.value.limit)
    found.renew("g", member("a", 3), now_s=3)
    found.renew("i", member("a", 7.5), now_s=7.5)

    assert (["a"], [], ["a"]) == tuple(names(found, group, 7.5) for group in "ghi")
