"""Changes of routes, from the request to records in the outputs: one node, whole."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import laminar
from laminar.batch import Header, build
from laminar.embedded import EmbeddedNode
from laminar.node.catalog.messages.requests import BeginRouteRequest, RouteProgressRequest
from laminar.node.partition.partition import Partition
from laminar.node.shard import route_changes
from laminar.node.shard.shard import Shard
from laminar.node.transactions.participant import Batch, Participant
from membership.records import TopicRecord
from tests.node.api.asking import problem
from tests.node.catalog.test_route_requests import ask, controller_of, until_enabled


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[EmbeddedNode]:
    async with laminar.embed(tmp_path / "data", journal_file_bytes=4 << 20) as running:
        await running.client.create_topic("t", partitions=2)
        async with asyncio.timeout(60):
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
        async with asyncio.timeout(60):
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
    end = partition_of(node, 0).end_offset
    await topic.set_cursor("done", {0: end})
    await topic.set_cursor("billing", {0: end - 1})
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
    await until(lambda: not controller_of(node)._routes.statistics()["under_way"])
    metrics = await asyncio.to_thread(metrics_of, node)
    assert 'laminar_route_changes_total{result="done"} 2' in metrics
    assert 'laminar_route_version{topic="t"} 2' in metrics
    assert 'laminar_route_phase_seconds_count{phase="closing"} 2' in metrics
    assert 'laminar_partitions{state="sealed"} 3' in metrics
    assert "laminar_undrained_cursors 1" in metrics


def metrics_of(node: EmbeddedNode) -> str:
    with urllib.request.urlopen(f"{node.url}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


STAGED = Batch(sink=b"s" * 16, number=1, epoch=1)


async def stage(partition: Partition, *, prepare: bool) -> None:
    """Begin a batch of a sink, and perhaps promise to keep it."""
    frame = build([b"staged"])
    await Participant(partition).stage(STAGED, 0, frame, Header.unpack(frame))
    if prepare:
        await Participant(partition).prepare(STAGED, [0])


async def waits_for(node: EmbeddedNode) -> list[str]:
    answer = await ask(node, RouteProgressRequest("t"))
    assert answer.progress is not None
    return answer.progress.waits_for


async def test_a_change_waits_for_what_is_under_way_and_says_so(node: EmbeddedNode) -> None:
    input_ = partition_of(node, 0)
    await stage(input_, prepare=True)
    await begin(node, 0, cuts=[9_000], wait_ms=60_000)
    said: list[str] = []
    async with asyncio.timeout(60):
        while not any("partition 0: 1 transactions" in each for each in said):
            said = await waits_for(node)
            await asyncio.sleep(0.05)
    change = topic_of(node).change
    assert change is not None and change.state == "preparing"
    assert "open" == input_.state.succession.status

    await Participant(input_).publish(STAGED)
    await until(lambda: topic_of(node).change is None, lambda: topic_of(node).change)
    assert topic_of(node).route is not None
    assert 1 == input_.end_offset


async def test_a_change_with_no_time_is_cancelled_by_what_is_under_way(node: EmbeddedNode) -> None:
    """Its numbers are not given again, and nothing is left of its outputs."""
    await stage(partition_of(node, 0), prepare=False)
    first = await begin(node, 0, cuts=[9_000], wait_ms=0)
    await until(lambda: topic_of(node).change is None, lambda: topic_of(node).change)
    progress = None
    async with asyncio.timeout(60):
        while progress is None or not progress.cancelled:  # the topic's view may be changed a moment before
            progress = (await ask(node, RouteProgressRequest("t"))).progress
            await asyncio.sleep(0.01)
    assert first == progress.cancelled
    assert any("partition 0: 1 transactions" in each for each in progress.because), progress
    assert topic_of(node).route is None
    await until(lambda: not controller_of(node).state().tombstones)

    await Participant(partition_of(node, 0)).drop(STAGED)
    await begin(node, 0, cuts=[9_000], wait_ms=0)
    await until(lambda: topic_of(node).route is not None, lambda: topic_of(node).change)
    route = topic_of(node).route
    assert route is not None and [4, 5, 1] == [each.number for each in route.ranges]


@pytest.mark.parametrize("prepare", [False, True])
async def test_a_change_abandons_what_is_not_prepared(node: EmbeddedNode, prepare: bool) -> None:
    """What is prepared may be decided, and stays; the change is cancelled then."""
    await stage(partition_of(node, 0), prepare=prepare)
    await begin(node, 0, cuts=[9_000], wait_ms=0, abandon=True)
    await until(lambda: topic_of(node).change is None, lambda: topic_of(node).change)
    assert prepare == (topic_of(node).route is None)
    assert prepare == bool(partition_of(node, 0).state.stages)


async def test_what_began_between_the_hold_and_the_seal_is_dropped_in_time(
    node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that was just elected holds nothing. The other inputs' keys wait meanwhile."""
    monkeypatch.setattr(route_changes, "PATIENCE_S", 0.3)
    input_ = partition_of(node, 0)
    propose = Partition.propose_seal
    blocked: list[object] = []

    def late(partition: Partition, record: Any) -> Any:
        if not blocked:
            partition.led(True)  # it holds nothing
            frame = build([b"staged"])
            blocked.append(Participant(partition).stage(STAGED, 0, frame, Header.unpack(frame)))
        return propose(partition, record)

    monkeypatch.setattr(Partition, "propose_seal", late)
    await begin(node, 0, 1)
    await until(lambda: topic_of(node).change is None, lambda: topic_of(node).change)
    assert blocked and "sealed" == input_.state.succession.status
    assert [] == list(input_.state.stages.batches())


async def test_a_topic_is_deleted_while_it_changes(node: EmbeddedNode) -> None:
    await stage(partition_of(node, 0), prepare=True)
    await begin(node, 0, cuts=[9_000], wait_ms=3_600_000)
    await until(lambda: controller_of(node).state().partitions["t/3"].state == "live")
    await node.client.delete_topic("t")
    await until(lambda: not controller_of(node).state().tombstones)
    await until(lambda: not controller_of(node)._routes.statistics()["under_way"])
    await node.client.create_topic("t", partitions=1)
    await begin(node, 0, cuts=[9_000])
    await until(lambda: topic_of(node).route is not None, lambda: topic_of(node).change)


async def test_a_change_goes_on_after_a_restart(tmp_path: Path) -> None:
    """Whoever leads the catalog then drives it, and finds what is in the way."""
    for again in (False, True):
        async with laminar.embed(tmp_path / "data", journal_file_bytes=4 << 20) as node:
            if not again:
                await node.client.create_topic("t", partitions=2)
                async with asyncio.timeout(60):
                    await until_enabled(node)
                await stage(partition_of(node, 0), prepare=True)
                await begin(node, 0, cuts=[9_000], wait_ms=3_600_000)
                await until(lambda: controller_of(node).state().partitions["t/3"].state == "live")
                continue
            await until(lambda: partition_of(node, 0).leads)
            await Participant(partition_of(node, 0)).drop(STAGED)
            await until(lambda: topic_of(node).route is not None, lambda: topic_of(node).change)
            await until(lambda: partition_of(node, 2).state.succession.status == "open")


async def test_a_split_over_the_quota_says_of_what(node: EmbeddedNode) -> None:
    controller_of(node).service._routes._max_partitions = 3
    async with httpx.AsyncClient(timeout=60) as http:
        asked = {"after": 0, "inputs": [0], "cuts": [9_000]}
        answer = await http.post(f"{node.url}/v1/topics/t/routes", json=asked)

    problem(answer, 429, "quota", field="partitions", value=4, limit=3, outcome="not_applied")
    assert "max_partitions" in answer.json()["hint"]
