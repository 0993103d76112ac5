"""A topic whose partitions have numbers with gaps, and a route whose ranges do not rise with them.

One node with the whole API. Its catalog is told of changes of the topic's route, which the node carries out,
and that the old partitions are read. A client, command or handler that takes numbers for dense finds a
partition that is not there, or puts a key where its records are not.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import cast

import pytest

import laminar
from laminar.client.errors import ConfigError, NotFound, OffsetExpired
from laminar.client.topic import Topic
from laminar.embedded import EmbeddedNode
from laminar.http.api.append_body import ENVELOPE_LINES_TYPE
from laminar.node.catalog.controller import Controller
from laminar.node.partition.partition import Partition
from laminar.node.runtime.boot import CONTROLLER
from laminar.node.shard.shard import Shard
from laminar.wire.key_route import LOGICAL_PARTITIONS, Route
from membership.catalog import Catalog
from membership.requests import BeginChange, CloseChange, ReclaimPartition, Result

NUMBERS = [6, 7, 8]
# Partition 8, the highest number, holds the lowest range.
ROUTE = Route(4, [0, 21_846, 40_000, LOGICAL_PARTITIONS], [8, 6, 7])
# Inputs and cuts of the changes from partitions 0, 1 and 2 to that.
CHANGES: list[tuple[list[int], list[int]]] = [([0], [9_000]), ([1, 2], []), ([5], [40_000]), ([3, 4], [])]
KEYS = [b"key %d" % number for number in range(24)]


def catalog_of(node: EmbeddedNode) -> Catalog:
    group = cast("Controller", node._processes[CONTROLLER]).group
    assert group is not None
    return group.catalog


async def change_routes(node: EmbeddedNode) -> None:
    """Carry the changes out, and reclaim what they ended."""
    catalog = catalog_of(node)
    async with asyncio.timeout(120):
        await until(lambda: answered(catalog.code_version >= 3))
        for version, (inputs, cuts) in enumerate(CHANGES):
            groups = [os.urandom(16) for _ in range(len(cuts) + 1)]
            placement = [[node.node]] * len(groups)
            begin = BeginChange("t", version, inputs, cuts, groups, placement, "strict", 1, 60_000)
            assert "created" == (await catalog.change_route(begin)).outcome
            await until(lambda: answered(catalog.state().topics["t"].change is None))
        for number in range(6):
            reclaim = ReclaimPartition("t", number, catalog.state().partitions[f"t/{number}"].group, 1)
            assert "deleted" == (await catalog.change_route(reclaim)).outcome
        await until(lambda: all_led(node, NUMBERS))
        await until(lambda: answered(not catalog.state().tombstones))


async def until(check: Callable[[], Awaitable[bool | Result]]) -> None:
    """Wait until a check, or a command of the catalog, succeeds: the node makes and deletes replicas."""
    while True:
        found = await check()
        if found if isinstance(found, bool) else found.ok:
            return
        await asyncio.sleep(0.01)


async def answered(found: bool) -> bool:
    return found


async def all_led(node: EmbeddedNode, numbers: list[int]) -> bool:
    """Return whether the shard's view lists these partitions, and each has a leader."""
    answer = await node.client.request_json("GET", "/v1/topics/t/partitions?read=leader")
    return numbers == [each["partition"] for each in answer["partitions"] if each["leader"]]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[EmbeddedNode]:
    async with laminar.embed(tmp_path / "data", journal_file_bytes=4 << 20) as running:
        await running.client.create_topic("t", partitions=3)
        await change_routes(running)
        running.client.session.forget_topic("t")
        yield running


async def values(topic: Topic[bytes], partitions: list[int] | None = None) -> list[bytes]:
    async with topic.read(partitions=partitions) as records:
        return [record.value async for record in records]


async def test_keys_lie_where_the_route_says_and_every_reader_finds_them(node: EmbeddedNode) -> None:
    """By single appends, a producer, a named one, an upload, the node itself, and a datagram."""
    topic = node.client.topic("t")
    placed: dict[bytes, set[int]] = {key: set() for key in KEYS}
    async with topic.producer() as producer:
        sent = [(key, producer.send(key, key)) for key in KEYS]
    for key, delivery in sent:
        placed[key].add((await delivery).partition)
    for key in KEYS:
        placed[key].add((await topic.append(key, key)).partition)
        assert await topic.partition_of(key) == ROUTE.partition_of_key(key)
    uploaded = await topic.append_stream(_chunks(b"x" * 30), KEYS[0], part_bytes=10)
    placed[KEYS[0]].add(uploaded.partition)
    async with topic.producer(name="numbered") as named:
        placed[KEYS[1]].add((await named.send(b"1", KEYS[1], number=1)).partition)
        without = await named.send(b"2", number=2)
    lines = "".join(json.dumps({"key": key.decode(), "value": key.decode()}) + "\n" for key in KEYS)
    answer = await node.client.session.call(
        "POST", "/v1/topics/t/records", body=lines.encode(), headers={"Content-Type": ENVELOPE_LINES_TYPE}
    )
    async with topic.datagrams() as datagrams:
        for key in KEYS[:6]:
            placed[key].add((await datagrams.append(key, key)).partition)
        spread = {(await datagrams.append(b"spread")).partition for _ in range(3)}

    assert {key: {ROUTE.partition_of_key(key)} for key in KEYS} == placed
    assert without.partition in NUMBERS
    assert set(NUMBERS) == {each["partition"] for each in answer.json()["placed"]} == spread
    assert 24 * 3 + 1 + 2 + 6 + 3 == sum(
        each.end_offset - each.start_offset for each in await topic.partitions()
    )


async def _chunks(value: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(value), 10):
        yield value[at : at + 10]


async def test_records_without_a_key_are_spread_over_what_there_is(node: EmbeddedNode) -> None:
    """Batches of a producer, appends to the topic, stages of a transaction."""
    topic = node.client.topic("t")
    async with topic.producer(batch_bytes=100) as producer:
        deliveries = [producer.send(bytes(80)) for _ in range(12)]
    assert set(NUMBERS) == {(await each).partition for each in deliveries}
    answers = [
        await node.client.request_json("POST", "/v1/topics/t/records", [{"value": "x"}]) for _ in "abc"
    ]
    assert set(NUMBERS) == {each["placed"][0]["partition"] for each in answers}
    async with node.client.transaction("s", 0, batch_bytes=100) as transaction:
        for key in KEYS:
            transaction.append("t", key, key)
        for _ in range(6):
            transaction.append("t", bytes(80))

    found = {number: await values(topic, [number]) for number in NUMBERS}
    assert all(found.values())
    for key in KEYS:
        assert [ROUTE.partition_of_key(key)] == [number for number in NUMBERS if key in found[number]]


async def test_a_group_owns_exactly_the_partitions_that_are_listed(node: EmbeddedNode) -> None:
    """Two members divide them; cursors, offsets and trims name them."""
    topic = node.client.topic("t")
    for key in KEYS:
        await topic.append(key, key)
    # A session outlives a moment in which nothing of this process runs: partitions would move for that, too.
    async with (
        topic.subscribe("billing", session=60.0) as one,
        topic.subscribe("billing", session=60.0) as two,
    ):
        async with asyncio.timeout(60):
            while one.partitions | two.partitions != set(NUMBERS) or one.partitions & two.partitions:
                await asyncio.gather(one._ownership.move(), two._ownership.move())
        for member in (one, two):
            left = sum(1 for key in KEYS if ROUTE.partition_of_key(key) in member.partitions)
            if left:
                async with asyncio.timeout(60):
                    async for _ in member:
                        left -= 1
                        if not left:
                            break
            await member.commit()

    ends = await topic.offsets()
    assert ends == await topic.cursor("billing") and set(NUMBERS) == set(ends)
    await topic.set_cursor("mine", dict.fromkeys(NUMBERS, 1))
    async with topic.read(cursor="mine") as rest:
        assert len(KEYS) - 3 == len([record async for record in rest])
    trimmed = await topic.delete_before(ends[8], partition=8, dry_run=True)
    assert 8 == trimmed.partition
    described = await node.client.request_json("GET", "/v1/topics/t")
    assert (4, "live") == (described["route"], described["state"])


@pytest.mark.parametrize("number", [0, 2, 5, 9])
async def test_a_number_that_is_not_listed_is_no_partition(node: EmbeddedNode, number: int) -> None:
    """Also one below the highest."""
    topic = node.client.topic("t")
    with pytest.raises(NotFound, match="3 partitions of numbers up to 8"):
        await node.client.request_json("GET", f"/v1/topics/t/partitions/{number}")
    with pytest.raises(ConfigError, match=f"no partition {number}: it has 3"):
        await topic.append(b"x", partition=number)
    if number < 6:
        with pytest.raises(OffsetExpired, match="is reclaimed"):
            await values(topic, [number])
    else:
        with pytest.raises(ConfigError, match=f"no partition {number}: it has 3"):
            await values(topic, [number])
    with pytest.raises(ConfigError, match=f"no partition {number}: it has 3"):
        await topic.append_stream(_chunks(b"x"), partition=number)


async def test_commands_and_the_sync_client_name_what_is_listed(node: EmbeddedNode) -> None:
    """`consume --key` reads the partition that has the key, `cursor set` all that there are."""
    for key in KEYS:
        await node.client.topic("t").append(key, key)

    async def run(*words: str) -> str:
        made = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "laminar.cli", *words, "--url", node.url, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await made.communicate()
        assert 0 == made.returncode, words
        return out.decode()

    def synchronous() -> tuple[dict[int, int], list[int], bytes]:
        with laminar.connect(node.url) as client:
            topic = client.topic("t")
            with topic.producer() as producer:
                for key in KEYS:
                    producer.send(key, key)
            numbers = [each.partition for each in topic.partitions()]
            with topic.subscribe("sync") as records:
                first = next(iter(records))
            return topic.offsets(), numbers, first.value

    assert f"{KEYS[3].decode()}\n" == await run("consume", "t", "--key", KEYS[3].decode())
    assert "" == await run("cursor", "set", "t", "c", "--at", "latest")
    assert set(NUMBERS) == set(await node.client.topic("t").cursor("c"))
    shown = await run("topic", "describe", "t", "-o", "names")
    assert [str(number) for number in NUMBERS] == shown.split()
    ends, numbers, first = await asyncio.to_thread(synchronous)
    assert (NUMBERS, set(NUMBERS), True) == (numbers, set(ends), first in KEYS)


async def test_the_outputs_of_a_change_under_way_are_neither_listed_nor_asked(node: EmbeddedNode) -> None:
    """One has nothing, and perhaps no leader. When the change is done, a client goes by the new route."""
    topic, catalog = node.client.topic("t"), catalog_of(node)
    for key in KEYS:
        await topic.append(key, key)
    uploading = asyncio.create_task(_begin_upload(topic))  # in the way of a seal
    await until(lambda: answered(bool(_led(node, 7).state.stages)))
    begin = BeginChange(
        "t", 4, [7], [50_000], [os.urandom(16), os.urandom(16)], [[node.node]] * 2, "weak", 1, 60_000
    )
    assert "created" == (await catalog.change_route(begin)).outcome
    change = catalog.state().topics["t"].change
    assert change is not None
    await until(lambda: answered(catalog.state().partitions["t/9"].state == "live"))
    node.client.session.forget_topic("t")

    assert NUMBERS == [each.partition for each in await topic.partitions()]
    assert (9, 10) == tuple(each.number for each in change.outputs)
    assert sorted(KEYS) == sorted(await values(topic))
    await topic.set_cursor("c", dict.fromkeys(NUMBERS, 0))
    assert set(NUMBERS) == set(await topic.cursor("c")) == set(await topic.offsets())
    described = await node.client.request_json("GET", "/v1/topics/t")
    assert (4, "live") == (described["route"], described["state"])

    assert (await catalog.change_route(CloseChange("t", change.id, force=True))).ok
    await until(lambda: all_led(node, [*NUMBERS, 9, 10]))
    node.client.session.forget_topic("t")
    async with topic.producer() as producer:
        placed = {(await producer.send(key, key)).partition for key in KEYS}
    assert 7 not in placed and {8, 6} < placed
    uploading.cancel()


async def _begin_upload(topic: Topic[bytes]) -> None:
    """Begin a record in partition 7 and do not end it."""

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 10
        await asyncio.Event().wait()

    await topic.append_stream(chunks(), partition=7, part_bytes=10)


def _led(node: EmbeddedNode, number: int) -> Partition:
    (found,) = (
        each.partitions["t", number]
        for each in node._processes.values()
        if isinstance(each, Shard) and ("t", number) in each.partitions
    )
    return found


async def test_a_node_that_starts_again_holds_the_same_partitions(tmp_path: Path) -> None:
    """The shard finds its replicas by what the catalog lists, and the topic can be deleted."""
    for expected in ([], KEYS):
        async with laminar.embed(tmp_path / "data", journal_file_bytes=4 << 20) as node:
            topic = await node.client.create_topic("t", partitions=3, exist_ok=True)
            if not expected:
                await change_routes(node)
                node.client.session.forget_topic("t")
            assert expected == sorted(await values(topic), key=KEYS.index)
            for key in KEYS[len(expected) :]:
                assert ROUTE.partition_of_key(key) == (await topic.append(key, key)).partition
            if expected:
                await node.client.delete_topic("t")
                assert [] == await node.client.topics()
