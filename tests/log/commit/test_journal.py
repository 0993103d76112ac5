"""The journal's frames after a crash: torn ones, rotten ones, and those in files that are used again.

Numbers are those of docs/pitfalls.md: 28, 29, 32.
"""

from __future__ import annotations

import random

import pytest

from laminar.log.format.journal_codec import (
    BLOCK_SIZE,
    HEAD_SIZE,
    PAIR,
    RECORD,
    FrameHead,
    RecordKind,
    encode_frame,
    record_head,
)
from laminar.log.format.settings import StorageSettings
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import HOME, History, frame_for, open_inline, run, settle

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
        # After a loss of power frames may be torn; after a kill they are not.
        disk.crash(random.Random(1), keep=1.0)
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
        # After a loss of power frames may be torn; after a kill they are not.
        disk.crash(random.Random(1), keep=1.0)
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

        def files() -> int:
            return len([name for name in disk.list(HOME) if name.startswith("journal-")])

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
        # By checkpoints that begin by themselves; how far the last one is depends on the machine.
        assert files() < 50
        await settle(history.storage)
        await history.storage.checkpoint()
        assert files() <= 3
        for _ in range(3):
            disk.crash(random.Random(1), keep=0.0)
            storage = open_inline(disk, settings=settings)
            history.check(storage)

    run(main())
