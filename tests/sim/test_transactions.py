"""Transactions in the simulator where the crash comes at a chosen step, not by chance."""

from __future__ import annotations

import pytest

from laminar.batch import Header, Kind
from laminar.node.api.transactions import abandoned_stages
from laminar.node.api.transactions.steps import COORDINATORS
from laminar.node.partition.state import sinks
from laminar.node.transactions.coordinator import TOPIC as COORDINATORS_TOPIC
from tests.long_examples import long
from tests.sim.drivers import Driver
from tests.sim.machine import Machine
from tests.sim.simulation import TOPIC, _end_sinks, begin, simulate
from tests.sim.watch import Watch
from tests.sim.world import Options, World

BATCHES = 3
# Kinds of entries in the order in which a commit makes them, each with how often it was there before.
STEPS = [
    (Kind.SINK, 0),  # the epoch
    (Kind.STAGED, 0),
    (Kind.STAGED, 1),
    (Kind.PREPARE, 0),
    (Kind.PREPARE, 1),
    (Kind.SINK, 1),  # the decision
    (Kind.PUBLISH, 0),
    (Kind.PUBLISH, 1),
    (Kind.SINK, 2),  # published everywhere
    (Kind.STAGED, 4),
]


def run(world: World, watch: Watch, driver: Driver) -> None:
    """Until the driver has committed all, and nothing is left to be done."""
    ended = world.loop.start(driver.life, driver.commit_batches(BATCHES))
    assert world.loop.run_until(ended.done, at_most_s=180.0), "the batches are never committed"
    ended.result()
    assert world.loop.run_until(
        lambda: all(machine.up for machine in world.machines.values()), at_most_s=60.0
    )
    assert world.loop.run_until(lambda: watch.converged(TOPIC, 2, 3), at_most_s=60.0)
    _end_sinks(world, watch, driver)
    world.loop.run_until_complete(watch.check_end(TOPIC, 2))
    assert watch.ledger.happened["batches decided"] >= BATCHES


def cluster(seed: int) -> tuple[World, Watch, Driver]:
    """Three nodes without other troubles, and one driver who does not crash by chance."""
    world = World(Options(seed=seed, partitions=2, clients=0, disk_s=0.01))
    watch = Watch(world)
    begin(world, watch)
    driver = Driver(world, watch, 1, sink="s", topic=TOPIC, partitions=2)
    driver.crash_chance = 0.0
    return world, watch, driver


def leader(watch: Watch, group: str) -> Machine | None:
    """Who leads a group that is named as `topic/number`."""
    topic, _, number = group.rpartition("/")
    return next((each for each, partition in watch.partitions(topic, int(number)) if partition.leads), None)


# At each step both victims, and both instants, in pairs that differ from step to step; the others are `long`.
PAIRS = [
    [("taken", "coordinator"), ("committed", "target")],
    [("taken", "target"), ("committed", "coordinator")],
]
CRASHES = [(*step, *pair) for at, step in enumerate(STEPS) for pair in PAIRS[at % 2]]
OTHERS = [(*step, *pair) for at, step in enumerate(STEPS) for pair in PAIRS[1 - at % 2]]


@pytest.mark.parametrize(("kind", "place", "when", "victim"), [*CRASHES, *long(*OTHERS)])
def test_pitfall_41_a_coordinator_or_target_crashes_between_any_two_steps(
    kind: Kind, place: int, when: str, victim: str
) -> None:
    """The step is in the leader's log, or committed; at that instant a leader of one side is killed.

    Every batch is committed once, whole in each partition and in order: `tests.sim.sinks` looks at all along.
    """
    world, watch, driver = cluster(100 + place)
    seen: set[tuple[str, int]] = set()
    killed: list[str] = []

    def kill(group: str) -> None:
        machine = leader(watch, group)
        if machine is not None:
            killed.append(group)
            machine.kill()
            world.loop.call_in(None, 3.0, machine.start)

    def on_entry(what: str, group: str, header: Header) -> None:
        if what != when or header.kind is not kind or (group, header.index) in seen:
            return
        seen.add((group, header.index))
        if len(seen) != place + 1:
            return
        groups = [f"{COORDINATORS_TOPIC}/{number}" for number in range(COORDINATORS)]
        coordinator = next((name for name in groups if _has_sinks(watch, name)), group)
        target = group if group.startswith(f"{TOPIC}/") else f"{TOPIC}/0"
        world.loop.call_in(None, 0.0, kill, coordinator if victim == "coordinator" else target)

    watch.on_entry = on_entry
    run(world, watch, driver)
    assert killed, f"nobody was killed: {len(seen)} entries of kind {kind.name}"


def _has_sinks(watch: Watch, group: str) -> bool:
    topic, _, number = group.rpartition("/")
    return any(partition.state.sinks for _, partition in watch.partitions(topic, int(number)))


@pytest.mark.parametrize("step", range(1, 10))
def test_pitfall_41_a_driver_crashes_between_any_two_steps(step: int) -> None:
    """Whoever comes after it begins anew, and goes on behind the last batch that was committed."""
    world, watch, driver = cluster(200 + step)
    driver.crash_at = step
    run(world, watch, driver)
    assert 1 <= driver.crashes


@pytest.mark.parametrize("seed", [303, *long(302)])
def test_sinks_that_write_once_are_forgotten_through_crashes_and_no_batch_is_torn(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Far too soon, where each coordinator keeps one that is older than seconds; replicas agree on which."""
    monkeypatch.setattr(sinks, "MAX_ONCE", 1)
    monkeypatch.setattr(sinks, "ONCE_MS", 5_000)
    monkeypatch.setattr(abandoned_stages, "ONCE_MS", 5_000)
    outcome = simulate(Options(seed=seed, clients=0, drivers=1, once=4, trouble_s=120.0))

    assert outcome.exercised["sinks begun once"] > 20 and outcome.exercised["batches decided"] > 20
    assert outcome.exercised["sinks forgotten"] > 5
