"""Stamped entries of the kinds that stages are made of, for tests of what follows from a log."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

import msgspec

from laminar.batch import Kind, as_staged, build, build_part, stamp
from laminar.batch.header import HEADER_SIZE, seal
from laminar.node.partition.state.staged_batches import StagedBatches
from laminar.node.partition.state.staging_entries import (
    LargeRecord,
    PrepareOperation,
    PrepareRecord,
    PublishRecord,
)

T = TypeVar("T")


def stamped(
    frame: bytearray, index: int, *, base_offset: int | None = None, time_ms: int | None = None
) -> bytearray:
    """The frame as entry `index` of term 1; offset and time are the index too if left out."""
    stamp(
        frame,
        index=index,
        term=1,
        prev_term=1,
        base_offset=index if base_offset is None else base_offset,
        append_time_ms=index if time_ms is None else time_ms,
        committed_index=0,
    )
    return frame


def staged_entry(index: int, sink: bytes, number: int, epoch: int, *, stage: int) -> bytearray:
    frame = build([b"x"])
    as_staged(frame, sink=sink, epoch=epoch, number=number, stage=stage, records=1)
    return stamped(frame, index)


def prepare_entry(index: int, sink: bytes, number: int, epoch: int, stages: list[int] | None) -> bytearray:
    """`stages` None: drop."""
    operation = PrepareOperation.DROP if stages is None else PrepareOperation.PREPARE
    record = PrepareRecord(sink, number, epoch, operation, stages or [])
    return stamped(seal(bytearray(HEADER_SIZE) + msgspec.msgpack.encode(record), Kind.PREPARE), index)


def forget_entry(index: int, sink: bytes, epoch: int) -> bytearray:
    record = PrepareRecord(sink, 0, epoch, PrepareOperation.FORGET)
    return stamped(seal(bytearray(HEADER_SIZE) + msgspec.msgpack.encode(record), Kind.PREPARE), index)


def forget_published_entry(index: int, published: list[tuple[bytes, int]]) -> bytearray:
    record = PrepareRecord(bytes(16), 0, 0, PrepareOperation.FORGET_PUBLISHED, published=published)
    return stamped(seal(bytearray(HEADER_SIZE) + msgspec.msgpack.encode(record), Kind.PREPARE), index)


def publish_entry(
    index: int, sink: bytes, number: int, epoch: int, stages: list[tuple[int, int]]
) -> bytearray:
    record = PublishRecord(sink, number, epoch, stages)
    frame = bytearray(HEADER_SIZE) + msgspec.msgpack.encode(record)
    return stamped(seal(frame, Kind.PUBLISH, count=sum(count for _, count in stages)), index)


def part_entry(index: int, upload: bytes, number: int) -> bytearray:
    return stamped(build_part(b"x", upload=upload, number=number), index)


def published_upload_entry(
    index: int, upload: bytes, parts: list[tuple[int, int]], *, time_ms: int | None = None
) -> bytearray:
    record = PublishRecord(upload, 0, 0, parts, LargeRecord(sum(size for _, size in parts), 0, b""))
    frame = seal(bytearray(HEADER_SIZE) + msgspec.msgpack.encode(record), Kind.PUBLISH, count=1)
    return stamped(frame, index, time_ms=time_ms)


def check_follows_its_log(
    rng: random.Random,
    draw: Callable[[StagedBatches, int], T],
    apply: Callable[[StagedBatches, int, T], None],
) -> None:
    """Stages under 40 random entries, of which some are cut again, are those of the entries that are left.

    `draw` makes the entry of an index, which `apply` appends.
    """
    stages, committed, index = StagedBatches(), 0, 0
    kept: list[tuple[int, T]] = []
    for _ in range(40):
        index += 1
        entry = draw(stages, index)
        kept.append((index, entry))
        apply(stages, index, entry)
        if rng.random() < 0.2 and index > committed:
            cut = rng.randrange(committed + 1, index + 1)
            stages.truncated(cut)
            kept = [each for each in kept if each[0] < cut]
            index = cut - 1
        if rng.random() < 0.1 and index > committed:
            committed = rng.randrange(committed + 1, index + 1)
            stages.committed(committed)
        at = rng.randrange(committed, index + 1)
        anew, before = StagedBatches(), StagedBatches()
        for place, each in kept:
            apply(anew, place, each)
            if place <= at:
                apply(before, place, each)
        assert anew.stored() == stages.stored()
        assert before.stored() == stages.stored_at(at)
        other = StagedBatches()
        other.restore(stages.stored())
        assert other.stored() == stages.stored()
        everything = {"before_ms": 1 << 60, "keep": 0}
        assert other.old_published(**everything) == stages.old_published(**everything)
