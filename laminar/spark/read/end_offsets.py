"""The end offsets of a query's partitions, kept up to date in its driver with few requests.

Spark asks a driver for new records up to a hundred times a second; the cluster should get a request only when
there are some. This module decides nothing about batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from laminar.client.errors import Error
from laminar.spark.read.cluster import Cluster, Description
from laminar.spark.read.offsets import Ids, Partition, Positions
from laminar.spark.read.options import Options
from laminar.spark.read.partition_lineage import final_ends, replaced


class EndOffsetTracker:
    """The partitions of a query, their offsets as of the last `refresh`, and long polls that wait for more.

    While nothing is appended, each partition has one long poll, which waits at its leader for seconds. Each
    call of Spark waits on the long polls that are under way and starts only those that are missing. So an
    idle query costs a request per partition every few seconds, however often Spark asks.
    """

    POLL_MS: Final = 8_000
    # The pause after a poll that failed.
    PAUSE_S: Final = 0.25
    # A long poll holds a connection. With more partitions than this there are none: `wait_for_news` sleeps
    # for its whole timeout and has the caller refresh.
    MOST_POLLS: Final = 128
    # While no record arrives, the time after which to look for new partitions and topics.
    REFRESH_S: Final = 5.0

    def __init__(self, cluster: Cluster, options: Options, ids: Mapping[Partition, str]) -> None:
        """Track `ids`: the ids of the partitions that the query has read, according to Spark's journal.

        No offset is known before the first `refresh`.
        """
        self._cluster = cluster
        self._options = options
        self._polls: dict[Partition, asyncio.Task[None]] = {}
        self._refreshed_at_s = float("-inf")
        self.ids: Ids = dict(ids)
        # Partitions that the query has read and that its options no longer name.
        self.left_out: Ids = {}
        # Topics that the options name and that do not exist.
        self.missing: tuple[str, ...] = ()
        self.earliest: Positions = {}
        self.ends: Positions = {}
        # The mean size of a partition's records as stored.
        self.record_bytes: dict[Partition, float] = {}
        # For each successor the partitions that it replaced: see `laminar.spark.read.partition_lineage`.
        self.replaced: dict[Partition, dict[Partition, int]] = {}
        # Where partitions ended for good; of those that are reclaimed, too.
        self.final: dict[Partition, int] = {}
        self._routes: dict[str, int] = {}

    def refresh(self) -> Positions:
        """Ask for all partitions and end offsets, and return the end offsets exactly as answered.

        The answer of a replica that lags may be lower than an earlier one. `ends` never go back, because what
        is committed stays so. Only a partition with another id, which was deleted and created again, starts
        at 0.

        Raises:
            Error: when the cluster does not answer in time.
        """
        return self._cluster.run(self._refresh())

    def gone(self, ids: Mapping[Partition, str]) -> list[Partition]:
        """Return those of these partitions that were deleted: the last refresh found none with such an id."""
        return [each for each, id_ in ids.items() if id_ not in (self.ids.get(each), self.left_out.get(each))]

    async def _refresh(self) -> Positions:
        described = await self._describe(confirmed=False)
        if any(described.ids.get(partition) != id_ for partition, id_ in self.ids.items()):
            # A node's view of the catalog may lag, so a change of ids is confirmed by the catalog itself.
            described = await self._describe(confirmed=True)
        for partition in [each for each, id_ in self.ids.items() if described.ids.get(each) != id_]:
            for known in (self.ids, self.earliest, self.ends, self.record_bytes, self.replaced):
                known.pop(partition, None)
            if partition in self._polls:
                self._polls.pop(partition).cancel()
        self.ids |= described.ids
        self.left_out = described.left_out
        self.missing = described.missing
        for partition, found in described.bounds.items():
            self.earliest[partition] = max(found.earliest, self.earliest.get(partition, 0))
            self.ends[partition] = max(found.end, self.ends.get(partition, 0))
            self.record_bytes[partition] = found.record_bytes
        return {partition: found.end for partition, found in described.bounds.items()}

    async def _describe(self, *, confirmed: bool) -> Description:
        beside = {topic for topic, _ in (*self.ids, *self.left_out)}
        described = await self._cluster.describe(self._options, beside=beside, confirmed=confirmed)
        for topic, version in described.routes.items():
            # Route 0 is a topic's first: none of its partitions replaced another. One that is gone may have
            # been reclaimed since.
            is_gone = any(each[0] == topic and each not in described.ids for each in self.ids)
            if version != self._routes.get(topic, 0) or (version and is_gone):
                lineage = await self._cluster.lineage(topic, version=version)
                self.replaced |= replaced(topic, lineage)
                self.final |= final_ends(topic, lineage)
                self._routes[topic] = version
        self._refreshed_at_s = asyncio.get_running_loop().time()
        return described

    def wait_for_news(self, timeout_ms: int) -> bool:
        """Wait up to `timeout_ms` for a record; return whether the caller should `refresh` now.

        It should after a record or a failed poll, and each `REFRESH_S` for new partitions.
        """
        return self._cluster.run(self._wait_for_news(timeout_ms / 1000))

    async def _wait_for_news(self, timeout_s: float) -> bool:
        if len(self.ends) > self.MOST_POLLS:
            await asyncio.sleep(timeout_s)
            return True
        for partition, end in self.ends.items():
            if partition not in self._polls and end < self.final.get(partition, end + 1):
                self._polls[partition] = asyncio.create_task(self._poll(partition, end))
        if not self._polls:
            await asyncio.sleep(timeout_s)
            return self._is_refresh_due()
        await asyncio.wait(self._polls.values(), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        done = [partition for partition, poll in self._polls.items() if poll.done()]
        for partition in done:
            self._polls.pop(partition).result()
        return bool(done) or self._is_refresh_due()

    def _is_refresh_due(self) -> bool:
        return asyncio.get_running_loop().time() - self._refreshed_at_s >= self.REFRESH_S

    async def _poll(self, partition: Partition, end: int) -> None:
        # It ends when a record at `end` came, when the poll's time is over, or after a failure.
        try:
            wait_ms = self.POLL_MS
            if await self._cluster.wait_past(partition, end, id_=self.ids[partition], wait_ms=wait_ms):
                # It is not known yet what follows: the next refresh may say.
                await asyncio.sleep(self.PAUSE_S)
        except Error:
            # The next refresh meets the same fault, with retries and a deadline, and reports it.
            await asyncio.sleep(self.PAUSE_S)

    def close(self) -> None:
        """Cancel the long polls."""
        self._cluster.run(self._close())

    async def _close(self) -> None:
        polls, self._polls = list(self._polls.values()), {}
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
