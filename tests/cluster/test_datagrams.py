"""Appends by datagram to a cluster: redirects, a bad wire, and a leader that is killed; each record once."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

import laminar
from laminar.batch import build
from laminar.client.errors import ConfigError, Error, NotFound, OutcomeUnknown
from laminar.client.records import Receipt
from laminar.testing.cluster import LocalCluster
from laminar.testing.nodes import serve
from laminar.wire.datagram import DatagramCodec, Leader, Question
from laminar.wire.datagram import Receipt as Placed
from router import owner_shard, partition_hash
from tests.cluster.bad_wire import open_wires
from tests.cluster.load import leaders
from tests.cluster.patience import PATIENCE_S, until

# Appends to each node of the test that counts them; `make steer-long` has 100,000.
DATAGRAMS = int(os.environ.get("DATAGRAMS", "2000"))


def address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


def figures_of(url: str) -> str:
    return httpx.get(f"{url}/metrics", trust_env=False, timeout=PATIENCE_S).text


def leader_of(cluster: LocalCluster, topic: str) -> str:
    """The name of the living node that leads partition 0, once one does."""
    living = [node for node in cluster.members if node.running]
    return leaders(living[0].url, topic, among=[node.name for node in living])[0]


def answer_to(datagram: bytes, url: str) -> Leader | Placed:
    """What a node answers to an append; sent again, as a client does, while it is busy or knows no leader."""
    codec = DatagramCodec(b"")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(1)

        def answered() -> Leader | Placed | None:
            sock.sendto(datagram, address(url))
            try:
                said = codec.decode_answer(sock.recv(2_000)).body
            except TimeoutError:
                return None
            return said if isinstance(said, Leader | Placed) else None

        answer: Leader | Placed = until(answered, f"an answer of {url}")
        return answer


async def test_a_node_that_does_not_lead_names_the_leader(shared_cluster: LocalCluster) -> None:
    """By the address of its shared port, where the same datagram is answered with the receipt."""
    async with laminar.aio.connect(shared_cluster.urls, timeout=PATIENCE_S) as client:
        await client.create_topic("named", partitions=1, exist_ok=True)
    batch = bytes(build([b"hi"], producer_id=os.urandom(16)))
    datagram = DatagramCodec(b"").encode_question(Question("named", 0, b"12345678", batch))
    places = {address(node.url): node.url for node in shared_cluster.members}

    def asked(url: str) -> str | None:
        """The URL of the leader that a node names; None if it leads, and then its receipt is right."""
        told = answer_to(datagram, url)
        if isinstance(told, Leader):
            return places[told.host, told.port]
        # The batch is sent again and again, and stored once: whoever leads by now says so.
        assert (0, 1, 3, True) == (told.offset, told.count, told.replicas, told.synced)
        return None

    def led_to_the_leader(url: str) -> bool:
        """Whether a node names one that leads. It may be another a moment later."""
        named = asked(url)
        return named is not None and asked(named) is None

    def named_by_two() -> bool:
        leader = leader_of(shared_cluster, "named")
        return all(led_to_the_leader(node.url) for node in shared_cluster.members if node.name != leader)

    await asyncio.to_thread(until, named_by_two)


async def test_records_are_where_their_receipts_say(shared_cluster: LocalCluster) -> None:
    """By key, by partition and spread; what is appended at a time leaves together."""
    async with laminar.aio.connect(shared_cluster.urls, timeout=PATIENCE_S) as client:
        topic = await client.create_topic("many-small", partitions=4, exist_ok=True)
        async with topic.datagrams() as datagrams:
            receipts = await asyncio.gather(
                *(datagrams.append(b"%d" % number, key=f"key-{number % 7}", tag="t") for number in range(300))
            )
            by_number = await datagrams.append(b"here", partition=2, headers={"source": b"web"})
            counts = datagrams.statistics()
        found = {(record.partition, record.offset): record async for record in topic.read()}

    assert 301 == len(found)
    for number, receipt in enumerate(receipts):
        record = found[receipt.partition, receipt.offset]
        assert (b"%d" % number, b"key-%d" % (number % 7), "t") == (record.raw, record.key, record.tag)
        assert (3, True) == (receipt.replicas, receipt.synced)
    assert b"here" == found[2, by_number.offset].raw
    assert counts["datagrams"] - counts["resent"] - counts["redirects"] < 200, counts
    for key in range(7):
        mine = [receipt.offset for receipt in receipts[key::7]]
        assert sorted(mine) == mine


def test_the_sync_face_appends_from_any_thread(shared_cluster: LocalCluster) -> None:
    with laminar.connect(shared_cluster.urls, timeout=PATIENCE_S) as client:
        topic = client.create_topic("sync-small", partitions=2, exist_ok=True)
        with topic.datagrams() as datagrams:
            receipt = datagrams.append(b"21.5", key="sensor-7")
            assert receipt == Receipt(receipt.partition, 0, 3, True)
        records = [record.raw for record in topic.read()]

    assert [b"21.5"] == records


async def test_a_sensor_needs_no_connection(shared_cluster: LocalCluster) -> None:
    """Who knows a node and the number of partitions speaks no HTTP at all."""
    async with laminar.aio.connect(shared_cluster.urls) as client:
        await client.create_topic("bare", partitions=2, exist_ok=True)
    async with laminar.aio.connect(shared_cluster.urls[1], timeout=PATIENCE_S) as client:
        async with client.topic("bare").datagrams(partitions=2) as datagrams:
            receipts = [await datagrams.append(b"x", partition=partition) for partition in (0, 1)]
        assert 0 == client.statistics()["connections_opened"]

    assert [0, 0] == [receipt.offset for receipt in receipts]


async def test_what_is_wrong_is_said_as_the_clients_other_errors(shared_cluster: LocalCluster) -> None:
    """Too large, no such topic, no such partition; an outcome that nobody knows."""
    async with laminar.aio.connect(shared_cluster.urls, timeout=PATIENCE_S) as client:
        topic = await client.create_topic("wrong", partitions=1, exist_ok=True)
        async with topic.datagrams() as datagrams:
            with pytest.raises(Error) as large:
                await datagrams.append(b"x" * 1_200)
            assert ("too_large", "record_bytes") == (large.value.code, large.value.field)
            assert large.value.value > large.value.limit > 1_000
            largest = 1_200 - (large.value.value - large.value.limit) - 8  # what alignment may take
            await datagrams.append(b"x" * largest)
            with pytest.raises(ConfigError, match="partition 9"):
                await datagrams.append(b"x", partition=9)
        async with client.topic("never-made").datagrams() as datagrams:
            with pytest.raises(NotFound):
                await datagrams.append(b"x")
        async with client.topic("never-made").datagrams(partitions=1) as datagrams:
            with pytest.raises(NotFound) as missing:
                await datagrams.append(b"x")
            assert "no_such_topic" == missing.value.code
        async with topic.datagrams(secret="not the one of this cluster") as datagrams:
            with pytest.raises(OutcomeUnknown):
                await datagrams.append(b"forged", timeout=0.5)
        assert [largest] == [len(record.raw) async for record in topic.read()]


async def test_a_bad_wire_and_a_killed_leader_lose_and_double_nothing(cluster: LocalCluster) -> None:
    """A record with a receipt is at its place, once; one whose outcome is unknown at most once."""
    async with laminar.aio.connect(cluster.urls, timeout=PATIENCE_S) as client:
        await client.create_topic("wild", partitions=4)
    wires = await open_wires([address(url) for url in cluster.urls], codec=DatagramCodec(b""), seed=13)
    receipts: dict[bytes, Receipt] = {}
    unknown: list[bytes] = []
    stop, came = asyncio.Event(), asyncio.Event()

    async def work(datagrams: laminar.aio.Datagrams[bytes], worker: int) -> None:
        number = 0
        while not stop.is_set():
            value = b"%d/%d" % (worker, number)
            number += 1
            try:
                receipts[value] = await datagrams.append(value, partition=worker % 4)
            except OutcomeUnknown:
                unknown.append(value)
            came.set()

    async def more(count: int) -> None:
        goal = len(receipts) + count
        async with asyncio.timeout(3 * PATIENCE_S):
            while len(receipts) < goal:
                came.clear()
                await came.wait()

    try:
        async with laminar.aio.connect([wire.url for wire in wires], timeout=PATIENCE_S) as client:
            async with client.topic("wild").datagrams(partitions=4) as datagrams:
                async with asyncio.TaskGroup() as workers:
                    for worker in range(8):
                        workers.create_task(work(datagrams, worker))
                    await more(100)
                    loop = asyncio.get_running_loop()
                    for _ in range(2):
                        leader = await loop.run_in_executor(None, leader_of, cluster, "wild")
                        number = next(each.number for each in cluster.members if each.name == leader)
                        await loop.run_in_executor(None, cluster.kill, number)
                        await more(100)
                        await loop.run_in_executor(None, cluster.spawn, number)
                        await loop.run_in_executor(None, cluster.wait_ready)
                        await more(50)
                    stop.set()
                statistics = datagrams.statistics()
    finally:
        for wire in wires:
            wire.close()
    async with laminar.aio.connect(cluster.urls, timeout=PATIENCE_S) as client:
        found = [record async for record in client.topic("wild").read(from_leader=True)]

    places = {(record.partition, record.offset): bytes(record.raw) for record in found}
    times = Counter(places.values())
    for value, receipt in receipts.items():
        assert value == places[receipt.partition, receipt.offset]
        assert 1 == times[value]
    assert all(times[value] <= 1 for value in unknown)
    assert set(times) <= receipts.keys() | set(unknown)
    for worker in range(8):
        mine = [receipts[value].offset for value in receipts if value.startswith(b"%d/" % worker)]
        assert sorted(mine) == mine
    counts = sum((wire.counts for wire in wires), Counter())
    print(f"{len(receipts)} receipts, {len(unknown)} unknown, {dict(counts)}, {statistics}")
    assert min(counts["lost"], counts["doubled"], counts["late"]) > 10
    assert statistics["resent"] > 0


@pytest.mark.parametrize(("host", "shards"), [("127.0.0.1", 2), ("::1", 3)])
async def test_appends_over_64_partitions_are_each_done_by_the_owner(host: str, shards: int) -> None:
    """As many as each shard owns are counted there, whatever had to be sent again, and none is doubled."""
    each, partitions = DATAGRAMS // 64, range(64)
    with serve(shards=shards, settings={"host": host}) as url:
        async with laminar.aio.connect(url, timeout=PATIENCE_S) as client:
            topic = await client.create_topic("counted", partitions=64)
            async with topic.datagrams() as datagrams:

                async def fill(partition: int) -> list[int]:
                    receipts = [await datagrams.append(b"21.5", partition=partition) for _ in range(each)]
                    return [receipt.offset for receipt in receipts]

                offsets = await asyncio.gather(*map(fill, partitions))
                told = datagrams.statistics()
        figures = await asyncio.to_thread(figures_of, url)

    assert [list(range(each))] * 64 == offsets
    owned = Counter(owner_shard(partition_hash("counted", partition), shards) for partition in partitions)
    counted = {
        (name, int(shard)): int(float(value))
        for name, shard, value in re.findall(
            r'^laminar_datagrams_(\w+?)(?:_total)?{process="shard-(\d+)"} (\S+)', figures, re.MULTILINE
        )
    }
    assert {shard: each * owned[shard] for shard in range(shards)} == {
        shard: counted["appended", shard] for shard in range(shards)
    }
    print(f"{64 * each} appends by datagram to {host}, {shards} shards: {dict(owned)} partitions, {told}")


async def test_each_shard_is_killed_in_turn_under_load(real_disk: Path) -> None:
    """Datagrams wait in its socket, or are sent again: none is lost or doubled, all land where they did."""
    with LocalCluster(real_disk / "one", nodes=1, shards=3) as cluster:
        node = cluster.members[0]
        async with laminar.aio.connect(node.url, timeout=PATIENCE_S) as client:
            topic = await client.create_topic("killed", partitions=12)
            receipts: dict[bytes, Receipt] = {}
            came = asyncio.Event()

            async def work(datagrams: laminar.aio.Datagrams[bytes], partition: int) -> None:
                number = 0
                while True:
                    value = b"%d/%d" % (partition, number)
                    receipts[value] = await datagrams.append(value, partition=partition)
                    number += 1
                    came.set()

            async def each_has_more(count: int) -> None:
                before = Counter(receipt.partition for receipt in receipts.values())
                async with asyncio.timeout(3 * PATIENCE_S):
                    while any(
                        mine < before[partition] + count
                        for partition in range(12)
                        for mine in [sum(r.partition == partition for r in receipts.values())]
                    ):
                        came.clear()
                        await came.wait()

            async with topic.datagrams() as datagrams:
                workers = [asyncio.ensure_future(work(datagrams, partition)) for partition in range(12)]
                try:
                    await each_has_more(3)
                    for shard in range(3):
                        pids = json.loads((node.data / "node.json").read_text())["pids"]
                        os.kill(pids[f"shard {shard}"], signal.SIGKILL)
                        await each_has_more(3)
                finally:
                    for worker in workers:
                        worker.cancel()
                    ends = await asyncio.gather(*workers, return_exceptions=True)
                assert all(isinstance(end, asyncio.CancelledError) for end in ends)
            found = [record async for record in topic.read()]

    places = {(record.partition, record.offset): bytes(record.raw) for record in found}
    times = Counter(places.values())
    assert all(places[receipt.partition, receipt.offset] == value for value, receipt in receipts.items())
    assert all(count == 1 for count in times.values())
