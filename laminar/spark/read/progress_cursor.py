"""A query's progress as a named cursor, so that its lag shows beside that of other consumers.

The cursor is only shown: a query continues from Spark's checkpoint, and nothing here may fail or delay a
query for long. So a cursor that cannot be written is a warning, and while there is more to read it is written
at most once a second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Final

import msgspec

from laminar.client.consume.cursors import cursor_path
from laminar.client.errors import Error
from laminar.spark.read.cluster import Cluster
from laminar.spark.read.offsets import Partition, Positions

log = logging.getLogger(__name__)

EVERY_S: Final = 1.0
# How long `latestOffset`, and so the query, waits for the write.
TIMEOUT_S: Final = 2.0


class ProgressCursor:
    """A writer of a query's committed positions to the cursor `name` of each topic that it reads."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self._name = name
        self._written: Positions = {}
        self._tried_at_s = float("-inf")

    def write(self, positions: Mapping[Partition, int], *, caught_up: bool) -> None:
        """Write those `positions`, which Spark has committed, that changed since the last write.

        Do nothing within `EVERY_S` after the last attempt, unless the query has `caught_up`. A failure is
        logged, and the next call tries again.
        """
        changed = {each: offset for each, offset in positions.items() if self._written.get(each) != offset}
        now_s = time.monotonic()
        if not changed or (not caught_up and now_s - self._tried_at_s < EVERY_S):
            return
        self._tried_at_s = now_s
        try:
            self._cluster.run(self._put(changed))
        except TimeoutError:
            log.warning("cursor %s was not moved: no answer within %g s", self._name, TIMEOUT_S)
        except Error as error:
            log.warning("cursor %s was not moved: %s", self._name, error)
        else:
            self._written |= changed

    async def _put(self, changed: Positions) -> None:
        topics: dict[str, dict[str, int]] = {}
        for (topic, partition), offset in changed.items():
            topics.setdefault(topic, {})[str(partition)] = offset
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*(self._put_topic(topic, found) for topic, found in topics.items()))

    async def _put_topic(self, topic: str, positions: Mapping[str, int]) -> None:
        await self._cluster.session.call(
            "PUT",
            cursor_path(topic, self._name),
            body=msgspec.json.encode({"positions": positions}),
            headers={"Content-Type": "application/json"},
        )
