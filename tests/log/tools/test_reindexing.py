"""`reindex`: indexes made anew from segments, of a folder that nobody has open, whatever became of them."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from laminar.log import FolderInUse, NotALogFolder, StorageSettings, open_log
from laminar.log.disk.disk import RealDisk
from laminar.log.disk.errors import DiskError
from laminar.log.format.index_entry import ROW_SIZE
from laminar.log.tools.reindexing import reindex
from laminar.log.tools.verification import verify

SMALL = StorageSettings(first_journal_file_bytes=1 << 17, journal_file_bytes=1 << 17)


async def fill(path: Path) -> None:
    async with open_log(path, segment_size_bytes=4_000, settings=SMALL) as log:
        for each in range(40):
            await log.append([b"%d" % each * 50] * 2, tags=["a", None])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A closed folder of several segments."""
    asyncio.run(fill(tmp_path / "data"))
    return tmp_path / "data"


def indexes(path: Path) -> dict[Path, bytes]:
    return {each: each.read_bytes() for each in sorted(path.rglob("*.index"))}


def test_indexes_are_made_anew_to_the_byte(data: Path) -> None:
    """Missing, cut, rotten or of another segment: afterwards each is what it was when it was written."""
    whole = indexes(data)
    missing, cut, rotten, strange = list(whole)[:4]
    missing.unlink()
    cut.write_bytes(whole[cut][: -ROW_SIZE // 2])
    rotten.write_bytes(whole[rotten][:40] + b"\xff" + whole[rotten][41:])
    strange.write_bytes(whole[missing])
    assert verify(str(data)).damaged

    done = reindex(str(data))

    assert whole == indexes(data)
    assert {str(each) for each in (missing, cut, rotten, strange)} == {
        each.file for each in done if each.changed
    }
    assert 40 == sum(each.rows for each in done)
    assert 0 == sum(each.unknown for each in done)
    assert not verify(str(data)).damaged


def test_one_segment_is_reindexed_alone(data: Path) -> None:
    """By its path; the others are not looked at."""
    whole = indexes(data)
    for file in whole:
        file.unlink()
    segment = min(data.rglob("*.log"))

    (done,) = reindex(str(segment))

    assert str(segment.with_suffix(".index")) == done.file
    assert {segment.with_suffix(".index"): whole[segment.with_suffix(".index")]} == indexes(data)


def test_a_frame_that_cannot_be_read_keeps_its_row_if_that_is_whole(data: Path) -> None:
    """The row is the second witness of what lay there: it is carried over, never made up."""
    segment = min(data.rglob("*.log"))
    index = segment.with_suffix(".index")
    whole = index.read_bytes()
    damaged = bytearray(segment.read_bytes())
    damaged[20] ^= 1
    segment.write_bytes(damaged)

    assert [False, 0] == [reindex(str(segment))[0].changed, reindex(str(segment))[0].unknown]
    index.unlink()
    assert 1 == reindex(str(segment))[0].unknown
    assert len(whole) == index.stat().st_size


async def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    """Its owner writes these files."""
    async with open_log(tmp_path, settings=SMALL) as log:
        await log.append([b"x"])
        with pytest.raises(FolderInUse, match="in use"):
            await asyncio.to_thread(reindex, str(tmp_path))

    assert [] == [each for each in reindex(str(tmp_path)) if each.changed]


class DyingDisk(RealDisk):
    """Fails at its nth change of a name: as a program that is killed there."""

    def __init__(self, changes: int) -> None:
        self.changes = changes

    def rename(self, old: str, new: str) -> None:
        self.changes -= 1
        if self.changes <= 0:
            raise DiskError("rename", old, 5, "killed here")
        super().rename(old, new)


def test_it_may_be_interrupted_at_any_segment_and_begun_again(data: Path) -> None:
    """Each index is the old one or the whole new one; the log opens in between; leftovers are cleared."""
    whole = indexes(data)
    for changes in range(1, len(whole) + 1):
        for file, content in whole.items():
            file.write_bytes(content[:-1])
        with pytest.raises(DiskError, match="killed"):
            reindex(str(data), disk=DyingDisk(changes))
        for file, content in indexes(data).items():
            assert content in (whole[file], whole[file][:-1])

    reindex(str(data))
    assert whole == indexes(data)
    assert [] == list(data.rglob("*.new"))


def test_a_copy_without_the_logs_id_is_refused_if_no_index_tells_it(data: Path, tmp_path: Path) -> None:
    """An index carries the id of its log; it is not made up."""
    segment = min(data.rglob("*.log"))
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(segment, copy)
    with pytest.raises(NotALogFolder, match="id"):
        reindex(str(copy / segment.name))
    assert [segment.name] == os.listdir(copy)
