"""Times and trace ids in queries, envelopes and answers.

Times are read in RFC 3339 or as ms since the epoch, and written in RFC 3339 in UTC with ms.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from laminar.http.api.problems import Problem
from laminar.wire.delayed import MAX_DELAY_MS

# Year 1 to 9999, the range that RFC 3339 can print.
EARLIEST_MS: Final = -62_135_596_800_000
LATEST_MS: Final = 253_402_300_799_999

_RFC3339: Final = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:([Zz])|([+-])(\d\d):(\d\d))\Z",
    re.ASCII,
)
_MILLISECONDS: Final = re.compile(r"-?\d{1,15}\Z", re.ASCII)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


def format_time(time_ms: int) -> str:
    """Return a time in RFC 3339 with ms: ``2026-01-31T12:00:00.123Z``.

    A time before the year 1 or after 9999 is replaced by the nearest time in these years.
    """
    time_ms = min(max(time_ms, EARLIEST_MS), LATEST_MS)
    moment = _EPOCH + timedelta(milliseconds=time_ms)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{time_ms % 1000:03d}Z".rjust(24, "0")


def delivery_time(at: Any, delay_ms: int | None, *, now_ms: int, name: str = "") -> int | None:
    """Return the time (ms since the epoch) at which readers get a record; None if neither is given.

    It is the time `at`, or `delay_ms` after `now_ms`.

    Raises:
        Problem: 422 `invalid`, whose field is `deliver_at` or `delay_ms`, with `name` as its prefix.
    """
    if at is not None and delay_ms is not None:
        raise Problem("invalid", "give either a time or a delay", field=f"{name}delay_ms", value=delay_ms)
    if at is not None:
        return parse_time(at, field=f"{name}deliver_at")
    if delay_ms is None:
        return None
    if not 0 <= delay_ms <= MAX_DELAY_MS:
        raise Problem(
            "invalid",
            "a delay is a whole number of milliseconds",
            field=f"{name}delay_ms",
            value=delay_ms,
            limit=MAX_DELAY_MS,
        )
    return now_ms + delay_ms


def parse_trace_id(text: str, *, field: str) -> bytes:
    """Return the 16 bytes of a trace id, which is written as 32 hexadecimal digits.

    Raises 422 `invalid`, naming `field`, for another text.
    """
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(text) != 32 or len(found) != 16:
        raise Problem(
            "invalid", "a trace id is 32 hexadecimal digits", field=field, value=text[:80], limit=32
        )
    return found


def parse_time(value: Any, *, field: str) -> int:
    """Return a time in ms since the epoch, from a text in RFC 3339 or a whole number of ms.

    The text must have an offset from UTC, because a local time would mean another time on another machine.
    Digits below the ms are cut off. A leap second is read as the second after it. Raises 422 `invalid`,
    naming `field`, for anything else.
    """
    if isinstance(value, str):
        if _MILLISECONDS.match(value):
            value = int(value)
        else:
            return _parse_rfc3339(value, field)
    if isinstance(value, bool) or not isinstance(value, int) or not EARLIEST_MS <= value <= LATEST_MS:
        raise _no_time(value, field)
    return value


def _parse_rfc3339(text: str, field: str) -> int:
    match = _RFC3339.match(text)
    if match is None:
        raise _no_time(text, field)
    year, month, day, hour, minute, second = (int(match[i]) for i in range(1, 7))
    leap = second == 60
    try:
        moment = datetime(year, month, day, hour, minute, second - leap, tzinfo=UTC)
        ahead = timedelta()
        if match[9]:
            if int(match[10]) > 23 or int(match[11]) > 59:
                raise ValueError(match[0])
            ahead = timedelta(hours=int(match[10]), minutes=int(match[11]))
        time_ms = (moment - _EPOCH) // _MILLISECOND - (ahead // _MILLISECOND) * (-1 if match[9] == "-" else 1)
    except (ValueError, OverflowError):
        raise _no_time(text, field) from None
    time_ms += 1000 * leap + int((match[7] or "0")[:3].ljust(3, "0"))
    if not EARLIEST_MS <= time_ms <= LATEST_MS:
        raise _no_time(text, field)
    return time_ms


def _no_time(value: Any, field: str) -> Problem:
    return Problem(
        "invalid",
        "a time is RFC 3339 with an offset, or whole milliseconds since the epoch",
        field=field,
        value=value,
        hint="For example 2026-01-31T12:00:00Z; in a query, write + as %2B.",
    )
