"""Damage inside a log: named, kept apart, remembered over restarts, and undone with bytes from a replica."""

from __future__ import annotations

import asyncio
import errno
import random

import pytest

from laminar.log import DamagedRange, DiskError, Log, RepairRefused, Storage, StorageError
from laminar.log.segment.segment_file import index_name
from tests.disks.fault_disk import FaultDisk, PowerCut
from tests.log.damaged import VALUES, rot, segment_path, served, two_segments, without
from tests.log.histories import History, frame_for, open_inline, run, settle


def test_damage_inside_is_named_precisely_and_everything_else_is_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The error has index, term, offsets, file and position; one line of the log tells it, not one a read."""

    async def main() -> None:
        disk = FaultDisk()
        frames = await two_segments(disk)
        storage = open_inline(disk)
        told: list[tuple[Log, DamagedRange]] = []
        storage.on_damage = lambda log, damage: told.append((log, damage))
        log = storage.logs[1]
        rot(disk, storage, 3)
        for _ in range(3):
            assert without(frames, 3) == await served(log)
            assert frames[:2] == [bytes(frame) for frame in await log.read(1, 8, max_bytes=1 << 20)]
        [(of, damage)] = told
        assert of is log
        assert (3, 3, 1, 4, 6) == (
            damage.first_index,
            damage.last_index,
            damage.term,
            damage.first_offset,
            damage.next_offset,
        )
        assert (segment_path(storage, 1), log.index_entry(3).position) == (damage.file, damage.position)
        lines = [record.getMessage() for record in caplog.records if record.name == "laminar.damage"]
        assert 1 == len(lines) and damage.file in lines[0] and "offsets 4 to 5" in lines[0]
        assert 1 == storage.statistics()["damage_quarantined"]

    run(main())


def test_what_is_quarantined_is_remembered_over_restarts_without_touching_its_bytes() -> None:
    """The note is durable, the damaged bytes stay as they are, also through checkpoints and power loss."""

    async def main() -> None:
        disk = FaultDisk()
        frames = await two_segments(disk)
        storage = open_inline(disk)
        rot(disk, storage, 6)
        path = segment_path(storage, 5)
        assert without(frames, 6) == await served(storage.logs[1])
        before = disk.held(path)
        for _ in range(2):
            await storage.checkpoint()
            disk.crash(random.Random(1), keep=0.0)
            storage = open_inline(disk)
            assert [6] == [damage.first_index for damage in storage.logs[1].quarantine]
            assert without(frames, 6) == await served(storage.logs[1])
            assert before == disk.held(path)

    run(main())


def test_pitfall_39_a_damaged_batch_is_repaired_in_its_place() -> None:
    """The right bytes are taken, durably; the quarantine is lifted, and stays so after power loss."""

    async def main() -> None:
        disk = FaultDisk()
        frames = await two_segments(disk)
        storage = open_inline(disk)
        log = storage.logs[1]
        rot(disk, storage, 3)
        assert without(frames, 3) == await served(log)
        await log.repair(3, frames[2])
        assert frames == await served(log)
        assert not log.quarantine
        disk.crash(random.Random(1), keep=0.0)
        storage = open_inline(disk)
        assert not storage.logs[1].quarantine
        assert frames == await served(storage.logs[1])

    run(main())


def test_a_repair_with_other_bytes_is_refused_and_changes_nothing() -> None:
    """A neighbour's frame, a flipped bit, another term, another size, an entry that is whole."""

    async def main() -> None:
        disk = FaultDisk()
        frames = await two_segments(disk)
        storage = open_inline(disk)
        log = storage.logs[1]
        rot(disk, storage, 5)
        assert without(frames, 5) == await served(log)

        class AtFour:
            """What a leader of another history would have stamped behind entry 4."""

            last_index, last_term, next_offset, last_append_time_ms, segment_full = 4, 2, 8, 0, True

        behind: Log = AtFour()  # type: ignore[assignment]  # all that `frame_for` looks at
        flipped = bytearray(frames[4])
        flipped[300] ^= 1
        wrong = [
            frames[3],
            bytes(flipped),
            frames[4][:-1],
            frame_for(behind, [VALUES[4], VALUES[4]], term=7),
            frame_for(behind, [VALUES[4], VALUES[4], b"x"], term=2),
            b"",
        ]
        for frame in wrong:
            with pytest.raises(RepairRefused):
                await log.repair(5, frame)
        with pytest.raises(RepairRefused):
            await log.repair(4, frames[3])
        assert without(frames, 5) == await served(log)
        assert 1 == len(log.quarantine)

    run(main())


def test_pitfall_39_a_power_cut_at_every_step_of_a_repair_leaves_it_damaged_or_whole() -> None:
    """Never another entry, never a lost note with damaged bytes served; a second repair then succeeds."""

    async def attempt(disk: FaultDisk, frames: list[bytes], cut: int | None) -> bool:
        storage = open_inline(disk)
        log = storage.logs[1]
        rot(disk, storage, 3)
        assert without(frames, 3) == await served(log)
        if cut is not None:
            disk.cut_after = disk.steps + cut
        try:
            await log.repair(3, frames[2])
        except (PowerCut, StorageError):
            return False
        return True

    async def main() -> None:
        rng = random.Random(39)
        for cut in range(1, 40):
            disk = FaultDisk()
            frames = await two_segments(disk)
            done = await asyncio.wait_for(attempt_or_cut(disk, frames, cut), 60)
            disk.crash(rng, keep=rng.choice([0.0, 0.5, 1.0]))
            storage = open_inline(disk)
            log = storage.logs[1]
            found = await served(log)
            assert found in (frames, without(frames, 3))
            assert not log.recovering
            if found != frames:
                await log.repair(3, frames[2])
                assert frames == await served(log)
            if done:
                assert found == frames
                return
        raise AssertionError("a repair takes more steps than were tried")

    async def attempt_or_cut(disk: FaultDisk, frames: list[bytes], cut: int) -> bool:
        """A cut in the writer ends that task: then the waiting repair is never told."""
        task = asyncio.ensure_future(attempt(disk, frames, cut))
        for _ in range(50):
            await asyncio.sleep(0)
        if task.done():
            return task.result()
        task.cancel()
        return False

    run(main())


def lose_index(disk: FaultDisk, storage: Storage, first: int) -> None:
    disk.unlink(f"{storage.logs[1].files.directory}/{index_name(first)}")
    disk.sync_directory(storage.logs[1].files.directory)


def test_entries_without_any_witness_are_repaired_by_their_chain_from_the_first_on() -> None:
    """Two headers and the index are gone: the range is named as a whole, and heals in order only."""

    async def main() -> None:
        disk = FaultDisk()
        frames = await two_segments(disk)
        storage = open_inline(disk)
        for index in (2, 3):
            rot(disk, storage, index, at=0, size=128)
        lose_index(disk, storage, 1)
        disk.kill()
        storage = open_inline(disk)
        log = storage.logs[1]
        assert log.recovering
        assert without(frames, 2, 3) == await served(log)
        [damage] = log.quarantine
        assert (2, 3, 0, 2, 6) == (
            damage.first_index,
            damage.last_index,
            damage.term,
            damage.first_offset,
            damage.next_offset,
        )
        with pytest.raises(RepairRefused):
            await log.repair(3, frames[2])
        await log.repair(2, frames[1])
        assert without(frames, 3) == await served(log)
        disk.crash(random.Random(1), keep=0.0)
        storage = open_inline(disk)
        log = storage.logs[1]
        assert without(frames, 3) == await served(log)
        await log.repair(3, frames[2])
        assert frames == await served(log)
        disk.crash(random.Random(1), keep=0.0)
        assert frames == await served(open_inline(disk).logs[1])

    run(main())


@pytest.mark.parametrize("first", [1, 5])
def test_a_sector_or_a_file_that_cannot_be_read_is_damage_like_any_other(first: int) -> None:
    """EIO inside a segment names the batches that lie there, and the others are served."""

    async def main() -> None:
        disk = FaultDisk()
        frames = await two_segments(disk)
        storage = open_inline(disk)
        disk.cold = True
        log = storage.logs[1]
        path = segment_path(storage, first)
        bad = log.index_entry(first + 1).position + 700  # a block that lies in this entry alone
        disk.bad_sectors.add((path, bad // 512))
        assert without(frames, first + 1) == await served(log)
        await log.repair(first + 1, frames[first])
        assert frames == await served(log)

    run(main())


def test_the_notes_of_entries_that_are_cut_or_expired_go_with_them() -> None:
    """A truncation and a new start take their damage along; another entry at the index is not suspected."""

    async def main() -> None:
        disk = FaultDisk()
        frames = await two_segments(disk)
        storage = open_inline(disk)
        log = storage.logs[1]
        rot(disk, storage, 2)
        rot(disk, storage, 7)
        assert without(frames, 2, 7) == await served(log)
        log.truncate(7)
        log.append([frame_for(log, [b"new"], term=9)])
        log.set_start(index=4, term=log.term(4) or 0, offset=8)
        await storage.sync()
        assert not log.quarantine
        assert frames[4:6] == (await served(log))[:2]
        disk.crash(random.Random(1), keep=0.0)
        storage = open_inline(disk)
        assert not storage.logs[1].quarantine
        assert None not in await served(storage.logs[1])

    run(main())


def test_damage_that_the_journal_writes_again_is_no_damage() -> None:
    """What lies behind the checkpoint is written again at each start: its note must not outlive that."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        history.write(1, b"a" * 600)
        await history.sync()
        await history.storage.checkpoint()
        history.write(1, b"b" * 600)
        await history.sync()
        await settle(history.storage)
        storage = history.storage
        storage._changes.written = storage._changes.recorded
        storage._changes.evict_written()
        rot(disk, storage, 2)
        assert [2] == [index for index, frame in enumerate(await served(storage.logs[1]), 1) if frame is None]
        for _ in range(2):
            disk.kill()
            storage = open_inline(disk)
            history.check(storage)
            assert not storage.logs[1].quarantine

    run(main())


def test_a_document_of_notes_that_cannot_be_read_costs_nothing_but_the_notes() -> None:
    """Both copies rot: the log opens, and the damage is found again by the next read."""

    async def main() -> None:
        disk = FaultDisk()
        frames = await two_segments(disk)
        storage = open_inline(disk)
        rot(disk, storage, 3)
        assert without(frames, 3) == await served(storage.logs[1])
        disk.kill()
        for path, size in disk.files(storage.logs[1].files.directory):
            if "health" in path:
                disk.rot(path, 0, size)
        storage = open_inline(disk)
        assert not storage.logs[1].quarantine
        assert without(frames, 3) == await served(storage.logs[1])

    run(main())


def test_a_sync_that_fails_in_a_repair_is_heard_of_by_the_next_checkpoint() -> None:
    """The disk tells of it once, and its pages are clean then: a checkpoint that syncs them again and hears
    nothing would stand for entries behind the repaired one that are nowhere.
    """

    async def main() -> None:
        disk = FaultDisk()
        frames = await two_segments(disk)
        storage = open_inline(disk)
        log = storage.logs[1]
        rot(disk, storage, 6)
        assert without(frames, 6) == await served(log)
        log.append([frame_for(log, [b"acknowledged"], term=3, opens=False)])
        await storage.sync()
        await settle(storage)
        told = [errno.EIO]
        path = segment_path(storage, 5)
        disk.error = lambda operation, at: told.pop() if told and (operation, at) == ("sync", path) else None
        with pytest.raises(DiskError):
            await log.repair(6, frames[5])
        await storage.checkpoint()
        assert log.failure is not None
        disk.crash(random.Random(1), keep=0.0)

        log = open_inline(disk).logs[1]
        assert (9, False) == (log.last_index, log.recovering)
        assert b"acknowledged" in bytes((await log.read(9, 9, max_bytes=1))[0])

    run(main())
