"""The lineage of a topic's partitions: which replaced which. From ``GET /v1/topics/{t}/routes``.

A *change* of a topic's route ends its *inputs*, and its *outputs* follow over the same keys. The *ancestors*
of a partition are its inputs, and theirs. Only changes that are done are listed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from laminar.wire.key_route import Route


@dataclass(frozen=True, slots=True)
class Input:
    """A partition that a change ended: its logical partitions, and its final end offset.

    A `reclaimed` one was deleted with its records.
    """

    partition: int
    held: range
    end: int
    reclaimed: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a route that is done. If it is `strict`, keys keep their order over it."""

    version: int
    strict: bool
    inputs: tuple[Input, ...]
    outputs: Mapping[int, range]


@dataclass(frozen=True, slots=True)
class Lineage:
    """A topic's present route, and the changes that made it, oldest first."""

    route: Route
    changes: tuple[Change, ...] = ()
    _origins: dict[int, Change] = field(default_factory=dict, compare=False, repr=False)
    _ends: dict[int, tuple[Change, Input]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for change in self.changes:
            self._origins.update(dict.fromkeys(change.outputs, change))
            self._ends.update({each.partition: (change, each) for each in change.inputs})

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> Lineage:
        """Return the lineage in an answer; an answer of an older program lists no changes.

        Raises:
            ValueError: it is no route that this program can read.
        """
        route = Route.from_answer(max(answer["routes"], key=lambda each: int(each["version"])))
        return cls(route, tuple(_change(each) for each in answer.get("changes") or ()))

    @property
    def partitions(self) -> dict[int, range]:
        """The logical partitions of each partition that exists, ended ones included."""
        found = {
            each.partition: each.held
            for change in self.changes
            for each in change.inputs
            if not each.reclaimed
        }
        return found | self.route.ranges()

    @property
    def numbers(self) -> list[int]:
        """The keys of `partitions`, in the same order."""
        return [
            *(each for each, (_, ended) in self._ends.items() if not ended.reclaimed),
            *self.route.numbers,
        ]

    def knows(self, partition: int) -> bool:
        """Return whether a partition takes records or has ended, also if it is reclaimed."""
        return partition in self.route or partition in self._ends

    def origin(self, partition: int) -> Change | None:
        """Return the change that made a partition; None if its topic's creation did, or it is unknown."""
        return self._origins.get(partition)

    def end_of(self, partition: int) -> Input | None:
        """Return how a partition ended; None if it takes records, or is not known."""
        found = self._ends.get(partition)
        return None if found is None else found[1]

    def change_after(self, partition: int) -> Change | None:
        """Return the change that ended a partition; None if it takes records, or is not known."""
        found = self._ends.get(partition)
        return None if found is None else found[0]

    def inputs_of(self, partition: int) -> list[int]:
        """Return the partitions that a partition follows, also those that are reclaimed."""
        origin = self.origin(partition)
        return [] if origin is None else [each.partition for each in origin.inputs]

    def before(self, partition: int) -> set[int]:
        """Return the ancestors of a partition, also those that are reclaimed."""
        found: set[int] = set()
        wanted = [partition]
        while wanted:
            inputs = [each for each in self.inputs_of(wanted.pop()) if each not in found]
            found.update(inputs)
            wanted += inputs
        return found

    def first_places(self, known: Mapping[int, int], at: str) -> dict[int, int | str]:
        """Return the start of a reader of all keys, by partition: an offset, or `at`.

        `known` has the positions that it already has. Successors of a partition in `known` are new to the
        reader and read from 0; their predecessors were read.
        """
        passed = set().union(*(self.before(number) for number in known))
        places: dict[int, int | str] = {}
        for number in self.numbers:
            ended = self.end_of(number)
            if number in known:
                places[number] = known[number]
            elif ended is not None and (number in passed or at == "latest"):
                places[number] = ended.end
            elif not self.before(number).isdisjoint(known):
                places[number] = 0
            else:
                places[number] = at
        return places

    def is_strict(self, first: int, end: int, *, after: int) -> bool:
        """Return whether a change later than route `after` keeps order over these logical partitions.

        True also if none of them is known.
        """
        over = [
            change.strict
            for change in self.changes
            if change.version > after
            and any(each.held.start < end and each.held.stop > first for each in change.inputs)
        ]
        return not over or any(over)


def ranges_of(partitions: Iterable[int], route: Route) -> tuple[int, int]:
    """Return the first logical partition of these partitions of a route, and the one after the last."""
    held = route.ranges()
    found = [held[number] for number in partitions]
    return min(each.start for each in found), max(each.stop for each in found)


def _change(answer: Mapping[str, Any]) -> Change:
    return Change(
        int(answer["version"]),
        answer["order"] != "weak",
        tuple(
            Input(
                int(each["partition"]),
                range(int(each["from"]), int(each["to"])),
                int(each["end"] or 0),
                bool(each["reclaimed"]),
            )
            for each in answer["inputs"]
        ),
        {int(each["partition"]): range(int(each["from"]), int(each["to"])) for each in answer["outputs"]},
    )
