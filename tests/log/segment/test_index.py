"""The index: how rows are found without being in memory, and made anew where their file does not hold."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from laminar.log import DamagedRange, RealDisk, Storage, StorageSettings
from laminar.log.disk.open_files import Resources
from laminar.log.disk.threads import SerialInlineExecutor
from laminar.log.format.index_entry import ROW_SIZE, UNKNOWN_KIND
from laminar.log.segment.segment_file import (
    CHUNK_ROWS,
    INDEX_HEAD_SIZE,
    SegmentFile,
    index_name,
    segment_name,
)
from tests.disks.fault_disk import FaultDisk
from tests.log.counting_disk import CountingDisk
from tests.log.histories import SMALL, History, contents, frame_for, open_inline, run

# Far more rows than a segment keeps in memory.
_ENTRIES = 1500
_ONE_SEGMENT = StorageSettings(
    segment_size_bytes=1 << 30,
    first_journal_file_bytes=32 * 1024,
    journal_file_bytes=64 * 1024,
    checkpoint_bytes=1 << 30,
    recent_bytes=0,
    gather_bytes=0,
    idle_marker_ms=1,
)


async def _filled(disk: FaultDisk, *, opens: tuple[int, ...] = ()) -> History:
    """A log of many small entries, closed: its rows are in the index file."""
    history = History(open_inline(disk, settings=_ONE_SEGMENT))
    log = history.create(1)
    rng = random.Random(3)
    for number in range(_ENTRIES):
        values = [b"%d" % number] * rng.choice([0, 1, 1, 1, 2, 5])
        log.append([frame_for(log, values, time_ms=number * 10, opens=number in (0, *opens))])
    await history.storage.close()
    disk.kill()
    return history


def test_rows_are_found_by_offset_time_and_index_after_a_start() -> None:
    """Every one, against a linear search, although only the last row of a segment was read at the start."""

    async def main() -> None:
        disk = FaultDisk()
        await _filled(disk, opens=(700, 701))
        storage = open_inline(disk, settings=_ONE_SEGMENT)
        log = storage.logs[1]
        owner = [index for index in range(1, _ENTRIES + 1) for _ in range(log.index_entry(index).count)]
        assert [1, 701, 702] == log.segment_first_indexes

        assert owner == [log.index_of_offset(offset) for offset in range(log.next_offset)]
        assert owner == [await log.find_offset(offset) for offset in range(log.next_offset)]
        for index in range(1, _ENTRIES, 7):
            assert index == log.index_of_time(index * 10 - 10)
            assert index + 1 == await log.find_time(index * 10 - 9)
        assert 1 == log.term(703)

    run(main())


def test_rows_of_a_growing_segment_leave_memory_and_are_found_in_its_file() -> None:
    """A segment of any size keeps some hundreds of rows; a truncation never brings old ones back."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk, settings=_ONE_SEGMENT))
        log = history.create(1)
        for number in range(_ENTRIES):
            history.write(1, b"%d" % number)
            if number % 100 == 0:
                await history.sync()
        await history.sync()
        (segment,) = log.segments()
        history.write(1, b"last")
        assert len(segment.tail) // ROW_SIZE < 600
        assert segment.held_from > _ENTRIES // 2
        frames = contents(log)

        log.index_entry(segment.held_from - 1)
        history.truncate(1, segment.held_from - 40)
        for number in range(_ENTRIES):
            history.write(1, b"new %d" % number, term=2)
            if number % 100 == 0:
                await history.sync()
        await history.sync()

        assert len(segment.tail) // ROW_SIZE < 600
        found = contents(log)
        assert frames[: len(found) - _ENTRIES] == found[: len(found) - _ENTRIES]
        assert [1] * (len(found) - _ENTRIES) + [2] * _ENTRIES == [log.term(i + 1) for i in range(len(found))]
        await history.storage.close()
        disk.kill()
        history.check(open_inline(disk, settings=_ONE_SEGMENT))

    run(main())


@pytest.mark.parametrize("fault", ["rotten", "foreign", "zeros", "missing", "short"])
def test_an_index_that_rots_while_it_is_used_is_mended_from_the_frames(fault: str) -> None:
    """All is served, and the file is right again: a row that is whole, but another's, is found out too."""

    async def main() -> None:
        disk = FaultDisk()
        await _filled(disk)
        storage = open_inline(disk, settings=_ONE_SEGMENT)
        log = storage.logs[1]
        path = f"{log.files.directory}/{index_name(1)}"
        before = bytes(disk.open(path).pread(1 << 20, 0))
        at = INDEX_HEAD_SIZE + 3 * CHUNK_ROWS * ROW_SIZE
        file = disk.open(path)
        if fault == "rotten":
            disk.rot(path, at + 5 * ROW_SIZE + 20)
        elif fault == "foreign":
            # Whole rows that follow each other, of other entries.
            file.pwritev([before[at + CHUNK_ROWS * ROW_SIZE :][: CHUNK_ROWS * ROW_SIZE]], at)
        elif fault == "zeros":
            file.pwritev([bytes(3 * CHUNK_ROWS * ROW_SIZE)], at)
        elif fault == "short":
            file.truncate(at + 7)
        else:
            log.close()
            disk.unlink(path)

        frames = [
            bytes(frame)
            for first in range(1, _ENTRIES + 1)
            for frame in await log.read(first, first, max_bytes=1)
        ]

        assert _ENTRIES == len(frames)
        # The last row is in memory always: where its file lost it, the next start puts it back.
        assert before[:-ROW_SIZE] == bytes(disk.open(path).pread(len(before) - ROW_SIZE, 0))
        assert not log.quarantine
        disk.kill()
        again = open_inline(disk, settings=_ONE_SEGMENT)
        assert frames == contents(again.logs[1])
        assert before == bytes(disk.open(path).pread(1 << 20, 0))
        assert not again.logs[1].recovering

    run(main())


def test_a_damaged_header_in_the_middle_keeps_its_row_as_witness_and_is_named() -> None:
    """Its neighbours are served; the index is not blamed for what the segment lost."""

    async def main() -> None:
        disk = FaultDisk()
        await _filled(disk)
        storage = open_inline(disk, settings=_ONE_SEGMENT)
        log = storage.logs[1]
        row = log.index_entry(600)
        disk.rot(f"{log.files.directory}/{segment_name(1)}", row.position + 20)

        assert 1 == len(await log.read(599, 599, max_bytes=1))
        with pytest.raises(Exception, match="600"):
            await log.read(600, 600, max_bytes=1)
        assert 1 == len(await log.read(601, 601, max_bytes=1))
        assert row == log.index_entry(600)
        assert UNKNOWN_KIND != row.kind

    run(main())


async def test_opening_reads_a_row_a_segment_however_many_there_are(tmp_path: Path) -> None:
    """Names, the checkpoint and the last rows say all that a start must know."""
    disk = CountingDisk()
    storage = Storage.open(disk, f"{tmp_path}/home", f"{tmp_path}/logs", settings=SMALL)
    log = storage.create_log("t-0", 1)
    for number in range(2000):
        log.append([frame_for(log, [b"x" * 100], opens=number % 200 == 0)])
    await storage.close()
    disk.forget()

    storage = Storage.open(disk, f"{tmp_path}/home", f"{tmp_path}/logs", settings=SMALL)

    log = storage.logs[1]
    assert 10 == len(log.segment_first_indexes)
    assert (2000, 2000) == (log.last_index, log.next_offset)
    assert disk.bytes["index"] <= 10 * (INDEX_HEAD_SIZE + ROW_SIZE) + ROW_SIZE
    assert disk.bytes["log"] <= 10 * 128
    await storage.close()


async def test_open_files_and_rows_are_bounded_over_all_logs(tmp_path: Path) -> None:
    """P12: many partitions of many segments are read through a few open files and rows, and all is right."""
    settings = StorageSettings(
        segment_size_bytes=4096,
        first_journal_file_bytes=64 * 1024,
        recent_bytes=0,
        open_files=10,
        row_bytes=20_000,
    )
    storage = Storage.open(RealDisk(), f"{tmp_path}/home", f"{tmp_path}/logs", settings=settings)
    wanted: dict[int, list[bytes]] = {}
    for log_id in range(1, 21):
        log = storage.create_log("t", log_id)
        wanted[log_id] = [frame_for(log, [b"%d" % log_id])]
        log.append(wanted[log_id])
        for number in range(40):
            wanted[log_id].append(frame_for(log, [b"%d" % number * 200]))
            log.append(wanted[log_id][-1:])
    await storage.close()
    storage = Storage.open(RealDisk(), f"{tmp_path}/home", f"{tmp_path}/logs", settings=settings)
    resources = storage._recovered.readers.resources
    rng = random.Random(1)

    for _ in range(2000):
        log_id, index = rng.randrange(1, 21), rng.randrange(1, 42)
        (frame,) = await storage.logs[log_id].read(index, index, max_bytes=1)
        assert wanted[log_id][index - 1] == bytes(frame)

    assert len(resources.files) <= 10
    assert resources.rows.size_bytes <= 20_000 + 32 * CHUNK_ROWS * ROW_SIZE
    await storage.close()


def test_a_file_that_waits_for_its_sync_stays_open(tmp_path: Path) -> None:
    """One that is opened anew may not hear of a failed writeback: so it is beyond the bound until then."""

    async def main() -> None:
        settings = StorageSettings(
            first_journal_file_bytes=64 * 1024, recent_bytes=0, open_files=4, gather_bytes=0
        )
        storage = Storage.open(
            RealDisk(),
            f"{tmp_path}/home",
            f"{tmp_path}/logs",
            settings=settings,
            workers=SerialInlineExecutor,
        )
        logs = [storage.create_log("t", log_id) for log_id in range(1, 21)]
        for log in logs:
            log.append([frame_for(log, [b"x"])])
        await storage.sync()
        assert all(log.segment_of(1).file.opened is not None for log in logs)
        await storage.checkpoint()
        for log in logs:
            await log.read(1, 1, max_bytes=1)
        assert len(storage._recovered.readers.resources.files) <= 5
        await storage.close()

    run(main())


@pytest.mark.parametrize("fault", ["missing", "short", "rotten", "stale"])
def test_an_index_that_does_not_hold_is_made_anew(fault: str) -> None:
    """Missing, short, rotten or from another life: the rows come from the frames, and all is served."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        for number in range(12):
            history.write(1, b"%d" % number * 150)
        await history.sync()
        await history.storage.close()
        path = f"{history.storage.logs[1].files.directory}/{index_name(1)}"
        if fault == "missing":
            disk.unlink(path)
        elif fault == "short":
            disk.open(path).truncate(100)
        elif fault == "rotten":
            disk.rot(path, 32 + 56 + 20)
        else:
            disk.open(path).pwritev([bytes(disk.open(path).pread(56, 32))], 32 + 56)
        disk.kill()
        history.check(open_inline(disk))
        disk.kill()
        history.check(open_inline(disk))

    run(main())


@pytest.mark.parametrize("chunk", [2, 4])
def test_a_read_ends_before_whole_rows_of_other_entries(chunk: int) -> None:
    """Whether those lie before or after the frames of the read; the next read mends them."""

    async def main() -> None:
        disk = FaultDisk()
        await _filled(disk)
        storage = open_inline(disk, settings=_ONE_SEGMENT)
        log = storage.logs[1]
        file = disk.open(f"{log.files.directory}/{index_name(1)}")
        size = CHUNK_ROWS * ROW_SIZE
        file.pwritev([bytes(file.pread(size, INDEX_HEAD_SIZE + chunk * size))], INDEX_HEAD_SIZE + 3 * size)
        first = 3 * CHUNK_ROWS - 5

        assert 6 == len(await log.read(first, first + 20, max_bytes=1 << 20))
        assert 20 == len(await log.read(first + 6, first + 25, max_bytes=1 << 20))
        assert 26 == len(await log.read(first, first + 25, max_bytes=1 << 20))
        assert not log.quarantine

    run(main())


@pytest.mark.parametrize("with_index", [True, False])
def test_a_rotten_header_is_bridged(with_index: bool) -> None:
    """With its row the entry's term is known; without, the log is marked; the rest is served."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        for number in range(5):
            history.write(1, b"%d" % number * 50, b"x")
        await history.sync()
        await history.storage.close()
        log = history.storage.logs[1]
        disk.rot(f"{log.files.directory}/{segment_name(1)}", log.index_entry(3).position + 20)
        if not with_index:
            disk.unlink(f"{log.files.directory}/{index_name(1)}")
        disk.kill()

        found = open_inline(disk).logs[1]

        assert with_index != found.recovering
        assert (1 if with_index else None) == found.term(3)
        assert (5, 10) == (found.last_index, found.next_offset)
        assert 3 == found.index_of_offset(4)
        assert 2 == len(await found.read(1, 5, max_bytes=10_000))
        with pytest.raises(DamagedRange) as damage:
            await found.read(3, 5, max_bytes=10_000)
        assert (4, 6) == (damage.value.first_offset, damage.value.next_offset)
        assert 2 == len(await found.read(4, 5, max_bytes=10_000))

    run(main())


def test_a_removed_segment_gets_no_index_file_from_a_reader_that_mends_it() -> None:
    disk = FaultDisk()
    disk.make_directory("logs")
    segment = SegmentFile(Resources(disk, open_files=10, row_bytes=1000), "logs", first_index=1, log_id=1)
    segment.write(0, [bytes(200)], [bytes(ROW_SIZE)], 1 << 20)
    segment.prepare_sync()
    assert 2 == len(disk.list("logs"))
    segment.remove()

    segment.mend_rows(0, bytes(ROW_SIZE), truncations=0)

    assert [] == disk.list("logs")
