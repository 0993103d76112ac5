"""`min_replicas` holds for appends: so many replicas have what is acknowledged, or nobody says so."""

from __future__ import annotations

import asyncio

import pytest

from laminar.batch import Header
from laminar.http.api.problems import Problem
from laminar.http.api.records import Records
from laminar.node.api.cluster.health import in_sync_of
from laminar.node.partition import producer_progress
from laminar.node.partition.partition import Partition
from laminar.node.partition.producer_progress import read
from laminar.node.partition.receipts import Receipt
from tests.node.trio import Member, Trio, batch, send, trio

PRODUCER = b"p" * 16


async def ready(cluster: Trio, *, min_replicas: int) -> tuple[Member, list[Member]]:
    """A leader that hears all the others, and the others."""
    leader = await cluster.leader()
    followers = cluster.followers(leader)
    for member in cluster.alive:
        member.partition.copies.wanted = min_replicas
    await cluster.until(lambda: len(leader.partition.copies.in_sync()) == 3, what="all are in sync")
    return leader, followers


async def accept(member: Member, frame: bytearray) -> Receipt:
    return member.partition.appends.accept_frame(frame, Header.unpack(frame))


async def test_an_append_is_acknowledged_when_so_many_disks_have_it() -> None:
    """Committed by two of three is not enough for three; nor for who asks again, or how far a producer is."""
    async with trio() as cluster:
        leader, (slow, _) = await ready(cluster, min_replicas=3)
        before = leader.partition.end_offset

        slow.hold_disk()
        asked = send(leader, batch(0, b"one"))
        await cluster.until(lambda: leader.partition.end_offset == before + 1, what="committed")
        again = send(leader, batch(0, b"one"))
        told = asyncio.ensure_future(read(leader.partition, PRODUCER, epoch=0, sequence=0, wait_s=20))
        await asyncio.sleep(0)

        assert not asked.done() and not again.done() and not told.done()
        assert before == leader.partition.copies.window().end
        slow.release_disk()
        assert (before, before) == ((await asked).offset, (await again).offset)
        assert (await told) is not None
        assert slow.partition.log.synced_index >= leader.partition.committed_index
        assert before + 1 == leader.partition.copies.window().end


async def test_the_copies_are_waited_for_in_what_is_left_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that lets a question take 30 s does not wait for 60."""
    waits: list[float] = []
    copied = producer_progress._copied

    async def noted(partition: Partition, *, wait_s: float) -> None:
        waits.append(wait_s)
        await copied(partition, wait_s=wait_s)

    monkeypatch.setattr(producer_progress, "_copied", noted)
    monkeypatch.setattr(producer_progress, "COPIES_WAIT_S", 0.01)
    async with trio() as cluster:
        leader, (slow, _) = await ready(cluster, min_replicas=3)
        slow.hold_disk()
        asked = send(leader, batch(0, b"one"))
        await cluster.until(lambda: leader.partition.end_offset == 1, what="committed")

        with pytest.raises(Problem):
            await read(leader.partition, PRODUCER, epoch=0, sequence=0, wait_s=0.2)

        assert [0.01] == waits
        slow.release_disk()
        await asked


async def test_an_append_is_refused_while_too_few_are_in_sync() -> None:
    """At once, and not applied; cursors and what is read go on; with the replica back it is taken."""
    async with trio() as cluster:
        leader, (gone, _) = await ready(cluster, min_replicas=3)
        assert 0 == (await leader.partition.appends.append_records(Records([b"zero"]))).offset
        await gone.kill()
        await cluster.until(lambda: len(leader.partition.copies.in_sync()) == 2, what="missed")

        last = leader.partition.log.last_index
        for append in (
            lambda: leader.partition.appends.append_records(Records([b"x"])),
            lambda: send(leader, batch(0, b"x")),
            lambda: accept(leader, batch(0, b"x")),
        ):
            with pytest.raises(Problem) as refused:
                await append()
            problem = refused.value
            assert ("too_few_replicas", "not_applied", 503) == (problem.code, problem.outcome, problem.status)
            assert (2, 3) == (problem.value, problem.limit)
        assert last == leader.partition.log.last_index, "nothing was appended"
        await leader.partition.cursor_commands.set("c", 1, expected=None, check=False, owner="", now_ms=1)

        await gone.start()
        await cluster.until(lambda: len(leader.partition.copies.in_sync()) == 3, what="back")
        assert 1 == (await send(leader, batch(0, b"x"))).offset


async def test_what_was_appended_before_the_replica_was_lost_is_unknown_not_refused() -> None:
    """It is committed, and stays; it has not the copies that were asked for, and nobody says that it has."""
    async with trio() as cluster:
        leader, (gone, _) = await ready(cluster, min_replicas=3)
        gone.hold_disk()
        asked = send(leader, batch(0, b"one"))
        await cluster.until(lambda: leader.partition.end_offset == 1, what="committed")

        await gone.kill()
        leader.partition.appends.expire(older_than_s=0)

        with pytest.raises(Problem) as unknown:
            await asked
        assert ("outcome_unknown", "unknown") == (unknown.value.code, unknown.value.outcome)
        await gone.start()
        await cluster.until(lambda: len(leader.partition.copies.in_sync()) == 3, what="back")
        assert (0, True) == ((again := await send(leader, batch(0, b"one"))).offset, again.duplicate)
        assert [b"one"] == leader.values()


async def test_a_leader_that_is_deposed_cannot_count_copies() -> None:
    """Who waits for them is told that nobody knows, not left to hang."""
    async with trio() as cluster:
        leader, (slow, quick) = await ready(cluster, min_replicas=3)
        slow.hold_disk()
        asked = send(leader, batch(0, b"one"))
        await cluster.until(lambda: leader.partition.end_offset == 1, what="committed")

        leader.replica.core.transfer_leadership(quick.replica_id, now_ms=leader.clock.monotonic_ms())
        leader.driver.process_ready(leader.replica)
        await cluster.until(lambda: not leader.partition.leads, what="another leads")

        with pytest.raises(Problem) as unknown:
            await asked
        assert "outcome_unknown" == unknown.value.code
        slow.release_disk()


async def test_a_commit_needs_no_index_row_of_the_copies_that_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be on a disk that cannot be read: where they end is asked for when an answer says it."""
    async with trio() as cluster:
        leader, (slow, _) = await ready(cluster, min_replicas=3)
        await send(leader, batch(0, b"one"))
        slow.hold_disk()
        copied, offset_after = leader.partition.copies.acknowledged_index, leader.partition.log.offset_after

        def readable(index: int) -> int:
            assert index > copied, f"the row of entry {index} cannot be read"
            return offset_after(index)

        monkeypatch.setattr(leader.partition.log, "offset_after", readable)
        asked = [send(leader, batch(sequence, b"more")) for sequence in (1, 2)]
        await cluster.until(lambda: leader.partition.committed_index == copied + 2, what="committed")
        assert leader.replica.failure is None and not any(each.done() for each in asked)

        slow.release_disk()
        assert [1, 2] == [(await each).offset for each in asked]


async def test_a_majority_is_enough_where_no_more_is_asked() -> None:
    """min_replicas 2 of 3 is what a commit means: nobody waits for the third."""
    async with trio() as cluster:
        leader, (gone, _) = await ready(cluster, min_replicas=2)
        await gone.kill()

        assert 0 == (await send(leader, batch(0, b"one"))).offset


async def test_in_sync_is_who_was_heard_lately_also_in_a_group_at_rest() -> None:
    """A replica that held everything when it died is in sync no more, though nothing was appended since."""
    async with trio() as cluster:
        leader, (gone, other) = await ready(cluster, min_replicas=1)
        await cluster.until(lambda: leader.replica.core.quiesced, what="at rest")
        assert {"a", "b", "c"} == set(in_sync_of(leader.partition))

        await gone.kill()

        left = {leader.node, other.node}
        await cluster.until(lambda: left == set(in_sync_of(leader.partition)), what="missed")
