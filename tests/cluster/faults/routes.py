"""Changes of a topic's route under faults: partitions split, merge and move while all kinds of clients go on.

One topic has from one to `MOST` partitions, and is changed at random. Writers, a named copier that is killed
again and again, a transaction's driver, and a client that knows no routes append records of keys of their own
to it; a group of consumers reads it; a Spark query, whose driver is killed again and again, copies it into
another topic. Beside the nemesis's faults, nodes that lead an input, an output or the catalog are killed in
each state of a change. Checked at the end, by a reader that begins at the earliest record: of each key the
records are there once, in the order in which they were sent; of the group what `groups` checks; of the query
that the copy has each key's records as the topic has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

import laminar
from examples.demo.spark_stage import why_not
from laminar.client.errors import Error
from laminar.client.policy.lineage import Lineage
from laminar.http.api.append_body import ENVELOPE_LINES_TYPE
from laminar.testing.cluster import get_json
from tests.checkers import History
from tests.client.members import ended
from tests.cluster.faults.cluster import FaultyCluster, faulty_cluster
from tests.cluster.faults.groups import MEMBERS, Crowd, read_to_the_end
from tests.cluster.faults.nemesis import Nemesis
from tests.cluster.faults.profiles import CONVERGE_S, PROFILES, SETTINGS, settle
from tests.cluster.faults.query import KilledQuery
from tests.cluster.faults.report import percentile, tell, violations_of
from tests.cluster.faults.workload import Workload

TOPIC = "routed"
BESIDE = "synced"
PARTITIONS_BESIDE = 3
COPY = "copied"
PARTITIONS_COPY = 4
MOST = 8
WRITERS = 6
KEYS = 5
# Ended partitions stay: after an hour a node that lost its disk has hundreds of replicas to be made again.
ANEW_S = 900.0
STATES = ("preparing", "closing", "done")
ROLES = ("input", "output", "catalog")


class Sent:
    """What was sent of each key, in order: numbers from 1, and which of them have a receipt."""

    def __init__(self) -> None:
        self.last: Counter[str] = Counter()
        self.acknowledged: dict[str, set[int]] = {}
        # Of these it is not known whether they are there.
        self.unknown: dict[str, set[int]] = {}

    def next(self, key: str) -> int:
        """The number of the key's next record."""
        self.last[key] += 1
        return self.last[key]

    def has(self, key: str, number: int) -> None:
        """This record has its receipt."""
        self.acknowledged.setdefault(key, set()).add(number)

    def wrong(self, read: Sequence[tuple[str, int]]) -> list[str]:
        """A sentence for each thing that must not be; `read` is in the order of one reader."""
        found = []
        by_key: dict[str, list[int]] = {}
        for key, number in read:
            by_key.setdefault(key, []).append(number)
        for key, last in self.last.items():
            numbers = by_key.pop(key, [])
            if lost := self.acknowledged.get(key, set()) - set(numbers):
                found.append(f"lost: key {key}: {sorted(lost)[:20]}")
            if twice := [number for number, count in Counter(numbers).items() if count > 1]:
                found.append(f"doubled: key {key}: {sorted(twice)[:20]}")
            if numbers != sorted(numbers):
                found.append(f"reordered: key {key}: {numbers[:40]}")
            if beyond := [number for number in numbers if number > last]:
                found.append(f"never sent: key {key}: {beyond[:20]}")
        return found + [f"never sent: key {key}" for key in by_key]


class Load:
    """Writers, the copier, and the driver of a sink."""

    def __init__(self, urls: Sequence[str], *, appends_per_s: float, rng: random.Random) -> None:
        self.sent = Sent()
        self.happened: Counter[str] = Counter()
        self.took_ms: list[float] = []
        self._urls = list(urls)
        self._pause_s = WRITERS / appends_per_s
        self._rng = rng
        self._going = True
        self._tasks: list[asyncio.Task[None]] = []
        self._copier: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; a failure shows in `check_alive` and at the end."""
        self._tasks = [asyncio.create_task(self._write(f"w{number}")) for number in range(WRITERS)]
        self._tasks.append(asyncio.create_task(self._commit()))
        self._tasks.append(asyncio.create_task(self._request()))
        self._copier = asyncio.create_task(self._copy())

    def check_alive(self) -> None:
        """Raise what ended one of them, if anything did."""
        for task in [*self._tasks, *([self._copier] if self._copier else [])]:
            if task.done():
                task.result()

    async def finish(self, *, timeout_s: float) -> None:
        """Send nothing new; wait until all that was sent has its receipt."""
        self._going = False
        assert self._copier is not None
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*self._tasks, self._copier)

    async def close(self) -> None:
        """End what still runs."""
        tasks = [*self._tasks, *([self._copier] if self._copier else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, writer: str) -> None:
        """Half of them by a producer, half by single appends; each waits for the receipts of a round."""
        rng = random.Random(writer)
        by_producer = int(writer[1:]) % 2 == 0
        async with laminar.aio.connect(self._urls, timeout=120.0) as client:
            topic = client.topic(TOPIC)
            async with topic.producer(batch_bytes=600) as producer:
                while self._going:
                    keys = [f"{writer}-{rng.randrange(KEYS)}" for _ in range(rng.randint(1, 8))]
                    began = time.monotonic()
                    waited = []
                    for key in keys:
                        number = self.sent.next(key)
                        value = f"{key} {number}".encode()
                        if by_producer:
                            waited.append((key, number, producer.send(value, key=key)))
                        else:
                            await topic.append(value, key=key)
                            self.sent.has(key, number)
                    for key, number, delivery in waited:
                        await delivery
                        self.sent.has(key, number)
                    self.took_ms.append((time.monotonic() - began) * 1000)
                    await asyncio.sleep(rng.uniform(0, 2 * self._pause_s))

    async def _commit(self) -> None:
        """One batch after the other; one whose outcome is unknown is committed again under its number."""
        number = 0
        async with laminar.aio.connect(self._urls, timeout=60.0) as client:
            while self._going:
                records = [(key, self.sent.next(key)) for key in ("s-a", "s-b", "s-c")]
                while True:
                    try:
                        async with client.transaction("routed-sink", number) as tx:
                            for key, each in records:
                                tx.append(TOPIC, f"{key} {each}".encode(), key=key)
                    except Error as error:
                        self.happened[f"commit again: {error.code}"] += 1
                        await asyncio.sleep(0.2)
                    else:
                        break
                for key, each in records:
                    self.sent.has(key, each)
                self.happened["commits"] += 1
                number += 1
                await asyncio.sleep(0.5)

    async def _request(self) -> None:
        """Know no routes: name each request, and send it to any node until it is answered, or once more."""
        rng, number = random.Random("requests"), 0
        async with httpx.AsyncClient(timeout=15.0, trust_env=False) as client:
            while self._going:
                number += 1
                records = [
                    (key, self.sent.next(key)) for key in (f"r-{rng.randrange(KEYS)}" for _ in range(6))
                ]
                body = "".join(
                    json.dumps({"key": key, "value": f"{key} {each}"}) + "\n" for key, each in records
                )
                headers = {"Content-Type": ENVELOPE_LINES_TYPE, "Idempotency-Key": f"request-{number}"}
                answered = 0
                while answered < rng.randint(1, 2):
                    try:
                        answer = await client.post(
                            f"{rng.choice(self._urls)}/v1/topics/{TOPIC}/records",
                            content=body,
                            headers=headers,
                        )
                    except httpx.TransportError as error:
                        self.happened[f"request again: {type(error).__name__}"] += 1
                    else:
                        if answer.status_code in (200, 201):
                            answered += 1
                            self.happened["requests found"] += "laminar-replayed" in answer.headers
                            continue
                        code = answer.json()["code"]
                        self.happened[f"request again: {code}"] += 1
                        assert answer.status_code >= 500 or code in ("in_progress", "quota"), answer.text
                    await asyncio.sleep(0.1)
                for key, each in records:
                    self.sent.has(key, each)
                self.happened["requests"] += 1
                await asyncio.sleep(rng.uniform(0, 2 * self._pause_s))

    async def _copy(self) -> None:
        """A process that is killed at any moment, and started again; its numbers go on."""
        total = 0
        while self._going:
            total += 400
            await self._copied_up_to(total, killed=True)
        await self._copied_up_to(total, killed=False)

    async def _copied_up_to(self, total: int, *, killed: bool) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.cluster.faults.numbers",
            ",".join(self._urls),
            TOPIC,
            str(total),
        ]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            if killed and self._rng.random() < 0.7:
                await asyncio.sleep(self._rng.uniform(0.5, 4.0))
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                self.happened["copier killed"] += 1
            told = (await process.stdout.read()).decode().split()
            await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for key, number in copied(total):
            self.sent.last[key] = max(self.sent.last[key], number)
        if told[-2:] == ["done", str(total)]:
            for key, number in copied(total):
                self.sent.has(key, number)
        elif not killed:
            raise RuntimeError(f"the copier ended with {process.returncode} and said {told}")


def copied(total: int) -> list[tuple[str, int]]:
    """The keys and numbers of the copier's records up to a number of its source."""
    return [(f"c-{number % KEYS}", number) for number in range(1, total + 1)]


class RouteChanger:
    """Changes of the topic's route, one after the other, until cancelled."""

    def __init__(self, cluster: FaultyCluster, nemesis: Nemesis, rng: random.Random) -> None:
        self.happened: Counter[str] = Counter()
        self.took_ms: list[float] = []
        self._cluster = cluster
        self._nemesis = nemesis
        self._rng = rng

    async def go_on(self) -> None:
        """For ever: a change, and at times the death of a node with a part in it."""
        async with laminar.aio.connect(self._cluster.urls, timeout=30.0) as client:
            topic = client.topic(TOPIC)
            while True:
                with contextlib.suppress(Error):
                    await self._one(topic)
                await asyncio.sleep(self._rng.uniform(0.2, 3.0))

    async def _one(self, topic: laminar.aio.Topic[bytes]) -> None:
        route = await topic.route()
        numbers = [number for number, held in route.ranges.items() if len(held) > 1]
        place = self._rng.randrange(len(numbers))
        kinds = [
            "move",
            *(["split"] * 2 if len(numbers) < MOST else []),
            *(["merge"] * 2 * (len(numbers) > 1)),
        ]
        kind = self._rng.choice(kinds)
        wait = self._rng.choice((0.5, 5.0, 30.0))
        began = time.monotonic()
        try:
            if kind == "merge":
                first = self._rng.randrange(len(numbers) - 1)
                inputs = numbers[first : first + self._rng.randint(2, 3)]
                begun = await topic.merge(inputs, wait=wait, detach=True)
            elif kind == "split":
                inputs = [numbers[place]]
                into = self._rng.randint(2, min(4, MOST - len(numbers) + 1))
                begun = await topic.split(inputs[0], into=into, wait=wait, detach=True)
            else:
                inputs = [numbers[place]]
                begun = await topic.move(inputs[0], wait=wait, detach=True)
        except Error as error:
            self.happened[f"{kind} refused: {error.code}"] += 1
            raise
        version = begun.changing if begun.changing is not None else begun.version
        async with self._death(inputs, version):
            try:
                state = await self._until_ended(topic, version, wait=wait)
            except Error as error:
                self.happened[f"{kind} not seen to end: {error.code}"] += 1
                raise
        self.happened[f"{kind} {state}"] += 1
        if state == "done":
            self.took_ms.append((time.monotonic() - began) * 1000)

    async def _until_ended(self, topic: laminar.aio.Topic[bytes], version: int, *, wait: float) -> str:
        """Return `done` or `cancelled`."""
        deadline = time.monotonic() + wait + CONVERGE_S
        while True:
            route = await topic.route()
            if route.changing is None:
                return "done" if route.version >= version else "cancelled"
            if time.monotonic() >= deadline:
                raise RuntimeError(f"the change to route {version} does not end: {route.raw['change']}")
            await asyncio.sleep(0.05)

    @asynccontextmanager
    async def _death(self, inputs: list[int], version: int) -> AsyncIterator[None]:
        """At times a node with this role is killed as soon as the change is in this state."""
        if self._rng.random() < 0.4:
            yield
            return
        role, state = self._rng.choice(ROLES), self._rng.choice(STATES)
        killing = asyncio.create_task(self._kill(role, state, inputs, version))
        try:
            yield
        finally:
            try:
                await asyncio.shield(killing)
            except asyncio.CancelledError:
                await killing  # a run that ends now needs the node back, too
                raise

    async def _kill(self, role: str, state: str, inputs: list[int], version: int) -> None:
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            told = await asyncio.to_thread(self._asked, f"/v1/topics/{TOPIC}/routes/{version}")
            if told is None:
                return
            if STATES.index(told["state"]) >= STATES.index(state):
                break
            await asyncio.sleep(0.005)
        else:
            return
        outputs = [each["partition"] for each in told["outputs"]]
        if role == "catalog":
            cluster = await asyncio.to_thread(self._asked, "/v1/cluster")
            node = cluster["catalog_leader"] if cluster is not None else None
        else:
            number = self._rng.choice(inputs if role == "input" else outputs)
            partition = await asyncio.to_thread(self._asked, f"/v1/topics/{TOPIC}/partitions/{number}")
            leader = partition["leader"] if partition is not None else None
            node = leader["node"] if leader is not None else None
        if node is not None and await self._nemesis.kill_node(node, f"kill {role}'s leader"):
            self.happened[f"killed: {role}'s leader, {told['state']}"] += 1

    def _asked(self, path: str) -> Any:
        return next(filter(None, (get_json(f"{url}{path}") for url in self._cluster.urls)), None)


async def run_routes(
    profile: str,
    folder: Path,
    *,
    minutes: float,
    nodes: int,
    shards: int,
    seed: int,
    appends_per_s: float,
    only: Sequence[str] = (),
    spark: bool = True,
) -> bool:
    """One run from an empty cluster to its report; whether nothing was wrong.

    With `spark` a Spark query copies the topic, if Spark can run here.

    Raises:
        SystemExit: it cannot, and the environment has ``REQUIRE=spark``.
    """
    no_query = why_not() if spark else "left out by --no-spark"
    if no_query is not None and "spark" in os.environ.get("REQUIRE", "").split(","):
        raise SystemExit(f"REQUIRE=spark, but there is no Spark query: {no_query}")
    rng = random.Random(seed)
    print("a Spark query copies the topic" if no_query is None else f"NO SPARK QUERY: {no_query}", flush=True)
    with faulty_cluster(folder / "cluster", nodes=nodes, shards=shards, settings=SETTINGS) as cluster:
        async with laminar.aio.connect(cluster.urls) as client:
            await client.create_topic(TOPIC, partitions=1, replicas=3)
            await client.create_topic(BESIDE, partitions=PARTITIONS_BESIDE, replicas=3)
            if no_query is None:
                await client.create_topic(COPY, partitions=PARTITIONS_COPY, replicas=3)
        history = History(folder / "history.jsonl")
        workload = Workload(
            history,
            cluster.urls,
            [BESIDE],
            partitions=PARTITIONS_BESIDE,
            writers=6,
            appends_per_s=appends_per_s / 3,
            seed=seed,
        )
        topics = [BESIDE, TOPIC, *([COPY] if no_query is None else [])]
        nemesis = Nemesis(cluster, workload, history, [BESIDE], placed=topics, rng=rng, anew_timeout_s=ANEW_S)
        if only:
            nemesis.faults = {fault: nemesis.faults[fault] for fault in only}
        load = Load(cluster.urls, appends_per_s=appends_per_s, rng=rng)
        changer = RouteChanger(cluster, nemesis, rng)
        crowd = Crowd(cluster.urls, rng, topic=TOPIC)
        query = None
        if no_query is None:
            query = KilledQuery(cluster.urls, folder / "query", rng, source=TOPIC, target=COPY)
        wrong, sentences, failure = [], [], ""
        with ended(crowd.all):
            try:
                await workload.start()
                load.start()
                for _ in range(MEMBERS):
                    crowd.join()
                await workload.more(100)
                going = [crowd.trouble(), changer.go_on(), *([query.go_on()] if query else [])]
                trouble = [asyncio.create_task(each) for each in going]
                try:
                    await PROFILES[profile](nemesis, minutes * 60)
                finally:
                    for each in trouble:
                        each.cancel()
                    results = await asyncio.gather(*trouble, return_exceptions=True)
                for result in results:
                    if isinstance(result, Exception):
                        raise result
                for member in crowd.all:
                    if member.process.poll() is None:
                        member.process.send_signal(signal.SIGCONT)
                workload.check_alive()
                load.check_alive()
                await asyncio.to_thread(cluster.wait_ready, timeout=CONVERGE_S)
                await load.finish(timeout_s=2 * CONVERGE_S)
                if query is not None:
                    lineage = await _lineage(cluster.urls)
                    await query.drain(lineage)
                wrong += await settle(cluster, workload, topics)
                read = await _read_all(cluster.urls, TOPIC)
                sentences = load.sent.wrong(read)
                ends = await read_to_the_end(cluster.urls, crowd)
                sentences += [f"group: {sentence}" for sentence in crowd.wrong(ends)]
                if query is not None:
                    query.compare(read, await _read_all(cluster.urls, COPY), lineage)
                    sentences += [f"query: {sentence}" for sentence in query.sentences]
            except Exception:  # noqa: BLE001 - whatever it is: the history up to here is told and kept
                failure = traceback.format_exc()
            finally:
                await load.close()
                await workload.close()
                history.close()
        wrong += violations_of(history, followers=workload.followers if not failure else ())
    happened = nemesis.happened + crowd.happened
    sound = tell(folder, history, wrong, happened, failure)
    lines = _told(load, changer, crowd, sentences)
    lines.append(query.told() if query is not None else f"NO SPARK QUERY: {no_query}")
    for line in [*lines, *(f"  {each}" for each in sentences[:20])]:
        print(line, flush=True)
    return sound and not sentences


async def _read_all(urls: Sequence[str], topic: str) -> list[tuple[str, int]]:
    async with laminar.aio.connect(urls, timeout=60.0) as client:
        words = [record.text.split() async for record in client.topic(topic).read()]
    return [(key, int(number)) for key, number in words]


async def _lineage(urls: Sequence[str]) -> Lineage:
    """The topic's changes, as the newest of the nodes knows them."""
    told = [await asyncio.to_thread(get_json, f"{url}/v1/topics/{TOPIC}/routes") for url in urls]
    return max((Lineage.from_answer(each) for each in told if each), key=lambda each: each.route.version)


def _told(load: Load, changer: RouteChanger, crowd: Crowd, sentences: Sequence[str]) -> list[str]:
    found = Counter(sentence.removeprefix("group: ").partition(":")[0] for sentence in sentences)
    acknowledged = sum(map(len, load.sent.acknowledged.values()))
    lines = [
        f"routed topic: {len(load.sent.last)} keys, {acknowledged:,} records with a receipt; lost "
        f"{found['lost']}, doubled {found['doubled']}, reordered {found['reordered']} (keys, by a reader and "
        f"by the group, which was given {crowd.given().total():,})",
        "changes: " + ", ".join(f"{what} {count}" for what, count in sorted(changer.happened.items())),
        "clients: " + ", ".join(f"{what} {count}" for what, count in sorted(load.happened.items())),
    ]
    for what, took in (("a change that was done", changer.took_ms), ("receipts of a round", load.took_ms)):
        if took := sorted(took):
            lines.append(
                f"{what}: {len(took):,}, p50 {percentile(took, 50):.0f} ms, p99 "
                f"{percentile(took, 99):.0f} ms, most {took[-1]:.0f} ms"
            )
    return lines
