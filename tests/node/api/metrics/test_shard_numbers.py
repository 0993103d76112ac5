"""What a scrape looks at: of a quiesced partition only what may have changed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import laminar
from laminar.client.topic import Topic
from laminar.node.api.metrics import shard_numbers
from laminar.node.api.metrics.shard_numbers import ProcessNumbers, ShardNumbers
from laminar.node.partition.partition import Partition
from laminar.node.shard.shard import Shard
from tests.http.serving import until

PARTITIONS = 8


class Scraped:
    """A topic of a node in this loop, the numbers of its shard, and how many replicas were looked at."""

    def __init__(self, topic: Topic[bytes], shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
        self.topic = topic
        self.shard = shard
        api = shard._application
        numbers = api._handlers["metrics"].__self__._numbers  # type: ignore[attr-defined]
        assert isinstance(numbers, ShardNumbers)
        self._numbers = numbers
        self.looked_at: list[int] = []
        found_of = shard_numbers._found_of

        def noted(partition: Partition) -> shard_numbers._Found:
            if partition.topic == "t":
                self.looked_at.append(partition.number)
            return found_of(partition)

        monkeypatch.setattr(shard_numbers, "_found_of", noted)

    async def look(self) -> ProcessNumbers:
        """What a scrape finds, once the shard is idle."""
        await until(
            lambda: (
                all(each.replica.core.quiesced for each in self.shard.partitions.values())
                and len(self.shard.partitions) >= PARTITIONS
            )
        )
        self.looked_at.clear()
        return await self._numbers.look()


@pytest.fixture
async def scraped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scraped]:
    """A topic with a record in each partition."""
    async with laminar.embed(tmp_path / "data", journal_file_bytes=4 << 20) as node:
        shard = node._processes[0]
        assert isinstance(shard, Shard)
        topic = await node.client.create_topic("t", partitions=PARTITIONS)
        for number in range(PARTITIONS):
            await topic.append(b"value", partition=number)
        yield Scraped(topic, shard, monkeypatch)


async def test_a_scrape_of_idle_partitions_looks_at_few_and_finds_the_same(scraped: Scraped) -> None:
    """Counted, not timed; one may come back for the round that misses none."""
    first = await scraped.look()
    assert PARTITIONS == len(scraped.looked_at)

    again = await scraped.look()

    assert len(scraped.looked_at) <= 1
    assert first.topics["t"] == again.topics["t"]
    assert first.states == again.states
    assert (PARTITIONS, PARTITIONS, 1) == (
        again.topics["t"].leads,
        again.topics["t"].unread,
        again.topics["t"].most_unread,
    )


async def test_what_changes_is_in_the_next_scrape(scraped: Scraped) -> None:
    """What wakes a group: an append. And what wakes none: a fetch, damage, a log that fails."""
    before = await scraped.look()

    await scraped.topic.append(b"another", partition=2)
    after = await scraped.look()
    assert 2 in scraped.looked_at
    assert len(scraped.looked_at) <= 2
    assert (PARTITIONS + 1, 2) == (after.topics["t"].unread, after.topics["t"].most_unread)
    assert after.topics["t"].log_bytes > before.topics["t"].log_bytes

    async with scraped.topic.read() as records:
        async for _ in records:
            pass
    after = await scraped.look()
    assert PARTITIONS + 1 == after.topics["t"].fetch_records

    await scraped.topic.set_cursor("c", {2: 1})
    after = await scraped.look()
    assert [("t", "c")] == [(topic, name) for topic, name, _ in after.consumers]
    assert [1] == [row.lag for _, _, row in after.consumers]


async def test_a_replica_that_stops_is_in_the_next_scrape(scraped: Scraped) -> None:
    """It leads no longer."""
    await scraped.look()
    stopped = scraped.shard.partitions["t", 1]

    scraped.shard.driver.stop_replica(stopped.replica, RuntimeError("by the test"))
    after = await scraped.look()

    assert PARTITIONS - 1 == after.topics["t"].leads
    assert 1 == after.states["stopped"]
