"""Who uses channels in a simulated cluster: producers, consumers that fail in all ways, and a person.

All ask any node, whose view of the catalog may be old. What a consumer says of a record, and what a person
asks for, is noted before it is sent: it may be carried out though no answer comes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from laminar.batch import Batch, build
from laminar.node.transport.transport import RemoteError
from laminar.wire.channels import JOBS_TYPE, parse_token, token
from tests.sim.channel_rules import ChannelRules, Token
from tests.sim.clients import BATCH, Answer, Client
from tests.sim.watch import Watch
from tests.sim.world import World

NAMES = ("free", "keyed", "other")
KEYS = (b"a", b"b", b"c", None)
JSON = {"content-type": "application/json"}
# Answers after which one goes on: of the cluster's state, and of what others did meanwhile.
_EXPECTED = frozenset({0, 200, 201, 204, 404, 409, 412, 421, 429, 503, 504, 507})


class ChannelClient(Client):
    """One that asks for channels."""

    def __init__(self, world: World, watch: Watch, number: int, *, topic: str, rules: ChannelRules) -> None:
        super().__init__(world, watch, number, topic=topic, partitions=world.options.partitions)
        self.rules = rules
        self.answers: Counter[str] = Counter()

    def start(self, *, pause_s: float) -> asyncio.Task[None]:
        return self.watched(super().start(pause_s=pause_s))

    def watched(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """Have the world end at once if a rule is broken in this task."""
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.world.loop.failures.append(error)

    async def ask(
        self, what: str, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> Answer:
        content = b"" if body is None else msgspec.json.encode(body)
        target = f"/v1/topics/{self.topic}/{path}"
        partition = self.rng.randrange(self.partitions)
        answer = await self.request(
            *self._somebody(partition), method, target, (JSON if content else {}) | (headers or {}), content
        )
        assert answer.status in _EXPECTED, f"{what} {path} {body}: {answer}"
        assert not isinstance(answer.error, RemoteError), f"{what} {path} {body}: {answer.error}"
        self.answers[f"{what}: {answer.code or answer.status}"] += 1
        return answer


class KeyedProducer(ChannelClient):
    """Appends batches with keys, tags and headers, each until it is acknowledged."""

    async def _run(self, pause_s: float) -> None:
        self.connect()
        while not self.stopping:
            await asyncio.sleep(self.rng.expovariate(1 / pause_s))
            await self._append(self.rng.randrange(self.partitions))

    async def _append(self, partition: int) -> None:
        rng, count = self.rng, self.rng.randrange(1, 6)
        sequence = self.sequences[partition]
        frame = bytes(
            build(
                [
                    b"%s/%d/%d/%d " % (self.name.encode(), partition, sequence, place)
                    + rng.randbytes(rng.randrange(200))
                    for place in range(count)
                ],
                keys=[rng.choice(KEYS) for _ in range(count)],
                tags=[rng.choice(("x", "y", None)) for _ in range(count)],
                headers=[rng.choice(({}, {"h": b"1"})) for _ in range(count)],
                producer_id=self.producer,
                producer_epoch=1,
                sequence=sequence,
            )
        )
        target = f"/v1/topics/{self.topic}/partitions/{partition}/records"
        while not self.stopping:
            answer = await self.request(
                *self._somebody(partition), "POST", target, {"content-type": BATCH}, frame
            )
            if answer.status in (200, 201):
                self.acknowledged += count
                self.sequences[partition] += 1
                return
            # A leader that was deposed and paused since does not know of the batch before this one.
            assert answer.status in (0, 503, 504, 429, 507, 404, 421) or answer.code == "out_of_sequence", (
                f"{target}: {answer}"
            )
            await asyncio.sleep(0.05 + rng.random() * 0.4)


class Worker(ChannelClient):
    """A consumer: of what it is given it acknowledges most, and does all that a consumer may do wrong."""

    # It acknowledges all that it is given, soon.
    in_order = False

    async def _run(self, pause_s: float) -> None:
        self.connect()
        while not self.stopping:
            await asyncio.sleep(0.1 if self.in_order else self.rng.expovariate(1 / pause_s))
            await self._receive(self.rng.choice(NAMES))

    async def _receive(self, name: str) -> None:
        rng = self.rng
        body: dict[str, Any] = {"max": rng.choice((1, 3, 20)), "wait_ms": rng.choice((0, 500, 3000))}
        if self.in_order:
            body["wait_ms"] = 0
        elif rng.random() < 0.3:
            body["timeout_ms"] = rng.choice((1000, 5000))
        answer = await self.ask("receive", "POST", f"channels/{name}/receive", body, {"accept": JOBS_TYPE})
        if answer.status != 200:
            return
        parts, _ = msgspec.msgpack.decode(answer.body)
        for partition, _, runs, frames in parts:
            held = {
                batch.base_offset + at: bytes(value)
                for batch in map(Batch, frames)
                for at, value in enumerate(batch.values)
            }
            values = self._group(partition).values
            for first, length, delivery, attempt in runs:
                tokens = [(name, partition, offset, delivery) for offset in range(first, first + length)]
                for each in tokens:
                    self.rules.given(each, attempt, held[each[2]], values)
                together = [tokens] if rng.random() < 0.5 else [[each] for each in tokens]
                for each_of in together:
                    self.watched(self.world.loop.start(self.life, self._use(each_of)))

    async def _use(self, tokens: list[Token]) -> None:
        """Do with records of one run what consumers do."""
        rng = self.rng
        await asyncio.sleep(rng.random() * (0.02 if self.in_order else 0.2))
        deed = "ack" if self.in_order else rng.choice(_DEEDS)
        if deed == "crash":
            return
        if deed in ("stall", "early and late"):
            if deed != "stall":
                await self._say("ack", tokens)
            await asyncio.sleep(rng.choice((1.0, 3.0, 9.0)))
        if deed == "extend":
            await self._say("extend", tokens)
            await asyncio.sleep(rng.choice((0.5, 2.0, 6.0)))
        if deed == "another's":
            # No delivery of this one's: nobody's time, work or attempt may end by it.
            other = max(0, tokens[0][3] + rng.choice((-2, -1, 1)))
            await self._say("ack", [(*each[:3], other) for each in tokens])
            return
        if deed in ("nack", "release"):
            await self._say(deed, tokens)
            return
        if deed == "both":
            await self._say("nack", tokens)
        await self._say("ack", tokens)
        if deed == "twice":
            await self._say("ack", tokens)

    async def _say(self, verb: str, tokens: list[Token]) -> None:
        """Say it until that is answered, or for some times."""
        rng, asked = self.rng, self.rules.asked
        name, partition, first, delivery = tokens[0]
        last = tokens[-1][2]
        text = f"{partition}:{first}-{last}:{delivery}" if last > first else token(partition, first, delivery)
        body: dict[str, Any] = {verb: [text]}
        if verb == "ack":
            asked.acks.update(tokens)
        elif verb == "release":
            asked.releases.update(tokens)
        elif verb == "nack":
            delay_ms = rng.choice((None, 0, 300, 4000))
            body = {"nack": [{"token": text, "delay_ms": delay_ms, "reason": rng.choice(("", "no luck"))}]}
            for each in tokens:
                asked.nacks[each].add(delay_ms)
        else:
            body = {"extend": [{"token": text}]}
        for _ in range(20 if self.in_order else 4):
            asked_s = self.world.loop.time()
            answer = await self.ask(verb, "POST", f"channels/{name}/acks", body)
            if answer.status == 200:
                found = msgspec.json.decode(answer.body)
                late = {
                    (name, each.partition, offset, each.delivery)
                    for each in map(parse_token, found["late"])
                    for offset in range(each.first, each.end)
                }
                assert found["done"] + len(late) == len(tokens), f"{verb} {tokens}: {found}"
                for each in tokens:
                    self.rules.settled(verb, each, late=each in late, asked_s=asked_s)
                return
            if answer.code == "no_such_channel":
                return
            await asyncio.sleep(0.05 + rng.random() * 0.4)


_DEEDS = (
    *("ack",) * 12,
    *("nack",) * 3,
    *("release", "extend", "crash", "stall", "twice", "both", "early and late", "another's"),
)


class Person(ChannelClient):
    """Makes, sets, pauses, moves and deletes channels, replays and drops the dead, and deletes records."""

    async def _run(self, pause_s: float) -> None:
        self.connect()
        for name in NAMES:
            await self.create(name)
        while not self.stopping:
            # A world waits a minute for it to end.
            await asyncio.sleep(min(self.rng.expovariate(1 / pause_s), 4 * pause_s))
            deed = self.rng.choice(
                (
                    *("set",) * 4,
                    *("move",) * 2,
                    *("replay",) * 2,
                    "drop",
                    "create",
                    "create",
                    "delete",
                    "trim",
                )
            )
            name = self.rng.choice(NAMES)
            deeds: dict[str, Callable[[str], Awaitable[Any]]] = {
                "set": self.set,
                "move": self._move,
                "replay": self.replay,
                "drop": self._drop,
                "create": self.create,
                "delete": self._delete,
                "trim": self._trim,
            }
            await deeds[deed](name)

    async def create(self, name: str) -> None:
        rng = self.rng
        settings: dict[str, Any] = {
            "timeout_ms": rng.choice((1000, 2000, 5000)),
            "max_attempts": rng.choice((0, 2, 4)),
            "retry_ms": rng.choice((0, 500)),
            "retry_max_ms": 5000,
            "max_in_flight": rng.choice((3, 20, 10_000)),
        }
        if name == "keyed" or rng.random() < 0.3:
            settings["order"] = "key"
            settings["on_dead"] = rng.choice(("continue", "park"))
        if name == "other":
            settings["filter"] = rng.choice(_FILTERS)
            settings["start"] = rng.choice(("earliest", "latest"))
            settings["hold_ms"] = rng.choice((0, 7 * 86_400_000))
        await self.ask("create", "PUT", f"channels/{name}", {"settings": settings})

    async def set(self, name: str, settings: dict[str, Any] | None = None) -> bool:
        """Change settings of a channel; return whether it has them, or is not there."""
        found = await self.ask("describe", "GET", f"channels/{name}")
        if found.status != 200:
            return found.status == 404
        rng = self.rng
        known = msgspec.json.decode(found.body)["settings"]
        parks = ("continue", "park") if known.get("order") == "key" else ("continue",)
        if settings is None:
            settings = rng.choice(
                (
                    {"paused": not known.get("paused", False)},
                    {"paused": False},
                    {"max_in_flight": rng.choice((1, 5, 50))},
                    {"filter": rng.choice((*_FILTERS, None))},
                    {"on_dead": rng.choice(parks)},
                )
            )
        etag = {"if-match": found.headers["etag"]}
        answer = await self.ask("set", "PATCH", f"channels/{name}", {"settings": settings}, etag)
        return answer.status in (200, 404)

    async def _move(self, name: str) -> None:
        rng, body = self.rng, {"drop": self.rng.random() < 0.3}
        self.rules.asked.seeks.add(name)
        at = {"at": rng.choice(("earliest", "latest", "latest"))}
        await self.ask("move", "PUT", f"channels/{name}/position", body | at)

    async def replay(self, name: str) -> None:
        self.rules.asked.replays.add(name)
        await self.ask("replay", "POST", f"channels/{name}/dead", {"replay": "all"})

    async def _drop(self, name: str) -> None:
        self.rules.asked.drops.add(name)
        await self.ask("drop", "POST", f"channels/{name}/dead", {"drop": "all"})

    async def _delete(self, name: str) -> None:
        await self.ask("delete", "DELETE", f"channels/{name}")
        if self.rng.random() < 0.7:
            await self.create(name)

    async def _trim(self, name: str) -> None:
        number = self.rng.randrange(self.partitions)
        end = len(self._group(number).values)
        before = self.rng.randrange(end + 1)
        trims = self.rules.asked.trims
        trims[number] = max(trims[number], before)
        await self.ask("trim", "DELETE", f"partitions/{number}/records?before={before}")


_FILTERS: tuple[dict[str, Any], ...] = (
    {"tags": ["x"]},
    {"tags": ["x", "y"]},
    {"headers": {"h": "1"}},
    {"tags": ["y"], "headers": {"h": "1"}},
)
