"""What a change of a route costs those who write: beside a change of leader, and beside other partitions.

    python -m benches.queues.bench_routes

Three nodes on this machine. Each figure has its comparison in the same run, by turns:

* unwritable: for how long a key gets no receipt in a split, merge or move, and in a transfer of its leader;
* other partitions: records a second, in seconds with a change of another topic and in seconds without;
* idle: the time of a change while nothing is written;
* planned stop: for how long a key of a partition with one replica gets no receipt when its node is stopped
  and started again: with `move` before that, and without.

A writer of a key has one append under way, and the gap is the longest time between two receipts. In the end
everything is read: each key's records must be there once and in order, else it ends with 1. `--quick` is the
same with few changes, and measures nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from itertools import pairwise
from typing import Any

from benches.common import floors, on_disk, usage
from laminar.aio import Client, Topic, connect
from laminar.client.errors import Error
from laminar.testing.cluster import LocalCluster

KEYS = 4
OTHERS = 4
WARM_S = 1.0
SETTLE_S = 0.3
PATIENCE_S = 60.0
TRANSFER_S = 3.0


class Writers:
    """One append after the other for each key; the instants of their receipts."""

    def __init__(self, topic: Topic[bytes]) -> None:
        self.receipts: dict[str, list[float]] = {f"key{number}": [] for number in range(KEYS)}
        self.sent: dict[str, int] = dict.fromkeys(self.receipts, 0)
        self._topic = topic

    async def _write(self, key: str) -> None:
        while True:
            self.sent[key] += 1
            await self._topic.append(f"{key} {self.sent[key]}".encode(), key=key, timeout=PATIENCE_S)
            self.receipts[key].append(time.perf_counter())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write for as long as the block lasts."""
        tasks = [asyncio.create_task(self._write(key)) for key in self.receipts]
        try:
            await asyncio.sleep(WARM_S)
            yield
        finally:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result

    def gaps_ms(self, from_s: float, to_s: float) -> list[float]:
        """Return of each key the longest time between two receipts that reaches into this span."""
        found = []
        for receipts in self.receipts.values():
            ends = [*receipts, to_s]
            found.append(
                max(
                    (after - before) * 1000
                    for before, after in pairwise(ends)
                    if after > from_s and before < to_s
                )
            )
        return found


async def gaps_of(writers: Writers, step: Callable[[], Awaitable[None]]) -> list[float]:
    """Return the gaps of each key around one step."""
    began_s = time.perf_counter()
    await step()
    await asyncio.sleep(SETTLE_S)
    return writers.gaps_ms(began_s, time.perf_counter())


class Changes:
    """A split, a merge of the two, a move, and so on, of a topic that began with one partition."""

    def __init__(self, topic: Topic[bytes]) -> None:
        self.took_ms: list[float] = []
        self._topic = topic
        self._number = 0

    async def next(self) -> None:
        """Perform the next one, which all keys take part in."""
        numbers = list((await self._topic.route()).ranges)
        began_s = time.perf_counter()
        if len(numbers) > 1:
            await self._topic.merge(numbers)
        elif self._number % 3 == 2:
            await self._topic.move(numbers[0])
        else:
            await self._topic.split(numbers[0])
        self.took_ms.append((time.perf_counter() - began_s) * 1000)
        self._number += 1


async def transfer(client: Client, topic: str) -> None:
    """Have another node lead the topic's partition, and wait until it does.

    The cluster may prefer a third node, so that the leaders are spread evenly: then another node is chosen.
    """
    deadline_s = time.perf_counter() + PATIENCE_S
    (partition,) = await client.topic(topic).partitions()
    others = [name for name in partition.replicas if name != partition.leader]
    path = f"/v1/admin/topics/{topic}/partitions/{partition.partition}/leader"
    asked_s = 0.0
    while (await client.topic(topic).partitions())[0].leader == partition.leader:
        if time.perf_counter() >= deadline_s:
            raise TimeoutError(f"{topic}/{partition.partition} is still led by {partition.leader}")
        if time.perf_counter() >= asked_s + TRANSFER_S:
            others.append(others.pop(0))
            await client.request_json("POST", path, {"node": others[0]})
            asked_s = time.perf_counter()
        await asyncio.sleep(0.02)


async def records_per_s(topic: Topic[bytes], seconds: float, beside: Callable[[], Awaitable[None]]) -> float:
    """Return the records a second that a producer gets receipts for, while `beside` goes on once."""
    value = b"x" * 1000
    async with topic.producer() as producer:
        other = asyncio.ensure_future(beside())
        began_s = time.perf_counter()
        count = 0
        while time.perf_counter() < began_s + seconds or not other.done():
            for _ in range(100):
                producer.send(value, key=b"%d" % (count % 1009))
                count += 1
            await producer.room()
            await asyncio.sleep(0)
        await producer.wait()
        await other
        return count / (time.perf_counter() - began_s)


async def in_order(topic: Topic[bytes], sent: dict[str, int]) -> list[str]:
    """Return a sentence for each key whose records are not there once, or not in order."""
    read: dict[str, list[int]] = {key: [] for key in sent}
    async for record in topic.read():
        key, _, number = record.text.partition(" ")
        read[key].append(int(number))
    # The last append of each was cancelled: it may be there.
    return [
        f"{key}: {numbers[:20]}"
        for key, numbers in read.items()
        if numbers not in (list(range(1, sent[key] + 1)), list(range(1, sent[key])))
    ]


def main() -> int:
    """Run it and print; 1 if a key's records are not in order."""
    parser = on_disk.parser("python -m benches.queues.bench_routes", __doc__)
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--window", type=float, default=2.0, help="seconds of a rate of other partitions")
    given = parser.parse_args()
    if given.quick:
        given.changes, given.window = 3, 0.3
    print(
        f"{os.cpu_count()} CPUs, {platform.release()}, Python {platform.python_version()},"
        f" uvloop {version('uvloop')}, {on_disk.filesystem(given.directory)}; 3 nodes of {given.shards} "
        f"shard(s) and the clients on this machine; 3 replicas, flush=commit; {given.changes} of each, by "
        "turns",
        flush=True,
    )
    with (
        on_disk.folder(given.directory, "routes-") as folder,
        LocalCluster(folder / "cluster", nodes=3, shards=given.shards, settings={"pin": "off"}) as cluster,
    ):
        pids = [pid for member in cluster.members for pid in cluster.pids(member.number)]
        bystanders = usage.Bystanders(pids)
        found = Bench(cluster, given)
        floors.run_loop(found.run())
        with contextlib.suppress(FileNotFoundError):
            print(f"others used {bystanders.share():.0%} of the CPUs")
    print("bench-routes: " + " ".join(f"{name}={value:.3g}" for name, value in found.figures.items()))
    for sentence in found.wrong:
        print(f"OUT OF ORDER: {sentence}")
    return 1 if found.wrong else 0


class Bench:
    """One run."""

    def __init__(self, cluster: LocalCluster, given: Any) -> None:
        self.figures: dict[str, float] = {}
        self.wrong: list[str] = []
        self._cluster = cluster
        self._given = given

    async def run(self) -> None:
        """Measure all of it."""
        async with connect(self._cluster.urls, timeout=PATIENCE_S) as client:
            await self._unwritable(client)
            await self._beside(client)
            await self._idle(client)
            await self._planned_stop(client)

    def _tell(self, what: str, took: list[float], against: list[float]) -> None:
        for name, each in ((what, took), ("against", against)):
            ordered = sorted(each)
            print(
                f"{name:<40} p50 {floors.percentile(ordered, 0.5):7.1f}  p99 "
                f"{floors.percentile(ordered, 0.99):7.1f}  most {ordered[-1]:7.1f} ms  ({len(ordered)})",
                flush=True,
            )

    async def _unwritable(self, client: Client) -> None:
        routed = await client.create_topic("routed", partitions=1, replicas=3)
        writers = Writers(routed)
        changes = Changes(routed)
        in_changes: list[float] = []
        in_transfers: list[float] = []
        quiet: list[float] = []
        for number in range(self._given.changes):
            # A group is handed over again only after a while, so each transfer has its own.
            led = await client.create_topic(f"led-{number}", partitions=1, replicas=3)
            others = Writers(led)
            async with writers.running():
                quiet += await gaps_of(writers, lambda: asyncio.sleep(SETTLE_S))
                in_changes += await gaps_of(writers, changes.next)
            async with others.running():
                in_transfers += await gaps_of(others, lambda name=led.name: transfer(client, name))  # type: ignore[misc]
            self.wrong += await in_order(led, others.sent)
        self._tell("unwritable in a change (against: leader)", in_changes, in_transfers)
        self._tell("the change itself (against: no change)", changes.took_ms, quiet)
        for name, percent in (("p50", 0.5), ("p99", 0.99)):
            ours = floors.percentile(sorted(in_changes), percent)
            theirs = floors.percentile(sorted(in_transfers), percent)
            self.figures |= {f"unwritable_{name}_ms": ours, f"unwritable_{name}_ratio": ours / theirs}
        self.wrong += await in_order(routed, writers.sent)
        receipts = sum(map(len, writers.receipts.values()))
        print(
            f"{receipts:,} receipts over {len(changes.took_ms)} changes: keys out of order {len(self.wrong)}"
        )

    async def _beside(self, client: Client) -> None:
        routed = await client.create_topic("changing", partitions=1, replicas=3)
        other = await client.create_topic("beside", partitions=OTHERS, replicas=3)
        changes = Changes(routed)
        window_s = self._given.window

        async def nothing() -> None:
            await asyncio.sleep(0)

        await records_per_s(other, window_s, nothing)
        quiet, changing = [], []
        for _ in range(self._given.changes):
            quiet.append(await records_per_s(other, window_s, nothing))
            changing.append(await records_per_s(other, window_s, changes.next))
        ratio = statistics.median(changing) / statistics.median(quiet)
        self.figures |= {"beside_per_s": statistics.median(changing), "beside_ratio": ratio}
        print(
            f"other partitions: {statistics.median(quiet):,.0f} records/s of 1,000 bytes, with a change in "
            f"each {window_s:g} s {statistics.median(changing):,.0f} ({ratio:.2f})",
            flush=True,
        )

    async def _idle(self, client: Client) -> None:
        changes = Changes(await client.create_topic("idle", partitions=1, replicas=3))
        for _ in range(self._given.changes):
            await changes.next()
        took = sorted(changes.took_ms)
        self.figures |= {"idle_p50_ms": floors.percentile(took, 0.5)}
        self._tell("idle change", took, took)

    async def _planned_stop(self, client: Client) -> None:
        gaps = {}
        for name, moves in (("stop", False), ("move-stop", True)):
            topic = await client.create_topic(name, partitions=1, replicas=1)
            writers = Writers(topic)
            (partition,) = await topic.partitions()
            number = next(
                member.number for member in self._cluster.members if member.name == partition.replicas[0]
            )
            async with writers.running():

                async def step(node: int = number, first: bool = moves, routed: Topic[bytes] = topic) -> None:
                    if first:
                        await routed.move(0, avoid=[self._cluster.members[node].name])
                    await asyncio.to_thread(self._stop, node)
                    await asyncio.to_thread(self._cluster.spawn, node)
                    await asyncio.to_thread(self._cluster.wait_ready, [node])
                    with contextlib.suppress(Error):
                        await routed.partitions()

                gaps[name] = await gaps_of(writers, step)
            self.wrong += await in_order(topic, writers.sent)
        self._tell("planned stop after a move (against: none)", gaps["move-stop"], gaps["stop"])
        self.figures |= {
            "stop_move_ms": max(gaps["move-stop"]),
            "stop_ratio": max(gaps["move-stop"]) / max(gaps["stop"]),
        }

    def _stop(self, number: int) -> None:
        process = self._cluster.members[number].process
        assert process is not None
        process.terminate()
        process.wait(PATIENCE_S)
        self._cluster.kill(number)


if __name__ == "__main__":
    raise SystemExit(main())
