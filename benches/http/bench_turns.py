"""What a flood of one principal does to another one's latency: with the flood here, and with it elsewhere.

    python -m benches.http.bench_turns [--limit 2000] [--quick]

Two nodes of one shard that ask for tokens. A principal floods one of them with appends over 30 connections,
each with 50 on its way. Another one, in a process of its own, asks one thing at a time of the first node:
appends, and `GET /v1/whoami`. With the flood at the second node the machine is as busy and the queue empty:
the difference is the queue, and the last lines say it as a ratio.

Then the same once more with the flood at its limit (`--limit`, requests/s): it is refused what is beyond
that, and does not wait as it is told. Those ratios say what a principal at its limit does to another one:
to elsewhere with the same limit, and to calm, without any flood. `--quick` is the same for a moment, and
measures nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from benches.common.floors import percentile
from laminar.testing.cluster import LocalCluster

CONNECTIONS, PIPELINED = 30, 50
ROUNDS = 3
LIMIT = 2000
# A flood may use up what it has saved before it is at its limit.
SETTLE_S, LIMITED_SETTLE_S = 0.3, 2.0
# Of a request that sets the nodes up.
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Place:
    """A node, with the tokens of its two principals; each has a topic of its name."""

    url: str
    tokens: dict[str, str]
    admin: str = ""

    def append(self, who: str) -> bytes:
        """Return a request that appends 100 bytes."""
        return self._request(who, "POST", f"/v1/topics/{who}/partitions/0/records", b"x" * 100)

    def whoami(self, who: str) -> bytes:
        """Return a request that only the shard itself works on."""
        return self._request(who, "GET", "/v1/whoami", b"")

    def _request(self, who: str, method: str, target: str, body: bytes) -> bytes:
        head = (
            f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self.tokens[who]}\r\n"
            f"Content-Type: application/octet-stream\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def limit(self, **limits: int) -> None:
        """Set the limits of the principal that floods."""
        headers = {"authorization": f"Bearer {self.admin}", "if-match": "*"}
        url = f"{self.url}/v1/admin/limits/flood"
        httpx.put(url, json=limits, headers=headers, trust_env=False, timeout=TIMEOUT_S).raise_for_status()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a new connection."""
        parts = urlsplit(self.url)
        return await asyncio.open_connection(parts.hostname, parts.port)


def place_of(cluster: LocalCluster) -> Place:
    """Make the principals and topics of a node."""
    tokens = {}
    headers = {"authorization": f"Bearer {cluster.admin_token}"}
    with httpx.Client(base_url=cluster.urls[0], headers=headers, trust_env=False, timeout=TIMEOUT_S) as http:
        for who in ("flood", "probe"):
            grants = [{"role": "admin", "prefix": who}]
            made = http.post("/v1/admin/tokens", json={"name": who, "grants": grants})
            tokens[who] = made.json()["token"]
            http.put(f"/v1/topics/{who}", json={}).raise_for_status()
    return Place(cluster.urls[0], tokens, cluster.admin_token)


async def answer(reader: asyncio.StreamReader, *, may_be_refused: bool = False) -> None:
    """Read one answer, which is a good one, or the refusal of a limit."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 20") or (may_be_refused and head.startswith(b"http/1.1 429")), head
    length = head.index(b"content-length: ") + 16
    await reader.readexactly(int(head[length : head.index(b"\r\n", length)]))


async def flood(place: Place) -> None:
    """Send without end on one connection, until cancelled."""
    reader, writer = await place.connect()
    try:
        while True:
            writer.write(place.append("flood") * PIPELINED)
            for _ in range(PIPELINED):
                await answer(reader, may_be_refused=True)
    finally:
        writer.transport.abort()


async def probe(place: Place, requests: int) -> dict[str, list[float]]:
    """Return what single requests took, in ms, by their kind."""
    reader, writer = await place.connect()
    took: dict[str, list[float]] = {}
    for name, data in (("append", place.append("probe")), ("whoami", place.whoami("probe"))):
        took[name] = []
        for _ in range(requests):
            begun = time.perf_counter()
            writer.write(data)
            await answer(reader)
            took[name].append(1000 * (time.perf_counter() - begun))
    writer.close()
    return took


async def probed(place: Place, requests: int) -> dict[str, list[float]]:
    """Return what `probe` finds in a process of its own."""
    command = [sys.executable, "-m", "benches.http.bench_turns", "--probe", place.url, place.tokens["probe"]]
    process = await asyncio.create_subprocess_exec(*command, str(requests), stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    found: dict[str, list[float]] = json.loads(out)
    return found


async def measured(
    here: Place, elsewhere: Place, *, rounds: int, requests: int, limit: int
) -> dict[str, float]:
    """Return percentiles in ms by what was asked, and where the flood was; the places alternate."""
    all_took: dict[str, list[float]] = {}
    no_limit: dict[str, int] = {}
    limited = {"requests_per_s": limit}
    for _ in range(rounds):
        for name, flooded, limits in (
            ("calm", None, no_limit),
            ("elsewhere", elsewhere, no_limit),
            ("here", here, no_limit),
            ("limited elsewhere", elsewhere, limited),
            ("limited here", here, limited),
        ):
            floods = []
            if flooded is not None:
                flooded.limit(**limits)
                floods = [asyncio.create_task(flood(flooded)) for _ in range(CONNECTIONS)]
                await asyncio.sleep(LIMITED_SETTLE_S if limits else SETTLE_S)
            for kind, took in (await probed(here, requests)).items():
                all_took.setdefault(f"{kind} {name}", []).extend(took)
            ended = [task.exception() for task in floods if task.done()]
            assert not ended, ended
            for task in floods:
                task.cancel()
            await asyncio.gather(*floods, return_exceptions=True)
    return {
        f"{name} p{share}": percentile(took, share / 100)
        for name, took in all_took.items()
        for share in (50, 99)
    }


def run(*, rounds: int = ROUNDS, requests: int = 300, limit: int = LIMIT) -> dict[str, float]:
    """Return the figures, in ms."""
    settings = {"access": "tokens"}
    with (
        tempfile.TemporaryDirectory() as first,
        tempfile.TemporaryDirectory() as second,
        LocalCluster(Path(first), nodes=1, shards=1, settings=settings) as here,
        LocalCluster(Path(second), nodes=1, shards=1, settings=settings) as elsewhere,
    ):
        places = place_of(here), place_of(elsewhere)
        return asyncio.run(measured(*places, rounds=rounds, requests=requests, limit=limit))


def ratios(found: dict[str, float]) -> dict[str, float]:
    """Return how many times longer each took with the flood here than with it elsewhere, or than in calm."""
    return {
        f"{name} to {what}": took_ms / found[name.replace(replaced, f" {what} ")]
        for name, took_ms in found.items()
        for replaced, what in ((" here ", "elsewhere"), (" limited here ", "calm"))
        if replaced in name
    }


def main() -> None:
    """Print the figures, or those of a probe as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benches.http.bench_turns")
    parser.add_argument("--quick", action="store_true", help="run for a moment; the figures mean nothing")
    parser.add_argument("--limit", type=int, default=LIMIT, help="requests/s of a flood that has a limit")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each set-up")
    parser.add_argument("--probe", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.probe:
        url, token, requests = given.probe
        print(json.dumps(asyncio.run(probe(Place(url, {"probe": token}), int(requests)))))
        return
    quick = {"rounds": 1, "requests": 5} if given.quick else {"rounds": given.rounds}
    found = run(**quick, limit=given.limit)
    for name, took_ms in found.items():
        print(f"{name}: {took_ms:.2f} ms")
    for name, ratio in ratios(found).items():
        print(f"{name}: {ratio:.2f}")


if __name__ == "__main__":
    main()
