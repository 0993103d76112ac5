"""Histograms of integers in classes of bounded relative width, and percentiles of them. Pure.

A class is all integers with the same length in bits and the same first seven bits. Below 128 that is one
integer; above, the integers of a class are within 1.6 % of each other. Count and sum of a class are exact. So
some 2,000 classes are enough for the sizes of any number of records, and for the frequencies of any number of
keys. It is the log-linear scheme of HdrHistogram.
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
    """The integers of one class: their number, their sum (`total`), the least and the greatest."""

    count: int
    total: int
    low: int
    high: int

    @property
    def mean(self) -> int:
        """The mean of the class, rounded: it stands for each of its integers."""
        return round(self.total / self.count)


@dataclass(frozen=True, slots=True)
class Bin:
    """One bin of a histogram: `count` integers from `low` to `high - 1`.

    Both borders are powers of two, except in the first bin, which holds only 0: `low` is 0 and `high` is 1.
    """

    low: int
    high: int
    count: int


def class_of(numbers: Column) -> Column:
    """Return the number of each integer's class; integers must not be negative, null gives null.

    A greater integer has the same number or a greater one.
    """
    from pyspark.sql import functions as f

    # At a power of two the logarithm is an integer, and a rounding error would decide. The half avoids that.
    shift = f.floor(f.log2(numbers + 0.5)).cast("int") - (_BITS - 1)
    first_bits = f.call_function("shiftright", numbers, shift).cast("int")
    fine = numbers < (1 << _BITS)
    return f.when(fine, numbers.cast("int")).otherwise((1 << (_BITS - 1)) * shift + first_bits)


def bins(classes: Sequence[Class]) -> list[Bin]:
    """Return the bins from that of the least integer to that of the greatest, the empty ones included.

    `classes` are in rising order.
    """
    found: dict[int, int] = {}
    for each in classes:
        found[each.low.bit_length()] = found.get(each.low.bit_length(), 0) + each.count
    if not found:
        return []
    lengths = range(min(found), max(found) + 1)
    return [Bin((1 << n) >> 1, 1 << n, found.get(n, 0)) for n in lengths]


def percentile(classes: Sequence[Class], share: float) -> int:
    """Return the percentile at `share`, from 0 to 1: the mean of the class that contains it.

    `classes` are in rising order, and at least one.
    """
    wanted = math.ceil(share * sum(each.count for each in classes))
    for each in classes:
        wanted -= each.count
        if wanted <= 0:
            return each.mean
    return classes[-1].mean


def of_greatest(classes: Sequence[Class], rank: int) -> int:
    """Return the integer at `rank`, where 1 is the greatest, as its class's mean; 0 beyond the last rank.

    `classes` are in rising order.
    """
    for each in reversed(classes):
        rank -= each.count
        if rank <= 0:
            return each.mean
    return 0


def sum_of_greatest(classes: Sequence[Class], count: int) -> int:
    """Return the sum of the `count` greatest integers; of all, if there are fewer.

    `classes` are in rising order.
    """
    total = 0
    for each in reversed(classes):
        if count < each.count:
            # Of this class only `count` integers belong to the sum: each counts as the class's mean.
            return total + round(each.total * count / each.count)
        total += each.total
        count -= each.count
    return total
