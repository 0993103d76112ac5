"""A consumer owns a partition only when all before it is acknowledged; beginning and rewinding cursors."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import laminar
from laminar.http.api.problems import Problem
from laminar.node.api.consumers import gates
from tests.node.api.consumers.changed import ChangedNode, changed_node, until


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[ChangedNode]:
    async with changed_node(tmp_path) as running:
        yield running


# -- claims --------------------------------------------------------------------------------


async def test_an_output_is_owned_when_the_end_of_its_input_is_acknowledged(node: ChangedNode) -> None:
    """Not before: the refusal names the input and its end, and leaves a cursor at 0 without an owner."""
    await node.append(0, 3)
    await node.claim(0, "m")
    left, right = await node.change(0, cuts=[30_000])
    assert (1, 2) == (left, right)

    for position in (0, 2):
        await node.set(0, position, owner="m")
        error = await node.refused(1)
        assert (409, "not_drained", {"0": 3}, "not_applied") == (
            *(error.status, error.code, error.limit, error.outcome),
        )
        assert isinstance(error, laminar.NotDrained)
        assert {0: position, 1: 0} == await node.positions()
        assert {0: "m"} == await node.owners()

    await node.set(0, 3, owner="m")
    await node.claim(1, "m")
    await node.claim(2, "other")
    assert {0: "m", 1: "m", 2: "other"} == await node.owners()
    await node.append(1, 1)
    await node.set(1, 1, owner="m", expected_owner="m")


async def test_all_ancestors_are_asked_not_the_inputs_alone(node: ChangedNode) -> None:
    """After a rewind an empty input is at its end while the one before it is not."""
    await node.append(0, 2)
    await node.set(0, 0)
    assert [1] == await node.change(0)
    assert [2] == await node.change(1)
    await node.put({"begin": "earliest"})
    assert {0: 0, 1: 0, 2: 0} == await node.positions()

    assert {"0": 2} == (await node.refused(2)).limit
    await node.set(0, 2)
    await node.claim(2, "m")


async def test_of_a_merge_every_input_is_asked(tmp_path: Path) -> None:
    """Whichever of them is behind."""
    async with changed_node(tmp_path, 2) as node:
        for number in (0, 1):
            await node.append(number, 1)
            await node.set(number, 0)
        await node.change(0, 1)
        assert {"0": 1, "1": 1} == (await node.refused(2)).limit
        await node.set(0, 1)
        assert {"1": 1} == (await node.refused(2)).limit
        await node.set(1, 1)
        await node.claim(2, "m")


async def test_after_a_weak_change_nothing_is_asked(node: ChangedNode) -> None:
    """Its order was given up."""
    await node.append(0, 2)
    await node.set(0, 0)
    await node.change(0, order="weak")
    await node.claim(1, "m")


async def test_a_reclaimed_ancestor_is_not_asked(node: ChangedNode) -> None:
    """Nor by a shard whose view is older than the reclaim: it asks for a newer one."""
    await node.set(0, 0)
    await node.change(0)
    await node.reclaim(0)
    await node.claim(1, "m")


async def test_a_partition_that_waits_for_its_opening_is_nobodys(node: ChangedNode) -> None:
    """The seal of its input may be lost with the power, and that takes records again."""
    await node.set(0, 0)
    with pytest.MonkeyPatch.context() as held:
        held.setattr(node.partition(0), "propose_seal", _no_room)
        change = await node.begin(0)
        await until(lambda: ("t", 1) in node.shard.partitions and node.partition(1).leads)
        assert "changing" == (await node.refused(1)).code
    await node.done(change)
    await node.claim(1, "m")


async def test_an_input_that_does_not_answer_leaves_the_output_unowned(
    node: ChangedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not known to be drained. The claim is undone, and may be tried again."""
    await node.set(0, 0)
    await node.change(0)

    async def silent(*_: object) -> gates.DrainAnswer:
        await asyncio.sleep(60)
        raise AssertionError

    with monkeypatch.context() as context:
        context.setattr(gates, "GATE_S", 0.2)
        context.setattr(gates.Gates, "_answer", silent)
        error = await node.refused(1)
    assert (503, "changing") == (error.status, error.code)
    assert {} == await node.owners()
    await node.claim(1, "m")


async def test_the_claim_comes_first_and_a_rewind_after_it_takes_it_away(
    node: ChangedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the claim and the answer: who claimed gets no partition, though the answer was yes."""
    await node.append(0, 1)
    await node.set(0, 1)
    await node.change(0)
    answer = gates.Gates._answer
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(self: gates.Gates, *what: object) -> gates.DrainAnswer:
        found = await answer(self, *what)  # type: ignore[arg-type]  # as it was called
        asked.set()
        await go_on.wait()
        return found

    monkeypatch.setattr(gates.Gates, "_answer", slowly)
    claiming = asyncio.ensure_future(node.refused(1))
    await asked.wait()
    assert {1: "m"} == await node.owners(), "the claim is carried out before the input is asked"
    await node.put({"rewind": "earliest"})
    go_on.set()
    assert "changing" == (await claiming).code
    assert ({0: 0, 1: 0}, {}) == (await node.positions(), await node.owners())
    assert {"0": 1} == (await node.refused(1)).limit


async def test_a_claim_that_was_carried_out_and_not_answered_is_asked_again(node: ChangedNode) -> None:
    """Its owner says what it says already: that is no commit, which moves the cursor."""
    await node.append(0, 1)
    await node.set(0, 1)
    await node.change(0)
    await node.claim(1, "m")
    await node.put({"rewind": "earliest"})
    commands = node.partition(1).cursor_commands
    await commands.set("g", 0, expected=0, check=True, owner="m", now_ms=1)  # and no answer
    assert {"0": 1} == (await node.refused(1, expected_owner="m")).limit
    assert {} == await node.owners()


async def test_a_claim_that_was_undone_late_leaves_the_next_owner_alone(node: ChangedNode) -> None:
    """It undoes what it made, and nothing that came after."""
    commands = node.partition(0).cursor_commands
    await commands.claim("g", 0, expected=None, check=True, owner="m", now_ms=1)
    claimed = commands.latest("g")
    assert claimed is not None
    await node.set(0, 0, owner="m", expected_owner="m")  # the same owner, by another claim
    assert None is commands.undo_claim("g", claimed, now_ms=2)
    assert {0: "m"} == await node.owners()


async def test_a_cursor_made_beyond_the_beginning_stays_at_0_until_the_gate_is_passed(
    node: ChangedNode,
) -> None:
    """Else what is before its position would be passed, when the answer is lost."""
    await node.append(0, 1)
    await node.set(0, 0)
    await node.change(0)
    await node.append(1, 5)
    with pytest.raises(laminar.NotDrained):
        await node.set(1, 4)
    assert {0: 0, 1: 0} == await node.positions()


async def test_one_request_may_reach_an_end_and_go_on_behind_it(node: ChangedNode) -> None:
    """A reader commits both; in whatever order it names them."""
    await node.append(0, 1)
    await node.set(0, 0)
    await node.change(0)
    await node.append(1, 5)
    await node.put({"positions": {"1": 4, "0": 1}})
    assert {0: 1, 1: 4} == await node.positions()


# -- the end of a sealed partition ---------------------------------------------------------


async def test_only_a_rewind_takes_a_cursor_off_the_end_of_a_sealed_partition(node: ChangedNode) -> None:
    """A member may own what follows. Below the end a cursor may move back."""
    await node.append(0, 3)
    await node.set(0, 2, owner="m")
    await node.change(0)
    await node.set(0, 1, owner="m")
    await node.set(0, 3, owner="m")
    for owner in ("m", ""):
        with pytest.raises(laminar.Error) as refused:
            await node.set(0, 1, owner=owner, expected_owner="m")
        assert (422, "positions.0", 3) == (*(refused.value.status, refused.value.field, refused.value.limit),)
    await node.set(0, 3, owner="", expected_owner="m")
    with pytest.raises(laminar.Error, match="rewind"):
        await node.set(0, 0, owner="~rewind.mine")
    await node.put({"rewind": {"0": 1}})
    assert {0: 1} == {number: at for number, at in (await node.positions()).items() if number == 0}


# -- begin ---------------------------------------------------------------------------------


async def test_a_new_group_begins_at_its_place_everywhere(tmp_path: Path) -> None:
    """At the end it gets nothing older; at the beginning all history."""
    async with changed_node(tmp_path, 2) as node:
        await node.append(0, 2)
        await node.append(1, 4)
        await node.change(0)
        await node.append(2, 3)
        await node.put({"begin": "latest"}, "new")
        await node.put({"begin": "earliest"}, "all")
        assert {0: 2, 1: 4, 2: 3} == await node.positions("new")
        assert {0: 0, 1: 0, 2: 0} == await node.positions("all")
        await node.set(2, 3, "new", owner="m", expected={"2": 3}, expected_owner="")
        at = (await node.ask("GET", "/partitions/1/records"))["records"][2]["timestamp"]
        await node.put({"begin": at}, "since")
        assert 2 <= (await node.positions("since"))[1] <= 3
        await node.append(1, 1)
        await node.put({"begin": "latest"}, "new")
        assert 4 == (await node.positions("new"))[1], "it had begun"
        with pytest.raises(laminar.Error) as refused:
            await node.put({"begin": "somewhere"}, "new")
        assert 422 == refused.value.status


async def test_a_partition_is_new_to_a_group_that_is_anywhere_before_it(node: ChangedNode) -> None:
    """Two changes behind, too; there it begins at 0, and passes nothing."""
    await node.append(0, 2)
    await node.set(0, 1)
    await node.change(0)
    await node.change(1)
    await node.append(2, 3)
    await node.put({"begin": "latest"})
    assert {0: 1, 1: 0, 2: 0} == await node.positions()


async def test_a_cursor_is_looked_for_where_it_lies_longest_first(node: ChangedNode) -> None:
    """A reclaim begins it in what follows, and deletes it then: it is seen in one of the two."""
    await node.append(0, 2)
    await node.set(0, 2)
    await node.change(0)
    await node.append(1, 3)
    steps = node.shard._application._handlers["set_cursor"].__self__._steps  # type: ignore[attr-defined]
    carry_out, looked = steps.all, list[int]()

    async def watched(asked: list[Any], *more: Any) -> object:
        answer = await carry_out(asked, *more)
        if asked[0].operation == "get" and not looked:
            looked.append(asked[0].partition)
            await node.partition(1).cursor_commands.claim(
                "g", 0, expected=None, check=True, owner="", now_ms=1
            )
            await node.partition(0).cursor_commands.set(
                "g", None, expected=None, check=False, owner="", now_ms=1
            )
        return answer

    steps.all = watched
    await node.put({"begin": "latest"})
    assert [0] == looked
    assert 0 == (await node.positions())[1], "it is not new to the topic"


async def test_a_group_begins_in_what_follows_first(node: ChangedNode) -> None:
    """A cursor in an input alone says that the output is new: broken off, it begins anew, and not at 0."""
    await node.append(0, 2)
    await node.change(0)
    await node.append(1, 3)
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(node.partition(0).cursor_commands, "set", _no_room)
        with pytest.raises(laminar.Error):
            await node.put({"begin": "latest"})
    await node.append(1, 1)
    await node.put({"begin": "latest"})
    assert {0: 2, 1: 3} == await node.positions()


def _no_room(*_: object, **__: object) -> None:
    raise Problem("disk_full", "no room", outcome="not_applied")


# -- rewind --------------------------------------------------------------------------------


async def test_a_rewind_holds_everything_before_it_sets_anything(node: ChangedNode) -> None:
    """Its owners are fenced, and a partition without the cursor gets one; then all is free."""
    await node.append(0, 3)
    await node.set(0, 3, owner="m")
    await node.change(0)
    await node.append(1, 2)
    held: list[tuple[dict[int, str], dict[int, int]]] = []
    steps = node.shard._application._handlers["set_cursor"].__self__._steps  # type: ignore[attr-defined]
    carry_out = steps.all

    async def watched(asked: list[object], *more: object) -> object:
        if [each for each in asked if each.operation == "set"] and not held:  # type: ignore[attr-defined]
            held.append((await node.owners(), await node.positions()))
        return await carry_out(asked, *more)

    steps.all = watched
    answer = await node.put({"rewind": "earliest"})
    steps.all = carry_out
    (owners, positions) = held[0]
    assert {0, 1} == set(owners) and 1 == len(set(owners.values()))
    assert all(owner.startswith("~rewind.") for owner in owners.values())
    assert {0: 3, 1: 0} == positions
    assert ({"0": 0, "1": 0}, {}) == (answer["positions"], answer["owners"])
    with pytest.raises(laminar.Fenced):
        await node.set(0, 1, owner="m", expected_owner="m")
    assert {"0": 3} == (await node.refused(1)).limit


async def test_a_cursor_that_a_rewind_holds_is_not_drained(node: ChangedNode) -> None:
    """It will be set back; also if that rewind was broken off. Another one goes through."""
    await node.append(0, 1)
    await node.set(0, 1)
    await node.change(0)
    await node.partition(0).cursor_commands.take("g", "~rewind.broken", now_ms=1, synced=True)
    error = await node.refused(1)
    assert ("not_drained", {"0": 1}) == (error.code, error.limit)
    assert "rewind" in str(error)
    with pytest.raises(laminar.Fenced):
        await node.set(0, 1, owner="old", expected_owner="~rewind.broken")
    await node.put({"rewind": "latest"})
    await node.claim(1, "m")


async def test_a_rewind_looks_at_the_route_again_when_it_holds_all(node: ChangedNode) -> None:
    """An output that was opened meanwhile may be owned."""
    await node.append(0, 1)
    await node.set(0, 1)
    places = node.shard._application._handlers["set_cursor"].__self__._places  # type: ignore[attr-defined]
    take = places._take
    changed: list[int] = []

    async def with_a_change(request: object) -> object:
        taken = await take(request)
        if not changed:
            changed.extend(await node.change(0))
            commands = node.partition(1).cursor_commands
            await commands.set("g", 0, expected=None, check=False, owner="m", now_ms=1)
        return taken

    places._take = with_a_change
    await node.put({"rewind": "earliest"})
    assert ({0: 0, 1: 0}, {}) == (await node.positions(), await node.owners())


async def test_a_rewind_that_holds_not_all_sets_nothing_and_lets_go(node: ChangedNode) -> None:
    """Members go on where they were."""
    await node.append(0, 1)
    await node.set(0, 1)
    await node.change(0)
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(node.partition(0).cursor_commands, "take", _no_room)
        with pytest.raises(laminar.Error):
            await node.put({"rewind": "earliest"})
    assert ({0: 1, 1: 0}, {}) == (await node.positions(), await node.owners())


async def test_a_cursor_tells_ends_and_what_waits(node: ChangedNode) -> None:
    """By partition what is to be acknowledged before it; nothing of it in a topic that never changed."""
    await node.append(0, 2)
    await node.set(0, 1)
    before = await node.ask("GET", "/cursors/g")
    assert not {"ends", "waits_for"} & before.keys()
    await node.change(0, cuts=[5])
    found = await node.ask("GET", "/cursors/g")
    assert ({"0": 2}, {"1": {"0": 2}, "2": {"0": 2}}) == (found["ends"], found["waits_for"])
    await node.set(0, 2)
    found = await node.ask("GET", "/cursors/g")
    assert ({"0": 2}, {}) == (found["ends"], found["waits_for"])
    (listed,) = (await node.ask("GET", "/cursors"))["cursors"]
    assert found == listed


@pytest.mark.parametrize(
    "change",
    [
        {"begin": "latest", "rewind": "latest"},
        {"positions": {"0": 1}, "begin": "latest"},
        {"begin": "latest", "owner": "m"},
        {"rewind": "latest", "expected": {}},
        {"rewind": {"7": 1}},
        {"rewind": "soon"},
        {"positions": {"0": 0}, "owner": "~me"},
    ],
)
async def test_a_change_that_says_two_things_is_refused(node: ChangedNode, change: dict[str, object]) -> None:
    """Nothing is changed."""
    with pytest.raises(laminar.Error) as refused:
        await node.put(change)
    assert refused.value.status in (404, 422)
    assert {} == await node.positions()


async def test_the_command_rewinds_where_partitions_have_ended(node: ChangedNode) -> None:
    """`laminar cursor set` takes a cursor off an end, and with --force from its members."""
    await node.append(0, 2)
    await node.set(0, 2)
    await node.change(0)
    await node.claim(1, "m")

    def command(*arguments: str) -> int:
        where = ("--url", node.node.url)
        return subprocess.run(
            [sys.executable, "-m", "laminar.cli", "cursor", "set", "t", "g", *arguments, *where],
            check=False,
            capture_output=True,
        ).returncode

    assert 0 != await asyncio.to_thread(command, "--offset", "1", "-p", "0")
    assert {0: 2, 1: 0} == await node.positions()
    assert 0 == await asyncio.to_thread(command, "--offset", "1", "-p", "0", "--force")
    assert ({0: 1, 1: 0}, {}) == (await node.positions(), await node.owners())
    assert 0 == await asyncio.to_thread(command, "--at", "latest")
    assert {0: 2, 1: 0} == await node.positions()
    described = await node.node.client.topic("t").describe_cursor("g")
    assert {} == described.waits_for
    await node.node.client.topic("t").rewind_cursor("g", "earliest")
    described = await node.node.client.topic("t").describe_cursor("g")
    assert {1: {0: 2}} == described.waits_for
