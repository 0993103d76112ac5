"""NATS JetStream: streams with three replicas, synced always.

As a queue: a pull consumer, and `ack_sync` of each job. As a log: three streams, `publish_async` with the
library's limit of 4,000 under way, and ordered consumers, which acknowledge nothing.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from benches.queues.queues import (
    EMPTY_S,
    FETCH,
    NODES,
    PARTITIONS,
    PATIENCE_S,
    PEERS,
    TOGETHER,
    VALUE,
    Send,
    Work,
    free_ports,
    patiently,
    server,
)

TITLE = "NATS JetStream"
SERVER = PEERS / "bin" / "nats-server"


def missing() -> str | None:
    """Return what is not there, if so."""
    return None if SERVER.exists() else f"{SERVER} is not there"


async def _ignore(error: Exception) -> None:
    """Leave out that a server is not there yet."""


class Jets:
    """Streams of three servers."""

    def __init__(self, connection: Any, pids: Sequence[int]) -> None:
        self.pids = pids
        self.stream = connection.jetstream(timeout=PATIENCE_S)

    async def make(self, name: str) -> None:
        """Make a stream for each partition."""
        for number in range(PARTITIONS):
            each = f"{name}-{number}"
            await patiently(
                lambda each=each: self.stream.add_stream(  # type: ignore[misc]
                    name=each, subjects=[each], num_replicas=NODES, storage="file"
                )
            )

    async def send_all(self, name: str, records: int) -> None:
        """Publish to all streams by turns, and wait for every acknowledgement."""
        under_way = [
            await self.stream.publish_async(f"{name}-{number % PARTITIONS}", VALUE, wait_stall=PATIENCE_S)
            for number in range(records)
        ]
        await asyncio.gather(*under_way)

    @asynccontextmanager
    async def sender(self, name: str) -> AsyncIterator[Send]:
        """Return what publishes one message and waits for its acknowledgement."""
        yield lambda partition: self.stream.publish(f"{name}-{partition}", VALUE)

    async def read_all(self, name: str) -> int:
        """Read each stream by an ordered consumer."""

        async def read(stream: str) -> int:
            wanted = (await self.stream.stream_info(stream)).state.messages
            read, finished = 0, asyncio.Event()

            async def take(message: Any) -> None:
                nonlocal read
                read += len(message.data) > 0
                if read == wanted:
                    finished.set()

            subscription = await self.stream.subscribe(stream, cb=take, ordered_consumer=True)
            await finished.wait()
            await subscription.unsubscribe()
            return read

        return sum(await asyncio.gather(*(read(f"{name}-{number}") for number in range(PARTITIONS))))

    async def fill(self, name: str, jobs: int) -> None:
        """Make a stream and its pull consumer."""
        await patiently(
            lambda: self.stream.add_stream(name=name, subjects=[name], num_replicas=NODES, storage="file")
        )
        for first in range(0, jobs, TOGETHER):
            last = min(jobs, first + TOGETHER)
            await asyncio.gather(*(self.stream.publish(name, VALUE) for _ in range(first, last)))
        await self.stream.pull_subscribe(name, durable="work")

    @asynccontextmanager
    async def worker(self, name: str) -> AsyncIterator[Work]:
        """Return a consumer with a subscription of its own: a shared one mixes what each asked for."""
        puller = await self.stream.pull_subscribe_bind(durable="work", stream=name)

        async def work() -> Sequence[Hashable]:
            try:
                batch = await puller.fetch(FETCH, timeout=EMPTY_S)
            except TimeoutError:
                return []
            await asyncio.gather(*(message.ack_sync(timeout=PATIENCE_S) for message in batch))
            return [message.metadata.sequence.stream for message in batch]

        yield work
        await puller.unsubscribe()


@asynccontextmanager
async def start(folder: Path) -> AsyncIterator[Jets]:
    """Start three servers."""
    nats = importlib.import_module("nats")
    found = free_ports(2 * NODES)
    ports, routes = found[:NODES], found[NODES:]
    peers = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
    pids: list[int] = []
    async with AsyncExitStack() as stack:
        for number in range(NODES):
            store = folder / f"nats-{number}"
            store.mkdir(parents=True)
            settings = store / "nats.conf"
            settings.write_text(
                f'server_name: n{number}\nlisten: "127.0.0.1:{ports[number]}"\n'
                f'jetstream {{ store_dir: "{store}", sync_interval: always }}\n'
                f'cluster {{ name: bench, listen: "127.0.0.1:{routes[number]}", routes: [{peers}] }}\n'
            )
            pids.append(await stack.enter_async_context(server(store / "log", SERVER, "-c", settings)))

        async def connected() -> Any:
            connection = await nats.connect([f"nats://127.0.0.1:{port}" for port in ports], error_cb=_ignore)
            try:
                await connection.jetstream().account_info()
            except Exception:
                await connection.close()
                raise
            return connection

        connection = await patiently(connected)
        stack.push_async_callback(connection.close)
        yield Jets(connection, pids)
