"""The life of a cluster, as a script: joins, growth, drains, a death, restarts, all under load.

Each stage waits for the state of the cluster that it is to lead to, and fails the run if that does not come.
The history of all clients is judged at the end, as after `tests.cluster.faults`. `Plan` says how much there
is of everything.
"""

from __future__ import annotations

import asyncio
import random
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

import laminar
from laminar.testing.replicas import committed_digests
from tests.checkers import Fault, History, Violation, check_replicas, check_transactions
from tests.cluster.faults.drivers import Drivers
from tests.cluster.faults.report import tell, violations_of
from tests.cluster.faults.workload import Workload, now_us
from tests.cluster.life.causes import CAUSES, Cpu, Probes, causes_of, terms_of
from tests.cluster.life.figures import append_ms, appends_of, longest_gaps, p99, took_ms
from tests.cluster.life.growing import PATIENCE_S, Api, GrowingCluster, LifeFailed, until
from tests.cluster.life.named import NamedWriter
from tests.cluster.life.placement import fewest_replicas, leaders, misplaced, uneven

REPLICAS = 3
COORDINATORS = "_transactions"
BUCKETS_MS = (0.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, float("inf"))


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much there is of everything. A limit of 0 is not judged."""

    nodes: int = 5
    topics: int = 3
    partitions: int = 4
    shards: int = 1
    drains: int = 2
    rejoin: bool = True
    """Whether the removed nodes' names come back on empty folders."""
    appends_per_s: float = 100.0
    ask_pause_s: float = 0.04
    """The pause of each client that asks one node whether it leads, partition by partition."""
    calm_s: float = 10.0
    sinks: int = 2
    replace_after_ms: int = 15_000
    settle_ms: int = 2_000
    most_gap_s: float = 0.0
    most_uneven_s: float = 60.0
    """Longest time from a rolling restart to leaders that are spread evenly."""
    most_p99_factor: float = 0.0

    @property
    def names(self) -> list[str]:
        """The topics; drivers of sinks append to the first."""
        return [f"life-{number}" for number in range(self.topics)]


class Life:
    """One run: the cluster, its clients, and what was noted of it."""

    def __init__(self, cluster: GrowingCluster, plan: Plan, history: History, *, seed: int) -> None:
        self.cluster = cluster
        self.plan = plan
        self.history = history
        self.api = Api(cluster)
        self.happened: Counter[str] = Counter()
        self.gone: set[str] = set()
        self.rng = random.Random(seed)
        self.spans: dict[str, tuple[int, int]] = {}
        self.cpu: dict[str, str] = {}
        self.probes = Probes(cluster.directory)
        self.terms: dict[tuple[str, int], list[tuple[int, int]]] = {}
        urls = cluster.urls
        self.workload = Workload(
            history,
            urls,
            plan.names,
            partitions=plan.partitions,
            writers=4 * plan.topics,
            appends_per_s=plan.appends_per_s,
            readers=1,
            ask_pause_s=plan.ask_pause_s,
            seed=seed,
        )
        self.named = NamedWriter(history, urls, plan.names[-1], rng=self.rng)
        self.drivers = Drivers(
            urls, plan.names[0], partitions=plan.partitions, sinks=plan.sinks, rng=self.rng
        )
        self._began_s = time.monotonic()
        self._probing: list[asyncio.Task[None]] = []
        self._ended = False

    def say(self, text: str) -> None:
        """Print a line of the timeline."""
        print(f"{time.monotonic() - self._began_s:7.1f} s  {text}", flush=True)

    @asynccontextmanager
    async def stage(self, what: str, *numbers: int) -> AsyncIterator[None]:
        """Note a stage for as long as the block lasts; fail with what has ended a client meanwhile."""
        names = [self.cluster.members[number].name for number in numbers]
        fault = Fault(what=what, nodes=names, start_us=now_us())
        self.happened[what] += 1
        began_s = time.monotonic()
        name = f"{what} {' '.join(names)}".rstrip()
        self.say(name)
        before = Cpu.of(self.cluster)
        try:
            yield
        finally:
            fault.end_us = now_us()
            self.spans[name] = (fault.start_us, fault.end_us)
            self.cpu[name] = Cpu.of(self.cluster).since(before)
            self.history.add(fault)
        self.check_alive()
        self.say(f"  done in {time.monotonic() - began_s:.1f} s")

    def check_alive(self) -> None:
        """Raise what ended a client, if anything did before `finish_clients`."""
        if self._ended:
            return
        self.workload.check_alive()
        self.named.check_alive()
        self.drivers.check_alive()
        for task in self._probing:
            if task.done():
                task.result()

    async def start_clients(self) -> None:
        """Begin with all of them."""
        await self.workload.start()
        self.named.start()
        self.drivers.start()
        self._probing.append(asyncio.create_task(self.probes.run()))
        for topic in self.plan.names:
            for partition in range(self.plan.partitions):
                self._probing.append(asyncio.create_task(self._probe(topic, partition)))

    async def _probe(self, topic: str, partition: int) -> None:
        """Append to one partition all the time, so that its gaps are gaps of service and not of the load."""
        while True:
            await self.workload.probe(topic, partition)
            await asyncio.sleep(0.2)

    async def finish_clients(self) -> None:
        """End them, each when it has all its answers; everything is read once more."""
        self._ended = True
        await self._stop_probing()
        await self.drivers.finish(timeout_s=PATIENCE_S)
        await self.named.finish(timeout_s=PATIENCE_S)
        await self.workload.finish_writing()
        await self.workload.drain(timeout_s=PATIENCE_S)

    async def close(self) -> None:
        """End all clients, whatever they do."""
        await self._stop_probing()
        await self.workload.close()
        await self.named.close()
        await self.drivers.close(self.history)
        await self.api.close()

    async def _stop_probing(self) -> None:
        for task in self._probing:
            task.cancel()
        await asyncio.gather(*self._probing, return_exceptions=True)
        self._probing = []

    # -- stages ----------------------------------------------------------------------------------

    async def transactions_begin(self) -> None:
        """Wait until there is the topic of sinks, which the first of them makes."""

        async def missing() -> str:
            self.check_alive()
            return "" if COORDINATORS in await fewest_replicas(self.api) else f"no topic {COORDINATORS}"

        await until("the first transaction", missing)

    async def calm(self, what: str) -> None:
        """Let the load go on for a while, and measure."""
        async with self.stage(what):
            await asyncio.sleep(self.plan.calm_s)

    async def ready(self, *numbers: int) -> None:
        """Wait until these nodes serve and see all that run."""
        await asyncio.to_thread(self.cluster.wait_ready, list(numbers), timeout=PATIENCE_S)
        await self.workload.find_shards()

    async def join(self, number: int) -> None:
        """Start a node that is new to the cluster."""
        async with self.stage("join", number):
            self.cluster.spawn(number)
            await self.ready(number)
            await self.workload.more(100, timeout_s=PATIENCE_S)

    async def converge(self, what: str) -> None:
        """Wait until each partition is where it should be, in full."""
        async with self.stage(what):
            await until(what, self._misplaced)
            await until(f"{REPLICAS} replicas of each", self._too_few)
            missed = await self.api.metric("laminar_node_work_missed_total")
            if missed:
                raise LifeFailed(f"shards overlooked {missed:.0f} things that the catalog asks of them")
            await self.workload.find_shards()

    async def _misplaced(self) -> str:
        self.check_alive()
        return await misplaced(self.api, gone=self.gone)

    async def _too_few(self) -> str:
        fewest = await fewest_replicas(self.api)
        return "" if min(fewest.values()) >= REPLICAS else f"there are {fewest}"

    async def drain(self, number: int) -> None:
        """Empty a node, stop it when it says that this is safe, and remove it."""
        await self.empty(number)
        async with self.stage("remove", number):
            await asyncio.to_thread(self.cluster.end, number)
            await self.remove(self.cluster.members[number].name)

    async def empty(self, number: int) -> None:
        """Drain a node, until it says that it is safe to stop."""
        name = self.cluster.members[number].name
        async with self.stage("drain", number):
            await self.api.command("POST", f"/v1/admin/nodes/{name}/drain")
            await until("safe to stop", lambda: self._drained(name))

    async def _drained(self, name: str) -> str:
        self.check_alive()
        told = await self.api.get(f"/v1/admin/nodes/{name}")
        if told is None:
            return "no node answers"
        return (
            "" if told["safe_to_stop"] else f"{told['drain_waits_for']}, blocked: {told['drain_blocked_by']}"
        )

    async def remove(self, name: str) -> None:
        """Remove a node that does not run any more."""
        await self.api.command("DELETE", f"/v1/admin/nodes/{name}")

        async def listed() -> str:
            names = [each["node"] for each in (await self.api.told("/v1/nodes"))["nodes"]]
            return f"{name} is removed and listed: {names}" if name in names else ""

        await until("removed", listed)  # the node that is asked may not know it yet

    async def rejoin(self, number: int) -> None:
        """Start a removed node again under its name, on an empty folder."""
        self.cluster.wipe(number)
        self.cluster.members[number].joins = tuple(self.cluster.running())
        await self.join(number)

    async def die(self, number: int) -> None:
        """Kill a node for good; what it held comes to the others, and it is removed."""
        name = self.cluster.members[number].name
        async with self.stage("kill -9", number):
            await asyncio.to_thread(self.cluster.kill, number)
            self.gone.add(name)
        await self.converge("replicas of the dead elsewhere")
        async with self.stage("remove the dead", number):
            await self.api.command("POST", f"/v1/admin/nodes/{name}/drain")
            await until("safe to remove", lambda: self._drained(name))
            await self.remove(name)
            self.gone.discard(name)

    async def restart(self, number: int) -> None:
        """Stop a node and start it again; wait until all replicas keep up, as one does before the next."""
        async with self.stage("restart", number):
            await asyncio.to_thread(self.cluster.end, number)
            self.cluster.spawn(number)
            await self.ready(number)
            await until("all replicas in sync", self._misplaced)

    async def even(self) -> None:
        """Wait until leaders are spread evenly."""
        names = [self.cluster.members[number].name for number in self.cluster.running()]
        async with self.stage("leaders even"):
            try:
                limit_s = self.plan.most_uneven_s
                await until("even", lambda: uneven(self.api, names), timeout_s=limit_s)
            finally:
                self.say(f"  {dict(sorted((await leaders(self.api))[0].items()))}")


async def live(life: Life) -> None:
    """All stages, one after the other."""
    plan, cluster = life.plan, life.cluster
    async with life.stage("topics on one node"):
        async with laminar.aio.connect(cluster.urls) as client:
            for name in plan.names:
                await client.create_topic(
                    name, partitions=plan.partitions, replicas=REPLICAS, allow_fewer_replicas=True
                )
        await life.start_clients()
        await life.workload.more(100, timeout_s=PATIENCE_S)
    await life.calm("calm, one node")
    for number in range(1, plan.nodes):
        await life.join(number)
    await life.converge("three replicas of everything")
    await life.transactions_begin()
    await life.calm("calm, all nodes")
    drained = [0, *life.rng.sample(range(1, plan.nodes), plan.drains - 1)] if plan.drains else []
    for number in drained:
        await life.drain(number)
    if plan.rejoin:
        for number in drained:
            await life.rejoin(number)
    await life.converge("placement after the drains")
    victims = [number for number in cluster.running() if number not in drained]
    if len(cluster.running()) > REPLICAS:
        await life.die(life.rng.choice(victims))
    for number in cluster.running():
        await life.restart(number)
    await life.even()
    await life.converge("the wanted set")


async def run_life(
    folder: Path,
    plan: Plan,
    *,
    seed: int,
    script: Callable[[Any], Awaitable[None]] = live,
    kind: type[Life] = Life,
    cluster_kind: type[GrowingCluster] = GrowingCluster,
    more_settings: Mapping[str, str | int] | None = None,
) -> bool:
    """One life from a single node to its report; return whether every check held.

    `script` has its stages, by default those of `make cluster-life`.
    """
    settings: dict[str, str | int] = {
        "pin": "off",
        "replace_after_ms": plan.replace_after_ms,
        "settle_ms": plan.settle_ms,
        "default_replicas": REPLICAS,
        **(more_settings or {}),
    }
    history = History(folder / "history.jsonl")
    wrong: list[Violation] = []
    failure = ""
    with cluster_kind(folder / "cluster", nodes=plan.nodes, shards=plan.shards, settings=settings) as cluster:
        life = kind(cluster, plan, history, seed=seed)
        try:
            await script(life)
            async with life.stage("all answers, all records, all replicas"):
                await life.finish_clients()
                urls = [cluster.urls[number] for number in cluster.running()]
                life.terms = await terms_of(urls, plan.names)
                for topic in (*plan.names, COORDINATORS):
                    digests = await asyncio.to_thread(committed_digests, urls, topic, timeout=PATIENCE_S)
                    wrong += check_replicas(digests)
        except Exception:  # noqa: BLE001 - whatever it is: the history up to here is told and kept
            failure = traceback.format_exc()
        finally:
            await life.close()
            history.close()
    wrong += violations_of(history, followers=() if failure else life.workload.followers)
    if not failure:
        wrong += life.named.check() + _check_transactions(life)
    sound = tell(folder, history, wrong, life.happened, failure)
    return _tell_figures(life) and sound


def _check_transactions(life: Life) -> list[Violation]:
    topic, drivers = life.plan.names[0], life.drivers
    read: dict[int, list[tuple[int, str]]] = {number: [] for number in range(life.plan.partitions)}
    ends = []
    for each in life.history.operations:
        if each.topic != topic:
            continue
        if each.kind == "final":
            read[each.partition] += each.values
        elif each.kind == "read" and each.end_offset is not None:
            ends.append((each.partition, each.end_offset))
    return check_transactions(drivers.attempts, drivers.begun, read, ends=ends, committed=drivers.committed)


def _tell_stages(life: Life, before_ms: float) -> None:
    """Print the times of appends in each stage, the causes of the slow ones, and the use of the CPUs."""
    slow_ms = 3 * before_ms
    operations = life.history.operations
    causes = causes_of(operations, life.terms, life.probes)
    print(
        f"{'appends: number, p50, p99, most, ms':>72}  times  above {slow_ms:3.0f} ms: {' '.join(CAUSES)}"
        "  CPU: nodes, client, others; waits: nodes, client"
    )
    for what, (from_us, to_us) in life.spans.items():
        here = appends_of(operations, writer="w", from_us=from_us, to_us=to_us)
        took = append_ms(here, writer="w", from_us=from_us, to_us=to_us)
        slow = Counter(causes.get(id(each), "node") for each in here if took_ms(each) > slow_ms)
        factor = f"{p99(took) / before_ms:.1f}" if before_ms else "-"
        most, median = (took[-1], took[len(took) // 2]) if took else (0.0, 0.0)
        counts = " ".join(f"{slow[cause]:6}" for cause in CAUSES)
        print(
            f"{what:>38} {len(took):6,} {median:7.1f} {p99(took):8.0f} {most:8.0f}  {factor:>5}"
            f"         {counts}  {life.cpu[what]}"
        )
    every = appends_of(operations, writer="w", from_us=0, to_us=now_us())
    print(f"{'all by cause; ms from':>45} {' '.join(f'{low:7g}' for low in BUCKETS_MS[:-1])}")
    for cause in CAUSES:
        took = sorted(took_ms(each) for each in every if causes.get(id(each), "node") == cause)
        parts = " ".join(
            f"{sum(low <= each < high for each in took):7,}" for low, high in pairwise(BUCKETS_MS)
        )
        print(f"{cause:>38} {len(took):6,} {parts}")


def _tell_figures(life: Life) -> bool:
    """Print figures of the clients' service; return whether they are within the limits of the plan."""
    plan = life.plan
    outcomes = Counter(each.outcome for each in life.drivers.attempts)
    print(
        f"named producer: {life.named.last:,} records over {life.named.runs} runs; transactions "
        f"{dict(outcomes)}; {dict(life.drivers.happened)}"
    )
    operations = life.history.operations
    spans = life.spans
    calm = next((span for what, span in spans.items() if what.startswith("calm")), None)
    before = p99(append_ms(operations, writer="w", from_us=calm[0], to_us=calm[1])) if calm else 0.0
    _tell_stages(life, before)
    meanwhile = append_ms(operations, writer="w", from_us=calm[1], to_us=now_us()) if calm else []
    factor_of_all = p99(meanwhile) / before if before else 0.0
    print(f"all after the first calm: p99 {p99(meanwhile):.0f} ms, {factor_of_all:.1f} times that before")
    full = spans.get("calm, all nodes")
    if full:
        # What the changes cost, without what three replicas on all nodes cost beside one on one.
        calm_ms = p99(append_ms(operations, writer="w", from_us=full[0], to_us=full[1]))
        changes = p99(append_ms(operations, writer="w", from_us=full[1], to_us=now_us()))
        factor = f"{changes / calm_ms:.1f}" if calm_ms else "-"
        print(f"all after the calm of all nodes: p99 {changes:.0f} ms, {factor} times that of this calm")
    gaps = longest_gaps(operations)
    for gap in gaps:
        stage = next((what for what, (a, b) in spans.items() if a <= gap.began_us < b), "between stages")
        print(f"longest gap of {gap.topic}/{gap.partition}: {gap.ms:,.0f} ms ({stage})")
    sound = True
    if plan.most_gap_s and gaps and gaps[0].ms > plan.most_gap_s * 1000:
        print(f"FAILED: a gap of more than {plan.most_gap_s:g} s")
        sound = False
    if plan.most_p99_factor and factor_of_all > plan.most_p99_factor:
        print(f"FAILED: p99 of appends is more than {plan.most_p99_factor:g} times that before")
        sound = False
    return sound
