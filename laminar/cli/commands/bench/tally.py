"""The results of a load so far: latencies, errors by code, the longest time without a success.

Its memory does not grow with the duration.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Final

from laminar.histogram import Histogram

# From 10 microseconds to 1,000 s, each bound a hundredth above the one before: so exact are percentiles.
BOUNDS: Final = tuple(1e-5 * 1.01**step for step in range(1852))
SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99_9": 0.999}
# Codes of errors that are counted apart; the rest together.
MOST_CODES: Final = 50


class Latencies:
    """A histogram of times in seconds, with the exact longest one."""

    def __init__(self) -> None:
        self._histogram = Histogram(BOUNDS)
        self.count = 0
        self.longest_s = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """Count `count` latencies of `seconds` each."""
        self._histogram.observe_many(seconds, count)
        self.count += count
        self.longest_s = max(self.longest_s, seconds)

    def stated(self) -> dict[str, float]:
        """Return percentiles and maximum in milliseconds."""
        found = {
            name: min(self._histogram.percentile(share), self.longest_s) for name, share in SHARES.items()
        }
        return {name: round(seconds * 1000, 3) for name, seconds in (found | {"max": self.longest_s}).items()}


class Tally:
    """The counts of one load. `begin` is called when the load begins, `end` when its last answer is there."""

    def __init__(self) -> None:
        self.latencies = Latencies()
        self.own_delays = Latencies()
        """How late this program itself was: from when a record was due until it was handed over."""
        self.due = 0
        """Records that the schedule wanted; without a schedule those that were sent."""
        self.sent = 0
        self.done = 0
        self.bytes = 0
        self.errors: Counter[str] = Counter()
        self.longest_gap_s = 0.0
        self._began_s = 0.0
        self._last_s = 0.0
        self._ended_s: float | None = None

    def begin(self) -> None:
        """Start the clock."""
        self._began_s = self._last_s = time.perf_counter()

    def succeeded(self, now_s: float, count: int, size_bytes: int) -> None:
        """Count records whose answer came at `now_s`, and their bytes."""
        self.longest_gap_s = max(self.longest_gap_s, now_s - self._last_s)
        self._last_s = max(self._last_s, now_s)
        self.done += count
        self.bytes += size_bytes

    def failed(self, code: str, count: int = 1) -> None:
        """Count records that failed now with the error `code`."""
        known = code in self.errors or len(self.errors) < MOST_CODES
        self.errors[code if known else "others"] += count

    def end(self) -> None:
        """Stop the clock. The time since the last success is a gap if records failed or were unsent in it."""
        self._ended_s = time.perf_counter()
        if not self.done or self.errors:
            self.longest_gap_s = max(self.longest_gap_s, self._ended_s - self._last_s)

    @property
    def took_s(self) -> float:
        """Seconds from the start to the last success; to the end if there was none."""
        if self.done:
            return self._last_s - self._began_s
        return (self._ended_s or time.perf_counter()) - self._began_s

    def stated(self) -> dict[str, Any]:
        """Return the counts as the fields of a report."""
        took_s = max(self.took_s, 1e-9)
        return {
            "due": self.due,
            "not_sent": self.due - self.sent,
            "records": self.done,
            "seconds": round(self.took_s, 3),
            "records_per_s": round(self.done / took_s, 1),
            "mb_per_s": round(self.bytes / took_s / 1e6, 2),
            "latency_ms": self.latencies.stated(),
            "own_delay_ms": self.own_delays.stated(),
            "longest_gap_s": round(self.longest_gap_s, 3),
            "errors": dict(self.errors),
        }
