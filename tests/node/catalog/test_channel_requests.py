"""Requests that create, change and delete channels, at a node with the whole API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import laminar
from laminar.embedded import EmbeddedNode
from laminar.node.catalog.messages.requests import ChannelRequest
from membership import channel_rules
from membership.records import ChannelRecord
from membership.requests import CreateChannel, DeleteChannel, UpdateChannel
from tests.node.catalog.test_route_requests import ask, controller_of, until_enabled


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[EmbeddedNode]:
    async with laminar.embed(tmp_path / "data", journal_file_bytes=4 << 20) as running:
        await running.client.create_topic("t", partitions=1)
        await until_enabled(running, version=4)
        yield running


def create(name: str = "c", **settings: Any) -> ChannelRequest:
    return ChannelRequest(CreateChannel("t", name, settings))


def channels_of(node: EmbeddedNode) -> dict[str, ChannelRecord] | None:
    return controller_of(node).state().topics["t"].channels


async def test_a_channel_is_created_changed_and_deleted(node: EmbeddedNode) -> None:
    made = await ask(node, create(order="key"))
    assert made.result is not None and "created" == made.result.outcome, made
    version = made.result.version
    assert {"c": ChannelRecord(version, version, {"order": "key"}, 1)} == channels_of(node)

    step = UpdateChannel("t", "c", version, {"order": "key", "paused": True})
    changed = await ask(node, ChannelRequest(step))
    assert changed.result is not None and "updated" == changed.result.outcome, changed

    gone = await ask(node, ChannelRequest(DeleteChannel("t", "c", version)))
    assert gone.result is not None and "deleted" == gone.result.outcome, gone
    assert channels_of(node) is None


async def test_the_refusal_of_one_channel_too_many_has_the_limit_that_it_exceeds(
    node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_rules, "MAX_CHANNELS", 2)
    for name in "ab":
        await ask(node, create(name))
    of_topic = await ask(node, create())
    monkeypatch.setattr(channel_rules, "MAX_CHANNELS", 64)
    monkeypatch.setattr(channel_rules, "MOST_CHANNELS", 2)
    of_cluster = await ask(node, create())
    monkeypatch.setattr(channel_rules, "MAX_CHANNELS", 3)
    of_both = await ask(node, create())

    assert ("quota", 3, 2) == (of_topic.error, of_topic.value, of_topic.limit)
    assert ("quota", 3, 2) == (of_cluster.error, of_cluster.value, of_cluster.limit)
    assert "all topics" in of_cluster.detail and "topic 't'" in of_topic.detail
    assert "quota" == of_both.error


async def test_no_channel_before_all_programs_know_it(
    node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = controller_of(node).group
    assert group is not None
    monkeypatch.setattr(type(group.catalog), "code_version", property(lambda catalog: 3))
    answer = await ask(node, create())

    assert "not_enabled" == answer.error and answer.detail, answer
    assert channels_of(node) is None
