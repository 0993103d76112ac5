"""Delivery times of delayed records: checks of a program's arguments, and their conversion to ms."""

from __future__ import annotations

import datetime
import math
import time

from laminar.client.errors import ConfigError
from laminar.wire.delayed import MAX_DELAY_MS

Delay = float | datetime.timedelta
"""Seconds, or a `timedelta`."""
DeliverAt = int | datetime.datetime
"""Milliseconds since the epoch, or a `datetime`; a naive one is local time."""

# The year 9999 ends: servers print no later time.
_LATEST_MS = 253_402_300_799_999


def delivery_time_ms(delay: Delay | None, deliver_at: DeliverAt | None) -> int:
    """Return when readers get a record, in ms since the epoch, from either `delay` or `deliver_at`.

    A delay counts from now, by this machine's clock.

    Raises:
        ConfigError: both arguments are given, or neither; or the one given is not a valid time.
    """
    if deliver_at is not None:
        if delay is not None:
            raise _refused("delay", delay, "give a delay or a time, not both")
        return time_ms(deliver_at)
    if delay is None:
        raise _refused("delay", None, "give a delay or a time")
    return time.time_ns() // 1_000_000 + span_ms(delay, field="delay", limit_ms=MAX_DELAY_MS)


def time_ms(at: DeliverAt) -> int:
    """Return the time `at` in ms since the epoch. Raises `ConfigError` if it is not a valid time."""
    if isinstance(at, datetime.datetime):
        at_ms = math.floor(at.timestamp() * 1000)
    elif type(at) is int:
        at_ms = at
    else:
        raise _refused("deliver_at", at, "a time is a datetime, or whole milliseconds since the epoch")
    if not 0 <= at_ms <= _LATEST_MS:
        raise _refused("deliver_at", at, "a time is in the years 1970 to 9999", limit=_LATEST_MS)
    return at_ms


def span_ms(span: Delay, *, field: str, limit_ms: int) -> int:
    """Return `span` in ms, rounded up. Raises `ConfigError` naming `field` if it is not 0 to `limit_ms`."""
    if isinstance(span, datetime.timedelta):
        seconds: float = span.total_seconds()
    elif isinstance(span, bool) or not isinstance(span, int | float):
        raise _refused(field, span, "give seconds or a timedelta")
    else:
        seconds = span
    if not 0 <= seconds * 1000 <= limit_ms:  # NaN is neither
        raise _refused(field, span, f"give 0 to {limit_ms // 1000:,} seconds", limit=limit_ms / 1000)
    return math.ceil(seconds * 1000)


def _refused(field: str, value: object, message: str, *, limit: float | None = None) -> ConfigError:
    return ConfigError(f"{field}: {message}", code="bad_time", field=field, value=value, limit=limit)
