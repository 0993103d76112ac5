"""Numbers, sizes, rates and times in words short enough for a table or an axis. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from laminar.spark.pipelines.buckets import DAY_MS

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# The characters that the font of a picture has for sure, and every terminal.
_SHOWN_BELOW = 0x530


def number(value: float) -> str:
    """With thousands apart; three digits of what is small."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def short(value: float) -> str:
    """As ``100k`` or ``2M``: for the marks of an axis."""
    for unit, of in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= of:
            return f"{value / of:g}{unit}"
    return f"{value:g}"


def size(count: float) -> str:
    """Bytes, as ``512 B`` or ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            return f"{number(round(count, 1))} {unit}"
        count /= 1024
    return f"{number(round(count, 1))} PiB"


def percent(share: float) -> str:
    """A share of one, as ``47 %``; as ``0.3 %`` where it is small."""
    return f"{share * 100:.0f} %" if share >= 0.0995 or not share else f"{share * 100:.2g} %"


def per(rate_per_s: float) -> tuple[str, int]:
    """In which unit of time a rate is a number that one can read, and its seconds."""
    for unit, seconds in (("s", 1), ("min", 60), ("h", 3_600)):
        if rate_per_s * seconds >= 1:
            return unit, seconds
    return "day", 86_400


def rate(rate_per_s: float) -> str:
    """As ``2.5/min``."""
    unit, seconds = per(rate_per_s)
    return f"{number(rate_per_s * seconds)}/{unit}"


def utc(time_ms: int) -> datetime | None:
    """None before the year 1 and after 9999."""
    try:
        return _EPOCH + timedelta(milliseconds=time_ms)
    except OverflowError:
        return None


def instant(time_ms: int) -> str:
    """As ``2001-01-31 23:59:00``, in UTC, with a fraction where there is one."""
    at = utc(time_ms)
    if at is None:
        return f"{time_ms} ms"
    return at.strftime("%Y-%m-%d %H:%M:%S") + (f".{time_ms % 1000:03}" if time_ms % 1000 else "")


def width(time_ms: int) -> str:
    """A width of buckets, as ``100 ms``, ``5 min``, ``7 days``."""
    for unit, unit_ms in (("day", DAY_MS), ("h", 3_600_000), ("min", 60_000), ("s", 1_000)):
        if time_ms >= unit_ms and time_ms % unit_ms == 0:
            many = time_ms // unit_ms
            return f"{many} {unit}s" if unit == "day" and many > 1 else f"{many} {unit}"
    return f"{time_ms} ms"


def name(text: str, most: int = 18) -> str:
    """A key or a tag: nothing that does not print, and its end left out if it is long."""
    safe = "".join(
        each if each.isprintable() and ord(each) < _SHOWN_BELOW else ascii(each)[1:-1] for each in text
    )
    return safe if len(safe) <= most else f"{safe[: most - 1]}…"
