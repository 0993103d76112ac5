"""Runs of faults over a cluster under load, by name: which faults, in what order, how long."""

from __future__ import annotations

import asyncio
import random
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

import laminar
from laminar.testing.replicas import committed_digests
from tests.checkers import History, Violation, check_replicas
from tests.cluster.faults.cluster import FaultyCluster, faulty_cluster
from tests.cluster.faults.nemesis import Nemesis, stands_still
from tests.cluster.faults.report import tell, violations_of
from tests.cluster.faults.workload import Workload

PARTITIONS = 6
TOPICS = {"synced": "commit", "written": "interval"}
# It ends what hangs, as all such times here: whatever else the machine does, it is done sooner.
CONVERGE_S = 180.0
# A topic whose route was changed for half an hour has hundreds of partitions, each asked on three nodes.
DIGESTS_S = 300.0
# Longer than any fault keeps a node away: only of one whose directory was wiped are replicas made anew.
SETTINGS = {"replace_after_ms": 15_000}

Profile = Callable[[Nemesis, float], Awaitable[None]]


async def mixed(nemesis: Nemesis, seconds: float) -> None:
    """Any fault after the other, with short calms; now and then two at once."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await nemesis.any()
        await nemesis.calm()


async def each(nemesis: Nemesis, seconds: float) -> None:
    """Every fault once, however long that takes."""
    for fault in nemesis.faults.values():
        await fault()


async def kills(nemesis: Nemesis, seconds: float) -> None:
    """A leader killed, again and again: how long until its partitions take writes."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await nemesis.kill_leader()
        await nemesis.calm()


async def pauses(nemesis: Nemesis, seconds: float) -> None:
    """A leader stopped for 10 s, again and again."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await nemesis.pause_leader()
        await nemesis.calm()


async def nsq(nemesis: Nemesis, seconds: float) -> None:
    """Youzan's test of NSQ: 30 s calm, random halves cut for 60 s, and so on; heal, 60 s, drain all.

    Theirs goes on for 360 s, which is four cuts: 6 minutes.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await asyncio.sleep(min(30.0, max(0.0, end - time.monotonic())))
        if time.monotonic() < end:
            await nemesis.cut_halves(last_s=60.0)
    await asyncio.sleep(60.0)


PROFILES: dict[str, Profile] = {"mixed": mixed, "each": each, "kills": kills, "pauses": pauses, "nsq": nsq}


async def run_profile(
    name: str,
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
    with faulty_cluster(folder / "cluster", nodes=nodes, shards=shards, settings=SETTINGS) as cluster:
        if cluster.wires is None:
            print("no network namespaces on this machine: no cuts", flush=True)
            assert name != "nsq", "this profile needs them"
        await _create(cluster)
        history = History(folder / "history.jsonl")
        workload = Workload(
            history,
            cluster.urls,
            list(TOPICS),
            partitions=PARTITIONS,
            appends_per_s=appends_per_s,
            seed=seed,
        )
        nemesis = Nemesis(cluster, workload, history, list(TOPICS), rng=random.Random(seed))
        if only:
            nemesis.faults = {fault: nemesis.faults[fault] for fault in only}
        wrong: list[Violation] = []
        failure = ""
        try:
            await workload.start()
            await workload.more(200)
            await PROFILES[name](nemesis, minutes * 60)
            workload.check_alive()
            wrong += await settle(cluster, workload)
        except Exception:  # noqa: BLE001 - whatever it is: the history up to here is told and kept
            failure = traceback.format_exc()
        finally:
            await workload.close()
            history.close()
        wrong += violations_of(history, followers=workload.followers if not failure else ())
    return tell(folder, history, wrong, nemesis.happened, failure)


async def _create(cluster: FaultyCluster) -> None:
    async with laminar.aio.connect(cluster.urls) as client:
        for topic, flush in TOPICS.items():
            await client.create_topic(topic, partitions=PARTITIONS, replicas=3, settings={"flush": flush})


async def settle(
    cluster: FaultyCluster, workload: Workload, topics: Iterable[str] = tuple(TOPICS)
) -> list[Violation]:
    """All nodes run and all wires are whole: everything is answered, read, and equal on all replicas."""
    await asyncio.to_thread(cluster.wait_ready, timeout=CONVERGE_S)
    for number in range(cluster.nodes):
        # On a machine that is slow a log may stand still only after its fault has looked for that.
        if await asyncio.to_thread(stands_still, cluster, number):
            await asyncio.to_thread(cluster.kill, number)
            await asyncio.to_thread(cluster.restart, number, timeout=CONVERGE_S)
    await workload.finish_writing()
    await workload.drain(timeout_s=CONVERGE_S)
    wrong = []
    for topic in topics:
        digests = await asyncio.to_thread(committed_digests, cluster.urls, topic, timeout=DIGESTS_S)
        wrong += check_replicas(digests)
    return wrong
