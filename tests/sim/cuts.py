"""Rounds of network cuts during configuration changes, and what they cost: `python -m tests.sim --cuts 100`.

In each round an administrator wants something else of one topic: other nodes, or another number of replicas.
The moment in which a group of it begins to change its members, wires are cut: around its leader, between
halves, or in one direction. Some seconds later they are whole again, and every replica must come to its
place. A round counts when the change was not committed, or a replica was still joining, at the cut.

Losses are counted from what clients were told, after all rounds of a world, in what every replica holds.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from membership.records import CatalogState, Pin
from membership.requests import AlterNode, AlterTopic, PinPartition, PlacementChange
from tests.sim.administrators import Administrators
from tests.sim.clients import REQUEST_TIMEOUT_S, Client
from tests.sim.machine import Machine
from tests.sim.moving import Moving
from tests.sim.nemesis import pairs_around
from tests.sim.simulation import TOPIC, begin
from tests.sim.watch import Watch
from tests.sim.world import Options, World

ROUNDS = 10
PARTITIONS = 2
NODES = 5


@dataclass(slots=True)
class Counted:
    """What rounds did."""

    rounds: int = 0
    # Rounds in which nothing changed, or the change was over before the cut: not counted.
    idle: int = 0
    acknowledged: int = 0
    lost: int = 0
    doubled: int = 0
    reordered: int = 0
    configurations: int = 0
    elections: int = 0
    simulated_s: float = 0.0
    deeds: Counter[str] = field(default_factory=Counter)

    def add(self, other: Counted) -> None:
        """Count the rounds of another world, too."""
        for name in ("rounds", "idle", "acknowledged", "lost", "doubled", "reordered"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.configurations += other.configurations
        self.elections += other.elections
        self.simulated_s += other.simulated_s
        self.deeds.update(other.deeds)


class Cuts:
    """One world, and its rounds."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"cuts {seed}")
        self.options = Options(
            seed=seed,
            nodes=NODES,
            partitions=PARTITIONS,
            clients=3,
            admin_pause_s=1.0,
            thin=True,
            node_settings={"replace_after_ms": 15_000, "settle_ms": 1000},
        )
        self.world = World(self.options)
        self.watch = Watch(self.world)
        self.counted = Counted()
        self.administrators = Administrators(self.world, Moving(self.world), calm=lambda: True)
        self.clients = begin(self.world, self.watch)
        self._waiting = False
        self._cut = False
        self.watch.changing = self._changing

    def run(self, rounds: int) -> Counted:
        """Run so many rounds. Raises AssertionError where a rule is broken."""
        for client in self.clients:
            client.start(pause_s=0.1)
        while self.counted.rounds < rounds:
            self._round()
            assert self.counted.idle < 20 * rounds, "nothing ever changes"
        for client in self.clients:
            client.stopping = True
        self.world.loop.run_for(2 * REQUEST_TIMEOUT_S)
        assert self.world.loop.run_until(self._at_rest, at_most_s=120.0), self.watch.placement.out_of_place()
        self.world.loop.run_until_complete(self.watch.check_end(TOPIC, PARTITIONS))
        self.world.loop.check()
        self._count()
        self.world.close()
        return self.counted

    # -- a round -----------------------------------------------------------------------------

    def _round(self) -> None:
        state = self.world.catalog()
        assert state is not None, "healed, but the catalog has no leader"
        self._waiting, self._cut = True, False
        deed = self._deed(state)
        self.administrators.ask(deed)
        self.world.loop.run_until(lambda: self._cut, at_most_s=5.0)
        self._waiting = False
        if not self._cut:
            self.counted.idle += 1
            return
        counts = self._is_under_way()
        self.world.loop.run_for(0.5 + self.rng.random() * 8)
        self.world.cut([])
        assert self.world.loop.run_until(self._at_rest, at_most_s=120.0), (
            f"after {deed}: {self.watch.placement.out_of_place()}"
        )
        self.counted.rounds += counts
        self.counted.idle += not counts
        self.counted.deeds[type(deed).__name__] += counts

    def _deed(self, state: CatalogState) -> PlacementChange:
        draining = [node for node in state.nodes.values() if node.draining]
        topic = state.topics[TOPIC]
        if draining:
            return AlterNode(draining[0].node, draining[0].version, draining=False)
        most = max([topic.replicas, *(len(each.pin.nodes) for each in state.partitions.values() if each.pin)])
        if self.rng.random() < 0.2 and most < NODES:  # else the drain waits, for ever
            node = self.rng.choice(list(state.nodes.values()))
            return AlterNode(node.node, node.version, draining=True)
        if self.rng.random() < 0.4:
            others = [number for number in (1, 2, 3, 3, 4, 5) if number != topic.replicas]
            return AlterTopic(TOPIC, topic.version, self.rng.choice(others))
        key = f"{TOPIC}/{self.rng.randrange(PARTITIONS)}"
        record = state.partitions[key]
        if record.pin is not None and self.rng.random() < 0.5:
            return PinPartition(key, record.version, None)
        number = self.rng.choice((1, 2, 3, 3, 3))
        pin = Pin(self.rng.sample(list(state.nodes), number), "administrator", "a test")
        return PinPartition(key, record.version, pin)

    def _changing(self, machine: Machine, group: str) -> None:
        if self._waiting and group.startswith(f"{TOPIC}/") and self.rng.random() < 0.5:
            self._waiting = False
            # At once, while it is being written, or when some have it.
            delay_s = self.rng.choice((0.0, 0.0, 0.0005, 0.001, 0.002))
            self.world.loop.call_in(None, delay_s, self._cut_around, machine)

    def _cut_around(self, machine: Machine) -> None:
        self._cut = True
        self.world.cut(pairs_around(self.rng, self.world, machine))

    def _is_under_way(self) -> bool:
        """Whether some group's newest configuration is not committed everywhere, or has a learner."""
        for number in range(PARTITIONS):
            for _, partition in self.watch.partitions(TOPIC, number):
                core = partition.replica.core
                if core.configuration.learners or core._log.configurations.index > core.committed_index:
                    return True
        return False

    def _at_rest(self) -> bool:
        return not self.watch.placement.out_of_place() and self._is_served()

    def _is_served(self) -> bool:
        """Whether each partition has a leader, and its group the members that are wanted."""
        state = self.world.catalog()
        if state is None:
            return False
        for number in range(PARTITIONS):
            leader = next((p for _, p in self.watch.partitions(TOPIC, number) if p.leads), None)
            wanted = {each.replica_id for each in state.partitions[f"{TOPIC}/{number}"].replicas}
            if leader is None or set(leader.replica.configuration.voters) != wanted:
                return False
        return True

    # -- the count ---------------------------------------------------------------------------

    def _count(self) -> None:
        counted = self.counted
        for number in range(PARTITIONS):
            [group] = [each for each in self.watch.groups.values() if each.name == f"{TOPIC}/{number}"]
            times = Counter(group.values)
            counted.doubled += sum(count - 1 for count in times.values())
            for client in self.clients:
                counted.add(_told(client, number, group.values))
        counted.configurations = self.watch.reconfigurations
        counted.elections = self.watch.elections
        counted.simulated_s = self.world.loop.time()


def _told(client: Client, partition: int, values: list[bytes]) -> Counted:
    """What one client was told of a partition, beside what is there at the end."""
    counted, last = Counted(), -1
    for offset, told in client.told[partition]:
        counted.acknowledged += len(told)
        counted.lost += sum(
            place >= len(values) or values[place] != value for place, value in enumerate(told, offset)
        )
        counted.reordered += offset <= last
        last = offset + len(told) - 1
    return counted


def run_world(seed: int, rounds: int = ROUNDS) -> Counted:
    """The rounds of one seed."""
    return Cuts(seed).run(rounds)
