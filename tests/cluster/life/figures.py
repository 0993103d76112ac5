"""What a history says of the service that clients had: silences of partitions, delays of appends."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from tests.checkers import Operation
from tests.checkers.operations import by_partition
from tests.cluster.faults.report import percentile


class Gap(NamedTuple):
    """The longest time of a partition without an acknowledged append."""

    topic: str
    partition: int
    began_us: int
    ms: float


def longest_gaps(operations: Iterable[Operation]) -> list[Gap]:
    """Return the longest gap of each partition that was appended to, the longest first."""
    gaps = []
    for (topic, partition), here in by_partition(operations).items():
        ends = sorted(
            each.end_us
            for each in here
            if each.kind == "append" and each.outcome == "ok" and each.end_us is not None
        )
        spans = [(after - before, before) for before, after in pairwise(ends)]
        if spans:
            longest_us, began_us = max(spans)
            gaps.append(Gap(topic, partition, began_us, longest_us / 1000))
    return sorted(gaps, key=lambda gap: -gap.ms)


def took_ms(append: Operation) -> float:
    """Return the time of an append that was answered."""
    assert append.end_us is not None
    return (append.end_us - append.start_us) / 1000


def appends_of(operations: Iterable[Operation], *, writer: str, from_us: int, to_us: int) -> list[Operation]:
    """Return the acknowledged appends of processes `writer...` that began in this span."""
    return [
        each
        for each in operations
        if each.kind == "append"
        and each.outcome == "ok"
        and each.end_us is not None
        and each.process.startswith(writer)
        and from_us <= each.start_us < to_us
    ]


def append_ms(operations: Iterable[Operation], *, writer: str, from_us: int, to_us: int) -> list[float]:
    """Return the sorted times of `appends_of`."""
    return sorted(map(took_ms, appends_of(operations, writer=writer, from_us=from_us, to_us=to_us)))


def p99(values: list[float]) -> float:
    """Return the 99th percentile of sorted values; 0 of none."""
    return percentile(values, 99) if values else 0.0
