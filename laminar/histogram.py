"""A histogram: counts of values by upper bounds. One observation takes some 150 ns."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

SECONDS: Final[Sequence[float]] = (
    *(0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Upper bounds of times."""


class Histogram:
    """Counts of observed values by upper bounds, and their sum. One thread adds values; any may read."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = bounds
        # By bound the values up to it and above the bound before; last, all that are larger.
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Add one observed value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_many(self, value: float, count: int) -> None:
        """Add `count` observations of the same value."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def percentile(self, share: float) -> float:
        """Return the smallest bound that at least `share` (0 to 1) of the values do not exceed.

        It is 0 without values, and infinite if too many values exceed the last bound.
        """
        left = share * sum(self.counts)
        if not left:
            return 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            left -= count
            if left <= 0:
                return bound
        return math.inf

    def stored(self) -> tuple[list[int], float]:
        """Return a copy of the counts by bound, and the sum of the values, for the metrics page."""
        return self.counts[:], self.total
