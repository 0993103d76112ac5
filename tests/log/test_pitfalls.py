"""The storage's pitfalls of RELIABILITY.md, each by its number."""

from __future__ import annotations

import asyncio
import errno
import random
from dataclasses import replace

import pytest

from laminar.log import (
    BrokenChain,
    LogStart,
    Map,
    ReplicaEntry,
    Storage,
    StorageClosed,
    recover_node,
    shard_home,
)
from laminar.log.codec import (
    BLOCK_SIZE,
    HEAD_SIZE,
    PAIR,
    RECORD,
    FrameHead,
    RecordKind,
    encode_frame,
    record_head,
)
from laminar.log.errors import StorageError
from laminar.log.segment import index_name
from laminar.log.settings import StorageSettings
from tests.disks.fault_disk import FaultDisk, PowerCut
from tests.log.histories import (
    HOME,
    SMALL,
    History,
    contents,
    frame_for,
    open_inline,
    picture_of,
    run,
    settle,
)

JOURNAL = f"{HOME}/journal-1"


def test_pitfall_28_a_torn_frame_hides_a_later_whole_one() -> None:
    """A frame torn, a later one of another log whole: both are dropped, no log has a hole."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        for log_id in (1, 2):
            history.create(log_id)
            history.write(log_id, b"kept")
        await history.sync()
        journal = history.storage._journal
        before, position = journal.durable_lsn, journal._position
        history.write(1, b"torn")
        await history.storage.sync()
        # As if both had been in flight together: the second does not vouch for the first.
        journal.durable_lsn = before
        history.write(2, b"whole")
        await history.storage.sync()
        disk.kill()
        disk.rot(JOURNAL, position + 100)

        storage = open_inline(disk)

        assert {1: 1, 2: 1} == {log_id: log.last_index for log_id, log in storage.logs.items()}
        history.check(storage)

    run(main())


def test_pitfall_28_a_vote_in_a_whole_twin_behind_a_torn_frame_counts() -> None:
    """The torn frame's entry is dropped, its vote is taken from the twin."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        await history.sync()
        position = history.storage._journal._position
        history.vote(5, 9, 2)
        history.write(1, b"torn")
        await history.storage.sync()
        disk.kill()
        disk.rot(JOURNAL, position + 100)

        storage = open_inline(disk)

        assert 0 == storage.logs[1].last_index
        assert (9, 2) == (storage.hard_states[5].term, storage.hard_states[5].vote)
        assert not storage.logs[1].recovering
        assert not storage.lost_hard_states

    run(main())


def test_pitfall_28_a_clients_body_never_passes_for_a_frame() -> None:
    """A body holds what looks like journal frames; the frame around it is torn, and a scan finds them."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        history.vote(5, 1, 1)
        await history.sync()
        await settle(history.storage)
        journal = history.storage._journal
        position = journal._position
        # A guess at everything but the seed, which is the generation's secret: a vote of replica 5, and an
        # LSN right behind what is durable.
        payload = PAIR.pack(99, 7)
        forged = []
        for lsn in range(journal.lsn + 1, journal.lsn + 4):
            head = FrameHead(
                flags=0,
                generation=journal.generation,
                lsn=lsn,
                durable_lsn=0,
                hard_state_lsn=0,
                records=1,
                length=RECORD.size + len(payload),
            )
            forged += encode_frame(head, [record_head(RecordKind.HARD_STATE, 5, 16), payload], 0)
        value = b"".join(map(bytes, forged))
        frames = (frame_for(history.storage.logs[1], [bytes(shift) + value]) for shift in range(BLOCK_SIZE))
        on_border = [
            frame for frame in frames if (HEAD_SIZE + RECORD.size + frame.index(value)) % BLOCK_SIZE == 0
        ]
        history.append(1, on_border[0])
        await history.storage.sync()
        disk.kill()
        disk.rot(JOURNAL, position + 10)

        storage = open_inline(disk)

        assert (1, 1) == (storage.hard_states[5].term, storage.hard_states[5].vote)
        history.check(storage)

    run(main())


@pytest.mark.parametrize("rest", [True, False])
def test_pitfall_29_rot_in_the_last_acknowledged_batch_is_damage(rest: bool) -> None:
    """With the journal at rest the idle marker vouches for the batch; without it it would pass for torn."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        history.vote(5, 3, 1)
        history.write(1, b"first")
        await history.sync()
        position = history.storage._journal._position
        history.write(1, b"acknowledged")
        await history.sync()
        if rest:
            await settle(history.storage)
        disk.kill()
        disk.rot(JOURNAL, position + 100)

        storage = open_inline(disk)

        assert 1 == storage.logs[1].last_index
        assert rest == storage.logs[1].recovering
        # One frame is missing, and a frame with votes has a twin: no vote can be.
        assert not storage.lost_hard_states

    run(main())


@pytest.mark.parametrize(("copies", "lost"), [((0,), set()), ((1,), set()), ((0, 1), {5, 6})])
def test_pitfall_29_rot_in_one_copy_of_a_vote_changes_nothing(
    copies: tuple[int, ...], lost: set[int]
) -> None:
    """Both copies gone: every replica whose newest vote may have been there is lost."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        history.vote(5, 1, 1)
        history.vote(6, 1, 1)
        history.vote(7, 1, 1)
        await history.sync()
        position = history.storage._journal._position
        history.vote(5, 2, 2)
        await history.sync()
        history.vote(7, 3, 3)
        await history.sync()
        await settle(history.storage)
        disk.kill()
        for copy in copies:
            disk.rot(JOURNAL, position + copy * BLOCK_SIZE + 70)

        storage = open_inline(disk)

        assert lost == storage.lost_hard_states
        assert (3, 3) == (storage.hard_states[7].term, storage.hard_states[7].vote)
        if not lost:
            assert (2, 2) == (storage.hard_states[5].term, storage.hard_states[5].vote)

    run(main())


def test_pitfall_29_a_gap_without_votes_loses_no_vote() -> None:
    """Two adjacent frames of entries rot: the logs are marked, but no replica is lost."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        history.vote(5, 1, 1)
        await history.sync()
        position = history.storage._journal._position
        for value in (b"a", b"b", b"c"):
            history.write(1, value)
            await history.sync()
        await settle(history.storage)
        disk.kill()
        disk.rot(JOURNAL, position, 2 * BLOCK_SIZE)

        storage = open_inline(disk)

        assert storage.logs[1].recovering
        assert 0 == storage.logs[1].last_index
        assert not storage.lost_hard_states

    run(main())


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
        path = history.storage.logs[1]._segments[0].file.path
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


def test_pitfall_32_votes_of_idle_groups_survive_a_hundred_journal_files() -> None:
    """Old files go when a checkpoint has passed them; what only they held stands in the checkpoint."""

    async def main() -> None:
        disk = FaultDisk()
        settings = StorageSettings(
            first_journal_file_bytes=8192,
            journal_file_bytes=8192,
            checkpoint_bytes=8192,
            recent_bytes=1 << 20,
            idle_marker_ms=1,
        )
        history = History(open_inline(disk, settings=settings))
        history.create(1)
        history.create(2)
        history.vote(77, 12, 3)
        history.write(2, b"idle")
        await history.sync()
        for number in range(210):
            history.write(1, b"%d" % number)
            await history.sync()
        assert history.storage._journal.number > 100
        assert len([name for name in disk.list(HOME) if name.startswith("journal-")]) <= 3
        for _ in range(3):
            disk.crash(random.Random(1), keep=0.0)
            storage = open_inline(disk, settings=settings)
            history.check(storage)

    run(main())


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


def _entry(log_id: int) -> ReplicaEntry:
    return ReplicaEntry(
        log_id=log_id,
        replica_id=100 + log_id,
        group=bytes(16),
        topic="t",
        partition=log_id,
        partition_hash=log_id,
        state="made",
    )


def _shard_of(entry: ReplicaEntry, shards: int) -> int:
    return entry.partition_hash % shards


async def _fill(disk: FaultDisk, shards: Map, logs: int, value: bytes) -> dict[int, list[bytes]]:
    """Write to every log of a node through its shards; returns what is acknowledged, by log."""
    held: dict[int, list[bytes]] = {}
    for shard in range(shards.shards):
        storage = open_inline(disk, home=shard_home("data", shards, shard))
        mine = [_entry(log_id) for log_id in range(1, logs + 1) if log_id % shards.shards == shard]
        await storage.write_manifest(mine)
        for entry in mine:
            log = storage.logs.get(entry.log_id) or storage.create_log(f"log-{entry.log_id}", entry.log_id)
            log.append([frame_for(log, [value])])
            storage.record_hard_state(entry.replica_id, term=log.last_index, vote=1)
        await storage.sync()
        held |= {log_id: contents(log) for log_id, log in storage.logs.items()}
        await settle(storage)
    return held


def _check_node(disk: FaultDisk, shards: Map, held: dict[int, list[bytes]]) -> None:
    found: dict[int, list[bytes]] = {}
    for shard in range(shards.shards):
        storage = open_inline(disk, home=shard_home("data", shards, shard))
        for entry in storage.manifest.entries:
            assert shard == _shard_of(entry, shards.shards)
            assert len(held[entry.log_id]) == storage.hard_states[entry.replica_id].term
            assert not storage.logs[entry.log_id].recovering
        found |= {log_id: contents(log) for log_id, log in storage.logs.items()}
        assert not storage.lost_hard_states
    assert held == found


def _recover(disk: FaultDisk, shards: int, seed: int = 1) -> Map:
    return recover_node(
        disk, "data", shards=shards, shard_of=_shard_of, settings=SMALL, rng=random.Random(seed)
    )


def test_pitfall_36_restart_with_fewer_and_with_more_shards() -> None:
    """2, 4, 1 and again 2 shards: everything acknowledged is there, with its votes, under its new owner."""

    async def main() -> None:
        disk = FaultDisk()
        rng = random.Random(36)
        for count in (2, 4, 1, 1, 2):
            shards = _recover(disk, count)
            held = await _fill(disk, shards, 5, b"with %d" % count)
            disk.crash(rng, keep=0.0)
        shards = _recover(disk, 3)
        disk.kill()
        _check_node(disk, shards, held)
        assert {f"{shards.number}-{shard}" for shard in range(3)} == set(disk.list("data/shards"))

    run(main())


def test_pitfall_36_a_crash_at_any_step_of_the_change_leaves_old_or_new_homes() -> None:
    """Power goes at a step of a start with more shards, and the next start asks for yet another number."""

    async def main() -> None:
        rng = random.Random(36)
        step = 0
        done = False
        while not done:
            step += 3
            disk = FaultDisk()
            held = await _fill(disk, _recover(disk, 2), 3, b"value")
            disk.kill()
            disk.cut_after = disk.steps + step
            try:
                _recover(disk, 3)
                done = True
            except PowerCut:
                pass
            disk.crash(rng, keep=rng.choice([0.0, 0.5]))
            shards = _recover(disk, rng.choice([2, 3, 1]), seed=2)
            disk.kill()
            _check_node(disk, shards, held)

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


def test_pitfall_48_a_disk_full_during_a_checkpoint_stops_nothing() -> None:
    """The former checkpoint and the journal stand; commits and votes go on."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        history.write(1, b"before")
        await history.sync()
        disk.error = lambda operation, path: errno.ENOSPC if "checkpoint" in path else None
        with pytest.raises(StorageError):
            await history.storage.checkpoint()
        history.write(1, b"meanwhile")
        history.vote(5, 2, 1)
        await history.sync()
        disk.crash(random.Random(1), keep=0.0)
        storage = open_inline(disk)
        history.check(storage)

    run(main())


def test_pitfall_48_no_room_for_the_next_journal_file_refuses_appends_but_not_votes() -> None:
    """`refusal` names the disk while the present file has room left, and is lifted when room is back."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        disk.error = lambda operation, path: (
            errno.ENOSPC if operation in ("create", "write") and "spare" in path else None
        )
        for _ in range(3):
            history.write(1, b"x" * 3000)
            await history.sync()
        assert "disk" == history.storage.refusal
        history.vote(5, 2, 1)
        await history.sync()
        disk.error = None
        history.vote(5, 3, 1)
        await history.sync()
        async with asyncio.timeout(30):
            while history.storage.refusal:  # noqa: ASYNC110  # it tells nobody
                await asyncio.sleep(0.001)
        disk.crash(random.Random(1), keep=0.0)
        history.check(open_inline(disk))

    run(main())


@pytest.mark.parametrize("what, named", [("spare-", "disk"), ("checkpoint-", "journal")])
def test_pitfall_48_a_refusal_ends_when_there_is_room_though_nobody_appends(what: str, named: str) -> None:
    """While appends are refused no frame comes that could ask: what failed is tried again by itself."""

    async def main() -> None:
        disk = FaultDisk()
        settings = replace(SMALL, retry_ms=5, max_journal_files=3, checkpoint_bytes=16 * 1024)
        history = History(open_inline(disk, settings=settings))
        storage = history.storage
        history.create(1)
        room = False
        tried = asyncio.Event()

        def fail(operation: str, path: str) -> int | None:
            if operation in ("create", "write") and what in path:
                tried.set()
                return None if room else errno.ENOSPC
            return None

        disk.error = fail
        while storage.refusal != named:
            history.write(1, b"x" * 3000)
            await history.sync()
        for _ in range(3):
            tried.clear()
            await asyncio.wait_for(tried.wait(), 20)
        assert named == storage.refusal
        room = True
        tried.clear()
        await asyncio.wait_for(tried.wait(), 20)
        assert not bool(storage.refusal)
        history.write(1, b"again")
        await history.sync()
        disk.crash(random.Random(1), keep=0.0)
        history.check(open_inline(disk))

    run(main())


def test_pitfall_49_a_crash_at_any_step_of_a_logs_replacement() -> None:
    """Either the old log stands, or the new one does and the old id leads to it: with the replica's mark."""

    async def replace(disk: FaultDisk) -> Storage:
        storage = open_inline(disk)
        await storage.write_manifest([_entry(1)])
        old = storage.create_log("p", 1)
        old.append([frame_for(old, [b"old"])])
        old.mark(recovering=True, incarnation=2)
        await storage.sync()
        new = storage.create_log("p", 2)
        new.set_start(index=10, term=3, offset=50)
        new.append([frame_for(new, [b"new"], term=4)])
        await storage.sync()
        await storage.replace_log(1, new)
        await storage.checkpoint()
        await storage.write_manifest([_entry(2)])
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
