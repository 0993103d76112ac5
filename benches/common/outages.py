"""How long writing stands still: a leader killed with SIGKILL, and a cluster that starts from nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from laminar.aio import Client, Topic, connect
from laminar.client.errors import Unavailable
from laminar.testing.cluster import LocalCluster

_WRITE_PAUSE_S = 0.002
_SETTLE_TIMEOUT_S = 20.0


class Writer:
    """Appends to one partition, one at a time, and notes when each was sent and acknowledged."""

    def __init__(self, topic: Topic[bytes], partition: int) -> None:
        self._topic = topic
        self._partition = partition
        self._began_after: float | None = None
        self._acknowledged: asyncio.Future[float] | None = None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            began = time.perf_counter()
            await self._topic.append(b"x" * 1024, partition=self._partition)
            if self._began_after is not None and began >= self._began_after:
                assert self._acknowledged is not None
                self._began_after = None
                self._acknowledged.set_result(time.perf_counter())
            await asyncio.sleep(_WRITE_PAUSE_S)

    def next_write(self, after: float) -> asyncio.Future[float]:
        """When the first append that is sent after this instant is acknowledged."""
        self._acknowledged = asyncio.get_running_loop().create_future()
        self._began_after = after
        return self._acknowledged


async def kills(cluster: LocalCluster, topic: Topic[bytes], *, count: int) -> list[float]:
    """Seconds from the SIGKILL of partition 0's leader to the acknowledgement of an append sent after it.

    The append that was under way at the kill comes before that one, so its retry counts in. Each killed node
    is restarted, and every replica in sync, before the next kill.
    """
    found = []
    writer = Writer(topic, 0)
    writing = asyncio.create_task(writer.run())
    try:
        for _ in range(count):
            number = await _settled_leader(cluster, topic)
            await asyncio.sleep(0.2)
            # In this turn of the loop, so that no append is sent between the signals and the instant.
            for pid in cluster.pids(number):
                os.kill(pid, signal.SIGKILL)
            killed = time.perf_counter()
            next_write = writer.next_write(killed)
            reaping = asyncio.create_task(asyncio.to_thread(cluster.kill, number))
            both: set[asyncio.Future[Any]] = {next_write, writing}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
            found.append(next_write.result() - killed)
            await reaping
            await asyncio.to_thread(cluster.restart, number)
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
    return found


async def _settled_leader(cluster: LocalCluster, topic: Topic[bytes]) -> int:
    """The node that leads partition 0, once every partition has a leader and all replicas are in sync."""
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while True:
        partitions = await topic.partitions()
        leaders = [row.leader for row in partitions]
        if all(leaders) and all(row.in_sync == cluster.nodes for row in partitions):
            names = [member.name for member in cluster.members]
            assert leaders[0] is not None
            return names.index(leaders[0])
        if time.monotonic() >= deadline:
            raise TimeoutError(f"replicas are not in sync after {_SETTLE_TIMEOUT_S:g} s: {partitions}")
        await asyncio.sleep(0.05)


async def start(directory: Path, *, nodes: int, shards: int) -> float:
    """Seconds from the start of `nodes` new nodes to an acknowledged append to a topic made then."""
    cluster = LocalCluster(directory, nodes=nodes, shards=shards)
    try:
        began = time.perf_counter()
        for member in cluster.members:
            cluster.spawn(member.number)
        async with connect(cluster.urls) as client:
            await _all_alive(client, cluster)
            topic = await client.create_topic("first", partitions=12, replicas=nodes)
            await topic.append(b"first", partition=0)
            return time.perf_counter() - began
    finally:
        await asyncio.to_thread(cluster.stop)


async def _all_alive(client: Client, cluster: LocalCluster) -> None:
    """Return once the cluster knows all nodes: a topic made before that gets fewer replicas."""
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    alive: list[str] = []
    while len(alive) < cluster.nodes:
        if time.monotonic() >= deadline:
            tails = "\n".join(f"{member.name}:\n{member.log_tail()}" for member in cluster.members)
            raise TimeoutError(f"only {alive} are alive after {_SETTLE_TIMEOUT_S:g} s\n{tails}")
        try:
            told = await client.cluster()
        except Unavailable:
            told = {}
        alive = [each["node"] for each in told.get("nodes", ()) if each.get("alive", True)]
        await asyncio.sleep(0.01)
