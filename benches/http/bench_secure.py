"""What TLS and tokens cost: the loads of `make bench` on a cluster with both, beside one with neither.

    python -m benches.http.bench_secure

Two clusters of three nodes, each with two shards, take turns, load by load: batched produce by the client
library, and POSTs of one record over one connection and over 64. TLS is between clients and nodes, and
between nodes. The last lines are the ratios, secure to plain: the median of the rounds' ratios, with the
lowest and the highest. The client is on the same machine, and what TLS costs it is in them. `--quick` is the
same with tiny sizes on clusters of one node, and measures nothing.
"""

from __future__ import annotations

import ssl
import statistics
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from benches.common import floors, loads, on_disk
from laminar.aio import Topic, connect
from laminar.testing.cluster import LocalCluster
from tests.cluster.tls_cluster import TlsCluster

NODES, SHARDS, PARTITIONS = 3, 2, 12
TARGETS: Final = {
    "batched produce, records/s": 0.85,
    "POST/s, 1 connection": 0.9,
    "POST/s, 64 connections": 0.9,
}
"""Least ratios, secure to plain."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    rounds: int = 5
    produced: int = 200_000
    post_s: float = 2.0
    nodes: int = NODES
    shards: int = SHARDS


QUICK = Sizes(rounds=1, produced=500, post_s=0.1, nodes=1, shards=1)


class SecureCluster(TlsCluster):
    """A cluster with TLS that asks for tokens."""

    def client(self, **arguments: Any) -> httpx.Client:
        """Return a client that shows the first token, once there is one."""
        token = self.admin_token
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return super().client(headers=headers, **arguments)


@dataclass(frozen=True, slots=True)
class Side:
    """A topic of one of the clusters, and how it is asked for."""

    topic: Topic[bytes]
    pids: list[int]
    targets: list[tuple[str, int, bytes]]
    tls: ssl.SSLContext | None

    async def produce(self, sizes: Sizes) -> float:
        """Return records/s of batched produce."""
        return (await loads.produce(self.topic, self.pids, records=sizes.produced, rounds=1)).records_per_s

    async def post(self, sizes: Sizes, connections: int) -> float:
        """Return POST/s of one record each, at the partitions' leaders."""
        return await loads.posts(
            self.targets, connections=connections, seconds=sizes.post_s, rounds=1, tls=self.tls
        )


async def side_of(
    cluster: LocalCluster, stack: AsyncExitStack, sizes: Sizes, *, ca: str = "", token: str = ""
) -> Side:
    """Make the topic; `ca` and `token` are for a cluster that is secure."""
    client = await stack.enter_async_context(connect(cluster.urls, ca=ca or None, token=token or None))
    topic = await client.create_topic("load", partitions=PARTITIONS, replicas=sizes.nodes)
    targets = []
    for row in await topic.partitions():
        url = urlsplit(row.raw["leader"]["url"])
        assert url.hostname is not None and url.port is not None, row.raw
        targets.append((url.hostname, url.port, loads.post_request("load", row.partition, token=token)))
    pids = [pid for member in cluster.members for pid in cluster.pids(member.number)]
    return Side(topic, pids, targets, ssl.create_default_context(cafile=ca) if ca else None)


async def measured(plain: LocalCluster, secure: SecureCluster, sizes: Sizes) -> dict[str, list[list[float]]]:
    """Return by load the figures of plain and of secure, round by round."""
    found: dict[str, list[list[float]]] = {name: [[], []] for name in TARGETS}
    async with AsyncExitStack() as stack:
        sides = (
            await side_of(plain, stack, sizes),
            await side_of(secure, stack, sizes, ca=str(secure.authority.pem), token=secure.admin_token),
        )
        runs: dict[str, Callable[[Side], Awaitable[float]]] = dict(
            zip(
                TARGETS,
                (
                    lambda side: side.produce(sizes),
                    lambda side: side.post(sizes, 1),
                    lambda side: side.post(sizes, 64),
                ),
                strict=True,
            )
        )
        for number in range(sizes.rounds):
            for name, load in runs.items():
                for which in (0, 1) if number % 2 == 0 else (1, 0):
                    found[name][which].append(await load(sides[which]))
    return found


def run(directory: Path, sizes: Sizes) -> dict[str, list[list[float]]]:
    """Start both clusters in a directory, and return what `measured` found."""
    with (
        LocalCluster(directory / "plain", nodes=sizes.nodes, shards=sizes.shards) as plain,
        SecureCluster(
            directory / "secure", nodes=sizes.nodes, shards=sizes.shards, settings={"access": "tokens"}
        ) as secure,
    ):
        found: dict[str, list[list[float]]] = {}

        async def measure() -> None:
            found.update(await measured(plain, secure, sizes))

        floors.run_loop(measure())
        return found


def line(name: str, plain: list[float], secure: list[float]) -> str:
    """Return the line of a load: both rates, their ratio, and whether that is enough."""
    ratios = [one / other for one, other in zip(secure, plain, strict=True)]
    ratio, least = statistics.median(ratios), TARGETS[name]
    verdict = "met" if ratio >= least else "MISSED"
    rates = f"{statistics.median(secure):,.0f} with TLS and tokens, {statistics.median(plain):,.0f} without"
    return (
        f"{name}: {rates}: {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), target {least:g}: {verdict}"
    )


def main() -> int:
    """Run, print, and end 0; a missed target is said, not punished."""
    given = on_disk.parser("python -m benches.http.bench_secure", __doc__).parse_args()
    on_disk.filesystem(given.directory)
    if given.quick:
        print("--quick: these sizes measure nothing")
    with on_disk.folder(given.directory, "secure-") as directory:
        for name, (plain, secure) in run(directory, QUICK if given.quick else Sizes()).items():
            print(line(name, plain, secure), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
