"""Stamped entries of the kinds that stages are made of, for tests of what follows from a log."""

from __future__ import annotations

import msgspec

from laminar.batch import Kind, as_staged, build, stamp
from laminar.frame import HEADER_SIZE, seal
from laminar.node.stages import PinOperation, PinRecord, PublishRecord


def _stamped(frame: bytearray, index: int) -> bytearray:
    stamp(
        frame,
        index=index,
        term=1,
        prev_term=1,
        base_offset=index,
        append_time_ms=index,
        committed_index=0,
    )
    return frame


def staged_entry(index: int, sink: bytes, number: int, epoch: int, *, stage: int) -> bytearray:
    frame = build([b"x"])
    as_staged(frame, sink=sink, epoch=epoch, number=number, stage=stage, records=1)
    return _stamped(frame, index)


def pin_entry(index: int, sink: bytes, number: int, epoch: int, stages: list[int] | None) -> bytearray:
    """`stages` None: drop."""
    operation = PinOperation.DROP if stages is None else PinOperation.PIN
    record = PinRecord(sink, number, epoch, operation, stages or [])
    return _stamped(seal(bytearray(HEADER_SIZE) + msgspec.msgpack.encode(record), Kind.PIN), index)


def publish_entry(
    index: int, sink: bytes, number: int, epoch: int, stages: list[tuple[int, int]]
) -> bytearray:
    record = PublishRecord(sink, number, epoch, stages)
    frame = bytearray(HEADER_SIZE) + msgspec.msgpack.encode(record)
    return _stamped(seal(frame, Kind.PUBLISH, count=sum(count for _, count in stages)), index)
