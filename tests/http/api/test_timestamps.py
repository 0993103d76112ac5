"""Times as clients write them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.http.api.problems import Problem
from laminar.http.api.timestamps import EARLIEST_MS, LATEST_MS, format_time, parse_time


@given(st.integers(EARLIEST_MS, LATEST_MS))
def test_a_printed_time_is_read_back(time_ms: int) -> None:
    """To the ms, over all years that RFC 3339 has."""
    assert time_ms == parse_time(format_time(time_ms), field="since")


@given(st.datetimes(timezones=st.timezones()))
def test_pythons_own_format_is_read(moment: datetime) -> None:
    """With any offset of whole minutes; digits below the ms are cut."""
    try:
        text = moment.isoformat()
        moment.astimezone(UTC)
    except OverflowError:
        return
    if len(text) > 32 or moment.utcoffset() is None or moment.year in (1, 9999):
        return  # offsets with seconds, of the time before zones, aren't RFC 3339

    expected = int((moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() // 0.001)
    assert abs(expected - parse_time(text, field="since")) <= 1


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01t00:00:00.9999z", 999),
        ("1970-01-01 01:00:00.5+01:00", 500),
        ("1969-12-31T23:30:00-00:30", 0),
        ("2016-12-31T23:59:60Z", 1483228800000),
        ("0", 0),
        ("-5", -5),
        ("1767225600000", 1767225600000),
        (1767225600000, 1767225600000),
    ],
)
def test_both_notations_are_read(text: str | int, time_ms: int) -> None:
    """RFC 3339, leap seconds too, and ms since the epoch."""
    assert time_ms == parse_time(text, field="since")


@pytest.mark.parametrize(
    "value",
    [
        "",
        "now",
        "2026-01-01",
        "2026-01-01T00:00:00",
        "2026-13-01T00:00:00Z",
        "2026-02-30T00:00:00Z",
        "2026-01-01T24:00:00Z",
        "2026-01-01T00:00:61Z",
        "2026-01-01T00:00:00+25:00",
        "0001-01-01T00:00:00+01:00",
        "1.5",
        "٣",
        "9" * 16,
        LATEST_MS + 1,
        1.5,
        True,
        None,
    ],
)
def test_anything_else_is_refused_by_name(value: object) -> None:
    """A time without an offset means another thing on every machine."""
    with pytest.raises(Problem) as refused:
        parse_time(value, field="since")

    assert ("invalid", "since") == (refused.value.code, refused.value.field)
