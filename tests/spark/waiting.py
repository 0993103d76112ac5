"""Wait for a query that runs on: Spark's own wait may end too early for a test."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

LIMIT_S = 240
"""Only a hang reaches it."""


def rows_of_batches(query: StreamingQuery) -> list[int]:
    """Return how many rows each batch of this run had, without the empty ones."""
    return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]


def await_rows(query: StreamingQuery, count: int) -> None:
    """Wait until this run of the query has read so many rows or more.

    `processAllAvailable` alone ends when the source has heard of no record for `pollTimeoutMs`. The node, or
    the next leader, may take longer to say that there are some.
    """
    deadline = time.monotonic() + LIMIT_S
    query.processAllAvailable()
    while sum(rows_of_batches(query)) < count:
        assert time.monotonic() < deadline, f"{sum(rows_of_batches(query))} of {count} rows were read"
        query.processAllAvailable()
