"""How numbers are spread, when there are too many to hold: counted in classes, and read off these. Pure.

A class is all numbers that agree in their length and their first seven bits. Below 128 that is one number;
above, the numbers of a class are within 1.6 % of each other, and their count and sum are exact. So some 2,000
classes hold the sizes of any number of records, and the frequencies of any number of keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column

_BITS = 7


@dataclass(frozen=True, slots=True)
class Class:
    """Numbers of one class: how many, their sum, the least and the greatest."""

    count: int
    total: int
    low: int
    high: int

    @property
    def mean(self) -> int:
        """One number for all of them."""
        return round(self.total / self.count)


@dataclass(frozen=True, slots=True)
class Bin:
    """How many numbers there are from `low` to before `high`, powers of two; 0 has a bin of its own."""

    low: int
    high: int
    count: int


def class_of(numbers: Column) -> Column:
    """Each number's class, as an integer that rises with the numbers; null for null. None is negative."""
    from pyspark.sql import functions as f

    # The half keeps the logarithm away from whole numbers, where its last bit would decide.
    shift = f.floor(f.log2(numbers + 0.5)).cast("int") - (_BITS - 1)
    first_bits = f.call_function("shiftright", numbers, shift).cast("int")
    fine = numbers < (1 << _BITS)
    return f.when(fine, numbers.cast("int")).otherwise((1 << (_BITS - 1)) * shift + first_bits)


def bins(classes: Sequence[Class]) -> list[Bin]:
    """From the least number to the greatest; classes that rise. A bin between them may be empty."""
    found: dict[int, int] = {}
    for each in classes:
        found[each.low.bit_length()] = found.get(each.low.bit_length(), 0) + each.count
    if not found:
        return []
    lengths = range(min(found), max(found) + 1)
    return [Bin((1 << n) >> 1, 1 << n, found.get(n, 0)) for n in lengths]


def percentile(classes: Sequence[Class], share: float) -> int:
    """The least number that at least `share` of all are not above; classes that rise, at least one."""
    wanted = math.ceil(share * sum(each.count for each in classes))
    for each in classes:
        wanted -= each.count
        if wanted <= 0:
            return each.mean
    return classes[-1].mean


def of_greatest(classes: Sequence[Class], rank: int) -> int:
    """The number at a rank, 1 that of the greatest; classes that rise."""
    for each in reversed(classes):
        rank -= each.count
        if rank <= 0:
            return each.mean
    return 0


def sum_of_greatest(classes: Sequence[Class], count: int) -> int:
    """The sum of the `count` greatest numbers; classes that rise."""
    total = 0
    for each in reversed(classes):
        if count < each.count:
            # A class is cut at its mean, unless all its numbers are one.
            return total + round(each.total * count / each.count)
        total += each.total
        count -= each.count
    return total
