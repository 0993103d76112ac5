"""What a query's driver knows of its partitions, without asking often.

Spark asks a driver for news up to a hundred times a second; the cluster should hear of that only when there
are some. It decides nothing about batches, and is apart from the calls themselves for its state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from laminar.client.errors import Error
from laminar.spark.read.cluster import Cluster, Description
from laminar.spark.read.offsets import Ids, Partition, Positions
from laminar.spark.read.options import Options


class Watch:
    """What a query's driver knows of the partitions' ends, and how it waits for news without asking often.

    While nothing happens, each partition has one long poll at its leader, for seconds; a trigger waits on
    those that are there already. So an idle query costs a request a partition every few seconds, however
    often Spark asks.
    """

    POLL_MS: Final = 8_000
    # After a poll that failed: not at once again.
    PAUSE_S: Final = 0.25
    # A long poll is a connection; with more partitions than this, a trigger just waits and looks.
    MOST_POLLS: Final = 128
    # New partitions and topics are looked for so often, while nothing else makes us look.
    LOOK_S: Final = 5.0

    def __init__(self, cluster: Cluster, options: Options, ids: Mapping[Partition, str]) -> None:
        """`ids` are those of the partitions that the query has read from, by its journal."""
        self._cluster = cluster
        self._options = options
        self._polls: dict[Partition, asyncio.Task[None]] = {}
        self._looked_at_s = float("-inf")
        self.ids: Ids = dict(ids)
        # Partitions that the query knew, and that its options do not name.
        self.left_out: Ids = {}
        # Topics that the options name and that are not there.
        self.missing: tuple[str, ...] = ()
        self.earliest: Positions = {}
        self.ends: Positions = {}
        # The mean size of a partition's records, as they are stored.
        self.record_bytes: dict[Partition, float] = {}
        self.replaced: dict[Partition, dict[Partition, int]] = {}
        self._routes: dict[str, int] = {}

    def look(self) -> Positions:
        """Ask for all ends; the answer as it is.

        `ends` never go back, as what is committed stays so; but a partition of another id begins anew.
        """
        return self._cluster.run(self._look())

    def gone(self, ids: Mapping[Partition, str]) -> list[Partition]:
        """Those of these partitions that are not there any more, as far as it was heard."""
        return [each for each, id_ in ids.items() if id_ not in (self.ids.get(each), self.left_out.get(each))]

    async def _look(self) -> Positions:
        described = await self._describe(confirmed=False)
        if any(described.ids.get(partition) != id_ for partition, id_ in self.ids.items()):
            # A node may not have heard yet of what is new: of such news the catalog itself is asked.
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
            # Route 0 has partitions that never replaced any.
            if version != self._routes.get(topic, 0):
                self.replaced |= await self._cluster.replaced(topic)
                self._routes[topic] = version
        self._looked_at_s = asyncio.get_running_loop().time()
        return described

    def wait_for_news(self, timeout_ms: int) -> bool:
        """Wait up to `timeout_ms`; whether it is worth to `look` again."""
        return self._cluster.run(self._wait_for_news(timeout_ms / 1000))

    async def _wait_for_news(self, timeout_s: float) -> bool:
        if len(self.ends) > self.MOST_POLLS:
            await asyncio.sleep(timeout_s)
            return True
        for partition, end in self.ends.items():
            if partition not in self._polls:
                self._polls[partition] = asyncio.create_task(self._poll(partition, end))
        if not self._polls:
            await asyncio.sleep(timeout_s)
            return self._is_time_to_look()
        await asyncio.wait(self._polls.values(), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        done = [partition for partition, poll in self._polls.items() if poll.done()]
        for partition in done:
            self._polls.pop(partition).result()
        return bool(done) or self._is_time_to_look()

    def _is_time_to_look(self) -> bool:
        return asyncio.get_running_loop().time() - self._looked_at_s >= self.LOOK_S

    async def _poll(self, partition: Partition, end: int) -> None:
        try:
            await self._cluster.wait_past(partition, end, id_=self.ids[partition], wait_ms=self.POLL_MS)
        except Error:
            # Whatever is wrong, the next look meets it as well, with retries and a deadline, and says so.
            await asyncio.sleep(self.PAUSE_S)

    def close(self) -> None:
        """End the polls."""
        self._cluster.run(self._close())

    async def _close(self) -> None:
        polls, self._polls = list(self._polls.values()), {}
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
