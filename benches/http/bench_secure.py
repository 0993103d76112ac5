"""What TLS and tokens cost: the loads of `make bench` on a cluster with both, beside one with neither.

    python -m benches.http.bench_secure [--apart] [--rounds 5]

Two clusters of three nodes, with as many shards together as the machine has CPUs (`--shards` is another
number for each node), take turns, load by load, when the leaders stay where they are: batched produce by the
client library, and POSTs of one record over one connection and over 64. TLS is between clients and nodes, and
between nodes. `--apart` has two clusters more, one with tokens alone and one with TLS alone.

Each line has the ratio of the rates, secure to plain: the median of the rounds' ratios, with the lowest and
the highest. Behind it is the CPU time of all nodes and the client for a record, which other work on the
machine changes less than a rate, and its ratio, plain to secure. The *floor* is the ratio that would be left
if TLS cost no more than between two bare ends (`benches.common.bare_tls`), and tokens nothing.

The client is on the same machine, and what TLS costs it is in all of them. `--quick` is the same with tiny
sizes on clusters of one node, and measures nothing.
"""

from __future__ import annotations

import os
import ssl
import statistics
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

from benches.common import bare_tls, floors, leaders, loads, on_disk
from benches.common.bare_tls import Bare
from benches.common.echo import RECEIPT
from laminar.aio import Topic, connect
from laminar.node.host.certificates import load
from laminar.testing.cluster import LocalCluster
from tests.certificates import Authority
from tests.cluster.tls_cluster import SECRET, TlsCluster

NODES, PARTITIONS = 3, 12
PLAIN, TOKENS, TLS, BOTH = "neither", "tokens", "TLS", "TLS and tokens"
PRODUCE, POST_1, POST_64 = "batched produce, records/s", "POST/s, 1 connection", "POST/s, 64 connections"
TARGETS: Final = {PRODUCE: 0.85, POST_1: 0.9, POST_64: 0.9}
"""Least ratios, secure to plain."""
BULK_BYTES: Final = 512 << 10
"""What a producer sends at once."""


class Measured(NamedTuple):
    """One round of a load."""

    per_s: float
    cpu_us: float
    """CPU time of all nodes and of this process, for each record."""


Found = dict[str, dict[str, list[Measured]]]
"""By load and by side what was measured, round by round."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    rounds: int = 5
    produced: int = 200_000
    post_s: float = 2.0
    nodes: int = NODES
    shards: int = leaders.shards_of(NODES)
    exchanges: int = 10_000
    """Of the bare ends, small ones; large ones are a hundredth."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the nodes."""


QUICK = Sizes(rounds=1, produced=500, post_s=0.1, nodes=1, shards=1, exchanges=200, settings=leaders.QUICK)


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

    async def produce(self, sizes: Sizes) -> Measured:
        """Measure batched produce."""
        done = await loads.produce(self.topic, self.pids, records=sizes.produced, rounds=1)
        return Measured(done.records_per_s, done.cpu_us_per_record)

    async def post(self, sizes: Sizes, connections: int) -> Measured:
        """Measure POSTs of one record each, at the partitions' leaders."""
        pids = [*self.pids, os.getpid()]
        done = await loads.posted(
            self.targets, pids, connections=connections, seconds=sizes.post_s, rounds=1, tls=self.tls
        )
        return Measured(done.per_s, done.cpu_us)


RUNS: Final[Mapping[str, Callable[[Side, Sizes], Awaitable[Measured]]]] = {
    PRODUCE: lambda side, sizes: side.produce(sizes),
    POST_1: lambda side, sizes: side.post(sizes, 1),
    POST_64: lambda side, sizes: side.post(sizes, 64),
}


def cluster_of(name: str, directory: Path, sizes: Sizes) -> LocalCluster:
    """Return the cluster of a side, not started."""
    kind = SecureCluster if name in (TLS, BOTH) else LocalCluster
    settings = {"access": "tokens", "secret": SECRET} if name in (TOKENS, BOTH) else {}
    settings |= sizes.settings
    return kind(directory / name.replace(" ", "-"), nodes=sizes.nodes, shards=sizes.shards, settings=settings)


async def side_of(name: str, cluster: LocalCluster, stack: AsyncExitStack, sizes: Sizes) -> Side:
    """Make the topic of a side, and wait until its leaders stay."""
    ca = str(cluster.authority.pem) if isinstance(cluster, SecureCluster) else None
    token = cluster.admin_token
    client = await stack.enter_async_context(connect(cluster.urls, ca=ca, token=token or None))
    topic = await client.create_topic("load", partitions=PARTITIONS, replicas=sizes.nodes)
    print(f"{name}: {await leaders.settled(client, topic)}", flush=True)
    targets = await leaders.posts_to(topic, token=token)
    pids = [pid for member in cluster.members for pid in cluster.pids(member.number)]
    return Side(topic, pids, targets, ssl.create_default_context(cafile=ca) if ca else None)


async def measured(clusters: Mapping[str, LocalCluster], sizes: Sizes) -> Found:
    """Return what was measured of all sides, which take turns."""
    found: Found = {load: {name: [] for name in clusters} for load in RUNS}
    async with AsyncExitStack() as stack:
        sides = {name: await side_of(name, cluster, stack, sizes) for name, cluster in clusters.items()}
        for number in range(sizes.rounds):
            for load_name, run_load in RUNS.items():
                for name in list(sides) if number % 2 == 0 else reversed(sides):
                    found[load_name][name].append(await run_load(sides[name], sizes))
    return found


async def added_by_tls(directory: Path, sizes: Sizes) -> dict[str, float]:
    """Return by load the CPU time (us) that TLS adds to a record at least, and print what it is made of.

    A record of a batch is sealed and opened on its way to the leader, and once for each other node. A POST
    has a request and an answer; one that is alone has an append and its answer to each other node, too. Of
    64 several share these, so they are left out.
    """
    authority = Authority(directory / "ca")
    server = load(authority.files(authority.node("bare", "127.0.0.1"))).http
    request = loads.post_request("load", 0, token="t" * 64)

    async def bare(name: str, data: bytes, connections: int, count: int) -> Bare:
        found = await bare_tls.exchange(
            server,
            authority.context(),
            request=data,
            answer=RECEIPT,
            connections=connections,
            count=max(connections, count),
            rounds=sizes.rounds,
        )
        print(
            f"bare ends, {name}: {found.plain_us:.1f} us of CPU, {found.tls_us:.1f} with TLS:"
            f" {found.plain_us / found.tls_us:.2f}",
            flush=True,
        )
        return found

    one = await bare(f"{len(request)} bytes and a receipt, 1 connection", request, 1, sizes.exchanges)
    many = await bare(f"{len(request)} bytes and a receipt, 64 connections", request, 64, sizes.exchanges)
    bulk = await bare(
        f"{BULK_BYTES >> 10} KiB and a receipt", os.urandom(BULK_BYTES), 1, sizes.exchanges // 100
    )
    return {
        PRODUCE: sizes.nodes * bulk.added_us / (BULK_BYTES // loads.VALUE_BYTES),
        POST_1: sizes.nodes * one.added_us,
        POST_64: many.added_us,
    }


def run(
    directory: Path, sizes: Sizes, names: Sequence[str] = (PLAIN, BOTH)
) -> tuple[Found, dict[str, float]]:
    """Start the clusters in a directory; return what `measured` and `added_by_tls` found."""
    found: Found = {}
    added: dict[str, float] = {}

    async def measure(clusters: Mapping[str, LocalCluster]) -> None:
        found.update(await measured(clusters, sizes))

    async def measure_bare() -> None:
        added.update(await added_by_tls(directory, sizes))

    floors.run_loop(measure_bare())
    with ExitStack() as stack:
        clusters = {name: stack.enter_context(cluster_of(name, directory, sizes)) for name in names}
        floors.run_loop(measure(clusters))
    return found, added


def line(
    load_name: str, name: str, plain: Sequence[Measured], side: Sequence[Measured], added_us: float
) -> str:
    """Return the line of a load and a side: rates, CPU times and their ratios, and whether that is enough."""
    ratios = [one.per_s / other.per_s for one, other in zip(side, plain, strict=True)]
    ratio, least = statistics.median(ratios), TARGETS[load_name]
    verdict = "" if name != BOTH else f", target {least:g}: {'met' if ratio >= least else 'MISSED'}"
    rates = " and ".join(
        f"{statistics.median(each.per_s for each in rounds):,.0f}" for rounds in (side, plain)
    )
    here_us, plain_us = (statistics.median(each.cpu_us for each in rounds) for rounds in (side, plain))
    cpu = statistics.median(
        other.cpu_us / one.cpu_us for one, other in zip(side, plain, strict=True) if one.cpu_us
    )
    floor = "" if name == TOKENS else f", floor {plain_us / (plain_us + added_us):.2f}"
    return (
        f"{load_name}: {rates} with {name} and with neither: {ratio:.2f} ({min(ratios):.2f} to"
        f" {max(ratios):.2f}){verdict}; CPU {here_us:.1f} and {plain_us:.1f} us: {cpu:.2f}{floor}"
    )


def main() -> int:
    """Run, print, and end 0; a missed target is said, not punished."""
    parser = on_disk.parser("python -m benches.http.bench_secure", __doc__)
    parser.add_argument("--apart", action="store_true", help="with tokens alone and with TLS alone, too")
    parser.add_argument("--rounds", type=int, help="of each load on each side")
    parser.add_argument("--shards", type=int, help="of each node")
    given = parser.parse_args()
    on_disk.filesystem(given.directory)
    sizes = QUICK if given.quick else Sizes()
    if given.quick:
        print("--quick: these sizes measure nothing")
    if given.rounds is not None:
        sizes = replace(sizes, rounds=given.rounds)
    if given.shards is not None:
        sizes = replace(sizes, shards=given.shards)
    names = (PLAIN, TOKENS, TLS, BOTH) if given.apart else (PLAIN, BOTH)
    with on_disk.folder(given.directory, "secure-") as directory:
        found, added = run(directory, sizes, names)
        for load_name, sides in found.items():
            for name in names[1:]:
                print(line(load_name, name, sides[PLAIN], sides[name], added[load_name]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
