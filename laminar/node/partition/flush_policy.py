"""Reads a topic's flush policy from the topic's settings, with the default interval. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from laminar.log.format.flush_policy import COMMIT, FlushPolicy

# RocketMQ's default for the same purpose. It is short, so that only the newest records are unsynced; and long
# enough that a thousand partitions take two thousand syncs a second at most, and a busy one writes megabytes
# with each.
DEFAULT_INTERVAL_MS = 500


def policy_of(settings: Mapping[str, int | str]) -> FlushPolicy:
    """Return the flush policy of a topic with these settings; `commit` if they name none."""
    if settings.get("flush", "commit") != "interval":
        return COMMIT
    return FlushPolicy(
        interval_ms=int(settings.get("flush_interval_ms", DEFAULT_INTERVAL_MS)),
        interval_records=int(settings.get("flush_interval_records", 0)),
    )
