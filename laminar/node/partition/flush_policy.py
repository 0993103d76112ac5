"""The flush policy among a topic's settings: its names, limits and defaults. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from laminar.http.api.problems import Problem
from laminar.log.format.flush_policy import COMMIT, FlushPolicy

# RocketMQ's default for the same purpose: short enough that a person would call it "just now", long
# enough that a thousand partitions take two thousand syncs a second at most, and a busy one writes megabytes.
DEFAULT_INTERVAL_MS = 500
LEAST_INTERVAL_MS = 10
MOST_INTERVAL_MS = 60_000
MOST_INTERVAL_RECORDS = 100_000_000

POLICIES = ("commit", "interval")
_LIMITS = {
    "flush_interval_ms": (LEAST_INTERVAL_MS, MOST_INTERVAL_MS),
    "flush_interval_records": (1, MOST_INTERVAL_RECORDS),
}


def check_flush(settings: Mapping[str, int | str]) -> None:
    """Raise `Problem` for an invalid flush setting."""
    flush = settings.get("flush", "commit")
    if flush not in POLICIES:
        raise Problem(
            "invalid",
            "the flush policy must be `commit` or `interval`",
            field="settings.flush",
            value=flush,
            limit=", ".join(POLICIES),
        )
    for name, (least, most) in _LIMITS.items():
        value = settings.get(name, least)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise Problem(
                "invalid",
                f"{name} must be between {least} and {most}",
                field=f"settings.{name}",
                value=value,
                limit=least if isinstance(value, int) and value < least else most,
            )


def policy_of(settings: Mapping[str, int | str]) -> FlushPolicy:
    """Return the flush policy of a topic with these settings."""
    if settings.get("flush", "commit") != "interval":
        return COMMIT
    return FlushPolicy(
        interval_ms=int(settings.get("flush_interval_ms", DEFAULT_INTERVAL_MS)),
        interval_records=int(settings.get("flush_interval_records", 0)),
    )
