"""Requests that begin and cancel a change of a topic's route, at a node with the whole API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

import laminar
from laminar.embedded import EmbeddedNode
from laminar.node.catalog.controller import Controller
from laminar.node.catalog.messages.answers import CatalogAnswer
from laminar.node.catalog.messages.requests import (
    BeginRouteRequest,
    CatalogRequest,
    RouteProgressRequest,
    RouteRequest,
)
from laminar.node.runtime.boot import CONTROLLER
from laminar.node.transactions.coordinator import TOPIC as COORDINATORS
from membership.requests import CancelChange


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[EmbeddedNode]:
    async with laminar.embed(tmp_path / "data", journal_file_bytes=4 << 20) as running:
        await running.client.create_topic("t", partitions=3)
        async with asyncio.timeout(30):
            await until_enabled(running)
        yield running


async def until_enabled(node: EmbeddedNode, *, version: int = 3) -> None:
    while True:
        group = controller_of(node).group
        if group is not None and group.catalog.code_version >= version:
            return
        await asyncio.sleep(0.01)


def controller_of(node: EmbeddedNode) -> Controller:
    return cast("Controller", node._processes[CONTROLLER])


async def ask(node: EmbeddedNode, request: CatalogRequest) -> CatalogAnswer:
    return await controller_of(node).service.ask(request)


def begin(*inputs: int, cuts: list[int] | None = None, **fields: Any) -> BeginRouteRequest:
    asked: dict[str, Any] = {"topic": "t", "after": 0, "order": "strict", "wait_ms": 60_000}
    return BeginRouteRequest(inputs=list(inputs), cuts=cuts or [], **asked | fields)


async def test_a_change_is_begun_once_and_the_same_one_exists(node: EmbeddedNode) -> None:
    first = await ask(node, begin(0, cuts=[9_000]))
    again = await ask(node, begin(0, cuts=[9_000]))

    assert first.result is not None and again.result is not None, (first, again)
    assert ("created", "exists") == (first.result.outcome, again.result.outcome)
    change = first.result.topic.change if first.result.topic else None
    assert change is not None and [3, 4] == [each.number for each in change.outputs]


@pytest.mark.parametrize(
    ("request_", "error", "limit"),
    [
        (begin(0, cuts=[9_000], after=2), "precondition_failed", 0),
        (begin(0, 2), "invalid", 0),
        (begin(0, cuts=[40_000]), "invalid", 0),
        (begin(0, topic=COORDINATORS, cuts=[9]), "invalid", 0),
        (begin(0, force=True), "invalid", 0),
    ],
)
async def test_what_is_no_change_of_the_present_route_is_refused_with_the_reason(
    node: EmbeddedNode, request_: BeginRouteRequest, error: str, limit: int
) -> None:
    answer = await ask(node, request_)

    assert (error, limit) == (answer.error, answer.limit), answer
    assert answer.detail
    assert controller_of(node).state().topics["t"].change is None


async def test_of_two_changes_the_second_hears_of_the_first(node: EmbeddedNode) -> None:
    await ask(node, begin(0, cuts=[9_000]))
    answer = await ask(node, begin(1, 2))

    assert ("in_progress", 1) == (answer.error, answer.value), answer


async def test_outputs_have_no_place_without_the_only_node(node: EmbeddedNode) -> None:
    answer = await ask(node, begin(0, avoid=[node.node]))

    assert ("too_few_nodes", 1, 0) == (answer.error, answer.value, answer.limit), answer


async def test_a_cluster_has_no_more_partitions_than_its_limit(node: EmbeddedNode) -> None:
    controller_of(node).service._routes._max_partitions = 4
    answer = await ask(node, begin(0, cuts=[9_000]))

    assert ("quota", 5, 4) == (answer.error, answer.value, answer.limit), answer


async def test_a_topic_that_is_not_there_is_absent(node: EmbeddedNode) -> None:
    answer = await ask(node, begin(0, topic="x"))

    assert answer.result is not None and "absent" == answer.result.outcome


async def test_a_change_is_cancelled_by_its_id(node: EmbeddedNode) -> None:
    begun = await ask(node, begin(0, cuts=[9_000], wait_ms=3_600_000))
    assert begun.result is not None and begun.result.topic is not None
    change = begun.result.topic.change
    assert change is not None
    progress = await ask(node, RouteProgressRequest("t"))
    answer = await ask(node, RouteRequest(CancelChange("t", change.id, 1)))

    assert progress.progress is not None
    assert answer.result is not None and "deleted" == answer.result.outcome
    assert controller_of(node).state().topics["t"].change is None
