"""Changes of routes, from the request to records in the outputs: one node, whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import laminar
from laminar.embedded import EmbeddedNode
from laminar.node.catalog.service import BeginRouteRequest
from laminar.node.partition.partition import Partition
from laminar.node.shard.shard import Shard
from membership.records import TopicRecord
from tests.node.catalog.test_route_requests import ask, controller_of, until_enabled


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[EmbeddedNode]:
    async with laminar.embed(tmp_path / "data", journal_file_bytes=4 << 20) as running:
        await running.client.create_topic("t", partitions=2)
        async with asyncio.timeout(30):
            await until_enabled(running)
        yield running


def topic_of(node: EmbeddedNode) -> TopicRecord:
    return controller_of(node).state().topics["t"]


def partition_of(node: EmbeddedNode, number: int) -> Partition:
    shards = [each for each in node._processes.values() if isinstance(each, Shard)]
    (found,) = (each.partitions["t", number] for each in shards if ("t", number) in each.partitions)
    return found


async def until(check: Callable[[], bool], what: Callable[[], object] = lambda: "") -> None:
    try:
        async with asyncio.timeout(20):
            while True:
                if check():
                    return
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not in time: {what()}") from None


async def begin(node: EmbeddedNode, *inputs: int, cuts: list[int] | None = None, **fields: Any) -> int:
    """Begin a change of the present route; return its id."""
    version = 0 if (route := topic_of(node).route) is None else route.version
    asked: dict[str, Any] = {"after": version, "order": "strict", "wait_ms": 10_000} | fields
    answer = await ask(node, BeginRouteRequest("t", inputs=list(inputs), cuts=cuts or [], **asked))
    assert answer.result is not None and answer.result.outcome == "created", answer
    assert answer.result.topic is not None and answer.result.topic.change is not None
    return answer.result.topic.change.id


async def test_a_partition_splits_and_its_parts_are_merged(node: EmbeddedNode) -> None:
    topic = node.client.topic("t")
    for number in range(10):
        await topic.append(b"before %d" % number, b"key %d" % number)
    await begin(node, 0, cuts=[9_000])
    await until(lambda: topic_of(node).change is None, lambda: topic_of(node).change)
    route = topic_of(node).route
    assert route is not None and [2, 3, 1] == [each.number for each in route.ranges]
    (change,) = topic_of(node).changes or []
    assert partition_of(node, 0).end_offset == change.seals[0].end_offset
    await until(lambda: all(partition_of(node, n).state.succession.status == "open" for n in (2, 3)))

    await begin(node, 2, 3)
    await until(lambda: topic_of(node).change is None, lambda: topic_of(node).change)
    await until(lambda: partition_of(node, 4).state.succession.status == "open")
    opened = partition_of(node, 4).state.succession.opened
    assert opened is not None and [2, 3] == [each.number for each in opened.record.inputs]
    assert "sealed" == partition_of(node, 0).state.succession.status
