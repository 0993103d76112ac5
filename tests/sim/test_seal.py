"""A partition that is sealed under load, while nodes die: whole clusters; nothing opens a successor."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from laminar.http.api.problems import Problem
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.succession import Output, SealRecord
from tests.long_examples import long
from tests.sim.loop import Life
from tests.sim.machine import Machine
from tests.sim.scene import Scene
from tests.sim.simulation import TOPIC

SEAL = SealRecord(7, 3, [Output(1, 0, 65_536, b"1" * 16)], "strict")


def at_the_leader(scene: Scene, ask: Callable[[Partition], asyncio.Future[Receipt]]) -> None:
    """Ask its leader, if there is one, in its own process; what becomes of it is looked at elsewhere."""

    def asked(partition: Partition) -> None:
        try:
            ask(partition).add_done_callback(lambda done: done.cancelled() or done.exception())
        except Problem as problem:
            assert problem.code in ("not_leader", "overloaded", "in_progress"), problem

    scene.watch.routes.by_hand = True
    for machine, partition in scene.watch.partitions(TOPIC, 0):
        if partition.leads:
            scene.world.loop.call_in(life_of(machine, partition), 0.0, asked, partition)


def life_of(machine: Machine, partition: Partition) -> Life:
    (life,) = (
        running.life
        for running in machine.running.values()
        if partition in getattr(running.process, "partitions", {}).values()
    )
    return life


def seal_it(scene: Scene) -> int:
    """Ask for the seal until it is committed; its index."""
    (group,) = (group for group in scene.watch.groups.values() if group.name == f"{TOPIC}/0")
    loop = scene.world.loop
    for _ in range(600):
        at_the_leader(scene, lambda partition: partition.propose_seal(SEAL))
        if loop.run_until(lambda: group.seal > 0, at_most_s=0.2):
            return group.seal
    raise AssertionError("it is never sealed")


def check(scene: Scene) -> None:
    """Nothing that was refused as sealed is in the log; and all that was acknowledged is."""
    (group,) = (group for group in scene.watch.groups.values() if group.name == f"{TOPIC}/0")
    refused = {value for client in scene.clients for value in client.refused}
    acknowledged = {value for client in scene.clients for _, values in client.told[0] for value in values}
    assert group.seal and refused and acknowledged
    assert not refused & set(group.values)
    assert acknowledged <= set(group.values)
    for machine, partition in scene.watch.partitions(TOPIC, 0):
        seal = partition.state.committed_seal
        assert seal is not None and (group.seal, len(group.values)) == (seal.index, seal.end), machine
    scene.check()


def test_a_replica_gets_a_log_that_begins_after_the_seal() -> None:
    """It was away when the partition ended, and everything before the end was given up."""
    scene = Scene(11)
    away = scene.follower()
    scene.load()
    scene.world.loop.run_for(5.0)
    away.kill()
    sealed = seal_it(scene)
    scene.world.loop.run_for(5.0)
    at_the_leader(scene, lambda partition: partition.start_mover.propose(partition.committed_index))
    scene.until_the_start_passes(sealed - 1)
    away.start()

    scene.until_installed(away)
    scene.calm()
    check(scene)


@pytest.mark.parametrize("seed", [2, 3, *long(0, 1, 4, 5)])
def test_no_record_follows_a_seal_whoever_dies(seed: int) -> None:
    """The leader or another, with the power or without, before, at and after the seal; clients ask on."""
    scene = Scene(200 + seed, disk_s=(0.002, 0.05)[seed % 2])
    rng = random.Random(seed)
    scene.load()
    scene.world.loop.run_for(3.0)
    sealing = False
    for _ in range(12):
        scene.world.loop.run_for(rng.random() * 0.5)
        sealing = sealing or rng.random() < 0.4
        if sealing:
            at_the_leader(scene, lambda partition: partition.propose_seal(SEAL))
            scene.world.loop.run_for(rng.random() * 0.05)
        leaders = [machine for machine, partition in scene.watch.partitions(TOPIC, 0) if partition.leads]
        victim = rng.choice(leaders or list(scene.world.machines.values()))
        if rng.random() < 0.3:
            victim = rng.choice(list(scene.world.machines.values()))
        scene.end_and_start_again(victim, rng, by_power=0.5)
    seal_it(scene)
    scene.world.loop.run_for(5.0)
    scene.calm()
    check(scene)


@pytest.mark.parametrize("seed", [2, *long(0, 1)])
def test_no_client_hears_of_a_seal_that_is_cut(seed: int) -> None:
    """Its leader is cut off from the others, not from clients; these go on under the next leader."""
    scene = Scene(300 + seed)
    scene.load(pause_s=0.01)
    loop, world = scene.world.loop, scene.world
    loop.run_for(3.0)
    (group,) = (group for group in scene.watch.groups.values() if group.name == f"{TOPIC}/0")
    ((alone, deposed),) = ((m, p) for m, p in scene.watch.partitions(TOPIC, 0) if p.leads)
    others = [node for node in world.machines if node != alone.node]
    world.cut([(alone.node, node) for node in others] + [(node, alone.node) for node in others])
    at_the_leader(scene, lambda partition: partition.propose_seal(SEAL))
    loop.run_for(0.1)
    assert deposed.state.succession.sealed is not None
    before = len(group.values)
    assert loop.run_until(lambda: len(group.values) > before + 50, at_most_s=60.0), "no one takes records"
    assert not group.seal and not any(client.refused for client in scene.clients)

    world.cut([])
    assert loop.run_until(lambda: deposed.state.succession.sealed is None, at_most_s=60.0)
    seal_it(scene)
    loop.run_for(5.0)
    scene.calm()
    check(scene)
