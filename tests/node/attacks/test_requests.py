"""Small requests that were expensive, sent to a node: it stays small and whole, and serves others."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from laminar.batch import Codec, build
from tests.http.serving import until
from tests.node.api.asking import BATCH, ENVELOPES, NDJSON
from tests.node.attacks.victim import MOST_BLOCKED_S, Victim, cpu_s, victim

MIB = 1 << 20
# Of the largest process, beside what it has when it is ready.
MOST_GROWTH_BYTES = 400 * MIB
# What the node computes at most before another client is answered. In CPU time of all its threads: a busy
# machine or a slow disk takes none.
MOST_CPU_S = 4.0
RECORDS = "/v1/topics/attacked/partitions/0/records"


@pytest.fixture(scope="module")
def node() -> Iterator[Victim]:
    """One node for all attacks: what one leaves behind is there in the next."""
    with victim() as node:
        assert 201 == node.http.put("/v1/topics/attacked", json={"partitions": 1}).status_code
        yield node


@asynccontextmanager
async def others_served(node: Victim) -> AsyncIterator[list[float]]:
    """While this runs another client appends; in the end the node is as it was.

    Yields the CPU seconds that the node used while each append waited for its answer.
    """
    before = node.rss_bytes()
    waits: list[float] = []

    async def append() -> None:
        async with httpx.AsyncClient(base_url=node.http.base_url, timeout=120, trust_env=False) as client:
            while True:
                begun, begun_s = cpu_s(node.pids), time.monotonic()
                answer = await client.post("/v1/topics/innocent/partitions/0/records", content=b"x" * 100)
                waits.append(cpu_s(node.pids) - begun)
                assert time.monotonic() - begun_s < MOST_BLOCKED_S
                assert 201 == answer.status_code, answer.text
                await asyncio.sleep(0.02)

    task = asyncio.create_task(append())
    try:
        yield waits
        await until(lambda: bool(waits) or task.done(), seconds=120)
    finally:
        done = task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if done:
        task.result()
    grown = node.rss_bytes() - before
    print(f"longest wait {max(waits):.2f} s of CPU, of {len(waits)}, {grown / MIB:.0f} MiB more")
    assert max(waits) < MOST_CPU_S
    assert grown < MOST_GROWTH_BYTES
    assert node.unharmed()


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: b"1\n" * (8 * MIB), NDJSON),
        (lambda: b"\n" * (16 * MIB), NDJSON),
        (lambda: b"[" + b"{}," * (5 * MIB) + b"{}]", ENVELOPES),
    ],
    ids=["lines", "empty lines", "envelopes"],
)
async def test_bodies_that_unfold_to_millions_of_records(
    node: Victim, make: Callable[[], bytes], kind: str
) -> None:
    """Ten at once, of 16 to 80 KB each."""
    body = gzip.compress(make(), 9)
    headers = {"Content-Type": kind, "Content-Encoding": "gzip"}
    async with httpx.AsyncClient(base_url=node.http.base_url, timeout=120, trust_env=False) as client:
        async with others_served(node):
            asked = [client.post(RECORDS, content=body, headers=headers) for _ in range(10)]
            assert {413} == {answer.status_code for answer in await asyncio.gather(*asked)}


@pytest.mark.parametrize(
    ("positions", "status", "code"), [(800_000, 413, "too_large"), (80_000, 422, "invalid")]
)
async def test_a_cursor_with_very_many_positions(
    node: Victim, positions: int, status: int, code: str
) -> None:
    """Ten at once, folded and not; the refusal does not name them all."""
    body = b'{"positions":{' + b",".join(b'"%d":0' % number for number in range(positions)) + b"}}"
    folded = gzip.compress(body, 9), {"Content-Encoding": "gzip"}
    path = "/v1/topics/attacked/cursors/c"
    async with httpx.AsyncClient(base_url=node.http.base_url, timeout=120, trust_env=False) as client:
        async with others_served(node):
            asked = [
                client.put(path, content=sent, headers=given) for sent, given in [(body, {}), folded] * 5
            ]
            for answer in await asyncio.gather(*asked):
                assert (status, code) == (answer.status_code, answer.json()["code"])
                assert len(answer.content) < 1000


async def test_a_batch_of_8_kilobytes_that_is_read_as_text(node: Victim) -> None:
    """It unfolds to 16 MiB of a byte that JSON writes as six, whole and by its first record."""
    frame = bytes(build([b"\0" * (8 * MIB - 100)] * 2, codec=Codec.ZSTD))
    assert len(frame) < 10_000
    made = node.http.post(RECORDS, content=frame, headers={"Content-Type": BATCH})
    assert made.status_code in (200, 201), made.text
    offset = made.json()["placed"][0]["offset"]
    async with httpx.AsyncClient(base_url=node.http.base_url, timeout=120, trust_env=False) as client:
        async with others_served(node):
            for query in ({"limit": 1}, {}):
                answer = await client.get(RECORDS, params={"offset": offset, **query})
                assert 200 == answer.status_code
                assert offset + 1 == answer.json()["next_offset"]


async def test_reads_whose_answers_nobody_takes(node: Victim) -> None:
    """150 pipelined reads of 8 MiB on each of five connections."""
    made = node.http.post(RECORDS, content=b"x" * (8 * MIB - 100))
    assert 201 == made.status_code, made.text
    get = f"GET {RECORDS}?offset={made.json()['placed'][0]['offset']}&limit=1&max_bytes={8 * MIB} HTTP/1.1"
    url = node.http.base_url
    async with others_served(node) as waits:
        writers = []
        for _ in range(5):
            _, writer = await asyncio.open_connection(url.host, url.port, limit=1)
            writer.write(f"{get}\r\nHost: localhost\r\n\r\n".encode() * 150)
            await writer.drain()
            writers.append(writer)
        await until(lambda: len(waits) > 20, seconds=120)
        for writer in writers:
            writer.transport.abort()
