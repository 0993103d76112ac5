"""A log in two segments, what rots in it, and what a reader then gets."""

from __future__ import annotations

from laminar.log import DamagedRange, Log, Storage
from laminar.log.segment.segment_file import segment_name
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import contents, frame_for, open_inline

VALUES = [bytes([letter]) * 700 for letter in b"abcdefgh"]
PER_SEGMENT = 4


async def two_segments(disk: FaultDisk) -> list[bytes]:
    """A log with entries 1 to 8 in two segments, checkpointed and closed; returns its frames."""
    storage = open_inline(disk)
    log = storage.create_log("t-0", 1)
    for at, value in enumerate(VALUES):
        log.append([frame_for(log, [value, value], term=1 + at // 3, opens=at % PER_SEGMENT == 0)])
    await storage.sync()
    frames = contents(log)
    await storage.close()
    disk.kill()
    return frames


def segment_path(storage: Storage, first: int) -> str:
    return f"{storage.logs[1].files.directory}/{segment_name(first)}"


async def served(log: Log) -> list[bytes | None]:
    """Each entry as a reader gets it; None for one that is named as damaged."""
    found: list[bytes | None] = []
    for index in range(log.first_index, log.last_index + 1):
        try:
            found += [bytes(frame) for frame in await log.read(index, index, max_bytes=1)]
        except DamagedRange as damage:
            assert damage.first_index <= index <= damage.last_index
            found.append(None)
    return found


def without(frames: list[bytes], *indexes: int) -> list[bytes | None]:
    return [None if index in indexes else frame for index, frame in enumerate(frames, 1)]


def rot(disk: FaultDisk, storage: Storage, index: int, *, at: int = 200, size: int = 8) -> None:
    """Turn bytes over inside an entry's stored frame."""
    log = storage.logs[1]
    disk.rot(
        segment_path(storage, log.segment_of(index).first_index), log.index_entry(index).position + at, size
    )
