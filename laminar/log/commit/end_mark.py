"""The end mark: a small file beside the journal that says how far the journal reaches.

Each frame of a journal proves that those before it were written, and nothing in the journal proves it of the
last one. The end mark does, once the journal is idle. It is a file of its own, so that damage to the end of
the journal, however long, does not also remove the proof. It has two slots, which are written in turn: a torn
write of one leaves the other.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

from laminar.checksum import crc32c
from laminar.log.disk.disk import Buffer, Disk
from laminar.log.disk.errors import DiskError, NewerFormat
from laminar.log.format.journal_codec import BLOCK_SIZE

NAME = "end-mark"
_MAGIC = b"LMNE"
_VERSION = 1
_FAILED = 1
_SLOTS = 2
# magic, version, flags, reserved, generation, its random part, lsn, durable_lsn, hard_state_lsn; then the CRC
_MARK = struct.Struct("<4sBBHQIxxxxQQQ")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of a generation's journal: written up to `lsn`, synced up to `durable_lsn`.

    `hard_state_lsn` is the LSN of the last frame among them with hard states (0: none). `seed` is the
    generation's random part. `failed`: a sync failed, so frames above `durable_lsn` may be lost even if only
    the process has ended since, and not the machine.
    """

    generation: int
    seed: int
    lsn: int
    durable_lsn: int
    hard_state_lsn: int
    failed: bool = False

    def encode(self) -> bytes:
        """Return the mark as a slot's bytes."""
        flags = _FAILED if self.failed else 0
        lsns = (self.lsn, self.durable_lsn, self.hard_state_lsn)
        packed = _MARK.pack(_MAGIC, _VERSION, flags, 0, self.generation, self.seed, *lsns)
        return (packed + _CRC.pack(crc32c(packed))).ljust(BLOCK_SIZE, b"\0")


def decode_end(slot: Buffer) -> End | None:
    """Return the mark in a slot; None if no whole mark was ever written there.

    Raises:
        NewerFormat: A newer program wrote it.
    """
    if len(slot) < _MARK.size + _CRC.size:
        return None
    magic, version, flags, _, generation, seed, lsn, durable_lsn, hard_state_lsn = _MARK.unpack_from(slot)
    (stated,) = _CRC.unpack_from(slot, _MARK.size)
    if magic != _MAGIC or crc32c(bytes(slot[: _MARK.size])) != stated:
        return None
    if version > _VERSION:
        raise NewerFormat(NAME, version, known=_VERSION)
    return End(
        generation=generation,
        seed=seed,
        lsn=lsn,
        durable_lsn=durable_lsn,
        hard_state_lsn=hard_state_lsn,
        failed=bool(flags & _FAILED),
    )


class EndMark:
    """The writer of one generation's end marks.

    It is opened before the generation's checkpoint is written, and `write` is for the time after: until then
    the file must keep the marks of the generation before.
    """

    def __init__(self, disk: Disk, store: str) -> None:
        """Open the file, made if missing; its name is durable with the next sync of the directory."""
        path = os.path.join(store, NAME)
        new = not disk.exists(path)
        self._file = disk.open(path, create=new)
        if new:
            self._file.pwritev([bytes(_SLOTS * BLOCK_SIZE)], 0)
            self._file.sync()
        self._slot = 0

    def write(self, end: End, *, sync: bool) -> None:
        """Replace the older mark. With `sync` it is durable on return; else it survives the process only."""
        self._file.pwritev([end.encode()], self._slot * BLOCK_SIZE)
        if sync:
            self._file.sync()
        self._slot = (self._slot + 1) % _SLOTS

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_slots(disk: Disk, store: str) -> list[bytes]:
    """Return the bytes of each slot; empty for an unreadable one, and no slots if there is no file."""
    path = os.path.join(store, NAME)
    if not disk.exists(path):
        return []
    slots = []
    file = disk.open(path)
    try:
        for slot in range(_SLOTS):
            try:
                slots.append(bytes(file.pread(BLOCK_SIZE, slot * BLOCK_SIZE)))
            except DiskError as error:
                if not error.is_damage:
                    raise
                slots.append(b"")
    finally:
        file.close()
    return slots


def read_end(disk: Disk, store: str, *, generation: int, seed: int) -> End | None:
    """Return the newest whole mark of this generation.

    None if its journal was never idle, or if no mark is whole.
    """
    found = [end for slot in read_slots(disk, store) if (end := decode_end(slot)) is not None]
    ours = [end for end in found if (end.generation, end.seed) == (generation, seed)]
    return max(ours, key=lambda end: (end.lsn, end.durable_lsn, end.failed), default=None)
