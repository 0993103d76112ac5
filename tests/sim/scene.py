"""A whole cluster under load with one partition: what the tests of catch-up and replacement begin with."""

from __future__ import annotations

import random
from dataclasses import replace

from laminar.node.partition.partition import Partition
from laminar.node.runtime.process import Process
from tests.sim.clients import REQUEST_TIMEOUT_S
from tests.sim.machine import Machine
from tests.sim.simulation import TOPIC, begin
from tests.sim.watch import Watch
from tests.sim.world import Options, World

SMALL: dict[str, int | str] = {"retention_bytes": 40_000}
SOON: dict[str, int] = {"retention_check_ms": 1000, "retention_hold_ms": 0, "catch_up_bytes": 1 << 14}
REPLACED_SOON = {**SOON, "replace_after_ms": 5000}
LIGHT_PAUSE_S = 0.15
"""Between two requests of a client where it counts that records are appended all the time, not how many."""


class Scene:
    """A cluster under load, one partition, small segments that are given up soon."""

    def __init__(self, seed: int, **options: object) -> None:
        wanted = Options(
            seed=seed,
            partitions=1,
            clients=3,
            node_settings=SOON,
            topic_settings=SMALL,
        )
        for name, value in options.items():
            setattr(wanted, name, value)
        self.options = wanted
        self.world = World(wanted)
        self.watch = Watch(self.world)
        seen = self.world.watch

        def narrow(machine: Machine, process: Process) -> None:
            """Appends in small windows: else a whole log is under way before anybody looks."""
            factory = process.replica_factory
            factory.settings = replace(factory.settings, max_inflight_bytes=2048, max_append_bytes=1024)
            seen(machine, process)

        self.world.watch = narrow
        self.clients = begin(self.world, self.watch)

    def load(self, *, pause_s: float = 0.04) -> None:
        for client in self.clients:
            client.start(pause_s=pause_s)

    def calm(self) -> None:
        for client in self.clients:
            client.stopping = True
        self.world.loop.run_for(2 * REQUEST_TIMEOUT_S)

    def partition(self, machine: Machine) -> Partition | None:
        return next((p for m, p in self.watch.partitions(TOPIC, 0) if m is machine), None)

    def held(self, machine: Machine) -> Partition:
        """`partition`, of one that must be there."""
        partition = self.partition(machine)
        assert partition is not None, machine
        return partition

    def follower(self) -> Machine:
        return next(m for m, p in self.watch.partitions(TOPIC, 0) if not p.leads)

    def end_and_start_again(self, victim: Machine, rng: random.Random, *, by_power: float) -> None:
        """End a machine, with that chance by its power; start all that are down some time later."""
        if victim.up:
            if rng.random() < by_power:
                victim.cut_power(keep=rng.choice((0.0, 0.5, 1.0)))
            else:
                victim.kill()
        self.world.loop.run_for(rng.random())
        for machine in self.world.machines.values():
            if not machine.up:
                machine.start()

    @property
    def start(self) -> int:
        return max((p.log.start.index for _, p in self.watch.partitions(TOPIC, 0)), default=0)

    def installed(self, machine: Machine) -> int:
        return sum(shard.catch_up.installer.installed for shard in machine.shard_processes)

    def until_the_start_passes(self, index: int) -> None:
        assert self.world.loop.run_until(lambda: self.start > index, at_most_s=600.0), "nothing is given up"

    def leave_behind(self, away: Machine) -> Partition:
        """Kill it, and give up all that it held under load; returns its replica as it was."""
        held = self.held(away)
        self.load()
        away.kill()
        self.until_the_start_passes(held.log.last_index)
        return held

    def until_installed(self, machine: Machine, *, at_most_s: float = 60.0) -> None:
        """Wait for its new log."""
        loop = self.world.loop
        assert loop.run_until(lambda: self.installed(machine) == 1, at_most_s=at_most_s), "no new log"

    def check(self, *, replicas: int = 3) -> None:
        loop = self.world.loop
        assert loop.run_until(lambda: self.watch.converged(TOPIC, 1, replicas), at_most_s=120.0), [
            (m.node, p.replica.core, p.log) for m, p in self.watch.partitions(TOPIC, 0)
        ]
        loop.run_until_complete(self.watch.check_end(TOPIC, 1))
        self.world.close()


def scene_of(seed: int, **options: object) -> Scene:
    """With a node to spare, on which what is gone is soon made anew."""
    return Scene(seed, nodes=4, node_settings=REPLACED_SOON, **options)


def members(scene: Scene) -> tuple[set[str], int]:
    """The nodes of the voters as the leader has them, and the number of learners."""
    for _, partition in scene.watch.partitions(TOPIC, 0):
        if partition.leads:
            record = partition.replica.configuration_record
            return {node for _, node in record.voters}, len(record.learners)
    return set(), 0


def replaced(scene: Scene, gone: Machine) -> bool:
    """Whether three others are the voters now."""
    voters, learners = members(scene)
    return len(voters) == 3 and gone.node not in voters and not learners
