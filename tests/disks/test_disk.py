"""What every disk must do: one suite over the real one and the fault disk in both its forms."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from laminar.log.disk.disk import MAX_BUFFERS, Disk, RealDisk
from laminar.log.disk.errors import DiskError
from tests.disks.fault_disk import FaultDisk


@pytest.fixture(params=["real", "in memory", "over a directory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Disk, str]:
    disk: Disk
    if request.param == "real":
        disk = RealDisk()
    elif request.param == "in memory":
        disk = FaultDisk()
    else:
        disk = FaultDisk.over(f"{tmp_path}/hidden")
    directory = f"{tmp_path}/d"
    disk.make_directory(directory)
    return disk, directory


def test_bytes_come_back_as_they_were_written(place: tuple[Disk, str]) -> None:
    """Many buffers in one call lie one behind the other; a read ends with the file; holes are zeros."""
    disk, directory = place
    file = disk.open(f"{directory}/f", create=True)
    buffers = [b"%d," % number for number in range(MAX_BUFFERS * 2 + 7)]
    whole = b"".join(buffers)

    assert len(whole) == file.pwritev(buffers, 100)

    assert 100 + len(whole) == file.size()
    assert bytes(100) + whole == bytes(file.pread(1 << 20, 0))
    assert b"" == bytes(file.pread(10, 1 << 20))
    file.sync()
    file.start_writeback(0, 0)
    file.close()


def test_a_nowait_read_gives_all_or_nothing(place: tuple[Disk, str]) -> None:
    """What was just written is in memory; a range behind the end is never half given."""
    disk, directory = place
    file = disk.open(f"{directory}/f", create=True)
    file.pwritev([b"x" * 1000], 0)

    assert b"x" * 10 == bytes(file.pread_nowait(10, 5) or b"")
    assert file.pread_nowait(10, 995) is None
    file.close()


def test_truncation_cuts_and_extends(place: tuple[Disk, str]) -> None:
    """A shorter size cuts, a longer one adds zeros."""
    disk, directory = place
    file = disk.open(f"{directory}/f", create=True)
    file.pwritev([b"abcdef"], 0)
    file.truncate(3)
    file.truncate(5)

    assert b"abc\0\0" == bytes(file.pread(10, 0))
    file.close()


def test_reserved_room_changes_neither_size_nor_bytes(place: tuple[Disk, str]) -> None:
    """Room beyond the end reads as the end."""
    disk, directory = place
    file = disk.open(f"{directory}/f", create=True)
    file.pwritev([b"abc"], 0)

    file.reserve(1 << 20)

    assert 3 == file.size()
    assert b"abc" == bytes(file.pread(10, 0))
    file.pwritev([b"def"], 3)
    assert (6, b"abcdef") == (file.size(), bytes(file.pread(10, 0)))
    file.close()


def test_reserved_room_is_taken_from_the_file_system(tmp_path: Path) -> None:
    """By the blocks that the file holds."""
    file = RealDisk().open(f"{tmp_path}/f", create=True)
    file.reserve(1 << 20)
    blocks = (tmp_path / "f").stat().st_blocks
    if not blocks:
        pytest.skip("this file system reserves nothing")
    assert 512 * blocks >= 1 << 20
    file.close()


def test_names(place: tuple[Disk, str]) -> None:
    """Listing is sorted; rename replaces; unlinking what is gone is fine; open files outlive their names."""
    disk, directory = place
    for name in ("b", "a", "c"):
        file = disk.open(f"{directory}/{name}", create=True, exclusive=True)
        file.pwritev([name.encode()], 0)
        file.close()
    assert ["a", "b", "c"] == disk.list(directory)
    held = disk.open(f"{directory}/b")
    disk.rename(f"{directory}/a", f"{directory}/b")
    disk.unlink(f"{directory}/c")
    disk.unlink(f"{directory}/c")
    disk.sync_directory(directory)

    assert ["b"] == disk.list(directory)
    assert b"b" == bytes(held.pread(10, 0))
    assert disk.exists(f"{directory}/b") and not disk.exists(f"{directory}/a")
    assert [] == disk.list(f"{directory}/nowhere")
    held.close()
    disk.make_directory(f"{directory}/x/y")
    disk.remove_tree(f"{directory}/x")
    disk.remove_tree(f"{directory}/x")
    assert not disk.exists(f"{directory}/x")
    assert 0 < disk.free_bytes(directory) <= disk.total_bytes(directory)


def test_failures_are_disk_errors_with_their_number(place: tuple[Disk, str]) -> None:
    """A missing file, an existing one where none may be."""
    disk, directory = place
    with pytest.raises(DiskError) as missing:
        disk.open(f"{directory}/f")
    assert missing.value.is_missing
    disk.open(f"{directory}/f", create=True).close()
    with pytest.raises(DiskError) as existing:
        disk.open(f"{directory}/f", create=True, exclusive=True)
    assert errno.EEXIST == existing.value.errno
    with pytest.raises(DiskError):
        disk.rename(f"{directory}/none", f"{directory}/other")


def test_a_lock_is_held_by_one(place: tuple[Disk, str]) -> None:
    """A second one is refused until the first is closed."""
    disk, directory = place
    lock = disk.lock(f"{directory}/lock")
    with pytest.raises(DiskError) as refused:
        disk.lock(f"{directory}/lock", wait=False)
    assert errno.EAGAIN == refused.value.errno
    lock.close()
    disk.lock(f"{directory}/lock", wait=False).close()


def test_a_directory_that_is_there_already_has_its_name_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever made it may have been killed before he synced it."""
    (tmp_path / "data").mkdir()
    synced: list[str] = []
    sync = RealDisk.sync_directory

    def noted(disk: RealDisk, path: str) -> None:
        synced.append(path)
        sync(disk, path)

    monkeypatch.setattr(RealDisk, "sync_directory", noted)

    RealDisk().make_directory(f"{tmp_path}/data")
    RealDisk().make_directory(f"{tmp_path}/data/home")

    assert [f"{tmp_path}", f"{tmp_path}", f"{tmp_path}/data"] == synced
