"""The partition of a key, which clients and nodes must compute alike.

A key is hashed to one of 65,536 *logical partitions*, and that never changes. A *route* divides these into
contiguous ranges, one for each partition that takes records, and names these partitions by their numbers.
Each split, merge or move of partitions gives a topic a new route, with the next version. The route of version
0 follows from the number of partitions alone (`Route.even`); later ones come from the cluster. Client and
node must agree to the bit, which the tests check with fixed examples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import mmh3

LOGICAL_PARTITIONS = 65536


def logical_of_key(key: bytes | str) -> int:
    """Return the logical partition of a key, 0 to 65535: the low 16 bits of MurmurHash3 x86 32, seed 0.

    Text is hashed as UTF-8. An empty key is a key like any other.
    """
    return mmh3.hash(key, 0, False) & (LOGICAL_PARTITIONS - 1)


def logical_of_group(group: str, partitions: int) -> int:
    """Return the logical partition of a consumer group: the leader of its partition knows the members.

    `partitions` is the topic's number of partitions at its creation. By route 0 the logical partition is in
    partition ``hash(group) % partitions``; by later routes in whichever partition holds it then.
    """
    return Route.even(partitions).bounds[mmh3.hash(group.encode(), 0, False) % partitions]


def logical_of_block(block: int, partitions: int) -> int:
    """Return the logical partition of a named producer's block of numbered records without a key.

    `partitions` is the topic's number of partitions at its creation. By route 0 the logical partition is in
    partition ``block % partitions``; within it, blocks are spread by a hash.
    """
    first, end = Route.even(partitions).bounds[block % partitions :][:2]
    return first + mmh3.hash(block.to_bytes(8, "little"), 0, False) % (end - first)


class Route:
    """A route of a topic: for each partition that takes records, its range of logical partitions.

    `numbers` are the numbers of the partitions in the order of their ranges: beyond route 0 they need not
    rise, and may have gaps. `bounds` has one element more: partition ``numbers[i]`` holds the logical
    partitions from ``bounds[i]`` up to, not including, ``bounds[i + 1]``. A route is immutable; two are
    equal if versions, bounds and numbers are.
    """

    __slots__ = ("_places", "_starts", "bounds", "numbers", "version")

    def __init__(self, version: int, bounds: Sequence[int], numbers: Iterable[int]) -> None:
        self.version = version
        self.bounds = tuple(bounds)
        self.numbers = tuple(numbers)
        if len(self.bounds) < 2 or self.bounds[0] != 0 or self.bounds[-1] != LOGICAL_PARTITIONS:
            raise ValueError(
                f"bounds go from 0 to {LOGICAL_PARTITIONS}, not {self.bounds[:1]}..{self.bounds[-1:]}"
            )
        if any(first >= end for first, end in pairwise(self.bounds)):
            raise ValueError(f"bounds of route {version} do not rise: each partition has at least one")
        self._starts = self.bounds[:-1]
        self._places = {number: place for place, number in enumerate(self.numbers)}
        if not len(self._places) == len(self.numbers) == len(self._starts) or min(self.numbers) < 0:
            raise ValueError(f"route {version} has {len(self._starts)} ranges for numbers {self.numbers}")

    @classmethod
    def even(cls, partitions: int) -> Route:
        """Return route 0 of a topic: ranges of equal size; the first ones are larger by one if needed."""
        return _even(partitions)

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> Route:
        """Return the route of an element of ``routes`` in the answer of ``GET /v1/topics/{t}/routes``.

        Raises:
            ValueError: the ranges do not make a route, or the number of logical partitions is not 65,536.
        """
        if int(answer["logical_partitions"]) != LOGICAL_PARTITIONS:
            raise ValueError(f"a route of {answer['logical_partitions']} logical partitions")
        return cls.of_ranges(int(answer["version"]), answer["ranges"])

    @classmethod
    def of_ranges(cls, version: int, ranges: Iterable[Mapping[str, Any]]) -> Route:
        """Return the route of these ranges: each has ``from``, ``to`` and ``partition``, in any order.

        Raises:
            ValueError: the ranges do not cover each logical partition once.
        """
        held = sorted((int(each["from"]), int(each["to"]), int(each["partition"])) for each in ranges)
        if any(before[1] != after[0] for before, after in pairwise(held)):
            raise ValueError(f"bounds of route {version}: its ranges leave gaps, or overlap")
        bounds = [each[0] for each in held] + [each[1] for each in held[-1:]]
        return cls(version, bounds, [each[2] for each in held])

    def answer(self) -> dict[str, Any]:
        """Return the route in the form of an HTTP answer, which `from_answer` reads."""
        return {
            "version": self.version,
            "logical_partitions": LOGICAL_PARTITIONS,
            "ranges": [
                {"from": held.start, "to": held.stop, "partition": number}
                for number, held in self.ranges().items()
            ],
        }

    def partition_of(self, logical: int) -> int:
        """Return the partition that holds a logical partition. Raises ValueError outside 0 to 65535."""
        if not 0 <= logical < LOGICAL_PARTITIONS:
            raise ValueError(f"logical partition {logical}; they go from 0 to {LOGICAL_PARTITIONS - 1}")
        return self.numbers[bisect_right(self._starts, logical) - 1]

    def partitions_of(self, logical: Iterable[int]) -> list[int]:
        """Return the partitions that hold these logical partitions, from 0 to 65535, in the same order."""
        numbers, starts = self.numbers, self._starts
        return [numbers[bisect_right(starts, each) - 1] for each in logical]

    def partition_of_key(self, key: bytes | str) -> int:
        """Return the partition that takes the records of a key."""
        return self.numbers[bisect_right(self._starts, logical_of_key(key)) - 1]

    def after(self, number: int) -> int:
        """Return the partition with the next range after that of `number`; after the last comes the first."""
        return self.numbers[(self._places[number] + 1) % len(self.numbers)]

    def ranges(self) -> dict[int, range]:
        """Return by partition its range of logical partitions, in order of ranges."""
        return {
            number: range(first, end)
            for number, (first, end) in zip(self.numbers, pairwise(self.bounds), strict=True)
        }

    def __contains__(self, number: object) -> bool:
        return number in self._places

    def __len__(self) -> int:
        return len(self.numbers)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Route):
            return NotImplemented
        return (self.version, self.bounds, self.numbers) == (other.version, other.bounds, other.numbers)

    def __hash__(self) -> int:
        return hash((self.version, self.bounds, self.numbers))

    def __repr__(self) -> str:
        return f"<Route version={self.version} partitions={len(self)}>"


@lru_cache(maxsize=64)
def _even(partitions: int) -> Route:
    if not 1 <= partitions <= LOGICAL_PARTITIONS:
        raise ValueError(f"{partitions} partitions; a topic has 1 to {LOGICAL_PARTITIONS}")
    size, rest = divmod(LOGICAL_PARTITIONS, partitions)
    sizes = (size + (number < rest) for number in range(partitions))
    return Route(0, list(accumulate(sizes, initial=0)), range(partitions))
