"""Filters that are taken over leave exactly what Spark would have left; the others stay Spark's."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from laminar.spark.read.plan import Range, RowFilter

pytest.importorskip("pyspark")

from pyspark.sql.datasource import (  # only with pyspark
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from laminar.spark.read.filters import Pushed  # only with pyspark

WHOLE = [Range(topic, number, 10, 20) for topic in ("a", "b") for number in range(3)]


def left(*filters: Filter) -> list[Range]:
    pushed = Pushed()
    assert [] == pushed.push(filters)
    return pushed.cut(WHOLE)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([], WHOLE),
        ([EqualTo(("topic",), "b")], WHOLE[3:]),
        ([In(("topic",), ("b", "c"))], WHOLE[3:]),
        ([EqualTo(("topic",), "b"), EqualTo(("topic",), "a")], []),
        ([GreaterThan(("partition",), 1)], [WHOLE[2], WHOLE[5]]),
        ([In(("partition",), (0, 2)), LessThan(("partition",), 2)], [WHOLE[0], WHOLE[3]]),
        (
            [EqualTo(("offset",), 12), EqualTo(("partition",), 0)],
            [Range("a", 0, 12, 13), Range("b", 0, 12, 13)],
        ),
        (
            [GreaterThanOrEqual(("offset",), 12), LessThanOrEqual(("offset",), 15), EqualTo(("topic",), "a")],
            [Range("a", number, 12, 16) for number in range(3)],
        ),
        ([LessThan(("offset",), 10)], []),
        ([GreaterThan(("offset",), 19)], []),
        ([IsNotNull(("offset",)), IsNotNull(("timestamp",))], WHOLE),
    ],
)
def test_ranges_are_cut(filters: list[Filter], expected: list[Range]) -> None:
    """By topic, partition and offset: what is not wanted is not fetched."""
    assert expected == left(*filters)


def test_a_tag_and_times_choose_rows() -> None:
    """Times to the microsecond, in whatever zone they were given."""
    pushed = Pushed()
    since = datetime(1970, 1, 1, 1, 0, 0, 5, tzinfo=timezone(timedelta(hours=1)))
    until = datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)

    rest = pushed.push(
        [EqualTo(("tag",), "red"), GreaterThan(("timestamp",), since), LessThanOrEqual(("timestamp",), until)]
    )

    assert [] == rest
    assert RowFilter("red", since_us=6, until_us=1_000_001) == pushed.rows
    assert WHOLE == pushed.cut(WHOLE)


def test_the_option_tag_stays() -> None:
    """A filter for another tag is Spark's: nothing passes both."""
    pushed = Pushed(RowFilter(tag="red"))
    other = EqualTo(("tag",), "blue")

    assert [other] == pushed.push([EqualTo(("tag",), "red"), other])
    assert "red" == pushed.rows.tag


@pytest.mark.parametrize(
    "each",
    [
        Not(EqualTo(("partition",), 1)),
        In(("offset",), (1, 2)),
        EqualNullSafe(("tag",), "red"),
        StringStartsWith(("topic",), "a"),
        GreaterThan(("topic",), "a"),
        EqualTo(("key",), b"k"),
        IsNotNull(("key",)),
        IsNotNull(("tag",)),
        IsNotNull(("value",)),
        EqualTo(("headers", "key"), "x"),
        GreaterThan(("timestamp",), datetime(2020, 1, 1)),  # without a zone: not ours to guess
    ],
    ids=str,
)
def test_what_is_not_exactly_ours_is_left_to_spark(each: Filter) -> None:
    """And nothing is cut by it."""
    pushed = Pushed()

    assert [each] == pushed.push([each])
    assert RowFilter() == pushed.rows
    assert WHOLE == pushed.cut(WHOLE)
