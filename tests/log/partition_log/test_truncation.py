"""An uncommitted suffix is cut at any batch: in the middle of a segment, at its base, at its last one.

What laminarmq gets wrong here (its defects B4 and B6): a cut at the base of the segment that is written to
leaves a second base in its file, one at the base of an older segment two segments on one file.
"""

from __future__ import annotations

import random

import pytest

from laminar.log import Log, LogStart, Storage
from laminar.log.segment.segment_file import segment_name
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import LOGS, contents, frame_for, open_inline, run, settle

ENTRIES = 14
# A segment is full at 2 KiB: three of these, so the borders are at 1, 4, 7, ... but for the control entry.
VALUE = b"v" * 700
CONTROL = 6


def place_of(log: Log) -> tuple[LogStart, int, int, int, list[int]]:
    """Start, end, and the segments that hold what is between them."""
    firsts = log.segment_first_indexes
    while len(firsts) > 1 and firsts[1] <= log.first_index:
        del firsts[0]  # all it holds is given up; a recovery removes it
    return log.start, log.last_index, log.last_term, log.next_offset, firsts


def fill(storage: Storage, *, start: int) -> list[bytes]:
    log = storage.create_log("t-0", 1)
    frames = []
    for index in range(1, ENTRIES + 1):
        frame = frame_for(log, [] if index == CONTROL else [VALUE, b"%d" % index])
        log.append([frame])
        frames.append(frame)
    if start:
        row = log.index_entry(start)
        log.set_start(index=start, term=row.term, offset=row.next_offset)
    return frames[start:]


async def settled(storage: Storage) -> None:
    await storage.sync()
    await settle(storage)


@pytest.mark.parametrize("start", [0, 4])
@pytest.mark.parametrize("opens", [None, False], ids=["as a leader", "goes on in the segment before"])
@pytest.mark.parametrize("cut", range(1, ENTRIES + 2))
@pytest.mark.parametrize("when", ["in memory", "synced", "in a checkpoint"])
def test_a_suffix_is_cut_at_any_batch(start: int, opens: bool | None, cut: int, when: str) -> None:
    """What is left, what is appended behind it, and nothing else: at once, and after power failed."""
    if cut <= start:
        cut += start

    async def main() -> None:
        disk = FaultDisk()
        storage = open_inline(disk)
        old = fill(storage, start=start)
        if when != "in memory":
            await settled(storage)
        if when == "in a checkpoint":
            await storage.checkpoint()
        log = storage.logs[1]
        before = log.size_bytes

        log.truncate(cut)

        kept = old[: cut - 1 - start]
        assert kept == contents(log)
        assert min(cut - 1, ENTRIES) == log.last_index
        offset = log.next_offset
        assert offset == (2 * log.last_index - 2 * (log.last_index >= CONTROL))
        if cut <= ENTRIES:
            assert log.size_bytes < before
        new = []
        for number in range(4):
            opening = opens if opens is None or log.last_index > log.start.index else None
            new.append(frame_for(log, [b"new %d" % number, VALUE], term=2, opens=opening))
            log.append(new[-1:])
        assert kept + new == contents(log)
        await settled(storage)
        place = place_of(log)

        disk.crash(random.Random(cut), 0.5)
        storage = open_inline(disk)
        log = storage.logs[1]

        assert kept + new == contents(log)
        assert place == place_of(log)
        names = [name for name in disk.list(f"{LOGS}/t-0-{1:016x}") if name.endswith(".log")]
        assert [segment_name(first) for first in log.segment_first_indexes] == names
        for record in range(log.start.offset, log.next_offset):
            index = log.index_of_offset(record)
            assert index is not None
            row = log.index_entry(index)
            assert row.base_offset <= record < row.next_offset
        log.append([frame_for(log, [b"after"], term=3)])
        await settled(storage)
        await storage.close()

    run(main())


def test_a_log_that_is_cut_to_its_start_begins_anew_there() -> None:
    """No entry is left, but the start is: the next one follows it, with its term and offset."""

    async def main() -> None:
        disk = FaultDisk()
        storage = open_inline(disk)
        fill(storage, start=4)
        log = storage.logs[1]
        log.truncate(5)

        assert (4, 8) == (log.last_index, log.next_offset)
        new = frame_for(log, [b"new"], term=2)
        log.append([new])
        await settled(storage)
        disk.crash(random.Random(1), 0.0)

        log = open_inline(disk).logs[1]
        assert [new] == contents(log)
        assert LogStart(4, 1, 8) == LogStart(log.start.index, log.start.term, log.start.offset)

    run(main())


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_deleted_groups_votes_are_forgotten(checkpointed: bool) -> None:
    """They would stay in every checkpoint for ever. Those of others stay."""

    async def main() -> None:
        disk = FaultDisk()
        storage = open_inline(disk)
        for log_id in (1, 2):
            log = storage.create_log(f"t-{log_id}", log_id)
            log.append([frame_for(log, [b"x"])])
            storage.record_hard_state(log_id + 10, term=7, vote=3)
        await settled(storage)
        if checkpointed:
            await storage.checkpoint()
        await storage.delete_log(1, replica_id=11)
        assert [12] == list(storage.hard_states)
        if checkpointed:
            await storage.checkpoint()
        disk.crash(random.Random(1), 0.0)

        storage = open_inline(disk)

        assert ([2], [12]) == (list(storage.logs), list(storage.hard_states))
        assert [12] == list(storage._writer.hard_states), "nor in the checkpoint"

    run(main())
