"""Filter pushdown: which of a query's filters this source takes over, and which ranges they leave. Pure.

Spark passes simple comparisons, all of which a row must match. Those of topics, partitions and offsets narrow
the ranges. A tag lets nodes leave out batches. Times are compared in Arrow, before records pass Spark's
socket: a record's time may be its producer's, so no offset follows from it. All other filters are left to
Spark.
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
# Columns that are never null. The value is null for a record larger than a batch, with `largeRecords=null`.
_NEVER_NULL = ("topic", "partition", "offset", "timestamp", "timestampType")
# For a comparison with the integer n: n plus this is the lowest integer that matches.
_LOWEST = {GreaterThan: 1, GreaterThanOrEqual: 0, EqualTo: 0}
# For a comparison with the integer n: n plus this is the integer after the highest that matches.
_STOP = {LessThan: 0, LessThanOrEqual: 1, EqualTo: 1}


@dataclass(slots=True)
class Interval:
    """Integers from `lowest` to `stop - 1`; None is unbounded."""

    lowest: int | None = None
    stop: int | None = None

    def narrow(self, comparison: type[Filter], number: int) -> bool:
        """Narrow the interval to what matches `comparison` with `number`; return False if not supported."""
        if comparison not in _LOWEST and comparison not in _STOP:
            return False
        if comparison in _LOWEST:
            lowest = number + _LOWEST[comparison]
            self.lowest = lowest if self.lowest is None else max(self.lowest, lowest)
        if comparison in _STOP:
            stop = number + _STOP[comparison]
            self.stop = stop if self.stop is None else min(self.stop, stop)
        return True

    def __contains__(self, number: int) -> bool:
        return (self.lowest is None or number >= self.lowest) and (self.stop is None or number < self.stop)


@dataclass(slots=True)
class Pushed:
    """The filters of a query that the reader applies itself, so that Spark need not.

    `rows` is the filter on single records, and begins with the tag of the query's options. `topics` and
    `numbers` are the topics and partition numbers that a row may have (None: any). `partition` and `offset`
    are bounds from comparisons.
    """

    rows: RowFilter = EVERY_ROW
    topics: set[str] | None = None
    numbers: set[int] | None = None
    partition: Interval = field(default_factory=Interval)
    offset: Interval = field(default_factory=Interval)
    _time_us: Interval = field(default_factory=Interval)

    def push(self, filters: Iterable[Filter]) -> list[Filter]:
        """Take over each filter that is supported; return the others, which Spark must apply."""
        left = [each for each in filters if not self._take(each)]
        self.rows = replace(self.rows, since_us=self._time_us.lowest, until_us=self._time_us.stop)
        return left

    def cut(self, whole: Iterable[Range]) -> list[Range]:
        """Return the parts of these ranges that can hold matching records, without empty ones."""
        found = []
        for each in whole:
            if self.topics is not None and each.topic not in self.topics:
                continue
            if each.partition not in self.partition:
                continue
            if self.numbers is not None and each.partition not in self.numbers:
                continue
            start = max(each.start, self.offset.lowest or 0)
            end = each.end if self.offset.stop is None else min(each.end, self.offset.stop)
            if start < end:
                found.append(replace(each, start=start, end=end))
        return found

    def _take(self, each: Filter) -> bool:
        # True: taken over. False: no effect, the filter is left to Spark.
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
