"""What a queue is for `bench_channels`, and a log for `bench_peers`; servers that are started and killed.

A queue: jobs are put in, workers take some and acknowledge each. A log: records are appended, and read from
the beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol, TypeVar

PEERS = Path("build/peers")
VALUE = os.urandom(1024)
NODES = 3
FETCH = 100
TOGETHER = 256
PATIENCE_S = 60.0
EMPTY_S = 0.5
LIMIT_S = 600.0

PARTITIONS = 3

Work = Callable[[], Awaitable[Sequence[Hashable]]]
Send = Callable[[int], Awaitable[object]]
"""Takes the number of the partition."""
Result = TypeVar("Result")


class Queue(Protocol):
    """A system that runs, and in which queues can be made."""

    async def fill(self, name: str, jobs: int) -> None:
        """Make a queue of that many jobs."""

    def worker(self, name: str) -> AbstractAsyncContextManager[Work]:
        """Return one more consumer of a queue.

        A call of it takes up to `FETCH` jobs, acknowledges each, waits for the answers and returns what names
        the jobs; none if for `EMPTY_S` there were none.
        """


class Peer(Protocol):
    """A module of a system that Laminar is measured beside."""

    TITLE: str

    def missing(self) -> str | None:
        """Return what is not there, if so."""

    def start(self, folder: Path) -> AbstractAsyncContextManager[Queue]:
        """Start the servers, with their data in the folder."""


class Log(Protocol):
    """A system that runs, with topics of `PARTITIONS` partitions (streams)."""

    pids: Sequence[int]

    async def make(self, name: str) -> None:
        """Make a topic."""

    async def send_all(self, name: str, records: int) -> None:
        """Append records as fast as the system's client does it, and return when all are acknowledged."""

    def sender(self, name: str) -> AbstractAsyncContextManager[Send]:
        """Return what appends one record, and returns when that is acknowledged; many may be under way."""

    async def read_all(self, name: str) -> int:
        """Read a topic from its beginning to its end, a Python value for each record; how many there were."""


async def jobs_per_s(queue: Queue, name: str, *, jobs: int, consumers: int) -> float:
    """Return jobs a second of a new queue, from the first batch that is done to the last.

    So what a consumer needs to join its group counts for none, nor does the wait that finds a queue empty.
    """
    await queue.fill(name, jobs)
    seen: set[Hashable] = set()
    first, began_s, ended_s = 0, 0.0, 0.0

    async def consume(work: Work) -> None:
        nonlocal first, began_s, ended_s
        while len(seen) < jobs:
            done = await work()
            assert seen.isdisjoint(done), "it was received twice"
            seen.update(done)
            if done:
                ended_s = time.perf_counter()
            if done and not first:
                first, began_s = len(done), ended_s

    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(queue.worker(name)) for _ in range(consumers)]
        await asyncio.wait_for(asyncio.gather(*(consume(each) for each in workers)), LIMIT_S)
    return (jobs - first) / max(ended_s - began_s, 1e-6)


def free_ports(count: int) -> list[int]:
    """Return ports on which nothing listens now."""
    with contextlib.ExitStack() as held:
        found = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in found]


async def patiently(attempt: Callable[[], Awaitable[Result]]) -> Result:
    """Return what an attempt returns; repeat it while a server is not ready."""
    deadline_s = time.perf_counter() + PATIENCE_S
    while True:
        try:
            return await attempt()
        except Exception:
            if time.perf_counter() > deadline_s:
                raise
            await asyncio.sleep(0.2)


@asynccontextmanager
async def server(log: Path, *command: str | Path) -> AsyncIterator[int]:
    """Run a server, give its pid, and kill it in the end.

    Its data is thrown away, and a last Kafka broker would wait.
    """
    with log.open("wb") as out:  # the kernel ends it if this program is killed
        process = await asyncio.create_subprocess_exec(
            "setpriv", "--pdeathsig", "KILL", *command, stdout=out, stderr=out
        )
    try:
        yield process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
