"""Every figure of the targets beside its floor, both sides measured in one run: ``python -m benches``.

Three nodes and the client share this machine, its loopback and one disk. The nodes have as many shards
together as the machine has CPUs, but one each at least; `--shards` is another number for each. The order is:
the floors, a cluster under its loads, leaders killed, clusters started, the floors again. Loads begin when
the leaders stay where they are. What is measured is in `loads` and `outages`, beside what in `floors`; this
module only runs them and prints. `--quick` is the same with tiny sizes: it shows that everything runs and
measures nothing.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benches.common import floors, leaders, loads, on_disk, outages, usage
from benches.common.targets import TARGETS, last_line
from benches.log import bench_batch
from laminar.aio import Client, Topic, connect
from laminar.testing.cluster import LocalCluster

NODES, PARTITIONS = 3, 12
# The loads leave no CPU unused, so what others take is missing; writing back takes the kernel up to a tenth.
MOST_ELSEWHERE = 0.15


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    rounds: int = 3
    floor_syncs: int = 2000
    floor_blocks: int = 600
    # How often the disk is looked at until it is quiet.
    floor_looks: int = 3
    produced: int = 200_000
    in_flight: int = 40_000
    single: int = 1000
    post_s: float = 2.0
    kills: int = 7
    starts: int = 3
    codec_rounds: int = 5


QUICK = Sizes(
    rounds=1,
    floor_syncs=50,
    floor_blocks=6,
    floor_looks=1,
    produced=2_000,
    in_flight=1_024,
    single=20,
    post_s=0.2,
    kills=1,
    starts=1,
    codec_rounds=1,
)


class Report:
    """Prints each figure as it is found, and keeps what the last line needs."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self.missed: list[str] = []

    def say(self, text: str) -> None:
        print(text, flush=True)

    def row(self, name: str, value: float, beside: str = "") -> None:
        """A figure of the targets."""
        target = TARGETS[name]
        if "MISSED" in target.verdict(value):
            self.missed.append(target.title)
        self.say(target.line(value, beside))


def main() -> int:
    """Run everything, print, and end 0; a missed target is said, not punished."""
    parser = on_disk.parser("python -m benches", __doc__)
    parser.add_argument("--shards", type=int, default=leaders.shards_of(NODES), help="of each node")
    given = parser.parse_args()
    kind = on_disk.filesystem(given.directory)
    with on_disk.folder(given.directory, "run-") as folder:
        run(folder, kind, QUICK if given.quick else Sizes(), shards=given.shards, quick=given.quick)
    return 0


def run(folder: Path, filesystem: str, sizes: Sizes, *, shards: int, quick: bool) -> None:
    """All measurements, in order; the last line printed is the summary."""
    report = Report()
    began = time.monotonic()
    uname = os.uname()
    report.say(
        f"{os.cpu_count()} CPUs, {uname.sysname} {uname.release}, Python {platform.python_version()},"
        f" uvloop {version('uvloop')}, {filesystem}; {NODES} nodes, {shards} shards each, and the client on"
        f" this machine; records of 1 KiB, {PARTITIONS} partitions, {NODES} replicas, synced before the"
        " acknowledgement"
    )
    if quick:
        report.say("--quick: these sizes measure nothing")
    before = _quiet_floor(folder, sizes, report)
    _codec(sizes, report)
    # Floors first: they fork, and a process with a cluster's threads and sockets should not.
    echo1, echo64 = _echo(sizes)
    copy = floors.socket_copy_mb_per_s(blocks=32 if quick else 512)
    settings = leaders.QUICK if quick else {}
    with LocalCluster(folder / "cluster", nodes=NODES, shards=shards, settings=settings) as cluster:
        floors.run_loop(_loads(cluster, sizes, report, before, (echo1, echo64), copy))
    shutil.rmtree(folder / "cluster")
    # What was written behind the journals would be under way for many seconds yet, and is nobody's floor.
    os.sync()
    with LocalCluster(folder / "kills", nodes=NODES, shards=shards) as cluster:
        floors.run_loop(_kills(cluster, sizes, report))
    floors.run_loop(_starts(folder, shards, sizes, report))
    os.sync()
    after = floors.disk_floor(folder, syncs=sizes.floor_syncs, blocks=sizes.floor_blocks)
    report.say(f"floor after:  {after}")
    if not after.quiet:
        report.say(f"NOT QUIET: fdatasync p99 over {floors.QUIET_P99_MS:g} ms at the end: run it again")
    report.say(f"missed: {', '.join(report.missed) or 'nothing'}; took {time.monotonic() - began:.0f} s")
    report.say(last_line(report.figures))


def _quiet_floor(folder: Path, sizes: Sizes, report: Report) -> floors.DiskFloor:
    """The disk's floor, looked at a few times for a moment when nobody else uses it."""
    for look in range(1, sizes.floor_looks + 1):
        found = floors.disk_floor(folder, syncs=sizes.floor_syncs, blocks=sizes.floor_blocks)
        report.say(f"floor before: {found}")
        if found.quiet:
            break
        limit = f"fdatasync p99 over {floors.QUIET_P99_MS:g} ms"
        report.say(f"NOT QUIET: {limit} (attempt {look} of {sizes.floor_looks})")
        if look < sizes.floor_looks:
            time.sleep(2)
    return found


def _codec(sizes: Sizes, report: Report) -> None:
    found = bench_batch.run(rounds=sizes.codec_rounds, calls=20)
    for way in ("encode", "decode", "arrow"):
        rival = "decode" if way == "arrow" else way
        shown = [
            f"{size} B {found[f'{way}_batch_{size}']:.0f} against {found[f'{rival}_rows_{size}']:.0f} ns"
            f" ({found[f'{way}_ratio_{size}']:.1f} x)"
            for size in (12, 100, 1024)
            if f"{way}_ratio_{size}" in found
        ]
        if shown:
            report.say(f"{way} a record, batch against struct rows: {', '.join(shown)}")


def _echo(sizes: Sizes) -> tuple[float, float]:
    """POST/s of the bare echo, over one connection and over 64."""
    found = []
    with floors.forked(floors.serve_echo) as port:
        targets = [("127.0.0.1", port, loads.post_request("load", 0))]

        async def measure(connections: int) -> None:
            found.append(
                await loads.posts(
                    targets, connections=connections, seconds=sizes.post_s / 2, rounds=sizes.rounds
                )
            )

        for connections in (1, 64):
            floors.run_loop(measure(connections))
    return found[0], found[1]


async def _loads(
    cluster: LocalCluster,
    sizes: Sizes,
    report: Report,
    floor: floors.DiskFloor,
    echo: tuple[float, float],
    copy_mb_per_s: float,
) -> None:
    nodes = [cluster.pids(member.number) for member in cluster.members]
    pids = [pid for node in nodes for pid in node]
    idle_mib = max(usage.pss_mib(node) for node in nodes)
    bystanders = usage.Bystanders(pids)
    async with connect(cluster.urls) as client:

        async def topic(name: str) -> Topic[bytes]:
            # Made when its load comes: the groups of an idle topic cost heartbeats.
            made = await client.create_topic(name, partitions=PARTITIONS, replicas=NODES)
            report.say(f"{name}: {await leaders.settled(client, made)}")
            return made

        batched = await topic("batched")
        produced = await loads.produce(batched, pids, records=sizes.produced, rounds=sizes.rounds)
        ratio = produced.mb_per_s / floor.mib_mb_per_s
        report.row(
            "produce",
            produced.records_per_s,
            f"{produced.mb_per_s:.0f} MB/s, {ratio:.3f} of the 1 MiB floor's {floor.mib_mb_per_s:,.0f}",
        )
        report.row("cpu", produced.cpu_us_per_record, f"over {produced.records:,} records of batched produce")
        report.figures |= {"produce": ratio, "cpu_us": produced.cpu_us_per_record}

        rate = await loads.in_flight(await topic("flight"), records=sizes.in_flight, rounds=sizes.rounds)
        ratio = rate / floor.syncs_per_s
        report.row(
            "inflight", rate, f"{ratio:.2f} of the 4 KiB fdatasync floor's {floor.syncs_per_s:,.0f} a second"
        )
        report.figures["inflight"] = ratio

        p50, p99 = await loads.one_at_a_time(await topic("single"), records=sizes.single, rounds=sizes.rounds)
        ratio = p50 / floor.sync_p50_ms
        report.row("single_p50", p50, f"{ratio:.1f} of an fdatasync's p50 of {floor.sync_p50_ms:.3f} ms")
        report.row("single_p99", p99)
        report.figures["single"] = ratio

        await _posts(client, await topic("post"), sizes, report, echo)

        written = produced.records + max(1, sizes.produced // 4)
        rate = await loads.fetch(batched, records=written, rounds=sizes.rounds)
        mb_per_s = rate * loads.VALUE_BYTES / 1e6
        ratio = mb_per_s / copy_mb_per_s
        report.row(
            "fetch", rate, f"{mb_per_s:,.0f} MB/s, {ratio:.3f} of a bare socket copy's {copy_mb_per_s:,.0f}"
        )
        report.figures["fetch"] = ratio
        memory_mib = max(usage.pss_mib(node) for node in nodes)
        report.row("memory", memory_mib, f"the largest of {NODES} nodes; idle {idle_mib:.0f} MiB")
        report.figures["rss_mib"] = memory_mib
        share = bystanders.share()
        report.say(f"others, and the kernel's own threads, used {share:.0%} of the CPUs during these loads")
        if share > MOST_ELSEWHERE:
            report.say(
                f"NOT QUIET: more than {MOST_ELSEWHERE:.0%}; every rate above is too low: run it again"
            )


async def _posts(
    client: Client, topic: Topic[bytes], sizes: Sizes, report: Report, echo: tuple[float, float]
) -> None:
    """One record a POST, to each partition's leader."""
    one = await _posted(client, topic, sizes, connections=1)
    report.say(
        f"single-record POST, 1 connection: {one:,.0f} POST/s,"
        f" {one / echo[0]:.3f} of the bare echo's {echo[0]:,.0f}"
    )
    many = await _posted(client, topic, sizes, connections=64)
    ratio = many / echo[1]
    report.row("post64", many, f"{ratio:.3f} of the bare uvloop + httptools echo's {echo[1]:,.0f}")
    report.figures["post64"] = ratio


async def _posted(client: Client, topic: Topic[bytes], sizes: Sizes, *, connections: int) -> float:
    """POST/s to the leaders; measured again if one moved meanwhile, as it may where no CPU is left."""
    for _ in range(3):
        targets = await leaders.posts_to(topic)
        try:
            return await loads.posts(
                targets, connections=connections, seconds=sizes.post_s, rounds=sizes.rounds
            )
        except loads.LeaderMoved as moved:
            print(f"a leader moved ({moved}): measured again")
            await leaders.settled(client, topic)
    raise SystemExit("leaders moved in each of 3 measurements of POST/s: the machine has no CPU left for it")


async def _kills(cluster: LocalCluster, sizes: Sizes, report: Report) -> None:
    async with connect(cluster.urls) as client:
        topic = await client.create_topic("kills", partitions=PARTITIONS, replicas=NODES)
        took = await outages.kills(cluster, topic, count=sizes.kills)
    p50 = statistics.median(took)
    report.row("kill_p50", p50, f"{len(took)} kills: {', '.join(f'{each:.2f}' for each in sorted(took))} s")
    report.row("kill_max", max(took))
    report.figures["kill_p50_s"] = p50


async def _starts(folder: Path, shards: int, sizes: Sizes, report: Report) -> None:
    took = [
        await outages.start(folder / f"start-{number}", nodes=NODES, shards=shards)
        for number in range(sizes.starts)
    ]
    found = statistics.median(took)
    report.row("start", found, f"{NODES} nodes and a topic: {', '.join(f'{each:.2f}' for each in took)} s")
    report.figures["start_s"] = found


if __name__ == "__main__":
    sys.exit(main())
