"""Bulk beside small appends on three real nodes: who waits for whom, counted and not timed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

import laminar
from laminar.node.fair.bulk import ALONE_BYTES, BULK_BYTES
from laminar.testing.cluster import LocalCluster
from tests.cluster.patience import PATIENCE_S, until

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
        for line in httpx.get(f"{url}/metrics", trust_env=False, timeout=PATIENCE_S).text.splitlines():
            if line.startswith((f"{name}{{", f"{name} ")):
                total += float(line.rpartition(" ")[2])
    return int(total)


async def answers_of(url: str, topic: str, bodies: list[bytes]) -> list[tuple[int, int]]:
    """Append bodies on one connection without waiting; return the status and the offset of each."""
    reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
    for body in bodies:
        writer.write(
            b"POST /v1/topics/%b/partitions/0/records HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n%b"
            % (topic.encode(), len(body), body)
        )
    found = []
    for _ in bodies:
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().index(b"content-length: ") + 16
        answer = json.loads(await reader.readexactly(int(head[length : head.index(b"\r\n", length)])))
        status = int(head.split(b" ", 2)[1])
        assert status in (201, 503), (head, answer)
        found.append((status, answer["placed"][0]["offset"] if status == 201 else -1))
    writer.close()
    return found


async def test_what_one_connection_sends_keeps_its_order_whatever_its_size(cluster: LocalCluster) -> None:
    """A small append after a large one of the same partition is not appended before it, though it is no bulk.

    Small appends of another connection make the large ones wait meanwhile.
    """
    sent = [LARGE if number % 2 == 0 else SMALL for number in range(24)]
    async with laminar.aio.connect(cluster.urls, timeout=PATIENCE_S) as client, asyncio.timeout(240):
        other = await client.create_topic("others", partitions=3, replicas=3)
        ended = asyncio.Event()

        async def beside() -> None:
            while not ended.is_set():
                await other.append(SMALL)

        task = asyncio.create_task(beside())
        rounds, shown = 0, False
        try:
            # Again where a leader was elected meanwhile, or nothing has waited, so that nothing is shown.
            while not shown:
                rounds += 1
                topic = f"ordered-{rounds}"
                await client.create_topic(topic, partitions=1, replicas=3)
                told = [await answers_of(url, topic, sent) for url in cluster.urls]  # two of them pass it on
                placed = [offset for each in told for status, offset in each if status == 201]
                assert placed == sorted(set(placed))
                if all(status == 201 for answers in told for status, _ in answers):
                    assert list(range(3 * len(sent))) == placed
                    shown = await asyncio.to_thread(counted, cluster, "laminar_bulk_rests_total") > 0
        finally:
            ended.set()
            await task


async def test_uploads_and_large_batches_stay_within_their_room(cluster: LocalCluster) -> None:
    """Small appends are answered, and no loop has more on its way than it may.

    That no election begins depends on the machine's load: `make bench-beside` counts them.
    """
    most = small_appends = rounds = 0
    async with laminar.aio.connect(cluster.urls, timeout=PATIENCE_S) as client, asyncio.timeout(240):
        await client.create_topic("uploads", partitions=3, replicas=3)
        small = await client.create_topic("small", partitions=3, replicas=3)
        for _ in range(3):
            await small.append(SMALL)
        before = await asyncio.to_thread(counted, cluster, "laminar_bulk_bytes_total")

        async def source() -> AsyncIterator[bytes]:
            for _ in range(8):
                yield b"z" * MIB

        async def batches() -> None:
            async with client.topic("uploads").producer(batch_bytes=MIB // 2) as producer:
                await producer.send_all((None, b"w" * 1024) for _ in range(12 * 1024))

        async def appends(work: asyncio.Future[Any]) -> int:
            count = 0
            while not work.done():
                await small.append(SMALL)
                count += 1
            return count

        # Again where this process slept through most of it.
        while small_appends <= 5 or most == 0:
            rounds += 1
            work = asyncio.gather(
                *(client.topic("uploads").append_stream(source(), partition=number) for number in range(3)),
                batches(),
            )
            beside = asyncio.create_task(appends(work))
            while not work.done():
                found = await asyncio.to_thread(counted, cluster, "laminar_bulk_on_their_way_bytes")
                most = max(most, found)
            await work
            small_appends = max(small_appends, await beside)

        assert most <= len(cluster.members) * ALONE_BYTES
        carried = await asyncio.to_thread(counted, cluster, "laminar_bulk_bytes_total") - before
        assert carried >= rounds * 36 * MIB
        # What had small appends beside it counts for a moment longer than it takes.
        await asyncio.to_thread(until, lambda: 0 == counted(cluster, "laminar_bulk_on_their_way_bytes"))
