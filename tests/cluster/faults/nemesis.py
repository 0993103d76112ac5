"""What is done to a cluster: each fault a coroutine that begins it, ends it and notes it in the history.

Every fault leaves the cluster able to recover: its nodes run, its wires are whole, its disks obey. Which
fault comes when is drawn from the seed; what the machine makes of it does not repeat: the history tells it.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import random
import re
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from laminar.testing.cluster import get_json
from tests.checkers import Fault, History
from tests.cluster.faults.cluster import FaultyCluster
from tests.cluster.faults.flips import Flip, flip_segments
from tests.cluster.faults.workload import Workload, now_us
from tests.disks.faults import Rule

READY_TIMEOUT_S = 180.0
# Until there is a leader, or a node says what its processes are: how long a fault waits for its victim.
VICTIM_S = 60.0
# Until replicas are made anew, or damage is put right: under faults, on a machine that does other things too.
ANEW_TIMEOUT_S = 180.0
HOUR_MS = 3_600_000


class Nemesis:
    """Faults for one cluster under one workload. `happened` counts them."""

    def __init__(
        self,
        cluster: FaultyCluster,
        workload: Workload,
        history: History,
        topics: list[str],
        *,
        rng: random.Random,
        placed: Sequence[str] = (),
        anew_timeout_s: float = ANEW_TIMEOUT_S,
    ) -> None:
        """`placed`: topics whose replicas must be in their places again behind a fault, if not `topics`.

        `anew_timeout_s`: how long that may take.
        """
        self.happened: Counter[str] = Counter()
        self._cluster = cluster
        self._workload = workload
        self._history = history
        self._topics = topics
        self._placed = list(placed) or topics
        self._anew_timeout_s = anew_timeout_s
        self._rng = rng
        self._busy: set[int] = set()
        self._probes: list[asyncio.Task[None]] = []
        # Bits that turned, until they are right again; and whether a copy is gone with a node's directory.
        self._flipped: list[Flip] = []
        self._copy_gone = False
        self.faults: dict[str, Callable[[], Awaitable[None]]] = {
            "kill one": self.kill_one,
            "kill leader": self.kill_leader,
            "kill minority": self.kill_minority,
            "kill all": self.kill_all,
            "kill shard": self.kill_shard,
            "pause one": self.pause_one,
            "pause leader 10 s": self.pause_leader,
            "disk full": self.disk_full,
            "sync fails": self.sync_fails,
            "slow disk": self.slow_disk,
            "clock step": self.clock_step,
            "bit flips": self.bit_flips,
            "wiped directory": self.wiped_directory,
        }
        if cluster.wires is not None:
            self.faults |= {
                "cut one": self.cut_one,
                "cut halves": self.cut_halves,
                "cut one way": self.cut_one_way,
                "cut ring": self.cut_ring,
            }

    # -- choosing ------------------------------------------------------------------------------

    async def any(self) -> None:
        """One fault, now and then with a second one in it."""
        names = [self._rng.choice(sorted(self.faults)) for _ in range(2)]
        if self._rng.random() < 0.3:
            second = self._later(self.faults[names[1]], self._rng.uniform(0.2, 2.0))
            await asyncio.gather(self.faults[names[0]](), second)
        else:
            await self.faults[names[0]]()

    async def calm(self) -> None:
        """A pause in which the cluster may recover, or may just not."""
        await asyncio.sleep(self._rng.uniform(0.5, 4.0))

    async def _later(self, fault: Callable[[], Awaitable[None]], after_s: float) -> None:
        await asyncio.sleep(after_s)
        await fault()

    @property
    def _minority(self) -> int:
        return (self._cluster.nodes - 1) // 2

    def _free(self) -> list[int]:
        return [number for number in range(self._cluster.nodes) if number not in self._busy]

    @asynccontextmanager
    async def _on(self, what: str, nodes: list[int], note: str = "") -> AsyncIterator[Fault]:
        """The fault for as long as the block lasts. Two faults never have one node at once."""
        fault = Fault(
            what=what,
            nodes=[self._cluster.members[number].name for number in nodes],
            start_us=now_us(),
            note=note,
        )
        self.happened[what] += 1
        self._busy |= set(nodes)
        try:
            yield fault
        finally:
            self._busy -= set(nodes)
            fault.end_us = now_us()
            self._history.add(fault)

    def _some(self, count: int) -> list[int]:
        free = self._free()
        return self._rng.sample(free, min(count, len(free)))

    async def leaders(self) -> dict[int, list[str]]:
        """Node number: the partitions it leads, by whoever answers."""
        led: dict[int, list[str]] = {}
        names = {member.name: member.number for member in self._cluster.members}
        for topic in self._topics:
            told = await asyncio.to_thread(self._partitions, topic)
            for partition in told["partitions"] if told is not None else ():
                if partition["leader"] is not None and partition["leader"]["node"] in names:
                    number = names[partition["leader"]["node"]]
                    led.setdefault(number, []).append(f"{topic}/{partition['partition']}")
        return led

    async def _a_leader(self) -> tuple[int, list[str]] | None:
        """A node that leads, once one does to which nothing happens yet; None if none does for long."""
        deadline = time.monotonic() + VICTIM_S
        while self._free() and time.monotonic() < deadline:
            led = await self.leaders()
            fit = {number: places for number, places in led.items() if number in self._free()}
            if fit:
                return self._rng.choice(sorted(fit.items()))
            await asyncio.sleep(0.1)
        return None

    # -- processes -----------------------------------------------------------------------------

    async def _kill(
        self, what: str, numbers: list[int], *, away_s: float, led: list[str] | None = None
    ) -> None:
        """`led`: partitions to write to at once."""
        if not numbers:
            return
        async with self._on(what, numbers, " ".join(led or ())):
            await asyncio.gather(*(asyncio.to_thread(self._cluster.kill, number) for number in numbers))
            for place in led or ():
                topic, _, partition = place.rpartition("/")
                self._probes.append(asyncio.create_task(self._workload.probe(topic, int(partition))))
            await asyncio.sleep(away_s)
            for number in numbers:
                self._cluster.spawn(number)
            await self._ready(numbers)

    async def _ready(self, numbers: list[int]) -> None:
        """Until these nodes serve. Others may be cut off or stand still, so nobody is asked about them.

        A node whose shards died too often in one minute has given them up, as documented, and has ended if
        none was left: it is started anew.
        """
        async with asyncio.timeout(READY_TIMEOUT_S):
            for number in numbers:
                while await asyncio.to_thread(get_json, f"{self._cluster.urls[number]}/readyz") is None:
                    process = self._cluster.members[number].process
                    if self._cluster.gave_up(number):
                        await asyncio.to_thread(self._cluster.kill, number)
                        self._cluster.spawn(number)
                    elif process is not None and process.poll() is not None:
                        tail = self._cluster.members[number].log_tail()
                        raise RuntimeError(f"node-{number + 1} ended with {process.returncode}: {tail}")
                    await asyncio.sleep(0.1)

    async def kill_node(self, node: str, what: str) -> bool:
        """Kill a node by name, unless something happens to it already; return whether it was killed."""
        numbers = [
            member.number
            for member in self._cluster.members
            if member.name == node and member.number in self._free()
        ]
        await self._kill(what, numbers, away_s=self._rng.uniform(0.0, 3.0))
        return bool(numbers)

    async def kill_one(self) -> None:
        await self._kill("kill one", self._some(1), away_s=self._rng.uniform(0.0, 3.0))

    async def kill_leader(self) -> None:
        """Its partitions are noted: the time to the next acknowledged write is counted from here."""
        chosen = await self._a_leader()
        if chosen is not None:
            await self._kill("kill leader", [chosen[0]], led=chosen[1], away_s=3.0)

    async def kill_minority(self) -> None:
        await self._kill("kill minority", self._some(self._minority), away_s=self._rng.uniform(1.0, 5.0))

    async def kill_all(self) -> None:
        if not self._busy:
            everyone = list(range(self._cluster.nodes))
            await self._kill("kill all", everyone, away_s=self._rng.uniform(0.0, 1.0))

    async def kill_shard(self) -> None:
        """One shard process; its supervisor starts it again."""
        for number in self._some(1):
            async with self._on("kill shard", [number]):
                deadline = time.monotonic() + VICTIM_S
                # A node serves a moment before it writes down which processes it has.
                while not (shards := self._cluster.pids(number)[2:]):
                    if time.monotonic() >= deadline:
                        raise RuntimeError(f"node-{number + 1} does not say what its processes are")
                    await asyncio.sleep(0.05)
                os.kill(self._rng.choice(shards), signal.SIGKILL)
                await asyncio.sleep(0.5)
                await self._ready([number])

    async def pause_one(self) -> None:
        for number in self._some(1):
            async with self._on("pause one", [number]):
                self._cluster.signal(number, signal.SIGSTOP)
                await asyncio.sleep(self._rng.uniform(0.5, 6.0))
                self._cluster.signal(number, signal.SIGCONT)

    async def pause_leader(self) -> None:
        """Others take over and acknowledge; what is asked of the stopped one meanwhile, it answers later."""
        chosen = await self._a_leader()
        if chosen is None:
            return
        number, places = chosen
        async with self._on("pause leader 10 s", [number], " ".join(places)):
            self._cluster.signal(number, signal.SIGSTOP)
            asked = []
            for _ in range(10):
                await asyncio.sleep(1.0)
                for place in places:
                    topic, _, partition = place.rpartition("/")
                    asked.append(
                        asyncio.create_task(self._workload.ask_leader(number, topic, int(partition)))
                    )
            self._cluster.signal(number, signal.SIGCONT)
            await asyncio.gather(*asked)

    # -- disks and clocks ----------------------------------------------------------------------

    async def _rules(self, what: str, rules: list[Rule], last_s: float) -> None:
        for number in self._some(1):
            async with self._on(what, [number]):
                self._cluster.set_rules(number, rules)
                await asyncio.sleep(last_s)
                self._cluster.set_rules(number, [])
                await asyncio.sleep(0.5)
                if await asyncio.to_thread(stands_still, self._cluster, number):
                    # As documented: a log whose write or sync failed stands still until its node is started
                    # anew, on a disk that works.
                    await asyncio.to_thread(self._cluster.kill, number)
                    self._cluster.spawn(number)
                await self._ready([number])

    async def disk_full(self) -> None:
        full = [Rule(operation=name, error="ENOSPC") for name in ("write", "create")]
        await self._rules("disk full", full, self._rng.uniform(2.0, 6.0))

    async def sync_fails(self) -> None:
        """A node may have forgotten what it had not synced: not while another's copies are gone, too."""
        if self._copy_gone:
            return
        await self._rules("sync fails", [Rule(operation="sync", error="EIO", times=1)], 2.0)

    async def slow_disk(self) -> None:
        slow = [Rule(operation="sync", stall_ms=300)]
        await self._rules("slow disk", slow, self._rng.uniform(2.0, 6.0))

    async def clock_step(self) -> None:
        """Stays wrong until the next step of this node."""
        for number in self._some(1):
            wrong_by_ms = self._rng.choice([-HOUR_MS, HOUR_MS, 0, self._rng.randint(-60_000, 60_000)])
            async with self._on("clock step", [number], f"{wrong_by_ms:+} ms"):
                self._cluster.set_clock(number, wrong_by_ms)
                await asyncio.sleep(1.0)

    async def bit_flips(self) -> None:
        """In files of stopped nodes; of each partition only ever on one node, so each entry keeps a copy."""
        for number in [] if self._copy_gone else self._some(1):
            async with self._on("bit flips", [number]) as fault:
                await asyncio.to_thread(self._cluster.kill, number)
                member = self._cluster.members[number]
                nodes = self._cluster.nodes
                own = set(range(number, 1024, nodes))
                flipped = flip_segments(member.data, self._rng, among=own.__contains__)
                fault.note = ", ".join(map(str, flipped))
                self._flipped += flipped
                self._cluster.spawn(number)
                await self._ready([number])

    async def wiped_directory(self) -> None:
        """A node's data folder is removed whole. Each entry keeps its other copies until all is made anew.

        The empty folder is refused under the old name, whose votes and acknowledgements it knows nothing of,
        and taken under another: then its replicas are made anew. Before, no other node may still lack what
        it forgot when a sync failed: of an entry of three copies one would be left, and a partition that
        cannot know whether it is the last one waits for a person.
        """
        if self._busy or self._copy_gone:
            return
        self._copy_gone = True
        try:
            for number in self._some(1):
                member = self._cluster.members[number]
                async with self._on("wiped directory", [number]) as fault:
                    await self._until("bits put right", self._whole)
                    await self._until("every vote counts", self._every_vote_counts)
                    await asyncio.to_thread(self._cluster.kill, number)
                    if self._rng.random() < 0.5:
                        await self._refused(number)
                    await asyncio.to_thread(self._cluster.wipe, number)
                    self._cluster.rename(number)
                    fault.note = f"comes back as {member.name}"
                    self._cluster.spawn(number)
                    await self._ready([number])
                    await self._until("replicas made anew", self._in_their_places)
                    await self._workload.find_shards()
        finally:
            self._copy_gone = False

    async def _refused(self, number: int) -> None:
        """The old name on an empty folder: the process ends by itself, and says why."""
        member = self._cluster.members[number]
        await asyncio.to_thread(self._cluster.wipe, number)
        told_bytes = member.log.stat().st_size
        self._cluster.spawn(number)
        process = member.process
        assert process is not None
        await self._until(f"{member.name} ended", lambda: process.poll() is not None)
        told = member.log.read_bytes()[told_bytes:]
        if b"known with another data directory" not in told:
            raise RuntimeError(f"{member.name} on an empty folder ended for another reason: {told.decode()}")
        self._cluster.kill(number)

    def _whole(self) -> bool:
        """Whether all is put right. An entry that is not read for long is not found: so all are read."""
        self._flipped = [flip for flip in self._flipped if not flip.is_whole()]
        for topic, partition in {flip.of_partition() for flip in self._flipped}:
            for url in self._cluster.urls:
                path = f"{url}/v1/topics/{topic}/partitions/{partition}/digest"
                get_json(path, headers={"Laminar-Local": "1"}, timeout=30.0)
        return not self._flipped

    def _every_vote_counts(self) -> bool:
        """Whether each node answers, and none has a replica that may have forgotten entries."""
        return all(metric(url, "laminar_node_recovering_replicas") == 0 for url in self._cluster.urls)

    def _in_their_places(self) -> bool:
        """Whether each replica is on a node that is there, whole, and keeps up with its leader."""
        names = {member.name for member in self._cluster.members}
        return all(
            told is not None
            and all(
                each["node"] in names and each["state"] == "made" and each["in_sync"]
                for partition in told["partitions"]
                for each in partition["replicas"]
            )
            for told in map(self._partitions, self._placed)
        )

    def _partitions(self, topic: str) -> Any:
        """What the first node that answers says of a topic's partitions."""
        paths = (f"{url}/v1/topics/{topic}/partitions" for url in self._cluster.urls)
        return next(filter(None, map(get_json, paths)), None)

    async def _until(self, what: str, true: Callable[[], bool]) -> None:
        """Look again and again; not for ever."""
        deadline = time.monotonic() + self._anew_timeout_s
        while not await asyncio.to_thread(true):
            if time.monotonic() >= deadline:
                raise RuntimeError(f"after {self._anew_timeout_s:g} s still not: {what}")
            await asyncio.sleep(0.2)

    # -- wires ---------------------------------------------------------------------------------

    async def _cut(self, what: str, pairs: list[tuple[int, int]], last_s: float) -> None:
        wires = self._cluster.wires
        assert wires is not None, "no wires to cut"
        note = ", ".join(f"{a + 1} to {b + 1}" for a, b in pairs)
        async with self._on(what, [], note):
            await asyncio.to_thread(wires.cut, pairs)
            await asyncio.sleep(last_s)
            await asyncio.to_thread(wires.heal)

    def _last_s(self) -> float:
        return self._rng.uniform(1.0, 10.0)

    async def cut_one(self) -> None:
        one = self._rng.randrange(self._cluster.nodes)
        others = [number for number in range(self._cluster.nodes) if number != one]
        await self._cut("cut one", between([one], others), self._last_s())

    async def cut_halves(self, *, last_s: float | None = None) -> None:
        numbers = list(range(self._cluster.nodes))
        self._rng.shuffle(numbers)
        half = self._rng.choice([len(numbers) // 2, len(numbers) - len(numbers) // 2])
        pairs = between(numbers[:half], numbers[half:])
        await self._cut("cut halves", pairs, self._last_s() if last_s is None else last_s)

    async def cut_one_way(self) -> None:
        a, b = self._rng.sample(range(self._cluster.nodes), 2)
        await self._cut("cut one way", [(a, b)], self._last_s())

    async def cut_ring(self) -> None:
        """Each node is cut off from one other, so that every one sees another majority."""
        numbers = list(range(self._cluster.nodes))
        self._rng.shuffle(numbers)
        if len(numbers) == 3:
            pairs = between([numbers[0]], [numbers[1]])  # a chain: one in the middle sees both
        else:
            pairs = [
                pair
                for place, number in enumerate(numbers)
                for pair in between([number], [numbers[(place + 2) % len(numbers)]])
            ]
        await self._cut("cut ring", sorted(set(pairs)), self._last_s())


def stands_still(cluster: FaultyCluster, number: int) -> bool:
    """Whether a node has ended, or a log of it takes nothing until it is started anew.

    Raises:
        RuntimeError: it runs, and does not say so for long.
    """
    process = cluster.members[number].process
    deadline = time.monotonic() + READY_TIMEOUT_S
    while process is None or process.poll() is None:
        metrics = get_text(f"{cluster.urls[number]}/metrics")
        found = re.search(r'^laminar_partitions\{state="stopped"\} (\d)', metrics or "", re.MULTILINE)
        if found is not None:
            return found[1] != "0"
        if time.monotonic() >= deadline:
            raise RuntimeError(f"node-{number + 1} does not say whether its logs stand still")
        time.sleep(0.1)
    return True


def metric(url: str, name: str) -> int | None:
    """A number of a node, over all its processes; None if it does not tell it now."""
    values = re.findall(rf"^{name}\{{[^}}]*\}} ([0-9.e+]+)$", get_text(f"{url}/metrics") or "", re.MULTILINE)
    return int(sum(map(float, values))) if values else None


def get_text(url: str) -> str | None:
    """What an address answers, None if nothing good."""
    try:
        with urllib.request.urlopen(url, timeout=5.0) as answer:
            return bytes(answer.read()).decode()
    except (OSError, http.client.HTTPException):
        return None


def between(some: list[int], others: list[int]) -> list[tuple[int, int]]:
    """Both ways between each of some and each of others."""
    return [pair for a in some for b in others for pair in ((a, b), (b, a))]
