"""One seed's history: a cluster made, troubled, healed and compared."""

from __future__ import annotations

import gc
import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from laminar.node.api.transactions.abandoned_stages import JANITOR_S, OPEN_AGE_MS
from laminar.node.api.transactions.steps import COORDINATORS
from laminar.node.transactions.coordinator import TOPIC as COORDINATORS_TOPIC
from tests.sim.administrators import Administrators
from tests.sim.clients import REQUEST_TIMEOUT_S, Client
from tests.sim.drivers import Driver, Once
from tests.sim.environment import SimClock
from tests.sim.nemesis import Nemesis
from tests.sim.uploaders import Uploader
from tests.sim.watch import Watch, numbers_of
from tests.sim.world import Options, World

TOPIC = "t"


@dataclass(slots=True)
class Outcome:
    """What a run did."""

    options: Options
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    operations: int = 0
    acknowledged: int = 0
    accepted: int = 0
    reads: int = 0
    elections: int = 0
    # Groups that were quiet and woke, changes of a group's configuration, starts of logs that moved, replicas
    # that went elsewhere, and lost disks.
    exercised: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    digest: str = ""


def options_of(seed: int) -> Options:
    """The world of a seed."""
    rng = random.Random(f"options {seed}")
    options = Options(
        seed=seed,
        nodes=rng.choice((3, 3, 4, 5)),
        shards=rng.choice((1, 1, 2)),
        partitions=rng.choice((1, 2, 3)),
        clients=rng.choice((1, 2, 3)),
        client_pause_s=rng.choice((1.6, 2.1, 3.5)),
        fault_pause_s=rng.choice((33.0, 58.0, 98.0)),
        trouble_s=rng.choice((120.0, 300.0, 900.0)),
        disk_s=rng.choice((0.001, 0.01, 0.1)),
    )
    # Few beats, and many; the time without one until somebody stands is some of them.
    options.heartbeat_ms, options.election_timeout_ms = rng.choice(((200, 1500), (300, 2000), (500, 2500)))
    if options.nodes > 3:
        options.late = rng.choice((0, 1))
    options.node_settings = {
        "replace_after_ms": rng.choice((5000, 15_000)),
        "retention_check_ms": 1000,
        "retention_hold_ms": rng.choice((0, 5000)),
        "catch_up_bytes": 1 << 14,
    }
    # By size, by age, or not at all.
    kept: tuple[dict[str, int | str], ...] = ({}, {"retention_bytes": 40_000}, {"retention_ms": 60_000})
    options.topic_settings = dict(rng.choice(kept))
    interval_ms = rng.choice((0, 0, 100, 20_000))
    if interval_ms:
        options.topic_settings |= {"flush": "interval", "flush_interval_ms": interval_ms}
    if rng.random() < 0.3:
        _with_administrators(options, rng)
    return options


def _with_administrators(options: Options, rng: random.Random) -> None:
    """Room to move, and a planner that does not wait for long."""
    options.admin_pause_s = rng.choice((5.0, 15.0))
    options.thin = rng.random() < 0.5
    options.nodes = rng.choice((4, 5, 5))
    options.late = rng.choice((0, 1))
    options.node_settings["settle_ms"] = rng.choice((1000, 3000))
    if options.thin:
        # What one replica acknowledges is lost with its last interval.
        options.topic_settings = {
            name: value for name, value in options.topic_settings.items() if not name.startswith("flush")
        }


def simulate(options: Options, *, trace: list[str] | None = None) -> Outcome:
    """Run a world from its beginning to its end. Raises AssertionError where a rule is broken."""
    quiet = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    # It takes a fifth of the time else, and what it finds, it finds at other times in each run.
    collecting = gc.isenabled()
    gc.disable()
    began_s = time.process_time()
    world = World(options)
    world.trace = trace
    watch = Watch(world)
    outcome = Outcome(options)
    # A process that ends by itself comes back, as in life; but not over a rule that it broke.
    world.process_failed = lambda machine, error: (
        world.loop.failures.append(error) if isinstance(error, AssertionError) else None
    )
    try:
        clients = begin(world, watch)
        nemesis = Nemesis(world, pause_s=options.fault_pause_s)
        watch.changing = nemesis.changing
        administrators = Administrators(world, nemesis.moving, calm=nemesis.is_calm)
        drivers = _drivers(world, watch)
        clients += _uploaders(world, watch)
        for client in clients:
            client.start(pause_s=options.client_pause_s)
        for driver in drivers:
            # A batch is some ten requests.
            driver.start(pause_s=5.5 * options.client_pause_s)
        nemesis.start()
        if options.admin_pause_s:
            administrators.start()
        world.loop.run_for(options.trouble_s)
        for client in clients + drivers:
            client.stopping = True
        nemesis.heal()
        if options.admin_pause_s:
            come_to_rest(world, watch, administrators)
        # What was asked for before is answered, or given up, by then.
        world.loop.run_for(2 * REQUEST_TIMEOUT_S)
        assert world.loop.run_until(
            lambda: watch.converged(TOPIC, options.partitions, replicas_of(options)),
            at_most_s=120.0,
        ), "healed, but the cluster does not converge: " + standing(world, watch, TOPIC, options.partitions)
        for _ in range(60):
            if world.loop.run_until_complete(watch.is_whole()):
                break
            world.loop.run_for(2.0)
        else:
            raise AssertionError("what rotted is not healed: " + _damage(world))
        assert world.loop.run_until(
            lambda: watch.converged(TOPIC, options.partitions, replicas_of(options)),
            at_most_s=60.0,
        ), "healed, but the cluster does not converge: " + standing(world, watch, TOPIC, options.partitions)
        assert world.loop.run_until(lambda: not watch.placement.led_elsewhere(), at_most_s=300.0), (
            f"calm, but not led as preferred: {watch.placement.led_elsewhere()}"
        )
        if drivers:
            _end_sinks(world, watch, drivers[0])
            outcome.exercised["sinks forgotten"] = _forgotten(watch)
        world.loop.run_until_complete(watch.check_end(TOPIC, options.partitions))
        # Exceptions that nobody took are told now, if not before.
        gc.collect()
        world.loop.check()
    finally:
        outcome.simulated_s = world.loop.time()
        outcome.digest = world.digest
        world.close()
        logging.disable(quiet)
        if collecting:
            gc.enable()
    outcome.cpu_s = time.process_time() - began_s
    outcome.operations = sum(client.operations for client in clients + drivers)
    outcome.acknowledged = sum(client.acknowledged for client in clients)
    outcome.accepted = sum(client.accepted for client in clients)
    outcome.reads = sum(client.reads for client in clients)
    outcome.elections = watch.elections
    outcome.faults = nemesis.faults
    outcome.exercised += watch.exercised() + nemesis.moving.exercised()
    outcome.exercised += administrators.exercised()
    outcome.exercised["drivers crashed"] = sum(driver.crashes for driver in drivers)
    outcome.exercised["drivers fenced"] = sum(driver.fenced for driver in drivers)
    outcome.exercised["commits of sinks that were forgotten"] = sum(driver.forgotten for driver in drivers)
    return outcome


def come_to_rest(world: World, watch: Watch, administrators: Administrators) -> None:
    """After the last command, every replica goes to the place that is wanted for it."""
    administrators.end()
    assert world.loop.run_until(
        lambda: administrators.is_over() and not watch.placement.out_of_place(), at_most_s=300.0
    ), f"healed, but not in its place: {watch.placement.out_of_place()}"


def replicas_of(options: Options) -> int | None:
    """How many replicas each partition has at the end; None: as many as are wanted then."""
    return None if options.admin_pause_s else min(options.replicas, options.nodes)


def begin(world: World, watch: Watch) -> list[Client]:
    """A cluster with a topic, in good health."""
    _gather(world)
    world.loop.run_for(5.0)
    return _serve(world, watch)


def _drivers(world: World, watch: Watch) -> list[Driver]:
    """Several of one sink, and of sinks that write once, where transactions are possible."""
    options = world.options
    if options.is_interval:
        return []
    return [
        Driver(world, watch, 100 + place, sink="s", topic=TOPIC, partitions=options.partitions)
        for place in range(options.drivers)
    ] + [
        Once(world, watch, 130 + place, topic=TOPIC, partitions=options.partitions)
        for place in range(options.once)
    ]


def _uploaders(world: World, watch: Watch) -> list[Uploader]:
    options = world.options
    return [
        Uploader(world, watch, 150 + place, topic=TOPIC, partitions=options.partitions)
        for place in range(options.uploaders)
    ]


def _end_sinks(world: World, watch: Watch, driver: Driver) -> None:
    """A last driver commits; then all that is decided is published, and in time nothing staged is left."""
    options = world.options
    last = Driver(world, watch, 200, sink=driver.sink, topic=TOPIC, partitions=options.partitions)
    ended = world.loop.start(last.life, last.commit_batches(1))
    assert world.loop.run_until(ended.done, at_most_s=120.0), "healed, but no batch can be committed"
    ended.result()
    replicas = replicas_of(options)
    assert world.loop.run_until(
        lambda: watch.converged(COORDINATORS_TOPIC, COORDINATORS, replicas), at_most_s=120.0
    ), "healed, but the coordinators do not converge: " + standing(
        world, watch, COORDINATORS_TOPIC, COORDINATORS
    )
    watch.ledger.check_end()
    # Clocks of the past were ahead by hours, perhaps, and times in a log do not go back.
    ahead_ms = max(
        partition.log.last_append_time_ms
        for number in range(options.partitions)
        for _, partition in watch.partitions(TOPIC, number)
    )
    for machine in world.machines.values():
        now_ms = SimClock(machine).wall_ms()
        machine.wall_offset_ms += max(ahead_ms - now_ms, 0) + OPEN_AGE_MS + 60_000
    assert world.loop.run_until(
        lambda: not watch.staged_batches(TOPIC, options.partitions), at_most_s=10 * JANITOR_S
    ), "something is staged for ever"
    assert world.loop.run_until(
        lambda: watch.converged(TOPIC, options.partitions, replicas), at_most_s=60.0
    ), "after the stages were dropped the replicas do not converge"
    world.loop.run_until_complete(watch.check_end(COORDINATORS_TOPIC, COORDINATORS))


def _forgotten(watch: Watch) -> int:
    """How many of the sinks that began the coordinators don't know any more."""
    known = {
        entry.sink_id
        for number in range(COORDINATORS)
        for entry in watch.partitions(COORDINATORS_TOPIC, number)[0][1].state.sinks.stored()
    }
    return len(watch.ledger.sinks.keys() - known)


def _gather(world: World) -> None:
    """All nodes, which know each other."""
    first, *others = list(world.machines.values())[: world.options.nodes - world.options.late]
    first.start()
    for machine in others:
        machine.start()
    assert world.loop.run_until(world.all_known, at_most_s=60.0), "the nodes never found each other"


def _serve(world: World, watch: Watch) -> list[Client]:
    """Their topic."""
    options = world.options
    clients = [
        Client(world, watch, number + 1, topic=TOPIC, partitions=options.partitions)
        for number in range(options.clients)
    ]
    maker = Client(world, watch, 0, topic=TOPIC, partitions=options.partitions)
    made = world.loop.start(maker.life, _make_topic(maker, options))
    assert world.loop.run_until(made.done, at_most_s=60.0), "the topic is never made"
    made.result()
    assert world.loop.run_until(
        lambda: watch.converged(TOPIC, options.partitions, min(options.replicas, options.nodes)),
        at_most_s=60.0,
    ), "the new topic never gets its leaders"
    return clients


async def _make_topic(client: Client, options: Options) -> None:
    client.connect()
    topic = {
        "partitions": options.partitions,
        "replicas": min(options.replicas, options.nodes),
        "settings": options.topic_settings,
    }
    body = msgspec.json.encode(topic)
    headers = {"content-type": "application/json"}
    for _ in range(20):
        answer = await client.request("a", 0, "PUT", f"/v1/topics/{TOPIC}", headers, body)
        if answer.status in (200, 201):
            return
    raise AssertionError(f"the topic can't be made: {answer}")


def standing(world: World, watch: Watch, topic: str, partitions: int | Sequence[int]) -> str:
    """Return where the replicas of a topic's partitions are, as text for a failure."""
    lines = watch.placement.out_of_place()
    for number in numbers_of(partitions):
        for machine, partition in watch.partitions(topic, number):
            lines.append(f"{machine.node} {partition.replica.core!r} {partition.replica.configuration}")
    return f"{world.machines} " + "; ".join(lines)


def _damage(world: World) -> str:
    return "; ".join(
        f"{machine.node} {replica.name} {damage} {running.process.repairs.statistics()}"
        for machine in world.up
        for running in machine.running.values()
        for replica in running.process.driver.replicas.values()
        for damage in replica.log.quarantine
    )
