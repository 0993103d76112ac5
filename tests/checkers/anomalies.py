"""The anomalies of Jepsen's kafka workload, looked for in a history of appends and polls.

Values are unique, and one partition's offsets are dense. What is looked for:

- `lost`: acknowledged or read, and not in the final reading; `unseen`: a reader that followed missed it.
- `duplicate`: one value at two offsets. `conflict`: two values at one offset (inconsistent offsets), be it
  in receipts, polls or the final reading. `moved`: a receipt names another place than the log does.
- `reordered`: of one key a later number at a lower offset, and `scattered`: of one key in two partitions.
- `offsets`: a reader's polls go back, or within a poll (non-monotonic poll).
- `skipped`: a reader's polls leave out offsets, or one poll does (poll skip).
- `unknown`: read, and never sent. `aborted`: read, though its append is known to have failed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from laminar.testing.history import Kind, Violation
from tests.checkers.operations import Operation, by_partition

_POLLS = ("poll", "final")


def check_operations(operations: Iterable[Operation], *, followers: Collection[str] = ()) -> list[Violation]:
    """Everything that is wrong. `followers` are the reading processes that were to see everything."""
    known = list(operations)
    appends = {(each.topic, each.value): each for each in known if each.kind == "append"}
    violations = _keys(known, appends)
    for (topic, partition), here in sorted(by_partition(known).items()):
        check = _Partition(topic, partition, here, appends)
        violations += check.places()
        violations += check.lost()
        violations += check.polls()
        for process in followers:
            violations += check.unseen(process)
    return violations


def _keys(known: list[Operation], appends: dict[tuple[str, str], Operation]) -> list[Violation]:
    """Order and home of each key, by the place where each value was first seen."""
    places: dict[tuple[str, str], tuple[int, int]] = {}
    for operation in known:
        if operation.kind == "append":
            if operation.outcome == "ok" and operation.offset is not None:
                places.setdefault((operation.topic, operation.value), (operation.partition, operation.offset))
        else:
            for offset, value in operation.values:
                places.setdefault((operation.topic, value), (operation.partition, offset))
    home: dict[tuple[str, str], int] = {}
    last: dict[tuple[str, str], Operation] = {}
    violations = []
    for name, (partition, offset) in sorted(places.items(), key=lambda each: (each[0][0], each[1])):
        append = appends.get(name)
        if append is None:
            continue  # `unknown` is said elsewhere
        key = (append.topic, append.key)
        if home.setdefault(key, partition) != partition:
            message = f"{append.topic}: {append.value!r} lies in partition {partition}, not in {home[key]}"
            violations.append(Violation("scattered", message, partition, offset, append.key, append.number))
            continue
        before = last.get(key)
        if before is not None and append.number < before.number:
            where = f"{append.topic}/{partition}"
            message = f"{where}: {append.value!r} at offset {offset} lies behind {before.value!r}"
            violations.append(Violation("reordered", message, partition, offset, append.key, append.number))
        else:
            last[key] = append
    return violations


class _Partition:
    """One partition's operations, and what they say about it."""

    def __init__(
        self,
        topic: str,
        partition: int,
        here: list[Operation],
        appends: dict[tuple[str, str], Operation],
    ) -> None:
        self._topic = topic
        self._partition = partition
        self._here = here
        self._appends = appends
        self._final = {
            offset: value for each in here if each.kind == "final" for offset, value in each.values
        }
        self._read_finally = any(each.kind == "final" for each in here)

    def _wrong(self, kind: Kind, message: str, offset: int | None, value: str) -> Violation:
        key, _, number = value.rpartition(" ")
        text = f"{self._topic}/{self._partition}: {message}"
        known = int(number) if number.isdecimal() else None
        return Violation(kind, text, self._partition, offset, key, known)

    def places(self) -> list[Violation]:
        """What lies where, by all who say so: each (offset, value) once."""
        told: dict[tuple[int, str], str] = {}
        for each in self._here:
            if each.kind == "append" and each.outcome == "ok" and each.offset is not None:
                told.setdefault((each.offset, each.value), "a receipt")
            for place in each.values:
                told.setdefault(place, f"a {each.kind} of {each.process} from {each.node or 'anyone'}")
        violations = []
        by_offset: dict[int, str] = {}
        by_value: dict[str, int] = {}
        for (offset, value), who in sorted(told.items()):
            before = by_offset.setdefault(offset, value)
            if before != value:
                violations.append(
                    self._wrong(
                        "conflict",
                        f"offset {offset} holds {value!r} by {who}, and {before!r} by {told[offset, before]}",
                        offset,
                        value,
                    )
                )
            at = by_value.setdefault(value, offset)
            if at != offset:
                violations.append(
                    self._wrong(
                        "duplicate",
                        f"{value!r} lies at offset {offset} by {who}, and at {at} by {told[at, value]}",
                        offset,
                        value,
                    )
                )
            violations += self._strange(offset, value, who)
        return violations

    def _strange(self, offset: int, value: str, who: str) -> list[Violation]:
        append = self._appends.get((self._topic, value))
        if append is None:
            return [self._wrong("unknown", f"{value!r} by {who} was never sent", offset, value)]
        if append.outcome == "fail":
            return [self._wrong("aborted", f"{value!r} by {who} was refused: {append.error}", offset, value)]
        return []

    def lost(self) -> list[Violation]:
        """Receipts and polls against the final reading."""
        if not self._read_finally:
            return []
        found = {value: offset for offset, value in self._final.items()}
        violations = []
        for each in self._here:
            if each.kind != "append" or each.outcome != "ok" or each.offset is None:
                continue
            at = found.get(each.value)
            if at is None:
                message = f"{each.value!r} was acknowledged at offset {each.offset} and is not there"
                violations.append(self._wrong("lost", message, each.offset, each.value))
            elif at != each.offset:
                message = f"{each.value!r} was acknowledged at offset {each.offset} and lies at {at}"
                violations.append(self._wrong("moved", message, at, each.value))
        polled = {place: each for each in self._here if each.kind == "poll" for place in each.values}
        for (offset, value), each in sorted(polled.items(), key=lambda item: item[0]):
            if offset not in self._final:
                message = f"{value!r} was read at offset {offset} by {each.process} and is not there"
                violations.append(self._wrong("lost", message, offset, value))
        return violations

    def polls(self) -> list[Violation]:
        """Each reader goes forward, one offset at a time. A reader that starts anew has another name."""
        last: dict[str, int] = {}
        violations = []
        for each in self._here:
            if each.kind not in _POLLS:
                continue
            told = f"{each.process}, told by {each.node or 'anyone'},"
            for offset, value in each.values:
                before = last.get(each.process)
                if before is not None and offset <= before:
                    message = f"{told} got offset {offset} ({value!r}) after {before}"
                    violations.append(self._wrong("offsets", message, offset, value))
                elif before is not None and offset != before + 1:
                    message = f"{told} got {offset} ({value!r}) next to {before}"
                    violations.append(self._wrong("skipped", message, offset, value))
                last[each.process] = offset
        return violations

    def unseen(self, process: str) -> list[Violation]:
        """What a reader that followed to the end did not see of the final reading."""
        seen = {
            offset
            for each in self._here
            if each.kind == "poll" and each.process == process
            for offset, _ in each.values
        }
        return [
            self._wrong("unseen", f"{process} never saw {value!r} at offset {offset}", offset, value)
            for offset, value in sorted(self._final.items())
            if offset not in seen
        ]
