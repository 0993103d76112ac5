"""Delayed records in a world: a client that appends, cancels and moves some, and what must hold of each.

The rules follow the committed entries alone: each record that a partition took is pending, published or
cancelled, one of them; it is published once, not before its time; what was answered is so in the log.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec

from laminar.batch import Batch, Buffer, Header, Kind
from laminar.http.api.append_body import ENVELOPE_LINES_TYPE
from laminar.node.partition.state.delayed_records import (
    CANCELLED,
    Added,
    Changed,
    Copied,
    Received,
    Sent,
    delayed_change,
)
from laminar.node.partition.state.staging_entries import publish_record
from laminar.wire.delayed import parse_id
from tests.sim.clients import Client
from tests.sim.watch import Group, Watch
from tests.sim.world import World

DELAYS_MS = (100, 1_000, 5_000, 40_000)
EXPECTED = (0, 200, 201, 404, 421, 429, 503, 504, 507)


class DelayRules:
    """The delayed records of one topic."""

    def __init__(self, world: World, watch: Watch, topic: str) -> None:
        self.world = world
        self.watch = watch
        self.topic = topic
        # By partition and place (entry and row): the number that is pending there.
        self.places: dict[str, dict[tuple[int, int], int]] = {}
        # By number: its value, its time as it was written, and now.
        self.known: dict[int, tuple[bytes, int, int]] = {}
        self.published: dict[int, str] = {}
        self.cancelled: set[int] = set()
        # By partition: how many batches of a stream it has.
        self.streams: Counter[tuple[str, bytes]] = Counter()
        self.taken: set[tuple[str, int]] = set()
        self.happened: Counter[str] = Counter()
        watch.on_committed.append(self._committed)

    def pending(self) -> dict[int, str]:
        """Return the records that are pending, each with a partition that has it."""
        return {number: name for name, places in self.places.items() for number in places.values()}

    def _committed(self, group: Group, header: Header, frame: Buffer) -> None:
        if group.name.rpartition("/")[0] != self.topic:
            return
        places = self.places.setdefault(group.name, {})
        if header.kind == Kind.PUBLISH:
            due = publish_record(frame).due
            if due is not None:
                self._publish(group.name, places, header, due.rows, Batch(due.frame))
        elif header.kind == Kind.DELAYED:
            self._change(group.name, places, header.index, frame)

    def _publish(
        self, name: str, places: dict[tuple[int, int], int], header: Header, rows: list[int], batch: Batch
    ) -> None:
        times = batch.delivery_times or []
        for row, place in enumerate(zip(rows[::2], rows[1::2], strict=True)):
            number = places.pop(place, None)
            assert number is not None, f"{name}: entry {header.index} publishes {place}, where nothing is"
            assert number not in self.published, f"{name}: {number} was published in {self.published[number]}"
            assert number not in self.cancelled, f"{name}: {number} was cancelled"
            value, _, due_ms = self.known[number]
            assert value == batch.value(row), f"{name}: {number} has another value"
            assert times[row] == due_ms <= header.append_time_ms, (
                f"{name}: {number}, due {due_ms}, is published at {header.append_time_ms}"
            )
            self.published[number] = name
            self.happened["published"] += 1

    def _change(self, name: str, places: dict[tuple[int, int], int], index: int, frame: Buffer) -> None:
        change = delayed_change(frame)
        self.happened[type(change).__name__.lower()] += 1
        if isinstance(change, Changed):
            self._changed(places, change)
        elif isinstance(change, Sent):
            for place in zip(change.rows[::2], change.rows[1::2], strict=True):
                number = places.pop(place, None)
                assert number is not None, f"{name}: {place} was sent, where nothing is"
                taken = any(each != name and (each, number) in self.taken for each in self.places)
                assert taken, f"{name}: {number} was sent, and no partition has it"
        elif isinstance(change, Copied):
            old = list(zip(change.rows[::2], change.rows[1::2], strict=True))
            for row, place in enumerate(old):
                if place in places:
                    places[index, row] = places.pop(place)
        elif isinstance(change, Received):
            stream = (name, change.stream)
            if change.sequence < self.streams[stream]:
                return
            self.streams[stream] = change.sequence + 1
            for row, number in enumerate(change.numbers):
                assert (name, number) not in self.taken, f"{name}: {number} is taken twice"
                assert number in self.known and number not in self.published, f"{name}: {number} comes again"
                assert number not in self.cancelled, f"{name}: {number} comes, and was cancelled"
                places[index, row] = number
                self.taken.add((name, number))
        else:
            self._add(name, places, index, change)

    def _changed(self, places: dict[tuple[int, int], int], change: Changed) -> None:
        for number, due_ms in zip(change.items[::3], change.items[1::3], strict=True):
            place = next((place for place, held in places.items() if held == number), None)
            if place is None:
                continue
            if due_ms == CANCELLED:
                del places[place]
                self.cancelled.add(number)
            else:
                value, written_ms, _ = self.known[number]
                self.known[number] = (value, written_ms, due_ms)

    def _add(self, name: str, places: dict[tuple[int, int], int], index: int, change: Added) -> None:
        batch = Batch(change.frame)
        for row, (value, due_ms) in enumerate(zip(batch.values, batch.delivery_times or [], strict=True)):
            number = change.first + row
            assert due_ms is not None and number not in self.known, f"{name}: {number} is given again"
            self.known[number] = (bytes(value), due_ms, due_ms)
            places[index, row] = number

    def check_tables(self) -> None:
        """Compare the tables of all replicas that know the whole log with what is committed."""
        for name, places in self.places.items():
            topic, _, number = name.rpartition("/")
            for machine, partition in self.watch.partitions(topic, int(number)):
                committed = len(self.watch.groups[partition.replica.group].entries)
                if partition.state.left_out or partition.log.last_index != committed:
                    continue
                table = partition.state.delayed
                found = {
                    (entry, row): batch.numbers[row]
                    for entry, batch in table.batches.items()
                    for row in batch.pending()
                }
                assert found == places, f"{name}@{machine.node}: {found} is pending, not {places}"
                moved = {each: due.due_ms for each, due in table.moved.items()}
                assert all(self.known[each][2] == due_ms for each, due_ms in moved.items()), moved
                self.happened["tables compared"] += 1


class DelayedClient(Client):
    """Appends delayed records, and cancels and moves some of all that it was told of."""

    def __init__(self, world: World, watch: Watch, number: int, *, rules: DelayRules) -> None:
        super().__init__(world, watch, number, topic=rules.topic, partitions=world.options.partitions)
        self.rules = rules
        # By number: the id.
        self.ids: dict[int, str] = {}
        self.requests = 0

    def start(self, *, pause_s: float) -> asyncio.Task[None]:
        task = super().start(pause_s=pause_s)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.world.loop.failures.append(error)

    async def _run(self, pause_s: float) -> None:
        self.connect()
        while True:
            await asyncio.sleep(0.1 if self.stopping else self.rng.expovariate(1 / pause_s))
            if self.stopping:
                # What is left has times by clocks that are hours apart: all is due now.
                left = sorted(self.rules.pending().keys() & self.ids.keys())
                if left:
                    await self._ask(self.rng.choice(left), "PATCH", 1)
            elif self.ids and self.rng.random() < 0.4:
                number = self.rng.choice(sorted(self.ids))
                if self.rng.random() < 0.5:
                    await self._ask(number, "DELETE", None)
                else:
                    due_ms = self.rules.known[number][1] + self.rng.choice((-60_000, -1_000, 3_000))
                    await self._ask(number, "PATCH", due_ms)
            else:
                await self._append_some()

    async def _append_some(self) -> None:
        self.requests += 1
        delay_ms = self.rng.choice(DELAYS_MS)
        body = b"".join(
            msgspec.json.encode(
                {
                    "key": f"k{self.rng.randrange(9)}",
                    "value": f"{self.name}/{self.requests}/{place}",
                    "delay_ms": delay_ms + self.rng.randrange(300),
                }
            )
            + b"\n"
            for place in range(self.rng.randrange(1, 7))
        )
        headers = {"content-type": ENVELOPE_LINES_TYPE, "idempotency-key": f"{self.name}/{self.requests}"}
        while not self.stopping:
            target = f"/v1/topics/{self.topic}/records"
            answer = await self.request(*self._somebody(0), "POST", target, headers, body)
            if answer.status in (200, 201):
                for text in msgspec.json.decode(answer.body).get("scheduled", ()):
                    number = parse_id(text).number
                    assert number in self.rules.known, f"{text} was acknowledged, and is not committed"
                    self.ids[number] = text
                    self.acknowledged += 1
                if self.rng.random() < 0.8:
                    return
                continue  # as if the answer had been lost
            assert answer.code == "in_progress" or answer.status in EXPECTED, f"{target}: {answer}"
            await asyncio.sleep(0.02 + self.rng.random() * 0.3)

    async def _ask(self, number: int, method: str, due_ms: int | None) -> None:
        target = f"/v1/topics/{self.topic}/delayed/{self.ids[number]}"
        body = b"" if due_ms is None else msgspec.json.encode({"deliver_at": max(1, due_ms)})
        head = {"content-type": "application/json"}
        answer = await self.request(*self._somebody(0), method, target, head if body else {}, body)
        assert answer.status in EXPECTED or answer.code == "delayed_record_ended", (
            f"{method} {target}: {answer}"
        )
        assert answer.code != "no_such_delayed_record", f"{method} {target}: {answer}"
        if answer.status != 200:
            return
        state = msgspec.json.decode(answer.body)["state"]
        self.rules.happened[f"{method}: {state}"] += 1
        if state == "cancelled":
            assert number in self.rules.cancelled, f"{target}: cancelled is answered, and is not committed"
        elif state == "published":
            assert number in self.rules.published, f"{target}: published is answered, and is not committed"


def finish(world: World, rules: DelayRules, client: DelayedClient) -> None:
    """After the faults: all that is due is published, and each record has one fate."""
    client.stopping = True
    for _ in range(200):
        foreign = rules.pending().keys() - client.ids.keys()
        if not rules.pending():
            break
        # A record whose acknowledgement never came has an id, too.
        for number in foreign:
            partition, count = divmod(number, 1 << 40)
            client.ids[number] = f"{partition}.{rules.known[number][1]}.{count}"
        world.loop.run_for(3.0)
    assert not rules.pending(), f"healed, but these are never published: {rules.pending()}"
    for number in rules.known:
        fates = (number in rules.published) + (number in rules.cancelled)
        assert fates == 1, f"{number}: {client.ids.get(number)} has {fates} ends"
    rules.check_tables()
