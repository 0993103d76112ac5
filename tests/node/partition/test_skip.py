"""Offsets that are skipped: readers pass over them, a trim removes them, a restart finds what was there."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.batch import Batch, Kind, build
from laminar.batch.header import Header
from laminar.http.api.problems import Problem
from laminar.node.partition import start_mover
from laminar.node.partition.partition import Partition
from tests.node.alone import lone_partition

FAR = 3 * start_mover.SKIPPED_AT_ONCE + 5


async def append(partition: Partition, value: bytes) -> int:
    frame = build([value])
    return (await partition.appends.append_frame(frame, Header.unpack(frame))).offset


async def test_a_log_goes_on_at_the_offset_and_begins_there(tmp_path: Path) -> None:
    async with lone_partition(tmp_path) as partition:
        await partition.start_mover.skip_to(FAR)
        assert (0, FAR) == (partition.start_offset, partition.end_offset)
        assert FAR == await append(partition, b"first")
        assert 1 == partition.appends.appended_records
        frames = await partition.reader.frames(7, max_bytes=1 << 20)
        assert [(FAR, [b"first"])] == [(Batch(each).base_offset, Batch(each).values) for each in frames]
        await partition.start_mover.skip_to(5)  # it is beyond that
        assert FAR + 1 == partition.end_offset

        index = partition.start_mover.possible_start(await partition.start_mover.index_before(FAR))
        await partition.start_mover.delete(index)
        assert (FAR, FAR + 1) == (partition.start_offset, partition.end_offset)
    async with lone_partition(tmp_path) as partition:
        assert FAR + 1 == await append(partition, b"second")
        assert (FAR, FAR + 2) == (partition.start_offset, partition.end_offset)
        with pytest.raises(Problem, match="earliest offset is"):
            await partition.reader.frames(FAR - 1, max_bytes=1)


async def test_a_restart_before_the_trim_finds_what_was_skipped(tmp_path: Path) -> None:
    async with lone_partition(tmp_path) as partition:
        await partition.start_mover.skip_to(10)
        last = partition.log.last_index
    async with lone_partition(tmp_path) as partition:
        assert 10 == await append(partition, b"first")
        assert (0, 11) == (partition.start_offset, partition.end_offset)
        kinds = {partition.log.index_entry(index).kind for index in range(1, last + 1)}
        assert Kind.SKIP in kinds
        [frame] = await partition.reader.frames(0, max_bytes=1)
        assert (10, [b"first"]) == (Batch(frame).base_offset, Batch(frame).values)


async def test_what_is_too_far_is_refused_and_nothing_is_skipped(tmp_path: Path) -> None:
    most = start_mover.MOST_SKIPS * start_mover.SKIPPED_AT_ONCE
    async with lone_partition(tmp_path) as partition:
        with pytest.raises(Problem, match="too far") as refused:
            await partition.start_mover.skip_to(most + 1)
        assert ("before", most + 1, most) == (refused.value.field, refused.value.value, refused.value.limit)
        assert 0 == partition.end_offset
