"""The rules of placement, looked at from outside: each change of the catalog, and each change of a group.

What a `PlacementRules` knows of the nodes is the truth of the world: since when each one has answered, or not
answered, its neighbours. The catalog's leader sees that late, so the limits here are wider than its own.
"""

from __future__ import annotations

from collections import Counter

from laminar.node.placement.wanted import Wanted, wanted_number
from membership.records import CatalogState, PartitionRecord
from membership.replica_rules import MOST_LEAVING
from raft.configuration import Configuration
from raft.quorum import majority
from tests.node.placement.at_once import choose
from tests.sim.machine import Machine
from tests.sim.world import World

SAMPLE_S = 0.25

# A node of which its leader may still believe that it is there: gossip says so after 3.5 s at most, an ended
# connection after 5 s, and a step that was decided takes its time until it is committed.
BELIEVED_S = 20.0

# So many times of an election a leader still counts on an answer when it changes its group.
LATELY = 2.0


class PlacementRules:
    """The rules of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.steps: Counter[str] = Counter()
        self._version = 0
        # By host: since when it has answered, or has not, in simulated seconds.
        self._answering_since_s: dict[str, float] = {}
        self._silent_since_s: dict[str, float] = {}
        self._sample()

    # -- who answers -------------------------------------------------------------------------

    def _sample(self) -> None:
        now_s = self.world.loop.time()
        for machine in self.world.machines.values():
            if self._answers(machine):
                self._answering_since_s.setdefault(machine.node, now_s)
                self._silent_since_s.pop(machine.node, None)
            else:
                self._silent_since_s.setdefault(machine.node, now_s)
                self._answering_since_s.pop(machine.node, None)
        self.world.loop.call_in(None, SAMPLE_S, self._sample)

    def _answers(self, machine: Machine) -> bool:
        """Whether a node runs, and hears and is heard by all others that run."""
        wires, others = self.world.wires, self.world.up
        return (
            machine.up
            and machine.controller is not None
            and len(machine.shard_processes) == machine.shards
            and not any(running.life.paused for running in machine.running.values())
            and all(
                wires.passes(machine.node, other.node) and wires.passes(other.node, machine.node)
                for other in others
            )
        )

    def _machine(self, name: str) -> Machine | None:
        return next((each for each in self.world.machines.values() if each.name == name), None)

    def _silent_s(self, host: str) -> float:
        """For how long a host has not answered."""
        since_s = self._silent_since_s.get(host)
        return 0.0 if since_s is None else self.world.loop.time() - since_s

    # -- the catalog -------------------------------------------------------------------------

    def catalog_changed(self, before: CatalogState, after: CatalogState) -> None:
        """Check one change of the catalog, at the first node that makes it."""
        if after.version <= self._version or not self._version:
            self._version = max(self._version, after.version)
            return
        self._version = after.version
        if before.partitions is after.partitions:
            return
        for key, record in after.partitions.items():
            former = before.partitions.get(key)
            if former is not None and former is not record and former.group == record.group:
                self._partition_changed(before, key, former, record)

    def _partition_changed(
        self, state: CatalogState, key: str, former: PartitionRecord, record: PartitionRecord
    ) -> None:
        known = {each.replica_id for each in former.replicas}
        new = [each for each in record.replicas if each.replica_id not in known]
        left = [each for each in record.leaving if each not in former.leaving]
        if not new and not left:
            return
        what = f"{key}: {record.why!r}: {former.replicas} become {record.replicas}"
        nodes = [each.node for each in record.replicas]
        assert len(set(nodes)) == len(nodes), f"a node holds two replicas: {what}"
        repairs = bool(left) and all(each.why != "moved" for each in left)
        assert repairs or not former.leaving, f"two steps at once: {what}, while {former.leaving} leave"
        assert len(record.leaving) <= MOST_LEAVING, f"more than a step and a repair: {what}"
        went = {each.replica.replica_id: each for each in left}
        stay = [each for each in former.replicas if each.replica_id not in went]
        # A replica that was never made has no vote, so its place may be given away beside others like it.
        never_made = bool(left) and not any(each.replica.made for each in left)
        assert never_made or all(each.made for each in stay), f"two steps at once: {what}"
        for each in new:
            assert not state.nodes[each.node].draining, f"a draining node gets a replica: {what}"
        if not new:
            fewest = wanted_number(state, former)
            assert len(record.replicas) >= fewest, f"fewer than the {fewest} that are wanted: {what}"
        for gone in left:
            self.steps[gone.why if new else "shrunk"] += 1
            if gone.why == "dead":
                self._is_dead(gone.replica.node, what)
            if gone.why == "moved":
                for other in stay:
                    self._is_there(other.node, what)
        if new and not left:
            self.steps["grown"] += 1

    def _is_dead(self, name: str, what: str) -> None:
        """A node that has answered all the time since it could be thought dead is not dead."""
        machine = self._machine(name)
        since_s = self._answering_since_s.get(machine.node) if machine is not None else None
        if since_s is not None:
            answered_s = self.world.loop.time() - since_s
            assert answered_s < BELIEVED_S, f"{name} has answered for {answered_s:.1f} s: {what}"

    def _is_there(self, name: str, what: str) -> None:
        machine = self._machine(name)
        if machine is not None and self._answers(machine):
            return  # it came back since the last sample
        silent_s = self._silent_s(machine.node) if machine is not None else BELIEVED_S + 1
        assert silent_s < BELIEVED_S, f"{name} has been silent for {silent_s:.1f} s: {what}"

    # -- the groups --------------------------------------------------------------------------

    def configuration_changed(
        self, who: str, after: Configuration, homes: dict[int, tuple[str, int]]
    ) -> None:
        """Check one change that a leader begins: of the voters that it leads to a majority is there."""
        lately_s = LATELY * self.world.options.election_timeout_ms / 1000 + 5 * SAMPLE_S
        silent = [
            voter
            for voter in after.voters
            if voter in homes and not self._runs(*homes[voter]) and self._silent_s(homes[voter][0]) > lately_s
        ]
        there = len(after.voters) - len(silent)
        assert there >= majority(len(after.voters)), (
            f"{who}: to voters {sorted(after.voters)}, of which {silent} have been down for {lately_s:.1f} s"
        )

    def _runs(self, host: str, folder: int) -> bool:
        machine = self.world.machines[host]
        return machine.up and machine.folder == folder

    # -- the end -----------------------------------------------------------------------------

    def out_of_place(self) -> list[str]:
        """What is not where the catalog wants it, and what draining nodes still have, as text."""
        state = self.world.catalog()
        if state is None:
            return ["the catalog has no leader"]
        names = {machine.name for machine in self.world.machines.values()}
        wanted = Wanted(state, unfit=state.nodes.keys() - names)
        wrong = []
        for key, record in state.partitions.items():
            nodes = wanted.nodes(record)
            held = {each.node for each in record.replicas}
            if held != set(nodes) or record.leaving or not all(each.made for each in record.replicas):
                wrong.append(f"{key}: on {sorted(held)}, wanted {sorted(nodes)}, leaving {record.leaving}")
        draining = {name for name, node in state.nodes.items() if node.draining}
        for machine in self.world.up:
            if machine.name not in draining:
                continue
            for shard in machine.shard_processes:
                wrong += [f"{machine.name} drains and holds {each}" for each in shard.partitions]
            if machine.controller is not None and machine.controller.group is not None:
                replica = machine.controller.group.replica
                if replica.replica_id in replica.configuration.voters:
                    wrong.append(f"{machine.name} drains and votes on the catalog")
        return wrong

    def led_elsewhere(self) -> list[str]:
        """Which partitions others than their preferred leaders lead, and whose choice is not even, as text.

        All is calm then: each is handed back, and no choice could be better.
        """
        state = self.world.catalog()
        if state is None:
            return ["the catalog has no leader"]
        names = {machine.name for machine in self.world.machines.values()}
        better = choose(state, unfit=state.nodes.keys() - names)
        wrong = [f"{key}: {node} would be the better choice" for key, node in better.items()]
        leaders = {
            f"{topic}/{number}": machine.name
            for machine in self.world.up
            for shard in machine.shard_processes
            for (topic, number), partition in shard.partitions.items()
            if partition.leads
        }
        for key, record in state.partitions.items():
            leader = leaders.get(key, "no node")
            if leader != record.preferred_leader:
                wrong.append(f"{key}: {leader} leads, {record.preferred_leader!r} is preferred")
        return wrong
