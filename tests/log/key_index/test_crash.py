"""Power that fails while a key index is written: afterwards there is a whole one, or none."""

from __future__ import annotations

import random

from laminar.log import Storage
from laminar.log.key_index.lookup import KeyIndex
from laminar.log.key_index.writer import KeyIndexWriter
from laminar.log.segment.segment import Segment
from tests.disks.fault_disk import FaultDisk, PowerCut
from tests.log.damaged import two_segments
from tests.log.histories import contents, open_inline, run

ENTRIES = 2_000


def write(disk: FaultDisk, segment: Segment) -> None:
    """As a node does (`laminar.node.find.indexing`)."""
    path = f"{segment.file.key_index_path}.new"
    disk.unlink(path)
    writer = KeyIndexWriter(disk.open(path, create=True, exclusive=True), segment.covered, ["key"])
    for n in range(ENTRIES):
        writer.add("key", [(n * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "big")], segment.first_offset)
    writer.finish()
    assert segment.file.install_key_index(path, truncations=segment.truncations)


def test_a_power_loss_at_any_step_leaves_a_whole_index_or_none() -> None:
    """Whatever the disk keeps of what was not synced; also of one that is written over an older one."""

    async def storage_of(disk: FaultDisk, frames: list[bytes]) -> Storage:
        storage = open_inline(disk)
        assert contents(storage.logs[1]) == frames
        return storage

    disk = FaultDisk()
    frames = run(two_segments(disk))
    rng = random.Random(1)
    left = set[bool]()
    for step in range(40):
        for has_older in (False, True):
            trial = disk.copy()
            storage = run(storage_of(trial, frames))
            (segment,) = storage.logs[1].sealed_segments()
            if has_older:
                write(trial, segment)
                trial.sync_directory(segment.file.directory)
            trial.cut_after = trial.steps + step
            try:
                write(trial, segment)
            except PowerCut:
                pass
            trial.crash(rng, keep=rng.choice([0.0, 0.5, 1.0]))
            storage = run(storage_of(trial, frames))
            (segment,) = storage.logs[1].sealed_segments()
            is_there = trial.exists(segment.file.key_index_path)
            assert is_there or not has_older
            if is_there:
                index = KeyIndex(segment.file.open_key_index())
                index.check()
                assert index.covered == segment.covered
            left.add(is_there)
    assert left == {False, True}
