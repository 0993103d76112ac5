"""A shard's part in channels: what the leaders of partitions open and close, by which word of the catalog."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import laminar
from laminar.embedded import EmbeddedNode
from laminar.http.api.problems import Problem
from laminar.node.channels.delivery import Delivery
from laminar.node.partition.partition import Partition
from laminar.node.shard.channels import differences
from laminar.node.shard.shard import Shard
from laminar.wire.channels import CURSOR_START_SINCE
from membership.catalog import CODE_VERSION
from membership.records import ChannelRecord, TopicRecord
from tests.node.api.consumers.changed import until
from tests.node.catalog.test_route_requests import until_enabled


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[EmbeddedNode]:
    async with laminar.embed(tmp_path / "data", journal_file_bytes=4 << 20) as running:
        await running.client.create_topic("t", partitions=2)
        await until_enabled(running, version=4)
        yield running


def shard_of(node: EmbeddedNode) -> Shard:
    return next(each for each in node._processes.values() if isinstance(each, Shard))


async def create(node: EmbeddedNode, name: str = "c", **settings: Any) -> Any:
    return await node.client.request_json("PUT", f"/v1/topics/t/channels/{name}", {"settings": settings})


def partition_of(node: EmbeddedNode, number: int = 0) -> Partition:
    return shard_of(node).partitions["t", number]


def ids(node: EmbeddedNode, number: int = 0) -> list[int]:
    return sorted(partition_of(node, number).state.channels.by_id)


async def until_closed(node: EmbeddedNode, numbers: tuple[int, ...] = (0, 1)) -> None:
    await until(lambda: not any(ids(node, number) for number in numbers))


def topic_of(**channels: ChannelRecord) -> TopicRecord:
    return TopicRecord("t", 2, 1, {}, 1, 1, channels=channels or None)


async def test_what_differs_is_found_by_id_and_version(node: EmbeddedNode) -> None:
    channel, version = (made := await create(node))["id"], made["version"]
    partition = partition_of(node)

    same = ChannelRecord(channel, version, {}, 2)
    newer = ChannelRecord(channel, version + 5, {}, 2)
    older = ChannelRecord(channel, version - 1, {}, 2)
    other = ChannelRecord(channel + 9, channel + 9, {}, 2)
    assert not any(differences(topic_of(c=same), partition))
    assert not any(differences(topic_of(c=older), partition)), "an old view takes nothing back"
    assert ([("c", newer)], []) == differences(topic_of(c=newer), partition)
    assert ([("c", other)], [channel]) == differences(topic_of(c=other), partition)
    assert ([], [channel]) == differences(topic_of(), partition)


async def test_a_deleted_channel_is_closed_in_all_partitions(node: EmbeddedNode) -> None:
    kept = (await create(node, "kept"))["id"]
    await create(node)
    await node.client.request_json("DELETE", "/v1/topics/t/channels/c")
    await until(lambda: 2 == shard_of(node).channels.closed)

    assert [[kept], [kept]] == [ids(node, 0), ids(node, 1)]


async def test_what_a_view_lacks_is_not_closed_before_the_catalog_has_confirmed_it(
    node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view of before the creation lacks the channel, too."""
    asked = asyncio.Event()

    async def refused() -> None:
        asked.set()
        raise Problem("no_leader", "the catalog has no leader")

    await create(node)
    with monkeypatch.context() as patch:
        patch.setattr(shard_of(node), "refresh_view", refused)
        await node.client.request_json("DELETE", "/v1/topics/t/channels/c")
        for _ in range(2):
            asked.clear()
            async with asyncio.timeout(60):
                await asked.wait()
        assert [1, 1] == [len(ids(node, number)) for number in (0, 1)]
    await until_closed(node)


async def test_what_was_deleted_while_it_was_opened_is_closed_again(
    node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The view without it comes before the entry that opens it: nothing else asks for the partition again."""
    opened, go_on = asyncio.Event(), asyncio.Event()
    plain, shard = Delivery.open, shard_of(node)
    # Later the catalog changes nothing of the partitions by itself.
    await until(lambda: all(each.preferred_leader for each in shard.view.partitions_of("t")))

    async def late(*arguments: Any, **more: Any) -> Any:
        opened.set()
        await go_on.wait()
        return await plain(*arguments, **more)

    monkeypatch.setattr(Delivery, "open", late)
    creating = asyncio.create_task(create(node))
    async with asyncio.timeout(60):
        await opened.wait()
    await node.client.request_json("DELETE", "/v1/topics/t/channels/c")
    with pytest.raises(laminar.NotFound):
        await creating
    go_on.set()
    await until(lambda: 2 == shard.channels.opened)
    await until(lambda: 2 == shard.channels.closed)

    assert [[], []] == [ids(node, 0), ids(node, 1)]
    assert 0 == shard.work.missed


async def test_a_partition_that_is_made_later_has_each_channel_from_its_beginning(node: EmbeddedNode) -> None:
    """What comes to its keys there would have come to the channel in the partition before."""
    topic = node.client.topic("t")
    await create(node, start="latest")
    # Both partitions of keys in the upper half are new, and have records before their leaders may look.
    await topic.split(0)
    async with topic.producer() as producer:
        for number in range(20):
            producer.send(b"x", key=str(number))
    after = await create(node, "after", start="latest")
    shown = await node.client.request_json("GET", "/v1/topics/t/channels/c")
    numbers = [number for number in shown["partitions"] if number not in ("0", "1")]

    assert ["2", "3"] == numbers
    assert [0, 0] == [shown["partitions"][number]["next"] for number in numbers]
    assert 20 == shown["depth"]
    assert 0 == after["depth"], "made behind the change, it begins as its settings say"


async def test_channels_are_there_after_a_restart(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with laminar.embed(data, journal_file_bytes=4 << 20) as node:
        await node.client.create_topic("t", partitions=2)
        await until_enabled(node, version=4)
        made = await create(node, order="key")
    async with laminar.embed(data, journal_file_bytes=4 << 20) as node:
        shown = await node.client.request_json("GET", "/v1/topics/t/channels/c")
        again = await create(node, order="key")

    assert (made["id"], {"order": "key"}) == (shown["id"], shown["settings"])
    assert made["id"] == again["id"]
    assert [made["version"]] * 2 == [each["version"] for each in again["partitions"].values()]


async def test_a_channel_that_cannot_be_opened_is_503_and_goes_on_opening(
    node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laminar.node.api.channels.channels.OPEN_WAIT_S", 0.1)
    with monkeypatch.context() as patch:

        async def refused(*arguments: Any, **more: Any) -> None:
            raise Problem("overloaded", "no room")

        patch.setattr("laminar.node.channels.delivery.Delivery.open", refused)
        with pytest.raises(laminar.Error) as caught:
            await node.client.request_json("PUT", "/v1/topics/t/channels/c", {}, timeout=0.5)
        shown = await node.client.request_json("GET", "/v1/topics/t/channels/c")
        assert [0, 1] == shown["opening"], caught.value
    await until(lambda: all(ids(node, number) for number in (0, 1)))
    assert [] == (await node.client.request_json("GET", "/v1/topics/t/channels/c"))["opening"]


async def test_a_start_that_an_older_program_cannot_read_is_not_written(
    node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would stop at the entry that opens the channel."""
    await node.client.topic("t").set_cursor("readers", {0: 0})
    await until_enabled(node, version=CURSOR_START_SINCE)
    later = CODE_VERSION + 1
    monkeypatch.setattr("laminar.node.api.channels.channels.CURSOR_START_SINCE", later)
    with pytest.raises(laminar.Error, match=f"needs code version {later}") as refused:
        await create(node, start={"cursor": "readers"})

    assert ("not_enabled", 503) == (refused.value.code, refused.value.status)
    assert [[], []] == [ids(node, 0), ids(node, 1)]
    monkeypatch.undo()
    assert [(await create(node, start={"cursor": "readers"}))["id"]] == ids(node)
