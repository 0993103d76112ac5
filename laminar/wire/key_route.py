"""The partition of a key, which clients and nodes must compute alike.

A topic always has 65,536 *logical partitions*, and a key belongs to one of them for ever. A *route* divides
them into contiguous ranges, one for each partition of the topic. It has a version, so that a partition can be
split later: the logical partition of a key does not change then. Nothing here knows nodes, leaders or topics.
It is apart because client and node must agree to the bit, which the tests check with fixed examples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import mmh3

LOGICAL_PARTITIONS = 65536


def logical_of_key(key: bytes | str) -> int:
    """Return the logical partition of a key, 0 to 65535: the low 16 bits of MurmurHash3 x86 32, seed 0.

    Text counts as its UTF-8. An empty key is a key like any other.
    """
    return mmh3.hash(key, 0, False) & (LOGICAL_PARTITIONS - 1)


class Route:
    """The ranges of logical partitions that a topic's partitions hold.

    `bounds` has one number more than there are partitions: partition ``p`` holds the logical partitions from
    ``bounds[p]`` up to, not including, ``bounds[p + 1]``. A route never changes; two are equal if versions
    and bounds are.
    """

    __slots__ = ("_starts", "bounds", "version")

    def __init__(self, bounds: Sequence[int], version: int = 0) -> None:
        self.bounds = tuple(bounds)
        self.version = version
        if len(self.bounds) < 2 or self.bounds[0] != 0 or self.bounds[-1] != LOGICAL_PARTITIONS:
            raise ValueError(
                f"bounds go from 0 to {LOGICAL_PARTITIONS}, not {self.bounds[:1]}..{self.bounds[-1:]}"
            )
        if any(first >= end for first, end in pairwise(self.bounds)):
            raise ValueError(f"bounds of route {version} do not rise: each partition has at least one")
        self._starts = self.bounds[:-1]

    @classmethod
    def even(cls, partitions: int, version: int = 0) -> Route:
        """Return a route of equal ranges; if that leaves a rest, the first partitions have one more each."""
        if not 1 <= partitions <= LOGICAL_PARTITIONS:
            raise ValueError(f"{partitions} partitions; a topic has 1 to {LOGICAL_PARTITIONS}")
        size, rest = divmod(LOGICAL_PARTITIONS, partitions)
        return cls(list(accumulate((size + (p < rest) for p in range(partitions)), initial=0)), version)

    @property
    def partitions(self) -> int:
        """The number of partitions."""
        return len(self._starts)

    def partition_of(self, logical: int) -> int:
        """Return the partition that holds a logical partition. Raises ValueError outside 0 to 65535."""
        if not 0 <= logical < LOGICAL_PARTITIONS:
            raise ValueError(f"logical partition {logical}; they go from 0 to {LOGICAL_PARTITIONS - 1}")
        return bisect_right(self._starts, logical) - 1

    def partition_of_key(self, key: bytes | str) -> int:
        """Return the partition that holds a key."""
        return bisect_right(self._starts, logical_of_key(key)) - 1

    def ranges(self) -> list[range]:
        """Return the range of logical partitions of each partition, in order of partitions."""
        return [range(first, end) for first, end in pairwise(self.bounds)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Route):
            return NotImplemented
        return self.version == other.version and self.bounds == other.bounds

    def __hash__(self) -> int:
        return hash((self.version, self.bounds))

    def __repr__(self) -> str:
        return f"<Route version={self.version} partitions={self.partitions}>"
