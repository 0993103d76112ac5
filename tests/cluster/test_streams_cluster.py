"""Records larger than a batch on three real nodes, of which one is killed while they are streamed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

import laminar
from laminar.client.net.session import Session
from laminar.testing.cluster import LocalCluster
from tests.cluster.load import converged, leaders
from tests.cluster.patience import told

MIB = 1 << 20
TOPIC = "large"
DATA = random.Random(3).randbytes(12 * MIB + 5)
PART = 1 << 17


@pytest.fixture
def cluster(real_disk: Path) -> Iterator[LocalCluster]:
    """Three nodes with small segments: a large record lies in several of them."""
    settings = {"segment_size_bytes": MIB, "journal_file_bytes": 4 * MIB, "retention_check_ms": 50}
    with LocalCluster(real_disk / "cluster", nodes=3, shards=2, settings=settings) as own:
        yield own


def leader_number(cluster: LocalCluster, url: str) -> int:
    """The number of the node that leads the partition, as the node at `url` tells it."""
    name = leaders(url, TOPIC)[0]
    return next(node.number for node in cluster.members if node.name == name)


def replica_urls(url: str) -> dict[str, str]:
    """By node, where its replica is asked."""
    (partition,) = told(f"{url}/v1/topics/{TOPIC}/partitions")["partitions"]
    return {replica["node"]: replica["url"] for replica in partition["replicas"]}


async def local_value(url: str, offset: int) -> httpx.Response:
    """As that replica has it, and nobody else."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        path = f"/v1/topics/{TOPIC}/partitions/0/records/{offset}"
        return await http.get(url + path, headers={"Laminar-Local": "1"})


async def test_a_kill_of_the_leader_tears_no_large_record(cluster: LocalCluster) -> None:
    """While it is streamed in, and while it is streamed out; others append all the while, offsets are dense.

    Then every replica gives it from its own log.
    """
    killed = asyncio.Event()

    async def source() -> AsyncIterator[bytes]:
        for position in range(0, len(DATA), PART):
            if position >= len(DATA) // 2 and not killed.is_set():
                number = await asyncio.to_thread(leader_number, cluster, cluster.urls[0])
                await asyncio.to_thread(cluster.kill, number)
                killed.set()
                restarting.append(asyncio.create_task(asyncio.to_thread(cluster.restart, number)))
            yield DATA[position : position + PART]

    async def others() -> int:
        async with laminar.aio.connect(cluster.urls, timeout=60.0) as client:
            count = 0
            while not done.is_set():
                await client.topic(TOPIC).append(b"%d" % count)
                count += 1
            return count

    restarting: list[asyncio.Task[None]] = []
    done = asyncio.Event()
    async with laminar.aio.connect(cluster.urls, timeout=60.0) as client:
        topic = await client.create_topic(TOPIC, partitions=1, replicas=3)
        beside = asyncio.create_task(others())
        receipt = await topic.append_stream(source(), "k", part_bytes=PART)
        done.set()
        count = await beside
        await asyncio.gather(*restarting)

        assert {0: count + 1} == await topic.offsets()
        async with topic.read() as records:
            found = [record async for record in records]
        assert list(range(count + 1)) == [record.offset for record in found]
        large = found.pop(receipt.offset)
        assert (len(DATA), b"k") == (large.large_bytes, large.key)
        assert [b"%d" % number for number in range(count)] == [record.raw for record in found]

        async with topic.open(0, receipt.offset) as value:
            begun = await value.read(3 * MIB)
            number = await asyncio.to_thread(leader_number, cluster, cluster.urls[0])
            await asyncio.to_thread(cluster.kill, number)
            assert DATA == begun + await value.read()
        await asyncio.to_thread(cluster.restart, number)
    assert [] == await converged(cluster, TOPIC, 1)
    for name, url in replica_urls(cluster.urls[0]).items():
        answer = await local_value(url, receipt.offset)
        assert (200, True) == (answer.status_code, DATA == answer.content), name


async def test_a_replica_that_was_away_gets_a_large_record_and_it_goes_as_a_whole(
    cluster: LocalCluster,
) -> None:
    """It lies in many segments; what breaks off beside it is nothing that anybody sees."""

    async def gone(session: Session) -> AsyncIterator[bytes]:
        yield DATA[: 3 * MIB]
        await session.close()  # as if the client had died: it says nothing any more

    async def source() -> AsyncIterator[bytes]:
        yield DATA

    async with laminar.aio.connect(cluster.urls, timeout=60.0) as client:
        topic = await client.create_topic(TOPIC, partitions=1, replicas=3)
        await topic.append(b"before")
        with pytest.raises(laminar.Error):
            await topic.append_stream(gone(client.session), part_bytes=PART)

    led = await asyncio.to_thread(leader_number, cluster, cluster.urls[0])
    away = next(node for node in cluster.members if node.number != led)
    urls = [cluster.urls[led]]
    async with laminar.aio.connect(urls, timeout=60.0) as client:
        topic = client.topic(TOPIC)
        await asyncio.to_thread(cluster.kill, away.number)
        assert 1 == (await topic.append_stream(source(), part_bytes=PART)).offset
        await topic.append(b"after")
        await asyncio.to_thread(cluster.restart, away.number)
        assert [] == await converged(cluster, TOPIC, 1)
        for name, url in replica_urls(urls[0]).items():
            assert DATA == (await local_value(url, 1)).content, name
        async with topic.read() as records:
            assert [None, len(DATA), None] == [record.large_bytes async for record in records]

        # Parts of the upload that broke off are kept for an hour, and hold nothing that lies before them.
        # A leader that was just elected may not know yet how far the others are.
        async with asyncio.timeout(60):
            while 1 != (trimmed := await topic.delete_before(1)).start_offset:
                assert trimmed.held_back_by
        assert DATA == (await local_value(replica_urls(urls[0])[away.name], 1)).content
