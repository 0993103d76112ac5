"""Reclaim: a partition that has ended goes when no consumer needs it, and no consumer loses anything."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest

import laminar
from laminar.http.api.problems import Problem
from laminar.node.api.consumers import reclaim
from laminar.node.api.consumers.cursor_steps import CursorRequest
from laminar.node.catalog.messages.answers import CatalogAnswer
from laminar.node.catalog.messages.requests import CatalogRequest, RouteRequest
from laminar.node.partition.partition import Partition
from laminar.node.transport.transport import TransportError
from tests.node.api.consumers.changed import TOPIC, ChangedNode, changed_node, until


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[ChangedNode]:
    async with changed_node(tmp_path) as running:
        yield running


async def refused(node: ChangedNode, number: int) -> laminar.Error:
    with pytest.raises(laminar.Error) as found:
        await node.ask("DELETE", f"/partitions/{number}")
    return found.value


def numbers(node: ChangedNode) -> list[int]:
    return list(node.catalog.state().topics[TOPIC].all_numbers)


def reclaims_of(node: ChangedNode) -> reclaim.Reclaims:
    found = node.shard._application._handlers["reclaim_partition"].__self__  # type: ignore[attr-defined]
    assert isinstance(found, reclaim.Reclaims)
    return found


async def test_a_partition_goes_when_all_its_cursors_are_at_its_end(node: ChangedNode) -> None:
    """With its records; a group that was only there begins at 0 in what follows, not as a new one."""
    await node.append(0, 3)
    await node.set(0, 3, "away")
    await node.set(0, 2, "behind")
    left, right = await node.change(0, cuts=[30_000])
    await node.append(left, 2)

    error = await refused(node, 0)
    assert (409, "not_drained", {"behind": 2}) == (error.status, error.code, error.limit)
    assert [0, 1, 2] == numbers(node)
    await node.set(0, 1, "behind")  # nothing stands in its way
    await node.set(0, 3, "behind")
    gone = await node.ask("DELETE", "/partitions/0")
    assert (3, 0, 3) == (gone["deleted"], gone["from_offset"], gone["start_offset"])
    assert [left, right] == numbers(node)
    for name in ("away", "behind"):
        assert {left: 0, right: 0} == await node.positions(name)
        await node.put({"begin": "latest"}, name)
        assert {left: 0, right: 0} == await node.positions(name)
    again = await node.ask("DELETE", "/partitions/0")
    assert (0, 3) == (again["deleted"], again["start_offset"])
    with pytest.raises(laminar.OffsetExpired) as expired:
        await node.ask("GET", "/partitions/0/records?offset=0")
    assert 3 == expired.value.limit


async def test_what_takes_records_and_what_follows_others_stays(node: ChangedNode) -> None:
    """Else a group that is behind further back never hears of what was here."""
    assert (422, "partition") == ((error := await refused(node, 0)).status, error.field)
    await node.set(0, 0)
    await node.change(0)
    await node.change(1)
    error = await refused(node, 1)
    assert (422, "0") == (error.status, error.limit)
    await node.ask("DELETE", "/partitions/0")
    await node.ask("DELETE", "/partitions/1")
    assert [2] == numbers(node)
    assert {2: 0} == await node.positions()
    with pytest.raises(laminar.NotFound):
        await node.ask("DELETE", "/partitions/7")


async def test_a_cursor_that_a_rewind_holds_is_behind(node: ChangedNode) -> None:
    """It will be set back; and that is possible again after the refusal."""
    await node.append(0, 1)
    await node.set(0, 1)
    await node.change(0)
    await node.partition(0).cursor_commands.take("g", "~rewind.1", now_ms=1, synced=True)
    assert {"g": 1} == (await refused(node, 0)).limit
    await node.put({"rewind": "earliest"})
    assert 0 == (await node.positions())[0]


async def test_while_it_is_reclaimed_no_cursor_begins_or_goes_back(node: ChangedNode) -> None:
    """After the check of cursors one that is new would be forgotten, whatever clock the next leader has."""
    await node.append(0, 2)
    await node.set(0, 1)
    await node.change(0)
    commands = node.partition(0).cursor_commands
    await commands.fence(now_ms=int(time.time() * 1000) - 24 * 3_600_000)
    for change in ({"begin": "latest"}, {"rewind": "earliest"}, {"positions": {"0": 0}}):
        with pytest.raises(laminar.Unavailable) as error:
            await node.put(change, "g" if "begin" not in change else "new")
        assert "changing" == error.value.code
    await node.set(0, 2)
    found = await node.ask("GET", "/cursors")
    assert {"g", "new"} >= {each["cursor"] for each in found["cursors"]}, "the fence is shown to no client"
    with pytest.raises(laminar.Error) as named:
        await node.put({"positions": {"0": 0}}, "~reclaim")
    assert (422, "cursor") == (named.value.status, named.value.field)


async def test_no_cursor_goes_back_after_it_was_looked_at(
    node: ChangedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rewind that comes between that and the catalog's command would lose its place."""
    await node.append(0, 1)
    await node.set(0, 1)
    await node.change(0)
    reclaims = reclaims_of(node)
    check, codes = reclaims._check_drained, []

    async def check_and_rewind(partition: Partition, end: int) -> None:
        await check(partition, end)
        codes.append((await _failed(node.put({"rewind": "earliest"}))).code)

    monkeypatch.setattr(reclaims, "_check_drained", check_and_rewind)
    await node.ask("DELETE", "/partitions/0")
    assert ["changing"] == codes


async def test_no_cursor_at_the_end_is_deleted_meanwhile(
    node: ChangedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is deleted in what follows first: there the reclaim would begin it again, and it would be left."""
    await node.append(0, 1)
    await node.set(0, 1)
    await node.change(0)
    reclaims = reclaims_of(node)
    begin, codes = reclaims._steps.unless_there, []

    async def delete_and_begin(step: CursorRequest) -> None:
        try:
            await node.ask("DELETE", "/cursors/g")
        except laminar.Error as error:
            codes.append(error.code)
        await begin(step)

    with monkeypatch.context() as slow:
        slow.setattr(reclaims._steps, "unless_there", delete_and_begin)
        await node.ask("DELETE", "/partitions/0")
    assert ["changing"] == codes
    assert {1: 0} == await node.positions()
    await node.ask("DELETE", "/cursors/g")
    assert [] == (await node.ask("GET", "/cursors"))["cursors"]


async def test_a_cursor_that_is_behind_is_deleted_over_a_fence_that_was_left(node: ChangedNode) -> None:
    """It is what a refusal advises; a reclaim does not begin such a cursor anywhere."""
    await node.append(0, 2)
    await node.set(0, 1)
    await node.set(0, 2, "held")
    await node.change(0)
    commands = node.partition(0).cursor_commands
    await commands.take("held", "~rewind.1", now_ms=1, synced=True)
    await commands.fence(now_ms=1)
    assert {"g": 1, "held": 2} == (await refused(node, 0)).limit
    await node.ask("DELETE", "/cursors/g")
    await node.ask("DELETE", "/cursors/held")
    await node.ask("DELETE", "/partitions/0")
    assert [1] == numbers(node)


async def test_a_fence_that_was_left_is_taken_down_in_time(
    node: ChangedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the leader's own clock, from when it saw it; attempts that are refused do not make it last."""
    await node.append(0, 2)
    await node.set(0, 1)
    await node.change(0)
    commands, reclaims = node.partition(0).cursor_commands, reclaims_of(node)
    await commands.fence(now_ms=1)
    await reclaims._end_fences()
    assert {"g": 1} == (await refused(node, 0)).limit
    await reclaims._end_fences()
    assert commands.is_fenced(), "what another leader asked of the catalog may come later"
    with monkeypatch.context() as later:
        later.setattr(reclaim, "FENCE_MS", 0)
        await reclaims._end_fences()
    assert not commands.is_fenced()
    await node.put({"begin": "latest"}, "new")
    await node.put({"rewind": "earliest"})


async def test_an_unknown_answer_of_the_catalog_leaves_the_fence(
    node: ChangedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may carry the request out later. An attempt counts from its end; the next one goes on."""
    await node.append(0, 1)
    await node.set(0, 1)
    await node.change(0)
    commands, reclaims = node.partition(0).cursor_commands, reclaims_of(node)
    await commands.fence(now_ms=1)
    await reclaims._end_fences()
    seen = dict(reclaims._fences)
    ask = reclaims._services.ask_catalog

    async def cut_off(request: CatalogRequest) -> CatalogAnswer:
        if isinstance(request, RouteRequest):
            raise TransportError("cut off")
        return await ask(request)

    with monkeypatch.context() as broken:
        broken.setattr(reclaims._services, "ask_catalog", cut_off)
        assert "outcome_unknown" == (await refused(node, 0)).code
    assert commands.is_fenced()
    (before,), (after,) = seen.values(), reclaims._fences.values()
    assert after[0] == before[0] and after[1] > before[1]
    await node.ask("DELETE", "/partitions/0")
    assert [1] == numbers(node)


async def test_an_output_without_a_leader_keeps_the_partition(
    node: ChangedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cursors could not begin there. Nothing is left in the way of consumers."""
    await node.append(0, 1)
    await node.set(0, 1)
    await node.change(0)
    with monkeypatch.context() as broken:
        broken.setattr(node.partition(1).cursor_commands, "set", _no_room)
        assert "disk_full" == (await refused(node, 0)).code
    assert [0, 1] == numbers(node)
    await node.put({"rewind": "earliest"})


async def test_by_itself_a_week_after_its_end_when_its_records_are_gone(
    node: ChangedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before, not while a record is there, not while a cursor is behind."""
    await node.append(0, 2)
    await node.set(0, 2)
    await node.change(0)
    reclaims = reclaims_of(node)
    await reclaims.reclaim_due()
    monkeypatch.setattr(reclaim, "RECLAIM_AGE_MS", 0)
    await reclaims.reclaim_due()
    assert [0, 1] == numbers(node), "it has records"
    await node.put({"rewind": {"0": 1}})
    partition = node.partition(0)
    await partition.start_mover.propose(partition.log.last_index)
    await until(lambda: partition.start_offset == 2)
    await reclaims.reclaim_due()
    assert [0, 1] == numbers(node), "a cursor is behind"
    await node.set(0, 2)
    monkeypatch.setattr(reclaim, "RECLAIM_AGE_MS", 3_600_000)
    await reclaims.reclaim_due()
    assert [0, 1] == numbers(node), "it was sealed a moment ago"
    monkeypatch.setattr(reclaim, "RECLAIM_AGE_MS", 0)
    await reclaims.reclaim_due()
    assert [1] == numbers(node)
    await node.seen()
    assert {1: 0} == await node.positions()


async def test_who_is_drained_and_who_is_not(node: ChangedNode) -> None:
    """By name; a cursor that is further back only is not drained here."""
    await node.append(0, 2)
    for name, position in {"done": 2, "behind": 1}.items():
        await node.set(0, position, name)
    await node.change(0)
    await node.append(1, 1)
    await node.set(1, 0, "done")
    await node.change(1)
    steps = node.shard._application._handlers["set_cursor"].__self__._steps  # type: ignore[attr-defined]
    assert (["done"], {"behind": 1}) == await steps.drains(TOPIC, 0)
    found = await node.ask("GET", "/partitions/0")
    assert (["done"], {"behind": 1}) == (found["drained_by"], found["not_drained_by"])
    assert not {"drained_by", "not_drained_by"} & (await node.ask("GET", "/partitions/2")).keys()
    assert ([], {"behind": 0, "done": 0}) == await steps.drains(TOPIC, 1)


async def test_the_command_and_the_client_reclaim(node: ChangedNode) -> None:
    """`laminar topic reclaim` says who is behind, and how much went."""
    await node.append(0, 2)
    await node.set(0, 1)
    await node.change(0)
    command = [sys.executable, "-m", "laminar.cli", "topic", "reclaim", "t", "0", "--url", node.node.url]

    async def run() -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(subprocess.run, command, check=False, capture_output=True, text=True)

    said = await run()
    assert 0 != said.returncode and "g at 1" in said.stderr
    with pytest.raises(laminar.NotDrained):
        await node.node.client.topic("t").reclaim(0)
    await node.set(0, 2)
    said = await run()
    assert (0, "partition 0 of t is reclaimed: 2 records\n") == (said.returncode, said.stdout)
    assert 0 == (await node.node.client.topic("t").reclaim(0)).deleted


async def _failed(asked: Awaitable[object]) -> laminar.Error:
    with pytest.raises(laminar.Error) as found:
        await asked
    return found.value


def _no_room(*_: object, **__: object) -> None:
    raise Problem("disk_full", "no room", outcome="not_applied")
