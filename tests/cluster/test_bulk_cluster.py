"""Bulk beside small appends on three real nodes: who waits for whom, counted and not timed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit

import httpx
import pytest

import laminar
from laminar.node.fair.bulk import ALONE_BYTES, BULK_BYTES
from laminar.testing.cluster import LocalCluster

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20
LARGE, SMALL = b"x" * (2 * BULK_BYTES), b"y" * 100


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three nodes of one shard."""
    with LocalCluster(tmp_path_factory.mktemp("bulk"), nodes=3, shards=1) as own:
        yield own


def counted(cluster: LocalCluster, name: str) -> int:
    """Return the sum of a metric over all processes of all nodes."""
    total = 0.0
    for url in cluster.urls:
        for line in httpx.get(f"{url}/metrics", trust_env=False).text.splitlines():
            if line.startswith((f"{name}{{", f"{name} ")):
                total += float(line.rpartition(" ")[2])
    return int(total)


async def test_what_one_connection_sends_keeps_its_order_whatever_its_size(cluster: LocalCluster) -> None:
    """A small append after a large one of the same partition is not appended before it, though it is no bulk.

    Small appends of another connection make the large ones wait meanwhile.
    """
    async with laminar.aio.connect(cluster.urls) as client:
        other = await client.create_topic("others", partitions=3, replicas=3)
        await client.create_topic("ordered", partitions=1, replicas=3)
        sent = [LARGE if number % 2 == 0 else SMALL for number in range(24)]
        ended = asyncio.Event()

        async def beside() -> None:
            while not ended.is_set():
                await other.append(SMALL)

        task = asyncio.create_task(beside())
        offsets = []
        for url in cluster.urls:  # of which two pass on what they get
            reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
            for body in sent:
                writer.write(
                    b"POST /v1/topics/ordered/partitions/0/records HTTP/1.1\r\nHost: localhost\r\n"
                    b"Content-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n%b"
                    % (len(body), body)
                )
            for _ in sent:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().index(b"content-length: ") + 16
                body = await reader.readexactly(int(head[length : head.index(b"\r\n", length)]))
                assert b" 201 " in head, (head, body)
                offsets.append(json.loads(body)["placed"][0]["offset"])
            writer.close()
        ended.set()
        await task

    assert offsets == list(range(3 * len(sent)))
    assert counted(cluster, "laminar_bulk_rests_total") > 0, "nothing has waited: the test shows nothing"


async def test_uploads_and_large_batches_stay_within_their_room(cluster: LocalCluster) -> None:
    """Small appends are answered, and no loop has more on its way than it may.

    That no election begins depends on the machine's load: `make bench-beside` counts them.
    """
    most = 0
    async with laminar.aio.connect(cluster.urls, timeout=60.0) as client:
        await client.create_topic("uploads", partitions=3, replicas=3)
        small = await client.create_topic("small", partitions=3, replicas=3)
        for _ in range(3):
            await small.append(SMALL)
        before = counted(cluster, "laminar_bulk_bytes_total")

        async def source() -> AsyncIterator[bytes]:
            for _ in range(8):
                yield b"z" * MIB

        async def batches() -> None:
            async with client.topic("uploads").producer(batch_bytes=MIB // 2) as producer:
                await producer.send_all((None, b"w" * 1024) for _ in range(12 * 1024))

        work = asyncio.gather(
            *(client.topic("uploads").append_stream(source(), partition=number) for number in range(3)),
            batches(),
        )

        async def appends() -> int:
            count = 0
            while not work.done():
                await small.append(SMALL)
                count += 1
            return count

        beside = asyncio.create_task(appends())
        while not work.done():
            found = await asyncio.to_thread(counted, cluster, "laminar_bulk_on_their_way_bytes")
            most = max(most, found)
        await work
        small_appends = await beside

    assert small_appends > 5
    assert 0 < most <= len(cluster.members) * ALONE_BYTES
    assert counted(cluster, "laminar_bulk_bytes_total") - before >= 36 * MIB
    assert counted(cluster, "laminar_bulk_on_their_way_bytes") == 0
