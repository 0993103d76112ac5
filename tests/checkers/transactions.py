"""Checks of transactions: what drivers of sinks asked for and were told, against everything read back.

Every record's value is unique, so that it says of which attempt it is. What is looked for in one topic:

- `lost`: told as committed and not there, or a number that the sink has passed without it.
- `torn`: a part of an attempt is there: not all partitions, not all records of one, or with others between.
- `duplicate`: a record at two offsets, or a number that two attempts have committed.
- `reordered`: batch N+1 before N in a partition, or records of a batch in another order than staged.
- `scattered`: in another partition than the one it was staged for.
- `aborted`: there, though its driver was told for certain that it is not committed, or never asked for it.
- `fenced`: a batch of an older epoch behind one of a newer; or asked for when a newer epoch had been told
  already; or one epoch told to two drivers.
- `inside`: an end offset that was told lies inside of a commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import msgspec

from laminar.testing.history import Kind, Violation


class Attempt(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One try of one driver to commit batch `number` of `sink` under `epoch`.

    `parts`: by partition the values that it staged, in order. `asked_us`: when it asked for the commit; None:
    it never did. Of outcome `refused` it is certain that it is not committed, of `unknown` nothing is.
    """

    sink: str
    number: int
    epoch: int
    parts: dict[int, list[str]]
    asked_us: int | None = None
    ended_us: int | None = None
    outcome: Literal["applied", "refused", "unknown"] = "refused"
    error: str = ""

    def __str__(self) -> str:
        return f"batch {self.number} of {self.sink} under epoch {self.epoch}"


class Begun(msgspec.Struct, kw_only=True):
    """A driver was told at `told_us` that its epoch is `epoch`."""

    sink: str
    epoch: int
    told_us: int


class _Found(NamedTuple):
    """A record of an attempt: where it was read, and its place among what was staged for its partition."""

    offset: int
    place: int


_Places = dict[int, list[_Found]]


def check_transactions(
    attempts: Sequence[Attempt],
    begun: Iterable[Begun],
    read: Mapping[int, Sequence[tuple[int, str]]],
    *,
    ends: Iterable[tuple[int, int]] = (),
    committed: Mapping[str, int] | None = None,
) -> list[Violation]:
    """Everything that is wrong. `read` is each partition as (offset, value) from its first record on.

    Values that no attempt staged are somebody else's. `ends` are (partition, end offset) that were told;
    `committed` is what each sink said in the end, -1: nothing. Numbers of a sink begin at 0, none left out.
    """
    staged = {
        value: (attempt, partition, place)
        for attempt in attempts
        for partition, values in attempt.parts.items()
        for place, value in enumerate(values)
    }
    found: list[_Places] = [{} for _ in attempts]
    numbers = {id(attempt): number for number, attempt in enumerate(attempts)}
    violations = []
    for partition, records in sorted(read.items()):
        for offset, value in records:
            if value not in staged:
                continue
            attempt, wanted, place = staged[value]
            if wanted != partition:
                message = f"{value!r} was staged for partition {wanted} and lies in {partition}"
                violations.append(Violation("scattered", message, partition, offset))
                continue
            found[numbers[id(attempt)]].setdefault(partition, []).append(_Found(offset, place))
    there = [(attempt, places) for attempt, places in zip(attempts, found, strict=True) if places]
    for attempt, places in there:
        violations += _whole(attempt, places)
    for attempt, places in zip(attempts, found, strict=True):
        if attempt.outcome == "applied" and attempt.parts and not places:
            message = f"{attempt} was told as committed and is not there"
            violations.append(_wrong("lost", message, attempt))
    violations += _sinks(there, committed)
    violations += _epochs(there, list(begun))
    violations += _ends(there, ends)
    return violations


def _span(records: Sequence[_Found]) -> tuple[int, int]:
    """First and last offset, of each record where it lies first: what comes again is said elsewhere."""
    offsets: dict[int, int] = {}
    for offset, place in records:
        offsets.setdefault(place, offset)
    return min(offsets.values()), max(offsets.values())


def _wrong(kind: Kind, message: str, attempt: Attempt, partition: int = -1, offset: int = -1) -> Violation:
    return Violation(kind, message, partition, offset, attempt.sink, attempt.number, at_us=attempt.asked_us)


def _whole(attempt: Attempt, places: _Places) -> list[Violation]:
    """Each partition has all of it, once, in order, and nothing between; and none is missing."""
    violations = []
    if attempt.outcome == "refused":
        message = f"{attempt} was refused ({attempt.error or 'never asked for'}) and is there"
        violations.append(_wrong("aborted", message, attempt))
    missing = sorted(attempt.parts.keys() - places.keys())
    if missing:
        message = f"{attempt} is in partitions {sorted(places)} and not in {missing}"
        violations.append(_wrong("torn", message, attempt, missing[0]))
    for partition, records in sorted(places.items()):
        staged = len(attempt.parts[partition])
        once = sorted({each.place for each in records})
        offset = records[0].offset
        if len(records) > len(once):
            offsets = [each.offset for each in records]
            message = f"{attempt}: partition {partition} holds {len(once)} of its records at {offsets}"
            violations.append(_wrong("duplicate", message, attempt, partition, offset))
        elif len(once) < staged:
            message = f"{attempt}: partition {partition} holds {len(once)} of its {staged} records"
            violations.append(_wrong("torn", message, attempt, partition, offset))
        elif [each.place for each in records] != once:
            message = f"{attempt}: partition {partition} holds its records in another order"
            violations.append(_wrong("reordered", message, attempt, partition, offset))
        elif records[-1].offset - records[0].offset != staged - 1:
            message = f"{attempt}: others lie between its records in partition {partition}"
            violations.append(_wrong("torn", message, attempt, partition, offset))
    return violations


def _sinks(there: Sequence[tuple[Attempt, _Places]], committed: Mapping[str, int] | None) -> list[Violation]:
    """Of each sink: every number once, none left out, and in every partition one behind the other."""
    violations = []
    by_sink: dict[str, dict[int, tuple[Attempt, _Places]]] = {}
    for attempt, places in there:
        known = by_sink.setdefault(attempt.sink, {})
        if attempt.number in known:
            message = f"{attempt} is there, and so is it under epoch {known[attempt.number][0].epoch}"
            violations.append(_wrong("duplicate", message, attempt))
            continue
        known[attempt.number] = (attempt, places)
    for sink, last in (committed or {}).items():
        highest = max(by_sink.get(sink, {}), default=-1)
        if last != highest:
            message = f"{sink} says that {last} is its last batch; the last one that is there is {highest}"
            violations.append(Violation("lost" if last > highest else "unknown", message, -1, key=sink))
    for sink, known in sorted(by_sink.items()):
        for number in sorted(set(range(max(known))) - known.keys()):
            message = f"batch {number} of {sink} is not there, a later one is"
            violations.append(Violation("lost", message, -1, key=sink, number=number))
        ends: dict[int, tuple[Attempt, int]] = {}
        for number in sorted(known):
            attempt, places = known[number]
            for partition, records in sorted(places.items()):
                first, last = _span(records)
                before = ends.get(partition)
                if before is not None and first < before[1]:
                    message = (
                        f"{attempt} lies at {first} in partition {partition}, {before[0]} at {before[1]}"
                    )
                    violations.append(_wrong("reordered", message, attempt, partition, first))
                ends[partition] = (attempt, last)
    return violations


def _epochs(there: Sequence[tuple[Attempt, _Places]], begun: Sequence[Begun]) -> list[Violation]:
    violations = []
    by_sink: dict[str, list[Attempt]] = {}
    for attempt, _ in there:
        by_sink.setdefault(attempt.sink, []).append(attempt)
    for attempts in by_sink.values():
        for before, after in pairwise(sorted(attempts, key=lambda each: each.number)):
            if after.epoch < before.epoch:
                message = f"{after} is behind {before}, whose epoch is newer"
                violations.append(_wrong("fenced", message, after))
    told: dict[str, dict[int, Begun]] = {}
    for each in begun:
        epochs = told.setdefault(each.sink, {})
        if each.epoch in epochs:
            message = f"two drivers of {each.sink} were told epoch {each.epoch}"
            violations.append(Violation("fenced", message, -1, key=each.sink, at_us=each.told_us))
        epochs[each.epoch] = each
    for attempt, _ in there:
        for newer in told.get(attempt.sink, {}).values():
            asked = attempt.asked_us
            if newer.epoch > attempt.epoch and asked is not None and newer.told_us < asked:
                message = f"{attempt} was asked for after epoch {newer.epoch} had been told, and is there"
                violations.append(_wrong("fenced", message, attempt))
                break
    return violations


def _ends(there: Sequence[tuple[Attempt, _Places]], ends: Iterable[tuple[int, int]]) -> list[Violation]:
    inside: dict[tuple[int, int], Attempt] = {}
    for attempt, places in there:
        for partition, records in places.items():
            first, last = _span(records)
            inside |= {(partition, offset): attempt for offset in range(first + 1, last + 1)}
    violations = []
    for partition, end in sorted(set(ends) & inside.keys()):
        attempt = inside[partition, end]
        message = f"{end} was told as the end of partition {partition}: inside of {attempt}"
        violations.append(_wrong("inside", message, attempt, partition, end))
    return violations
