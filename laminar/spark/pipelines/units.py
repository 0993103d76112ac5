"""Format numbers, sizes, rates and times for a table or an axis. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from laminar.spark.pipelines.buckets import DAY_MS

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Code points below this (Latin, Greek, Cyrillic) are in every font and terminal.
_SHOWN_BELOW = 0x530


def number(value: float) -> str:
    """Return a number of 100 or more, or a whole one, as ``1,234``; others with three digits, ``0.123``."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def short(value: float) -> str:
    """Return a number as ``100k`` or ``2M``, for the ticks of an axis."""
    for unit, of in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= of:
            return f"{value / of:g}{unit}"
    return f"{value:g}"


def size(count: float) -> str:
    """Return a number of bytes as ``512 B`` or ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            return f"{number(round(count, 1))} {unit}"
        count /= 1024
    return f"{number(round(count, 1))} PiB"


def percent(share: float) -> str:
    """Return a share of 0 to 1 as ``47 %``; a small one as ``0.3 %``."""
    return f"{share * 100:.0f} %" if share >= 0.0995 or not share else f"{share * 100:.2g} %"


def per(rate_per_s: float) -> tuple[str, int]:
    """Return the shortest unit of time (s, min, h, day) for which a rate is at least 1, and its seconds.

    A rate below 1 a day has ``day``.
    """
    for unit, seconds in (("s", 1), ("min", 60), ("h", 3_600)):
        if rate_per_s * seconds >= 1:
            return unit, seconds
    return "day", 86_400


def rate(rate_per_s: float) -> str:
    """Return a rate as ``2.5/min``."""
    unit, seconds = per(rate_per_s)
    return f"{number(rate_per_s * seconds)}/{unit}"


def utc(time_ms: int) -> datetime | None:
    """Return epoch milliseconds as a datetime in UTC; None before the year 1 and after 9999."""
    try:
        return _EPOCH + timedelta(milliseconds=time_ms)
    except OverflowError:
        return None


def instant(time_ms: int) -> str:
    """Return a time as ``2001-01-31 23:59:00``, in UTC, with milliseconds if they are not 0.

    A time that `utc` cannot represent is ``N ms``.
    """
    at = utc(time_ms)
    if at is None:
        return f"{time_ms} ms"
    return at.strftime("%Y-%m-%d %H:%M:%S") + (f".{time_ms % 1000:03}" if time_ms % 1000 else "")


def width(time_ms: int) -> str:
    """Return a width of buckets as ``100 ms``, ``5 min`` or ``7 days``."""
    for unit, unit_ms in (("day", DAY_MS), ("h", 3_600_000), ("min", 60_000), ("s", 1_000)):
        if time_ms >= unit_ms and time_ms % unit_ms == 0:
            many = time_ms // unit_ms
            return f"{many} {unit}s" if unit == "day" and many > 1 else f"{many} {unit}"
    return f"{time_ms} ms"


def name(text: str, most: int = 18) -> str:
    """Return a key or a tag with unprintable characters escaped, cut off after `most` characters."""
    safe = "".join(
        each if each.isprintable() and ord(each) < _SHOWN_BELOW else ascii(each)[1:-1] for each in text
    )
    return safe if len(safe) <= most else f"{safe[: most - 1]}…"
