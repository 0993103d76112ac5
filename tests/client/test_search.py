"""Searches as a program makes them, on a node in the test's loop; and without a loop."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from itertools import count

import pytest

import laminar
from laminar.client.topic import Topic
from laminar.testing import nodes

_numbers = count()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with nodes.serve() as url:
        yield url


@pytest.fixture
async def topic(url: str) -> AsyncIterator[Topic[bytes]]:
    async with laminar.aio.connect(url) as client:
        topic = await client.create_topic(f"t{next(_numbers)}", partitions=3)
        for n in range(30):
            await topic.append(
                b'{"n": %d}' % n,
                f"k{n % 5}",
                tag=f"t{n % 2}",
                headers={"h": b"%d" % (n % 3)},
                trace_id=f"{n:032x}",
            )
        yield topic


async def test_records_are_found_with_all_they_have(topic: Topic[bytes]) -> None:
    (found,) = [record async for record in topic.search(trace_id=f"{7:032x}")]

    assert (found.key, found.tag, found.headers, found.value) == (b"k2", "t1", {"h": b"1"}, b'{"n": 7}')
    assert (found.size, found.truncated, found.trace_id) == (8, False, f"{7:032x}")
    assert abs(found.timestamp - datetime.datetime.now(datetime.UTC)) < datetime.timedelta(minutes=5)


async def test_a_search_says_how_far_it_has_looked(topic: Topic[bytes]) -> None:
    search = topic.search(key="k2", tag="t1")
    values = sorted([record.value async for record in search])

    assert values == sorted(b'{"n": %d}' % n for n in (7, 17, 27))
    assert search.is_done and search.searched_records == 30 and search.searched_bytes > 0
    assert (search.left_records, search.left_partitions, search.not_searched) == (0, 0, [])
    assert await search.next_page() == []


async def test_bounds_order_and_limit(topic: Topic[bytes]) -> None:
    partition = (await anext(topic.search(key="k1"))).partition
    newest = [record async for record in topic.search(partitions=[partition], newest=True, limit=2)]
    offsets = [record.offset for record in newest]
    assert offsets == sorted(offsets, reverse=True) and len(offsets) == 2
    first = [
        record.offset
        async for record in topic.search(partitions=[partition], start={partition: 1}, end={partition: 3})
    ]
    assert first == [1, 2]
    long_ago = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
    assert [record async for record in topic.search(end=long_ago)] == []
    assert len([record async for record in topic.search(start=long_ago, json=("n", 3))]) == 1
    with pytest.raises(laminar.ConfigError):
        topic.search(start="tomorrow")  # type: ignore[arg-type]  # a person may write this


async def test_a_tail_has_what_is_appended_after_it_began(topic: Topic[bytes]) -> None:
    tail = topic.tail(contains="new", limit=3)
    assert await tail.next_page() == []  # it has begun

    async def append() -> None:
        for n in range(3):
            await topic.append(b"new %d" % n, f"key {n}")
            await topic.append(b"other", f"key {n}")

    async with asyncio.timeout(60):
        appending = asyncio.ensure_future(append())
        values = [record.value async for record in tail]
        await appending
    assert sorted(values) == [b"new 0", b"new 1", b"new 2"]


async def test_a_key_of_any_bytes_is_found(topic: Topic[bytes]) -> None:
    await topic.append(b"\xff\xfe", b"\xff")
    (found,) = [record async for record in topic.search(key=b"\xff", value_bytes=1)]
    assert (found.key, found.value, found.size, found.truncated) == (b"\xff", b"\xff", 2, True)


async def test_the_history_of_a_record(topic: Topic[bytes]) -> None:
    found = await anext(topic.search(key="k1"))
    channel = await topic.channel("jobs", exist_ok=True)
    async with aclosing(channel.receive()) as jobs:
        async for job in jobs:
            await job.ack()
            if (job.partition, job.offset) == (found.partition, found.offset):
                break
    history = await topic.history(found.partition, found.offset)
    assert [each.event for each in history.events] == ["appended", "delivered", "acked"]
    assert history.record is not None and history.record.value == found.value
    assert (history.now, history.is_complete) == ({"jobs": "done"}, True)
    assert history.events[1].due is not None and history.events[1].attempt == 1
    with pytest.raises(laminar.NotFound):
        await topic.history(found.partition, 10_000)


def test_the_same_without_a_loop(url: str) -> None:
    with laminar.connect(url) as client:
        topic = client.create_topic("sync", partitions=2)
        for n in range(10):
            topic.append(b"%d" % n, f"k{n}")
        search = topic.search(contains="7")
        assert [record.value for record in search] == [b"7"]
        assert search.searched_records == 10 and search.left_partitions == 0
        tail = topic.tail(limit=1)
        tail.next_page()
        topic.append(b"new", "k")
        (new,) = tail
        assert new.value == b"new"
        assert [each.event for each in topic.history(new.partition, new.offset).events] == ["appended"]
