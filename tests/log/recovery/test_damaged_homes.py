"""Starts on disks that lost something: what is said, what is kept, and who goes on."""

from __future__ import annotations

import errno
import logging
import random

import pytest

from laminar.log import DamagedDocument
from laminar.log.disk.document import Document
from laminar.log.segment.segment_file import index_name, segment_name
from tests.disks.fault_disk import FaultDisk
from tests.log.damaged import rot, segment_path, served, two_segments
from tests.log.histories import HOME, History, contents, open_inline, run, settle


def copies(disk: FaultDisk, name: str) -> list[str]:
    return [f"{HOME}/{each}" for each in disk.list(HOME) if each.startswith(f"{name}-")]


def test_a_copy_on_a_bad_sector_is_a_copy_less_and_no_more() -> None:
    """EIO in one copy of checkpoint and manifest: the other one is read, and the home opens."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        history.write(1, b"value")
        await history.sync()
        await history.storage.write_manifest([])
        await history.storage.close()
        disk.kill()
        for name in ("checkpoint", "manifest"):
            disk.bad_sectors.add((copies(disk, name)[0], 0))
        history.check(open_inline(disk))

    run(main())


def test_a_document_without_a_whole_copy_names_each_file_and_what_is_wrong_with_it() -> None:
    """One is empty, one is rotten, and one cannot be read."""
    disk = FaultDisk()
    disk.make_directory("d")
    for _ in range(2):
        Document(disk, "d", "layout").write(b"payload")
    disk.rot("d/layout-2.a", 30)
    file = disk.open("d/layout-2.b")
    file.truncate(5)
    with pytest.raises(DamagedDocument) as caught:
        Document(disk, "d", "layout").read()
    assert "layout-2.a has a wrong checksum" in str(caught.value)
    assert "layout-2.b has 5 bytes" in str(caught.value)
    disk.bad_sectors.add(("d/layout-2.b", 0))
    with pytest.raises(DamagedDocument, match=r"layout-2\.b cannot be read \(read d/layout-2\.b"):
        Document(disk, "d", "layout").read()


def test_a_home_whose_manifest_is_gone_says_so_and_changes_nothing() -> None:
    """Without it nobody knows which votes were given here: it does not open, and names the files."""

    async def prepare(disk: FaultDisk) -> None:
        storage = open_inline(disk)
        await storage.write_manifest([])
        await storage.close()
        disk.kill()
        for path in copies(disk, "manifest"):
            disk.rot(path, 20)

    disk = FaultDisk()
    run(prepare(disk))
    before = disk.files("data")
    with pytest.raises(DamagedDocument, match=r"manifest in data/shards/1-0: manifest-2\.b has a wrong"):
        open_inline(disk)
    assert before == [each for each in disk.files("data") if not each[0].endswith("/lock")]


@pytest.mark.parametrize("how", ["rot", "sector"])
def test_one_bad_block_of_the_journal_keeps_nobody_from_opening(how: str) -> None:
    """A sector that cannot be read is as one that rotted: logs are marked where they must be, all open."""

    async def main() -> None:
        found = []
        for block in range(8):
            disk = FaultDisk()
            history = History(open_inline(disk))
            history.create(1)
            for value in (b"a", b"b", b"c"):
                history.write(1, value)
                await history.sync()
            await settle(history.storage)
            disk.kill()
            if how == "rot":
                disk.rot(f"{HOME}/journal-1", block * 4096, 4096)
            else:
                disk.bad_sectors |= {(f"{HOME}/journal-1", block * 8 + each) for each in range(8)}
            storage = open_inline(disk)
            log = storage.logs.get(1)
            found.append((log is None, log is not None and log.recovering, log.last_index if log else 0))
            if log is not None and not log.recovering:
                history.check(storage)
        assert any(recovering for _, recovering, _ in found)
        assert (False, False, 3) in found

    run(main())


def test_a_home_without_a_checkpoint_keeps_what_is_left_and_says_which_files(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both copies rot: the replicas are lost, but neither journal nor checkpoint is thrown away."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        history.write(1, b"value")
        history.vote(5, 1, 1)
        await history.sync()
        await history.storage.checkpoint()
        history.write(1, b"in the journal only")
        await history.sync()
        disk.kill()
        damaged = copies(disk, "checkpoint")
        for path in damaged:
            disk.rot(path, 20)
        journals = {path: size for path, size in disk.files(HOME) if "/journal-" in path}
        held = {path: bytes(disk.held(path)) for path in (*journals, *damaged)}
        storage = open_inline(disk)
        assert not storage.logs
        [line] = [record for record in caplog.records if record.levelno == logging.CRITICAL]
        assert all(path.rpartition("/")[2] in line.getMessage() for path in damaged)
        disk.crash(random.Random(1), keep=0.0)
        for path, content in held.items():
            assert content == bytes(disk.held(path.replace(HOME, f"{HOME}/damaged-1")))

    run(main())


def test_pitfall_29_a_hard_state_whose_twin_is_whole_costs_nobody_his_vote() -> None:
    """Entries and the first copy of a vote rot together: the twin says what it was; no other can be gone."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        history.vote(5, 1, 1)
        history.vote(6, 1, 1)
        await history.sync()
        position = history.storage._journal._position
        history.write(1, b"entry")
        await history.sync()
        history.vote(5, 2, 2)
        await history.sync()
        await settle(history.storage)
        disk.kill()
        disk.rot(f"{HOME}/journal-1", position, 2 * 4096)
        storage = open_inline(disk)
        assert storage.logs[1].recovering
        assert not storage.lost_hard_states
        assert (2, 2) == (storage.hard_states[5].term, storage.hard_states[5].vote)

    run(main())


def test_a_damaged_end_below_the_checkpoint_is_kept_beside_the_log_before_it_is_cut() -> None:
    """The last batch's header and the index rot: the log is marked and shorter, its bytes are still there."""

    async def main() -> None:
        disk = FaultDisk()
        frames = await two_segments(disk)
        storage = open_inline(disk)
        position = storage.logs[1].index_entry(8).position
        rot(disk, storage, 8, at=0, size=128)
        path = segment_path(storage, 5)
        directory = storage.logs[1].files.directory
        disk.unlink(f"{directory}/{index_name(5)}")
        disk.sync_directory(directory)
        held = bytes(disk.held(path))[position:]
        disk.kill()
        storage = open_inline(disk)
        log = storage.logs[1]
        assert log.recovering and 7 == log.last_index
        assert frames[:7] == await served(log)
        disk.crash(random.Random(1), keep=0.0)
        assert held == bytes(disk.held(f"{path}.{position}.damaged"))
        storage = open_inline(disk)
        storage.logs[1].append([frames[7]])
        await storage.sync()
        assert frames == contents(storage.logs[1])

    run(main())


def test_a_segment_of_which_nothing_is_known_is_kept_before_it_goes() -> None:
    """Every header of the last segment and its index are gone: the log ends before it, its bytes stay."""

    async def main() -> None:
        disk = FaultDisk()
        frames = await two_segments(disk)
        storage = open_inline(disk)
        for index in range(5, 9):
            rot(disk, storage, index, at=0, size=128)
        path = segment_path(storage, 5)
        directory = storage.logs[1].files.directory
        disk.unlink(f"{directory}/{index_name(5)}")
        disk.sync_directory(directory)
        held = bytes(disk.held(path))
        disk.kill()
        storage = open_inline(disk)
        assert storage.logs[1].recovering
        assert frames[:4] == await served(storage.logs[1])
        assert held == bytes(disk.held(f"{path}.0.damaged"))
        assert segment_name(5) not in disk.list(directory)

    run(main())


def test_what_is_no_damage_is_no_reason_to_give_anything_up() -> None:
    """Too many open files at a start: it fails, changes nothing, and the next start has everything."""

    async def main() -> None:
        disk = FaultDisk()
        frames = await two_segments(disk)
        for number in range(1, 60, 7):
            count = 0

            def fail(operation: str, path: str, number: int = number) -> int | None:
                nonlocal count
                count += operation == "read"
                return errno.EMFILE if operation == "read" and count == number else None

            disk.error = fail
            try:
                open_inline(disk)
            except Exception as error:  # noqa: BLE001  # any refusal is fine, what counts is what is left
                assert "EMFILE" in str(error)
            disk.crash(random.Random(number), keep=0.5)
        assert frames == await served(open_inline(disk).logs[1])

    run(main())


def test_a_log_whose_folder_is_gone_is_marked_and_keeps_nobody_from_opening() -> None:
    """Its deletion rotted in the journal, or a person took the folder: the others open, this one is empty."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        for log_id in (1, 2):
            history.create(log_id)
            history.write(log_id, b"value")
        await history.sync()
        await history.storage.checkpoint()
        await history.storage.close()
        directory = history.storage.logs[2].files.directory
        disk.kill()
        disk.remove_tree(directory)
        disk.sync_directory(directory.rpartition("/")[0])
        storage = open_inline(disk)
        assert storage.logs[2].recovering and 0 == storage.logs[2].last_index
        assert 1 == len(await served(storage.logs[1]))
        assert not storage.logs[1].recovering

    run(main())


def test_a_segment_that_lost_its_end_marks_the_log() -> None:
    """What the checkpoint names and the file lacks cannot be served: shorter, and `recovering`."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        for number in range(5):
            history.write(1, b"%d" % number * 50)
        await history.sync()
        await history.storage.close()
        log = history.storage.logs[1]
        disk.open(f"{log.files.directory}/{segment_name(1)}").truncate(log.index_entry(4).position + 10)
        disk.kill()
        found = open_inline(disk).logs[1]
        assert found.recovering
        assert 3 == found.last_index
        assert 3 == len(contents(found))

    run(main())
