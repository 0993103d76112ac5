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
    """The content of an end mark: how far the journal of a generation was written and synced.

    A generation is the time from one start of the storage to the next; `seed` is its random part. `lsn` is
    the LSN of the last frame written, `durable_lsn` that of the last frame synced, and `hard_state_lsn` that
    of the last frame with hard states (terms and votes of replicas; 0: there is none). `failed` is set if a
    sync failed: then frames above `durable_lsn` may be lost even if the machine was not restarted since.
    """

    generation: int
    seed: int
    lsn: int
    durable_lsn: int
    hard_state_lsn: int
    failed: bool = False

    def encode(self) -> bytes:
        """Return the bytes of the mark, as they fill one slot of the file."""
        flags = _FAILED if self.failed else 0
        lsns = (self.lsn, self.durable_lsn, self.hard_state_lsn)
        packed = _MARK.pack(_MAGIC, _VERSION, flags, 0, self.generation, self.seed, *lsns)
        return (packed + _CRC.pack(crc32c(packed))).ljust(BLOCK_SIZE, b"\0")


def decode_end(slot: Buffer) -> End | None:
    """Return the mark in the bytes of a slot; None if they hold no whole mark.

    Raises:
        NewerFormat: A newer program wrote the mark.
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

    Call `write` only after the generation's first checkpoint is durable: until then a start would still read
    the journal of the generation before, and needs the marks of that one.
    """

    def __init__(self, disk: Disk, store: str) -> None:
        """Open the file of the marks, or make it; its name is durable with the next sync of `store`."""
        path = os.path.join(store, NAME)
        new = not disk.exists(path)
        self._file = disk.open(path, create=new)
        if new:
            self._file.pwritev([bytes(_SLOTS * BLOCK_SIZE)], 0)
            self._file.sync()
        self._slot = 0

    def write(self, end: End, *, sync: bool) -> None:
        """Write a mark over the older one of the two.

        With `sync` the mark is durable on return. Without, it survives the end of the process, but not that
        of the machine.
        """
        self._file.pwritev([end.encode()], self._slot * BLOCK_SIZE)
        if sync:
            self._file.sync()
        self._slot = (self._slot + 1) % _SLOTS

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_slots(disk: Disk, store: str) -> list[bytes]:
    """Return the bytes of each slot, b"" for an unreadable slot; an empty list if there is no file."""
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
    """Return the newest whole mark of a generation.

    None if the journal was never idle in that generation (so no mark was written), or if no mark is whole.
    """
    found = [end for slot in read_slots(disk, store) if (end := decode_end(slot)) is not None]
    ours = [end for end in found if (end.generation, end.seed) == (generation, seed)]
    return max(ours, key=lambda end: (end.lsn, end.durable_lsn, end.failed), default=None)
