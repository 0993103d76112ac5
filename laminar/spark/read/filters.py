"""Which of a query's filters this source takes over, and what they leave to read. Pure.

Spark hands over conjunctions of simple comparisons. Topics, partitions and offsets cut the ranges; a tag lets
nodes leave out batches; times are compared in Arrow, before records pass Spark's socket: a record's time may
be its producer's, so no offset follows from it. What is not exactly so is left to Spark.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from laminar.spark.read.plan import EVERY_ROW, Range, RowFilter

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Columns of which no cell is ever null. A value is, of a record larger than a batch.
_NEVER_NULL = ("topic", "partition", "offset", "timestamp", "timestampType")
# What a comparison with a whole number says of the lowest, and of the one behind the highest.
_LOWEST = {GreaterThan: 1, GreaterThanOrEqual: 0, EqualTo: 0}
_BEHIND = {LessThan: 0, LessThanOrEqual: 1, EqualTo: 1}


@dataclass(slots=True)
class Interval:
    """Whole numbers from `lowest` to before `behind`; None: without an end."""

    lowest: int | None = None
    behind: int | None = None

    def narrow(self, comparison: type[Filter], number: int) -> bool:
        """Whether `comparison` with `number` is one that this can hold; then it does."""
        if comparison not in _LOWEST and comparison not in _BEHIND:
            return False
        if comparison in _LOWEST:
            lowest = number + _LOWEST[comparison]
            self.lowest = lowest if self.lowest is None else max(self.lowest, lowest)
        if comparison in _BEHIND:
            behind = number + _BEHIND[comparison]
            self.behind = behind if self.behind is None else min(self.behind, behind)
        return True

    def __contains__(self, number: int) -> bool:
        return (self.lowest is None or number >= self.lowest) and (
            self.behind is None or number < self.behind
        )


@dataclass(slots=True)
class Pushed:
    """What was taken over so far. `rows` begins with what the query's options say."""

    rows: RowFilter = EVERY_ROW
    topics: set[str] | None = None
    numbers: set[int] | None = None
    partition: Interval = field(default_factory=Interval)
    offset: Interval = field(default_factory=Interval)
    _time_us: Interval = field(default_factory=Interval)

    def push(self, filters: Iterable[Filter]) -> list[Filter]:
        """Take over what can be; the others, for Spark."""
        left = [each for each in filters if not self._take(each)]
        self.rows = replace(self.rows, since_us=self._time_us.lowest, until_us=self._time_us.behind)
        return left

    def cut(self, whole: Iterable[Range]) -> list[Range]:
        """What is left of the ranges."""
        found = []
        for each in whole:
            if self.topics is not None and each.topic not in self.topics:
                continue
            if each.partition not in self.partition:
                continue
            if self.numbers is not None and each.partition not in self.numbers:
                continue
            start = max(each.start, self.offset.lowest or 0)
            end = each.end if self.offset.behind is None else min(each.end, self.offset.behind)
            if start < end:
                found.append(replace(each, start=start, end=end))
        return found

    def _take(self, each: Filter) -> bool:
        if isinstance(each, IsNotNull):
            return each.attribute[0] in _NEVER_NULL
        if isinstance(each, In):
            return self._take_in(each.attribute, each.value)
        attribute = getattr(each, "attribute", None)
        value = getattr(each, "value", None)
        if attribute is None or len(attribute) != 1 or value is None:
            return False
        match attribute[0]:
            case "partition":
                return self.partition.narrow(type(each), int(value))
            case "offset":
                return self.offset.narrow(type(each), int(value))
            case "timestamp" if isinstance(value, datetime) and value.tzinfo is not None:
                return self._time_us.narrow(type(each), (value - _EPOCH) // timedelta(microseconds=1))
            case "topic" if type(each) is EqualTo:
                return self._take_in(attribute, (value,))
            case "tag" if type(each) is EqualTo:
                if self.rows.tag not in (None, value):
                    return False
                self.rows = replace(self.rows, tag=str(value))
                return True
        return False

    def _take_in(self, attribute: tuple[str, ...], values: tuple[Any, ...]) -> bool:
        given = {value for value in values if value is not None}
        if attribute == ("topic",):
            self.topics = given if self.topics is None else self.topics & given
            return True
        if attribute == ("partition",):
            self.numbers = given if self.numbers is None else self.numbers & given
            return True
        return False
