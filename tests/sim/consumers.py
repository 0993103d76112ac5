"""Members of a group in worlds of routes, and the rule of their gates: what is acknowledged comes in order.

A member claims partitions of the group's cursor, commits forward in those that it owns, releases some, takes
others over from members that it holds for dead, and rewinds the cursor now and then. It asks any node, whose
view of the catalog may be old. It claims what it should not, too: the cluster refuses that.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec

from laminar.batch import Buffer, body_of
from laminar.node.partition.state.cursors import CursorChange
from laminar.node.routes import lineage
from membership.records import TopicRecord
from tests.sim.clients import Answer, Client
from tests.sim.simulation import TOPIC
from tests.sim.watch import Watch
from tests.sim.world import World

GROUP = "g"
_PATH = f"/v1/topics/{TOPIC}/cursors/{GROUP}"
# Answers after which a member goes on: of the cluster's state, of other members, of what is not known.
_EXPECTED = frozenset({0, 200, 404, 409, 412, 416, 421, 422, 429, 503, 504, 507})


class Gates:
    """The group's cursor as it is committed, and what is checked of each change of it."""

    def __init__(self) -> None:
        self.happened: Counter[str] = Counter()
        # By partition: position and owner.
        self._cursor: dict[int, tuple[int, str]] = {}

    def committed(self, topic: TopicRecord, number: int, frame: Buffer) -> None:
        """Check a change that is committed for the first time."""
        change = msgspec.msgpack.decode(body_of(frame), type=CursorChange)
        if change.name != GROUP or change.position is None:
            return
        position, owner = self._cursor.get(number, (0, ""))
        self._cursor[number] = (change.position, change.owner)
        if change.owner.startswith("~"):
            self.happened["cursors held by a rewind"] += change.owner != owner
            return
        if not owner or owner != change.owner or change.position <= position:
            return
        self.happened["commits of members"] += 1
        for each in lineage.ancestors_of(topic, number, only_strict=True):
            self.happened["commits behind a change"] += 1
            seal, (at, _) = lineage.seal_of(topic, each), self._cursor.get(each, (-1, ""))
            assert seal is not None and at >= seal.end_offset, (
                f"{owner} acknowledges {change.position} of {number}, and {each} is at {at}: {seal}"
            )


class Consumer(Client):
    """One member of the group."""

    def __init__(self, world: World, watch: Watch, number: int) -> None:
        super().__init__(world, watch, number, topic=TOPIC, partitions=1)
        self.lives = 0
        # How often it rewinds, and takes an owner for dead; and by how much it commits.
        self.rewinds, self.boldness = 0.03, 0.05
        self.strides = (1, 3, 1000)
        # By partition: where the cursor is that this member owns.
        self.owned: dict[int, int] = {}
        self.answers: Counter[str] = Counter()

    @property
    def member(self) -> str:
        """Its present name; another one after each answer that did not come."""
        return f"{self.name}.{self.lives}"

    async def _run(self, pause_s: float) -> None:
        self.connect()
        while not self.stopping:
            await asyncio.sleep(self.rng.expovariate(1 / pause_s))
            if self.rng.random() < self.rewinds:
                await self._rewind()
            elif self.rng.random() < 0.02:
                self._restart()
            else:
                await self._step()

    def _restart(self) -> None:
        self.lives += 1
        self.owned.clear()

    async def _ask(self, what: str, method: str, body: object = None) -> Answer:
        content = b"" if body is None else msgspec.json.encode(body)
        headers = {"content-type": "application/json"} if content else {}
        answer = await self.request(*self._somebody(0), method, _PATH, headers, content)
        assert answer.status in _EXPECTED, f"{what} {body}: {answer}"
        self.answers[f"{what}: {answer.code or answer.status}"] += 1
        if answer.status in (0, 504) or answer.outcome == "unknown":
            self._restart()
        return answer

    async def _step(self) -> None:
        told = await self._ask("look", "GET")
        if told.status == 404:
            await self._ask("begin", "PUT", {"begin": "earliest"})
        if told.status != 200:
            return
        cursor = msgspec.json.decode(told.body)
        positions, owners = cursor["positions"], cursor.get("owners", {})
        if positions.keys() < cursor["lag"].keys() and self.rng.random() < 0.5:
            await self._ask("begin", "PUT", {"begin": "latest"})
            return
        waits = cursor.get("waits_for", {})
        for number in self.rng.sample(sorted(positions), len(positions)):
            owner, at = owners.get(number, ""), positions[number]
            if int(number) in self.owned and owner == self.member:
                await self._use(number, at + cursor["lag"][number])
            elif self._dares(owner) and (number not in waits or self.rng.random() < 0.3):
                await self._claim(number, at, owner)
            if self.stopping or self.rng.random() < 0.3:
                return

    def _dares(self, owner: str) -> bool:
        """Whether it claims what has this owner: none, or one that it holds for dead."""
        return not owner or (not owner.startswith("~") and self.rng.random() < self.boldness)

    async def _claim(self, number: str, at: int, owner: str) -> None:
        body = {"positions": {number: at}, "expected": {number: at}, "expected_owner": owner}
        answer = await self._ask("claim", "PUT", {**body, "owner": self.member})
        if answer.status == 200:
            self.owned[int(number)] = at

    async def _use(self, number: str, end: int) -> None:
        """Commit forward, or let it go."""
        at = self.owned[int(number)]
        to = min(end, at + self.rng.choice(self.strides))
        me = self.member if self.rng.random() < 0.8 else ""
        body = {"positions": {number: to}, "expected": {number: at}, "expected_owner": self.member}
        answer = await self._ask("commit", "PUT", {**body, "owner": me})
        if answer.status == 200 and me and int(number) in self.owned:
            self.owned[int(number)] = to
        else:
            self.owned.pop(int(number), None)

    async def _rewind(self) -> None:
        """One that fails is repeated some time, by some member."""
        await self._ask("rewind", "PUT", {"rewind": self.rng.choice(("earliest", "earliest", "latest"))})
