"""The payloads of `prepare` and `publish` entries (docs/format.md).

A `prepare` entry keeps or drops the staged entries of a batch. A `publish` entry gives records their offsets:
those of a batch's staged entries, the large record of an upload, or delayed records that are due. The table
that follows from these entries is `laminar.node.partition.state.staged_batches`.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from laminar.batch import Buffer, body_of


class PrepareOperation(IntEnum):
    """The change that a `prepare` entry makes to a batch."""

    PREPARE = 1
    DROP = 2
    # Forget all state of a deleted sink, up to the epoch of the entry.
    FORGET = 3
    # Forget the last published batches of the single-use sinks in `published`.
    FORGET_PUBLISHED = 4


class PrepareRecord(msgspec.Struct, frozen=True, array_like=True):
    """Payload of a `prepare` entry.

    For `PREPARE`, `stages` are the numbers of the stages that are kept; other stages of the batch are
    dropped. For `FORGET` only `sink` and `epoch` are used, for `FORGET_PUBLISHED` only `published`: pairs
    (sink, index of its publish).
    """

    sink: bytes
    number: int
    epoch: int
    operation: PrepareOperation
    stages: list[int] = []
    published: list[tuple[bytes, int]] = []


class LargeRecord(msgspec.Struct, frozen=True, array_like=True):
    """The large record of an upload, as its `publish` entry describes it.

    `size_bytes` and `crc32c` are those of its value. `stub` is the unstamped batch that readers get in place
    of the record (`laminar.batch.large_record.build_stub`).
    """

    size_bytes: int
    crc32c: int
    stub: bytes


class DueRecords(msgspec.Struct, frozen=True, array_like=True):
    """Delayed records that are due and published now.

    `rows` has two values per record: the index of the entry that has it, and its row there. `frame` is the
    unstamped batch of the records, in the order of `rows`.
    """

    rows: list[int]
    frame: bytes


class PublishRecord(msgspec.Struct, frozen=True, array_like=True):
    """Payload of a `publish` entry, which gives staged records their offsets.

    `stages` names the staged entries in the order of their offsets, as (index, number of records). For an
    upload `sink` is the upload's id, `stages` are (index, bytes of the body) in the order of the parts, and
    `large` is set. For delayed records only `due` is used (`delayed_records`). With this record a reader can
    read the batch without the table of staged batches.
    """

    sink: bytes
    number: int
    epoch: int
    stages: list[tuple[int, int]]
    large: LargeRecord | None = None
    due: DueRecords | None = None


_prepare_decoder = msgspec.msgpack.Decoder(PrepareRecord)
_publish_decoder = msgspec.msgpack.Decoder(PublishRecord)


def publish_record(frame: Buffer) -> PublishRecord:
    """Decode the payload of a `publish` entry from the entry's frame."""
    return _publish_decoder.decode(body_of(frame))


def prepare_record(frame: Buffer) -> PrepareRecord:
    """Decode the payload of a `prepare` entry from the entry's frame."""
    return _prepare_decoder.decode(body_of(frame))


def prepare_adds_nothing(frame: Buffer) -> bool:
    """Return whether a `prepare` entry only drops or forgets, so that no records can follow from it."""
    return prepare_record(frame).operation is not PrepareOperation.PREPARE
