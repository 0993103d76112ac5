"""What a start finds is certain, continues its log, and is one log or the other.

Numbers are those of docs/pitfalls.md: 31, 33, 46, 49.
"""

from __future__ import annotations

import errno
import random

import pytest

from laminar.log import BrokenChain, LogStart, Storage, StorageClosed
from laminar.log.disk.errors import StorageError
from laminar.log.segment.segment_file import index_name
from tests.disks.fault_disk import FaultDisk, PowerCut
from tests.log.histories import History, contents, frame_for, manifest_entry, open_inline, picture_of, run


def test_pitfall_31_a_stale_suffix_after_an_overwrite_of_equal_size_is_refused() -> None:
    """The old entry behind an overwritten one has the next index, and is refused by its previous term."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        for value in (b"1", b"2", b"3"):
            history.write(1, value, term=1)
        old = contents(history.storage.logs[1])[2]
        history.truncate(1, 2)
        history.write(1, b"b", term=2)

        with pytest.raises(BrokenChain):
            history.storage.logs[1].append([old])

        await history.sync()
        await history.storage.checkpoint()
        # The stale frame lies behind the end, where a lost truncation would have left it.
        path = history.storage.logs[1].segments()[0].file.path
        file = disk.open(path)
        file.pwritev([old], file.size())
        file.sync()
        disk.unlink(path.replace("00001.log", index_name(1)[-11:]))
        disk.kill()
        storage = open_inline(disk)
        history.check(storage)
        assert 2 == storage.logs[1].last_index

    run(main())


def test_pitfall_31_an_entry_of_a_later_term_behind_another_predecessor_is_refused() -> None:
    """Index, offset, time and a term that rises all fit: only the previous term tells the two logs apart."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        log = history.create(1)
        history.write(1, b"1", term=1)
        stranger = frame_for(log, [b"2"], term=5)
        history.write(1, b"2", term=2)
        history.truncate(1, 1)
        history.write(1, b"x", term=3)

        with pytest.raises(BrokenChain):
            log.append([stranger])

        await history.sync()
        history.check(open_inline(_killed(disk)))

    run(main())


def _killed(disk: FaultDisk) -> FaultDisk:
    disk.kill()
    return disk


def test_pitfall_33_what_a_restarted_replica_told_survives_power_loss() -> None:
    """kill -9 before any sync, restart, power loss: the restarted state is there; after a failed sync too."""

    async def main(fail: bool) -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        history.write(1, b"synced")
        await history.sync()
        if fail:
            disk.error = lambda operation, path: errno.EIO if operation == "sync" else None
        else:
            disk.cut_after = disk.steps + 2  # written, not synced
        history.write(1, b"in the page cache")
        history.vote(5, 8, 1)
        with pytest.raises(StorageClosed):
            await history.sync()
        disk.kill()
        told = picture_of(open_inline(disk))
        assert 2 == len(told.logs[1][1])

        disk.crash(random.Random(3), keep=0.0)

        assert told == picture_of(open_inline(disk))

    run(main(fail=False))
    run(main(fail=True))


def test_pitfall_33_recovery_itself_may_be_cut_off_behind_any_step() -> None:
    """Killed behind a write whose sync never came, or failed; then the power goes at each step of the start.

    What the first recovery found, and might have told, it has made certain before it touches a segment: so a
    second one finds all of it, or none, and no log with a hole, a mark, or bytes the journal does not have.
    """

    async def prepare(fail: bool) -> tuple[FaultDisk, History]:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        history.write(1, b"a" * 700)
        history.write(1, b"b" * 700)
        await history.sync()
        await history.storage.checkpoint()
        if fail:
            disk.error = lambda operation, path: errno.EIO if operation == "sync" else None
        else:
            disk.cut_after = disk.steps + 2  # written, not synced
        history.truncate(1, 2)
        history.write(1, b"B" * 700, term=2)
        history.write(1, b"C" * 700, term=2)
        history.vote(5, 8, 1)
        with pytest.raises(StorageClosed):
            await history.sync()
        disk.kill()
        return disk, history

    rng = random.Random(33)
    for fail in (False, True):
        source, history = run(prepare(fail))
        begin = source.copy()
        open_inline(begin, seed=2)
        for step in range(1, begin.steps + 1):
            for keep in (0.0, 0.5, 0.5):
                disk = source.copy()
                disk.cut_after = step
                try:
                    open_inline(disk, seed=2)
                except PowerCut:
                    pass
                disk.crash(rng, keep)
                history.check(open_inline(disk, seed=3))


def test_pitfall_33_bytes_that_look_right_are_written_again() -> None:
    """A segment's failed sync leaves good-looking, clean pages: recovery writes every live record again."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        history.write(1, b"on the disk")
        await history.sync()
        await history.storage.checkpoint()
        history.write(1, b"acknowledged")
        await history.sync()
        disk.error = lambda operation, path: (
            errno.EIO if operation == "sync" and path.endswith(".log") else None
        )
        await history.storage.checkpoint()
        assert isinstance(history.storage.logs[1].failure, StorageError)
        disk.kill()
        open_inline(disk)
        disk.crash(random.Random(3), keep=0.0)

        history.check(open_inline(disk))

    run(main())


def test_pitfall_46_append_times_never_go_back() -> None:
    """A log's last time is known also behind a start that left no entry, after a restart and a truncation."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        log = history.create(1)
        history.append(1, frame_for(log, [b"a"], time_ms=5000))
        early = bytearray(frame_for(log, [b"b"], time_ms=5000))
        history.set_start(1, 1)
        await history.sync()
        disk.kill()
        log = open_inline(disk).logs[1]
        assert LogStart(1, 1, 1, 5000) == log.start
        assert 5000 == log.last_append_time_ms
        log.append([bytes(early)])
        log.truncate(2)
        assert 5000 == log.last_append_time_ms

    run(main())


def test_pitfall_49_a_crash_at_any_step_of_a_logs_replacement() -> None:
    """Either the old log stands, or the new one does and the old id leads to it: with the replica's mark."""

    async def replace(disk: FaultDisk) -> Storage:
        storage = open_inline(disk)
        await storage.write_manifest([manifest_entry(1)])
        old = storage.create_log("p", 1)
        old.append([frame_for(old, [b"old"])])
        old.set_recovering(recovering=True, incarnation=2)
        await storage.sync()
        new = storage.create_log("p", 2)
        new.set_start(index=10, term=3, offset=50)
        new.append([frame_for(new, [b"new"], term=4)])
        await storage.sync()
        await storage.replace_log(1, new)
        await storage.checkpoint()
        await storage.write_manifest([manifest_entry(2)])
        await storage.checkpoint()
        return storage

    disk = FaultDisk()
    run(replace(disk))
    rng = random.Random(49)
    for step in range(1, disk.steps + 1):
        disk = FaultDisk()
        disk.cut_after = step
        done = False
        try:
            run(replace(disk))
            done = True
        except (PowerCut, StorageClosed):
            pass
        disk.crash(rng, keep=rng.choice([0.0, 0.5, 1.0]))
        storage = open_inline(disk, seed=5)
        replaced = 2 in storage.logs and storage.logs[2].last_index == 11 and 1 not in storage.logs
        if replaced:
            assert storage.logs[2].recovering and storage.logs[2].incarnation >= 2
            assert 2 == storage.resolve(1) or [entry.log_id for entry in storage.manifest.entries] == [2]
        elif storage.manifest.entries and 1 in storage.logs:
            assert 1 == storage.resolve(1) and storage.logs[1].last_index <= 1
        assert replaced or not done
