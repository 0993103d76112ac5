"""Records larger than a batch on their partition's leader: parts, the publish, and what readers see."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from laminar.batch import Batch, Header, Kind, build_part, verify, whole
from laminar.batch.large_record import build_stub, checksum_of, size_of
from laminar.http.api.parameters import MAX_UPLOAD_PARTS
from laminar.http.api.problems import Problem
from laminar.http.api.records import Records
from laminar.node.api.records.record_value import find_parts, pieces
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state import staged_batches as stages_module
from laminar.node.partition.state.staged_batches import StagedBatches
from laminar.node.transactions import uploads as uploads_module
from laminar.node.transactions.participant import Participant
from laminar.node.transactions.uploads import Uploads
from tests.node.alone import lone_partition
from tests.node.entries import check_follows_its_log, part_entry, published_upload_entry

ID = b"u" * 16


def put(partition: Partition, number: int, value: bytes, *, upload: bytes = ID) -> asyncio.Future[Receipt]:
    return Uploads(partition).part(upload, build_part(value, upload=upload, number=number))


async def publish(
    partition: Partition,
    *parts: bytes,
    upload: bytes = ID,
    size_bytes: int | None = None,
    checksum: int | None = None,
    tag: str | None = None,
) -> Receipt:
    whole = b"".join(parts)
    size = len(whole) if size_bytes is None else size_bytes
    crc = crc32c(whole) if checksum is None else checksum
    stub = build_stub(key=b"k", tag=tag, headers=None, timestamp_ms=None, size_bytes=size, crc32c=crc)
    return await Uploads(partition).publish(
        upload, parts=len(parts), size_bytes=size, crc32c=crc, stub=bytes(stub)
    )


async def value(partition: Partition, offset: int, start: int = 0, stop: int | None = None) -> bytes:
    parts = await find_parts(partition, offset)
    stop = parts.record.size_bytes if stop is None else stop
    return b"".join([bytes(piece) async for piece in pieces(partition, parts, start, stop)])


async def test_an_upload_takes_one_offset_where_its_publish_stands(tmp_path: Path) -> None:
    """Parts may come in any order, between other records; nobody sees them; offsets stay dense."""
    parts = [b"a" * 3000, b"b", b"c" * 700_000]
    async with lone_partition(tmp_path) as partition:
        await partition.appends.append_records(Records([b"before"]))
        await put(partition, 2, parts[2])
        await put(partition, 0, parts[0])
        await partition.appends.append_records(Records([b"between"]))
        await put(partition, 1, parts[1])
        assert 2 == partition.end_offset

        assert Receipt(0, 2, 1) == await publish(partition, *parts)
        await partition.appends.append_records(Records([b"after"]))
    async with lone_partition(tmp_path) as partition:
        assert await partition.reader.wait_past(3, 20)
        frames = await partition.reader.frames(0, max_bytes=1 << 20)
        batches = [Batch(frame) for frame in frames]

        assert [0, 1, 2, 3] == [batch.base_offset for batch in batches]
        for offset in range(4):
            few = await partition.reader.frames(offset, max_bytes=1 << 20, before=offset + 1)
            assert offset == Batch(few[0]).base_offset
        assert [False, False, True, False] == [batch.is_large for batch in batches]
        assert (703_001, crc32c(b"".join(parts))) == (size_of(batches[2]), checksum_of(batches[2]))
        assert b"".join(parts) == await value(partition, 2)
        assert b"aabc" == await value(partition, 2, 2998, 3002)
        assert b"c" == await value(partition, 2, 703_000, 703_001)
        assert b"" == await value(partition, 2, 0, 0)


async def test_every_step_of_an_upload_may_be_asked_for_again(tmp_path: Path) -> None:
    """A part or a publish that is there is answered, and nothing added to the log; also after a restart."""
    async with lone_partition(tmp_path) as partition:
        await put(partition, 0, b"a")
        last = partition.log.last_index
        assert (await put(partition, 0, b"a")).duplicate
        assert last == partition.log.last_index
        assert Receipt(0, 0, 1) == await publish(partition, b"a")
        last = partition.log.last_index
        assert Receipt(0, 0, 1, duplicate=True) == await publish(partition, b"a")
        await Uploads(partition).drop(ID)
        assert last == partition.log.last_index
    async with lone_partition(tmp_path) as partition:
        assert await partition.reader.wait_past(0, 20)
        assert Receipt(0, 0, 1, duplicate=True) == await publish(partition, b"a")
        assert b"a" == await value(partition, 0)


async def test_two_publishes_of_one_upload_at_once_are_one(tmp_path: Path) -> None:
    """The checksum is computed between turns: whoever comes second finds it published."""
    parts = [b"%d" % number for number in range(200)]
    async with lone_partition(tmp_path) as partition:
        await asyncio.gather(*(put(partition, number, part) for number, part in enumerate(parts)))
        receipts = await asyncio.gather(*(publish(partition, *parts) for _ in range(3)))

        assert {0} == {receipt.offset for receipt in receipts}
        assert 1 == sum(not receipt.duplicate for receipt in receipts)
        assert 1 == partition.end_offset


async def test_an_upload_that_is_not_what_it_says_is_refused(tmp_path: Path) -> None:
    """Naming field, value and limit; nothing is added to the log, and no offset taken."""
    async with lone_partition(tmp_path) as partition:
        await put(partition, 0, b"aa")
        await put(partition, 2, b"cc")
        last = partition.log.last_index

        async def refused(code: str, field: str, given: Any, limit: Any, work: Any) -> None:
            with pytest.raises(Problem) as problem:
                await work()
            found = problem.value
            assert (code, field, given, limit) == (found.code, found.field, found.value, found.limit)
            assert "not_applied" == found.outcome

        await refused("invalid", "part", 0, None, lambda: _awaited(put, partition, 0, b"ab"))
        await refused("invalid", "part", 0, None, lambda: _awaited(put, partition, 0, b"a"))
        await refused(
            "invalid",
            "part",
            MAX_UPLOAD_PARTS,
            MAX_UPLOAD_PARTS - 1,
            lambda: _awaited(put, partition, MAX_UPLOAD_PARTS, b"x"),
        )
        await refused("no_stage", "parts", 1, 2, lambda: publish(partition, b"aa", b"bb", b"cc"))
        await refused("no_stage", "parts", 0, 0, lambda: publish(partition, b"x", upload=b"v" * 16))
        assert last == partition.log.last_index
        await put(partition, 1, b"bb")
        parts = (b"aa", b"bb", b"cc")
        await refused("invalid", "parts", 2, 3, lambda: publish(partition, b"aa", b"bb"))
        await refused("invalid", "size_bytes", 7, 6, lambda: publish(partition, *parts, size_bytes=7))
        right = crc32c(b"aabbcc")
        await refused(
            "bad_checksum",
            "crc32c",
            "00000001",
            f"{right:08x}",
            lambda: publish(partition, *parts, checksum=1),
        )
        assert Receipt(0, 0, 1) == await publish(partition, *parts)
        await refused("already_committed", "upload", 0, None, lambda: _awaited(put, partition, 3, b"dd"))
        await refused("already_committed", "upload", 0, None, lambda: publish(partition, b"x"))
        assert 1 == partition.end_offset


async def _awaited(call: Any, *given: Any) -> Any:
    return await call(*given)


async def test_only_so_many_uploads_are_under_way_at_once(tmp_path: Path, monkeypatch: Any) -> None:
    """What is begun goes on; what ends makes room."""
    monkeypatch.setattr(uploads_module, "MAX_OPEN", 2)
    async with lone_partition(tmp_path) as partition:
        for upload in (b"a" * 16, b"b" * 16):
            await put(partition, 0, b"x", upload=upload)
        with pytest.raises(Problem) as problem:
            put(partition, 0, b"x", upload=b"c" * 16)
        assert ("quota", "uploads", 2, 2) == (
            problem.value.code,
            problem.value.field,
            problem.value.value,
            problem.value.limit,
        )
        await put(partition, 1, b"y", upload=b"a" * 16)
        await publish(partition, b"x", b"y", upload=b"a" * 16)
        await put(partition, 0, b"x", upload=b"c" * 16)


async def test_of_too_many_uploads_one_that_nobody_goes_on_with_makes_way(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """That which holds least: a crowd of single bytes makes room for others, and not the other way round."""
    monkeypatch.setattr(uploads_module, "MAX_OPEN", 3)
    async with lone_partition(tmp_path) as partition:
        wall_ms = partition.replica.wall_ms()
        await put(partition, 0, b"x" * 1000, upload=b"a" * 16)
        await put(partition, 0, b"x", upload=b"b" * 16)
        await put(partition, 0, b"xx", upload=b"c" * 16)
        partition.replica.wall_ms = lambda: wall_ms + uploads_module.IDLE_MS + 1000
        await put(partition, 1, b"x", upload=b"b" * 16)

        await put(partition, 0, b"new", upload=b"d" * 16)

        open_now = {key[0][:1] for key, _ in partition.state.stages.batches()}
        assert {b"a", b"b", b"d"} == open_now
        await publish(partition, b"x" * 1000, upload=b"a" * 16)


async def test_what_unfinished_uploads_hold_is_bounded(tmp_path: Path) -> None:
    """Others that nobody goes on with make way, longest idle first; else one waits; what is too large alone
    is told so. A retry of a part that is there takes no room.
    """
    limit = 10_000

    def put_some(upload: bytes, number: int, size: int) -> asyncio.Future[Receipt]:
        frame = build_part(b"x" * size, upload=upload * 16, number=number)
        return Uploads(partition, max_bytes=limit).part(upload * 16, frame)

    async with lone_partition(tmp_path) as partition:
        now_ms = [partition.replica.wall_ms()]
        partition.replica.wall_ms = lambda: now_ms[0]
        for upload in (b"a", b"b", b"c"):
            await put_some(upload, 0, 3000)
            now_ms[0] += 1000
        last = partition.log.last_index
        with pytest.raises(Problem) as full:
            put_some(b"c", 1, 3000)
        with pytest.raises(Problem) as large:
            put_some(b"c", 1, 7000)
        assert (await put_some(b"c", 0, 3000)).duplicate
        assert last == partition.log.last_index
        assert ("quota", "upload_bytes", 4 * 3128, limit) == (
            full.value.code,
            full.value.field,
            full.value.value,
            full.value.limit,
        )
        assert ("too_large", "upload_bytes", 3128 + 7128, limit) == (
            large.value.code,
            large.value.field,
            large.value.value,
            large.value.limit,
        )

        now_ms[0] += uploads_module.IDLE_MS + 1000
        await put_some(b"c", 1, 3000)

        open_now = {key[0][:1] for key, _ in partition.state.stages.batches()}
        assert {b"b", b"c"} == open_now
        await publish(partition, b"x" * 3000, b"x" * 3000, upload=b"c" * 16)
        await put_some(b"d", 0, 5000)


async def test_an_upload_that_breaks_off_leaves_nothing_in_the_table(tmp_path: Path) -> None:
    """Dropped by whoever began it, or for its age by an entry of the leader; then nothing holds the log."""
    async with lone_partition(tmp_path) as partition:
        await put(partition, 0, b"x" * 1000)
        await put(partition, 0, b"y" * 1000, upload=b"v" * 16)
        await partition.appends.append_records(Records([b"after"]))
        last = partition.log.last_index
        assert partition.start_mover.possible_start(last) < last - 2
        await Uploads(partition).drop(ID)
        assert 1 == Participant(partition).drop_abandoned(idle_before_ms=1 << 60, begun_before_ms=0)
        await partition.appends.append_records(Records([b"more"]))

        assert not partition.state.stages
        last = partition.log.last_index
        assert last == partition.start_mover.possible_start(last)
        with pytest.raises(Problem) as problem:
            await publish(partition, b"x" * 1000)
        assert "no_stage" == problem.value.code
        assert [0, 1] == [
            Batch(frame).base_offset for frame in await partition.reader.frames(0, max_bytes=1 << 20)
        ]


async def test_the_log_may_not_begin_inside_of_a_large_record(tmp_path: Path) -> None:
    """Its parts stay as long as it does, and go with it."""
    async with lone_partition(tmp_path) as partition:
        await partition.appends.append_records(Records([b"old"]))
        old = partition.log.last_index
        await put(partition, 0, b"x" * 1000)
        await partition.appends.append_records(Records([b"between"]))
        await publish(partition, b"x" * 1000)
        whole = partition.log.last_index
        await partition.appends.append_records(Records([b"new"]))
        assert old == partition.start_mover.possible_start(whole - 1)
        assert whole == partition.start_mover.possible_start(whole)

        await partition.start_mover.propose(old)
        assert b"x" * 1000 == await value(partition, 2)
        await partition.start_mover.propose(whole)
        with pytest.raises(Problem) as problem:
            await partition.reader.frames(2, max_bytes=1)
        assert "offset_expired" == problem.value.code
        assert Receipt(0, 2, 1, duplicate=True) == await publish(partition, b"x" * 1000)


async def test_a_reader_of_a_tag_finds_a_large_record_that_has_it(tmp_path: Path) -> None:
    """By the publish, whose parts are not read for it."""
    async with lone_partition(tmp_path) as partition:
        await partition.appends.append_records(Records([b"plain"]))
        await put(partition, 0, b"x" * 5000)
        await publish(partition, b"x" * 5000, tag="big")

        frames, behind = await partition.reader.tagged_frames(0, tag="big", max_bytes=1 << 20)
        assert 2 == behind
        assert [True] == [Batch(whole(frame)).is_large for frame in frames]


async def test_parts_between_records_cost_their_reader_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    """They are passed over by their rows: what is read of the log is little more than what is given."""
    async with lone_partition(tmp_path) as partition:
        for number in range(40):
            await partition.appends.append_records(Records([b"%d" % number]))
            await put(partition, 2 * number, bytes(20_000))
            await put(partition, 2 * number + 1, bytes(20_000))
        read_bytes = 0
        read = partition.log.read_nowait

        def counting(first_index: int, last_index: int, *, max_bytes: int) -> Any:
            nonlocal read_bytes
            found = read(first_index, last_index, max_bytes=max_bytes)
            read_bytes += sum(map(len, found or []))
            return found

        monkeypatch.setattr(partition.log, "read_nowait", counting)
        frames = await partition.reader.frames(0, max_bytes=50_000)

        assert list(range(40)) == [Batch(frame).base_offset for frame in frames]
        assert read_bytes < 100_000


def test_published_uploads_are_remembered_by_count_and_by_age_in_the_log(monkeypatch: Any) -> None:
    """Every replica forgets the same ones, at the same entry; a truncation brings them back."""
    monkeypatch.setattr(stages_module, "MAX_UPLOADS", 3)
    monkeypatch.setattr(stages_module, "UPLOAD_AGE_MS", 100)
    stages = StagedBatches()

    def published(index: int, upload: bytes, time_ms: int) -> None:
        frame = published_upload_entry(index, upload, [(index - 1, 10)], time_ms=time_ms)
        stages.appended(Header.unpack(frame), frame)

    for index in range(1, 5):
        published(index, bytes([index]) * 16, 1_000)
    known = [upload[0] for upload, _ in stages.stored().uploads]
    assert [2, 3, 4] == known
    published(5, b"\x05" * 16, 1_101)
    assert [5] == [upload[0] for upload, _ in stages.stored().uploads]
    stages.truncated(5)
    assert known == [upload[0] for upload, _ in stages.stored().uploads]
    other = StagedBatches()
    other.restore(stages.stored())
    assert other.stored() == stages.stored()


def test_the_table_of_uploads_is_a_function_of_the_log(monkeypatch: Any) -> None:
    """Whatever was appended and truncated before, it is that of the entries that are left."""
    monkeypatch.setattr(stages_module, "MAX_UPLOADS", 2)
    rng = random.Random(5)

    def draw(stages: StagedBatches, index: int) -> bytearray:
        upload = bytes([rng.randrange(4)]) * 16
        held = stages.batch((upload, 0, 0))
        if rng.random() < 0.7 or held is None:
            return part_entry(index, upload, index)
        return published_upload_entry(index, upload, [(each.index, 1) for each in held.stages])

    for _ in range(200):
        check_follows_its_log(
            rng, draw, lambda stages, index, frame: stages.appended(Header.unpack(frame), frame)
        )


async def test_what_is_sent_of_a_part_was_verified(tmp_path: Path) -> None:
    """The publish names entries; each frame is checked when it is read, the head and the bytes."""
    async with lone_partition(tmp_path) as partition:
        await put(partition, 0, b"x" * 100)
        await publish(partition, b"x" * 100)
        (index,) = (await find_parts(partition, 0)).indexes
        (frame,) = await partition.log.read(index, index, max_bytes=1)

        header = verify(frame)
        assert (Kind.STAGED, b"x" * 100) == (header.kind, bytes(memoryview(frame)[128:]))
