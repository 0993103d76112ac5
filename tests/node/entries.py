"""Stamped entries of the kinds that stages are made of, for tests of what follows from a log."""

from __future__ import annotations

import msgspec

from laminar.batch import Kind, as_staged, build, build_part, stamp
from laminar.frame import HEADER_SIZE, seal
from laminar.node.stages import LargeRecord, PinOperation, PinRecord, PublishRecord


def _stamped(frame: bytearray, index: int, *, time_ms: int = 0) -> bytearray:
    stamp(
        frame,
        index=index,
        term=1,
        prev_term=1,
        base_offset=index,
        append_time_ms=time_ms or index,
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


def part_entry(index: int, upload: bytes, number: int) -> bytearray:
    return _stamped(build_part(b"x", upload=upload, number=number), index)


def published_upload_entry(
    index: int, upload: bytes, parts: list[tuple[int, int]], *, time_ms: int = 0
) -> bytearray:
    record = PublishRecord(upload, 0, 0, parts, LargeRecord(sum(size for _, size in parts), 0, b""))
    frame = seal(bytearray(HEADER_SIZE) + msgspec.msgpack.encode(record), Kind.PUBLISH, count=1)
    return _stamped(frame, index, time_ms=time_ms)
