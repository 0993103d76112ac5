"""Producers over changes of a topic's route, against a cluster in memory behind real sockets."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import defaultdict
from typing import Any

import pytest

import laminar
from laminar import aio
from laminar.client.produce.producer import put_record
from laminar.wire.key_route import Route

KEYS = [f"key {number}" for number in range(20)]


def check(cluster: Any, topic: str, sent: list[tuple[str, bytes]]) -> None:
    """Each record is there once, in a partition of its key, and keys are in order along the lineage."""
    found: dict[bytes, list[bytes]] = defaultdict(list)
    for number in range(len(cluster.topics[topic])):
        for value in cluster.values(topic, number):
            found[value.partition(b":")[0]].append(value)
    wanted: dict[bytes, list[bytes]] = defaultdict(list)
    for key, value in sent:
        wanted[key.encode()].append(value)
    assert wanted == found


@pytest.mark.parametrize("faults", [False, True], ids=["plain", "faults"])
@pytest.mark.parametrize("name", [None, "copier"], ids=["plain", "named"])
async def test_a_producer_goes_over_changes_while_it_sends(
    cluster: Any, name: str | None, faults: bool
) -> None:
    cluster.create("t", 2)
    cluster.late_routes, cluster.late_partitions = 3, 2
    rng = random.Random(5)
    sent: list[tuple[str, bytes]] = []
    deliveries = []
    changes = {150: ((0,), 2), 300: ((2, 3), 1), 450: ((4,), 1), 470: ((1,), 2), 600: ((5, 6, 7), 1)}
    async with (
        aio.connect(cluster.urls) as client,
        client.topic("t").producer(batch_bytes=400, name=name) as producer,
    ):
        for number in range(1, 800):
            key = rng.choice(KEYS)
            sent.append((key, f"{key}:{number}".encode()))
            deliveries.append(producer.send(sent[-1][1], key, number=number if name else None))
            if faults and rng.random() < 0.03:
                cluster.append_faults.append(rng.choice(["drop", "lose", "refuse", "move", "unknown"]))
            if number in changes:
                inputs, parts = changes[number]
                cluster.change("t", *inputs, parts=parts)
            if number % 7 == 0:
                await asyncio.sleep(0.001)
        await producer.wait()
        if name:
            assert 799 == producer.checkpoint

    check(cluster, "t", sent)
    for (_, value), delivery in zip(sent, deliveries, strict=True):
        receipt = delivery.result()
        assert value == cluster.values("t", receipt.partition)[receipt.offset]


async def test_appends_and_the_sync_face_go_over_changes(cluster: Any) -> None:
    cluster.create("t", 1)
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        assert 0 == (await topic.append(b"k:1", "k")).partition
        cluster.change("t", 0, parts=2)
        receipts = await asyncio.gather(*(topic.append(b"k:2", "k") for _ in range(10)))
        assert {receipt.partition for receipt in receipts} <= {1, 2}
        assert (await topic.append(b"none")).partition in (1, 2)

    def work() -> None:
        with laminar.connect(cluster.urls) as client, client.topic("t").producer() as producer:
            first = [producer.send(f"s:{number}".encode(), "s") for number in range(50)]
            cluster.change("t", 1, 2)
            later = [producer.send(f"s:{number}".encode(), "s") for number in range(50, 100)]
            producer.wait()
            found = [cluster.values("t", number) for number in range(4)]
            for number, delivery in enumerate([*first, *later]):
                receipt = delivery.result(60)
                assert f"s:{number}".encode() == found[receipt.partition][receipt.offset]

    thread = threading.Thread(target=work)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert [f"s:{number}".encode() for number in range(100)] == [
        value for number in range(4) for value in cluster.values("t", number) if value.startswith(b"s:")
    ]


async def test_the_end_of_a_partition_is_raised_where_the_caller_named_it(cluster: Any) -> None:
    cluster.create("t", 2)
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        assert 0 == (await topic.append(b"a", partition=0)).partition
        cluster.change("t", 0, parts=2)
        with pytest.raises(laminar.Sealed) as told:
            await topic.append(b"b", partition=0)
        assert (0, 1, "not_applied") == (told.value.value, told.value.limit, told.value.outcome)
        with pytest.raises(laminar.Sealed):
            await topic.append(b"b", partition=0)
        assert 2 == (await topic.append(b"b", partition=2)).partition
        assert 1 == (await topic.append(b"b", partition=1)).partition
    async with aio.connect(cluster.urls) as client:
        with pytest.raises(laminar.Sealed):
            await client.topic("t").append(b"b", partition=0)
    assert [b"a"] == cluster.values("t", 0)


async def test_an_idle_producer_learns_the_route_from_any_answer(cluster: Any) -> None:
    """So it does not go to a partition that has ended first, when it has something for its keys."""
    cluster.create("t", 2)
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        route = Route.even(2)
        keys = [next(key for key in KEYS if route.partition_of_key(key) == number) for number in (0, 1)]
        for key in keys:
            await topic.append(b"first", key)
        cluster.change("t", 0)
        await topic.append(b"other", keys[1])
        while (await topic.appends.shared_sender()).accumulator.route.version == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        before = len(cluster.requests)
        assert 2 == (await topic.append(b"second", keys[0])).partition
        asked = [target for _, method, target in cluster.requests[before:] if method == "POST"]
        assert not any("/partitions/0/" in target for target in asked)


async def test_a_deadline_holds_while_the_route_is_not_known(cluster: Any) -> None:
    """The partition has ended, and no node knows what follows: the record was not appended."""
    cluster.create("t", 1)
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        await topic.append(b"first", "k")
        cluster.topics["t"][0].sealed = 1
        with pytest.raises(laminar.ProduceError) as told:
            async with topic.producer(timeout=0.3) as producer:
                delivery = producer.send(b"second", "k")
                with pytest.raises(laminar.TimedOut):
                    await delivery
        assert "not_applied" == told.value.outcome


async def test_a_program_that_starts_again_after_a_change_finds_what_it_has_appended(cluster: Any) -> None:
    cluster.create("t", 2)
    sent = [(KEYS[number % 20], f"{KEYS[number % 20]}:{number}".encode()) for number in range(1, 300)]
    async with aio.connect(cluster.urls) as client:
        for run, changes in ((150, [((0, 1), 1)]), (250, [((2,), 3), ((3, 4), 1)]), (299, [])):
            async with client.topic("t").producer(name="copier", batch_bytes=200) as producer:
                for number, (key, value) in enumerate(sent[:run], 1):
                    producer.send(value, key, number=number)
                await producer.wait()
            # As after a crash: the newest numbers are not known to be durable everywhere.
            for partition in cluster.topics["t"]:
                partition.checkpoints = {
                    who: (checkpoint, 0) for who, (checkpoint, _) in partition.checkpoints.items()
                }
            for inputs, parts in changes:
                cluster.change("t", *inputs, parts=parts)
    check(cluster, "t", sent)


@pytest.mark.parametrize("moves", [1, 2])
async def test_a_run_that_was_replaced_does_not_get_to_an_output(cluster: Any, moves: int) -> None:
    """It may learn the route before anybody refuses it, and the newest run is not in the output yet.

    With two moves it has never been in the partition in which it was replaced.
    """
    cluster.create("t", 1)
    async with aio.connect(cluster.urls) as client, aio.connect(cluster.urls) as other:
        old = client.topic("t").producer(name="copier", timeout=60)
        sender = await old.open_sender()
        if moves == 2:
            cluster.change("t", 0)
        async with other.topic("t").producer(name="copier") as new:
            new.send(b"k:1", "k", number=1)
            await new.wait()
            cluster.change("t", moves - 1)
            pending = put_record(
                sender.accumulator,
                b"k:1",
                b"k",
                tag=None,
                headers=None,
                timestamp_ms=None,
                partition=None,
                number=1,
            )
            sender._want_route(moves)
            settled = asyncio.Event()
            pending.when_settled(settled.set)
            await settled.wait()
            with pytest.raises(laminar.Fenced):
                pending.receipt(0)
            sender.close(laminar.Error("done"))
            new.send(b"k:2", "k", number=2)
            await new.wait()
    check(cluster, "t", [("k", b"k:1"), ("k", b"k:2")])
