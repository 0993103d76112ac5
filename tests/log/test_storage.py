"""A storage as a whole: its group commits, its end, and the end of single logs in it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from laminar.log import RealDisk, Storage, StorageClosed, StorageSettings
from laminar.log.format.manifest import ManifestChange, ReplicaEntry
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import (
    HOME,
    LOGS,
    SMALL,
    History,
    frame_for,
    in_segments,
    manifest_entry,
    open_inline,
    run,
    settle,
)


async def test_a_mark_is_durable() -> None:
    """`recovering` and the incarnation come back, until they are lifted."""
    disk = FaultDisk()
    storage = open_inline(disk)
    log = storage.create_log("t-0", 1)
    log.set_recovering(recovering=True, incarnation=3)
    await storage.sync()
    disk.crash(random.Random(1), keep=0.0)
    storage = open_inline(disk)
    log = storage.logs[1]
    assert log.recovering and 3 == log.incarnation
    log.set_recovering(recovering=False, incarnation=3)
    await storage.sync()
    await settle(storage)
    disk.crash(random.Random(1), keep=0.0)
    assert not open_inline(disk).logs[1].recovering


@pytest.mark.parametrize("checkpointed", [False, True])
async def test_a_mark_and_the_least_term_are_one_record(checkpointed: bool) -> None:
    """A folder that went back may not be marked and yet take part in the terms that it forgot. The least term
    outlasts the mark, later marks and a log that takes the place of this one.
    """
    disk = FaultDisk()
    storage = open_inline(disk)
    log = storage.create_log("t-0", 1)
    log.set_recovering(recovering=True, incarnation=1, least_term=20_000)
    await storage.sync()
    if checkpointed:
        await storage.checkpoint()
    disk.crash(random.Random(1), keep=0.0)
    storage = open_inline(disk)
    log = storage.logs[1]
    assert log.recovering and 20_000 == log.least_term
    log.set_recovering(recovering=False, incarnation=1)
    log.set_recovering(recovering=True, incarnation=2, least_term=5)
    await storage.replace_log(1, storage.create_log("t-0", 2))
    if checkpointed:
        await storage.checkpoint()
    disk.crash(random.Random(1), keep=0.0)

    assert 20_000 == open_inline(disk).logs[2].least_term


async def test_a_failed_segment_stops_its_log_alone() -> None:
    """Others go on; nothing acknowledged of it is lost, as its records stay in the journal."""
    disk = FaultDisk()
    history = History(open_inline(disk))
    history.create(1)
    history.create(2)
    bad = history.storage.logs[1].files.directory
    disk.error = lambda operation, path: 5 if operation == "write" and path.startswith(bad) else None
    history.write(1, b"acknowledged")
    history.write(2, b"other")
    await history.sync()
    with pytest.raises(Exception, match="errno 5"):
        history.write(1, b"refused")
    history.write(2, b"goes on")
    await history.sync()
    await history.storage.checkpoint()
    disk.crash(random.Random(1), keep=0.0)
    history.check(open_inline(disk))


async def test_a_closed_or_failed_storage_says_so() -> None:
    """After a failed journal sync the owner is told once, and every waiter gets an error."""
    disk = FaultDisk()
    storage = open_inline(disk)
    told: list[BaseException] = []
    storage.on_failure = told.append
    log = storage.create_log("t-0", 1)
    disk.error = lambda operation, path: 5 if operation == "sync" else None
    log.append([frame_for(log, [b"a"])])
    with pytest.raises(StorageClosed):
        await storage.sync()
    with pytest.raises(StorageClosed):
        await storage.sync()
    assert 1 == len(told)
    assert 0 == log.durable_index
    await storage.close()


async def test_a_group_of_appends_is_one_frame(storage: Storage) -> None:
    """What piles up while a sync runs goes out together: far fewer frames than appends."""
    log = storage.create_log("t-0")

    async def one() -> None:
        log.append([frame_for(log, [b"x"])])
        await storage.sync()

    await asyncio.gather(*(one() for _ in range(500)))
    assert 500 == log.durable_index
    assert storage.statistics()["frames"] < 20


async def test_frames_above_the_bound_are_split(tmp_path: Path) -> None:
    """A turn with more bytes than a frame may hold goes out in several, in order."""
    settings = StorageSettings(max_frame_bytes=4096, first_journal_file_bytes=8192, max_unwritten_bytes=8192)
    storage = Storage.open(RealDisk(), f"{tmp_path}/home", f"{tmp_path}/logs", settings=settings)
    log = storage.create_log("t-0")
    for _ in range(40):
        log.append([frame_for(log, [b"x" * 900])])
    log.append([frame_for(log, [b"y" * 50_000])])
    await storage.sync()
    assert 41 == log.durable_index
    assert storage.statistics()["frames"] >= 11
    digest = await log.digest(41)
    await storage.close()
    again = Storage.open(RealDisk(), f"{tmp_path}/home", f"{tmp_path}/logs", settings=settings)
    assert digest == await next(iter(again.logs.values())).digest(41)
    await again.close()


async def test_a_deleted_log_keeps_no_file_open(storage: Storage, tmp_path: Path) -> None:
    """Else its room on the disk would stay taken when the trash is emptied."""
    log = storage.create_log("t-0")
    log.append([frame_for(log, [b"gone"])])
    await in_segments(storage)
    await log.read(1, 1, max_bytes=1)
    await storage.delete_log(log.log_id)
    await storage.checkpoint()

    assert [] == [path for path in _open_files() if path.startswith(f"{tmp_path}/") and "/t-0-" in path]


def _open_files() -> list[str]:
    """What this process has open, a file that was moved under its new name."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(
            FileNotFoundError
        ):  # that of the listing, or one that a thread has closed since
            found.append(os.readlink(link))
    return found


def test_a_deleted_log_that_cannot_be_moved_to_the_trash_is_moved_later() -> None:
    """Deleting is what makes room on a full disk: it must not end the process, nor keep it from starting."""

    async def main() -> None:
        disk = FaultDisk()
        storage = open_inline(disk)
        for log_id in (1, 2):
            log = storage.create_log(f"t-{log_id}", log_id)
            log.append([frame_for(log, [b"value"])])
        await storage.checkpoint()
        folder = storage.logs[1].files.directory

        def full(operation: str, path: str) -> int | None:
            return errno.ENOSPC if operation == "rename" and path == folder else None

        disk.error = full
        await storage.delete_log(1)
        storage.logs[2].append([frame_for(storage.logs[2], [b"more"])])
        await storage.sync()
        assert disk.exists(folder)
        disk.crash(random.Random(1), keep=0.0)
        disk.error = full
        storage = open_inline(disk)
        assert ([2], 2) == (list(storage.logs), storage.logs[2].last_index)
        assert disk.exists(folder)

        disk.error = None
        await storage.checkpoint()
        assert not disk.exists(folder)
        assert [folder.rpartition("/")[2]] == disk.list("data/trash")

    run(main())


def test_a_change_of_the_manifest_takes_back_no_other_that_is_under_way() -> None:
    """Replicas begin anew while another is added: it is given what is there when its turn has come."""

    async def main() -> None:
        disk = FaultDisk()
        storage = Storage.open(disk, HOME, LOGS, settings=SMALL)
        first, second = manifest_entry(1), manifest_entry(2)

        def begin_anew(known: Mapping[int, ReplicaEntry]) -> ManifestChange:
            return {key: msgspec.structs.replace(entry, state="empty") for key, entry in known.items()}

        expected = list(begin_anew({1: first, 2: second}).values())
        await storage.write_manifest([first])
        adding = asyncio.ensure_future(storage.write_manifest([first, second]))
        await asyncio.sleep(0)
        await storage.change_manifest(begin_anew)
        await adding
        assert expected == storage.manifest.entries
        await storage.close()
        assert expected == open_inline(disk).manifest.entries

    run(main())
