"""Clients over real changes of a route: one node, whole."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import pytest

import laminar
from laminar.embedded import EmbeddedNode
from tests.node.routes.test_changes import node, partition_of, topic_of, until

__all__ = ["node"]
KEYS = [f"key {number}" for number in range(20)]


def check(sent: list[tuple[str, bytes]], read: list[Any]) -> None:
    """Each record is there once, and the records of each key are in the order of sending."""
    wanted: dict[str, list[bytes]] = defaultdict(list)
    for key, value in sent:
        wanted[key].append(value)
    found: dict[str, list[bytes]] = defaultdict(list)
    for record in read:
        found[record.key.decode()].append(record.value)
    assert wanted == found


async def change_a_few_times(topic: Any) -> None:
    """Split, merge and move: five changes, one after another."""
    route = await topic.split(0, at=9_000, wait=60)
    assert {2, 3, 1} == set(route.ranges)
    await topic.merge([2, 3], wait=60)
    await topic.move(1, wait=60)
    await topic.split(4, into=3, wait=60)
    await topic.merge([6, 7], wait=60)


async def test_a_read_at_a_final_end_is_answered_at_once(node: EmbeddedNode) -> None:
    """So is one that waits there while the partition ends. The header says that nothing will follow."""
    topic = node.client.topic("t")
    session = node.client.session
    receipt = await topic.append(b"only", partition=0)
    first = await session.fetch("t", 0, offset=0, max_bytes=1 << 20)
    assert "laminar-sealed" not in first.headers
    waiting = asyncio.create_task(
        session.fetch("t", 0, offset=receipt.offset + 1, max_bytes=1 << 20, wait_ms=30_000)
    )
    await asyncio.sleep(0)
    began_s = time.monotonic()
    await topic.split(0, at=9_000, wait=60)
    answer = await waiting
    assert "1" == answer.headers["laminar-sealed"] and not answer.body
    again = await session.fetch("t", 0, offset=1, max_bytes=1 << 20, wait_ms=30_000)
    assert "1" == again.headers["laminar-sealed"]
    first = await session.fetch("t", 0, offset=0, max_bytes=1 << 20)
    assert "1" == first.headers["laminar-sealed"] and first.body
    assert time.monotonic() - began_s < 28, "none of them waited for its time"


async def test_a_bounded_read_takes_all_partitions_in_order(node: EmbeddedNode) -> None:
    topic = node.client.topic("t")
    sent: list[tuple[str, bytes]] = []

    async def send(count: int) -> None:
        async with topic.producer(batch_bytes=500) as producer:
            for _ in range(count):
                key = random.choice(KEYS)
                sent.append((key, b"%d" % len(sent)))
                producer.send(sent[-1][1], key)

    await send(200)
    check(sent, [record async for record in topic.read()])
    await topic.split(0, at=9_000, wait=60)
    await send(200)
    check(sent, [record async for record in topic.read()])
    await topic.merge([2, 3], wait=60)
    await topic.move(1, wait=60)
    await send(200)
    # A client that has the map of before, and one that has none.
    check(sent, [record async for record in topic.read()])
    async with laminar.aio.connect(node.url) as fresh:
        # In small pieces, so that an output would be read sooner if it did not wait.
        check(sent, [record async for record in fresh.topic("t").read(fetch_bytes=500)])
        assert [] == [record async for record in fresh.topic("t").read("latest")]
        only = [record async for record in fresh.topic("t").read(partitions=[0])]
        assert {0} == {record.partition for record in only}
    # In pieces, with pauses: what follows waits until all before it is handed out.
    reader = topic.read()
    pieces: list[Any] = []
    while True:
        before = len(pieces)
        async for record in reader:
            pieces.append(record)
            if len(pieces) - before == 37:
                break
        await reader.pause()
        if len(pieces) == before:
            break
    check(sent, pieces)


async def test_a_producer_and_readers_go_over_changes_while_they_run(node: EmbeddedNode) -> None:
    topic = node.client.topic("t")
    sent: list[tuple[str, bytes]] = []
    reads: dict[str, list[Any]] = {"earliest": [], "latest": []}
    done = asyncio.Event()

    async def produce() -> None:
        async with topic.producer(batch_bytes=2_000) as producer:
            while not done.is_set():
                key = random.choice(KEYS)
                sent.append((key, b"%d" % len(sent)))
                producer.send(sent[-1][1], key)
                if len(sent) % 20 == 0:
                    await asyncio.sleep(0.005)

    async def read(start: str, ready: asyncio.Event) -> None:
        async with topic.read(start, follow=True) as reader:
            ready.set()
            async for record in reader:
                reads[start].append(record)

    ready = [asyncio.Event(), asyncio.Event()]
    tasks = [asyncio.create_task(read(start, event)) for start, event in zip(reads, ready, strict=True)]
    for event in ready:
        await event.wait()
    producing = asyncio.create_task(produce())
    await change_a_few_times(topic)
    done.set()
    await producing
    await until(lambda: all(len(each) >= len(sent) for each in reads.values()), lambda: (len(sent), reads))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for found in reads.values():
        check(sent, found)
    check(sent, [record async for record in topic.read()])


async def test_a_cursor_goes_over_changes(node: EmbeddedNode) -> None:
    """Its positions are taken in every partition, inputs first; one that was away begins in the outputs."""
    topic = node.client.topic("t")
    sent: list[tuple[str, bytes]] = []
    read: list[Any] = []

    async def send(count: int) -> None:
        for _ in range(count):
            key = random.choice(KEYS)
            sent.append((key, b"%d" % len(sent)))
            await topic.append(sent[-1][1], key)

    async def some(count: int) -> None:
        async with topic.read(cursor="c") as reader:
            async for record in reader:
                read.append(record)
                count -= 1
                if not count:
                    break

    await send(30)
    await some(10)
    await topic.split(0, at=9_000, wait=60)
    await send(30)
    await some(15)
    await topic.merge([2, 3], wait=60)
    await send(30)
    await some(20)
    await some(20)
    await topic.move(4, wait=60)
    await send(10)
    await some(200)
    check(sent, read)
    # One that begins at the end gets what comes then, in any partition.
    async with topic.read("latest", cursor="late"):
        pass
    await topic.move(1, wait=60)
    await send(20)
    async with topic.read("latest", cursor="late") as reader:
        late = [record async for record in reader]
    check(sent[-20:], late)


async def test_reading_a_partition_by_number_ends_with_it(node: EmbeddedNode) -> None:
    topic = node.client.topic("t")
    await topic.append(b"one", partition=0)
    found = []

    async def read() -> None:
        async for record in topic.read(partitions=[0], follow=True):
            found.append(record.value)

    reading = asyncio.create_task(read())
    await until(lambda: len(found) == 1)
    await topic.move(0, wait=60)
    async with asyncio.timeout(60):
        await reading
    assert [b"one"] == found


async def test_a_named_producer_starts_again_after_changes(node: EmbeddedNode) -> None:
    """Each number is there once, wherever the runs before ended."""
    topic = node.client.topic("t")
    numbers = list(range(1, 400))
    rng = random.Random(3)
    keys = [rng.choice([*KEYS, None]) for _ in numbers]

    async def run(stop: int) -> None:
        async with topic.producer(name="copier", batch_bytes=300) as producer:
            for number in range(producer.resumed_at + 1, stop + 1):
                producer.send(b"%d" % number, keys[number - 1], number=number)
            await producer.wait()

    await run(100)
    changing = asyncio.create_task(change_a_few_times(topic))
    for stop in (200, 250, 300, 350):
        await run(stop)
    await changing
    await run(399)
    found = [int(record.value) async for record in topic.read()]
    assert numbers == sorted(found)


async def test_records_without_an_answer_are_not_doubled_by_a_change(node: EmbeddedNode) -> None:
    """The input is asked again: it has the batch, and says so after its end."""
    topic = node.client.topic("t")
    session = node.client.session
    sender = await topic.appends.open_sender(stop_on_failure=True)
    box = sender.accumulator
    pending = box.put(b"once", b"k", box.queue_of(b"k"))
    queue = box.queue_of(b"k")
    sender.wake()
    await until(lambda: pending.settled)
    again = box.put(b"twice?", b"k", queue)
    taken = box.take(queue, now_ms=0)
    assert taken is again
    # As if its answer were lost: it is appended, and the producer does not know.
    url = await session.leader_connection("t", queue.partition)
    frame = sender._frame(again)
    await session.pool.ask(
        url, sender._head(queue, url, len(frame), accepts=False), (bytes(frame),), timeout_s=5
    )
    end = partition_of(node, queue.partition).end_offset
    await topic.move(queue.partition, wait=60)
    box.retry(queue, again, until_ms=0, maybe_applied=True)
    sender._want_route(1)
    third = box.put(b"third", b"k", queue)
    sender.wake()
    await until(lambda: third.settled)
    assert (queue.partition, end - 1) == again.receipt(0)[:2]
    assert 2 == third.receipt(0).partition
    values = [record.value async for record in topic.read() if record.key == b"k"]
    assert [b"once", b"twice?", b"third"] == values


@pytest.mark.parametrize("order", ["strict", "weak"])
async def test_the_sync_face_goes_over_a_change(node: EmbeddedNode, order: str) -> None:
    await node.client.create_topic("w", partitions=1, settings={"order": order})

    def work() -> list[bytes]:
        with laminar.connect(node.url) as client:
            topic = client.topic("w")
            with topic.producer() as producer:
                for number in range(100):
                    producer.send(b"%d" % number, "k")
                    if number == 50:
                        topic.split(0, at=9_000, wait=60)
            return [record.value for record in topic.read()]

    assert sorted(b"%d" % number for number in range(100)) == sorted(await asyncio.to_thread(work))


async def test_datagrams_go_over_changes(node: EmbeddedNode) -> None:
    topic = node.client.topic("t")
    sent: list[tuple[str, bytes]] = []
    done = asyncio.Event()
    async with topic.datagrams() as datagrams:

        async def send(key: str) -> None:
            number = 0
            while not done.is_set():
                sent.append((key, b"%d" % number))
                receipt = await datagrams.append(sent[-1][1], key)
                assert receipt.partition in {*range(10)}
                number += 1

        sending = [asyncio.create_task(send(key)) for key in KEYS]
        await change_a_few_times(topic)
        done.set()
        await asyncio.gather(*sending)
    check(sent, [record async for record in topic.read()])


async def test_a_transaction_is_cut_anew_over_changes(node: EmbeddedNode) -> None:
    """Its writer holds a route that has passed; with small stages, some of which are refused."""
    client = node.client
    topic = client.topic("t")
    await client.create_topic("other", partitions=1)
    sent: list[tuple[str, bytes]] = []
    for number in range(4):
        async with client.transaction("s", number, batch_bytes=300) as tx:
            for turn in range(200):
                key = random.choice(KEYS)
                sent.append((key, b"%d" % len(sent)))
                tx.append("t", sent[-1][1], key)
                tx.append("other", b"x")
                if turn == 100 and number == 1:
                    break
        if number == 0:
            await topic.split(0, at=9_000, wait=60)
        elif number == 1:
            await topic.merge([2, 3], wait=60)
            await topic.move(1, wait=60)
    check(sent, [record async for record in topic.read()])


async def test_readers_pass_what_is_reclaimed(node: EmbeddedNode) -> None:
    """One that had read it goes on; one that had not is told, or goes on with what follows."""
    client, topic = node.client, node.client.topic("t")
    for number in range(40):
        await topic.append(b"%d" % number, KEYS[number % 20])
    async with topic.read(cursor="done") as reader:
        assert 40 == len([record async for record in reader])
    await topic.set_cursor("behind", {0: 1, 1: 0})
    end = (await topic.offsets())[0]
    await topic.split(0, at=9_000, wait=60)
    await topic.delete_cursor("behind")
    following = topic.read({0: end, 1: 40}, follow=True)
    waiting = asyncio.create_task(following.next_batch())
    await client.session.call("DELETE", "/v1/topics/t/partitions/0", accept=(404,))
    await until(lambda: 0 not in topic_of(node).all_numbers, lambda: topic_of(node))
    for number in range(40, 80):
        await topic.append(b"%d" % number, KEYS[number % 20])
    first = await waiting
    assert first is not None and first.partition in (1, 2, 3)
    await following.close()
    there = [int(record.value) async for record in topic.read()]
    assert set(range(40, 80)) <= set(there)
    async with laminar.aio.connect(node.url) as fresh:
        again = fresh.topic("t")
        assert sorted(there) == sorted([int(record.value) async for record in again.read()])
        async with again.read(cursor="done") as reader:
            assert list(range(40, 80)) == sorted([int(record.value) async for record in reader])
        other = (await again.offsets())[1]
        later = [int(record.value) async for record in again.read({0: end, 1: other})]
        assert set(later) <= set(range(40, 80)) and later
        with pytest.raises(laminar.OffsetExpired, match="is reclaimed"):
            await anext(aiter(again.read({0: end - 1, 1: other})))
        skipping = again.read({0: end - 1, 1: other}, on_expired="earliest")
        assert later == [int(record.value) async for record in skipping]
        assert [(0, end - 1, end)] == skipping.skipped
        with pytest.raises(laminar.ConfigError):
            await anext(aiter(again.read({77: 1})))
        with pytest.raises(laminar.OffsetExpired):
            await fresh.session.fetch("t", 0, offset=1, max_bytes=1 << 20)


async def test_an_upload_begins_in_the_partition_that_follows(node: EmbeddedNode) -> None:
    """It is there once; where the caller names the partition that has ended, that is an error."""
    topic = node.client.topic("t")
    route = await topic.route()
    owners = {await topic.partition_of(key): key for key in KEYS}
    keys = [owners[number] for number in route.ranges]
    values = {key: random.Random(key).randbytes(40_000) for key in [*keys, None]}

    async def pieces(value: bytes) -> AsyncIterator[bytes]:
        for position in range(0, len(value), 7_000):
            yield value[position : position + 7_000]

    async with laminar.aio.connect(node.url) as old:
        # It does not hear of the changes: it has the places of the partitions from before.
        await old.session.topic_map("t")
        for number in (0, 1):
            await topic.move(number, wait=60)
        stale = old.topic("t")
        with pytest.raises(laminar.Sealed):
            await stale.append_stream(pieces(b"v" * 40_000), partition=0, part_bytes=10_000)
        sent = {
            key: await stale.append_stream(pieces(value), key, part_bytes=10_000)
            for key, value in values.items()
        }
    assert {2, 3} >= {receipt.partition for receipt in sent.values()}
    found = [record async for record in topic.read()]
    assert 3 == len(found)
    for record in found:
        key = None if record.key is None else record.key.decode()
        assert (record.partition, record.offset) == sent[key][:2]
        async with topic.open(record.partition, record.offset) as value:
            assert values[key] == b"".join([piece async for piece in value])
