"""What a node's death costs: when it is known, when all serves again, when all is replicated again.

    python -m benches.consensus.bench_recovery

Four nodes on this machine, one topic with three replicas and `--bytes` of records in it. A client appends
`--appends` records a second, each acknowledged when a majority has it synced, and reads `--reads` old
records a second. Then all processes of one node are killed with SIGKILL, for good. Seen from outside:

* dead for all: each of the others says so on `/v1/nodes`;
* served again: an append *sent after the kill* was acknowledged in every partition;
* leaders elsewhere: every partition names a leader that is not the dead node;
* replaced: the first replica of the dead node has another place (`replace_after_ms` after the death; here
  `--replace-after` seconds, not the 10 minutes of the default);
* full: all partitions, internal ones too, have three replicas in sync elsewhere, and none is leaving.

An append counts from the instant when it was due, whether or not the client could send it then. In the end
every record is read and compared with what was written, and all replicas must have the same digest. It ends
with 1 if that, or the recovery, fails. `--quick` is the same with few records, and measures nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from benches.common import floors, on_disk, usage
from laminar.aio import Client, Producer, Topic, connect
from laminar.client.net.pool import Pool
from laminar.http.client.connection import head_bytes
from laminar.http.protocol.answer import ConnectionFailed, Target
from laminar.node.host.settings import Settings
from laminar.node.placement.planner import AT_ONCE
from laminar.testing.cluster import LocalCluster
from laminar.testing.history import check_replicas
from laminar.testing.replicas import Digests

NODES, REPLICAS = 4, 3
VICTIM = 1
"""Not the first node, which founded the cluster and may lead the catalog more often than others."""
TOPIC = "recovery"
VALUE_BYTES = 1024
MB = 1_000_000
LOOK_S, ASK_TIMEOUT_S, DIGEST_TIMEOUT_S = 0.05, 2.0, 60.0
PATIENCE_S = 600.0
FILL_BYTES_A_BATCH = 512 * 1024
_BLOCK = os.urandom(1 << 20)


def value_of(number: int) -> bytes:
    """Return the record of a number, which is its first eight bytes."""
    place = number * 997 % (len(_BLOCK) - VALUE_BYTES)
    return number.to_bytes(8) + _BLOCK[place : place + VALUE_BYTES - 8]


@dataclass(slots=True)
class Samples:
    """Latencies in seconds, each with the instant from which it counts."""

    taken: list[tuple[float, float]] = field(default_factory=list)

    def add(self, due_s: float) -> None:
        """Note an answer that came now to what was due then."""
        self.taken.append((due_s, time.perf_counter() - due_s))

    def within(self, from_s: float, to_s: float) -> list[float]:
        """Return the latencies in ms of what was due in this span."""
        return [took * 1000 for due, took in self.taken if from_s <= due < to_s]


class Foreground:
    """The load beside the recovery: appends and reads at a fixed rate, whatever their answers take."""

    def __init__(
        self, topic: Topic[bytes], producer: Producer[bytes], *, first: int, ends: Mapping[int, int]
    ) -> None:
        self.appends, self.reads, self.turns = Samples(), Samples(), Samples()
        self.next = first
        self.served_s: dict[int, float] = {}
        self._topic = topic
        self._producer = producer
        self._ends = ends
        self._partitions = len(ends)
        self._after_s = float("inf")
        self._served = asyncio.Event()
        self._rng = random.Random(1)
        self._loads: list[asyncio.Task[None]] = []

    def start(self, group: asyncio.TaskGroup, *, appends_per_s: float, reads_per_s: float) -> None:
        """Begin; what goes wrong ends the group."""
        for each, rate in ((self._append, appends_per_s), (self._read, reads_per_s), (self._turn, 100.0)):
            self._loads.append(group.create_task(self._repeat(group, each, 1 / rate)))

    async def _repeat(
        self, group: asyncio.TaskGroup, each: Callable[[float], Coroutine[Any, Any, None]], pause_s: float
    ) -> None:
        due_s = time.perf_counter()
        while True:
            due_s += pause_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            group.create_task(each(due_s))

    async def _append(self, due_s: float) -> None:
        number, self.next = self.next, self.next + 1
        partition = number % self._partitions
        sent_s = time.perf_counter()
        await self._producer.send(value_of(number), partition=partition)
        self.appends.add(due_s)
        if sent_s >= self._after_s and partition not in self.served_s:
            self.served_s[partition] = time.perf_counter()
            if len(self.served_s) == self._partitions:
                self._served.set()

    async def _read(self, due_s: float) -> None:
        partition = self._rng.choice([number for number, end in self._ends.items() if end])
        offset = self._rng.randrange(self._ends[partition])
        async with self._topic.open(partition, offset) as opened:
            found = b"".join([chunk async for chunk in opened])
        self.reads.add(due_s)
        wanted = value_of(int.from_bytes(found[:8]))
        assert found == wanted, f"{TOPIC}/{partition} has another record at {offset} than was written"

    async def _turn(self, due_s: float) -> None:
        """How late the client's own loop is: no append is answered faster."""
        self.turns.add(due_s)

    async def served_after(self, instant_s: float) -> float:
        """Return when an append sent after `instant_s` was acknowledged in every partition."""
        self._after_s = instant_s
        await self._served.wait()
        return max(self.served_s.values())

    def stop(self) -> None:
        """Begin nothing more; the group ends when all has its answer."""
        for load in self._loads:
            load.cancel()


class Watch:
    """What the nodes say of themselves over HTTP."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self._pool = Pool(asyncio.get_running_loop(), connect_timeout_s=1.0, idle_s=20.0)

    async def json(
        self, url: str, path: str, *, timeout_s: float = ASK_TIMEOUT_S, local: bool = False
    ) -> Any:
        """Return what an address answers, with `local` about its own replica; None unless that is 200."""
        headers = {"Laminar-Local": "1"} if local else {}
        head = head_bytes("GET", path, Target.of(url).authority, headers)
        with contextlib.suppress(ConnectionFailed):
            answer = await self._pool.ask(url, head, timeout_s=timeout_s)
            if answer.status == 200:
                return answer.json()
        return None

    async def partitions(self) -> list[dict[str, Any]]:
        """Return all partitions of all topics, with the name of the topic; none if nobody tells."""
        found: list[dict[str, Any]] = []
        for url in self.urls:
            listed = await self.json(url, "/v1/topics?limit=1000")
            if listed is None:
                continue
            for each in listed["topics"]:
                told = await self.json(url, f"/v1/topics/{each['topic']}/partitions")
                if told is None or len(told["partitions"]) != each["partitions"]:
                    return []
                found += [row | {"topic": each["topic"]} for row in told["partitions"]]
            return found
        return []

    async def all_say_dead(self, node: str) -> bool:
        """Return whether each node answers, and counts `node` as not alive."""
        told = await asyncio.gather(*(self.json(url, "/v1/nodes") for url in self.urls))
        return all(
            listed is not None and all(not each["alive"] for each in listed["nodes"] if each["node"] == node)
            for listed in told
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._pool.close()


async def until(what: str, reached: Callable[[], Awaitable[bool]]) -> float:
    """Wait until that is so; return when it was.

    Raises:
        TimeoutError: it has not come in `PATIENCE_S`.
    """
    deadline_s = time.perf_counter() + PATIENCE_S
    while not await reached():
        if time.perf_counter() >= deadline_s:
            raise TimeoutError(f"not {what} after {PATIENCE_S:g} s")
        await asyncio.sleep(LOOK_S)
    return time.perf_counter()


def is_full(rows: list[dict[str, Any]], dead: str) -> bool:
    """Return whether each partition has all its replicas in sync, none of them on the dead node."""
    return bool(rows) and all(
        len(row["replicas"]) == REPLICAS
        and not row["leaving"]
        and row["leader"] is not None
        and all(
            each["node"] != dead and each["state"] == "made" and each["in_sync"] for each in row["replicas"]
        )
        for row in rows
    )


@dataclass(slots=True)
class Usage:
    """What the nodes and this client had used at an instant: CPU seconds, and waits for a CPU."""

    pids: list[int]
    at_s: float = field(default_factory=time.perf_counter)
    nodes_s: float = 0.0
    nodes_waited_s: float = 0.0
    client_s: float = 0.0
    client_waited_s: float = 0.0
    machine_s: float = 0.0

    def __post_init__(self) -> None:
        self.nodes_s = usage.cpu_s(self.pids)
        self.nodes_waited_s = usage.waited_s(self.pids)
        self.client_s = time.process_time()
        self.client_waited_s = usage.waited_s([os.getpid()])
        self.machine_s = usage.machine_cpu_s()

    def text_since(self, before: Usage) -> str:
        """Return the shares of all CPUs since then, and the shares of the time that was waited."""
        span_s = self.at_s - before.at_s
        cpus_s = span_s * (os.cpu_count() or 1)
        nodes_s, client_s = self.nodes_s - before.nodes_s, self.client_s - before.client_s
        others_s = self.machine_s - before.machine_s - nodes_s - client_s
        waited_s = self.nodes_waited_s - before.nodes_waited_s
        client_waited_s = self.client_waited_s - before.client_waited_s
        return (
            f"CPU: nodes {nodes_s / cpus_s:.0%}, client {client_s / cpus_s:.0%},"
            f" others {others_s / cpus_s:.0%};"
            f" waits for one: nodes {waited_s / span_s:.0%}, client {client_waited_s / span_s:.0%}"
        )


def main() -> int:
    """Run it and print; 1 if the recovery or the records are not whole."""
    parser = on_disk.parser("python -m benches.consensus.bench_recovery", __doc__)
    parser.add_argument("--bytes", type=float, default=1e9, help="of records, over all partitions")
    parser.add_argument("--partitions", type=int, default=12)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--appends", type=float, default=100.0, help="a second")
    parser.add_argument("--reads", type=float, default=20.0, help="a second")
    parser.add_argument("--replace-after", type=float, default=5.0, help="seconds of absence")
    parser.add_argument("--calm", type=float, default=20.0, help="seconds of load before and after")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="other settings of the nodes"
    )
    given = parser.parse_args()
    if given.quick:
        given.bytes, given.calm, given.replace_after = 4e6, 1.0, 0.5
    kind = on_disk.filesystem(given.directory)
    settings: dict[str, str | int] = dict(each.split("=", 1) for each in given.set)
    settings |= {"replace_after_ms": int(given.replace_after * 1000), "pin": "off"}
    rate = int(settings.get("catch_up_bytes_per_s", Settings().catch_up_bytes_per_s))
    print(
        f"{os.cpu_count()} CPUs, {platform.release()}, Python {platform.python_version()},"
        f" uvloop {version('uvloop')}, {kind}; {NODES} nodes of {given.shards} shard(s) and a client on this"
        f" machine; {given.bytes / MB:,.0f} MB of records in {given.partitions} partitions,"
        f" {REPLICAS} replicas; {given.appends:g} appends and {given.reads:g} reads a second\n"
        f"in force: replace_after {given.replace_after:g} s (default 600), {AT_ONCE} new replicas a node at"
        f" once, each shard serves copies at {rate / MB:.1f} MB/s" + (f"; {settings}" if given.set else ""),
        flush=True,
    )
    if given.quick:
        print("--quick: these sizes measure nothing")
    with (
        on_disk.folder(given.directory, "recovery-") as folder,
        LocalCluster(folder / "cluster", nodes=NODES, shards=given.shards, settings=settings) as cluster,
    ):
        pids = [pid for member in cluster.members for pid in cluster.pids(member.number)]
        bystanders = usage.Bystanders(pids)
        found = Recovery(cluster, given)
        floors.run_loop(found.run(bystanders))
    print("bench-recovery: " + " ".join(f"{name}={value:.3g}" for name, value in found.figures.items()))
    return 0 if found.whole else 1


class Recovery:
    """One run; `whole` says whether everything was there in the end."""

    def __init__(self, cluster: LocalCluster, given: Any) -> None:
        self.cluster = cluster
        self.given = given
        self.whole = False
        self.figures: dict[str, float] = {}
        self._numbers = max(given.partitions, int(given.bytes) // VALUE_BYTES)
        self._dead = cluster.members[VICTIM].name
        self._pids: list[int] = []

    async def run(self, bystanders: usage.Bystanders) -> None:
        """Fill, load, kill, watch, and verify."""
        given, cluster = self.given, self.cluster
        alive = [member.number for member in cluster.members if member.number != VICTIM]
        self._pids = [pid for number in alive for pid in cluster.pids(number)]
        watch = Watch([cluster.urls[number] for number in alive])
        async with connect(cluster.urls, timeout=60.0) as client:
            topic = await client.create_topic(TOPIC, partitions=given.partitions, replicas=REPLICAS)
            await self._fill(topic)
            async with topic.producer(timeout=60.0) as producer:
                load = Foreground(topic, producer, first=self._numbers, ends=await topic.offsets())
                async with asyncio.TaskGroup() as group:
                    load.start(group, appends_per_s=given.appends, reads_per_s=given.reads)
                    await self._watched(watch, load, bystanders)
                    load.stop()
            numbers = load.next
            self.whole = await self._verify(client, watch, numbers)
        await watch.close()

    async def _fill(self, topic: Topic[bytes]) -> None:
        began_s = time.perf_counter()
        async with topic.producer(batch_bytes=FILL_BYTES_A_BATCH) as producer:
            await producer.send_all((None, value_of(number)) for number in range(self._numbers))
        took_s = time.perf_counter() - began_s
        print(f"filled in {took_s:.1f} s, {self._numbers * VALUE_BYTES / MB / took_s:.0f} MB/s", flush=True)
        # What follows is not to share the disk with the journal's checkpoints of the filling.
        await asyncio.sleep(2.0 if not self.given.quick else 0.0)

    async def _watched(self, watch: Watch, load: Foreground, bystanders: usage.Bystanders) -> None:
        await asyncio.sleep(min(5.0, self.given.calm))  # connections, caches
        marks = [Usage(self._pids)]
        await asyncio.sleep(self.given.calm)
        rows = await watch.partitions()
        held = [row for row in rows if any(each["node"] == self._dead for each in row["replicas"])]
        led = sum(row["leader"] is not None and row["leader"]["node"] == self._dead for row in rows)
        held_bytes = sum(row["bytes"] or 0 for row in held)
        print(
            f"{self._dead} holds {len(held)} of {len(rows)} partitions, {held_bytes / MB:,.0f} MB,"
            f" and leads {led}",
            flush=True,
        )
        marks.append(Usage(self._pids))
        for pid in self.cluster.pids(VICTIM):
            os.kill(pid, signal.SIGKILL)
        killed_s = time.perf_counter()
        reaping = asyncio.create_task(asyncio.to_thread(self.cluster.kill, VICTIM))
        serving = asyncio.create_task(load.served_after(killed_s))
        dying = asyncio.create_task(until("dead for all", lambda: watch.all_say_dead(self._dead)))
        at: dict[str, float] = {}

        def reached(name: str, text: str, instant_s: float) -> None:
            at[name] = instant_s
            self.figures[f"{name}_s"] = instant_s - killed_s
            print(f"{instant_s - killed_s:8.2f} s  {text}", flush=True)

        elsewhere = await until("led elsewhere", lambda: self._led_elsewhere(watch))
        reached("served", "an append sent after the kill acknowledged in every partition", await serving)
        reached("leaders", "a leader elsewhere for every partition", elsewhere)
        marks.append(Usage(self._pids))
        reached("dead", "declared dead by all", await dying)
        await reaping
        began_s = await until("replaced", lambda: self._begun(watch, len(held)))
        reached("replaced", "the first replica has another place", began_s)
        marks.append(Usage(self._pids))
        full_s = await until("full", lambda: self._full(watch))
        reached("full", f"{REPLICAS} replicas of everything in sync, nothing leaving", full_s)
        marks.append(Usage(self._pids))
        moving_s = at["full"] - at["replaced"]
        self.figures |= {"moved_mb": held_bytes / MB, "mb_per_s": held_bytes / MB / moving_s}
        rate = held_bytes / MB / moving_s
        print(f"re-replicated {held_bytes / MB:,.0f} MB in {moving_s:.1f} s: {rate:.1f} MB/s")
        await asyncio.sleep(self.given.calm)
        marks.append(Usage(self._pids))
        self._tell_load(load, marks)
        # The killed node's processes count as others from the kill on, though they use nothing.
        with contextlib.suppress(FileNotFoundError):
            print(f"others used {bystanders.share():.0%} of the CPUs")

    async def _begun(self, watch: Watch, held: int) -> bool:
        rows = await watch.partitions()
        still = sum(any(each["node"] == self._dead for each in row["replicas"]) for row in rows)
        return bool(rows) and still < held

    async def _led_elsewhere(self, watch: Watch) -> bool:
        rows = await watch.partitions()
        return bool(rows) and all(
            row["leader"] is not None and row["leader"]["node"] != self._dead for row in rows
        )

    async def _full(self, watch: Watch) -> bool:
        return is_full(await watch.partitions(), self._dead)

    def _tell_load(self, load: Foreground, marks: list[Usage]) -> None:
        """Print the latencies of each span between two marks."""
        names = ("before", "to leaders", "to the first", "copying", "after")
        print(
            "span            s |  appends p50  p99   max ms |    reads p50  p99   max ms | client late p99 ms"
        )
        for name, begin, end in zip(names, marks[:-1], marks[1:], strict=True):
            columns = [
                f"{floors.percentile(took, 0.5):11.1f} {floors.percentile(took, 0.99):5.0f} {max(took):7.0f}"
                if took
                else f"{'-':>25}"
                for took in (each.within(begin.at_s, end.at_s) for each in (load.appends, load.reads))
            ]
            late = load.turns.within(begin.at_s, end.at_s)
            print(
                f"{name:<12} {end.at_s - begin.at_s:5.1f} |{' |'.join(columns)} |"
                f" {floors.percentile(late, 0.99) if late else 0.0:6.1f}\n{'':>18}   {end.text_since(begin)}"
            )
            took = load.appends.within(begin.at_s, end.at_s)
            if took:
                self.figures[f"{name.replace(' ', '_')}_p99_ms"] = floors.percentile(took, 0.99)

    async def _verify(self, client: Client, watch: Watch, numbers: int) -> bool:
        """Return whether each number is there once, with its bytes, and all replicas are equal."""
        times = bytearray(numbers)
        wrong = 0
        async for record in client.topic(TOPIC).read(from_leader=True):
            number = int.from_bytes(record.value[:8])
            if number >= numbers or record.value != value_of(number):
                wrong += 1
                continue
            times[number] += 1
        lost, doubled = times.count(0), sum(each > 1 for each in set(times))
        digests = await self._digests(watch)
        differing = check_replicas(digests)
        copies = sorted({len(found) for found in digests.values()})
        print(
            f"read back {numbers:,} records: lost {lost}, doubled {doubled}, not as written {wrong};"
            f" replicas of each partition {copies}, with another digest {len(differing)}",
            flush=True,
        )
        return not (lost or doubled or wrong or differing) and copies == [REPLICAS]

    async def _digests(self, watch: Watch) -> Digests:
        """Return each replica's digest of all that its partition's leader has committed by now."""
        found: Digests = {}
        for row in await watch.partitions():
            if row["topic"] != TOPIC:
                continue
            path = f"/v1/topics/{TOPIC}/partitions/{row['partition']}/digest"
            told = await watch.json(row["leader"]["url"], path, timeout_s=DIGEST_TIMEOUT_S, local=True)
            path += f"?to_index={told['committed_index']}"
            here = found[row["partition"]] = {}
            for replica in row["replicas"]:
                # The others hear of the last commit with the next heartbeat, and answer 404 until then.
                for _ in range(50):
                    told = await watch.json(replica["url"], path, timeout_s=DIGEST_TIMEOUT_S, local=True)
                    if told is not None:
                        here[replica["node"]] = told["digest"]
                        break
                    await asyncio.sleep(0.2)
        return found


if __name__ == "__main__":
    sys.exit(main())
