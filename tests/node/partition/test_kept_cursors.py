"""Cursors of `interval` partitions that a change of the route ended or made: a loss of power keeps them."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from laminar.log.format.flush_policy import FlushPolicy
from tests.node.partition.seals import SEAL
from tests.node.partition.test_retention import HOUR_MS
from tests.node.trio import Trio, batch, send, trio

HOURS = FlushPolicy(interval_ms=HOUR_MS, interval_records=0)


async def unsynced(cluster: Trio) -> None:
    """Let no log sync by itself from now on."""
    for member in cluster.members.values():
        await member.storage.set_policy(member.partition.log, HOURS)
    # Before the first entry that may be lost the journal says so, and that is synced.
    await send(await cluster.leader(), batch(0, b"0"))
    await cluster.settled()


async def without_power(cluster: Trio) -> dict[str, tuple[int, str]]:
    """Cut the power of all at once; return by node where the cursor `g` is afterwards, and whose."""
    for member in cluster.members.values():
        await member.cut_power(keep=0.0)
    for member in cluster.members.values():
        await member.start()
    found = {node: member.partition.cursors.get("g") for node, member in cluster.members.items()}
    return {node: (each.position, each.owner) for node, each in found.items() if each is not None}


async def test_what_is_drained_stays_so() -> None:
    """Else its records would be delivered again while a member owns what follows."""
    async with trio() as cluster:
        await unsynced(cluster)
        partition = (await cluster.leader()).partition
        commands = partition.cursor_commands
        await partition.propose_seal(SEAL)
        await commands.set("g", 1, expected=None, check=False, owner="m", now_ms=1)
        assert not commands.is_drained("g"), "it is not known that a majority has synced the seal"
        partition.keep_seal()
        assert commands.is_drained("g")
        assert 2 <= list((await without_power(cluster)).values()).count((1, "m"))


async def test_what_a_rewind_holds_it_holds() -> None:
    """Else the member that owned it would own it again."""
    async with trio() as cluster:
        await unsynced(cluster)
        commands = (await cluster.leader()).partition.cursor_commands
        await commands.set("g", 1, expected=None, check=False, owner="m", now_ms=1)
        await commands.take("g", "~rewind.1", now_ms=2, synced=True)
        assert 2 <= list((await without_power(cluster)).values()).count((1, "~rewind.1"))


async def test_a_cursor_that_is_begun_in_an_output_stays() -> None:
    """Else the group has none when the input is reclaimed."""
    async with trio() as cluster:
        await unsynced(cluster)
        leader = await cluster.leader()
        for member in cluster.members.values():
            succession = member.partition.state.succession
            succession.restore(msgspec.structs.replace(succession.stored(), successor_of=7))
        await leader.partition.cursor_commands.claim("g", 0, expected=None, check=True, owner="", now_ms=1)
        assert 2 <= list((await without_power(cluster)).values()).count((0, ""))


async def test_a_commit_elsewhere_waits_for_no_sync() -> None:
    """It is what `interval` is for."""
    async with trio() as cluster:
        await unsynced(cluster)
        leader = await cluster.leader()
        await leader.partition.cursor_commands.set("g", 1, expected=None, check=False, owner="m", now_ms=1)
        assert {} == await without_power(cluster)


@pytest.mark.parametrize("owner", ["", "m", "~rewind.1"])
async def test_a_cursor_is_drained_at_the_end_of_what_is_sealed_alone(owner: str) -> None:
    """Not before the seal is committed, not below its end, not while a rewind holds it."""
    async with trio() as cluster:
        leader = await cluster.leader()
        commands = leader.partition.cursor_commands
        await send(leader, batch(0, b"0"))
        await commands.set("g", 1, expected=None, check=False, owner="", now_ms=1)
        assert not commands.is_drained("g"), "it takes more"
        cluster.cut_off(leader.node)
        sealing = leader.partition.propose_seal(SEAL)
        await asyncio.sleep(0)
        assert not commands.is_drained("g"), "the seal may be truncated"
        cluster.heal()
        await asyncio.gather(sealing, return_exceptions=True)
        leader = await cluster.leader()
        commands = leader.partition.cursor_commands
        await leader.partition.propose_seal(SEAL)
        for position, drained in ((0, False), (1, not owner.startswith("~"))):
            await commands.take("g", "~rewind.0", now_ms=1, synced=True)
            await commands.set("g", position, expected=None, check=False, owner="~rewind.0", now_ms=1)
            await commands.set(
                "g", position, expected=None, check=False, owner=owner, expected_owner="~rewind.0", now_ms=1
            )
            assert drained == commands.is_drained("g")
        assert not commands.is_drained("other")
