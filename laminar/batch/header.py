"""The 128-byte header of a batch: its fields, its kinds and its two checksums.

One batch is one Raft entry and one stored *frame*: this header, then a body. The producer writes the CRC of
the body, which does not change later. The leader *stamps* the frame: it writes the batch's place in the log
(index, term, offset) and the time into the header, and the header's CRC. Only this module knows the layout:
others use `HEADER_SIZE`, the functions below, or a `struct.Struct` from `fields`. It decides whether the
bytes of a frame are intact, and which entry they are. It knows neither the content of a body (`columns`), nor
whether a place in the log is the right one (`raft`). Reference: `docs/format.md`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import Final, TypeAlias

from laminar.checksum import crc32c

Buffer: TypeAlias = bytes | bytearray | memoryview

BATCH_TYPE: Final = "application/vnd.laminar.batch"
MAGIC: Final = b"LMNB"
VERSION: Final = 1
# The largest frame: every position inside it fits a signed 32-bit number, as Arrow's offsets are.
MAX_FRAME_BYTES: Final = 2**31 - 1
NO_PRODUCER: Final = bytes(16)

# Every field in order, with its `struct` format; little-endian, nothing between them.
_FIELDS: Final = {
    "magic": "4s",
    "version": "B",
    "kind": "B",
    "flags": "H",
    "index": "Q",
    "term": "Q",
    "prev_term": "Q",
    "base_offset": "Q",
    "count": "I",
    "body_length": "I",
    "append_time_ms": "q",
    "committed_index": "Q",
    "producer_id": "16s",
    "producer_epoch": "I",
    "reserved": "I",
    "sequence": "Q",
    "tag_mask": "Q",
    "checkpoint": "Q",
    "floor": "Q",
    "body_crc": "I",
    "header_crc": "I",
}
HEADER_SIZE: Final = 128
_HEADER = struct.Struct("<" + "".join(_FIELDS.values()))
assert _HEADER.size == HEADER_SIZE, _HEADER.size
_SIZES = {name: struct.calcsize(f"<{form}") for name, form in _FIELDS.items()}
OFFSETS: Final = {
    name: end - _SIZES[name] for name, end in zip(_SIZES, accumulate(_SIZES.values()), strict=True)
}


def fields(*names: str, then: str = "") -> struct.Struct:
    """Return a `Struct` that unpacks the named fields of a header, which must be named in their order.

    Use it in code that runs for each batch and needs few fields; skipped fields cost nothing. The `Struct`
    spans the whole header; `then` is the format of bytes after it. Do not pack with it: that would write
    zeros over the skipped fields.
    """
    form, position = "<", 0
    for name in names:
        if skipped := OFFSETS[name] - position:
            form += f"{skipped}x"
        form += _FIELDS[name]
        position = OFFSETS[name] + _SIZES[name]
    return struct.Struct(f"{form}{HEADER_SIZE - position}x{then}")


def _adjacent(*names: str) -> struct.Struct:
    """Return a `Struct` of adjacent fields, to pack at the offset of the first."""
    order = list(_FIELDS)
    first = order.index(names[0])
    assert tuple(order[first : first + len(names)]) == names, f"{names} are not adjacent"
    return struct.Struct("<" + "".join(_FIELDS[name] for name in names))


# The fields that identify an entry, and both checksums.
SEALED_PLACE_FIELDS = fields("index", "term", "body_crc", "header_crc")
# The fields that a log keeps of each batch, and checks when it is appended.
LOG_FIELDS = fields(
    *("kind", "flags", "index", "term", "prev_term", "base_offset", "count", "body_length"),
    *("append_time_ms", "tag_mask", "header_crc"),
)
# The header's checksum covers the bytes before it.
HEADER_CRC_AT: Final = OFFSETS["header_crc"]


class Kind(IntEnum):
    """The kinds of batches.

    `DATA` has records. `STAGED` has records that get their offsets from a later `PUBLISH` entry that names
    the batch, or bytes of a record that is larger than a batch. `SKIP` uses up offsets that no record will
    ever have. The body of any other kind is one opaque payload; that of `DELAYED` and of `PUBLISH` may
    contain a whole batch of records.
    """

    DATA = 0
    NOOP = 1
    CONFIGURATION = 2
    LOG_START = 3
    STAGED = 4
    PREPARE = 5
    PUBLISH = 6
    SEAL = 7
    CURSOR = 8
    COMMAND = 9
    SINK = 10
    FENCE = 11
    OPEN = 12
    CHANNEL = 13
    DELAYED = 14
    SKIP = 15


class Flag(IntEnum):
    """Bits of the header's field `flags`. Unlike with an `IntFlag`, `&` and `|` return plain numbers."""

    OPENS_SEGMENT = 1
    # Producer id and sequence are the hashes of an idempotency key and of the request.
    KEYED = 2
    # Its one record is larger than a batch, and its value is empty here (`laminar.batch.large_record`). Only
    # batches given to readers have this flag: it is never stored.
    LARGE = 4
    # A `cursor` or `channel` entry that counts only when it is durable, in an `interval` log too: consumers
    # after a change of the topic's route, or a decision of a transaction, rely on it, and on all before it.
    SYNCED = 8


class BatchError(ValueError):
    """A frame is damaged, contradicts itself, is not supported, or is larger than allowed.

    `code` is ``malformed``, ``bad_checksum``, ``unsupported`` or ``too_large``. `field` names the wrong part,
    `value` is its value, and `limit` the largest or the right value; each is None if it does not apply.
    `offsets` is the range ``(first, next)`` of the records in the frame, so that a reader can go on at
    ``next``; None if the range is not known.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        field: str | None = None,
        value: object = None,
        limit: object = None,
        offsets: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.field = field
        self.value = value
        self.limit = limit
        self.offsets = offsets


def malformed(field: str, value: object, expected: object, what: str) -> BatchError:
    """Return the error for a `field` of `what` that has `value` instead of `expected`."""
    return BatchError(
        "malformed", f"{what}: {field} is {value}, not {expected}", field=field, value=value, limit=expected
    )


_PLACE = _adjacent("index", "term", "prev_term", "base_offset")
_PLACE_AT = OFFSETS["index"]
_CLOCK = _adjacent("append_time_ms", "committed_index")
_CLOCK_AT = OFFSETS["append_time_ms"]
_KIND_AND_FLAGS = _adjacent("kind", "flags")
_KIND_AT: Final = OFFSETS["kind"]
_FLAGS_AT = OFFSETS["flags"]
_COUNT = _adjacent("count")
_COUNT_AT = OFFSETS["count"]
_BODY_LENGTH = _adjacent("body_length")
_BODY_LENGTH_AT = OFFSETS["body_length"]
_PRODUCER = _adjacent("producer_id", "producer_epoch", "reserved", "sequence")
_PRODUCER_AT = OFFSETS["producer_id"]
_NUMBERS = _adjacent("checkpoint", "floor")
_NUMBERS_AT = OFFSETS["checkpoint"]
_CRC = _adjacent("header_crc")
_BODY_CRC_AT = OFFSETS["body_crc"]
_TERM = _adjacent("term")
_TERM_AT = OFFSETS["term"]
_KINDS = tuple(Kind)
_KNOWN_FLAGS = int(Flag.OPENS_SEGMENT | Flag.KEYED | Flag.LARGE | Flag.SYNCED)
# What the leader leaves as it is.
_KEPT_FLAGS = int(Flag.KEYED | Flag.SYNCED)
# Kinds whose count takes offsets, and those that use `checkpoint` and `floor`.
_COUNTED = (Kind.DATA, Kind.PUBLISH, Kind.SKIP)
_NUMBERED = (Kind.DATA, Kind.STAGED, Kind.DELAYED)
_MAY_BE_SYNCED = (Kind.CURSOR, Kind.CHANNEL)
# To look up a member of an enumeration takes as long as checking three fields.
_SYNCED = int(Flag.SYNCED)


@dataclass(slots=True, init=False)
class Header:
    """The header of a frame as numbers. Times are ms since the epoch, lengths bytes, CRCs CRC-32C.

    In a batch of a named producer, whose program numbers its records, `checkpoint` is the highest number in
    the batch (0: none), and all records with numbers up to `floor` are durable, in every partition (0: not
    known). A `DELAYED` batch has both from the batch that the producer sent. In a `STAGED` batch `checkpoint`
    is the number of the stage, and `floor` the count of its records, 0 for a part of a large record.
    """

    kind: Kind
    flags: int
    index: int
    term: int
    prev_term: int
    base_offset: int
    count: int
    body_length: int
    append_time_ms: int
    committed_index: int
    producer_id: bytes
    producer_epoch: int
    sequence: int
    tag_mask: int
    checkpoint: int
    floor: int
    body_crc: int
    header_crc: int

    # Written out: where it is compiled, it takes an eighth of the time of a generated one.
    def __init__(
        self,
        kind: Kind,
        flags: int,
        index: int,
        term: int,
        prev_term: int,
        base_offset: int,
        count: int,
        body_length: int,
        append_time_ms: int,
        committed_index: int,
        producer_id: bytes,
        producer_epoch: int,
        sequence: int,
        tag_mask: int,
        checkpoint: int,
        floor: int,
        body_crc: int,
        header_crc: int,
    ) -> None:
        self.kind = kind
        self.flags = flags
        self.index = index
        self.term = term
        self.prev_term = prev_term
        self.base_offset = base_offset
        self.count = count
        self.body_length = body_length
        self.append_time_ms = append_time_ms
        self.committed_index = committed_index
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        self.sequence = sequence
        self.tag_mask = tag_mask
        self.checkpoint = checkpoint
        self.floor = floor
        self.body_crc = body_crc
        self.header_crc = header_crc

    @staticmethod
    def unpack(buffer: Buffer, position: int = 0) -> Header:
        """Return the header at `position`, after checking magic, version, kind and flags.

        The checksum is not checked: use `verify` for bytes from a disk or a connection.

        Raises:
            BatchError: a checked field is wrong or unknown, or there are too few bytes.
        """
        if len(buffer) - position < HEADER_SIZE:
            raise malformed("length", len(buffer) - position, f"at least {HEADER_SIZE}", "frame")
        (
            magic,
            version,
            kind,
            flags,
            index,
            term,
            prev_term,
            base_offset,
            count,
            body_length,
            append_time_ms,
            committed_index,
            producer_id,
            producer_epoch,
            reserved,
            sequence,
            tag_mask,
            checkpoint,
            floor,
            body_crc,
            header_crc,
        ) = _HEADER.unpack_from(buffer, position)
        if magic != MAGIC:
            raise malformed("magic", magic, MAGIC, "frame")
        if version != VERSION:
            raise _unsupported("version", version, VERSION)
        if kind >= len(_KINDS):
            raise _unsupported("kind", kind, len(_KINDS) - 1)
        if count and kind not in _COUNTED:
            raise malformed("count", count, 0, f"batch of kind {kind}")
        if flags & ~_KNOWN_FLAGS:
            raise _unsupported("flags", flags, _KNOWN_FLAGS)
        if flags & _SYNCED and kind not in _MAY_BE_SYNCED:
            raise malformed("flags", flags, flags & ~_SYNCED, f"batch of kind {kind}")
        if reserved:
            raise _unsupported("reserved", reserved, 0)
        if (checkpoint or floor) and kind not in _NUMBERED:
            raise malformed("checkpoint", checkpoint or floor, 0, f"batch of kind {kind}")
        return Header(
            _KINDS[kind],
            flags,
            index,
            term,
            prev_term,
            base_offset,
            count,
            body_length,
            append_time_ms,
            committed_index,
            producer_id,
            producer_epoch,
            sequence,
            tag_mask,
            checkpoint,
            floor,
            body_crc,
            header_crc,
        )

    @property
    def frame_size(self) -> int:
        """Bytes of header and body together."""
        return HEADER_SIZE + self.body_length

    @property
    def next_offset(self) -> int:
        """Offset of the first record after this batch."""
        return self.base_offset + self.count

    @property
    def opens_segment(self) -> bool:
        """Whether the batch is the first of a segment."""
        return bool(self.flags & Flag.OPENS_SEGMENT)


def kind_of(frame: Buffer) -> int:
    """Return the kind of a frame, as a number; compare it with a `Kind`."""
    return frame[_KIND_AT]


def is_one_frame(buffer: Buffer) -> bool:
    """Return whether a buffer has exactly the length that its header states; nothing is verified."""
    if len(buffer) < HEADER_SIZE:
        return False
    length: int = _BODY_LENGTH.unpack_from(buffer, _BODY_LENGTH_AT)[0]
    return len(buffer) == HEADER_SIZE + length


def has_more_frames(buffer: Buffer, most: int) -> bool:
    """Return whether a buffer has more than `most` frames, by their lengths; nothing is verified."""
    position = 0
    for _ in range(most):
        if position + HEADER_SIZE > len(buffer):
            return False
        position += HEADER_SIZE + _BODY_LENGTH.unpack_from(buffer, position + _BODY_LENGTH_AT)[0]
    return position < len(buffer)


def count_of(frame: Buffer) -> int:
    """Return the number of records in a frame's header; nothing is verified."""
    count: int = _COUNT.unpack_from(frame, _COUNT_AT)[0]
    return count


def term_of(frame: Buffer) -> int:
    """Return the Raft term in a frame's header, as its leader wrote it."""
    term: int = _TERM.unpack_from(frame, _TERM_AT)[0]
    return term


def body_of(frame: Buffer) -> memoryview:
    """Return the bytes after the header, as a view."""
    return memoryview(frame)[HEADER_SIZE:]


def _unsupported(field: str, value: object, known: object) -> BatchError:
    message = f"frame: {field} {value!r} is newer than this program (known: {known!r})"
    return BatchError("unsupported", message, field=field, value=value, limit=known)


def seal(
    frame: bytearray,
    kind: Kind,
    *,
    count: int = 0,
    producer_id: bytes = NO_PRODUCER,
    producer_epoch: int = 0,
    sequence: int = 0,
    tag_mask: int = 0,
    checkpoint: int = 0,
    floor: int = 0,
    flags: int = 0,
) -> bytearray:
    """Write the header of an unstamped frame over its first `HEADER_SIZE` bytes, and return the frame.

    The body must follow those bytes. Index, terms, base offset and time are zero until the leader stamps
    them, but both checksums already hold, so that damage on the way to the leader is found.
    """
    assert len(producer_id) == 16, f"a producer id of {len(producer_id)} bytes"
    size = len(frame)
    if size > MAX_FRAME_BYTES:
        raise BatchError(
            "too_large",
            f"frame: {size} bytes, at most {MAX_FRAME_BYTES}",
            field="length",
            value=size,
            limit=MAX_FRAME_BYTES,
        )
    body_length = size - HEADER_SIZE
    with memoryview(frame) as view:
        body_crc = crc32c(view[HEADER_SIZE:])
        _HEADER.pack_into(
            frame,
            0,
            MAGIC,
            VERSION,
            kind,
            flags,
            0,
            0,
            0,
            0,
            count,
            body_length,
            0,
            0,
            producer_id,
            producer_epoch,
            0,
            sequence,
            tag_mask,
            checkpoint,
            floor,
            body_crc,
            0,
        )
        _CRC.pack_into(frame, HEADER_CRC_AT, crc32c(view[:HEADER_CRC_AT]))
    return frame


def build_control(kind: Kind, payload: Buffer = b"", *, flags: int = 0) -> bytearray:
    """Return a new frame of a kind without records, with `payload` as its body; it is not stamped yet."""
    assert kind is not Kind.DATA, "records are built by `build`"
    return seal(bytearray(HEADER_SIZE) + payload, kind, flags=flags)


def stamp(
    frame: bytearray | memoryview,
    *,
    index: int,
    term: int,
    prev_term: int,
    base_offset: int,
    append_time_ms: int,
    committed_index: int,
    opens_segment: bool = False,
) -> None:
    """Write a frame's place in the log, the time and the commit index into its header, and its checksum.

    The frame is changed in place. The leader does this once, before the frame is written anywhere. The body
    and its checksum stay as the producer made them.
    """
    _PLACE.pack_into(frame, _PLACE_AT, index, term, prev_term, base_offset)
    _CLOCK.pack_into(frame, _CLOCK_AT, append_time_ms, committed_index)
    # Set or cleared: a client may append a frame that it fetched, which has the flag of its old place.
    frame[_FLAGS_AT] = frame[_FLAGS_AT] & _KEPT_FLAGS | (1 if opens_segment else 0)
    _CRC.pack_into(frame, HEADER_CRC_AT, crc32c(memoryview(frame)[:HEADER_CRC_AT]))


def set_producer(
    frame: bytearray | memoryview, *, producer_id: bytes, epoch: int, sequence: int, keyed: bool
) -> None:
    """Write producer id, epoch and sequence number into a frame's header, in place, before it is stamped.

    By these numbers the frame is recognised when it is sent again.
    """
    assert len(producer_id) == 16, f"a producer id of {len(producer_id)} bytes"
    frame[_FLAGS_AT] = int(Flag.KEYED) if keyed else 0
    _PRODUCER.pack_into(frame, _PRODUCER_AT, producer_id, epoch, 0, sequence)
    _CRC.pack_into(frame, HEADER_CRC_AT, crc32c(memoryview(frame)[:HEADER_CRC_AT]))


def as_staged(
    frame: bytearray | memoryview, *, sink: bytes, epoch: int, number: int, stage: int, records: int
) -> None:
    """Turn a batch of records into a stage (records of batch `number` of a sink, not visible yet), in place.

    `stage` is the number of the stage, `records` the count of its records. Call it before `stamp`, which
    makes the header's checksum right again.
    """
    _KIND_AND_FLAGS.pack_into(frame, _KIND_AT, Kind.STAGED, 0)
    _COUNT.pack_into(frame, _COUNT_AT, 0)
    _PRODUCER.pack_into(frame, _PRODUCER_AT, sink, epoch, 0, number)
    _NUMBERS.pack_into(frame, _NUMBERS_AT, stage, records)


def build_part(value: Buffer, *, upload: bytes, number: int) -> bytearray:
    """Return a part of a large record: a `STAGED` batch without records, with `value` as body.

    It is not stamped yet. `upload` is the 16-byte id of the upload; `number` is the number of the part.
    """
    return seal(bytearray(HEADER_SIZE) + value, Kind.STAGED, producer_id=upload, checkpoint=number)


def as_large(stub: Buffer, *, publish: Header) -> bytearray:
    """Return the stub of a large record for readers: with index, term and offset of its `PUBLISH` entry."""
    return _at_publish(stub, publish, Flag.LARGE)


def as_due(batch: Buffer, *, publish: Header) -> bytearray:
    """Return a batch of delayed records for readers: with index, term and offset of its `PUBLISH` entry."""
    return _at_publish(batch, publish, 0)


def _at_publish(batch: Buffer, publish: Header, flags: int) -> bytearray:
    frame = bytearray(batch)
    _KIND_AND_FLAGS.pack_into(frame, _KIND_AT, Kind.DATA, flags)
    _PLACE.pack_into(frame, _PLACE_AT, publish.index, publish.term, publish.prev_term, publish.base_offset)
    _CLOCK.pack_into(frame, _CLOCK_AT, publish.append_time_ms, publish.committed_index)
    _CRC.pack_into(frame, HEADER_CRC_AT, crc32c(memoryview(frame)[:HEADER_CRC_AT]))
    return frame


class SplitFrame:
    """A frame in two pieces: a new header, and a view of the body in the frame from which it was made."""

    __slots__ = ("body", "head")

    def __init__(self, head: bytearray, body: memoryview) -> None:
        self.head = head
        self.body = body

    def __len__(self) -> int:
        return HEADER_SIZE + len(self.body)

    def joined(self) -> bytearray:
        """Return the frame as one buffer, a copy."""
        return self.head + self.body


def header_of(frame: Buffer | SplitFrame) -> Buffer:
    """Return the buffer that begins with the frame's header."""
    return frame.head if isinstance(frame, SplitFrame) else frame


def whole(frame: Buffer | SplitFrame) -> Buffer:
    """Return the frame as one buffer: itself, or a copy if it is in two pieces."""
    return frame.joined() if isinstance(frame, SplitFrame) else frame


def as_published(staged: Buffer, *, publish: Header, base_offset: int) -> SplitFrame:
    """Return a staged batch for readers: records from `base_offset` on, with its `PUBLISH` entry's index."""
    records: int = _NUMBERS.unpack_from(staged, _NUMBERS_AT)[1]
    head = bytearray(memoryview(staged)[:HEADER_SIZE])
    _KIND_AND_FLAGS.pack_into(head, _KIND_AT, Kind.DATA, 0)
    _PLACE.pack_into(head, _PLACE_AT, publish.index, publish.term, publish.prev_term, base_offset)
    _COUNT.pack_into(head, _COUNT_AT, records)
    _CLOCK.pack_into(head, _CLOCK_AT, publish.append_time_ms, publish.committed_index)
    _PRODUCER.pack_into(head, _PRODUCER_AT, NO_PRODUCER, 0, 0, 0)
    _NUMBERS.pack_into(head, _NUMBERS_AT, 0, 0)
    _CRC.pack_into(head, HEADER_CRC_AT, crc32c(memoryview(head)[:HEADER_CRC_AT]))
    return SplitFrame(head, body_of(staged))


def replace_body(frame: Buffer, changed: bytearray) -> bytearray:
    """Copy the header of `frame` over the start of `changed`, set length and checksums; return `changed`."""
    changed[:HEADER_SIZE] = memoryview(frame)[:HEADER_SIZE]
    with memoryview(changed) as view:
        _BODY_LENGTH.pack_into(changed, _BODY_LENGTH_AT, len(changed) - HEADER_SIZE)
        _CRC.pack_into(changed, _BODY_CRC_AT, crc32c(view[HEADER_SIZE:]))
        _CRC.pack_into(changed, HEADER_CRC_AT, crc32c(view[:HEADER_CRC_AT]))
    return changed


def verify_header(frame: Buffer) -> Header:
    """Return the header of a frame, after checking its checksum; raise `BatchError` if it is wrong.

    The body may be missing, or more bytes may follow.
    """
    header = Header.unpack(frame)
    found = crc32c(memoryview(frame)[:HEADER_CRC_AT])
    if found != header.header_crc:
        raise _bad_checksum("header_crc", found, header.header_crc)
    return header


def verify(frame: Buffer) -> Header:
    """Return the header of a frame, after checking both checksums, and that it is exactly one frame.

    Raises:
        BatchError: a checksum or the length is wrong.
    """
    header = verify_header(frame)
    verify_body(frame, header)
    return header


def verify_body(frame: Buffer, header: Header) -> None:
    """Raise `BatchError` unless `frame` is as long as its `header` says, and its body's checksum holds."""
    if len(frame) != header.frame_size:
        raise malformed("length", len(frame), header.frame_size, "frame")
    found = crc32c(memoryview(frame)[HEADER_SIZE:])
    if found != header.body_crc:
        raise _bad_checksum("body_crc", found, header.body_crc)


def _bad_checksum(field: str, found: int, stated: int) -> BatchError:
    message = f"frame: {field} is {found:#010x}, stated {stated:#010x}"
    return BatchError("bad_checksum", message, field=field, value=found, limit=stated)


def split(buffer: Buffer) -> list[memoryview]:
    """Return a view of each of the consecutive frames in `buffer`; no bytes are copied.

    Headers are verified, because their lengths say where the next frame begins; bodies are not.

    Raises:
        BatchError: bytes are left over, or the last frame ends early.
    """
    return [frame for frame, _ in split_headers(buffer)]


def split_headers(buffer: Buffer) -> list[tuple[memoryview, Header]]:
    """Return the frames like `split`, each with its verified header."""
    view = memoryview(buffer)
    frames = []
    position = 0
    while position < len(view):
        header = verify_header(view[position : position + HEADER_SIZE])
        end = position + header.frame_size
        if end > len(view):
            raise malformed("length", len(view) - position, header.frame_size, f"frame at byte {position}")
        frames.append((view[position:end], header))
        position = end
    return frames
