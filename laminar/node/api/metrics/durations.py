"""Histograms of the durations of requests, by operation and status.

One is updated for each answer, so an update must take well below a microsecond.
"""

from __future__ import annotations

import re
from typing import Final

from laminar.histogram import Histogram
from laminar.http.api.routes import ROUTES
from laminar.http.protocol.request_head import RequestHead

# Operations that wait as long as their client asks for.
_WAITING = frozenset(route.operation for route in ROUTES if "wait_ms" in route.query)
_MILLISECONDS: Final = re.compile(r"[0-9]{1,9}\Z", re.ASCII)


class Durations:
    """The histograms of one shard, one for each operation and status."""

    def __init__(self) -> None:
        self._histograms: dict[tuple[str, int], Histogram] = {}

    def note(self, head: RequestHead, status: int, seconds: float) -> None:
        """Count an answer's duration, without the wait that the request asked for (`wait_ms`).

        The whole wait is subtracted, since it is not known how much of it was used.
        """
        matched = head.memo
        operation = "none" if matched is None else matched.operation
        if operation in _WAITING:
            asked = head.query.get("wait_ms", "")
            if _MILLISECONDS.match(asked):  # otherwise the request has no valid wait
                seconds = max(0.0, seconds - int(asked) / 1000)
        histogram = self._histograms.get((operation, status))
        if histogram is None:
            histogram = self._histograms[operation, status] = Histogram()
        histogram.observe(seconds)

    def stored(self) -> list[tuple[str, int, list[int], float]]:
        """Return the operation, status, counts and sum of each histogram."""
        return [(*key, *each.stored()) for key, each in self._histograms.items()]
