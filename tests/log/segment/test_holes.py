"""Segments that are short or gone, inside a log: what is after them stays, and what is missing is said."""

from __future__ import annotations

import itertools
import random

import pytest

from laminar.log import DamagedRange, Log, RepairRefused
from laminar.log.format.index_entry import ROW_SIZE, UNKNOWN_KIND, pack_row
from laminar.log.segment.segment_file import INDEX_HEAD_SIZE, index_name, segment_name
from tests.disks.fault_disk import FaultDisk, PowerCut
from tests.log.damaged import served, without
from tests.log.histories import contents, frame_for, open_inline, run

FIRSTS = [1, 4, 7, 10]
ENTRIES = 12
# Entry `n` holds `n` records: so no two entries can be taken for each other by their size.
RECORDS = range(1, ENTRIES + 1)


async def four_segments(disk: FaultDisk) -> tuple[list[bytes], str]:
    """A log of twelve entries in four segments, checkpointed and closed: its frames and its folder."""
    storage = open_inline(disk)
    log = storage.create_log("t-0", 1)
    for count in RECORDS:
        log.append([frame_for(log, [b"%d" % count * 50] * count, term=1, opens=count in FIRSTS)])
    await storage.sync()
    frames = contents(log)
    await storage.close()
    disk.kill()
    return frames, log.files.directory


def harm(disk: FaultDisk, directory: str, first: int, how: str, *, index: bool) -> None:
    """One segment's file is cut or removed, and its index file with it unless `index`."""
    path = f"{directory}/{segment_name(first)}"
    if how == "deleted":
        disk.unlink(path)
    else:
        file = disk.open(path)
        size = file.size()
        file.truncate({"a byte short": size - 1, "half": size // 2, "empty": 0}[how])
        file.sync()
        file.close()
    if not index:
        disk.unlink(f"{directory}/{index_name(first)}")
    disk.sync_directory(directory)


async def offsets_told(log: Log) -> list[int]:
    """Every offset that a reader is given, or is told of as damaged, reading on from each as he is told."""
    told: list[int] = []
    offset = log.start.offset
    while offset < log.next_offset:
        try:
            index = await log.find_offset(offset)
            assert index is not None
            await log.read(index, index, max_bytes=1)
            row = log.index_entry(index)
            first, behind = row.base_offset, row.next_offset
        except DamagedRange as damage:
            first, behind = damage.first_offset, damage.next_offset
        assert first <= offset < behind, f"asked for {offset}, got {first} to {behind}"
        told += range(offset, behind)
        offset = behind
    return told


CASES = [
    (first, how, index)
    for first in FIRSTS[:3]
    for how in ("a byte short", "half", "empty", "deleted")
    for index in (True, False)
]


@pytest.mark.parametrize(("first", "how", "index"), CASES)
def test_what_a_segment_lacks_is_said_and_what_follows_is_served(first: int, how: str, index: bool) -> None:
    """Whichever segment it is and however much of it is gone, over three starts, until it is repaired."""

    async def main() -> None:
        disk = FaultDisk()
        frames, directory = await four_segments(disk)
        harm(disk, directory, first, how, index=index)
        for _ in range(3):
            log = open_inline(disk).logs[1]
            got = await served(log)
            missing = [number for number, frame in enumerate(got, 1) if frame is None]
            assert missing and set(missing) <= {first, first + 1, first + 2}
            assert without(frames, *missing) == got
            assert list(range(sum(RECORDS))) == await offsets_told(log)
            for offset in range(sum(RECORDS)):
                found = log.value_nowait(offset)
                assert found is None or len(found) % 50 == 0
            assert log.quarantine, "a replica that lacks entries knows it from its start"
            disk.crash(random.Random(1), keep=0.0)

        for number in missing:
            storage = open_inline(disk)
            log = storage.logs[1]
            for other in missing[missing.index(number) + 1 :]:
                with pytest.raises(RepairRefused):
                    await log.repair(other, frames[other - 1])
            await log.repair(number, frames[number - 1])
            assert frames[number - 1] == (await served(log))[number - 1]
            disk.crash(random.Random(number), keep=0.5)
        log = open_inline(disk).logs[1]
        assert frames == await served(log)
        assert not log.quarantine
        assert log.size_bytes == sum(map(len, frames))

    run(main())


def test_what_the_index_knows_of_what_is_cut_off_costs_no_mark() -> None:
    """Each missing entry is known by index and term: the replica has forgotten nothing that it promised."""

    async def main() -> None:
        disk = FaultDisk()
        _, directory = await four_segments(disk)
        harm(disk, directory, 4, "half", index=True)
        log = open_inline(disk).logs[1]
        assert log.quarantine and not log.recovering
        assert [1, 1, 1] == [log.term(index) for index in (4, 5, 6)]

    run(main())


@pytest.mark.parametrize("how", ["a byte short", "half", "empty", "deleted"])
def test_a_last_segment_that_lost_its_end_ends_the_log_there(how: str) -> None:
    """Nothing follows that would say what was there: the log is marked, and ends before it."""

    async def main() -> None:
        disk = FaultDisk()
        frames, directory = await four_segments(disk)
        harm(disk, directory, 10, how, index=True)
        for _ in range(2):
            log = open_inline(disk).logs[1]
            assert log.recovering
            assert frames[: log.last_index] == await served(log)
            assert 9 <= log.last_index < 12
            disk.crash(random.Random(1), keep=0.0)

    run(main())


def test_two_segments_in_a_row_are_one_hole() -> None:
    async def main() -> None:
        disk = FaultDisk()
        frames, directory = await four_segments(disk)
        harm(disk, directory, 4, "deleted", index=False)
        harm(disk, directory, 7, "empty", index=False)
        for _ in range(2):
            log = open_inline(disk).logs[1]
            assert without(frames, *range(4, 10)) == await served(log)
            assert list(range(sum(RECORDS))) == await offsets_told(log)
            [hole] = log.quarantine
            assert (4, 9, 6, 45) == (hole.first_index, hole.last_index, hole.first_offset, hole.next_offset)
            disk.crash(random.Random(1), keep=0.0)

    run(main())


def test_an_offset_that_no_row_holds_is_refused_and_not_answered_with_what_follows() -> None:
    """An index file as earlier versions left it: the rows of the hole are there, and hold no offsets."""

    async def main() -> None:
        disk = FaultDisk()
        _, directory = await four_segments(disk)
        harm(disk, directory, 4, "deleted", index=False)
        log = open_inline(disk).logs[1]
        before = log.index_entry(3)
        row = pack_row(0, before.next_offset, before.position + before.size, 0, 0, 0, 0, UNKNOWN_KIND)
        disk.kill()
        file = disk.open(f"{directory}/{index_name(1)}")
        file.pwritev([row * 3], INDEX_HEAD_SIZE + 3 * ROW_SIZE)
        file.sync()
        file.close()
        log = open_inline(disk).logs[1]
        with pytest.raises(DamagedRange) as refused:
            await log.find_offset(before.next_offset)
        assert 21 == refused.value.next_offset
        assert log.value_nowait(before.next_offset) is None
        assert list(range(sum(RECORDS))) == await offsets_told(log)

    run(main())


def test_a_segment_of_which_nothing_can_be_told_is_set_aside_whole() -> None:
    """Its headers and its index are rotten: its bytes stay, under another name, also after a second crash."""

    async def main() -> None:
        disk = FaultDisk()
        frames, directory = await four_segments(disk)
        storage = open_inline(disk)
        path = f"{directory}/{segment_name(4)}"
        for index in (4, 5, 6):
            disk.rot(path, storage.logs[1].index_entry(index).position, 128)
        disk.unlink(f"{directory}/{index_name(4)}")
        disk.sync_directory(directory)
        held = bytes(disk.held(path))
        disk.kill()
        for _ in range(2):
            log = open_inline(disk).logs[1]
            assert without(frames, 4, 5, 6) == await served(log)
            assert held == bytes(disk.held(f"{path}.0.damaged"))
            disk.crash(random.Random(1), keep=0.0)

    run(main())


@pytest.mark.parametrize(("how", "index"), [("empty", False), ("deleted", False), ("half", True)])
def test_a_power_cut_at_any_step_of_a_start_that_finds_a_hole_loses_nothing_else(
    how: str, index: bool
) -> None:
    async def main() -> None:
        disk = FaultDisk()
        frames, directory = await four_segments(disk)
        harm(disk, directory, 1, how, index=index)
        for step in itertools.count(1, 2):
            cut = disk.copy()
            cut.cut_after = cut.steps + step
            try:
                open_inline(cut)
            except PowerCut:
                pass
            else:
                assert step > 10
                return
            cut.crash(random.Random(step), keep=0.5)
            log = open_inline(cut).logs[1]
            assert frames[3:] == (await served(log))[3:]
            assert list(range(sum(RECORDS))) == await offsets_told(log)

    run(main())
