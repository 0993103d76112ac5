"""Replicas that change places while everything else goes wrong: lost disks, and moves that are asked for.

A disk is lost only where that can cost no entry its last copy: when every machine is there, every group of
the victim has three voters, and these hold durably all that is committed. Until the cluster has made anew
what was lost no second disk goes, and nobody else may forget anything either: until then one of three is gone
for good. An operator gives the machine a new name (docs/operating.md); now and then one tries the old name
first, which must be refused.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from laminar.node.consensus.replica import Replica
from laminar.node.runtime.process import Process
from membership.catalog import NotCatalogLeader, NotEnabled, OutcomeUnknown
from membership.records import (
    PartitionRecord,
    Pin,
)
from membership.requests import (
    PinPartition,
)
from tests.sim.machine import Machine
from tests.sim.world import World

CHECK_S = 0.5
LOOKS = 40
VOTERS = 3


class Moving:
    """See the module."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        self.wiped = 0
        self.asked = 0
        # A machine whose old name still has replicas, and that name.
        self._missing: tuple[Machine, str] | None = None
        self._wanted: Machine | None = None
        world.gave_up = self._refused

    def exercised(self) -> Counter[str]:
        """What came of it."""
        return Counter({"disks lost": self.wiped, "moves asked for": self.asked})

    # -- disks that are lost -----------------------------------------------------------------

    @property
    def is_wiped(self) -> bool:
        """Whether replicas that a lost disk held are not made anew yet."""
        if self._missing is not None and not self._holds(self._missing[1]):
            self._missing = None
        return self._missing is not None

    def wipe_when_whole(self, machine: Machine) -> None:
        """Soon, at a moment at which that may be survived; not at all if none comes."""
        if self._wanted is None and machine.world.options.node_settings.get("replace_after_ms"):
            self._wanted = machine
            self._look(LOOKS)

    def _look(self, left: int) -> None:
        machine = self._wanted
        assert machine is not None
        if not left or self.is_wiped:
            self._wanted = None
        elif machine.up and self._may_go(machine):
            self._wanted = None
            self._wipe(machine)
        else:
            self.world.loop.call_in(None, CHECK_S, self._look, left - 1)

    def _wipe(self, machine: Machine) -> None:
        self.wiped += 1
        self._missing = (machine, machine.name)
        machine.kill()
        name = machine.name if self.rng.random() < 0.3 else self._new_name(machine)
        machine.wipe(name, join=self._others(machine))
        self.world.loop.call_in(None, self.rng.random() * 8, self._back, machine)

    def _back(self, machine: Machine) -> None:
        if not machine.up:
            machine.start()

    def _refused(self, machine: Machine) -> None:
        """The cluster knows that name with another folder: under a new one, then."""
        assert self._missing == (machine, machine.name), (
            f"{machine.name} cannot go on: {machine.unrecoverable}"
        )
        machine.wipe(self._new_name(machine), join=self._others(machine))
        self.world.loop.call_in(None, 1.0, self._back, machine)

    def _new_name(self, machine: Machine) -> str:
        return f"{machine.node}{machine.folder + 1}"

    def _others(self, machine: Machine) -> tuple[str, ...]:
        return tuple(node for node in self.world.machines if node != machine.node)

    def _may_go(self, machine: Machine) -> bool:
        machines = self.world.machines.values()
        state = self.world.catalog()
        if state is None or not all(each.up and each.holds_all() for each in machines):
            return False
        if any(each.disk.error is not None or each.disk.room_bytes is not None for each in machines):
            return False
        if any(each.is_old for each in machines):
            return False
        return all(
            self._is_safe(replica)
            for running in machine.running.values()
            for replica in _replicas(running.process)
        )

    def _is_safe(self, replica: Replica) -> bool:
        """Whether the others of its group have all that is certain, durably, and there are enough of them."""
        group = _group(self.world, replica.group)
        leader = next((each for each in group if each.core.is_leader), None)
        if leader is None:
            return False
        configuration = leader.configuration
        voters = [each for each in group if each.replica_id in configuration.voters]
        certain = max(each.core.committed_index for each in group)
        return (
            len(configuration.voters) == len(voters) >= VOTERS
            and all(each.log.durable_index >= certain and not each.log.quarantine for each in voters)
            and all(each.configuration == configuration for each in voters)
        )

    def _holds(self, name: str) -> bool:
        """Whether anything still counts on what a node of this name held."""
        state = self.world.catalog()
        leader = self.world.catalog_leader()
        if state is None or leader is None or leader[1].group is None:
            return True
        catalog = leader[1].group.replica
        old = state.nodes.get(name)
        if old is not None and old.catalog_replica in catalog.configuration.voters:
            return True
        return any(not self.is_settled(record, name) for record in state.partitions.values())

    def is_settled(self, record: PartitionRecord, name: str) -> bool:
        """Whether a partition's group has left a node, and every replica of it knows that durably."""
        if record.leaving or any(each.node == name for each in record.replicas):
            return False
        led = next((each for each in _group(self.world, record.group) if each.core.is_leader), None)
        # Until the configuration is synced, a loss of power of all may bring the old one back.
        return (
            led is not None
            and set(led.configuration.voters) == {each.replica_id for each in record.replicas}
            and all(
                each.log.synced_index >= led.core._log.configurations.index
                for each in _group(self.world, record.group)
            )
        )

    # -- moves that are asked for ------------------------------------------------------------

    def move(self) -> None:
        """Ask the catalog's leader for another place of some partition: a pin to other nodes, or none."""
        leader = self.world.catalog_leader()
        if leader is None:
            return
        machine, controller = leader
        assert controller.group is not None
        steps = [
            PinPartition(key, record.version, pin)
            for key, record in controller.state().partitions.items()
            if record.state == "live"
            for replica in record.replicas
            for other in self.world.up
            if other.name in controller.state().nodes
            and other.name not in [each.node for each in record.replicas]
            for pin in (_pin(record, replica.node, other.name), None)
            if pin != record.pin
        ]
        if steps:
            step = self.rng.choice(steps)
            life = next(running.life for running in machine.running.values() if running.process is controller)
            self.world.loop.start(life, self._ask(controller.group.catalog, step))

    async def _ask(self, catalog: Any, step: PinPartition) -> None:
        try:
            result = await catalog.change_placement(step)
        except (NotCatalogLeader, NotEnabled, OutcomeUnknown):
            return
        self.asked += result.ok


def _pin(record: PartitionRecord, former: str, node: str) -> Pin:
    """A pin to the nodes that hold the partition, with `node` in place of `former`."""
    nodes = [node if each.node == former else each.node for each in record.replicas]
    return Pin(nodes, "operator", "a test")


def _replicas(process: Process) -> list[Replica]:
    return list(process.driver.replicas.values())


def _group(world: World, group: bytes) -> list[Replica]:
    """All running replicas of a group."""
    return [
        replica
        for machine in world.up
        for running in machine.running.values()
        for replica in _replicas(running.process)
        if replica.group == group
    ]
