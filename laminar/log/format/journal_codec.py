"""The bytes of a journal: frames, and the records in them.

Pure: it builds and reads buffers, and knows neither files nor threads. A frame begins on a 4 KiB boundary: a
fixed head, then records back to back, then zeros up to the next boundary. Its CRC is seeded with the random
part of the generation. So a scan that goes on after damaged bytes cannot take the body of a client's batch
for a frame.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from laminar.checksum import crc32c
from laminar.log.disk.disk import Buffer

BLOCK_SIZE = 4096
MAGIC = b"LMNJ"
VERSION = 1

# magic, version, flags, reserved, generation, lsn, durable_lsn, hard_state_lsn, records, length of the body,
# file_size, crc32c over the head up to here and the body
_HEAD = struct.Struct("<4sBBHQQQQIIQ")
_CRC = struct.Struct("<I")
HEAD_SIZE = 64
assert _HEAD.size + _CRC.size <= HEAD_SIZE
_CRC_POSITION = HEAD_SIZE - _CRC.size

# kind, flags, reserved, length of the payload, key (a replica id for hard states, else a log id)
RECORD = struct.Struct("<BBHIQ")


class RecordKind(IntEnum):
    """The kinds of journal records, each with the content of its payload. The numbers never change."""

    FULL = 1  # a whole batch
    TRUNCATE = 2  # (index, term) of the first entry cut
    HARD_STATE = 3  # (term, vote) of a replica
    LOG_START = 4  # (index, term, offset, time) of the entry before the log's first
    RESET = 5  # this log replaces another: old log id
    UNSYNCED = 6  # entries of an `interval` log may be acknowledged before they are synced
    CREATED = 7  # a log's name
    DELETED = 8  # the log goes to the trash, and a replica's hard state is forgotten: replica id, or empty
    MARK = 9  # a `RecoveryReason`, incarnation, and the least term where there is one
    CARRIED = 10  # (LSN of the checkpoint after which it counts, kind), then that kind's payload
    POLICY = 11  # a flush policy


class RecoveryReason(IntEnum):
    """The reasons why a replica may have forgotten what it acknowledged; `NO`: it has not."""

    NO = 0
    DAMAGED = 1
    POWER_LOST = 2  # an `interval` log whose last entries were perhaps not synced


class FrameFlag(IntEnum):
    """The bits in the flags of a journal frame."""

    TWIN = 1  # the second copy of the hard states of the frame before it
    HARD_STATE = 2  # holds hard states, so a twin follows (or this is it)
    MARKER = 4  # empty: the opening of a generation


PAIR = struct.Struct("<QQ")
START = struct.Struct("<QQQq")
ONE = struct.Struct("<Q")
MARK = struct.Struct("<BxxxxxxxQ")
MARK_WITH_TERM = struct.Struct("<BxxxxxxxQQ")
CARRIED = struct.Struct("<QB7x")
# interval_ms (0: commit), interval_records
POLICY = struct.Struct("<QQ")


def record_head(kind: RecordKind, key: int, length: int) -> bytes:
    """Return the head of a record: kind, key and length of its payload."""
    return RECORD.pack(kind, 0, 0, length, key)


def encode_mark(why: RecoveryReason, *, incarnation: int, least_term: int) -> bytes:
    """Return the payload of a MARK record, which sets a log's recovery state (`Log.set_recovering`)."""
    if least_term:
        return MARK_WITH_TERM.pack(why, incarnation, least_term)
    return MARK.pack(why, incarnation)


def decode_mark(payload: memoryview) -> tuple[int, int, int]:
    """Return (`RecoveryReason`, incarnation, least term or 0) of a MARK record."""
    if len(payload) == MARK.size:
        return (*MARK.unpack(payload), 0)
    why, incarnation, least_term = MARK_WITH_TERM.unpack(payload)
    return why, incarnation, least_term


@dataclass(slots=True, kw_only=True)
class FrameHead:
    """The head of a journal frame, whose log sequence number is `lsn`.

    `durable_lsn` is the LSN of the last frame that was synced when this frame was written. `hard_state_lsn`
    is the LSN of the last frame before this one with hard states (0: none in this generation): from it
    recovery knows whether missing frames may have had any. `records` is the number of records and `length`
    their bytes. `file_size` is the size to which the file was filled with zeros and synced before its first
    frame (0: it was not filled): a file that is shorter is damaged.
    """

    flags: int
    generation: int
    lsn: int
    durable_lsn: int
    hard_state_lsn: int
    records: int
    length: int
    file_size: int = 0

    @property
    def stored_size(self) -> int:
        """Bytes of the frame in its file, with the zeros up to the next boundary."""
        return padded_size(self.length)


def padded_size(length: int) -> int:
    """Return how many bytes a frame with a body of `length` bytes takes in its file."""
    return -(-(HEAD_SIZE + length) // BLOCK_SIZE) * BLOCK_SIZE


# Up to this size a frame's parts are joined: one copy costs less than a CRC call and an iovec per part.
_JOIN_BYTES = 128 * 1024
# In larger frames, only parts from this size up stay separate.
_APART_BYTES = 16 * 1024


def encode_frame(head: FrameHead, parts: Sequence[Buffer], seed: int) -> list[Buffer]:
    """Return the buffers of a whole frame, to be written in order: head, records, padding.

    `parts` are the records; large ones are not copied. `seed` is the random part of the generation.
    """
    body: list[Buffer] = [b"".join(parts)] if head.length <= _JOIN_BYTES else _join_small(parts)
    packed = _HEAD.pack(
        MAGIC,
        VERSION,
        head.flags,
        0,
        head.generation,
        head.lsn,
        head.durable_lsn,
        head.hard_state_lsn,
        head.records,
        head.length,
        head.file_size,
    )
    packed += bytes(_CRC_POSITION - len(packed))
    checksum = crc32c(packed, seed)
    for part in body:
        checksum = crc32c(part, checksum)
    padding = bytes(head.stored_size - HEAD_SIZE - head.length)
    return [packed + _CRC.pack(checksum), *body, padding]


def _join_small(parts: Sequence[Buffer]) -> list[Buffer]:
    """Return the same bytes in fewer buffers: runs of small parts are joined, large ones kept."""
    joined: list[Buffer] = []
    small: list[Buffer] = []
    for part in parts:
        if len(part) < _APART_BYTES:
            small.append(part)
            continue
        if small:
            joined.append(b"".join(small))
            small = []
        joined.append(part)
    if small:
        joined.append(b"".join(small))
    return joined


def decode_frame(data: memoryview, position: int, *, generation: int, seed: int) -> FrameHead | None:
    """Return the head of the frame at `position`, after verifying its checksum.

    None if no whole frame of this generation begins there. `seed` is the generation's random part.
    """
    if data[position : position + 4] != MAGIC or len(data) - position < HEAD_SIZE:
        return None
    _, version, flags, _, of_generation, lsn, durable_lsn, hard_state_lsn, records, length, file_size = (
        _HEAD.unpack_from(data, position)
    )
    end = position + HEAD_SIZE + length
    if version != VERSION or of_generation != generation or end > len(data):
        return None
    (stated,) = _CRC.unpack_from(data, position + _CRC_POSITION)
    checksum = crc32c(data[position : position + _CRC_POSITION], seed)
    if crc32c(data[position + HEAD_SIZE : end], checksum) != stated:
        return None
    return FrameHead(
        flags=flags,
        generation=of_generation,
        lsn=lsn,
        durable_lsn=durable_lsn,
        hard_state_lsn=hard_state_lsn,
        records=records,
        length=length,
        file_size=file_size,
    )


def newer_version(data: memoryview, position: int, *, generation: int, seed: int) -> int:
    """Return the format version of the whole frame at `position` if a newer program wrote it; else 0.

    The checksum is at the same place in every version and is verified here, so damaged bytes are not taken
    for another version.
    """
    if data[position : position + 4] != MAGIC or len(data) - position < HEAD_SIZE:
        return 0
    _, version, _, _, of_generation, _, _, _, _, length, _ = _HEAD.unpack_from(data, position)
    end = position + HEAD_SIZE + length
    if version <= VERSION or of_generation != generation or end > len(data):
        return 0
    checksum = crc32c(data[position : position + _CRC_POSITION], seed)
    (stated,) = _CRC.unpack_from(data, position + _CRC_POSITION)
    return version if crc32c(data[position + HEAD_SIZE : end], checksum) == stated else 0


def frame_marks(data: memoryview, position: int, *, generation: int, lsn: int | None) -> int:
    """Return how many of the fields magic, generation and LSN at `position` fit a frame's head (0 to 3).

    It is for telling a damaged frame from other bytes, so the checksum is not looked at. 0 if fewer bytes
    than a head are left. With an `lsn` of None that field does not count.
    """
    if len(data) - position < HEAD_SIZE:
        return 0
    magic, _, _, _, of_generation, of_lsn, *_ = _HEAD.unpack_from(data, position)
    return [magic == MAGIC, of_generation == generation, of_lsn == lsn].count(True)


def decode_records(body: memoryview, records: int) -> Iterator[tuple[RecordKind, int, memoryview]]:
    """Yield (kind, key, payload) of each record of a whole frame; payloads are views of `body`.

    `key` is a replica id for hard states, else a log id.
    """
    position = 0
    for _ in range(records):
        kind, _flags, _reserved, length, key = RECORD.unpack_from(body, position)
        position += RECORD.size
        yield RecordKind(kind), key, body[position : position + length]
        position += length
    assert position == len(body), f"{records} records end at {position}, the frame at {len(body)}"
