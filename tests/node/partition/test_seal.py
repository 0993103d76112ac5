"""A partition that ends, and one that waits for its beginning: what is taken, answered and kept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laminar.batch import Kind, build, build_part
from laminar.http.api.problems import Problem
from laminar.http.api.records import Records
from laminar.node.partition import producer_progress
from laminar.node.partition.retention import Rules
from laminar.node.partition.state import producers
from laminar.node.partition.state.succession import Input
from laminar.node.transactions.participant import Batch as StagedBatch
from laminar.node.transactions.participant import Participant
from laminar.node.transactions.uploads import Uploads
from tests.node.alone import lone_partition, values
from tests.node.partition.seals import (
    OPEN,
    OUTPUT,
    SEAL,
    SINK,
    asked,
    keyed,
    kinds,
    problem_of,
    staged,
    with_header,
)
from tests.node.partition.test_retention import HOUR_MS, LARGE, At, fill, keeper, moving, settled_start
from tests.node.trio import batch

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
                lambda: partition.appends.accept_frame(*with_header(batch(0, b"x"))),
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
        again = partition.appends.accept_frame(*with_header(batch(69, b"69", epoch=2)))
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
                lambda: partition.appends.accept_frame(*with_header(batch(0, b"x"))),
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
