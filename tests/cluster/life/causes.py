"""Why appends took long: their leader moved, the clients' loop was late, the disk was, or else a node was.

When a leader moved follows from the records: each batch has the term of the leader that appended it. An
append *met* a change if its record is of a later term than any that had been acknowledged when it began.
"""

from __future__ import annotations

import asyncio
import os
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import laminar
from benches.common import usage
from laminar.testing.cluster import LocalCluster, processes_of_group
from tests.checkers import Operation
from tests.cluster.faults.workload import now_us

Cause = Literal["leader", "client", "disk", "node"]
Place = tuple[str, int]
CAUSES: Sequence[Cause] = ("leader", "client", "disk", "node")
_TICK_S, _SYNC_PAUSE_S = 0.01, 0.05


class Lateness:
    """Spans in which something was late, by when they ended and how long they were."""

    def __init__(self) -> None:
        self._ended_us: list[int] = []
        self._took_us: list[int] = []

    def add(self, took_us: int) -> None:
        """Note a span that ends now."""
        self._ended_us.append(now_us())
        self._took_us.append(took_us)

    def within(self, from_us: int, to_us: int) -> int:
        """Return how long it was late in all between these instants."""
        found = 0
        for place in range(bisect_left(self._ended_us, from_us), len(self._ended_us)):
            ended_us = self._ended_us[place]
            began_us = ended_us - self._took_us[place]
            found += max(0, min(ended_us, to_us) - max(began_us, from_us))
            if began_us > to_us:
                break
        return found


class Probes:
    """How late the clients' own loop is, looked at every 10 ms, and how long a small sync of the disk takes.

    No answer is seen before the loop turns, and none is given before the records are synced.
    """

    def __init__(self, folder: Path) -> None:
        self.loop, self.disk = Lateness(), Lateness()
        self._path = folder / "probe"

    async def run(self) -> None:
        """Until cancelled."""
        fd = os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            await asyncio.gather(self._turns(), self._syncs(fd))
        finally:
            os.close(fd)

    async def _turns(self) -> None:
        while True:
            due_us = now_us() + int(_TICK_S * 1e6)
            await asyncio.sleep(_TICK_S)
            self.loop.add(now_us() - due_us)

    async def _syncs(self, fd: int) -> None:
        while True:
            self.disk.add(await asyncio.to_thread(self._sync, fd))
            await asyncio.sleep(_SYNC_PAUSE_S)

    @staticmethod
    def _sync(fd: int) -> int:
        began_us = now_us()
        os.pwrite(fd, bytes(4096), 0)
        os.fdatasync(fd)
        return now_us() - began_us


async def terms_of(urls: Sequence[str], topics: Iterable[str]) -> dict[Place, list[tuple[int, int]]]:
    """Return for each partition the terms of its records, each with its first offset."""
    found: dict[Place, list[tuple[int, int]]] = defaultdict(list)
    async with laminar.aio.connect(urls, timeout=60.0) as client:
        for topic in topics:
            async for batch in client.topic(topic).read().batches():
                known = found[topic, batch.partition]
                if not known or known[-1][1] != batch.frame.header.term:
                    known.append((batch.frame.base_offset, batch.frame.header.term))
    return dict(found)


def causes_of(
    operations: Iterable[Operation], terms: Mapping[Place, list[tuple[int, int]]], probes: Probes
) -> dict[int, Cause]:
    """Return the cause of each acknowledged append's time, by the `id` of the operation.

    It is the loop's or the disk's if that was late for half of the time.
    """
    found: dict[int, Cause] = {}
    by_place: dict[Place, list[Operation]] = defaultdict(list)
    for each in operations:
        if each.kind == "append" and each.outcome == "ok" and each.end_us is not None:
            by_place[each.topic, each.partition].append(each)
    for place, appends in by_place.items():
        firsts = [first for first, _ in terms.get(place, [])]
        # When the first record of each term was acknowledged: who began before that, and is of it, met it.
        seen_us = [float("inf")] * (len(firsts) + 1)
        numbers = {id(each): bisect_right(firsts, each.offset or 0) for each in appends}
        for each in appends:
            assert each.end_us is not None
            number = numbers[id(each)]
            seen_us[number] = min(seen_us[number], each.end_us)
        for each in appends:
            assert each.end_us is not None
            number = numbers[id(each)]
            span = (each.start_us, each.end_us)
            half_us = (each.end_us - each.start_us) / 2
            if number > 1 and each.start_us < seen_us[number]:
                found[id(each)] = "leader"
            elif probes.loop.within(*span) >= half_us:
                found[id(each)] = "client"
            elif probes.disk.within(*span) >= half_us:
                found[id(each)] = "disk"
            else:
                found[id(each)] = "node"
    return found


@dataclass(slots=True)
class Cpu:
    """What the nodes, the clients (this process) and the machine had used at an instant, in seconds."""

    nodes: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By process: CPU seconds, and seconds in which it was ready to run and got no CPU."""
    at_s: float = field(default_factory=time.monotonic)
    client_s: float = field(default_factory=time.process_time)
    client_waited_s: float = 0.0
    machine_s: float = field(default_factory=usage.machine_cpu_s)

    @classmethod
    def of(cls, cluster: LocalCluster) -> Cpu:
        """Look now."""
        found = cls(client_waited_s=usage.waited_s([os.getpid()]))
        for member in cluster.members:
            for pid in processes_of_group(member.process.pid) if member.process is not None else ():
                try:
                    found.nodes[pid] = (usage.cpu_s([pid]), usage.waited_s([pid]))
                except (FileNotFoundError, ProcessLookupError):
                    continue  # it has ended meanwhile
        return found

    def since(self, before: Cpu) -> str:
        """Return the shares of all CPUs, and of the time that was waited for one, as columns.

        Of a process that has ended nothing is known: it counts among the others.
        """
        span_s = max(1e-6, self.at_s - before.at_s)
        cpus_s = span_s * (os.cpu_count() or 1)
        none = (0.0, 0.0)
        nodes_s = sum(cpu - before.nodes.get(pid, none)[0] for pid, (cpu, _) in self.nodes.items())
        waited_s = sum(waited - before.nodes.get(pid, none)[1] for pid, (_, waited) in self.nodes.items())
        client_s = self.client_s - before.client_s
        others_s = max(0.0, self.machine_s - before.machine_s - nodes_s - client_s)
        return (
            f"{nodes_s / cpus_s:5.0%} {client_s / cpus_s:5.0%} {others_s / cpus_s:5.0%}"
            f"   {waited_s / span_s:6.0%} {(self.client_waited_s - before.client_waited_s) / span_s:5.0%}"
        )
