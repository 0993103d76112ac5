"""Drivers of sinks: they begin, stage, commit, crash between any two steps, and are replaced while they live.

Each sink has several at a time, who know nothing of each other: so an older epoch is refused again and again.
What they do and are told is held against the ledger (`tests.sim.sinks`).
"""

from __future__ import annotations

import asyncio

import msgspec

from laminar.batch import build
from tests.sim.clients import BATCH, Answer, Client
from tests.sim.sinks import Parts, Tried
from tests.sim.watch import Watch
from tests.sim.world import World

_JSON = {"content-type": "application/json"}
# What may be asked again, of this or another node.
_AGAIN = (0, 503, 504, 429, 507, 421)


class Crashed(Exception):
    """This driver is no more; another one begins anew."""


class Driver(Client):
    """One process after the other that drives one sink."""

    def __init__(
        self, world: World, watch: Watch, number: int, *, sink: str, topic: str, partitions: int
    ) -> None:
        super().__init__(world, watch, number, topic=topic, partitions=partitions)
        self.sink = sink
        self.once = False
        self.ledger = watch.ledger
        self.crash_chance = 0.04
        # Between two steps: how many there were, and behind which one it crashes for certain.
        self.steps = 0
        self.crash_at = 0
        self.crashes = 0
        self.fenced = 0
        self.forgotten = 0
        self.committed = 0
        # What was sent before the process crashed, or instead of waiting: it arrives all the same.
        self._left_behind: set[asyncio.Task[Answer]] = set()

    async def _run(self, pause_s: float) -> None:
        self.connect()
        while not self.stopping:
            try:
                await self._drive(pause_s)
            except Crashed:
                self.crashes += 1
            await asyncio.sleep(self.rng.expovariate(1 / pause_s))

    def _maybe_crash(self) -> None:
        self.steps += 1
        if self.stopping or self.steps == self.crash_at or self.rng.random() < self.crash_chance:
            raise Crashed

    async def _drive(self, pause_s: float) -> None:
        """From `begin` until somebody else has begun."""
        epoch, number = await self.begin()
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / pause_s))
            self._maybe_crash()
            tried, parts = await self._stage(number, epoch)
            self._maybe_crash()
            if not await self.commit(number, epoch, tried, parts):
                self.fenced += 1
                return
            if self.rng.random() < 0.2:
                await self.commit(number, epoch, tried, parts)
            number += 1

    async def commit_batches(self, count: int) -> None:
        """So many batches from beginning to end, whatever others left, by one process after the other."""
        self.connect()
        while self.committed < count:
            try:
                epoch, number = await self.begin()
                self._maybe_crash()
                while self.committed < count:
                    tried, parts = await self._stage(number, epoch)
                    if not await self.commit(number, epoch, tried, parts):
                        break
                    self._maybe_crash()
                    number += 1
            except Crashed:
                self.crashes += 1

    async def begin(self) -> tuple[int, int]:
        """A new epoch, and the number of the next batch."""
        while True:
            query = "?once=true" if self.once else ""
            answer = await self._ask("POST", f"/v1/sinks/{self.sink}{query}", b"")
            if answer.status == 200:
                told = msgspec.json.decode(answer.body)
                self.ledger.told_epoch(self.sink, told["epoch"])
                last = told["committed"]
                return told["epoch"], 0 if last is None else last + 1
            assert answer.status in _AGAIN, f"{self.name}: begin {self.sink}: {answer}"
            await self._pause()

    async def _stage(self, number: int, epoch: int) -> tuple[Tried, Parts]:
        """The stages of one batch, in some partitions."""
        rng = self.rng
        tried = self.ledger.tries(self.sink, number, epoch)
        chosen = rng.sample(range(self.partitions), rng.randrange(1, self.partitions + 1))
        parts: Parts = {}
        for stage in range(rng.randrange(1, 3)):
            for partition in chosen:
                values = [
                    b"%s/%d/%d/%d/%d/%d" % (self.sink.encode(), number, epoch, partition, stage, place)
                    for place in range(rng.randrange(1, 4))
                ]
                # Written down before it is sent: from then on it may be there.
                tried.staged[(partition, stage)] = values
                await self._stage_one(number, epoch, partition, stage, values)
                parts = {**parts, partition: (*parts.get(partition, ()), stage)}
                self._maybe_crash()
            if set(parts) == set(chosen) and rng.random() < 0.1:
                # A commit of what is there so far, whose answer nobody waits for.
                tried.asked.append(parts)
                self._send_commit(number, epoch, parts)
        return tried, parts

    async def _stage_one(
        self, number: int, epoch: int, partition: int, stage: int, values: list[bytes]
    ) -> None:
        target = (
            f"/v1/sinks/{self.sink}/batches/{number}/stages"
            f"?topic={self.topic}&partition={partition}&stage={stage}&epoch={epoch}"
        )
        while True:
            answer = await self._ask("POST", target, bytes(build(values)), kind=BATCH)
            if answer.status == 201:
                return
            if answer.status == 409:
                # Somebody else, or what was left behind, has committed it, or is about to.
                assert answer.code in ("already_committed", "in_progress"), f"{self.name}: {answer}"
                raise Crashed
            assert answer.status in _AGAIN, f"{self.name}: stage {stage} of {number}: {answer}"
            self._maybe_crash()
            await self._pause()

    async def commit(self, number: int, epoch: int, tried: Tried, parts: Parts) -> bool:
        """Commit, however often that must be asked for; False: somebody else has begun."""
        first = parts not in tried.asked
        alone = not tried.asked
        if first:
            tried.asked.append(parts)
        while True:
            sent = self._send_commit(number, epoch, parts)
            self._maybe_crash()
            answer = await sent
            if answer.status == 200:
                self.ledger.told_committed(self.sink, number)
                self.committed += 1
                return True
            alone = alone and answer.outcome == "not_applied"
            if answer.status == 409:
                assert answer.code in ("fenced", "no_stage", "in_progress"), f"{self.name}: {answer}"
                if alone:
                    self.ledger.denied_for_good(self.sink, number, epoch)
                if answer.code == "fenced":
                    return False
                raise Crashed
            if answer.status == 404 and self.once:
                # It took so long that the sink was forgotten, the batch committed or not.
                assert ("no_such_sink", "unknown") == (answer.code, answer.outcome), f"{self.name}: {answer}"
                self.forgotten += 1
                raise Crashed
            assert answer.status in _AGAIN, f"{self.name}: commit {number} of {self.sink}: {answer}"
            self._maybe_crash()
            await self._pause()

    def _send_commit(self, number: int, epoch: int, parts: Parts) -> asyncio.Task[Answer]:
        """It is on its way, whether anybody waits for the answer or not."""
        task = asyncio.get_running_loop().create_task(self._ask_commit(self.sink, number, epoch, parts))
        self._left_behind.add(task)
        task.add_done_callback(self._left_behind.discard)
        return task

    async def _ask_commit(self, sink: str, number: int, epoch: int, parts: Parts) -> Answer:
        body = {
            "epoch": epoch,
            "parts": [
                {"topic": self.topic, "partition": partition, "stages": list(stages)}
                for partition, stages in parts.items()
            ],
        }
        return await self._ask("PUT", f"/v1/sinks/{sink}/batches/{number}", msgspec.json.encode(body))

    async def _ask(self, method: str, target: str, body: bytes, *, kind: str = "") -> Answer:
        self.operations += 1
        machine = self.rng.choice(list(self.world.machines.values()))
        headers = {"content-type": kind} if kind else _JSON
        return await self.request(
            machine.node, self.rng.randrange(machine.shards), method, target, headers, body
        )

    async def _pause(self) -> None:
        await asyncio.sleep(0.05 + self.rng.random() * 0.5)


class Once(Driver):
    """One that makes up a sink for each batch, as Spark does for a write without a name."""

    def __init__(self, world: World, watch: Watch, number: int, *, topic: str, partitions: int) -> None:
        super().__init__(world, watch, number, sink="", topic=topic, partitions=partitions)
        self.once = True
        self.begun = 0

    async def _drive(self, pause_s: float) -> None:
        await asyncio.sleep(self.rng.expovariate(1 / pause_s))
        self.begun += 1
        self.sink = f"{self.name}-{self.begun}"
        epoch, number = await self.begin()
        assert number == 0, f"{self.name}: {self.sink} is new, and has committed {number - 1}"
        self._maybe_crash()
        tried, parts = await self._stage(number, epoch)
        self._maybe_crash()
        await self.commit(number, epoch, tried, parts)
