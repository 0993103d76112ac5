"""Whether the offsets of a history can be those of one log in real time: O(n log n), as values are unique.

A general check of linearizability searches. Here every append has a value of its own and its receipt names
its place, so the order is given, and what remains is to compare it with real time (after Gibbons and Korach:
with unique writes it is easy). For each partition:

1. Of two acknowledged appends, the one that ended before the other began has the lower offset.
2. A `leader` read shows every append acknowledged before it began ("stale read"), and
3. nothing that was begun after it ended ("read from the future"); so does every poll.
4. Of two `leader` reads, one that began after the other's end shows at least as much.

An append without a receipt that was seen somewhere counts as begun and never ended.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from laminar.testing.history import Kind, Violation
from tests.checkers.operations import Operation, by_partition


class _Placed(NamedTuple):
    """An append at its offset; `end_us` None if nobody was told of it."""

    offset: int
    start_us: int
    end_us: int | None
    value: str


def check_linear(operations: Iterable[Operation]) -> list[Violation]:
    """Everything about real time that is wrong."""
    known = list(operations)
    appends = {(each.topic, each.value): each for each in known if each.kind == "append"}
    violations: list[Violation] = []
    for (topic, partition), here in by_partition(known).items():
        placed = _placed(topic, here, appends)
        reads = [
            each
            for each in here
            if each.kind == "read" and each.outcome == "ok" and each.end_offset is not None
        ]
        where = _Where(topic, partition)
        violations += _appends_in_order(where, placed)
        violations += _stale_reads(where, placed, reads)
        violations += _from_the_future(where, placed, here)
        violations += _reads_in_order(where, reads)
    return violations


class _Where(NamedTuple):
    topic: str
    partition: int

    def wrong(self, kind: Kind, message: str, offset: int | None, at_us: int | None = None) -> Violation:
        text = f"{self.topic}/{self.partition}: {message}"
        return Violation(kind, text, self.partition, offset, at_us=at_us)


def _placed(topic: str, here: list[Operation], appends: dict[tuple[str, str], Operation]) -> list[_Placed]:
    """The appends whose offset is known, by offset."""
    offsets: dict[int, _Placed] = {}
    for operation in here:
        if operation.kind == "append" and operation.outcome == "ok" and operation.offset is not None:
            offsets[operation.offset] = _Placed(
                operation.offset, operation.start_us, operation.end_us, operation.value
            )
    for operation in here:
        for offset, value in operation.values:
            sent = appends.get((topic, value))
            if offset not in offsets and sent is not None:
                offsets[offset] = _Placed(offset, sent.start_us, None, value)
    return [offsets[offset] for offset in sorted(offsets)]


def _appends_in_order(where: _Where, placed: list[_Placed]) -> list[Violation]:
    violations = []
    first: _Placed | None = None  # of all at higher offsets, the one that ended first
    for append in reversed(placed):
        if first is not None and first.end_us is not None and first.end_us < append.start_us:
            violations.append(
                where.wrong(
                    "real_time",
                    f"{append.value!r} was begun at {append.start_us} us and got offset {append.offset}; "
                    f"{first.value!r} had been acknowledged at {first.end_us} us, at offset {first.offset}",
                    append.offset,
                )
            )
        if append.end_us is not None and (
            first is None or first.end_us is None or append.end_us < first.end_us
        ):
            first = append
    return violations


def _stale_reads(where: _Where, placed: list[_Placed], reads: list[Operation]) -> list[Violation]:
    ended = sorted((each.end_us, each) for each in placed if each.end_us is not None)
    ends = [end for end, _ in ended]
    highest = list(itertools.accumulate((each for _, each in ended), max))
    violations = []
    for read in reads:
        before = bisect_left(ends, read.start_us)
        if before and highest[before - 1].offset >= _end(read):
            missed = highest[before - 1]
            violations.append(
                where.wrong(
                    "stale_read",
                    f"{read.process} asked {read.node} at {read.start_us} us and was told the end "
                    f"{read.end_offset}; {missed.value!r} had been acknowledged at offset {missed.offset} "
                    f"at {missed.end_us} us",
                    missed.offset,
                    read.start_us,
                )
            )
    return violations


def _from_the_future(where: _Where, placed: list[_Placed], here: list[Operation]) -> list[Violation]:
    """Of all that lies below an offset that was told or read, the append that was begun last."""
    offsets = [each.offset for each in placed]
    latest: list[_Placed] = list(itertools.accumulate(placed, _later))
    violations = []
    for read in here:
        if read.kind == "append" or read.outcome != "ok" or read.end_us is None:
            continue
        behind = max([offset + 1 for offset, _ in read.values] + [read.end_offset or 0])
        below = bisect_left(offsets, behind)
        if below and latest[below - 1].start_us > read.end_us:
            append = latest[below - 1]
            violations.append(
                where.wrong(
                    "future_read",
                    f"{read.process} saw up to offset {behind} at {read.end_us} us, but {append.value!r} at "
                    f"offset {append.offset} was begun at {append.start_us} us",
                    append.offset,
                    read.start_us,
                )
            )
    return violations


def _reads_in_order(where: _Where, reads: list[Operation]) -> list[Violation]:
    done = sorted((each for each in reads if each.end_us is not None), key=lambda each: each.end_us or 0)
    ends = [each.end_us or 0 for each in done]
    furthest: list[Operation] = list(itertools.accumulate(done, _further))
    violations = []
    for read in reads:
        before = bisect_left(ends, read.start_us)
        if before and _end(furthest[before - 1]) > _end(read):
            other = furthest[before - 1]
            violations.append(
                where.wrong(
                    "stale_read",
                    f"{read.process} asked {read.node} at {read.start_us} us and was told the end "
                    f"{read.end_offset}; {other.process} had been told {other.end_offset} by {other.node} at "
                    f"{other.end_us} us",
                    read.end_offset,
                    read.start_us,
                )
            )
    return violations


def _later(one: _Placed, other: _Placed) -> _Placed:
    return other if other.start_us > one.start_us else one


def _further(one: Operation, other: Operation) -> Operation:
    return other if _end(other) > _end(one) else one


def _end(read: Operation) -> int:
    assert read.end_offset is not None, f"a read that told no end: {read}"
    return read.end_offset
