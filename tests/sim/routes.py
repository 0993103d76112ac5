"""Worlds of routes: partitions split, merge and move at random, under load and all faults.

Producers send what belongs to a key to the partition that has it, by the route that they know; what is
answered `sealed` goes to the partition that follows. At the end each record that was acknowledged is in one
partition, once, and those of a key are, along the partitions that had it, in the order in which they were
acknowledged.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from laminar.batch import Header, build
from laminar.http.api.problems import Problem
from laminar.node.api.consumers import reclaim
from laminar.node.catalog.controller import Controller
from laminar.node.catalog.messages.requests import BeginRouteRequest, CatalogRequest, RouteRequest
from laminar.node.partition.partition import Partition
from laminar.node.transactions.participant import Batch, Participant
from laminar.wire.key_route import Route, logical_of_key
from membership.records import TopicRecord
from membership.requests import CancelChange
from membership.route_rules import route_of
from tests.sim import simulation
from tests.sim.administrators import Administrators
from tests.sim.clients import BATCH, REQUEST_TIMEOUT_S, Client
from tests.sim.consumers import Consumer, Gates
from tests.sim.delayed import DelayedClient, DelayRules, finish
from tests.sim.loop import Life
from tests.sim.machine import Machine
from tests.sim.nemesis import Nemesis
from tests.sim.reclaimers import Reclaiming
from tests.sim.simulation import TOPIC, Outcome
from tests.sim.topic_producers import TopicProducer
from tests.sim.watch import Watch
from tests.sim.world import Options, World

MOST_PARTITIONS = 8
"""Most partitions of a route."""

CONVERGED_S = 900.0
"""Replicas of some forty partitions are replaced two at a time, each within a `flush_interval_ms` of 20 s."""

MOST_EVER = 40
"""Most partitions of a world at a time."""

RECLAIM_AGE_MS = 1_000
"""After this time, in place of a week, an ended partition without records is reclaimed by itself."""

RECLAIM_CHECK_S = 10.0
"""The pause between two looks for these, in place of a minute."""

FENCE_MS = 60_000
"""How long a leader keeps the fence of a reclaim that was broken off: longer than any request lives."""


def options_of(seed: int) -> Options:
    """Return the world of routes of a seed."""
    options = simulation.options_of(seed)
    rng = random.Random(f"routes {seed}")
    options.route_pause_s = rng.choice((2.0, 6.0, 15.0))
    options.partitions = rng.choice((1, 2, 3))
    options.clients = rng.choice((2, 3))
    options.client_pause_s = rng.choice((0.3, 1.0))
    options.trouble_s = rng.choice((60.0, 150.0, 300.0))
    options.fault_pause_s = rng.choice((8.0, 20.0, 50.0))
    options.reclaim_pause_s = rng.choice((0.0, 0.0, 1.0, 4.0))
    # What retention deletes can't be compared.
    options.topic_settings = {
        name: value for name, value in options.topic_settings.items() if not name.startswith("retention")
    }
    return options


class Ledger:
    """What was sent and acknowledged, with the order of these events over all producers."""

    def __init__(self) -> None:
        self._events = itertools.count(1)
        # By value: its key, when it was sent, when its acknowledgement came, and how often power was lost by
        # then.
        self.sent: dict[bytes, tuple[bytes, int]] = {}
        self.acknowledged: dict[bytes, tuple[int, int]] = {}
        self.refused: set[bytes] = set()
        # What is being sent, and of that what lay in a partition that was reclaimed meanwhile: a request that
        # is repeated is not recognised any more.
        self._open: set[bytes] = set()
        self.unrecognised: set[bytes] = set()

    def send(self, key: bytes, values: Sequence[bytes]) -> None:
        for value in values:
            self.sent[value] = (key, next(self._events))
        self._open.update(values)

    def settle(self, values: Sequence[bytes]) -> None:
        self._open.difference_update(values)

    def reclaimed(self, values: Sequence[bytes]) -> None:
        self.unrecognised |= self._open.intersection(values)

    def acknowledge(self, values: Sequence[bytes], losses: int) -> None:
        for value in values:
            known = self.acknowledged.get(value)
            if known is None or known[1] != losses:
                self.acknowledged[value] = (next(self._events), losses)

    def refuse(self, values: Sequence[bytes]) -> None:
        self.refused.update(values)

    def forget(self, values: Sequence[bytes]) -> None:
        for value in values:
            self.acknowledged.pop(value, None)

    def check(self, watch: Watch, topic: TopicRecord) -> int:
        """Compare with what is committed at the end; return how many records were found."""
        logs = {
            int(group.name.rpartition("/")[2]): [value for value in group.values if value in self.sent]
            for group in watch.groups.values()
            if group.name.rpartition("/")[0] == topic.name
        }
        placed: dict[bytes, int] = {}
        for number, log in logs.items():
            for value in log:
                assert value not in placed or value in self.unrecognised, (
                    f"{value!r} is in {placed[value]} and in {number}"
                )
                placed[value] = number
        there = self.refused & placed.keys()
        assert not there, f"refused as not applied, and appended: {sorted(there)[:5]}"
        for value, (_, losses) in self.acknowledged.items():
            assert value in placed or losses < watch.losses, f"{value!r} was acknowledged and is lost"
        for key in sorted({key for key, _ in self.sent.values()}):
            chain = lineage_of(topic, key)
            latest, found = 0, 0
            for number, strict in chain:
                latest = latest if strict else 0
                for value in logs.get(number, ()):
                    if self.sent[value][0] != key or value in self.unrecognised:
                        continue
                    found += 1
                    acknowledged = self.acknowledged.get(value)
                    assert acknowledged is None or acknowledged[0] > latest, (
                        f"key {key!r}: {value!r} lies behind a record that was sent after it was acknowledged"
                    )
                    latest = max(latest, self.sent[value][1])
            everywhere = sum(
                self.sent[value][0] == key and value not in self.unrecognised for value in placed
            )
            assert found == everywhere, f"key {key!r}: {everywhere - found} records lie off {chain}"
        return len(placed)


def lineage_of(topic: TopicRecord, key: bytes) -> list[tuple[int, bool]]:
    """Return the partitions that had a key, oldest first, and whether the change before each was strict."""
    logical = logical_of_key(key)
    number = Route.even(topic.partitions).partition_of_key(key)
    chain = [(number, True)]
    for change in topic.changes or ():
        if number in [each.number for each in change.inputs]:
            (number,) = (
                each.number for each in change.outputs if each.first <= logical < each.first + each.size
            )
            chain.append((number, change.order == "strict"))
    return chain


class Producer(Client):
    """Sends one batch at a time, of one key, until it is acknowledged."""

    def __init__(self, world: World, watch: Watch, number: int, *, ledger: Ledger) -> None:
        super().__init__(world, watch, number, topic=TOPIC, partitions=world.options.partitions)
        self.ledger = ledger
        # Some keys are its own, some are everybody's.
        self.own_keys = [b"%s %d" % (self.name.encode(), place) for place in range(2)] + [b"all", b"both"]
        self.route = Route.even(world.options.partitions)
        # By partition: the producer's epoch, and the number of its next batch.
        self.lanes: dict[int, tuple[int, int]] = {}
        self.known_losses: dict[int, int] = {}
        self.batches = 0
        self.moved = 0

    async def _run(self, pause_s: float) -> None:
        self.connect()
        while not self.stopping:
            await asyncio.sleep(self.rng.expovariate(1 / pause_s))
            await self._send(self.rng.choice(self.own_keys))

    async def _send(self, key: bytes) -> None:
        self.batches += 1
        values = [
            b"%s/%d/%d " % (self.name.encode(), self.batches, place) + self.rng.randbytes(20)
            for place in range(self.rng.randrange(1, 4))
        ]
        self.ledger.send(key, values)
        keyed = self.rng.random() < 0.3
        while not self.stopping:
            if await self._append_to(self.route.partition_of_key(key), values, keyed=keyed):
                self.ledger.settle(values)
                return
            self.moved += 1
            await self._renew()

    async def _append_to(self, partition: int, values: list[bytes], *, keyed: bool) -> bool:
        """Send until that is acknowledged; return False if the partition is sealed.

        What may have been appended to a partition that is reclaimed is given up.
        """
        epoch, sequence = self.lanes.get(partition, (1, 0))
        headers = {"content-type": BATCH, "laminar-route": str(self.route.version)}
        if keyed:
            headers["idempotency-key"] = f"{self.name}/{self.batches}"
        target = f"/v1/topics/{self.topic}/partitions/{partition}/records"
        self.known_losses.setdefault(partition, self.watch.losses)
        in_doubt = False
        while not self.stopping:
            frame = bytes(build(values))
            if not keyed:
                frame = bytes(
                    build(values, producer_id=self.producer, producer_epoch=epoch, sequence=sequence)
                )
            losses = self.watch.losses
            answer = await self.request(*self._somebody(partition), "POST", target, headers, frame)
            if answer.status in (200, 201):
                if losses == self.watch.losses:
                    self.ledger.acknowledge(values, losses)
                    self.acknowledged += len(values)
                if not keyed:
                    self.lanes[partition] = (epoch, sequence + 1)
                return True
            if answer.code == "sealed":
                assert answer.outcome == "not_applied", answer
                group = self._group(partition)
                assert group.seal or group.losses, f"{target} is sealed, and no seal is committed"
                self.watch.routes.check_kept(group, f"{target} is answered sealed")
                return False
            if (
                answer.code in ("out_of_sequence", "unknown_producer")
                and self.known_losses[partition] != self.watch.losses
            ):
                self.known_losses[partition] = self.watch.losses
                epoch, sequence = epoch + 1, 0
                continue
            running = keyed and answer.code == "in_progress"
            assert running or answer.status in (0, 503, 504, 429, 507, 404, 421), f"{target}: {answer}"
            in_doubt = in_doubt or answer.outcome != "not_applied"
            if answer.code == "no_such_partition" and partition not in await self._newest_route():
                return in_doubt
            await asyncio.sleep(0.02 + self.rng.random() * 0.3)
        return True

    async def _renew(self) -> None:
        """Ask for the route until there is a newer one."""
        before = self.route.version
        while not self.stopping:
            route = await self._newest_route()
            if route.version > before:
                self.route = route
                return
            await asyncio.sleep(0.02 + self.rng.random() * 0.2)

    async def _newest_route(self) -> Route:
        """Ask a node for the route; return the known one if that does not answer, or has no newer one."""
        node, shard = self._somebody(0)
        answer = await self.request(node, shard, "GET", f"/v1/topics/{self.topic}/routes", {}, b"")
        if answer.status == 200:
            (found,) = msgspec.json.decode(answer.body)["routes"]
            if found["version"] > self.route.version:
                ranges = found["ranges"]
                bounds = [each["from"] for each in ranges] + [ranges[-1]["to"]]
                return Route(found["version"], bounds, [each["partition"] for each in ranges])
        return self.route


class Changer:
    """Who has partitions split, merged and moved, and changes of that cancelled."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        self.answers: dict[str, int] = {}
        self.stopping = False

    def start(self) -> None:
        self.world.loop.start(Life("changer"), self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / self.world.options.route_pause_s))
            if self.stopping:
                return
            state = self.world.catalog()
            topic = None if state is None else state.topics.get(TOPIC)
            if topic is None:
                continue
            if topic.change is not None:
                if self.rng.random() < 0.2:
                    self._ask(RouteRequest(CancelChange(TOPIC, topic.change.id, 1)))
                continue
            for _ in range(2 if self.rng.random() < 0.15 else 1):
                self._ask(self._wish(topic))

    def _wish(self, topic: TopicRecord) -> BeginRouteRequest:
        rng, ranges = self.rng, route_of(topic).ranges
        kind = rng.choice(("split", "split", "merge", "merge", "move"))
        room = MOST_EVER - len(topic.all_numbers)
        if len(ranges) >= MOST_PARTITIONS or room < 3:
            kind = "merge"
        place, count = rng.randrange(len(ranges)), 1
        cuts: list[int] = []
        if kind == "merge":
            count = min(rng.randrange(2, 4), len(ranges))
            place = rng.randrange(len(ranges) - count + 1)
        held = ranges[place]
        if kind == "split" and held.size > 3:
            inside = range(held.first + 1, held.first + held.size)
            cuts = sorted(rng.sample(inside, rng.randrange(1, 3)))
        weak = rng.random() < 0.25
        return BeginRouteRequest(
            TOPIC,
            topic.route.version if topic.route is not None else 0,
            [each.number for each in ranges[place : place + count]],
            cuts,
            "weak" if weak else "strict",
            rng.choice((0, 3_000, 20_000)),
            abandon=rng.random() < 0.3,
            force=weak and rng.random() < 0.5,
            avoid=[rng.choice(list(self.world.machines))] if rng.random() < 0.2 else [],
        )

    def _ask(self, request: CatalogRequest) -> None:
        """Have some node's controller ask the catalog's leader."""
        machines = [each for each in self.world.up if each.controller is not None]
        if isinstance(request, BeginRouteRequest) and not self._has_room(request):
            return
        if machines:
            controller = self.rng.choice(machines).controller
            assert controller is not None
            life = next(
                running.life
                for machine in machines
                for running in machine.running.values()
                if running.process is controller
            )
            self.world.note(f"changer {request}")
            self.world.loop.start(life, self._asked(controller, request))

    def _has_room(self, request: BeginRouteRequest) -> bool:
        state = self.world.catalog()
        return state is not None and len(state.partitions) < MOST_EVER + 8

    async def _asked(self, controller: Controller, request: CatalogRequest) -> None:
        answer = await controller.service.ask(request)
        outcome = answer.error or (answer.result.outcome if answer.result is not None else "none")
        assert outcome not in ("failed", "invalid"), answer
        self.answers[outcome] = self.answers.get(outcome, 0) + 1


class Interrupter:
    """Ends who is needed for a change, at a step of it or just after: a leader of a partition, or the driver.

    As the nemesis does: by its process or by its power, one at a time.
    """

    def __init__(self, world: World, watch: Watch, nemesis: Nemesis, *, chance: float) -> None:
        self.world = world
        self.watch = watch
        self.nemesis = nemesis
        self.rng = world.rng
        self.chance = chance
        self.met: Counter[str] = Counter()
        watch.routes.on_step = self._step

    def _step(self, step: str, name: str, node: str) -> None:
        if self.nemesis.stopping or self.rng.random() >= self.chance:
            return
        later_s = self.rng.choice((0.0, 0.0, 0.01, 0.1, 0.3))
        self.world.loop.call_in(None, later_s, self._end, step, name)

    def _end(self, step: str, name: str) -> None:
        if self.nemesis.stopping or len(self.world.up) < len(self.world.machines):
            return
        victim = self._victim(name)
        if victim is None:
            return
        self.met[f"ended at: {step}"] += 1
        self.world.note(f"{victim.node} ends at {step} of {name}")
        if self.rng.random() < 0.5 or self.world.options.is_interval:
            victim.kill()
        else:
            victim.cut_power(keep=self.rng.choice((0.0, 0.5, 1.0)))
        self.world.loop.call_in(None, self.rng.random() * 4, lambda: None if victim.up else victim.start())

    def _victim(self, name: str) -> Machine | None:
        topic, _, number = name.partition("/")
        if number and self.rng.random() < 0.7:
            for machine, partition in self.watch.partitions(topic, int(number)):
                if partition.leads:
                    return machine
        leader = self.world.catalog_leader()
        return None if leader is None else leader[0]


class Stager:
    """Stages batches in partitions, prepares some, and drops them later: what no seal may come after."""

    def __init__(self, world: World, watch: Watch) -> None:
        self.world = world
        self.watch = watch
        self.rng = world.rng
        self.stopping = False
        self.staged = 0

    def start(self) -> None:
        self.world.loop.start(Life("stager"), self._run())

    async def _run(self) -> None:
        while not self.stopping:
            await asyncio.sleep(self.rng.expovariate(1 / 3.0))
            led = [
                (machine, partition)
                for machine in self.world.up
                for shard in machine.shard_processes
                for partition in shard.partitions.values()
                if partition.topic == TOPIC and partition.leads
            ]
            if led and not self.stopping:
                machine, partition = self.rng.choice(led)
                life = _life_of(machine, partition)
                self.staged += 1
                batch = Batch(sink=self.rng.randbytes(16), number=0, epoch=1)
                hold_s = self.rng.choice((0.1, 1.0, 8.0))
                pinned = self.rng.random() < 0.5
                self.world.loop.start(life, self._stage(partition, batch, hold_s, pinned=pinned))

    async def _stage(self, partition: Partition, batch: Batch, hold_s: float, *, pinned: bool) -> None:
        participant = Participant(partition)
        frame = build([b"staged"])
        try:
            await participant.stage(batch, 0, frame, Header.unpack(frame))
            if pinned:
                await participant.prepare(batch, [0])
        except Problem:
            pass
        await asyncio.sleep(hold_s)
        # Whoever leads then: else it is in the way of a seal for ever.
        self.world.loop.call_in(None, 0.0, self._drop, partition.number, batch)

    def _drop(self, number: int, batch: Batch) -> None:
        for machine, partition in self.watch.partitions(TOPIC, number):
            if partition.leads:
                self.world.loop.call_in(_life_of(machine, partition), 0.0, _drop_here, partition, batch)
        if any(
            partition.state.stages.batch(batch.key) for _, partition in self.watch.partitions(TOPIC, number)
        ):
            self.world.loop.call_in(None, 1.0, self._drop, number, batch)


def _drop_here(partition: Partition, batch: Batch) -> None:
    try:
        Participant(partition).drop(batch).add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )
    except Problem:
        pass


def _life_of(machine: Machine, partition: Partition) -> Life:
    return next(
        running.life
        for running in machine.running.values()
        if partition in getattr(running.process, "partitions", {}).values()
    )


def simulate(options: Options, *, trace: list[str] | None = None) -> Outcome:
    """Run a world of routes from its beginning to its end. Raises AssertionError where a rule is broken."""
    quiet = logging.root.manager.disable
    if not os.environ.get("SIM_LOG"):
        logging.disable(logging.CRITICAL)
    collecting = gc.isenabled()
    gc.disable()
    began_s = time.process_time()
    world = World(options)
    world.trace = trace
    watch = Watch(world)
    outcome = Outcome(options)
    world.process_failed = lambda machine, error: (
        world.loop.failures.append(error) if isinstance(error, AssertionError) else None
    )
    ledger = Ledger()
    times = {name: getattr(reclaim, name) for name in ("RECLAIM_AGE_MS", "FENCE_MS", "CHECK_S")}
    reclaim.RECLAIM_AGE_MS, reclaim.FENCE_MS, reclaim.CHECK_S = RECLAIM_AGE_MS, FENCE_MS, RECLAIM_CHECK_S
    try:
        simulation.begin(world, watch)
        nemesis = Nemesis(world, pause_s=options.fault_pause_s)
        watch.changing = nemesis.changing
        administrators = Administrators(world, nemesis.moving, calm=nemesis.is_calm)
        producers = [Producer(world, watch, 50 + place, ledger=ledger) for place in range(options.clients)]
        changer, stager = Changer(world), Stager(world, watch)
        chance = random.Random(f"interrupted {options.seed}").choice((0.0, 0.05, 0.3))
        interrupter = Interrupter(world, watch, nemesis, chance=chance)
        to_topics = [
            TopicProducer(world, watch, 70 + place, ledger=ledger, named=named)
            for place, named in enumerate((True, False))
        ]
        gates = Gates()
        watch.routes.on_cursor.append(gates.committed)
        members = [Consumer(world, watch, 80 + place) for place in range(3)]
        for producer in (*producers, *to_topics, *members):
            producer.start(pause_s=options.client_pause_s)
        reclaims = Reclaiming(world, watch, ledger) if options.reclaim_pause_s else None
        if reclaims is not None:
            reclaims.start(members)
        changer.start()
        delays = DelayRules(world, watch, TOPIC)
        delayer = DelayedClient(world, watch, 90, rules=delays)
        if not options.is_interval:
            stager.start()
            delayer.start(pause_s=options.client_pause_s)
        nemesis.start()
        if options.admin_pause_s:
            administrators.start()
        world.loop.run_for(options.trouble_s)
        changer.stopping = stager.stopping = True
        if reclaims is not None:
            reclaims.stop()
        nemesis.heal()
        if options.admin_pause_s:
            simulation.come_to_rest(world, watch, administrators)
        assert world.loop.run_until(lambda: _is_over(world), at_most_s=120.0), (
            f"healed, but a change does not end: {_change(world)}"
        )
        for producer in (*producers, *to_topics, *members):
            producer.stopping = True
        world.loop.run_for(2 * REQUEST_TIMEOUT_S)
        if not options.is_interval:
            finish(world, delays, delayer)
        topic = _topic(world)
        assert topic is not None and topic.change is None
        _converge(world, watch, topic, simulation.replicas_of(options))
        if reclaims is not None:
            reclaims.end()
            topic = _topic(world)
            assert topic is not None
        for _ in range(60):
            if world.loop.run_until_complete(watch.is_whole()):
                break
            world.loop.run_for(2.0)
        _converge(world, watch, topic, simulation.replicas_of(options))
        world.loop.run_until_complete(watch.check_end(TOPIC, topic.numbers))
        _check_states(watch, topic)
        outcome.exercised["records compared along lineages"] = ledger.check(watch, topic)
        gc.collect()
        world.loop.check()
    finally:
        outcome.simulated_s = world.loop.time()
        outcome.digest = world.digest
        for name, value in times.items():
            setattr(reclaim, name, value)
        world.close()
        logging.disable(quiet)
        if collecting:
            gc.enable()
    outcome.cpu_s = time.process_time() - began_s
    outcome.operations = sum(producer.operations for producer in producers)
    outcome.acknowledged = sum(producer.acknowledged for producer in producers)
    outcome.elections = watch.elections
    outcome.faults = nemesis.faults
    outcome.exercised += watch.exercised() + nemesis.moving.exercised() + administrators.exercised()
    outcome.exercised["batches that went to an output"] = sum(producer.moved for producer in producers)
    outcome.exercised["stages"] = stager.staged
    outcome.exercised += gates.happened
    outcome.exercised.update({f"delayed: {name}": count for name, count in delays.happened.items()})
    if reclaims is not None:
        outcome.exercised += reclaims.exercised()
    for member in members:
        outcome.exercised += member.answers
    outcome.exercised += interrupter.met
    outcome.exercised["records appended to the topic"] = sum(each.acknowledged for each in to_topics)
    outcome.exercised["requests that were answered again"] = sum(each.replayed for each in to_topics)
    for answer, count in changer.answers.items():
        outcome.exercised[f"route requests: {answer}"] = count
    return outcome


def _topic(world: World) -> TopicRecord | None:
    state = world.catalog()
    return None if state is None else state.topics.get(TOPIC)


def _change(world: World) -> object:
    topic = _topic(world)
    progress = [
        machine.controller._routes.progress_of(TOPIC)
        for machine in world.up
        if machine.controller is not None
    ]
    return None if topic is None else (topic.change, progress)


def _is_over(world: World) -> bool:
    """Whether no change is under way, and each input of those that are done is sealed."""
    topic = _topic(world)
    return (
        topic is not None
        and topic.change is None
        and all(len(each.seals) == len(each.inputs) for each in topic.changes or ())
    )


def _converge(world: World, watch: Watch, topic: TopicRecord, replicas: int | None) -> None:
    assert world.loop.run_until(
        lambda: watch.converged(TOPIC, topic.numbers, replicas), at_most_s=CONVERGED_S
    ), "healed, but the cluster does not converge: " + simulation.standing(world, watch, TOPIC, topic.numbers)


def _check_states(watch: Watch, topic: TopicRecord) -> None:
    """What is in the route is open, all else is sealed, where and as the catalog says."""
    present = {each.number for each in route_of(topic).ranges}
    seals = {number: seal for change in topic.changes or () for number, seal in change.seals.items()}
    for number in topic.numbers:
        for machine, partition in watch.partitions(TOPIC, number):
            succession = partition.state.succession
            who = f"{TOPIC}/{number}@{machine.node}"
            assert succession.status == ("open" if number in present else "sealed"), (
                f"{who}: {succession.status}"
            )
            seal = succession.sealed
            assert (None if seal is None else (seal.index, seal.end, seal.time_ms)) == (
                None if number not in seals else tuple(msgspec.structs.astuple(seals[number]))
            ), f"{who}: {seal}"


def busy(seed: int, *, reclaim_pause_s: float = 0.0) -> Options:
    """Return a world of more changes and trouble than most."""
    return replace(
        options_of(seed),
        clients=3,
        client_pause_s=0.1,
        fault_pause_s=4.0,
        trouble_s=60.0,
        route_pause_s=1.5 if not reclaim_pause_s else 4.0,
        reclaim_pause_s=reclaim_pause_s,
        disk_s=(0.001, 0.02, 0.1)[seed % 3],
    )
