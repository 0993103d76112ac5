"""What the flush policy `interval` gains end to end, beside `commit`: ``python -m benches.log.bench_flush``.

One cluster of three nodes of two shards, one client, one disk. Each load of `common.loads` runs against a
topic of either policy by turns, in one run, and the last lines give the ratio of interval to commit. Records
are 1 KiB, twelve partitions, three replicas. `commit` answers after an fdatasync on a majority; `interval`
after a write on a majority. `--quick` is the same with tiny sizes, and measures nothing.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from benches.common import floors, leaders, loads, on_disk
from laminar.aio import Topic, connect
from laminar.testing.cluster import LocalCluster

NODES, PARTITIONS = 3, 12
SHARDS = leaders.shards_of(NODES)
POLICIES = ("commit", "interval")
# Of each figure: whether more is better.
MORE_IS_BETTER = {
    "produce": True,
    "in_flight": True,
    "post64": True,
    "post1": True,
    "p50": False,
    "p99": False,
}

Figures = dict[str, dict[str, list[float]]]


def main() -> int:
    """Run the loads by turns, print the figures and the ratios, and exit 0."""
    given = on_disk.parser("python -m benches.log.bench_flush", __doc__).parse_args()
    rounds, scale = (1, 0.01) if given.quick else (3, 1.0)
    uname = os.uname()
    print(
        f"{os.cpu_count()} CPUs, {uname.sysname} {uname.release}, Python {platform.python_version()},"
        f" uvloop {version('uvloop')}, {on_disk.filesystem(given.directory)}; load {os.getloadavg()[0]:.1f};"
        f" {NODES} nodes of {SHARDS} shards and the client on this machine; records of 1 KiB",
        flush=True,
    )
    with on_disk.folder(given.directory, "flush-") as folder:
        print(
            f"floor: {floors.disk_floor(folder, syncs=int(1000 * scale) + 20, blocks=int(200 * scale) + 4)}"
        )
        floors.run_loop(_measure(folder, rounds=rounds, scale=scale, quick=given.quick))
    return 0


async def _measure(folder: Path, *, rounds: int, scale: float, quick: bool) -> None:
    figures: Figures = defaultdict(lambda: defaultdict(list))
    settings = leaders.QUICK if quick else {}
    with LocalCluster(folder / "cluster", nodes=NODES, shards=SHARDS, settings=settings) as cluster:
        pids = [pid for member in cluster.members for pid in cluster.pids(member.number)]
        async with connect(cluster.urls) as client:
            topics = {
                policy: await client.create_topic(
                    policy, partitions=PARTITIONS, replicas=NODES, settings={"flush": policy}
                )
                for policy in POLICIES
            }
            for policy, topic in topics.items():
                print(f"{policy}: {await leaders.settled(client, topic)}", flush=True)
            for turn in range(rounds):
                for policy in POLICIES if turn % 2 == 0 else reversed(POLICIES):
                    for name, value in (await _loads(topics[policy], pids, scale)).items():
                        figures[name][policy].append(value)
                        print(f"round {turn + 1}: {name:10} {policy:9} {value:,.2f}", flush=True)
    gains: dict[str, float] = {}
    for name, found in figures.items():
        medians = {policy: statistics.median(found[policy]) for policy in POLICIES}
        gain = gains[name] = _gain(name, medians)
        print(
            f"{name:10} commit {medians['commit']:,.2f}  interval {medians['interval']:,.2f}  gain {gain:.2f}"
        )
    print("bench-flush:", *(f"{name}={gain:.2f}" for name, gain in gains.items()))


def _gain(name: str, medians: Mapping[str, float]) -> float:
    """How many times better `interval` is."""
    ratio = medians["interval"] / medians["commit"]
    return ratio if MORE_IS_BETTER[name] else 1 / ratio


async def _loads(topic: Topic[bytes], pids: list[int], scale: float) -> dict[str, float]:
    produced = await loads.produce(topic, pids, records=int(200_000 * scale), rounds=1)
    in_flight = await loads.in_flight(topic, records=int(40_000 * scale) + 256, rounds=1)
    p50, p99 = await loads.one_at_a_time(topic, records=int(1000 * scale) + 20, rounds=1)
    targets = await leaders.posts_to(topic)
    seconds = max(0.2, 2.0 * scale)
    post1 = await loads.posts(targets, connections=1, seconds=seconds, rounds=1)
    post64 = await loads.posts(targets, connections=64, seconds=seconds, rounds=1)
    return {
        "produce": produced.records_per_s,
        "in_flight": in_flight,
        "p50": p50,
        "p99": p99,
        "post1": post1,
        "post64": post64,
    }


if __name__ == "__main__":
    sys.exit(main())
