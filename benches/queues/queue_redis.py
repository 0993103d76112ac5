"""Redis streams: one server, not replicated, `appendfsync always`.

As a queue: XREADGROUP, and XACK of each job. As a log: three streams, XADD and XRANGE.

The XACKs of a batch are written together (a pipeline without a transaction) and answered each by itself: the
server syncs once for all commands that it reads at a time.
"""

from __future__ import annotations

import asyncio
import importlib
import shutil
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benches.queues.queues import (
    EMPTY_S,
    FETCH,
    PARTITIONS,
    PATIENCE_S,
    TOGETHER,
    VALUE,
    Send,
    Work,
    free_ports,
    patiently,
    server,
)

TITLE = "Redis streams"


def missing() -> str | None:
    """Return what is not there, if so."""
    if shutil.which("redis-server") is None:
        return "redis-server is not there"
    return None if find_spec("redis") else "the library redis is not there"


class Streams:
    """Streams of one server."""

    def __init__(self, port: int, pids: Sequence[int]) -> None:
        self.pids = pids
        self._redis = importlib.import_module("redis.asyncio")
        self._port = port

    async def make(self, name: str) -> None:
        """Make nothing: the first record makes a stream."""

    async def send_all(self, name: str, records: int) -> None:
        """Add records, `TOGETHER` in a pipeline, to all streams by turns; two pipelines overlap."""

        async def send(first: int) -> None:
            async with self.connected() as connection:
                for start in range(first, records, 2 * TOGETHER):
                    async with connection.pipeline(transaction=False) as pipe:
                        for number in range(start, min(records, start + TOGETHER)):
                            pipe.xadd(f"{name}-{number % PARTITIONS}", {b"v": VALUE})
                        await pipe.execute()

        await asyncio.gather(send(0), send(TOGETHER))

    @asynccontextmanager
    async def sender(self, name: str) -> AsyncIterator[Send]:
        """Return what adds one record, on a connection of its own for each that is under way."""
        async with self.connected() as connection:
            yield lambda partition: connection.xadd(f"{name}-{partition}", {b"v": VALUE})

    async def read_all(self, name: str) -> int:
        """Read each stream in ranges of 1,000."""
        read = 0
        async with self.connected() as connection:
            for number in range(PARTITIONS):
                after = "-"
                while found := await connection.xrange(f"{name}-{number}", min=after, count=1000):
                    read += sum(len(fields[b"v"]) > 0 for _, fields in found)
                    after = f"({found[-1][0].decode()}"
        return read

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Any]:
        """Return a connection of its own."""
        async with self._redis.Redis(port=self._port, socket_timeout=PATIENCE_S, protocol=2) as connection:
            yield connection

    async def ping(self) -> None:
        """Raise if the server does not answer."""
        async with self.connected() as connection:
            await connection.ping()

    async def fill(self, name: str, jobs: int) -> None:
        """Make a stream and its group."""
        async with self.connected() as connection:
            for first in range(0, jobs, TOGETHER):
                async with connection.pipeline(transaction=False) as pipe:
                    for _ in range(first, min(jobs, first + TOGETHER)):
                        pipe.xadd(name, {b"v": VALUE})
                    await pipe.execute()
            await connection.xgroup_create(name, "work", id="0")

    @asynccontextmanager
    async def worker(self, name: str) -> AsyncIterator[Work]:
        """Return a consumer with a connection of its own."""
        async with self.connected() as connection:

            async def work() -> Sequence[Hashable]:
                found = await connection.xreadgroup(
                    "work", str(id(connection)), {name: ">"}, count=FETCH, block=int(EMPTY_S * 1000)
                )
                if not found:
                    return []
                batch = [entry for entry, _ in found[0][1]]
                async with connection.pipeline(transaction=False) as pipe:
                    for entry in batch:
                        pipe.xack(name, "work", entry)
                    answers = await pipe.execute()
                assert answers == [1] * len(batch), "a job was not its own any more"
                return batch

            yield work


@asynccontextmanager
async def start(folder: Path) -> AsyncIterator[Streams]:
    """Start a server."""
    store = folder / "redis"
    store.mkdir()
    (port,) = free_ports(1)
    settings = {"port": port, "bind": "127.0.0.1", "dir": store, "save": "", "appendonly": "yes"}
    settings |= {"appendfsync": "always"}
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    async with server(store / "log", "redis-server", *flags) as pid:
        streams = Streams(port, [pid])
        await patiently(streams.ping)
        yield streams
