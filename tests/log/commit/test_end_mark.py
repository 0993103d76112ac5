"""The end of a journal: what nothing behind it vouches for, and what tells that it is missing all the same.

A process that was killed leaves what it wrote in memory, so a later whole frame proves all before it. A loss
of power may tear whatever was not synced.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable

import pytest

from laminar.log import Log
from laminar.log.commit.end_mark import NAME
from laminar.log.format.flush_policy import COMMIT, FlushPolicy
from laminar.log.format.journal_codec import BLOCK_SIZE
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import HOME, SMALL, contents, frame_for, open_inline, run, settle
from tests.log.interval_histories import NEVER

JOURNAL = f"{HOME}/journal-1"
# What a flash page holds, and loses together.
PAGE = 16 * 1024
ROOMY = dataclasses.replace(SMALL, first_journal_file_bytes=256 * 1024)


async def _append(log: Log, value: bytes, *, wait: Callable[[], object]) -> None:
    log.append([frame_for(log, [value])])
    await wait()  # type: ignore[misc]


def _written(
    policy: FlushPolicy, *, rest: bool, synced: bool = False
) -> tuple[FaultDisk, list[int], list[bytes]]:
    """Six acknowledged entries of log 1 after a checkpoint and an entry of the commit log 2; where the frames
    of the six begin, and the last ends.
    """
    disk = FaultDisk()

    async def main() -> tuple[list[int], list[bytes]]:
        storage = open_inline(disk, settings=ROOMY)
        log, other = storage.create_log("log", 1, policy=policy), storage.create_log("other", 2)
        storage.record_hard_state(5, term=1, vote=1)
        await _append(other, b"other", wait=storage.sync)
        await storage.checkpoint()
        places = []
        for number in range(6):
            places.append(storage._journal._position)
            await _append(log, b"%d" % number, wait=storage.sync)
        if synced:
            await storage.sync(durable=True)
        if rest:
            await settle(storage)
        return [*places, storage._journal._position], contents(log)

    places, held = run(main())
    return disk, places, held


@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("entry", range(6))
def test_rot_in_what_an_interval_log_acknowledged_is_damage(entry: int, synced: bool) -> None:
    """kill -9 leaves the page cache: a whole frame after the rotten one, or the end mark, proves that it was
    there.
    """
    disk, places, held = _written(NEVER, rest=True, synced=synced)
    disk.kill()
    disk.rot(JOURNAL, places[entry] + 100)

    log = open_inline(disk, seed=2).logs[1]

    assert log.recovering and not log.power_lost
    assert held[:entry] == contents(log)[:entry]


def test_a_torn_frame_of_an_interval_log_is_no_damage() -> None:
    """Power was lost, a frame is torn and a later one whole: the log has lost its last interval, no other."""
    disk, places, held = _written(NEVER, rest=False)
    disk.crash(random.Random(1), keep=1.0)
    disk.rot(JOURNAL, places[2] + 100)

    recovered = open_inline(disk, seed=2)

    assert recovered.logs[1].recovering and recovered.logs[1].power_lost
    assert held[:2] == contents(recovered.logs[1])
    assert not recovered.logs[2].recovering and 1 == recovered.logs[2].last_index
    assert not recovered.lost_hard_states


@pytest.mark.parametrize("what", ["an entry", "a vote", "a mark", "a truncation", "another policy"])
def test_what_must_be_durable_is_so_with_all_frames_before_it(what: str) -> None:
    """Frames that were not synced lie before its own: were one of them torn, it would be dropped with it."""
    for seed in range(20):
        disk = FaultDisk()

        async def main(disk: FaultDisk = disk) -> None:
            storage = open_inline(disk)
            log, other = storage.create_log("log", 1, policy=NEVER), storage.create_log("other", 2)
            await _append(other, b"first", wait=storage.sync)
            for number in range(4):
                await _append(log, b"%d" % number, wait=storage.sync)
            if what == "an entry":
                other.append([frame_for(other, [b"second"])])
            elif what == "a vote":
                storage.record_hard_state(5, term=7, vote=3)
            elif what == "a mark":
                other.set_recovering(recovering=True, incarnation=1)
            elif what == "a truncation":
                other.truncate(1)
            else:
                other.set_policy(NEVER)
            await storage.sync()

        run(main())
        disk.crash(random.Random(seed), keep=0.5)

        recovered = open_inline(disk, seed=2)

        other = recovered.logs[2]
        assert 4 == recovered.logs[1].last_index
        if what == "an entry":
            assert 2 == other.last_index
        elif what == "a vote":
            assert (7, 3) == (recovered.hard_states[5].term, recovered.hard_states[5].vote)
        elif what == "a mark":
            assert other.recovering
        elif what == "a truncation":
            assert 0 == other.last_index
        else:
            assert other.policy == NEVER


def test_what_is_not_synced_is_so_before_the_next_journal_file_begins() -> None:
    """Else a torn end of the one before would take what is durable in the next."""
    for seed in range(10):
        disk = FaultDisk()

        async def main(disk: FaultDisk = disk) -> None:
            storage = open_inline(disk)
            log, other = storage.create_log("log", 1, policy=NEVER), storage.create_log("other", 2)
            first = storage._journal.number
            for number in range(40):
                await _append(log, b"%d" % number * 500, wait=storage.sync)
                if storage._journal.number > first:
                    break
            await _append(other, b"durable", wait=storage.sync)
            assert storage._journal.number > first

        run(main())
        disk.crash(random.Random(seed), keep=0.5)

        assert 1 == open_inline(disk, seed=2).logs[2].last_index


@pytest.mark.parametrize("policy", [COMMIT, NEVER])
@pytest.mark.parametrize("lost", [BLOCK_SIZE, PAGE, PAGE + BLOCK_SIZE, 5 * PAGE])
def test_rot_of_a_flash_page_at_the_journals_end_is_never_silent(lost: int, policy: FlushPolicy) -> None:
    """The mark that tells of the end does not lie in it."""
    disk, places, _ = _written(policy, rest=True)
    disk.kill()
    file = disk.open(JOURNAL)
    start = max(places[-1] - lost, 0)
    file.pwritev([bytes(places[-1] - start)], start)
    file.sync()

    recovered = open_inline(disk, seed=2)

    assert recovered.logs[1].recovering and not recovered.logs[1].power_lost
    # No frame with a vote was written since the checkpoint: the mark says so.
    assert not recovered.lost_hard_states


def test_a_vote_that_went_with_the_journals_end_is_lost_and_not_forgotten() -> None:
    """Frame and twin lie in one flash page."""
    disk = FaultDisk()

    async def main() -> int:
        storage = open_inline(disk, settings=ROOMY)
        storage.record_hard_state(5, term=1, vote=1)
        await storage.sync()
        await storage.checkpoint()
        storage.record_hard_state(5, term=2, vote=3)
        await storage.sync()
        await settle(storage)
        return storage._journal._position

    end = run(main())
    disk.kill()
    disk.rot(JOURNAL, end - 2 * BLOCK_SIZE, 2 * BLOCK_SIZE)

    assert {5} == open_inline(disk, seed=2).lost_hard_states


@pytest.mark.parametrize("left", ["nothing", "half", "all but a byte"])
@pytest.mark.parametrize("rest", [True, False])
def test_a_journal_that_is_shorter_than_it_was_is_damage(left: str, rest: bool) -> None:
    """Files are filled with zeros before use, and no loss of power makes one shorter."""
    disk = FaultDisk()

    async def main() -> None:
        storage = open_inline(disk)
        log = storage.create_log("log", 1)
        await _append(log, b"in the checkpoint", wait=storage.sync)
        await storage.checkpoint()
        await _append(log, b"in the journal", wait=storage.sync)
        if rest:
            await settle(storage)

    run(main())
    disk.crash(random.Random(1), keep=1.0)
    size = len(disk.held(JOURNAL))
    file = disk.open(JOURNAL)
    file.truncate({"nothing": 0, "half": size // 2, "all but a byte": size - 1}[left])
    file.sync()

    assert open_inline(disk, seed=2).logs[1].recovering


def test_an_end_mark_that_is_gone_or_rotten_is_missed_by_nobody() -> None:
    """It says nothing that a whole journal does not say."""
    for gone in (True, False):
        disk, _, held = _written(COMMIT, rest=True)
        disk.kill()
        path = os.path.join(HOME, NAME)
        if gone:
            disk.unlink(path)
        else:
            disk.rot(path, 0, len(disk.held(path)))

        log = open_inline(disk, seed=2).logs[1]

        assert held == contents(log) and not log.recovering


def test_the_end_mark_of_a_former_opening_says_nothing() -> None:
    """The next generation begins with LSNs above, in a file of its own."""
    disk, _, held = _written(COMMIT, rest=True)
    for seed in range(2, 5):
        disk.kill()
        recovered = open_inline(disk, seed=seed)

        assert held == contents(recovered.logs[1])
        assert not recovered.logs[1].recovering
