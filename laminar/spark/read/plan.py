"""Planning: which records a batch reads, and in which tasks. Pure: positions in, positions and ranges out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from typing import Final

from laminar.spark.read.loss import retention_loss
from laminar.spark.read.offsets import Partition, Positions


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """The records that one task reads: offsets ``start`` to ``end - 1`` of a partition.

    `id` is the id of the partition; with an empty one, any partition of that topic and number is read.
    """

    topic: str
    partition: int
    start: int
    end: int
    id: str = ""

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class RowFilter:
    """A filter on the records of a range: those with `tag` whose time is `since_us` to `until_us - 1`.

    Times are microseconds since the epoch. None does not filter.
    """

    tag: str | None = None
    since_us: int | None = None
    until_us: int | None = None


EVERY_ROW: Final = RowFilter()


def limited(
    starts: Mapping[Partition, int],
    ends: Mapping[Partition, int],
    *,
    max_records: int | None = None,
    max_bytes: int | None = None,
    record_bytes: Mapping[Partition, float] | None = None,
) -> Positions:
    """Return `ends` moved back so far that a batch from `starts` is within about its limits.

    The limits are `max_records` and `max_bytes`, each if given.

    Each partition's share is in proportion to its lag. Bytes are estimated by `record_bytes`, the mean size
    of a partition's records; without it `max_bytes` has no effect. A share below one record counts as one, so
    that a small partition beside a large one advances; the sum may exceed the limit by as many records as
    there are partitions.
    """
    lags = {partition: end - starts.get(partition, 0) for partition, end in ends.items()}
    total = sum(lag for lag in lags.values() if lag > 0)
    most = total if max_records is None else min(total, max_records)
    if max_bytes is not None and record_bytes:
        size = sum(lag * record_bytes.get(partition, 0.0) for partition, lag in lags.items() if lag > 0)
        if size > max_bytes:
            most = min(most, int(total * max_bytes / size))
    if total <= most:
        return dict(ends)
    return {
        partition: starts.get(partition, 0) + min(lag, max(1, most * lag // total) if lag > 0 else lag)
        for partition, lag in lags.items()
    }


def forward(start: Mapping[Partition, int], ends: Mapping[Partition, int]) -> Positions:
    """Return by partition the offset to which a batch from `start` can go: to `ends`, never backwards.

    A partition that is not in `start` is new and begins at 0. One that is not in `ends` stays where it is.
    """
    return dict(start) | {partition: max(end, start.get(partition, 0)) for partition, end in ends.items()}


def lag(start: Mapping[Partition, int], end: Mapping[Partition, int]) -> int:
    """Return the number of records from `start` to `end`, over all partitions."""
    return sum(max(0, offset - start.get(partition, 0)) for partition, offset in end.items())


def ranges(
    start: Mapping[Partition, int],
    end: Mapping[Partition, int],
    earliest: Mapping[Partition, int],
    *,
    ids: Mapping[Partition, str] | None = None,
    fail_on_data_loss: bool,
) -> list[Range]:
    """Return the ranges from `start` to `end` of the partitions in `end`, sorted, none empty.

    A partition that is not in `start` begins at 0. Where retention trimmed the start of a range, the range
    begins at `earliest`.

    Raises:
        DataLoss: with `fail_on_data_loss`, where retention trimmed records of a range.
    """
    found = []
    lost = []
    for (topic, number), stop in sorted(end.items()):
        begin = start.get((topic, number), 0)
        first = earliest.get((topic, number), 0)
        if begin < stop and begin < first:
            lost.append(f"{topic}/{number}: {begin} to {min(first, stop) - 1}")
            begin = min(first, stop)
        if begin < stop:
            found.append(Range(topic, number, begin, stop, (ids or {}).get((topic, number), "")))
    if lost:
        retention_loss(lost, fail=fail_on_data_loss)
    return found


def split(
    whole: list[Range],
    *,
    min_partitions: int | None = None,
    max_records: int | None = None,
    max_bytes: int | None = None,
    record_bytes: Mapping[Partition, float] | None = None,
) -> list[Range]:
    """Return `whole` cut into at least `min_partitions` ranges, none over `max_records` or about `max_bytes`.

    Ranges are cut evenly and stay in order. None becomes empty, so a batch of few records may stay below
    `min_partitions`. Bytes are estimated by the mean size of a partition's records.
    """
    total = sum(map(len, whole))
    cut: list[Range] = []
    for each in whole:
        pieces = 1
        if min_partitions is not None and min_partitions > len(whole):
            pieces = -(-len(each) * min_partitions // total)
        if max_records is not None:
            pieces = max(pieces, -(-len(each) // max_records))
        if max_bytes is not None and record_bytes is not None:
            size = len(each) * record_bytes.get((each.topic, each.partition), 0.0)
            pieces = max(pieces, ceil(size / max_bytes))
        pieces = min(pieces, len(each))
        bounds = [each.start + len(each) * piece // pieces for piece in range(pieces + 1)]
        cut += [replace(each, start=first, end=last) for first, last in pairwise(bounds)]
    return cut
