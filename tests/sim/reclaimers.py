"""Who has ended partitions reclaimed, and consumers that are behind, at the end, or away meanwhile.

A `Reclaimer` asks for any partition, gives up records of those that have ended, and lets a week pass for all
of them. A `Wanderer` is a consumer with a cursor of its own: it begins, drains what it may, goes away for
long, rewinds, is deleted and comes back under another name. When a reclaim begins it rewinds or begins a
cursor there in that moment. A `Follower` reads without a cursor, and goes over ended and reclaimed
partitions.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from laminar.node.api.consumers.reclaim import Reclaims
from laminar.node.routes import lineage
from laminar.node.shard.shard import Shard
from membership.records import TopicRecord
from membership.route_rules import route_of
from tests.sim.clients import Answer, Client
from tests.sim.consumers import Consumer
from tests.sim.machine import Machine
from tests.sim.reclaim_rules import ReclaimRules
from tests.sim.simulation import TOPIC
from tests.sim.watch import Watch
from tests.sim.world import World

_PARTITIONS = f"/v1/topics/{TOPIC}/partitions"
# Of the cluster's state, of races, of what is not known.
_EXPECTED = frozenset({0, 200, 204, 404, 409, 410, 412, 416, 421, 422, 429, 503, 504, 507})


def reclaims_of(shard: Shard) -> Reclaims:
    """Return what reclaims the partitions that a shard leads."""
    reclaims = shard._application._handlers["reclaim_partition"].__self__  # type: ignore[attr-defined]
    assert isinstance(reclaims, Reclaims)
    return reclaims


class Reclaimer(Client):
    """Has partitions reclaimed, on request and for their age."""

    def __init__(self, world: World, watch: Watch, number: int, *, rules: ReclaimRules) -> None:
        super().__init__(world, watch, number, topic=TOPIC, partitions=1)
        self.rules = rules

    async def _run(self, pause_s: float) -> None:
        self.connect()
        while not self.stopping:
            await asyncio.sleep(self.rng.expovariate(1 / pause_s))
            topic = self.watch.routes.newest.topics.get(TOPIC)
            if topic is None or self.stopping:
                continue
            ended = [number for number in topic.all_numbers if lineage.seal_of(topic, number) is not None]
            # Those that nothing is before can go; for others a reason is to be given.
            first = [each for each in ended if not lineage.ancestors_of(topic, each)]
            draw = self.rng.random()
            if draw < 0.15:
                await self.reclaim(self.rng.randrange((topic.next_partition or topic.partitions) + 1), topic)
            elif draw < 0.2 and ended:
                await self._empty(self.rng.choice(ended))
            elif draw < 0.5 and first:
                await self._empty(self.rng.choice(first))
                self._let_time_pass()
            elif first:
                await self.reclaim(self.rng.choice(first), topic)

    async def reclaim(self, number: int, before: TopicRecord) -> Answer:
        """Ask any node to reclaim a partition, and check the answer."""
        asked_s, losses = self.world.loop.time(), self.watch.losses
        node, shard = self._somebody(number)
        answer = await self.request(node, shard, "DELETE", f"{_PARTITIONS}/{number}", {}, b"")
        self.rules.answered(number, answer, asked_s=asked_s, before=before, losses=losses)
        return answer

    async def _empty(self, number: int) -> None:
        """Give up the records of a partition that has ended, as retention does."""
        end = len(self.rules.group(number).values)
        node, shard = self._somebody(number)
        target = f"{_PARTITIONS}/{number}/records?before={end}"
        answer = await self.request(node, shard, "DELETE", target, {}, b"")
        assert answer.status in _EXPECTED, answer

    def _let_time_pass(self) -> None:
        """All shards look for what is due: here each partition is, that has ended and has no records."""
        for machine in self.world.up:
            for running in machine.running.values():
                if isinstance(running.process, Shard):
                    self.world.loop.start(running.life, self._look(running.process))

    async def _look(self, shard: Shard) -> None:
        reclaims = reclaims_of(shard)
        due = [each.number for each in shard.partitions.values() if reclaims._is_due(each)]
        await reclaims.reclaim_due()
        self.rules.happened["partitions due"] += len(due)
        self.rules.happened["partitions reclaimed that were due"] += len(self.rules.gone.keys() & due)


class Wanderer(Client):
    """A consumer with a cursor of its own, which it sets as no member of a group."""

    def __init__(self, world: World, watch: Watch, number: int, *, rules: ReclaimRules) -> None:
        super().__init__(world, watch, number, topic=TOPIC, partitions=1)
        self.rules = rules
        self.names = 0
        self.answers: Counter[str] = Counter()

    @property
    def cursor(self) -> str:
        """Its present name: no name is used again after it was deleted."""
        return f"{self.name}.{self.names}"

    async def _run(self, pause_s: float) -> None:
        self.connect()
        self.rules.on_fence.append(self._at_fence)
        while not self.stopping:
            await asyncio.sleep(self.rng.expovariate(1 / pause_s))
            draw = self.rng.random()
            if draw < 0.02:
                await self._end()
            elif draw < 0.03:
                await self._ask("PUT", {"rewind": self.rng.choice(("earliest", "latest"))})
            elif draw < 0.05:
                await asyncio.sleep(self.rng.random() * 30)
            else:
                await self.drain(at_most=self.rng.choice((1, 10_000, 10_000)))

    def _at_fence(self, number: int) -> None:
        """Somebody comes just when a partition is being reclaimed."""
        if self.stopping or self.rng.random() < 0.9:
            return
        later_s = self.rng.choice((0.0, 0.001, 0.01, 0.1))
        self.world.loop.call_in(
            self.life, later_s, lambda: self.world.loop.start(self.life, self._come(number))
        )

    async def _come(self, number: int) -> None:
        draw = self.rng.random()
        if draw < 0.4:
            await self._ask("PUT", {"rewind": "earliest"})
        elif draw < 0.6:
            await self._ask("PUT", {"rewind": {str(number): 0}})
        elif draw < 0.9:
            await self._end()
            await self._ask("PUT", {"begin": self.rng.choice(("earliest", "latest"))})
        else:
            await self._ask("PUT", {"positions": {str(number): 0}})

    async def _end(self) -> None:
        """Go on under another name. What is left of this one would keep all partitions for ever."""
        name, self.names = self.names, self.names + 1
        while not self.stopping:
            if (await self._ask("DELETE", number=name)).status == 204:
                return
            await asyncio.sleep(0.5)

    async def _ask(self, method: str, body: object = None, *, number: int | None = None) -> Answer:
        content = b"" if body is None else msgspec.json.encode(body)
        headers = {"content-type": "application/json"} if content else {}
        cursor = self.cursor if number is None else f"{self.name}.{number}"
        path = f"/v1/topics/{TOPIC}/cursors/{cursor}"
        answer = await self.request(*self._somebody(0), method, path, headers, content)
        assert answer.status in _EXPECTED, f"{cursor} {method} {body}: {answer}"
        self.answers[f"cursors: {answer.code or answer.status}"] += 1
        return answer

    async def drain(self, *, at_most: int) -> bool:
        """Go on by so many records where nothing is before; return whether nothing is left."""
        said = await self._ask("GET")
        if said.status == 404:
            await self._ask("PUT", {"begin": self.rng.choice(("earliest", "earliest", "latest"))})
        if said.status != 200:
            return False
        cursor = msgspec.json.decode(said.body)
        positions, lag = cursor["positions"], cursor["lag"]
        if positions.keys() < lag.keys():
            await self._ask("PUT", {"begin": self.rng.choice(("earliest", "latest"))})
            return False
        waits, owners = cursor.get("waits_for", {}), cursor.get("owners", {})
        moved = {
            number: at + min(at_most, lag[number])
            for number, at in positions.items()
            if lag[number] and number not in waits and number not in owners
        }
        if owners:
            # A rewind was broken off: it is repeated.
            await self._ask("PUT", {"rewind": self.rng.choice(("earliest", "latest", "latest"))})
            return False
        if moved:
            expected = {number: positions[number] for number in moved}
            await self._ask("PUT", {"positions": moved, "expected": expected})
        return not moved and not waits


class Follower(Client):
    """Reads all partitions from their beginning, without a cursor: what is gone is passed."""

    def __init__(self, world: World, watch: Watch, number: int, *, rules: ReclaimRules) -> None:
        super().__init__(world, watch, number, topic=TOPIC, partitions=1)
        self.rules = rules
        # By partition that is read: the next offset. And those that were read to their ends.
        self.places: dict[int, int] = dict.fromkeys(range(world.options.partitions), 0)
        self.ended: set[int] = set()
        self.answers: Counter[str] = Counter()

    async def _run(self, pause_s: float) -> None:
        self.connect()
        while not self.stopping:
            await asyncio.sleep(self.rng.expovariate(1 / pause_s))
            await self.look()

    async def look(self) -> None:
        """Fetch from one partition, or look for those that follow."""
        if self.places and self.rng.random() < 0.8:
            await self._fetch(self.rng.choice(sorted(self.places)))
        else:
            await self._go_on()

    async def _go_on(self) -> None:
        answer = await self.request(*self._somebody(0), "GET", f"/v1/topics/{TOPIC}/routes", {}, b"")
        if answer.status != 200:
            return
        for change in msgspec.json.decode(answer.body)["changes"]:
            inputs = {each["partition"] for each in change["inputs"]}
            for output in change["outputs"]:
                number = output["partition"]
                if inputs <= self.ended and number not in self.ended:
                    self.places.setdefault(number, 0)

    async def _fetch(self, number: int) -> None:
        offset, losses = self.places[number], self.watch.losses
        target = f"{_PARTITIONS}/{number}/records?offset={offset}&limit=50"
        accept = {"accept": "application/json"}
        answer = await self.request(*self._somebody(number), "GET", target, accept, b"")
        assert answer.status in _EXPECTED, f"{target}: {answer}"
        self.answers[f"reader: {answer.code or answer.status}"] += 1
        if answer.code == "offset_expired":
            assert isinstance(answer.limit, int), answer
            if number in self.rules.gone and answer.limit == len(self.rules.group(number).values):
                self.rules.happened["readers that passed a reclaimed partition"] += 1
                self.rules.happened["records that readers found reclaimed"] += max(0, answer.limit - offset)
                self._is_read(number)
            else:
                assert answer.limit > offset or losses != self.watch.losses, f"{target}: {answer}"
                self.places[number] = answer.limit
        if answer.code == "offset_beyond_end":
            assert self.watch.losses, f"{target}: {answer}"
            self.places[number] = 0
        if answer.status == 200:
            at = offset
            for record in msgspec.json.decode(answer.body)["records"]:
                assert record["offset"] == at, f"{target}: {record}"
                at += 1
            self.places[number] = at
            sealed = answer.headers.get("laminar-sealed")
            if sealed is not None and at >= int(sealed):
                self._is_read(number)

    def _is_read(self, number: int) -> None:
        self.ended.add(number)
        self.places.pop(number, None)


class Settling(Protocol):
    """Who is told which records are no more (`routes.Ledger`)."""

    def reclaimed(self, values: Sequence[bytes]) -> None:
        """A partition that had these is reclaimed."""


class Reclaiming:
    """All of that in one world."""

    def __init__(self, world: World, watch: Watch, ledger: Settling) -> None:
        self.world = world
        self.watch = watch
        self.rules = ReclaimRules(world, watch, TOPIC)
        # What did not come to an end last.
        self.last = ""
        self.reclaimer = Reclaimer(world, watch, 90, rules=self.rules)
        self.wanderers = [Wanderer(world, watch, 91 + place, rules=self.rules) for place in range(3)]
        self.followers = [Follower(world, watch, 96 + place, rules=self.rules) for place in range(2)]
        watch.routes.on_reclaimed.append(lambda _, number: ledger.reclaimed(self.rules.group(number).values))
        self.rules.on_fence.append(
            lambda number: watch.routes.on_step("partition fenced", f"{TOPIC}/{number}", "")
        )

    def start(self, members: Sequence[Consumer]) -> None:
        """Begin; members of the group go on faster, so that partitions are drained."""
        for member in members:
            member.rewinds, member.boldness, member.strides = 0.002, 0.3, (3, 1000, 1000)
        self.reclaimer.start(pause_s=self.world.options.reclaim_pause_s)
        for each in self.wanderers:
            each.start(pause_s=self.world.options.client_pause_s)
        for place, follower in enumerate(self.followers):
            # One is far behind.
            follower.start(pause_s=self.world.options.client_pause_s * (1 + 9 * place))

    def stop(self) -> None:
        """Have nothing more reclaimed."""
        for each in (self.reclaimer, *self.wanderers):
            each.stopping = True

    def end(self) -> None:
        """At rest: each refusal names all that is behind, and then all that has ended goes, and is 410."""
        self.rules.happened["partitions reclaimed under faults"] = len(self.rules.gone)
        self._settle(by_force=False)
        for wanderer in self.wanderers:
            self._until(wanderer, lambda wanderer=wanderer: wanderer.drain(at_most=1_000_000))  # type: ignore[misc]
        names = {name for number in self._topic.numbers for name in self.rules.cursors(number)}
        for name in sorted(names):
            self._until(self.reclaimer, lambda name=name: self._pass_all(name))  # type: ignore[misc]
        self._settle(by_force=True)
        for machine in self.world.up:
            self._until(self.reclaimer, lambda machine=machine: self._all_gone(machine))  # type: ignore[misc]
        for follower in self.followers:
            follower.stopping = True
        self.world.loop.run_for(1.0)
        for follower in self.followers:
            self._until(follower, lambda follower=follower: self._has_read_all(follower))  # type: ignore[misc]
        self.rules.check_end(self._topic)

    @property
    def _topic(self) -> TopicRecord:
        return self.watch.routes.newest.topics[TOPIC]

    def _until(self, client: Client, step: Callable[[], Awaitable[bool]]) -> None:
        async def repeat() -> None:
            while True:
                if await step():
                    return
                await asyncio.sleep(0.2)

        done = self.world.loop.start(client.life, repeat())
        assert self.world.loop.run_until(done.done, at_most_s=300.0), (
            f"at rest, but {client.name} never ends: {self.last}"
        )
        done.result()

    def _settle(self, *, by_force: bool) -> None:
        for number in [number for numbers in lineage.generations(self._topic) for number in numbers]:
            if lineage.seal_of(self._topic, number) is not None:
                self._until(self.reclaimer, lambda number=number: self._decided(number, by_force=by_force))  # type: ignore[misc]

    async def _decided(self, number: int, *, by_force: bool) -> bool:
        """Ask until there is a decision; it is the right one."""
        topic = self._topic
        answer = await self.reclaimer.reclaim(number, topic)
        behind = self.rules.behind(number, len(self.rules.group(number).values))
        before = [each for each in lineage.inputs_of(topic, number) if each in topic.all_numbers]
        if answer.status == 200:
            assert not behind and not before, (
                f"{number} is reclaimed: {behind} are behind, {before} before it"
            )
            return True
        assert not by_force or answer.status >= 500 or not answer.status, f"reclaim {number}: {answer}"
        if answer.code == "not_drained":
            assert answer.limit == dict(sorted(behind.items())[:20]), f"{answer}: {behind} are behind"
            return True
        if answer.status == 422:
            assert before, f"{answer}, and nothing is before {number}"
            return True
        return False

    async def _pass_all(self, name: str) -> bool:
        """Rewind a cursor to the ends."""
        path = f"/v1/topics/{TOPIC}/cursors/{name}"
        headers = {"content-type": "application/json"}
        somebody = self.reclaimer._somebody(0)
        answer = await self.reclaimer.request(*somebody, "PUT", path, headers, b'{"rewind": "latest"}')
        return answer.status == 200

    async def _all_gone(self, machine: Machine) -> bool:
        """Whether this node says of each partition that is reclaimed that it is, and where it ended."""
        for number in self.rules.gone:
            target = f"{_PARTITIONS}/{number}/records?offset=0"
            answer = await self.reclaimer.request(machine.node, 0, "GET", target, {}, b"")
            if answer.code != "offset_expired" or answer.limit != len(self.rules.group(number).values):
                self.last = f"{machine.node} {number}: {answer}"
                return False
        return True

    async def _has_read_all(self, follower: Follower) -> bool:
        """Whether a reader is at the end of each partition that takes records."""
        await follower.look()
        present = {each.number for each in route_of(self._topic).ranges}
        return follower.places.keys() == present and all(
            at == len(self.rules.group(number).values) for number, at in follower.places.items()
        )

    def exercised(self) -> Counter[str]:
        """How much of it happened."""
        found = Counter(self.rules.happened)
        for wanderer in self.wanderers:
            found += wanderer.answers
        for follower in self.followers:
            found += follower.answers
        return found
