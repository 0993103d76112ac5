"""Buckets of time of a round width, at most `MOST` of them for a chart, for any range of times. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column

MOST = 120

_SECOND, _MINUTE, _HOUR, DAY_MS = 1_000, 60_000, 3_600_000, 86_400_000
# Round widths. The first is the finest: records of one batch have times close together, so finer buckets
# would show batches and not the rate of records.
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
        """Return the number of each time's bucket, from 0; -1 before the first, `count` after the last."""
        from pyspark.sql import functions as f

        inside = f.floor((time_ms - self.since_ms) / self.width_ms)
        before, after = time_ms < self.since_ms, time_ms >= self.since_ms + self.width_ms * self.count
        return f.when(before, -1).when(after, self.count).otherwise(inside).cast("int")


def grid_of(first_ms: int, last_ms: int) -> Grid:
    """Return the grid of the finest of `WIDTHS_MS` that covers both times with at most `MOST` buckets."""
    for width in WIDTHS_MS:
        since = first_ms // width * width
        count = (last_ms - since) // width + 1
        if count <= MOST:
            break
    else:
        # The times are some 10,000 years apart: no clock shows that, but a producer's timestamp may.
        width = -(-(last_ms - first_ms + 1) // MOST)
        since, count = first_ms, MOST
    return Grid(since, width, count)
