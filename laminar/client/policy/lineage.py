"""The lineage of a topic's partitions: which replaced which, from ``GET /v1/topics/{t}/routes``.

A topic's *route* says which partition takes which keys. A *change* of the route (a split, merge or move) ends
some partitions, its *inputs*, and new ones, its *outputs*, take the same keys. The *ancestors* of a partition
are the inputs of the change that made it, their inputs, and so on. Only completed changes are listed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from laminar.wire.key_route import Route


@dataclass(frozen=True, slots=True)
class Input:
    """A partition that a change ended.

    `held` is its range of logical partitions (hashes of keys); `end` is its final end offset. If `reclaimed`
    is true, the partition was deleted with its records.
    """

    partition: int
    held: range
    end: int
    reclaimed: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """A completed change of a route. If it is `strict`, the records of each key keep their order over it.

    `version` is that of the new route; `outputs` has by partition its range of logical partitions.
    """

    version: int
    strict: bool
    inputs: tuple[Input, ...]
    outputs: Mapping[int, range]


@dataclass(frozen=True, slots=True)
class Lineage:
    """A topic's present route, and the changes that led to it, oldest first."""

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
        """Return the lineage in an answer of ``GET /v1/topics/{t}/routes``.

        The answer of a node of an older version lists no changes; then `changes` is empty.

        Raises:
            ValueError: a route in the answer is malformed or of a kind that this version cannot read.
        """
        route = Route.from_answer(max(answer["routes"], key=lambda each: int(each["version"])))
        return cls(route, tuple(_change(each) for each in answer.get("changes") or ()))

    @property
    def partitions(self) -> dict[int, range]:
        """The range of logical partitions of each partition that exists, also of ended ones."""
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
        """Return the change that made a partition; None if it is as old as the topic, or not known."""
        return self._origins.get(partition)

    def end_of(self, partition: int) -> Input | None:
        """Return a partition's entry as an ended one; None if it still takes records, or is not known."""
        found = self._ends.get(partition)
        return None if found is None else found[1]

    def change_after(self, partition: int) -> Change | None:
        """Return the change that ended a partition; None if it still takes records, or is not known."""
        found = self._ends.get(partition)
        return None if found is None else found[0]

    def inputs_of(self, partition: int) -> list[int]:
        """Return the partitions that were replaced by this one, also reclaimed ones; [] if there are none."""
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
        """Return by partition where a reader of all keys starts: an offset, or `at`.

        `known` has the positions that the reader has already. It reads successors of these partitions from 0,
        and their ancestors, which it must have read, not at all.
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
        """Return whether a change after route `after` keeps the order of keys in these logical partitions.

        Return True also if no such change is known.
        """
        over = [
            change.strict
            for change in self.changes
            if change.version > after
            and any(each.held.start < end and each.held.stop > first for each in change.inputs)
        ]
        return not over or any(over)


def ranges_of(partitions: Iterable[int], route: Route) -> tuple[int, int]:
    """Return the first logical partition that these partitions of `route` hold, and the last one plus 1."""
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
