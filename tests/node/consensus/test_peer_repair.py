"""Damage in one replica is healed by the others: what they give, what is taken, and who leads meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from laminar.batch import Header, build, stamp
from laminar.log import DamagedRange
from laminar.node.consensus.peer_repair import EntryReply, EntryRequest, PeerRepair
from laminar.node.transport.rpc import PeerLost
from laminar.node.transport.transport import Peer
from tests.node.trio import CLUSTER, GROUP, Member, Trio, batch, send, trio

COUNT = 6


async def filled(cluster: Trio) -> Member:
    """Some entries that everybody holds in its segments; the leader."""
    leader = await cluster.leader()
    for number in range(COUNT):
        await send(leader, batch(number, b"value" * 100))
    await cluster.settled()
    for member in cluster.alive:
        await member.storage.checkpoint()
        member.forget_recent()
    return leader


def rot(member: Member, index: int) -> None:
    """Four bytes of an entry's body are not what they were."""
    log = member.partition.log
    member.disk.rot(log.segment_of(index).file.path, log.index_entry(index).position + 200, 4)


async def meet(member: Member, index: int) -> None:
    """Somebody reads the entry."""
    try:
        await member.partition.log.read(index, index, max_bytes=1)
    except DamagedRange:
        return
    raise AssertionError(f"entry {index} of {member} is whole")


async def read_everything(cluster: Trio) -> None:
    """From the files."""
    for member in cluster.alive:
        await member.storage.checkpoint()
        member.forget_recent()
        log = member.partition.log
        for index in range(log.first_index, log.last_index + 1):
            assert await log.read(index, index, max_bytes=1)


async def lost_call(*arguments: object, **options: object) -> bytes:
    """A call that nobody answers."""
    raise PeerLost("cut", sent=False)


@pytest.mark.parametrize("running", [True, False])
async def test_pitfall_39_three_replicas_each_damaged_elsewhere_serve_and_heal(running: bool) -> None:
    """Every entry has two good copies, no replica has them all: whether the damage is found while they run,
    or when they start and need these entries, the group goes on and all three are whole again.
    """
    async with trio() as cluster:
        leader = await filled(cluster)
        first = leader.partition.log.last_index - COUNT + 1
        if running:
            for place, member in enumerate(cluster.alive):
                rot(member, first + place)
                await meet(member, first + place)
        else:
            members = cluster.alive
            for member in members:
                await member.kill()
            for place, member in enumerate(members):
                rot(member, first + place)
            await asyncio.gather(*(member.start() for member in members))
        leader = await cluster.leader()
        await send(leader, batch(COUNT, b"meanwhile"))
        await cluster.until(
            lambda: not any(member.partition.log.quarantine for member in cluster.alive), what="all whole"
        )
        await cluster.settled()
        await read_everything(cluster)
        cluster.check_equal()
        assert [1, 1, 1] == [member.repairs.repaired for member in cluster.alive]
        assert not any(member.repairs.gone() for member in cluster.alive)


async def test_an_entry_that_all_replicas_have_lost_is_refused_alone() -> None:
    """More copies of one entry are gone than exist: that range is named, and everything else is served."""
    async with trio() as cluster:
        leader = await filled(cluster)
        lost = leader.partition.log.last_index - 2
        for member in cluster.alive:
            rot(member, lost)
        for member in cluster.alive:
            await meet(member, lost)
        await cluster.until(lambda: all(member.repairs.gone() for member in cluster.alive), what="gone")

        for member in cluster.alive:
            [(entry, damage)] = member.repairs.gone()
            assert (GROUP, lost, lost) == (entry.group, damage.first_index, damage.last_index)
            assert member.repairs.is_gone(GROUP, lost) and not member.repairs.is_gone(GROUP, lost + 1)
            assert 1 == member.repairs.statistics()["gone"]
            log = member.partition.log
            for index in range(log.first_index, log.last_index + 1):
                if index != lost:
                    assert await log.read(index, index, max_bytes=1)
        leader = await cluster.leader()
        await send(leader, batch(COUNT, b"goes on"))
        assert not any(member.failures for member in cluster.alive)


async def test_a_replica_gives_only_what_is_wanted_and_certain() -> None:
    """By (index, term) any whole entry; without a term only a committed one; and nothing that is damaged."""
    async with trio(heals=False) as cluster:
        leader = await filled(cluster)
        other = cluster.followers(leader)[0]
        log = other.partition.log
        other.repairs.keep(other.entry, log)
        last, term = log.last_index, log.last_term
        peer = Peer(leader.node, 1, b"n" * 16)

        async def ask(index: int, term: int) -> EntryReply:
            payload = msgspec.msgpack.encode(EntryRequest(CLUSTER, GROUP, index, term))
            return msgspec.msgpack.decode(await other.repairs.answer(peer, payload), type=EntryReply)

        held = await ask(last, term)
        assert ("held", last, term) == (held.status, Header.unpack(held.frame).index, term)
        assert "other" == (await ask(last, term + 1)).status
        assert "absent" == (await ask(last + 1, term)).status
        assert "unsure" == (await ask(last, 0)).status, "it is not driven: nothing is known as committed"
        other.repairs.attach_replica(other.replica)
        assert ("held", True) == ((found := await ask(last, 0)).status, found.committed)
        rot(other, last - 1)
        assert "damaged" == (await ask(last - 1, term)).status
        assert ("damaged", b"") == ((found := await ask(last - 1, term)).status, found.frame)
        row = log.index_entry(1)
        log.set_start(index=row.index, term=row.term, offset=row.next_offset)
        assert "trimmed" == (await ask(1, term)).status


async def test_an_answer_of_another_term_or_of_unknown_fate_is_not_taken() -> None:
    """Whatever the one that gave it was thinking: it isn't even held against what is around the place."""
    taken: list[int] = []

    async def take(index: int, *_: object, **__: object) -> None:
        taken.append(index)

    frame = build([b"v"])
    stamp(
        frame,
        index=5,
        term=2,
        prev_term=2,
        base_offset=4,
        append_time_ms=1,
        committed_index=0,
        opens_segment=False,
    )
    repairs: Any = SimpleNamespace(repaired=0, refused=0)
    log = SimpleNamespace(name="t-0", repair=take, read=take, first_index=1, last_index=9)
    kept: Any = SimpleNamespace(log=log, gone={})

    async def put_back(term: int, *, committed: bool) -> bool:
        reply = EntryReply("held", committed, bytes(frame))
        return await PeerRepair._put_back(repairs, kept, 5, term, reply, node="b")

    assert not await put_back(1, committed=True)
    assert not await put_back(0, committed=False)
    assert ([], 2) == (taken, repairs.refused)
    assert await put_back(2, committed=False) and await put_back(0, committed=True)
    assert [5, 5, 5, 5] == taken


async def test_an_entry_that_is_trimmed_while_it_is_put_back_is_not_read() -> None:
    """It was to be read again from its place; the repair of the rest goes on."""
    async with trio() as cluster:
        leader = await filled(cluster)
        damaged = cluster.followers(leader)[0]
        log = damaged.partition.log
        first, second = log.last_index - 2, log.last_index
        put_back = log.repair

        async def trimmed(index: int, frame: Any) -> None:
            await put_back(index, frame)
            if index == first:
                row = log.index_entry(index)
                log.set_start(index=row.index, term=row.term, offset=row.next_offset)

        log.repair = trimmed  # type: ignore[method-assign]
        for index in (first, second):
            rot(damaged, index)
            await meet(damaged, index)

        await cluster.until(lambda: not log.quarantine, what="the rest is whole")
        assert log.first_index == first + 1 and not damaged.failures
        assert await log.read(second, second, max_bytes=1)


async def test_a_damaged_replica_lets_others_lead() -> None:
    """It votes and acknowledges, but while another voter answers it is never the one that stands."""
    async with trio() as cluster:
        leader = await filled(cluster)
        damaged, other = cluster.followers(leader)
        index = leader.partition.log.last_index - 2
        answered = damaged.repairs._call
        damaged.repairs._call = lost_call
        rot(damaged, index)
        await meet(damaged, index)
        assert damaged.replica.core.defers_campaign
        await leader.kill()
        await cluster.until(lambda: other.partition.leads, what="the whole one leads")
        await send(other, batch(COUNT, b"with the damaged one's word"))
        assert damaged.partition.log.last_index == other.partition.log.last_index

        damaged.repairs._call = answered
        await cluster.until(lambda: not damaged.replica.core.defers_campaign, what="healed")
        await leader.start()
        await cluster.settled()
        await other.kill()
        await cluster.leader(among=(damaged.node, leader.node))
        await read_everything(cluster)
        cluster.check_equal()


async def test_a_damaged_replica_leads_if_nobody_else_can() -> None:
    """The only other voter that is there has a shorter log: to stay away for ever would help nobody."""
    async with trio() as cluster:
        leader = await filled(cluster)
        behind, other = cluster.followers(leader)
        await behind.kill()
        await send(leader, batch(COUNT, b"not on the first"))
        await cluster.until(
            lambda: other.partition.committed_index == leader.partition.committed_index, what="committed"
        )
        await other.storage.checkpoint()
        other.forget_recent()
        await leader.kill()
        index = other.partition.log.last_index - 2

        other.repairs._call = lost_call
        rot(other, index)
        await meet(other, index)
        await behind.start()
        await cluster.until(lambda: other.partition.leads, what="the damaged one leads")
        assert other.replica.core.defers_campaign
        await send(other, batch(COUNT + 1, b"goes on"))


@pytest.mark.parametrize("how", ["a byte short", "empty", "gone"])
async def test_a_segment_that_is_short_or_gone_is_filled_by_the_others(how: str) -> None:
    """With its index and without: the replica knows what it lacks, serves the rest, and heals."""
    async with trio() as cluster:
        leader = await cluster.leader()
        for number in range(12):
            await send(leader, batch(number, b"%05d" % number * 4000))
        await filled(cluster)
        member = next(each for each in cluster.alive if each is not leader)
        log = member.partition.log
        assert len(log.segment_first_indexes) > 2
        file = log.segment_of(log.segment_first_indexes[1]).file
        await member.kill()
        if how == "a byte short":
            held = member.disk.open(file.path)
            held.truncate(held.size() - 1)
            held.sync()
        else:
            if how == "gone":
                member.disk.unlink(file.path)
            else:
                member.disk.open(file.path).truncate(0)
            member.disk.unlink(file.path.replace(".log", ".index"))
            member.disk.sync_directory(file.directory)
        await member.start()
        await cluster.until(lambda: not member.partition.log.quarantine, what="whole again")
        await cluster.settled()
        assert member.repairs.repaired >= 1
        await read_everything(cluster)
        cluster.check_equal()
