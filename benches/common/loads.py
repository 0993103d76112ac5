"""The loads: what one client does to a running cluster, and how fast it is answered.

Every record is 1 KiB, every append is acknowledged when a majority has it synced. All but `posts` go through
`laminar.aio`, so the product is measured as a program meets it; `posts` is the least a client can be, and is
the same against the bare echo.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from benches.common.floors import percentile
from benches.common.usage import cpu_s
from laminar.aio import Topic

VALUE_BYTES = 1024
VALUE = os.urandom(VALUE_BYTES)


@dataclass(frozen=True, slots=True)
class Produced:
    """Batched produce: median rate, and median CPU of all servers and the client."""

    records_per_s: float
    cpu_us_per_record: float
    records: int

    @property
    def mb_per_s(self) -> float:
        return self.records_per_s * VALUE_BYTES / 1e6


async def produce(topic: Topic[bytes], pids: Sequence[int], *, records: int, rounds: int) -> Produced:
    """An idempotent producer, spread over all partitions, each round to its last receipt."""
    rates, cpu_us = [], []
    await _produce_once(topic, max(1, records // 4))
    for _ in range(rounds):
        cpu_before_s = cpu_s(pids) + time.process_time()
        rates.append(records / await _produce_once(topic, records))
        cpu_us.append((cpu_s(pids) + time.process_time() - cpu_before_s) / records * 1e6)
    return Produced(statistics.median(rates), statistics.median(cpu_us), rounds * records)


async def _produce_once(topic: Topic[bytes], records: int) -> float:
    began = time.perf_counter()
    async with topic.producer() as producer:
        await producer.send_all((None, VALUE) for _ in range(records))
    return time.perf_counter() - began


async def in_flight(topic: Topic[bytes], *, records: int, rounds: int, width: int = 256) -> float:
    """Records/s with `width` records without a receipt at any time; the median."""
    rates = []

    async with topic.producer() as producer:

        async def one_after_another(count: int) -> None:
            for _ in range(count):
                await producer.send(VALUE)

        each = max(1, records // width)
        await asyncio.gather(*(one_after_another(max(1, each // 4)) for _ in range(width)))
        for _ in range(rounds):
            began = time.perf_counter()
            await asyncio.gather(*(one_after_another(each) for _ in range(width)))
            rates.append(each * width / (time.perf_counter() - began))
    return statistics.median(rates)


async def one_at_a_time(topic: Topic[bytes], *, records: int, rounds: int) -> tuple[float, float]:
    """p50 and p99 in milliseconds of an append that waits for the one before it; medians of the rounds."""
    p50, p99 = [], []
    for _ in range(min(100, records)):
        await topic.append(VALUE, partition=0)
    for _ in range(rounds):
        took = []
        for _ in range(records):
            began = time.perf_counter()
            await topic.append(VALUE, partition=0)
            took.append((time.perf_counter() - began) * 1000)
        p50.append(percentile(took, 0.5))
        p99.append(percentile(took, 0.99))
    return statistics.median(p50), statistics.median(p99)


async def fetch(topic: Topic[bytes], *, records: int, rounds: int) -> float:
    """Records/s of a whole topic read into one Arrow table, the CRCs checked; the median.

    One round more is run first and not counted: a machine that is virtual itself finds memory for a table
    of this size on its first use only, which takes several times as long as filling it.
    """
    rates = []
    for _ in range(1 + rounds):
        began = time.perf_counter()
        table = await topic.read().to_arrow()
        took = time.perf_counter() - began
        assert table.num_rows == records, f"{table.num_rows} records read, {records} written"
        del table
        rates.append(records / took)
    return statistics.median(rates[1:])


class _Poster(asyncio.Protocol):
    """One connection that always has one POST on its way. Answers come one at a time, with a length."""

    def __init__(self, request: bytes) -> None:
        self.answers = 0
        self.failure: str | None = None
        self._request = request
        self._seen = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._seen:
            data = self._seen + data
        head = data.find(b"\r\n\r\n")
        length = data.find(b"Content-Length: ")
        if head < 0 or len(data) < head + 4 + int(data[length + 16 : data.index(b"\r", length)]):
            self._seen = data
            return
        self._seen = b""
        if data[9:10] != b"2":
            self.failure = data.decode("latin-1")
            self._transport.abort()
            return
        self.answers += 1
        self._transport.write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.failure is None and exc is not None:
            self.failure = str(exc)


def post_request(topic: str, partition: int, *, token: str = "") -> bytes:
    """A POST of one record, its bytes as they are; with a token, if one is given."""
    proof = b"Authorization: Bearer %b\r\n" % token.encode() if token else b""
    return (
        b"POST /v1/topics/%b/partitions/%d/records HTTP/1.1\r\nHost: localhost\r\n%b"
        b"Content-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n%b"
    ) % (topic.encode(), partition, proof, VALUE_BYTES, VALUE)


@dataclass(frozen=True, slots=True)
class Posted:
    """POSTs of one record: median rate, and median CPU of the servers for each."""

    per_s: float
    cpu_us: float


class LeaderMoved(Exception):
    """A POST was answered by a node that does not lead any more: what was measured says nothing."""


async def posts(
    targets: Sequence[tuple[str, int, bytes]],
    *,
    connections: int,
    seconds: float,
    rounds: int,
    tls: ssl.SSLContext | None = None,
) -> float:
    """POST/s over `connections`, each sending its target's request (host, port, bytes) again and again.

    Raises:
        LeaderMoved: A partition has another leader by now.
    """
    done = await posted(targets, (), connections=connections, seconds=seconds, rounds=rounds, tls=tls)
    return done.per_s


async def posted(
    targets: Sequence[tuple[str, int, bytes]],
    pids: Sequence[int],
    *,
    connections: int,
    seconds: float,
    rounds: int,
    tls: ssl.SSLContext | None = None,
) -> Posted:
    """Do as `posts`, and return what the processes `pids` used for each POST, too."""
    loop = asyncio.get_running_loop()
    opened: list[tuple[asyncio.BaseTransport, _Poster]] = []
    for number in range(connections):
        host, port, request = targets[number % len(targets)]
        made = loop.create_connection(lambda request=request: _Poster(request), host, port, ssl=tls)
        opened.append(await made)
    rates, cpu_us = [], []
    try:
        await asyncio.sleep(min(0.3, seconds))
        for _ in range(rounds):
            before, began = sum(poster.answers for _, poster in opened), time.perf_counter()
            cpu_before_s = cpu_s(pids)
            await asyncio.sleep(seconds)
            done = sum(poster.answers for _, poster in opened) - before
            rates.append(done / (time.perf_counter() - began))
            cpu_us.append((cpu_s(pids) - cpu_before_s) / max(1, done) * 1e6)
        failures = [poster.failure for _, poster in opened if poster.failure is not None]
        if any('"not_leader"' in failure for failure in failures):
            raise LeaderMoved(f"{len(failures)} of {connections} connections")
        assert not failures, f"{len(failures)} of {connections} connections failed, the first: {failures[0]}"
    finally:
        for transport, _ in opened:
            cast(asyncio.Transport, transport).abort()
        await asyncio.sleep(0.05)
    return Posted(statistics.median(rates), statistics.median(cpu_us))
