"""Channels as a program makes and shows them, on a node in the test's loop."""

from __future__ import annotations

import asyncio
import datetime
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import laminar
from laminar.client.topic import Topic


@pytest.fixture
async def topic(tmp_path: Path) -> AsyncIterator[Topic[bytes]]:
    async with laminar.embed(tmp_path / "data", journal_file_bytes=4 << 20) as node:
        yield await node.client.create_topic("t", partitions=2)


async def test_a_channel_is_created_once(topic: Topic[bytes]) -> None:
    made = await topic.create_channel("c", settings={"order": "key"})
    same = await topic.create_channel("c", settings={"order": "key"}, exist_ok=True)

    assert ("c", {"order": "key"}, [], []) == (made.channel, made.settings, made.opening, made.unanswered)
    assert made.id == same.id
    with pytest.raises(laminar.AlreadyExists):
        await topic.create_channel("c", settings={"order": "key"})
    with pytest.raises(laminar.AlreadyExists, match="max_attempts is default, not 3"):
        await topic.create_channel("c", settings={"order": "key", "max_attempts": 3}, exist_ok=True)


async def test_what_is_missing_or_unknown_is_said_in_words_of_the_client(topic: Topic[bytes]) -> None:
    with pytest.raises(laminar.NotFound) as missing:
        await topic.channel("nothing")
    assert "topic.channel(name, exist_ok=True)" in str(missing.value) and "PUT" not in str(missing.value)
    with pytest.raises(laminar.Error, match=r"there is no field settings\.colour"):
        await topic.channel("c", colour=1)


async def test_what_it_has_to_do_is_shown(topic: Topic[bytes]) -> None:
    for number in range(4):
        await topic.append(b"x", key=str(number))
    await topic.create_channel("all")
    await topic.create_channel("new", settings={"start": "latest"})
    both = await topic.channels()

    assert [("all", 4), ("new", 0)] == [(each.channel, each.depth) for each in both]
    assert both[0].oldest_age_s is not None and 0 <= both[0].oldest_age_s < 60
    assert both[1].oldest_age_s is None


async def test_a_channel_begins_where_a_cursor_stands(topic: Topic[bytes]) -> None:
    receipts = [await topic.append(b"%d" % number, partition=0) for number in range(3)]
    await topic.set_cursor("readers", {0: receipts[1].offset})

    channel = await topic.channel("c", start={"cursor": "readers"})

    assert [b"1", b"2"] == [job.value for job in await channel.receive_batch()]
    with pytest.raises(laminar.NotFound, match="no cursor 'reader'"):
        await topic.channel("d", start={"cursor": "reader"})


async def test_a_channel_of_a_range_of_times_may_be_given_datetimes(topic: Topic[bytes]) -> None:
    """Naive ones are local, and it is found by the same times again."""
    await topic.append(b"before", partition=0)
    await asyncio.sleep(0.01)
    start = datetime.datetime.now(datetime.UTC)
    await topic.append(b"in it", partition=0)
    await asyncio.sleep(0.01)
    until = datetime.datetime.now()
    await topic.append(b"after", partition=0)

    channel = await topic.channel("c", start=start, until=until)
    again = await topic.channel("c", start=start, until=until, exist_ok=True)

    assert [b"in it"] == [job.value for job in await channel.receive_batch()]
    assert channel.settings == again.settings
    assert {"start": math.floor(start.timestamp() * 1000)}.items() <= channel.settings.items()


async def test_a_change_names_what_it_changes_and_others_stay(topic: Topic[bytes]) -> None:
    made = await topic.create_channel("c", settings={"retry_ms": 5})
    changed = await topic.set_channel("c", {"paused": True})
    back = await topic.set_channel("c", {"retry_ms": None}, version=changed.version)

    assert changed.paused and {"retry_ms": 5, "paused": True} == changed.settings
    assert {"paused": True} == back.settings
    with pytest.raises(laminar.PreconditionFailed):
        await topic.set_channel("c", {}, version=made.version)
    with pytest.raises(laminar.NotFound):
        await topic.set_channel("d", {"paused": True})


async def test_changes_at_the_same_time_are_all_made(topic: Topic[bytes]) -> None:
    await topic.create_channel("c")
    wanted: list[dict[str, Any]] = [{"retry_ms": 7}, {"dead_ms": 8}, {"hold_ms": 9}]
    await asyncio.gather(*(topic.set_channel("c", each) for each in wanted))

    assert {"retry_ms": 7, "dead_ms": 8, "hold_ms": 9} == (await topic.describe_channel("c")).settings


async def test_a_deletion_may_be_repeated(topic: Topic[bytes]) -> None:
    await topic.create_channel("c")
    await topic.delete_channel("c")
    await topic.delete_channel("c")

    assert [] == await topic.channels()
    with pytest.raises(laminar.NotFound):
        await topic.describe_channel("c")
