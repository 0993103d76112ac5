"""The state machine's 10,000 steps; and torn journals and segments of any length."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from laminar.log.format.settings import StorageSettings
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import HOME, History, contents, open_inline, run
from tests.log.machine import StorageMachine

_RUN = settings(
    stateful_step_count=50,
    deadline=None,
    # A failure is shown with its steps; explaining it line by line takes minutes.
    phases=[phase for phase in settings().phases if phase is not Phase.explain],
    suppress_health_check=list(HealthCheck),
)


def _run(examples: int) -> None:
    """Everything that may be done to a log and its disk, and none of the rarer things is missing."""
    done = StorageMachine.done
    done.clear()

    run_state_machine_as_test(StorageMachine, settings=settings(_RUN, max_examples=examples))

    print(f"state machine: {dict(done)}")
    assert done["step"] >= 35 * examples, done
    assert min(done[name] for name in ("down", "other shards", "damage", "reuse")) >= examples / 3, done


def test_three_thousand_steps_of_a_storage_agree_with_lists() -> None:
    _run(90)


@pytest.mark.long
def test_ten_thousand_steps_of_a_storage_agree_with_lists() -> None:
    """With the long profile (make log-long) many times as many."""
    _run(max(290, settings().max_examples))


def test_a_torn_journal_recovers_the_synced_prefix_or_more() -> None:
    """Cut off at any 512 bytes, the journal gives back a prefix of the frames, whole frames only."""

    async def main() -> None:
        source = FaultDisk()
        roomy = StorageSettings(first_journal_file_bytes=128 * 1024)
        history = History(open_inline(source, settings=roomy))
        history.create(1)
        ends: list[tuple[int, int]] = []
        for number in range(6):
            history.write(1, b"%d" % number * (number * 900))
            if number % 2:
                history.vote(5, number, 1)
            await history.storage.sync()
            ends.append((history.storage._journal._position, number + 1))
        data = bytes(source.open(f"{HOME}/journal-1").pread(1 << 20, 0))
        for cut in range(4096, ends[-1][0] + 512, 512):
            disk = FaultDisk()
            open_inline(disk, settings=roomy)
            disk.kill()
            file = disk.open(f"{HOME}/journal-1")
            file.pwritev([data[:cut] + bytes(len(data) - cut)], 0)
            file.sync()

            log = open_inline(disk, seed=3).logs.get(1)

            held = 0 if log is None else log.last_index
            whole = max((count for end, count in ends if end <= cut), default=0)
            assert whole <= held <= whole + 1
            if log is not None:
                assert not log.recovering
                assert list(history.pictures[-1].logs[1][1][:held]) == contents(log)

    run(main())


def test_torn_segments_give_back_everything_acknowledged() -> None:
    """Behind a checkpoint the segments may be cut off at any byte, or end in garbage: the journal has it all.

    The log has several segments; some lie before the checkpoint, some behind, one on both sides.
    """

    async def prepare() -> tuple[FaultDisk, History]:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        for number in range(12):
            history.write(1, b"%d" % number * 300, opens=number in (3, 5, 9))
            await history.sync()
            if number == 6:
                await history.storage.checkpoint()
        return disk, history

    disk, history = run(prepare())
    log = history.storage.logs[1]
    assert [1, 4, 6, 10] == log.segment_first_indexes
    # What the checkpoint does not vouch for: the end of the third segment, and all of the fourth.
    kept = log.index_entry(7).position + log.index_entry(7).size
    torn = 0
    for first, synced in ((6, kept), (10, 0)):
        for suffix in ("log", "index"):
            path = f"{log.files.directory}/{first:020d}.{suffix}"
            # The index of a segment is made with the first rows that are written to it.
            size = len(disk.held(path)) if disk.exists(path) else 0
            for cut in range(0 if suffix == "index" else synced, size + 1, 37):
                copy = disk.copy()
                copy.kill()
                file = copy.open(path, create=True)
                file.truncate(cut)
                if cut % 2:
                    file.pwritev([b"\xa5" * 100], cut)
                recovered = open_inline(copy, seed=cut)
                assert history.pictures[-1].logs[1] == (0, tuple(contents(recovered.logs[1])))
                history.check(recovered)
                torn += 1
    assert torn > 60
