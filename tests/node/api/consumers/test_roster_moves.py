"""The list of a group's members goes with the topic's route, and is in one place at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import laminar
from laminar.http.api.problems import Problem
from laminar.node.api.consumers.groups import GroupRequest, GroupRoutes
from membership.requests import CloseChange
from tests.node.api.consumers.changed import ChangedNode, changed_node, until


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[ChangedNode]:
    async with changed_node(tmp_path, 2) as running:
        yield running


async def renew(node: ChangedNode, member: str, group: str = "g", **body: Any) -> Any:
    return await node.ask("PUT", f"/groups/{group}/members/{member}", {"routes": True, **body})


def members(document: Any) -> list[str]:
    return [each["member"] for each in document["members"]]


def at(node: ChangedNode, number: int) -> asyncio.Future[Any]:
    """Ask this partition's leader, as a shard does whose view is old."""
    routes: GroupRoutes = node.shard._application._handlers["renew_member"].__self__  # type: ignore[attr-defined]
    step = GroupRequest("t", number, "renew", "g", "late", "clustering", 2000)
    return asyncio.ensure_future(routes._perform(node.partition(number), step))


async def test_the_partition_that_takes_over_takes_no_member_for_dead_within_a_session(
    node: ChangedNode,
) -> None:
    """It says `forming`, as a new leader does: it knows none of those that the other one knew."""
    assert (["a"], 0) == (members(found := await renew(node, "a")), found["route"])
    await until_formed(node)
    with pytest.MonkeyPatch.context() as held:
        held.setattr(node.partition(1), "propose_seal", _not_now)
        change = await node.begin(0, 1)
        await until(lambda: ("t", 2) in node.shard.partitions and node.partition(2).leads)
        node.partition(2).group_members._led_s -= 60  # it was elected long before it is opened
    await node.done(change)
    found = await renew(node, "b", session_ms=2000)
    assert (["b"], 1, True) == (members(found), found["route"], found["forming"])
    assert ["a", "b"] == members(await renew(node, "a", session_ms=2000))
    await until_formed(node)


async def until_formed(node: ChangedNode) -> None:
    async with asyncio.timeout(60):
        while True:
            if not (await renew(node, "a", session_ms=2000))["forming"]:
                return
            await asyncio.sleep(0.2)


async def test_one_that_is_sealed_goes_on_until_its_change_is_done(node: ChangedNode) -> None:
    """Another input may take long; then it refuses, also a shard that has not heard of the change."""
    groups = {number: name for name in "abcdefgh" for number in [await place(node, name)]}
    with pytest.MonkeyPatch.context() as held:
        held.setattr(node.partition(1), "propose_seal", _not_now)
        change = await node.begin(0, 1)
        await until(lambda: node.partition(0).state.committed_seal is not None)
        assert ["m"] == members(await renew(node, "m", groups[0]))
        with pytest.raises(Problem, match="another partition"):
            await at(node, 2)
    await node.done(change)
    with pytest.raises(Problem, match="another partition"):
        await at(node, 0)
    assert ["m"] == members(await renew(node, "m", groups[0]))


async def place(node: ChangedNode, group: str) -> int:
    """The partition whose leader knows the group's members."""
    await renew(node, "probe", group)
    known = [number for number in (0, 1) if node.partition(number).group_members.members(group, now_s=0)]
    await node.ask("DELETE", f"/groups/{group}/members/probe")
    return known[0]


async def test_a_member_says_that_it_goes_over_changes(node: ChangedNode) -> None:
    """Before the first change it need not."""
    await node.ask("PUT", "/groups/g/members/old", {})
    await node.change(1)
    with pytest.raises(laminar.Error) as refused:
        await node.ask("PUT", "/groups/g/members/old", {})
    assert (409, "stale_route", "routes", 1) == (
        *(refused.value.status, refused.value.code, refused.value.field, refused.value.limit),
    )


async def test_two_lists_of_members_at_a_time_let_one_member_commit(node: ChangedNode) -> None:
    """A forced change opens what follows while the leader of its input knows nothing of it, and answers."""
    before = await place(node, "g")
    with pytest.MonkeyPatch.context() as held:
        for number in (0, 1):
            held.setattr(node.partition(number), "propose_seal", _not_now)
        change = await node.begin(0, 1, order="weak")
        await until(lambda: node.catalog.state().topics["t"].change.state == "closing")  # type: ignore[union-attr]
        await node.catalog.change_route(CloseChange("t", change.id, force=True))
        await node.done(change)
        assert ["late"] == [each.member for each in (await at(node, before)).members]
        assert ["b"] == members(await renew(node, "b"))
    await node.append(2, 3)
    await node.claim(2, "late")
    assert (await node.refused(2, "b")).code == "fenced"
    # The one that `b` does not know counts as dead: its partition is taken over.
    await node.claim(2, "b", expected_owner="late")
    with pytest.raises(laminar.Fenced):
        await node.set(2, 2, owner="late", expected={"2": 0}, expected_owner="late")
    await node.set(2, 1, owner="b", expected={"2": 0}, expected_owner="b")
    assert ({2: "b"}, 1) == (await node.owners(), (await node.positions())[2])


def _not_now(*_: object) -> None:
    raise Problem("disk_full", "not now", outcome="not_applied")
