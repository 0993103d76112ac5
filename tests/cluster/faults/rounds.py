"""Rounds of one kind of fault, as many as wanted: each short, each from the state the last one left.

`power`: all nodes lose their unsynced bytes at once (the fault disk), under load; topics and placement are
looked at in each round. `interval`: one node of three does, with a topic that is synced now and then; the
next round begins when no replica is marked any more, so that no more than one ever is. `flips`: bits turn
over in the segments of one stopped node of three; everything must be served, reported and put right again.
`cuts`: the network of five nodes is cut while replicas of every partition move to nodes that are drawn anew,
and is whole again after seconds; all must arrive. At the end of each the whole history is checked, and
replicas are compared.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

import laminar
from laminar.testing.cluster import get_json
from laminar.testing.replicas import committed_digests
from tests.checkers import Fault, History, Violation, check_replicas
from tests.cluster.faults.cluster import FaultyCluster, faulty_cluster
from tests.cluster.faults.flips import Flip, flip_segments
from tests.cluster.faults.nemesis import Nemesis, metric
from tests.cluster.faults.report import tell, violations_of
from tests.cluster.faults.workload import Workload, now_us

TOPIC = "rounds"
PARTITIONS = 6
# So small that journals turn over and segments are begun within a few rounds; quick elections, short rounds.
SETTINGS: dict[str, str | int] = {
    "journal_file_bytes": 1 << 20,
    "segment_size_bytes": 1 << 20,
    "election_timeout_ms": 500,
    "heartbeat_ms": 100,
    "settle_ms": 1000,
}
PADDING_BYTES = 600
PATIENCE_S = 180.0
# Until moves are done that a cut delayed: a node that was cut off must settle first.
MOVED_S = 240.0
# A damaged node that does not answer a reader is asked so often again.
_TRIES = 100


class RoundFailed(Exception):
    """Something that a round insists on did not come about."""


class Rounds:
    """A cluster, its load, and what is counted over the rounds."""

    def __init__(
        self, cluster: FaultyCluster, workload: Workload, history: History, *, rng: random.Random
    ) -> None:
        self.cluster = cluster
        self.workload = workload
        self.rng = rng
        self.nemesis = Nemesis(cluster, workload, history, [TOPIC], rng=rng)
        self.counted: Counter[str] = Counter()
        self.happened = self.nemesis.happened
        self.placed: list[object] = []
        self._history = history

    @contextmanager
    def fault(self, what: str, numbers: list[int]) -> Iterator[None]:
        """Note a fault for as long as the block lasts."""
        self.happened[what] += 1
        fault = Fault(
            what=what, nodes=[self.cluster.members[number].name for number in numbers], start_us=now_us()
        )
        try:
            yield
        finally:
            fault.end_us = now_us()
            self._history.add(fault)

    async def ready(self) -> None:
        """All nodes serve."""
        await asyncio.to_thread(self.cluster.wait_ready, timeout=PATIENCE_S)

    async def placement(self) -> list[object]:
        """Where the topic's replicas are by each node; once all nodes have heard of the last change."""
        told: list[list[object]] = []

        async def agree() -> bool:
            told[:] = [await self._placement(url) for url in self.cluster.urls]
            return bool(told[0]) and all(each == told[0] for each in told)

        await self.until("nodes agree about placement", agree)
        return told[0]

    async def _placement(self, url: str) -> list[object]:
        listed = await asyncio.to_thread(get_json, f"{url}/v1/topics/{TOPIC}/partitions")
        rows = listed["partitions"] if listed is not None else []
        return [[(r["node"], r["reason"]) for r in each["replicas"]] for each in rows]

    async def metric(self, number: int, name: str) -> int | None:
        """A number of a node, over all its processes; None if its shard does not tell it now."""
        return await asyncio.to_thread(metric, self.cluster.urls[number], name)

    async def until(
        self, what: str, condition: Callable[[], Awaitable[bool]], *, timeout_s: float = PATIENCE_S
    ) -> None:
        """Wait for something, not for ever."""
        deadline = time.monotonic() + timeout_s
        while not await condition():
            if time.monotonic() >= deadline:
                raise RoundFailed(f"after {timeout_s:g} s still not: {what}")
            await asyncio.sleep(0.05)


async def power(rounds: Rounds, number: int) -> None:
    """All nodes at once, at any moment of the load."""
    rounds.placed = rounds.placed or await rounds.placement()
    await rounds.workload.more(100, timeout_s=PATIENCE_S)
    await asyncio.sleep(rounds.rng.uniform(0.0, 0.3))
    cluster = rounds.cluster
    everyone = range(cluster.nodes)
    with rounds.fault("power loss of all", list(everyone)):
        await asyncio.gather(*(asyncio.to_thread(cluster.kill, node) for node in everyone))
        cluster.writeback_chance = rounds.rng.choice([0.0, 0.3])
        for node in everyone:
            cluster.spawn(node)
        await rounds.ready()
    placed = await rounds.placement()
    if placed != rounds.placed:
        raise RoundFailed(f"placement was {rounds.placed} and is {placed}")
    rounds.counted["placements found as they were"] += 1


async def interval(rounds: Rounds, number: int) -> None:
    """One node; the next round waits until its replicas' votes count again."""
    await rounds.workload.more(100, timeout_s=PATIENCE_S)
    await asyncio.sleep(rounds.rng.uniform(0.0, 0.6))
    cluster = rounds.cluster
    victim = rounds.rng.randrange(cluster.nodes)
    log = cluster.members[victim].log
    told_bytes = log.stat().st_size
    with rounds.fault("power loss of one", [victim]):
        await asyncio.to_thread(cluster.kill, victim)
        cluster.writeback_chance = rounds.rng.choice([0.0, 0.3])
        cluster.spawn(victim)
        await rounds.ready()

    async def none_marked() -> bool:
        return await rounds.metric(victim, "laminar_storage_logs_recovering") == 0

    told = log.read_bytes()[told_bytes:]
    rounds.counted["replicas marked"] += told.count(b"power was lost with flush=interval")
    await rounds.until(f"no replica on node-{victim + 1} is marked", none_marked)


async def flips(rounds: Rounds, number: int) -> None:
    """One node after the other; the next waits until every bit is back.

    Of three stops of a node two are clean: after a kill its journal holds what was written last, and puts
    that right by itself, unseen.
    """
    await rounds.workload.more(100, timeout_s=PATIENCE_S)
    cluster = rounds.cluster
    victim = number % cluster.nodes
    member = cluster.members[victim]
    with rounds.fault("bit flips", [victim]):
        stop = cluster.kill if number // cluster.nodes % 3 == 2 else cluster.end
        await asyncio.to_thread(stop, victim)
        flipped = flip_segments(member.data, rounds.rng, most=PARTITIONS)
        told_bytes = member.log.stat().st_size
        cluster.spawn(victim)
        await rounds.ready()
        rounds.counted["bits flipped"] += len(flipped)
        await _served(rounds, victim)

        async def healed() -> bool:
            if all(map(Flip.is_whole, flipped)):
                return True
            # What the node does not hold whole it may have answered by way of another; this reads its own.
            for partition in range(PARTITIONS):
                path = f"{cluster.urls[victim]}/v1/topics/{TOPIC}/partitions/{partition}/digest"
                await asyncio.to_thread(get_json, path, headers={"Laminar-Local": "1"}, timeout=10.0)
            return all(map(Flip.is_whole, flipped))

        await rounds.until(f"put right: {[flip for flip in flipped if not flip.is_whole()]}", healed)
    rounds.counted["put right"] += len(flipped)
    with member.log.open("rb") as log:
        log.seek(told_bytes)
        rounds.counted["reports of damage in the node's log"] += len(re.findall(rb"damaged", log.read()))


async def _served(rounds: Rounds, victim: int) -> None:
    """The damaged node is asked for every record of the topic, and answers with all of them."""
    url = rounds.cluster.urls[victim]
    for partition in range(PARTITIONS):
        offset = tries = 0
        while True:
            path = f"{url}/v1/topics/{TOPIC}/partitions/{partition}/records?offset={offset}&fields=offset"
            told = await asyncio.to_thread(get_json, path, timeout=10.0)
            if told is None:
                # Behind, on its way up, or at a damaged batch that is being put right.
                tries += 1
                if tries > _TRIES:
                    break  # the followers' polls prove what is served in the end
                await asyncio.sleep(0.2)
                continue
            records = told["records"]
            if not records:
                break
            offset = int(records[-1]["offset"]) + 1
            rounds.counted["records served by the damaged node"] += len(records)


async def cuts(rounds: Rounds, number: int) -> None:
    """Each partition is pinned to three nodes, then wires are cut in the midst of its moves."""
    cluster, rng = rounds.cluster, rounds.rng
    await rounds.workload.more(50, timeout_s=MOVED_S)
    names = [member.name for member in cluster.members]
    pins = {partition: rng.sample(names, 3) for partition in range(PARTITIONS)}
    async with httpx.AsyncClient(base_url=cluster.urls[0], trust_env=False, timeout=PATIENCE_S) as http:
        for partition, nodes in pins.items():
            path = f"/v1/admin/topics/{TOPIC}/partitions/{partition}/pin"
            while True:
                answer = await http.put(path, json={"nodes": nodes, "reason": f"round {number}"})
                if answer.status_code != 503:  # then the catalog has no leader at the moment
                    break
                await asyncio.sleep(0.1)
            answer.raise_for_status()
    await asyncio.sleep(rng.uniform(0.0, 1.5))
    await rng.choice(
        [rounds.nemesis.faults[name] for name in sorted(rounds.nemesis.faults) if "cut" in name]
    )()

    async def arrived() -> bool:
        listed = await asyncio.to_thread(get_json, f"{cluster.urls[0]}/v1/topics/{TOPIC}/partitions")
        return listed is not None and all(
            {each["node"] for each in told["replicas"]} == set(pins[told["partition"]])
            and not told["leaving"]
            and all(each["state"] == "made" and each["in_sync"] for each in told["replicas"])
            for told in listed["partitions"]
        )

    await rounds.until(f"all partitions on {pins}", arrived, timeout_s=MOVED_S)
    await rounds.workload.find_shards()
    rounds.counted["partitions moved"] += PARTITIONS


class Kind(NamedTuple):
    """A kind of rounds, and the cluster that it needs."""

    once: Callable[[Rounds, int], Awaitable[None]]
    flush: str
    forgets: bool = False
    cuttable: bool = False
    nodes: int = 3


ROUNDS = {
    "power": Kind(power, "commit", forgets=True),
    "interval": Kind(interval, "interval", forgets=True),
    "flips": Kind(flips, "commit"),
    "cuts": Kind(cuts, "commit", cuttable=True, nodes=5),
}


async def run_rounds(name: str, folder: Path, *, count: int, seed: int, appends_per_s: float = 300.0) -> bool:
    """So many rounds over one cluster; whether nothing was wrong."""
    kind = ROUNDS[name]
    history = History(folder / "history.jsonl")
    wrong: list[Violation] = []
    failure = ""
    with faulty_cluster(
        folder / "cluster",
        nodes=kind.nodes,
        shards=1,
        forgets=kind.forgets,
        cuttable=kind.cuttable,
        settings=SETTINGS,
    ) as cluster:
        assert not kind.cuttable or cluster.wires is not None, (
            "no network namespaces on this machine: no cuts"
        )
        async with laminar.aio.connect(cluster.urls) as client:
            settings = {"flush": kind.flush}
            await client.create_topic(TOPIC, partitions=PARTITIONS, replicas=3, settings=settings)
        workload = Workload(
            history,
            cluster.urls,
            [TOPIC],
            partitions=PARTITIONS,
            appends_per_s=appends_per_s,
            padding_bytes=PADDING_BYTES,
            readers=1,
            seed=seed,
        )
        rounds = Rounds(cluster, workload, history, rng=random.Random(seed))
        done = 0
        try:
            await workload.start()
            await workload.more(500)
            for number in range(count):
                await kind.once(rounds, number)
                workload.check_alive()
                done += 1
            await workload.finish_writing()
            await workload.drain(timeout_s=PATIENCE_S)
            digests = await asyncio.to_thread(committed_digests, cluster.urls, TOPIC, timeout=PATIENCE_S)
            wrong += check_replicas(digests)
        except Exception:  # noqa: BLE001 - whatever it is: the history up to here is told and kept
            failure = traceback.format_exc()
        finally:
            await workload.close()
            history.close()
    wrong += violations_of(history, followers=() if failure else workload.followers)
    print(
        f"{name}: {done} rounds; " + ", ".join(f"{what} {times:,}" for what, times in rounds.counted.items())
    )
    return tell(folder, history, wrong, rounds.happened, failure)
