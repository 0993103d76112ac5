"""Administrators who change what is wanted of nodes, topics and partitions, beside all the faults.

They drain nodes and think better of it, remove them and use their names again, change weights, zones, pins
and numbers of replicas, and now and then two of them want something of the same thing at once. A command is
what `/v1/admin` makes of a request; the rules that it must keep are checked by `placement_rules.py`.

`Options.thin` worlds go down to one replica. No disk forgets anything there: that copy may be the
only one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from laminar.node.catalog.controller import Controller
from laminar.node.placement.preferred_leaders import transfer
from laminar.node.placement.wanted import belonging_weights
from laminar.node.transactions.coordinator import TOPIC as COORDINATORS_TOPIC
from membership.catalog import NotCatalogLeader, NotEnabled, OutcomeUnknown
from membership.records import CatalogState, NodeRecord, Pin
from membership.requests import (
    AlterNode,
    AlterTopic,
    PinPartition,
    PlacementChange,
    PreferLeaders,
    RemoveNode,
    Result,
)
from tests.sim.loop import Life
from tests.sim.machine import Machine
from tests.sim.moving import Moving
from tests.sim.world import World

# For so long one waits until a node is empty, before it stays.
EMPTY_S = 90.0
LOOK_S = 0.5

FEWEST = 3


class Administrators:
    """All of one world."""

    def __init__(self, world: World, moving: Moving, *, calm: Callable[[], bool]) -> None:
        """`calm()`: whether no disk may have forgotten anything."""
        self.world = world
        self.rng = world.rng
        self.moving = moving
        self.did: Counter[str] = Counter()
        self.stopping = False
        self._calm = calm
        # The machine whose node is being removed, and whether the catalog has done so.
        self._removing: Machine | None = None
        self._removed = False
        self._otherwise, world.gave_up = world.gave_up, self._gave_up
        self._deeds: list[tuple[int, Callable[[], None]]] = [
            (3, self.drain),
            (3, self.undrain),
            (3, self.weigh),
            (2, self.zone),
            (4, self.replicas),
            (3, self.pin),
            (3, self.unpin),
            (2, self.transfer),
            (3, self.remove),
            (2, self.forget_dead),
            (4, self.two_at_once),
        ]

    def start(self) -> asyncio.Task[None]:
        """Begin."""
        return self.world.loop.start(Life("administrators"), self._run())

    async def _run(self) -> None:
        weights = [weight for weight, _ in self._deeds]
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / self.world.options.admin_pause_s))
            if self.stopping:
                return
            self.rng.choices(self._deeds, weights)[0][1]()

    # -- asking ------------------------------------------------------------------------------

    def _state(self) -> CatalogState | None:
        return self.world.catalog()

    def ask(self, change: PlacementChange, done: Callable[[Result], None] | None = None) -> None:
        """Have the catalog's leader carry out a command; `done` is told of its result, if one comes."""
        leader = self.world.catalog_leader()
        if leader is None:
            return
        machine, controller = leader
        life = next(running.life for running in machine.running.values() if running.process is controller)
        self.world.note(f"administrator {change}")
        self.world.loop.start(life, self._command(controller, change, done))

    async def _command(
        self, controller: Controller, change: PlacementChange, done: Callable[[Result], None] | None
    ) -> None:
        assert controller.group is not None
        try:
            result = await controller.group.catalog.change_placement(change)
        except (NotCatalogLeader, NotEnabled, OutcomeUnknown):
            return
        assert result.outcome != "failed", f"{change}: {result}"
        self.did[f"{type(change).__name__} {result.outcome}"] += 1
        if done is not None:
            done(result)

    def _nodes(self, fits: Callable[[NodeRecord], bool]) -> list[NodeRecord]:
        state = self._state()
        return [] if state is None else [node for node in state.nodes.values() if fits(node)]

    def _names(self) -> set[str]:
        return {machine.name for machine in self.world.machines.values()}

    def _spare(self, state: CatalogState) -> int:
        """How many nodes may still leave."""
        living = self._names() - {node.node for node in state.nodes.values() if node.rolled_back}
        return len(belonging_weights(state).keys() & living) - FEWEST

    # -- what they do ------------------------------------------------------------------------

    def drain(self) -> None:
        state = self._state()
        found = self._nodes(lambda node: not node.draining)
        # Now and then one more than may go: then it waits.
        if state is not None and found and self._spare(state) + (self.rng.random() < 0.2) > 0:
            node = self.rng.choice(found)
            self.ask(AlterNode(node.node, node.version, draining=True))

    def undrain(self) -> None:
        found = self._nodes(lambda node: node.draining)
        if found:
            node = self.rng.choice(found)
            self.ask(AlterNode(node.node, node.version, draining=False))

    def weigh(self) -> None:
        state = self._state()
        found = self._nodes(lambda node: True)
        if state is not None and found:
            node = self.rng.choice(found)
            weights = (None, 0.5, 1.0, 4.0, *((0.0,) if self._spare(state) > 0 else ()))
            self.ask(AlterNode(node.node, node.version, set_weight=self.rng.choice(weights)))

    def zone(self) -> None:
        found = self._nodes(lambda node: True)
        if found:
            node = self.rng.choice(found)
            self.ask(AlterNode(node.node, node.version, set_zone=self.rng.choice((None, "x", "y", "z"))))

    def _number(self) -> int:
        if not self.world.options.thin:
            return self.rng.choice((3, 3, 4))
        return self.rng.choice((1, 2, 3))

    def replicas(self) -> None:
        state = self._state()
        if state is not None and self._calm():
            names = [each for each in ("t", COORDINATORS_TOPIC) if each in state.topics]
            if names:
                topic = state.topics[self.rng.choice(names)]
                self.ask(AlterTopic(topic.name, topic.version, self._number()))

    def pin(self) -> None:
        state = self._state()
        if state is None or not state.partitions or not self._calm():
            return
        key = self.rng.choice(list(state.partitions))
        nodes = [name for name in belonging_weights(state) if name in self._names()]
        number = min(self._number(), len(nodes))
        if number >= (1 if self.world.options.thin else FEWEST):
            pin = Pin(self.rng.sample(nodes, number), "administrator", "a test")
            self.ask(PinPartition(key, state.partitions[key].version, pin))

    def unpin(self) -> None:
        state = self._state()
        pinned = [] if state is None else [key for key, record in state.partitions.items() if record.pin]
        if state is not None and pinned and self._calm():
            key = self.rng.choice(pinned)
            self.ask(PinPartition(key, state.partitions[key].version, None))

    def transfer(self) -> None:
        """Have another node lead a partition; it may have lost its replica, or its life, by now."""
        state = self._state()
        if state is not None and state.partitions:
            key = self.rng.choice(sorted(state.partitions))
            replica = self.rng.choice(state.partitions[key].replicas)
            self.ask(PreferLeaders(transfer(state, key, replica.node)))

    def two_at_once(self) -> None:
        """Two commands about the same thing, both decided on what it is now: one of them is refused."""
        state = self._state()
        if state is None or not state.nodes:
            return
        node = self.rng.choice(list(state.nodes.values()))
        weights = self.rng.sample((0.25, 0.5, 2.0, 3.0), 2)
        done: list[Result] = []

        def both(result: Result) -> None:
            done.append(result)
            changed = [each for each in done if each.outcome == "updated"]
            assert len(changed) < 2, f"both administrators changed {node}: {done}"
            if len(done) == 2:
                self.did["two at once"] += 1

        for weight in weights:
            self.ask(AlterNode(node.node, node.version, set_weight=weight), both)

    # -- nodes that leave --------------------------------------------------------------------

    def forget_dead(self) -> None:
        """Of a name that no machine has any more nothing ever comes: it is removed."""
        names = self._names()
        dead = self._nodes(lambda node: node.node not in names)
        if dead and not self.moving.is_wiped:
            self.ask(self._forgetting(self.rng.choice(dead)))

    def _forgetting(self, node: NodeRecord) -> PlacementChange:
        if node.draining:
            return RemoveNode(node.node, node.version)
        return AlterNode(node.node, node.version, draining=True)

    def remove(self) -> None:
        """Drain a node, and when it is empty remove it; its machine comes back with an empty folder."""
        state = self._state()
        machines = [each for each in self.world.up if state is not None and each.name in state.nodes]
        if self._removing is None and state is not None and self._spare(state) > 0 and machines:
            self._removing, self._removed = self.rng.choice(machines), False
            self.world.loop.start(Life("removal"), self._remove(self._removing, self._removing.folder))

    async def _remove(self, machine: Machine, folder: int) -> None:
        left = int(EMPTY_S / LOOK_S)
        while left and machine.folder == folder and not self.stopping:
            state = self._state()
            node = state.nodes.get(machine.name) if state is not None else None
            if state is not None and node is None and self._removed:
                break
            may_drain = state is not None and self._spare(state) > 0
            if node is not None and not node.draining and may_drain:
                self.ask(AlterNode(node.node, node.version, draining=True))
            elif node is not None and node.draining and self._may_go(machine):
                self.ask(RemoveNode(node.node, node.version), self._note_removed)
            left -= 1
            await asyncio.sleep(LOOK_S * (0.5 + self.rng.random()))
        if machine.folder != folder or not self._removed:
            self._removing = None
            return
        await asyncio.sleep(self.rng.random() * 10)
        if machine.folder == folder and machine.up and self.rng.random() < 0.5:
            machine.kill()
            if self.rng.random() < 0.5:
                machine.start()  # with its old folder, which is refused
            else:
                self._empty(machine)
        elif machine.folder == folder and not machine.up:
            self._empty(machine)

    def _may_go(self, machine: Machine) -> bool:
        """Whether its removal may be asked for.

        It must not vote on the catalog, and `interval` groups hold it durably that it left.
        """
        leader, state = self.world.catalog_leader(), self._state()
        if leader is None or state is None or machine.is_old or not self._calm():
            return False
        assert leader[1].group is not None
        if state.nodes[machine.name].catalog_replica in leader[1].group.replica.configuration.voters:
            return False
        if not self.world.options.is_interval:
            return True
        return all(self.moving.is_settled(record, machine.name) for record in state.partitions.values())

    def _note_removed(self, result: Result) -> None:
        # `absent`: an earlier command of the same, whose answer was lost.
        if result.outcome in ("deleted", "absent"):
            self._removed = True

    def _gave_up(self, machine: Machine) -> None:
        if machine is self._removing and self._removed:
            assert "removed" in machine.unrecoverable, machine.unrecoverable
            self.did["refused with its old folder"] += 1
            self._empty(machine)
        else:
            self._otherwise(machine)

    def _empty(self, machine: Machine) -> None:
        """Another folder under the name that was removed."""
        self.did["names used again"] += 1
        self._removing = None
        others = tuple(node for node in self.world.machines if node != machine.node)
        machine.wipe(machine.name, join=others)
        self.world.loop.call_in(None, self.rng.random() * 5, lambda: None if machine.up else machine.start())

    # -- the end -----------------------------------------------------------------------------

    def end(self) -> None:
        """Take back what can never be reached: too few nodes that belong, pins to those that left."""
        self.stopping = True
        self.world.loop.start(Life("the last administrator"), self._end())

    def is_over(self) -> bool:
        """Whether nothing is left to take back, and nothing is being removed."""
        state = self._state()
        return state is not None and self._removing is None and not self._take_back(state)

    async def _end(self) -> None:
        while True:
            state = self._state()
            for change in self._take_back(state)[:1] if state is not None else ():
                self.ask(change)
            await asyncio.sleep(0.5)

    def _take_back(self, state: CatalogState) -> list[PlacementChange]:
        names = self._names()
        spare = self._spare(state)
        belonging = belonging_weights(state).keys() & names
        # First, as no node is removed to which a partition is pinned.
        changes: list[PlacementChange] = [
            PinPartition(key, record.version, None)
            for key, record in state.partitions.items()
            if record.pin is not None and not belonging.issuperset(record.pin.nodes)
        ]
        for node in state.nodes.values():
            if node.node not in names:
                changes.append(self._forgetting(node))
            elif node.set_weight == 0.0:
                changes.append(AlterNode(node.node, node.version, set_weight=None))
            elif node.draining and spare < 0:
                changes.append(AlterNode(node.node, node.version, draining=False))
        for topic in state.topics.values():
            if topic.replicas > len(belonging):
                changes.append(AlterTopic(topic.name, topic.version, len(belonging)))
        return changes

    def exercised(self) -> Counter[str]:
        """What came of it."""
        return Counter(self.did)
