"""Times and durations in the form that options take."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from laminar.cli.errors import UsageError

if TYPE_CHECKING:
    import datetime

_SPAN = re.compile(r"(\d{1,12}(?:\.\d{1,3})?)(ms|s|m|h|d)\Z", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def due_of(option: str, at: str | None, delay: str | None) -> datetime.datetime | None:
    """Return the time that one of two options gives; None if neither is given. Raises `UsageError`."""
    if at is not None and delay is not None:
        raise UsageError(f"{option} and --delay are mutually exclusive")
    if delay is None:
        return moment(option, at)
    found = _after(delay)
    if found is None:
        raise UsageError(f"--delay {delay!r} is not a duration, such as 30s, 5m, 2h or 7d")
    return found


def later(option: str, text: str | None) -> datetime.datetime | None:
    """Return the time in an option's `text`: a time, or a duration from now on; None if there is no text.

    Raises:
        UsageError: the text is neither a time nor a duration.
    """
    if text is None:
        return None
    return _after(text) or moment(option, text)


def _after(span: str) -> datetime.datetime | None:
    """Return the time `span` after now; None if `span` is no duration."""
    import datetime

    found = _SPAN.match(span)
    if found is None:
        return None
    seconds = float(found[1]) * _SECONDS[found[2]]
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)


def moment(option: str, text: str | None) -> datetime.datetime | None:
    """Return a time from its text; None without a text. Raises `UsageError`."""
    import datetime

    if text is None:
        return None
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise UsageError(
            f"{option} {text!r} is not a time with an offset from UTC, such as 2030-01-31T12:00:00Z"
        )
    return found
