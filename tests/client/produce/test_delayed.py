"""Delayed records by the client, on nodes in the test's loop and as processes that are killed."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import laminar
from laminar.client.policy.lanes import Cutter
from laminar.client.policy.record_accumulator import RecordAccumulator
from laminar.client.topic import Topic
from laminar.wire.key_route import Route

HOUR = datetime.timedelta(hours=1)
# What a test does before a record is due goes to the disk, which may be slow.
SOON_MS = 8_000


@pytest.fixture
async def topic(tmp_path: Path) -> AsyncIterator[Topic[bytes]]:
    async with laminar.embed(tmp_path / "data", journal_file_bytes=4 << 20) as node:
        yield await node.client.create_topic("t", partitions=2)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def read(topic: Topic[bytes], count: int) -> dict[bytes, int]:
    """Return the first records of a topic by value, with the time (ms) at which each was read."""
    found: dict[bytes, int] = {}
    async with asyncio.timeout(60):
        async for record in topic.read(follow=True):
            assert record.raw not in found, "it is read once"
            found[record.raw] = now_ms()
            if len(found) == count:
                break
    return found


async def test_a_record_is_read_when_it_is_due(topic: Topic[bytes]) -> None:
    """Its receipt has an id and no offset; one whose time has passed is appended at once."""
    soon_ms, late = 2_000, 0
    while True:
        due_ms = now_ms() + soon_ms
        receipt = await topic.append(b"later %d" % late, "k", deliver_at=due_ms)
        state = await topic.delayed(receipt.scheduled) if receipt.scheduled is not None else None
        if now_ms() < due_ms:
            break
        soon_ms, late = 4 * soon_ms, late + 1  # the disk took longer: it may have been due by then
    at_once = await topic.append(b"now", "k", deliver_at=1)

    assert receipt.scheduled is not None and receipt.offset == -1
    assert at_once.scheduled is None and 0 <= at_once.offset <= late
    assert state is not None and state.state == "pending" and state.deliver_at is not None
    assert int(state.deliver_at.timestamp() * 1000) == due_ms
    assert (await read(topic, 2 + late))[b"later %d" % late] >= due_ms
    assert (await topic.delayed(receipt.scheduled)).state == "published"


async def test_a_delayed_record_is_cancelled_moved_listed_and_counted(topic: Topic[bytes]) -> None:
    receipts = [await topic.append(b"%d" % n, f"k{n}", tag="t", delay=HOUR) for n in range(5)]
    ids = [str(receipt.scheduled) for receipt in receipts]

    assert (await topic.cancel_delayed(ids[0])).state == "cancelled"
    assert (await topic.cancel_delayed(ids[0])).state == "cancelled"
    later = datetime.datetime.now(datetime.UTC) + 3 * HOUR
    moved = await topic.move_delayed(ids[1], deliver_at=later)
    assert moved.state == "pending" and moved.deliver_at is not None
    assert abs(moved.deliver_at - later) < datetime.timedelta(milliseconds=1)
    assert (await topic.move_delayed(ids[2], deliver_at="now")).state == "pending"
    assert [b"2"] == list(await read(topic, 1))
    assert (await topic.cancel_delayed(ids[2])).state == "published"

    listed = [each async for each in topic.list_delayed()]
    assert [each.id for each in listed] == [ids[3], ids[4], ids[1]]
    assert {(each.key, each.tag, each.value_bytes) for each in listed} == {
        (b"k3", "t", 1),
        (b"k4", "t", 1),
        (b"k1", "t", 1),
    }
    assert [each.id async for each in topic.list_delayed(key="k4")] == [ids[4]]
    assert [each.id async for each in topic.list_delayed(start=later - HOUR)] == [ids[1]]
    assert [each.id async for each in topic.list_delayed(end=later - HOUR)] == [ids[3], ids[4]]
    (count,) = await topic.count_delayed()
    assert (count.records, count.bytes) == (3, 3)
    spans = await topic.count_delayed(bucket=HOUR, start=now_ms(), end=later + HOUR)
    assert sum(each.records for each in spans) == 3 and len(spans) == 2
    assert spans == await topic.count_delayed(bucket=HOUR), "without bounds all that is pending is counted"
    with pytest.raises(laminar.NotFound):
        await topic.cancel_delayed(ids[0] + "9")


async def test_a_producer_sends_both_in_one_stream(topic: Topic[bytes]) -> None:
    """No batch has both, the sequence goes on, and each record is read once."""
    due_ms = now_ms() + SOON_MS
    async with topic.producer() as producer:
        sent = [
            producer.send(b"%d" % n, key="k", deliver_at=due_ms if n // 5 % 2 else None) for n in range(40)
        ]
    receipts = [delivery.result() for delivery in sent]

    assert [receipt.scheduled is not None for receipt in receipts] == [n // 5 % 2 == 1 for n in range(40)]
    assert [each.offset for each in receipts if each.scheduled is None] == list(range(20))
    assert len({each.scheduled for each in receipts}) == 21
    found = await read(topic, 40)
    assert list(found) == [b"%d" % n for n in range(40) if n // 5 % 2 == 0] + [
        b"%d" % n for n in range(40) if n // 5 % 2
    ]
    assert all(at >= due_ms for value, at in found.items() if int(value) // 5 % 2)


async def test_a_producer_with_a_name_continues_over_delayed_records(topic: Topic[bytes]) -> None:
    """Its batches without times are accepted first; delayed ones have their receipt when they are durable."""
    async with topic.producer(name="n") as producer:
        sent = [
            producer.send(b"%d" % n, key="k", number=n, delay=HOUR if n % 3 == 0 else None)
            for n in range(1, 31)
        ]
    assert producer.checkpoint == 30
    assert [d.result().scheduled is not None for d in sent] == [n % 3 == 0 for n in range(1, 31)]

    async with topic.producer(name="n") as again:
        assert again.reached == 30
        repeated = again.send(b"30", key="k", number=30, delay=HOUR)
        again.send(b"31", key="k", number=31, delay=HOUR)
    assert repeated.result().offset == -1
    assert len([each async for each in topic.list_delayed()]) == 11


def test_batches_are_cut_where_delayed_records_begin_and_end() -> None:
    """Also those that are cut again, when others follow the partition."""
    box = RecordAccumulator(route=Route.even(1), batch_bytes=1000)
    queue = box.queues[0]
    for time_ms in (None, None, 7, 8, None):
        box.put_with(b"v", b"k", queue, tag=None, headers=None, timestamp_ms=None, deliver_at_ms=time_ms)
    batches = queue.waiting()
    assert [(len(each.values), each.delayed, each.delivery_times) for each in batches] == [
        (2, False, []),
        (2, True, [7, 8]),
        (1, False, []),
    ]

    cutter = Cutter(batch_bytes=1000, max_records=100)
    for each in batches:
        for position in range(len(each.values)):
            cutter.put(each, position, queue)
    (made,) = cutter.batches.values()
    assert [(len(each.values), each.delayed, each.delivery_times) for each in made] == [
        (2, False, []),
        (2, True, [7, 8]),
        (1, False, []),
    ]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"delay": -1}, "delay"),
        ({"delay": float("nan")}, "delay"),
        ({"delay": 4e8}, "delay"),
        ({"delay": True}, "delay"),
        ({"delay": 1, "deliver_at": 5}, "delay"),
        ({"deliver_at": "tomorrow"}, "deliver_at"),
        ({"deliver_at": -1}, "deliver_at"),
    ],
)
async def test_a_wrong_time_is_named(topic: Topic[bytes], wrong: dict[str, object], field: str) -> None:
    with pytest.raises(laminar.ConfigError) as refused:
        await topic.append(b"a", **wrong)  # type: ignore[arg-type]
    assert refused.value.field == field
    assert [] == await topic.count_delayed()


async def test_what_is_no_id_is_named(topic: Topic[bytes]) -> None:
    """Such as that of a record that was not delayed."""
    receipt = await topic.append(b"at once", delay=0)

    assert receipt.scheduled is None
    for ask in (topic.delayed, topic.cancel_delayed):
        with pytest.raises(laminar.ConfigError, match="has none") as found:
            await ask(receipt.scheduled)  # type: ignore[arg-type]  # that is what is tried
        assert found.value.field == "id"
