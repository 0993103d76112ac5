"""What is staged has no offsets until a publish gives them: the table, the leader's steps, the readers."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laminar.batch import Batch, Header, Kind, build, tag_bit, verify, whole
from laminar.batch.header import HEADER_SIZE, seal
from laminar.http.api.problems import Problem
from laminar.http.api.records import Records
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state import staged_batches as stages_module
from laminar.node.partition.state.sinks import FIRST_ONCE_EPOCH
from laminar.node.partition.state.staged_batches import OpenBatch, Stage, StagedBatches
from laminar.node.partition.state.staging_entries import PrepareOperation
from laminar.node.transactions.participant import Batch as SinkBatch
from laminar.node.transactions.participant import Participant
from tests.node.alone import lone_partition, values
from tests.node.entries import (
    check_follows_its_log,
    forget_entry,
    forget_published_entry,
    prepare_entry,
    publish_entry,
    staged_entry,
)

SINK = b"s" * 16


def of(number: int, *, epoch: int = 1, sink: bytes = SINK) -> SinkBatch:
    return SinkBatch(sink=sink, number=number, epoch=epoch)


def stage(
    partition: Partition, batch: SinkBatch, number: int, *payload: bytes, tag: str | None = None
) -> asyncio.Future[Receipt]:
    frame = build(list(payload), tags=None if tag is None else [tag] * len(payload))
    return Participant(partition).stage(batch, number, frame, Header.unpack(frame))


async def test_a_publish_gives_all_stages_their_offsets_in_order_of_their_numbers(tmp_path: Path) -> None:
    """Nothing is seen before; then all is, dense and in place, as batches like any other."""
    async with lone_partition(tmp_path) as partition:
        staging = Participant(partition)
        await partition.appends.append_records(Records([b"before"]))
        await stage(partition, of(0), 1, b"c", b"d")
        await stage(partition, of(0), 0, b"a", b"b")
        await partition.appends.append_records(Records([b"between"]))
        assert 2 == partition.end_offset
        assert [b"before", b"between"] == await values(partition)

        await staging.prepare(of(0), [0, 1])
        assert Receipt(0, 2, 4) == await staging.publish(of(0))
        await partition.appends.append_records(Records([b"after"]))

        assert [b"before", b"between", b"a", b"b", b"c", b"d", b"after"] == await values(partition)
        for offset in range(partition.end_offset):
            (frame, *_) = await partition.reader.frames(offset, max_bytes=1)
            header = verify(frame)
            assert header.base_offset <= offset < header.next_offset
    async with lone_partition(tmp_path) as partition:
        assert await partition.reader.wait_past(6, 20)
        assert [b"before", b"between", b"a", b"b", b"c", b"d", b"after"] == await values(partition)


async def test_every_step_may_be_asked_for_again(tmp_path: Path) -> None:
    """A stage, a prepare, a publish that are there already are answered, and nothing is added to the log."""
    async with lone_partition(tmp_path) as partition:
        staging = Participant(partition)
        for _ in range(2):
            await stage(partition, of(0), 0, b"a")
        first = partition.log.last_index
        await stage(partition, of(0), 0, b"a")
        assert first == partition.log.last_index
        await staging.prepare(of(0), [0])
        await staging.prepare(of(0), [0])
        first = partition.log.last_index
        assert Receipt(0, 0, 1) == await staging.publish(of(0))
        assert Receipt(0, 0, 1, duplicate=True) == await staging.publish(of(0))
        assert first + 1 == partition.log.last_index
    async with lone_partition(tmp_path) as partition:
        assert await partition.reader.wait_past(0, 20)
        assert Receipt(0, 0, 1, duplicate=True) == await Participant(partition).publish(of(0))


async def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    """Another batch under a stage's number, prepares of what is not there, publishes of what is not."""
    async with lone_partition(tmp_path) as partition:
        staging = Participant(partition)
        await stage(partition, of(0), 0, b"a")
        before = partition.log.last_index
        with pytest.raises(Problem) as problem:
            stage(partition, of(0), 0, b"b")
        assert ("invalid", "stage", "not_applied") == (
            problem.value.code,
            problem.value.field,
            problem.value.outcome,
        )
        with pytest.raises(Problem) as problem:
            staging.prepare(of(0), [0, 1])
        assert ("no_stage", 1) == (problem.value.code, problem.value.value)
        with pytest.raises(Problem) as problem:
            staging.prepare(of(0, epoch=2), [0])
        assert "no_stage" == problem.value.code
        with pytest.raises(Problem) as problem:
            staging.publish(of(0))
        assert "no_stage" == problem.value.code
        assert before == partition.log.last_index
        await staging.prepare(of(0), [0])
        with pytest.raises(Problem) as problem:
            stage(partition, of(0), 1, b"late")
        assert "in_progress" == problem.value.code
        await staging.publish(of(0))
        with pytest.raises(Problem) as problem:
            stage(partition, of(0, epoch=2), 0, b"late")
        assert ("already_committed", 0) == (problem.value.code, problem.value.limit)


async def test_a_prepare_keeps_what_it_names_and_drops_the_rest(tmp_path: Path) -> None:
    """What a driver staged and then gave up is gone with the prepare, and other epochs' with the publish."""
    async with lone_partition(tmp_path) as partition:
        staging = Participant(partition)
        for number in range(4):
            await stage(partition, of(0), number, b"%d" % number)
        await stage(partition, of(0, epoch=2), 0, b"x")
        await stage(partition, of(1), 0, b"next")
        await staging.prepare(of(0), [1, 3])
        await staging.publish(of(0))

        assert [b"1", b"3"] == await values(partition)
        assert [of(1).key] == [key for key, _ in partition.state.stages.batches()]
        assert 1 == staging.drop_abandoned(idle_before_ms=0, begun_before_ms=1 << 60)
        await partition.appends.append_records(Records([b"y"]))
        assert not partition.state.stages
        await stage(partition, of(2), 0, b"z")
        await staging.prepare(of(2), [0])
        gone = staging.drop_abandoned(idle_before_ms=0, begun_before_ms=1 << 60)
        assert gone == 0, "a prepare is not released by time"


async def test_the_log_may_not_begin_between_a_stage_and_its_publish(tmp_path: Path) -> None:
    """What is open stays, and what a publish names stays as long as the publish."""
    async with lone_partition(tmp_path) as partition:
        staging = Participant(partition)
        await partition.appends.append_records(Records([b"old"]))
        old = partition.log.last_index
        await stage(partition, of(0), 0, b"a" * 100)
        await partition.appends.append_records(Records([b"between"]))
        assert old == partition.start_mover.possible_start(partition.log.last_index)
        await staging.prepare(of(0), [0])
        await staging.publish(of(0))
        publish = partition.log.last_index
        await partition.appends.append_records(Records([b"new"]))
        assert old == partition.start_mover.possible_start(publish - 1)
        assert publish == partition.start_mover.possible_start(publish)

        await partition.start_mover.propose(old)
        assert [b"between", b"a" * 100, b"new"] == [
            value
            for frame in await partition.reader.frames(1, max_bytes=1 << 20)
            for value in Batch(frame).values
        ]
        await partition.start_mover.propose(publish)
        assert [b"new"] == [
            value
            for frame in await partition.reader.frames(3, max_bytes=1 << 20)
            for value in Batch(frame).values
        ]
    async with lone_partition(tmp_path) as partition:
        assert await partition.reader.wait_past(0, 20)
        assert Receipt(0, 2, 1, duplicate=True) == await Participant(partition).publish(of(0))


async def test_a_reader_of_a_tag_finds_published_batches_that_have_it(tmp_path: Path) -> None:
    """The publish carries the tags of what it names; a small answer ends inside of it and goes on there."""
    async with lone_partition(tmp_path) as partition:
        staging = Participant(partition)
        for number in range(6):
            await stage(partition, of(0), number, b"%d" % number, tag="ab"[number % 2])
        await staging.prepare(of(0), list(range(6)))
        await staging.publish(of(0))
        await partition.appends.append_records(Records([b"plain"]))
        found: list[bytes] = []
        offset = 0
        while offset < partition.end_offset:
            frames, behind = await partition.reader.tagged_frames(offset, tag="a", max_bytes=200)
            assert frames or behind > offset
            for frame in frames:
                batch = Batch(whole(frame))
                assert bool(batch.header.tag_mask & (tag_bit("a") | tag_bit("b")))
                if batch.tags is not None and "a" in batch.tags:
                    found += batch.values
            offset = max([behind, *(Batch(whole(frame)).header.next_offset for frame in frames)])

        assert [b"0", b"2", b"4"] == found


def test_the_table_is_a_function_of_the_log() -> None:
    """Whatever was appended and truncated before, it is that of the entries that are left."""
    rng = random.Random(4)

    def draw(stages: StagedBatches, index: int) -> tuple[int, int, int]:
        return rng.randrange(10), rng.randrange(3), rng.choice((0, 1, 2, FIRST_ONCE_EPOCH))

    for _ in range(300):
        check_follows_its_log(rng, draw, _apply)


async def test_an_operation_that_this_version_does_not_know_stops_the_replica(tmp_path: Path) -> None:
    """A newer node leads. What it had forgotten here would come back with this replica as the leader."""
    stopped: list[str] = []
    async with lone_partition(tmp_path, stopped=stopped) as partition:
        staging = Participant(partition)
        await stage(partition, of(0), 0, b"a")
        known = (SINK, 0, 1, max(PrepareOperation) + 1, [0])
        frame = seal(bytearray(HEADER_SIZE) + msgspec.msgpack.encode(known), Kind.PREPARE)
        with pytest.raises(Problem):
            await partition.appends.append_control(frame)
        assert ["t/0"] == stopped and not partition.leads
        with pytest.raises(Problem):
            staging.prepare(of(0), [0])


@pytest.mark.parametrize("most", [4, 1024])
def test_where_the_log_may_begin_is_known_in_bounded_memory(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stretches that overlap are one; of too many, neighbours are: that keeps more, and tears nothing."""
    monkeypatch.setattr(stages_module, "MAX_NAMED", most)
    rng = random.Random(3)
    for _ in range(100):
        stages, index = StagedBatches(), 0
        names: dict[int, int] = {}
        for number in range(40):
            held = []
            for _ in range(rng.randrange(1, 3)):
                index += rng.randrange(1, 4)
                held.append((index, 1))
            index += rng.randrange(1, 6)
            # Of some, a stage is from long ago.
            if rng.random() < 0.1 and names:
                held.append((rng.choice(sorted(names)), 1))
            for sink in (SINK, b"t" * 16):
                frame = publish_entry(index, sink, number, 1, held)
                stages.appended(Header.unpack(frame), frame)
                names[index] = min(first for first, _ in held)
                index += 1
        assert len(stages.stored().named) <= most
        borders = 0
        for limit in range(index + 1):
            torn = any(publish > limit >= first for publish, first in names.items())
            may = stages.possible_start(limit) == limit
            borders += may
            assert may <= (not torn)
            assert may == (not torn) or most == 4
        assert borders


def _apply(stages: StagedBatches, index: int, change: tuple[int, int, int]) -> None:
    what, number, epoch = change
    sink = SINK if number < 2 else bytes([index % 5]) * 16
    if what == 8:
        frame = forget_entry(index, SINK, epoch)
    elif what == 9:
        old = stages.old_published(before_ms=index // 2, keep=2)
        frame = forget_published_entry(index, [*old, (SINK, index - number)])
    elif what < 4:
        frame = staged_entry(index, sink, number, epoch, stage=index)
    elif what == 4:
        held = stages.batch((sink, number, epoch))
        frame = prepare_entry(
            index, sink, number, epoch, [each.number for each in held.stages] if held else []
        )
    elif what == 5:
        frame = prepare_entry(index, sink, number, epoch, None)
    elif what == 6:
        held = stages.batch((sink, number, epoch))
        names = [(each.index, each.records) for each in held.stages] if held else []
        frame = publish_entry(index, sink, number, epoch, names)
    else:
        stages.started(index, index // 2)
        return
    stages.appended(Header.unpack(frame), frame)


async def test_a_batch_has_so_many_stages_in_a_partition_and_the_next_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is written, not when it is to be committed; what is there already may be sent again."""
    monkeypatch.setattr("laminar.node.transactions.participant.MAX_STAGES", 2)
    async with lone_partition(tmp_path) as partition:
        for number in (0, 1, 0):
            await stage(partition, of(0), number, b"%d" % number)
        with pytest.raises(Problem) as problem:
            stage(partition, of(0), 2, b"2")
        assert ("stages", 3, 2) == (problem.value.field, problem.value.value, problem.value.limit)
        await stage(partition, of(1), 0, b"of the next batch")


async def test_only_what_is_prepared_is_taken_for_it(tmp_path: Path) -> None:
    """A commit that says how many stages it has prepared would else decide on what may go."""
    async with lone_partition(tmp_path) as partition:
        staging = Participant(partition)
        for number in range(3):
            await stage(partition, of(0), number, b"%d" % number)
        for have in (0, 2):
            for count in {1, 2, 3} - {have}:
                with pytest.raises(Problem) as problem:
                    staging.confirm_prepared(of(0), count)
                assert ("no_stage", count, have) == (
                    problem.value.code,
                    problem.value.value,
                    problem.value.limit,
                )
            await staging.prepare(of(0), [0, 2])
        await staging.confirm_prepared(of(0), 2)


async def test_what_is_prepared_is_never_changed_by_another_prepare(tmp_path: Path) -> None:
    """A commit may have been decided on it: one that was asked for earlier and comes later takes nothing."""
    async with lone_partition(tmp_path) as partition:
        staging = Participant(partition)
        for number in range(2):
            await stage(partition, of(0), number, b"%d" % number)
        await staging.prepare(of(0), [0, 1])
        with pytest.raises(Problem) as problem:
            staging.prepare(of(0), [1])
        assert ("in_progress", "not_applied") == (problem.value.code, problem.value.outcome)
        await staging.publish(of(0))

        assert [b"0", b"1"] == await values(partition)


def test_a_batch_that_lost_a_stage_to_damage_is_never_published_in_part() -> None:
    """The prepare's leader had all that it names: where one is missing in the replay, no other stays."""
    stages = StagedBatches()
    for index in (1, 2):
        frame = staged_entry(index, SINK, 0, 1, stage=index)
        stages.appended(Header.unpack(frame), frame)
    frame = prepare_entry(3, SINK, 0, 1, [1, 2, 3])
    stages.appended(Header.unpack(frame), frame)

    assert stages.batch((SINK, 0, 1)) is None


async def test_a_read_takes_no_more_than_it_was_asked_for(tmp_path: Path) -> None:
    """However many publishes lie together; and what is staged between records is passed over."""
    async with lone_partition(tmp_path) as partition:
        staging = Participant(partition)
        for number in range(20):
            await stage(partition, of(number), 0, b"x" * 1000, tag="t")
            await staging.prepare(of(number), [0])
            await staging.publish(of(number))
        for number in range(20, 40):
            await stage(partition, of(number), 0, b"x" * 1000)
        await partition.appends.append_records(Records([b"last"]))

        for offset in range(20):
            frames = await partition.reader.frames(offset, max_bytes=3000)
            assert 1 <= len(frames) <= 3, f"{len(frames)} frames from {offset} on"
            tagged, _ = await partition.reader.tagged_frames(offset, tag="t", max_bytes=3000)
            assert 1 <= len(tagged) <= 3, f"{len(tagged)} tagged frames from {offset} on"
        assert [19, 20] == [
            Header.unpack(each).base_offset for each in await partition.reader.frames(19, max_bytes=9000)
        ]
        assert [b"x" * 1000] * 20 + [b"last"] == await values(partition)


async def test_a_reader_of_a_tag_never_meets_what_is_staged(tmp_path: Path) -> None:
    """Its rows have no tags: so damage of it is not met either, whose records nobody could miss."""
    async with lone_partition(tmp_path) as partition:
        await partition.appends.append_records(Records([b"first"], tags=["a"]))
        await stage(partition, of(0), 0, b"staged", tag="a")
        last = partition.log.last_index

        assert (last + 1, last + 1) == await partition.log.find_tagged(last, last, tag_bit("a"))


async def test_what_was_decided_and_what_goes_away_are_taken_on_a_full_disk(tmp_path: Path) -> None:
    """New stages and prepares are refused; a publish, and the drop of what is left behind, go on."""
    async with lone_partition(tmp_path) as partition:
        staging = Participant(partition)
        for number in range(2):
            await stage(partition, of(number), 0, b"%d" % number)
        await staging.prepare(of(0), [0])
        partition.appends.refusal = lambda: Problem("disk_full", "no room", outcome="not_applied")

        with pytest.raises(Problem) as problem:
            stage(partition, of(2), 0, b"2")
        assert "disk_full" == problem.value.code
        await staging.publish(of(0))
        assert 1 == staging.drop_abandoned(idle_before_ms=0, begun_before_ms=1 << 60)
        assert not partition.state.stages
        assert [b"0"] == await values(partition)


async def test_a_reader_whose_records_go_meanwhile_is_told_so(tmp_path: Path, monkeypatch: Any) -> None:
    """The log begins behind a publish while its stages are read: 410, as for any record that was given up."""
    async with lone_partition(tmp_path) as partition:
        staging = Participant(partition)
        for number in range(2):
            await stage(partition, of(0), number, b"%d" % number)
        await staging.prepare(of(0), [0, 1])
        await staging.publish(of(0))
        publish = partition.log.last_index
        find_offset = partition.log.find_offset

        async def slow(offset: int) -> int | None:
            found = await find_offset(offset)
            await partition.start_mover.propose(publish)
            return found

        monkeypatch.setattr(partition.log, "find_offset", slow)
        with pytest.raises(Problem) as problem:
            await partition.reader.frames(0, max_bytes=1 << 20)
        assert ("offset_expired", 2) == (problem.value.code, problem.value.limit)


def test_a_batch_is_as_it_was_however_many_stages_came_after() -> None:
    """Thousands of stages share one list; what was truncated is gone from it, and nothing else."""

    def stage(number: int, index: int) -> Stage:
        return Stage(index, number, 1, 100, 0, 0, 0)

    versions = [OpenBatch()]
    for number in range(2_000):
        # As several tasks stage: numbers that do not rise.
        versions.append(versions[-1].with_stage(stage(number * 7_919 % 2_003, number)))
    early = versions[10]
    assert (10, 1_000, 9) == (early.count, early.size_bytes, early.last.index)
    assert [early.get(each.number) for each in early.stages] == early.stages == versions[-1].stages[:10]
    assert early.get(10 * 7_919 % 2_003) is None, "one that came later is found"

    again = early.with_stage(stage(5_000, 10))
    assert [*early.stages, stage(5_000, 10)] == again.stages == again.with_stage(stage(1, 11)).stages[:11]
    assert again.get(10 * 7_919 % 2_003) is None, "what was truncated is found"
    assert 1 == len({id(each._all) for each in (*versions, again)}), "a stage costs a copy of all others"
