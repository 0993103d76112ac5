"""Transactions under faults: drivers of sinks crash, stand still and come back, while nodes fail.

Plain writers append to the same partitions. Checked at the end: each committed batch is there once, whole in
every partition, one number behind the other; no older epoch came through; offsets are dense and ends lie
between commits; each key's records are in order. Then all clocks go on by some hours, and nothing that was
staged and never committed may be left.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

import laminar
from laminar.node.api.transactions.abandoned_stages import OPEN_AGE_MS
from tests.checkers import History, Violation, check_transactions
from tests.cluster.faults.cluster import FaultyCluster, faulty_cluster
from tests.cluster.faults.drivers import Drivers
from tests.cluster.faults.nemesis import HOUR_MS, Nemesis, get_text
from tests.cluster.faults.profiles import CONVERGE_S, PARTITIONS, PROFILES, SETTINGS, settle
from tests.cluster.faults.report import DUPLICATED, LOST, REORDERED, percentile, tell, violations_of
from tests.cluster.faults.workload import Workload

TOPIC = "ledger"
# Where sinks are kept: it has replicas too, which the faults must leave able to recover.
COORDINATORS = "_transactions"
SINKS = 4
# Behind the age limit of stages, however far the clocks were stepped before.
LATER_MS = OPEN_AGE_MS + 3 * HOUR_MS


async def run_transactions(
    profile: str,
    folder: Path,
    *,
    minutes: float,
    nodes: int,
    shards: int,
    seed: int,
    appends_per_s: float,
    only: Sequence[str] = (),
) -> bool:
    """One run from an empty cluster to its report; whether nothing was wrong."""
    rng = random.Random(seed)
    with faulty_cluster(folder / "cluster", nodes=nodes, shards=shards, settings=SETTINGS) as cluster:
        async with laminar.aio.connect(cluster.urls) as client:
            await client.create_topic(TOPIC, partitions=PARTITIONS, replicas=3)
        history = History(folder / "history.jsonl")
        workload = Workload(
            history, cluster.urls, [TOPIC], partitions=PARTITIONS, appends_per_s=appends_per_s, seed=seed
        )
        nemesis = Nemesis(cluster, workload, history, [TOPIC], placed=[TOPIC, COORDINATORS], rng=rng)
        if only:
            nemesis.faults = {fault: nemesis.faults[fault] for fault in only}
        drivers = Drivers(cluster.urls, TOPIC, partitions=PARTITIONS, sinks=SINKS, rng=rng)
        wrong: list[Violation] = []
        failure, left = "", ""
        try:
            await workload.start()
            drivers.start()
            await workload.more(200)
            await PROFILES[profile](nemesis, minutes * 60)
            workload.check_alive()
            drivers.check_alive()
            await asyncio.to_thread(cluster.wait_ready, timeout=CONVERGE_S)
            await drivers.finish(timeout_s=CONVERGE_S)
            wrong += await settle(cluster, workload, [TOPIC, COORDINATORS])
            await drivers.leave_staged()
            left, violations = await _left_behind(cluster)
            wrong += violations
        except Exception:  # noqa: BLE001 - whatever it is: the history up to here is told and kept
            failure = traceback.format_exc()
        finally:
            await workload.close()
            await drivers.close(history)
            history.close()
    _keep(folder, drivers)
    found = [] if failure else _check(history, drivers)
    wrong += found + violations_of(history, followers=() if failure else workload.followers)
    sound = tell(folder, history, wrong, nemesis.happened, failure)
    for line in [*_told(drivers, found), left]:
        print(line, flush=True)
    return sound


def _check(history: History, drivers: Drivers) -> list[Violation]:
    read: dict[int, list[tuple[int, str]]] = {partition: [] for partition in range(PARTITIONS)}
    ends = []
    for each in history.operations:
        if each.kind == "final":
            read[each.partition] += each.values
        elif each.kind == "read" and each.end_offset is not None:
            ends.append((each.partition, each.end_offset))
    return check_transactions(drivers.attempts, drivers.begun, read, ends=ends, committed=drivers.committed)


def _keep(folder: Path, drivers: Drivers) -> None:
    with (folder / "attempts.jsonl").open("wb") as kept:
        for each in [*drivers.attempts, *drivers.begun]:
            kept.write(msgspec.json.encode(each) + b"\n")


async def _left_behind(cluster: FaultyCluster) -> tuple[str, list[Violation]]:
    """A line for the report; and what is staged still when its time is over."""
    before = await asyncio.to_thread(_staged, cluster)
    for number in range(cluster.nodes):
        cluster.set_clock(number, LATER_MS)
    deadline = time.monotonic() + CONVERGE_S
    left = before
    while left and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
        left = await asyncio.to_thread(_staged, cluster)
    told = f"staged and never committed: {sum(before.values())} batches, left after their time: "
    return told + str(sum(left.values())), [
        Violation("left_behind", f"{count} staged batches in partition {partition}", partition)
        for partition, count in sorted(left.items())
    ]


def _staged(cluster: FaultyCluster) -> Mapping[int, int]:
    """Open batches by partition, as its leader counts them; -1 for one without a leader that answers."""
    found = dict.fromkeys(range(PARTITIONS), -1)
    where = rf'\{{topic="{TOPIC}",partition="(\d+)"\}}'
    query = f"detail=partitions&topic={TOPIC}"
    for url in cluster.urls:
        text = get_text(f"{url}/metrics?{query}") or ""
        led = set(re.findall(rf"^laminar_partition_leader{where} 1$", text, re.MULTILINE))
        pattern = rf"^laminar_partition_staged_batches{where} ([0-9]+)$"
        for partition, count in re.findall(pattern, text, re.MULTILINE):
            if partition in led:
                found[int(partition)] = int(count)
    return {partition: count for partition, count in found.items() if count}


def _told(drivers: Drivers, found: Sequence[Violation]) -> list[str]:
    kinds = [str(each.kind) for each in found]
    attempts = drivers.attempts
    outcomes = [each.outcome for each in attempts]
    lines = [
        f"transactions {len(attempts):,} over {SINKS} sinks: applied {outcomes.count('applied'):,}, refused "
        f"or given up {outcomes.count('refused'):,}, unknown {outcomes.count('unknown'):,}; epochs "
        f"{len(drivers.begun):,}; last batches {', '.join(map(str, drivers.committed.values()))}",
        "  " + ", ".join(f"{what} {count:,}" for what, count in sorted(drivers.happened.items())),
        f"of transactions lost {sum(map(kinds.count, LOST))}, doubled {sum(map(kinds.count, DUPLICATED))}, "
        f"reordered {sum(map(kinds.count, REORDERED))}, torn {kinds.count('torn')}, of an older epoch "
        f"{kinds.count('fenced')}, seen and refused {kinds.count('aborted')}, ends inside of one "
        f"{kinds.count('inside')}",
    ]
    if took := sorted(drivers.took_ms):
        lines.append(
            f"commit p50 {percentile(took, 50):.0f} ms, p99 {percentile(took, 99):.0f} ms, "
            f"most {took[-1]:.0f} ms"
        )
    return lines
