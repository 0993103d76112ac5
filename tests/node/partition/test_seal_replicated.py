"""A seal on three replicas: whose end it is, and what a crash or a loss leaves of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from laminar.http.api.problems import Problem
from laminar.http.api.records import Records
from laminar.node.partition import producer_progress
from tests.node.alone import lone_partition
from tests.node.partition.seals import (
    HOURS,
    OPEN,
    SEAL,
    asked,
    problem_of,
    staged,
    with_header,
)
from tests.node.trio import Member, Trio, batch, send, trio


async def sealed_by(cluster: Trio, *members: Member) -> None:
    await cluster.until(
        lambda: all(each.partition.state.committed_seal is not None for each in members), what="sealed"
    )


async def test_sealed_is_said_only_when_the_seal_is_committed() -> None:
    """Until then what is new waits, and what is a retry is answered."""
    async with trio() as cluster:
        leader = await cluster.leader()
        await send(leader, batch(0, b"0"))
        for follower in cluster.followers(leader):
            follower.hold_disk()
        sealing = leader.partition.propose_seal(SEAL)
        waiting: list[asyncio.Future[Any]] = [
            send(leader, batch(1, b"1")),
            leader.partition.appends.append_records(Records([b"x"])),
            staged(leader.partition),
            asyncio.ensure_future(producer_progress.fence(leader.partition, b"f" * 16, 1)),
        ]
        with pytest.raises(Problem) as accepted:
            leader.partition.appends.accept_frame(*with_header(batch(1, b"1")))
        assert ("changing", "not_applied") == (accepted.value.code, accepted.value.outcome)
        assert 0 == (await send(leader, batch(0, b"0"))).offset
        await asyncio.sleep(0.05)
        assert not any(each.done() for each in (sealing, *waiting))

        for follower in cluster.followers(leader):
            follower.release_disk()
        assert 1 == (await sealing).offset
        assert await waiting.pop() is None, "no epoch of that producer ever began"
        for each in waiting:
            with pytest.raises(Problem) as problem:
                await each
            assert ("sealed", 3) == (problem.value.code, problem.value.limit)
        await cluster.settled()
        assert all([b"0"] == member.values() for member in cluster.alive)


async def test_a_seal_that_is_cut_is_nobodys_end() -> None:
    """What waited for it goes to the next leader, and is taken there; no client heard of the seal."""
    async with trio() as cluster:
        leader = await cluster.leader()
        await send(leader, batch(0, b"0"))
        cluster.cut_off(leader.node)
        sealing = leader.partition.propose_seal(SEAL)
        waiting = send(leader, batch(1, b"1"))
        assert "sealed" == leader.partition.state.succession.status

        rest = [member.node for member in cluster.followers(leader)]
        successor = await cluster.leader(among=rest)
        assert 1 == (await send(successor, batch(1, b"1"))).offset
        cluster.heal()
        for each in (sealing, waiting):
            with pytest.raises(Problem) as problem:
                await asyncio.wait_for(each, 60)
            assert ("not_leader", "not_applied") == (problem.value.code, problem.value.outcome)
        await cluster.settled()
        assert {"open"} == {member.partition.state.succession.status for member in cluster.alive}
        cluster.check_equal()
        successor = await cluster.leader()
        assert 2 == (await send(successor, batch(2, b"2"))).offset
        await successor.partition.propose_seal(SEAL)


async def test_what_waits_behind_a_seal_that_no_majority_takes_is_answered_in_time() -> None:
    """As an append would be; but nothing of it was proposed, so it is surely not applied."""
    async with trio() as cluster:
        leader = await cluster.leader()
        for follower in cluster.followers(leader):
            follower.hold_disk()
        leader.partition.propose_seal(SEAL).add_done_callback(lambda done: done.exception())
        waiting = send(leader, batch(0, b"0"))

        leader.partition.appends.expire(older_than_s=60)
        assert not waiting.done()
        leader.partition.appends.expire(older_than_s=0)
        with pytest.raises(Problem) as problem:
            await waiting
        assert ("changing", "not_applied") == (problem.value.code, problem.value.outcome)
        for follower in cluster.followers(leader):
            follower.release_disk()


async def test_a_seal_that_only_a_follower_holds_is_the_end_under_it() -> None:
    """Its leader died before the commit: the next one commits the entry, and appends nothing behind it."""
    async with trio() as cluster:
        leader = await cluster.leader()
        await send(leader, batch(0, b"0"))
        await cluster.settled()
        heir, other = cluster.followers(leader)
        cluster.wire = lambda sender, receiver, channel, messages: (
            0 if (sender, receiver) == (leader, heir) else None
        )
        leader.partition.propose_seal(SEAL).add_done_callback(lambda done: done.exception())
        await cluster.until(lambda: heir.partition.state.succession.sealed is not None, what="received")
        await leader.kill()
        assert heir.partition.state.committed_seal is None
        cluster.heal()

        assert heir is await cluster.leader(among=[heir.node, other.node])
        with pytest.raises(Problem) as problem:
            await send(heir, batch(1, b"1"))
        assert "sealed" == problem.value.code
        await leader.start()
        await sealed_by(cluster, *cluster.members.values())
        await cluster.settled()
        assert all([b"0"] == member.values() for member in cluster.alive)
        cluster.check_equal()


@pytest.mark.parametrize("seed", range(4))
async def test_a_committed_seal_survives_any_crash(seed: int) -> None:
    """Of all replicas at once, with the power, at any moment after the commit."""
    async with trio(seed=seed) as cluster:
        leader = await cluster.leader()
        await send(leader, batch(0, b"0"))
        if seed % 2:
            await cluster.settled()
        await leader.partition.propose_seal(SEAL)
        for member in cluster.members.values():
            await (member.cut_power(keep=0.3) if seed < 3 else member.kill())
        for member in cluster.members.values():
            await member.start()

        leader = await cluster.leader()
        with pytest.raises(Problem) as problem:
            await send(leader, batch(1, b"1"))
        assert "sealed" == problem.value.code
        assert (await send(leader, batch(0, b"0"))).duplicate
        await cluster.settled()
        assert all([b"0"] == member.values() for member in cluster.alive)


async def test_a_replica_that_was_away_learns_of_the_end() -> None:
    """Also one that leads next; and readers that wait at it are answered."""
    async with trio() as cluster:
        leader = await cluster.leader()
        away = cluster.followers(leader)[0]
        await send(leader, batch(0, b"0"))
        await cluster.settled()
        await away.kill()
        await leader.partition.propose_seal(SEAL)
        await leader.partition.cursor_commands.set("c", 1, expected=None, check=False, owner="", now_ms=1)
        await away.start()
        reading = asyncio.ensure_future(away.partition.reader.wait_past(1, 600))
        assert not await asyncio.wait_for(reading, 60)
        await cluster.settled()
        assert leader.partition.state.state() == away.partition.state.state()
        leader.driver.transfer(leader.replica, away.replica_id)
        await cluster.until(lambda: away.partition.leads, what="it leads")
        with pytest.raises(Problem) as problem:
            await send(away, batch(1, b"1"))
        assert "sealed" == problem.value.code


async def test_an_accepted_loss_may_lose_the_seal_and_says_so() -> None:
    """The replica that goes on is asked to seal again; what was lost with the others is an operator's."""
    async with trio() as cluster:
        leader = await cluster.leader()
        behind = cluster.followers(leader)[0]
        await send(leader, batch(0, b"0"))
        await cluster.settled()
        assert not leader.partition.may_lack_seal
        await behind.kill()
        await leader.partition.propose_seal(SEAL)
        for member in cluster.alive:
            await member.kill()
        await behind.start()
        lost = [member.replica_id for member in cluster.members.values() if member is not behind]
        behind.driver.go_on_alone(behind.replica, lost, node=behind.node)
        await cluster.leader(among=[behind.node])

        partition = behind.partition
        assert ("open", True) == (partition.state.succession.status, partition.may_lack_seal)
        assert 1 == (await partition.propose_seal(SEAL)).offset
        assert partition.seal_is_kept({})
        await behind.kill()
        await behind.start()
        await sealed_by(cluster, behind)
        assert behind.partition.may_lack_seal, "other entries may be missing all the same"


async def test_a_partition_that_may_lack_its_first_entry_can_be_opened(tmp_path: Path) -> None:
    """Its mark was lost with the others' logs; the catalog knows of the change."""
    async with lone_partition(tmp_path) as partition:
        partition.state.succession.lacks_entries = True
        await partition.propose_open(OPEN)
        assert partition.state.succession.opened is not None


async def test_a_seal_is_kept_when_a_majority_has_synced_it() -> None:
    """Where commits are not synced at once, a power loss may take a committed seal; not then."""
    async with trio() as cluster:
        leader = await cluster.leader()
        for member in cluster.members.values():
            await member.storage.set_policy(member.partition.log, HOURS)
        # Before the first entry that may be lost the journal says so, and that is synced.
        await send(leader, batch(0, b"0"))
        await cluster.settled()
        await leader.partition.propose_seal(SEAL)
        await sealed_by(cluster, *cluster.alive)
        near, far = cluster.followers(leader)

        def said() -> dict[str, tuple[int, int]]:
            return {member.node: member.partition.synced_seal for member in cluster.followers(leader)}

        assert {(0, 0)} == {leader.partition.synced_seal, *said().values()}
        assert not leader.partition.seal_is_kept(said())
        await near.storage.sync(durable=True)
        assert not leader.partition.seal_is_kept(said()), "one of three"
        await leader.storage.sync(durable=True)
        seal = leader.partition.state.committed_seal
        assert seal is not None
        place = (seal.index, seal.term)
        assert {near.node: place, far.node: (0, 0)} == said()
        assert leader.partition.seal_is_kept(said())
        assert not leader.partition.seal_is_kept({}), "nobody else has said anything"
        # Another entry at that index, and a node that is no voter, prove nothing.
        assert not leader.partition.seal_is_kept({near.node: (seal.index, seal.term + 1), "z": place})

        for member in cluster.members.values():
            await member.cut_power(keep=0.0)
        for member in cluster.members.values():
            await member.start()
        found = {member.node: member.partition.state.succession.sealed for member in cluster.members.values()}
        assert {leader.node, near.node} == {node for node, sealed in found.items() if sealed is not None}


async def test_sealed_is_said_when_no_loss_of_power_takes_the_seal() -> None:
    """Said of a commit alone in an `interval` log, a late copy could be appended after that loss: doubled."""
    async with trio() as cluster:
        leader = await cluster.leader()
        for member in cluster.members.values():
            await member.storage.set_policy(member.partition.log, HOURS)
        await leader.partition.propose_seal(SEAL)
        await sealed_by(cluster, *cluster.alive)
        partition = leader.partition
        refused = asked(partition, batch(0, b"0"))
        assert partition.context.final_seal is None

        partition.committed(partition.committed_index)
        assert not refused.done(), "its seal may still be lost"
        partition.keep_seal()
        assert "sealed" == (await problem_of(lambda: refused)).code
        assert "sealed" == (await problem_of(lambda: asked(partition, batch(0, b"0")))).code


async def test_a_leader_that_may_lack_a_seal_takes_nothing_before_it_has_asked(tmp_path: Path) -> None:
    """In its shard it asks the catalog; the partition of a lone log does not."""
    async with lone_partition(tmp_path) as partition:
        partition._asks_catalog = True
        partition.state.succession.lacks_entries = True
        partition.led(True)
        assert "changing" == (await problem_of(lambda: asked(partition, batch(0, b"0")))).code
        partition.lacks_no_seal()
        assert 0 == (await asked(partition, batch(0, b"0"))).offset
        partition.led(True)
        await partition.propose_seal(SEAL)
        assert "sealed" == (await problem_of(lambda: asked(partition, batch(1, b"1")))).code


async def test_a_follower_does_not_take_its_own_log_for_committed() -> None:
    """A seal that is not committed is not kept, whoever has synced it."""
    async with trio() as cluster:
        leader = await cluster.leader()
        cluster.cut_off(leader.node)
        leader.partition.propose_seal(SEAL).add_done_callback(lambda done: done.exception())
        await leader.storage.sync(durable=True)
        place = leader.partition.synced_seal

        assert place != (0, 0)
        assert not leader.partition.seal_is_kept({member.node: place for member in cluster.alive})
        cluster.heal()
        await cluster.leader()
