"""Checks of a history: they compare what was acknowledged with what is read. Pure functions.

`check_history` compares the receipts of a run with everything that was read afterwards; `check_replicas`
compares the digests of a partition's replicas. Each violation names the record or the replica, so that a
failed run can be examined. Nothing is de-duplicated or repaired first.

What is checked of a history, with (key, number) naming a record; numbers of a key grow in the
order of sending:

1. Every acknowledged record was read (`lost`), at the place its receipt names (`moved`).
2. No record was read more than once (`duplicate`), and no place holds two (`conflict`).
3. Within a partition offsets grow in the order of reading (`offsets`).
4. Of each key, numbers grow with the offsets (`reordered`), and all lie in one partition
   (`scattered`).
5. What was read was sent (`unknown`), if the caller says what was sent without a receipt too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple

Key = str | bytes | None
Kind = Literal[
    "lost",
    "moved",
    "duplicate",
    "conflict",
    "offsets",
    "reordered",
    "scattered",
    "unknown",
    "replica_differs",
    "unseen",
    "skipped",
    "aborted",
    "real_time",
    "stale_read",
    "future_read",
    "torn",
    "fenced",
    "inside",
    "left_behind",
]


class Sent(NamedTuple):
    """A record that was acknowledged: key and number name it; its receipt gave partition and offset."""

    key: Key
    number: int
    partition: int
    offset: int


class Read(NamedTuple):
    """A record that was read, and where. `Read`s of one partition must be in the order of reading."""

    partition: int
    offset: int
    key: Key
    number: int


class Violation(NamedTuple):
    """One violation of a rule; ``str()`` is a sentence that describes it."""

    kind: Kind
    message: str
    partition: int
    offset: int | None = None
    key: Key = None
    number: int | None = None
    node: str | None = None
    at_us: int | None = None
    """Where it is one operation that is wrong, and not what it brought: when that began."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


def _name(key: Key, number: int) -> str:
    shown = key.decode("utf-8", "backslashreplace") if isinstance(key, bytes) else key
    return f"record {number} of key {shown}" if shown is not None else f"record {number} without key"


def check_history(
    acknowledged: Iterable[Sent],
    read: Iterable[Read],
    *,
    uncertain: Collection[tuple[Key, int]] | None = None,
) -> list[Violation]:
    """Return all violations of the rules above in a history, in the order of the rules.

    `uncertain` names records that were sent and got no receipt, so they may be in the log or not. None means
    that these records are not known: then `unknown` is not checked.
    """
    sent = list(acknowledged)
    found = list(read)
    return [
        *_lost_or_moved(sent, found),
        *_duplicates(found),
        *_conflicts(found),
        *_offsets(found),
        *_order_per_key(found),
        *_unknown(sent, found, uncertain),
    ]


def _lost_or_moved(sent: list[Sent], found: list[Read]) -> list[Violation]:
    places: dict[tuple[Key, int], set[tuple[int, int]]] = {}
    for each in found:
        places.setdefault((each.key, each.number), set()).add((each.partition, each.offset))
    violations = []
    for record in sent:
        name = _name(record.key, record.number)
        at = places.get((record.key, record.number))
        expected = f"partition {record.partition} offset {record.offset}"
        if at is None:
            message = f"{name} was acknowledged at {expected} and is not there"
            violations.append(
                Violation("lost", message, record.partition, record.offset, record.key, record.number)
            )
        elif (record.partition, record.offset) not in at:
            partition, offset = min(at)
            message = (
                f"{name} was acknowledged at {expected} and lies at partition {partition} offset {offset}"
            )
            violations.append(Violation("moved", message, partition, offset, record.key, record.number))
    return violations


def _duplicates(found: list[Read]) -> list[Violation]:
    """Return a violation for each repeated reading of a record; it names the place of the first."""
    first: dict[tuple[Key, int], Read] = {}
    violations = []
    for each in found:
        before = first.setdefault((each.key, each.number), each)
        if before is not each:
            message = (
                f"{_name(each.key, each.number)} was read at partition {each.partition} offset {each.offset} "
                f"and before at partition {before.partition} offset {before.offset}"
            )
            violations.append(
                Violation("duplicate", message, each.partition, each.offset, each.key, each.number)
            )
    return violations


def _conflicts(found: list[Read]) -> list[Violation]:
    """Return a violation for each place that was read with two different records in it."""
    held: dict[tuple[int, int], Read] = {}
    violations = []
    for each in found:
        before = held.setdefault((each.partition, each.offset), each)
        if (before.key, before.number) != (each.key, each.number):
            message = (
                f"partition {each.partition} offset {each.offset} holds {_name(each.key, each.number)} "
                f"and held {_name(before.key, before.number)}"
            )
            violations.append(
                Violation("conflict", message, each.partition, each.offset, each.key, each.number)
            )
    return violations


def _offsets(found: list[Read]) -> list[Violation]:
    last: dict[int, int] = {}
    violations = []
    for each in found:
        before = last.get(each.partition)
        if before is not None and each.offset <= before:
            message = (
                f"partition {each.partition} gave offset {each.offset} after {before} "
                f"({_name(each.key, each.number)})"
            )
            violations.append(
                Violation("offsets", message, each.partition, each.offset, each.key, each.number)
            )
        last[each.partition] = each.offset
    return violations


def _order_per_key(found: list[Read]) -> list[Violation]:
    """Return the violations of rule 4, which compares a key's numbers in the order of offsets.

    The order of reading is not used: a reader that returns records in the wrong order violates rule 3.
    """
    home: dict[Key, int] = {}
    highest: dict[Key, Read] = {}
    violations = []
    for each in sorted(found, key=lambda each: (each.partition, each.offset)):
        if each.key is None:
            continue
        if home.setdefault(each.key, each.partition) != each.partition:
            message = (
                f"{_name(each.key, each.number)} lies in partition {each.partition}, "
                f"others of its key in {home[each.key]}"
            )
            violations.append(
                Violation("scattered", message, each.partition, each.offset, each.key, each.number)
            )
            continue
        before = highest.get(each.key)
        # An equal number is a duplicate, which is reported by rule 2.
        if before is not None and each.number < before.number:
            message = (
                f"{_name(each.key, each.number)} at partition {each.partition} offset {each.offset} lies "
                f"behind {_name(before.key, before.number)} at offset {before.offset}"
            )
            violations.append(
                Violation("reordered", message, each.partition, each.offset, each.key, each.number)
            )
        else:
            highest[each.key] = each
    return violations


def _unknown(
    sent: list[Sent], found: list[Read], uncertain: Collection[tuple[Key, int]] | None
) -> list[Violation]:
    if uncertain is None:
        return []
    known = {(each.key, each.number) for each in sent} | set(uncertain)
    return [
        Violation(
            "unknown",
            f"partition {each.partition} offset {each.offset} holds {_name(each.key, each.number)}, "
            "which was never sent",
            each.partition,
            each.offset,
            each.key,
            each.number,
        )
        for each in found
        if (each.key, each.number) not in known
    ]


def check_replicas(digests: Mapping[int, Mapping[str, str]]) -> list[Violation]:
    """Return a violation for each replica whose committed bytes differ from those of the others.

    `digests` has by partition and node the digest of a replica. The digest that most replicas of a partition
    have counts as right; if two digests are equally frequent, there is a violation for each replica.
    """
    violations = []
    for partition, by_node in sorted(digests.items()):
        counts = Counter(by_node.values())
        if len(counts) <= 1:
            continue
        most = counts.most_common(1)[0][1]
        usual = [digest for digest, count in counts.items() if count == most]
        for node, digest in sorted(by_node.items()):
            if len(usual) == 1 and digest == usual[0]:
                continue
            others = ", ".join(sorted(other for other, theirs in by_node.items() if theirs != digest))
            message = f"partition {partition} on node {node} has digest {digest[:16]}, unlike {others}"
            violations.append(Violation("replica_differs", message, partition, node=node))
    return violations
