"""Splits by load: which partition is split, after how long, and which is not; on a node in this loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import laminar
from laminar.node.shard.shard import Shard
from laminar.node.shard.splitting import MINUTE_S, MINUTES
from tests.node.routes.test_changes import metrics_of

LIMIT = 100
VALUE = b"x" * 1000
# In each minute this many records of 1,000 bytes are more than LIMIT bytes a second.
ENOUGH = int(LIMIT * MINUTE_S) // len(VALUE) + 1


@pytest.fixture
async def node(tmp_path: Path) -> Any:
    async with laminar.embed(tmp_path / "data", journal_file_bytes=4 << 20) as node:
        yield node


def shard_of(node: Any) -> Shard:
    return next(each for each in node._processes.values() if isinstance(each, Shard))


async def a_minute(node: Any, topic: Any, keys: list[str], *, records: int = ENOUGH) -> int:
    """A minute's appends, and the check at its end; how many splits were begun so far."""
    async with topic.producer() as producer:
        for number in range(records):
            producer.send(VALUE, key=keys[number % len(keys)])
    await shard_of(node).splitting.check()
    return shard_of(node).splitting.begun


async def made(node: Any, **settings: Any) -> Any:
    topic = await node.client.create_topic("t", settings=settings)
    await shard_of(node).splitting.check()
    return topic


KEYS = [f"k{number}" for number in range(20)]


async def test_a_partition_is_split_after_ten_minutes_above_the_limit(node: Any) -> None:
    topic = await made(node, split_bytes_per_s=LIMIT)
    begun = [await a_minute(node, topic, KEYS) for _ in range(MINUTES)]
    assert [0] * (MINUTES - 1) + [1] == begun
    while (await topic.route()).version == 0:
        await node.client.request_json("GET", "/v1/topics/t/routes/1?wait_ms=1000")
    first, second = (await topic.route()).ranges
    keys = [await topic.partition_of(key) for key in KEYS]
    assert 6 <= keys.count(first) <= 14 and 6 <= keys.count(second) <= 14
    shown = await asyncio.to_thread(metrics_of, node)
    counts = [
        line.split()[-1]
        for line in shown.splitlines()
        if line.startswith("laminar_routes_splits_by_load_total")
    ]
    assert 1.0 == sum(map(float, counts))
    # The new ones begin to count.
    assert 1 == await a_minute(node, topic, KEYS)


async def test_a_minute_below_the_limit_begins_the_count_anew(node: Any) -> None:
    topic = await made(node, split_bytes_per_s=LIMIT)
    for minute in range(2 * MINUTES - 2):
        few = minute == MINUTES - 2
        assert 0 == await a_minute(node, topic, KEYS, records=1 if few else ENOUGH)


async def test_without_the_setting_nothing_is_split(node: Any) -> None:
    topic = await made(node)
    assert [0] * MINUTES == [await a_minute(node, topic, KEYS) for _ in range(MINUTES)]


async def test_a_key_that_takes_all_is_not_split(node: Any) -> None:
    """A cut would leave its partition as it is."""
    topic = await made(node, split_bytes_per_s=LIMIT)
    assert [0] * MINUTES == [await a_minute(node, topic, ["hot"]) for _ in range(MINUTES)]
    assert 0 == (await topic.route()).version
