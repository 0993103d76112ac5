"""A partition that ends, and one that waits for its beginning: what is taken, answered and kept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laminar.batch import Header, Kind, build, build_part
from laminar.batch.header import set_producer
from laminar.http.api.problems import Problem
from laminar.http.api.records import Records
from laminar.log.format.flush_policy import FlushPolicy
from laminar.node.partition import producer_progress
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.retention import Rules
from laminar.node.partition.state import producers
from laminar.node.partition.state.succession import Input, OpenRecord, Output, SealRecord
from laminar.node.transactions.participant import Batch as StagedBatch
from laminar.node.transactions.participant import Participant
from laminar.node.transactions.uploads import Uploads
from tests.node.alone import VOTER, lone_partition, values
from tests.node.partition.test_retention import HOUR_MS, LARGE, At, fill, keeper, moving, settled_start
from tests.node.trio import Member, Trio, batch, send, trio

SEAL = SealRecord(7, 3, [Output(1, 0, 30_000, b"1" * 16), Output(2, 30_000, 35_536, b"2" * 16)], "strict")
OPEN = OpenRecord(7, 3, 0, 30_000, [Input(0, b"0" * 16, 812, 1)])
OUTPUT = msgspec.structs.replace(VOTER, successor_of=7)
SINK = StagedBatch(sink=b"s" * 16, number=1, epoch=1)
HOURS = FlushPolicy(interval_ms=HOUR_MS, interval_records=0)


def asked(partition: Partition, frame: bytearray, **named: Any) -> asyncio.Future[Receipt]:
    return partition.appends.append_frame(frame, Header.unpack(frame), **named)


def staged(partition: Partition, batch: StagedBatch = SINK, stage: int = 0) -> asyncio.Future[Receipt]:
    frame = build([b"staged"])
    return Participant(partition).stage(batch, stage, frame, Header.unpack(frame))


def keyed(key: bytes, content: int) -> bytearray:
    frame = build([b"keyed"])
    set_producer(frame, producer_id=key * 16, epoch=0, sequence=content, keyed=True)
    return frame


async def problem_of(made: Any) -> Problem:
    """The refusal of what is called, or of the future that it returns."""
    with pytest.raises(Problem) as problem:
        await asyncio.wait_for(made(), 60)
    return problem.value


def kinds(partition: Partition) -> list[int]:
    log = partition.log
    return [log.index_entry(index).kind for index in range(log.first_index, log.last_index + 1)]


# -- a sealed partition ----------------------------------------------------------------------


async def test_nothing_that_adds_a_record_is_taken_after_the_seal(tmp_path: Path) -> None:
    """Now and after a restart; the answer says that it was not applied, and which route goes on."""
    async with lone_partition(tmp_path) as partition:
        await partition.appends.append_records(Records([b"a", b"b"]))
        waiting = partition.appends.append_records(Records([b"c"]))
        receipt = await partition.propose_seal(SEAL)
        assert (await waiting).offset == 2 and receipt.offset == 3, "what was asked for before comes before"
        entries = partition.log.last_index

        async def check() -> None:
            for new in (
                lambda: partition.appends.append_records(Records([b"x"])),
                lambda: asked(partition, build([b"x"])),
                lambda: asked(partition, batch(0, b"x")),
                lambda: asked(partition, keyed(b"k", 1)),
                lambda: partition.appends.accept_frame(*_with_header(batch(0, b"x"))),
                lambda: staged(partition),
                lambda: Participant(partition).prepare(SINK, [0]),
                lambda: Participant(partition).confirm_prepared(SINK, 1),
                lambda: Uploads(partition).part(b"u" * 16, build_part(b"x", upload=b"u" * 16, number=0)),
                lambda: Uploads(partition).publish(b"u" * 16, parts=1, size_bytes=1, crc32c=1, stub=b""),
                lambda: partition.propose_seal(msgspec.structs.replace(SEAL, change_id=8)),
            ):
                problem = await problem_of(new)
                assert ("sealed", 409, "not_applied", 3) == (
                    *(problem.code, problem.status, problem.outcome, problem.limit),
                ), problem

        await check()
        assert entries == partition.log.last_index, "nothing was appended"

    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        await check()
        assert [b"a", b"b", b"c"] == await values(partition)
        seal = partition.state.committed_seal
        assert seal is not None and (3, SEAL) == (seal.end, seal.record)


async def test_what_adds_no_record_goes_on(tmp_path: Path) -> None:
    """Cursors, the log's start, deleted sinks; and the seal itself, which is there once."""
    async with lone_partition(tmp_path) as partition:
        await partition.appends.append_records(Records([b"a", b"b"]))
        await staged(partition)
        await Participant(partition).prepare(SINK, [0])
        await Participant(partition).publish(SINK)
        first = await partition.propose_seal(SEAL)

        again = await partition.propose_seal(SEAL)
        await partition.cursor_commands.set("c", 3, expected=None, check=False, owner="", now_ms=1)
        await Participant(partition).forget(SINK.sink, SINK.epoch)
        await partition.start_mover.propose(partition.committed_index)

        assert (3, False) == (first.offset, first.duplicate)
        assert (3, True) == (again.offset, again.duplicate)
        assert partition.state.stages.published(SINK.sink) is None
        assert (3, 3) == (partition.start_offset, partition.end_offset)
        assert 3 == partition.committed_index - partition.state.succession.sealed.index  # type: ignore[union-attr]
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        seal = partition.state.committed_seal
        assert seal is not None and (3, SEAL) == (seal.end, seal.record), "the start has passed its entry"
        problem = await problem_of(lambda: partition.appends.append_records(Records([b"x"])))
        assert "sealed" == problem.code


async def test_retries_are_answered_across_a_seal_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By receipt, or by what is wrong with them; only what is surely not here is refused as sealed."""
    monkeypatch.setattr(producers, "MAX_PRODUCERS", 2)
    async with lone_partition(tmp_path) as partition:
        for number in range(70):
            await asked(partition, batch(number, b"%d" % number, epoch=2))
        await asked(partition, keyed(b"k", 1))
        await asked(partition, batch(0, b"q", producer=b"q" * 16))
        now_ms = partition.context.now_ms()
        await partition.propose_seal(SEAL)

        async def answer(frame: bytearray, **named: Any) -> tuple[object, ...]:
            try:
                receipt = await asked(partition, frame, **named)
            except Problem as problem:
                return problem.code, problem.outcome
            return receipt.offset, receipt.duplicate

        assert (69, True) == await answer(batch(69, b"69", epoch=2))
        assert (70, True) == await answer(keyed(b"k", 1))
        assert ("idempotency_key_reused", "not_applied") == await answer(keyed(b"k", 2))
        assert ("out_of_sequence", "unknown") == await answer(batch(1, b"1", epoch=2))
        assert ("fenced", "not_applied") == await answer(batch(0, b"0", epoch=1))
        # The table is full, so it may have forgotten this one.
        assert ("unknown_producer", "unknown") == await answer(batch(4, b"4", producer=b"n" * 16))
        assert ("key_expired", "unknown") == await answer(keyed(b"o", 1), key_made_ms=now_ms - 48 * HOUR_MS)
        for new in (
            batch(70, b"70", epoch=2),
            batch(75, b"75", epoch=2),  # those before it were refused, too
            batch(0, b"0", epoch=3),
            batch(3, b"3", epoch=3),
            batch(0, b"0", producer=b"n" * 16),  # there is no room for its number, and none is needed
            keyed(b"n", 1),
        ):
            assert ("sealed", "not_applied") == await answer(new)
        again = partition.appends.accept_frame(*_with_header(batch(69, b"69", epoch=2)))
        assert (69, True) == (again.offset, again.duplicate)


async def test_a_batch_behind_the_first_of_a_new_producer_is_refused_as_sealed(tmp_path: Path) -> None:
    """A producer that sends two at once has both refused so, the second before the seal is committed, too.

    Also after a restart. What was appended before the seal has its receipt.
    """
    async with lone_partition(tmp_path) as partition:
        await asked(partition, batch(0, b"before", producer=b"b" * 16))
        sealing = partition.propose_seal(SEAL)
        second = asked(partition, batch(1, b"1", producer=b"n" * 16))
        await sealing
        assert "sealed" == (await problem_of(lambda: second)).code
    async with lone_partition(tmp_path) as partition:
        for number in (0, 1, 7):
            new = batch(number, b"%d" % number, producer=b"n" * 16)
            refused = await problem_of(lambda new=new: asked(partition, new))
            assert ("sealed", "not_applied", 3) == (refused.code, refused.outcome, refused.limit)
        again = await asked(partition, batch(0, b"before", producer=b"b" * 16))
        assert (0, True) == (again.offset, again.duplicate)


def _with_header(frame: bytearray) -> tuple[bytearray, Header]:
    return frame, Header.unpack(frame)


async def test_a_producer_that_resumes_finds_its_progress_in_a_sealed_partition(tmp_path: Path) -> None:
    """As a fence would leave it; nothing is appended, as no batch of an older epoch can come any more."""
    async with lone_partition(tmp_path) as partition:
        frame = build([b"a", b"b"], producer_id=b"p" * 16, producer_epoch=2, checkpoint=7, floor=3)
        await asked(partition, frame)
        await partition.propose_seal(SEAL)
        entries = partition.log.last_index

        resumed = await producer_progress.fence(partition, b"p" * 16, 5)
        assert producers.Progress(epoch=5, sequence=-1, checkpoint=7, floor=3) == resumed
        begun = await producer_progress.fence(partition, b"p" * 16, 2)
        assert producers.Progress(epoch=2, sequence=0, checkpoint=7, floor=3) == begun
        assert await producer_progress.fence(partition, b"n" * 16, 1) is None
        assert entries == partition.log.last_index
        old = await problem_of(lambda: producer_progress.fence(partition, b"p" * 16, 1))
        assert ("fenced", 2) == (old.code, old.limit)


async def test_nothing_is_sealed_over_what_may_still_be_published(tmp_path: Path) -> None:
    """A stage, a prepare that a decision may name, a part of a large record: refused, and nothing changes."""
    async with lone_partition(tmp_path) as partition:
        upload = b"u" * 16

        async def refused() -> None:
            problem = await problem_of(lambda: partition.propose_seal(SEAL))
            assert ("in_progress", "stages", 1, "not_applied") == (
                *(problem.code, problem.field, problem.value, problem.outcome),
            )
            assert Kind.SEAL not in kinds(partition)
            await partition.appends.append_records(Records([b"on"]))

        first = staged(partition)  # at the log's end, and not committed yet
        await refused()
        await first
        await Participant(partition).prepare(SINK, [0])
        await refused()
        await Participant(partition).publish(SINK)
        await Uploads(partition).part(upload, build_part(b"x", upload=upload, number=0))
        await refused()
        await Uploads(partition).drop(upload)

        end = partition.end_offset
        assert end == (await partition.propose_seal(SEAL)).offset
        # Its decision was carried out before the seal, and is answered again as it was then.
        assert (await Participant(partition).publish(SINK)).duplicate


async def test_what_was_begun_ends_while_nothing_else_begins(tmp_path: Path) -> None:
    """So what is in a seal's way gets less. Records, and steps of what is under way, are taken as ever."""
    later = StagedBatch(sink=b"t" * 16, number=1, epoch=1)
    one, two = b"1" * 16, b"2" * 16
    async with lone_partition(tmp_path) as partition:
        await staged(partition)
        await Uploads(partition).part(one, build_part(b"x", upload=one, number=0))

        assert 2 == partition.hold(600)
        for new in (
            lambda: staged(partition, later),
            lambda: Uploads(partition).part(two, build_part(b"x", upload=two, number=0)),
        ):
            problem = await problem_of(new)
            assert ("changing", "not_applied", True) == (problem.code, problem.outcome, problem.retriable)
        await partition.appends.append_records(Records([b"on"]))
        await staged(partition, stage=1)
        await Uploads(partition).part(one, build_part(b"y", upload=one, number=1))
        await Uploads(partition).drop(one)
        await Participant(partition).prepare(SINK, [0, 1])
        await Participant(partition).publish(SINK)
        assert 0 == partition.hold(600)
        assert 3 == (await partition.propose_seal(SEAL)).offset
        late = await problem_of(lambda: staged(partition, later))
        assert "sealed" == late.code, "not only for a while"

    async with lone_partition(tmp_path / "again") as partition:
        partition.hold(600)
        partition.hold(0)
        await staged(partition)
        partition.hold(600)
        partition.led(True)
        await staged(partition, later)


async def test_a_reader_at_the_final_end_does_not_wait(tmp_path: Path) -> None:
    """Who waits is woken by the seal, who comes later is answered at once, who is behind reads on."""
    async with lone_partition(tmp_path) as partition:
        await partition.appends.append_records(Records([b"a", b"b"]))
        waiting = asyncio.ensure_future(partition.reader.wait_past(2, 600))
        await asyncio.sleep(0)
        assert not waiting.done()

        await partition.propose_seal(SEAL)

        assert not await asyncio.wait_for(waiting, 60)
        assert not await asyncio.wait_for(partition.reader.wait_past(2, 600), 60)
        assert not await asyncio.wait_for(partition.reader.wait_past(7, 600), 60)
        assert await partition.reader.wait_past(1, 0)
        assert [b"a", b"b"] == await values(partition)


# -- retention -------------------------------------------------------------------------------


async def test_the_last_segment_of_a_sealed_partition_expires_by_age_once(tmp_path: Path) -> None:
    """Its end stays, and no size makes it expire: nothing is added that could make it larger."""
    clock = At()
    async with lone_partition(tmp_path, settings=LARGE) as partition:
        await fill(partition, 4)
        clock.wall = partition.log.last_append_time_ms + HOUR_MS
        keeper(clock, Rules(retention_ms=1)).check(partition)
        assert not moving(partition), "it is not sealed"
        await partition.propose_seal(SEAL)
        seal = partition.state.committed_seal
        assert seal is not None

        clock.wall = seal.time_ms + 1000
        keeper(clock, Rules(retention_bytes=0)).check(partition)
        keeper(clock, Rules()).check(partition)
        keeper(clock, Rules(retention_ms=1000)).check(partition)
        assert not moving(partition)
        clock.wall += 1
        keeper(clock, Rules(retention_ms=1000)).check(partition)
        assert moving(partition)
        await settled_start(partition)
        clock.wall += 10 * HOUR_MS
        for _ in range(2):
            keeper(clock, Rules(retention_ms=1000)).check(partition)
            assert not moving(partition), "there is nothing left to trim"

        assert (8, 8, seal.index) == (partition.start_offset, partition.end_offset, partition.log.start.index)
        assert partition.log.size_bytes < 10_000
    async with lone_partition(tmp_path, settings=LARGE) as partition:
        await partition.reader.confirmed_end()
        assert seal == partition.state.committed_seal


async def test_older_segments_of_a_sealed_partition_expire_as_ever(tmp_path: Path) -> None:
    """One by one, by age or size; the last only after all of them."""
    clock = At()
    async with lone_partition(tmp_path) as partition:
        await fill(partition, 10)
        await partition.propose_seal(SEAL)
        seal = partition.state.committed_seal
        ends = [end for end, _, _ in partition.log.sealed()]
        assert seal is not None and len(ends) > 1

        clock.wall = seal.time_ms
        keeper(clock, Rules(retention_bytes=1_300_000)).check(partition)
        await settled_start(partition)
        assert ends[0] == partition.log.start.index
        keeper(clock, Rules(retention_bytes=0)).check(partition)
        await settled_start(partition)
        assert ends[-1] == partition.log.start.index and partition.start_offset < partition.end_offset
        clock.wall += HOUR_MS
        keeper(clock, Rules(retention_ms=1)).check(partition)
        await settled_start(partition)
        assert partition.start_offset == partition.end_offset == seal.end


# -- a partition that waits ------------------------------------------------------------------


async def test_an_output_takes_nothing_before_it_is_opened(tmp_path: Path) -> None:
    """The refusal may be repeated; cursors are taken, so that they stand before the first record."""
    for _ in range(2):  # also after a restart
        async with lone_partition(tmp_path, voters=OUTPUT) as partition:
            entries = partition.log.last_index
            for new in (
                lambda: partition.appends.append_records(Records([b"x"])),
                lambda: asked(partition, batch(0, b"x")),
                lambda: asked(partition, batch(5, b"x")),
                lambda: asked(partition, keyed(b"k", 1), key_made_ms=1),
                lambda: partition.appends.accept_frame(*_with_header(batch(0, b"x"))),
                lambda: staged(partition),
                lambda: Participant(partition).prepare(SINK, [0]),
                lambda: Uploads(partition).part(b"u" * 16, build_part(b"x", upload=b"u" * 16, number=0)),
                lambda: producer_progress.fence(partition, b"f" * 16, 1),
                lambda: partition.propose_seal(SEAL),
            ):
                problem = await problem_of(new)
                assert ("changing", 503, "not_applied", True) == (
                    *(problem.code, problem.status, problem.outcome, problem.retriable),
                ), problem
            assert entries == partition.log.last_index
            await partition.cursor_commands.set("c", 0, expected=None, check=False, owner="", now_ms=1)
            assert not await partition.reader.wait_past(0, 0.01), "it has not ended"


async def test_an_output_is_opened_once_by_the_change_that_made_it(tmp_path: Path) -> None:
    """Records follow at once, behind the entry; another change, or a partition of none, is refused."""
    async with lone_partition(tmp_path, voters=OUTPUT) as partition:
        other = await problem_of(lambda: partition.propose_open(msgspec.structs.replace(OPEN, change_id=8)))
        assert ("invalid", 8, 7) == (other.code, other.value, other.limit)
        opening = partition.propose_open(OPEN)
        receipt = await partition.appends.append_records(Records([b"a"]))
        await opening
        entries = partition.log.last_index
        assert (await partition.propose_open(OPEN)).duplicate
        assert entries == partition.log.last_index
        assert 0 == receipt.offset
    async with lone_partition(tmp_path, voters=OUTPUT) as partition:
        await partition.appends.append_records(Records([b"b"]))
        assert (await partition.propose_open(OPEN)).duplicate
        assert [b"a", b"b"] == await values(partition)
        await partition.propose_seal(SEAL)
        late = await problem_of(lambda: partition.propose_open(msgspec.structs.replace(OPEN, change_id=8)))
        assert "invalid" == late.code
    async with lone_partition(tmp_path / "plain") as partition:
        plain = await problem_of(lambda: partition.propose_open(OPEN))
        assert ("invalid", 0) == (plain.code, plain.limit)


async def test_times_do_not_fall_from_a_seal_to_what_follows_it(tmp_path: Path) -> None:
    """Though the clock of the output's leader is behind that of an input's."""
    async with lone_partition(tmp_path, voters=OUTPUT) as partition:
        ahead_ms = partition.replica.wall_ms() + HOUR_MS
        inputs = [Input(0, b"0" * 16, 812, ahead_ms - 5), Input(3, b"3" * 16, 4, ahead_ms)]

        await partition.propose_open(msgspec.structs.replace(OPEN, inputs=inputs))
        await partition.appends.append_records(Records([b"a"]))

        log = partition.log
        times = [log.index_entry(index).append_time_ms for index in (log.last_index - 1, log.last_index)]
        assert [ahead_ms, ahead_ms] == times


# -- three replicas --------------------------------------------------------------------------


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
            leader.partition.appends.accept_frame(*_with_header(batch(1, b"1")))
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
