"""Floods at a node that asks for tokens, by strangers and by one principal: others are served."""

from __future__ import annotations

import asyncio
import gzip
import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import httpx
import pytest

from laminar.testing.cluster import LocalCluster
from tests.node.attacks.victim import rss_bytes, runs

MIB = 1 << 20
FLOOD_S = 0.5
CONNECTIONS = 100
# Of the largest process, beside what it has before the flood. What unfolds counts in the budget for bodies.
MOST_GROWTH_BYTES = 64 * MIB
MOST_UNFOLDED_BYTES = 400 * MIB
# Appends of another principal that are answered meanwhile, on a machine that is slow and loaded.
LEAST_SERVED = 5
RECORDS = "/v1/topics/{}/partitions/0/records"


@dataclass
class Flooded:
    """A node, and the tokens of one principal that floods it, and of another one."""

    address: tuple[str, int]
    url: str
    tokens: dict[str, str]
    pids: frozenset[int]

    def request(self, who: str, target: str, body: bytes = b"", **headers: str) -> bytes:
        """Return a request of a principal."""
        headers = {"Host": "localhost", "Authorization": f"Bearer {self.tokens[who]}"} | headers
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        method = "POST" if body else "GET"
        head = f"{method} {target} HTTP/1.1\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    def rss_bytes(self) -> int:
        """What the largest of its processes holds."""
        return max(map(rss_bytes, self.pids))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flooded]:
    """One node of one shard for all floods: what one leaves behind is there in the next."""
    settings = {"access": "tokens"}
    with LocalCluster(tmp_path_factory.mktemp("floods"), nodes=1, shards=1, settings=settings) as cluster:
        url = cluster.urls[0]
        tokens = {"stranger": "lam_" + "0" * 16 + "_" + "s" * 43}
        headers = {"authorization": f"Bearer {cluster.admin_token}"}
        with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
            for who in ("flood", "innocent"):
                grants = [{"role": "admin", "prefix": who}]
                made = http.post("/v1/admin/tokens", json={"name": who, "grants": grants})
                tokens[who] = made.json()["token"]
                assert 201 == http.put(f"/v1/topics/{who}", json={"partitions": 1}).status_code
        pids = frozenset(cluster.leftovers())
        place = httpx.URL(url)
        yield Flooded((place.host, place.port or 80), url, tokens, pids)


async def slow_heads(node: Flooded, number: int) -> None:
    """A head that comes byte by byte."""
    _, writer = await asyncio.open_connection(*node.address)
    try:
        writer.write(b"GET /v1/topics HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        while True:
            await asyncio.sleep(0.05)
            writer.write(b"x")
    finally:
        writer.transport.abort()


async def sent_for_ever(node: Flooded, data: Callable[[], bytes]) -> None:
    """Send again and again; what is answered is read, and a connection that is ended is made anew."""
    while True:
        reader, writer = await asyncio.open_connection(*node.address)
        try:
            with suppress(ConnectionError):
                while True:
                    writer.write(data())
                    await writer.drain()
                    if not await reader.read(1 << 16):
                        break
        finally:
            writer.transport.abort()


async def large_heads(node: Flooded, number: int) -> None:
    """Heads as large as they may be, no two alike, so that none is known."""
    names = itertools.count()

    def data() -> bytes:
        head = {f"X-{each}": f"{number}-{next(names)}-".ljust(600, "x") for each in range(90)}
        return node.request("flood", "/v1/topics", b"", **head)

    await sent_for_ever(node, data)


async def short_heads(node: Flooded, number: int) -> None:
    """Heads of two bytes less than those that are kept, no two alike."""
    names = itertools.count()
    await sent_for_ever(
        node, lambda: node.request("flood", "/v1/topics", X=f"{number}-{next(names)}-".ljust(1700, "x")) * 20
    )


async def unknown_tokens(node: Flooded, number: int) -> None:
    """Requests of a token that is none, many on each connection."""
    await sent_for_ever(node, lambda: node.request("stranger", "/v1/topics") * 100)


async def new_connections(node: Flooded, number: int) -> None:
    """One request on each connection."""
    while True:
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(*node.address)
            try:
                writer.write(node.request("flood", "/v1/whoami"))
                await reader.readuntil(b"\r\n\r\n")
            finally:
                writer.transport.abort()


async def pipelined_appends(node: Flooded, number: int) -> None:
    """As many requests on each connection as it takes."""
    target = RECORDS.format("flood")
    data = node.request("flood", target, b"x" * 50, **{"Content-Type": "application/octet-stream"}) * 100
    await sent_for_ever(node, lambda: data)


async def bombs(node: Flooded, number: int) -> None:
    """Bodies of 16 kB that unfold to 16 MB: one more than may be, or exactly as much."""
    if number >= 8:
        return
    bomb = gzip.compress(bytes(16 * MIB + number % 2))
    coded = {"Content-Encoding": "gzip", "Content-Type": "application/octet-stream"}
    data = node.request("flood", RECORDS.format("flood"), bomb, **coded)
    await sent_for_ever(node, lambda: data)


ATTACKS = (
    slow_heads,
    large_heads,
    short_heads,
    unknown_tokens,
    new_connections,
    pipelined_appends,
    bombs,
)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
async def test_others_are_served(node: Flooded, attack: Callable[[Flooded, int], Awaitable[None]]) -> None:
    """While it floods another principal's appends are answered, and its connection stays."""
    before = node.rss_bytes()
    headers = {"authorization": f"Bearer {node.tokens['innocent']}"}
    async with httpx.AsyncClient(
        base_url=node.url, headers=headers, timeout=120, trust_env=False
    ) as innocent:
        floods = [asyncio.ensure_future(attack(node, number)) for number in range(CONNECTIONS)]
        await asyncio.sleep(0.1)
        end = asyncio.get_running_loop().time() + FLOOD_S
        served = 0
        try:
            while served < LEAST_SERVED or asyncio.get_running_loop().time() < end:
                answer = await innocent.post(RECORDS.format("innocent"), content=b"x" * 100)
                assert 201 == answer.status_code, answer.text
                served += 1
                await asyncio.sleep(0.02)
        finally:
            for task in floods:
                task.cancel()
            ended = await asyncio.gather(*floods, return_exceptions=True)
        failed = [each for each in ended if isinstance(each, Exception)]
    assert [] == failed
    grown = node.rss_bytes() - before
    print(f"{attack.__name__}: {served} appends of another, {grown // MIB} MiB more")
    assert grown < (MOST_UNFOLDED_BYTES if attack is bombs else MOST_GROWTH_BYTES)
    assert all(map(runs, node.pids)), "a process ended"
