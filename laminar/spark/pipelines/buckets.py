"""Buckets of time in round widths, as many as a chart can show, for any range of times. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column

MOST = 120

_SECOND, _MINUTE, _HOUR, DAY_MS = 1_000, 60_000, 3_600_000, 86_400_000
# Widths that a person takes for one step of time. With less than the first, batches would be counted, not
# records.
WIDTHS_MS = (
    *(100, 200, 500),
    *(n * _SECOND for n in (1, 2, 5, 10, 15, 30)),
    *(n * _MINUTE for n in (1, 2, 5, 10, 15, 30)),
    *(n * _HOUR for n in (1, 2, 3, 6, 12)),
    *(n * DAY_MS for n in (1, 2, 7, 14, 30, 90)),
    *(365 * n * DAY_MS for n in (1, 2, 5, 10, 20, 50, 100)),
)


@dataclass(frozen=True, slots=True)
class Grid:
    """Buckets of time: `count` of `width_ms` each, from `since_ms`."""

    since_ms: int
    width_ms: int
    count: int

    def bucket_of(self, time_ms: Column) -> Column:
        """Return each time's bucket; -1 before the first, `count` after the last."""
        from pyspark.sql import functions as f

        inside = f.floor((time_ms - self.since_ms) / self.width_ms)
        before, after = time_ms < self.since_ms, time_ms >= self.since_ms + self.width_ms * self.count
        return f.when(before, -1).when(after, self.count).otherwise(inside).cast("int")


def grid_of(first_ms: int, last_ms: int) -> Grid:
    """Return the finest buckets of round width, at most `MOST`, that hold both times."""
    for width in WIDTHS_MS:
        since = first_ms // width * width
        count = (last_ms - since) // width + 1
        if count <= MOST:
            break
    else:
        # Some 10,000 years: no clock shows that, but a timestamp may.
        width = -(-(last_ms - first_ms + 1) // MOST)
        since, count = first_ms, MOST
    return Grid(since, width, count)
