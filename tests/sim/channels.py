"""Worlds of channels: consumers that fail in all ways, a person who changes channels, and all faults.

`channel_rules.py` has what must hold. At the end the faults stop, the consumers work off what is left, and
each record is done or dead.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import time
from dataclasses import replace

from tests.sim import simulation
from tests.sim.administrators import Administrators
from tests.sim.channel_clients import NAMES, KeyedProducer, Person, Worker
from tests.sim.channel_rules import ChannelRules
from tests.sim.clients import REQUEST_TIMEOUT_S
from tests.sim.delayed import DelayedClient, DelayRules, finish
from tests.sim.nemesis import Nemesis
from tests.sim.pinners import Pinner
from tests.sim.simulation import TOPIC, Outcome
from tests.sim.watch import Watch
from tests.sim.world import Options, World

COMPARED_EVERY_S = 2.0
"""The pause between two looks at the tables of all replicas."""

RELEASED = {"paused": False, "filter": None, "max_in_flight": 10_000}
"""What channels are set to at the end."""

WORKED_OFF_S = 600.0
"""How long the consumers have at the end."""


def options_of(seed: int) -> Options:
    """Return the world of channels of a seed."""
    options = simulation.options_of(seed)
    rng = random.Random(f"channels {seed}")
    options.channel_pause_s = rng.choice((2.0, 5.0, 15.0))
    options.partitions = rng.choice((1, 2))
    options.clients = rng.choice((2, 3))
    options.client_pause_s = rng.choice((0.5, 1.5))
    options.trouble_s = rng.choice((60.0, 120.0, 240.0))
    options.fault_pause_s = rng.choice((8.0, 20.0, 50.0))
    options.pinners = rng.choice((0, 0, 3))
    # What a loss of power takes from a log of an `interval` topic can't be compared.
    options.topic_settings = {
        name: value for name, value in options.topic_settings.items() if not name.startswith("flush")
    }
    return options


def busy(seed: int) -> Options:
    """Return a world of more consumers and trouble than most."""
    return replace(
        options_of(seed),
        clients=3,
        client_pause_s=0.3,
        fault_pause_s=4.0,
        trouble_s=60.0,
        channel_pause_s=2.0,
        pinners=seed % 2 * 3,
        disk_s=(0.001, 0.02, 0.1)[seed % 3],
    )


def simulate(options: Options, *, trace: list[str] | None = None) -> Outcome:
    """Run a world of channels from its beginning to its end. Raises AssertionError where a rule is broken."""
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
    try:
        rules = ChannelRules(world, watch, TOPIC)
        simulation.begin(world, watch)
        nemesis = Nemesis(world, pause_s=options.fault_pause_s)
        watch.changing = nemesis.changing
        administrators = Administrators(world, nemesis.moving, calm=nemesis.is_calm)
        for machine in world.machines.values():
            machine.wall_offset_ms += world.rng.choice((-3_600_000, 0, 0, 3_600_000))
        producers = [
            KeyedProducer(world, watch, 50 + place, topic=TOPIC, rules=rules)
            for place in range(options.clients)
        ]
        workers = [
            Worker(world, watch, 60 + place, topic=TOPIC, rules=rules) for place in range(options.clients + 1)
        ]
        person = Person(world, watch, 80, topic=TOPIC, rules=rules)
        pinners = [
            # Two of them drive one sink, and know nothing of each other.
            Pinner(world, watch, 70 + place, sink=f"p{place // 2}", topic=TOPIC, rules=rules)
            for place in range(options.pinners)
        ]
        for client in (*producers, *workers, *pinners):
            client.start(pause_s=options.client_pause_s)
        delays = DelayRules(world, watch, TOPIC)
        delayer = DelayedClient(world, watch, 90, rules=delays)
        delayer.start(pause_s=options.client_pause_s)
        managed = person.start(pause_s=options.channel_pause_s)
        _compare(world, rules)
        nemesis.start()
        if options.admin_pause_s:
            administrators.start()
        world.loop.run_for(options.trouble_s)
        for client in (*producers, *pinners, person):
            client.stopping = True
        nemesis.heal()
        if options.admin_pause_s:
            simulation.come_to_rest(world, watch, administrators)
        for worker in workers:
            worker.in_order = True
        world.loop.run_for(2 * REQUEST_TIMEOUT_S)
        assert world.loop.run_until(managed.done, at_most_s=60.0), "the person never ends"
        finish(world, delays, delayer)
        _end_sinks(world, pinners)
        _work_off(world, rules, person)
        for worker in workers:
            worker.stopping = True
        world.loop.run_for(2 * REQUEST_TIMEOUT_S)
        _converge(world, watch)
        for _ in range(60):
            if world.loop.run_until_complete(watch.is_whole()):
                break
            world.loop.run_for(2.0)
        _converge(world, watch)
        world.loop.run_until_complete(watch.check_end(TOPIC, options.partitions))
        rules.check_tables()
        watch.ledger.check_end()
        assert not rules.open_channels(), rules.open_channels()
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
    outcome.operations = sum(client.operations for client in (*producers, *workers, *pinners, person))
    outcome.acknowledged = sum(producer.acknowledged for producer in producers)
    outcome.elections = watch.elections
    outcome.faults = nemesis.faults
    outcome.exercised += watch.exercised() + nemesis.moving.exercised() + administrators.exercised()
    for name, count in rules.happened.items():
        outcome.exercised[f"channels: {name}"] += count
    outcome.exercised.update({f"delayed: {name}": count for name, count in delays.happened.items()})
    for client in (*workers, *pinners, person):
        for name, count in client.answers.items():
            outcome.exercised[f"channels: {name}"] += count
    return outcome


def _compare(world: World, rules: ChannelRules) -> None:
    """Compare the tables of all replicas now, and again and again."""
    rules.check_tables()
    world.loop.call_in(None, COMPARED_EVERY_S, _compare, world, rules)


def _end_sinks(world: World, pinners: list[Pinner]) -> None:
    """Begin an epoch of each sink: what is not decided by then never is, and its jobs come again."""
    for pinner in {each.sink: each for each in pinners}.values():
        begun = world.loop.start(pinner.life, pinner.begin())
        assert world.loop.run_until(begun.done, at_most_s=120.0), "healed, but no sink can be begun"
        begun.result()


def _work_off(world: World, rules: ChannelRules, person: Person) -> None:
    """Have all channels give out, and what parks a key be tried again, until nothing is left."""
    deadline_s = world.loop.time() + WORKED_OFF_S
    resumed: set[str] = set()
    while rules.open_channels():
        assert world.loop.time() < deadline_s, "healed, but not worked off: " + "; ".join(
            rules.open_channels()
        )
        for name in NAMES:
            if name not in resumed:
                done = world.loop.start(person.life, person.set(name, RELEASED))
                assert world.loop.run_until(done.done, at_most_s=60.0), "a channel is never set"
                if done.result():
                    resumed.add(name)
            replayed = world.loop.start(person.life, person.replay(name))
            assert world.loop.run_until(replayed.done, at_most_s=60.0), "the dead are never replayed"
        world.loop.run_for(5.0)


def _converge(world: World, watch: Watch) -> None:
    options = world.options
    assert world.loop.run_until(
        lambda: watch.converged(TOPIC, options.partitions, simulation.replicas_of(options)), at_most_s=300.0
    ), "healed, but the cluster does not converge: " + simulation.standing(
        world, watch, TOPIC, options.partitions
    )
