"""Drivers of sinks that acknowledge jobs with their batches, and do all that such a driver may do wrong.

They hold jobs beyond their time, extend them, come back when others have them, crash before and behind a
commit, and are replaced by another driver of their sink while they live.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from laminar.batch import Batch
from laminar.node.transactions.coordinator import id_of
from laminar.wire.channels import JOBS_TYPE, parse_token, token
from tests.sim.channel_clients import NAMES, Worker
from tests.sim.channel_rules import ChannelRules, Token
from tests.sim.clients import Answer
from tests.sim.watch import Watch
from tests.sim.world import World

# What may be asked again, of this or another node.
_AGAIN = (0, 503, 504, 429, 507, 421)
# Why a batch is not committed: what others did meanwhile, or who this driver was before.
_REFUSED = ("late", "in_progress", "fenced", "no_such_channel", "no_such_sink")


class Pinner(Worker):
    """One driver after the other of one sink, whose batches have only acknowledgements."""

    def __init__(
        self, world: World, watch: Watch, number: int, *, sink: str, topic: str, rules: ChannelRules
    ) -> None:
        super().__init__(world, watch, number, topic=topic, rules=rules)
        self.sink = sink
        self._left_behind: set[asyncio.Task[Answer]] = set()

    async def _run(self, pause_s: float) -> None:
        self.connect()
        while not self.stopping:
            # What the last one has pinned, and not committed, waits for that.
            await asyncio.sleep(self.rng.choice((0.0, 2.0, 8.0)))
            epoch, number = await self.begin()
            while not self.stopping:
                await asyncio.sleep(self.rng.expovariate(1 / pause_s))
                if not await self._drive(epoch, number):
                    break  # another process begins, or this one again
                number += 1

    async def begin(self) -> tuple[int, int]:
        """Begin an epoch, which ends what older ones have pinned; return it, and the next batch's number."""
        while True:
            answer = await self._sink("POST", f"/v1/sinks/{self.sink}", b"")
            if answer.status == 200:
                told = msgspec.json.decode(answer.body)
                self.watch.ledger.told_epoch(self.sink, told["epoch"])
                last = told["committed"]
                return told["epoch"], 0 if last is None else last + 1
            assert answer.status in _AGAIN, f"{self.name}: begin {self.sink}: {answer}"
            await asyncio.sleep(0.05 + self.rng.random() * 0.5)

    async def _drive(self, epoch: int, number: int) -> bool:
        """Commit one batch; False: this process is at its end, the batch is committed or not."""
        rng = self.rng
        tokens: list[Token] = []
        while not tokens:
            if self.stopping:
                return False
            await asyncio.sleep(rng.expovariate(2.0))
            tokens = [each for _ in range(rng.choice((1, 2, 4))) for each in await self._take()]
        deed = rng.choice(_DEEDS)
        if deed == "crash":
            return False
        if deed == "extend":
            for each in tokens:
                await self._say("extend", [each])
        if deed == "late":
            await self._say(
                "nack", tokens[:1]
            )  # so what the batch pins in the other partition is pinned in vain
        if deed in ("stall", "extend"):
            await asyncio.sleep(rng.choice((0.5, 2.0, 6.0)))  # others may have them by then
        self.rules.pins.asked[id_of(self.sink), number, epoch].update(tokens)
        if deed == "leave":
            self._send_commit(epoch, number, tokens)
            await asyncio.sleep(rng.random() * 3.0)
            return False
        committed = await self._commit(epoch, number, tokens)
        if committed and deed == "twice":
            await self._commit(epoch, number, tokens)
        if not committed and rng.random() < 0.5:
            # By its token alone nothing ends that its batch has pinned.
            await self._say(rng.choice(("ack", "nack", "release")), tokens[-1:])
        return committed

    async def _take(self) -> list[Token]:
        rng, name = self.rng, self.rng.choice(NAMES)
        body: dict[str, Any] = {"max": rng.choice((1, 3)), "wait_ms": rng.choice((0, 500))}
        if rng.random() < 0.5:
            body["timeout_ms"] = 1000
        answer = await self.ask("receive", "POST", f"channels/{name}/receive", body, {"accept": JOBS_TYPE})
        if answer.status != 200:
            return []
        found: list[Token] = []
        for partition, _, runs, frames in msgspec.msgpack.decode(answer.body)[0]:
            held = {
                batch.base_offset + at: bytes(value)
                for batch in map(Batch, frames)
                for at, value in enumerate(batch.values)
            }
            values = self._group(partition).values
            for first, length, delivery, attempt in runs:
                for offset in range(first, first + length):
                    each = (name, partition, offset, delivery)
                    self.rules.given(each, attempt, held[offset], values)
                    found.append(each)
        return found

    async def _commit(self, epoch: int, number: int, tokens: list[Token]) -> bool:
        """Commit, however often that must be asked for; False: it is refused, or this process crashes."""
        while True:
            asked_s = self.world.loop.time()
            answer = await self._send_commit(epoch, number, tokens)
            if answer.status == 200:
                self.watch.ledger.told_committed(self.sink, number)
                for each in tokens:
                    self.rules.committed_with(each, asked_s)
                return True
            if answer.status in (404, 409):
                assert answer.code in _REFUSED, f"{self.name}: commit {number} of {self.sink}: {answer}"
                return False
            assert answer.status in _AGAIN, f"{self.name}: commit {number} of {self.sink}: {answer}"
            if self.stopping or self.rng.random() < 0.1:
                return False
            await asyncio.sleep(0.05 + self.rng.random() * 0.5)

    def _send_commit(self, epoch: int, number: int, tokens: list[Token]) -> asyncio.Task[Answer]:
        """Have it on its way, whether anybody waits for the answer or not."""
        by_partition: dict[int, dict[str, list[str]]] = {}
        for name, partition, offset, delivery in tokens:
            text = token(partition, offset, delivery)
            assert parse_token(text).first == offset
            by_partition.setdefault(partition, {}).setdefault(name, []).append(text)
        parts = [
            {
                "topic": self.topic,
                "partition": partition,
                "acks": [{"channel": name, "tokens": texts} for name, texts in acks.items()],
            }
            for partition, acks in by_partition.items()
        ]
        body = msgspec.json.encode({"epoch": epoch, "parts": parts})
        task = asyncio.get_running_loop().create_task(
            self._sink("PUT", f"/v1/sinks/{self.sink}/batches/{number}", body)
        )
        self._left_behind.add(task)
        task.add_done_callback(self._left_behind.discard)
        return task

    async def _sink(self, method: str, target: str, body: bytes) -> Answer:
        machine = self.rng.choice(list(self.world.machines.values()))
        headers = {"content-type": "application/json"}
        answer = await self.request(
            machine.node, self.rng.randrange(machine.shards), method, target, headers, body
        )
        what = "begin" if method == "POST" else "commit"
        self.answers[f"{what}: {answer.code or answer.status}"] += 1
        return answer


_DEEDS = (*("commit",) * 4, *("stall",) * 2, *("late",) * 2, "extend", "extend", "twice", "leave", "crash")
