"""A cluster in one thread: real controllers and shards on simulated machines, and what all of them share.

What is simulated is time (`loop.py`), chance, disks, wires (`network.py`), gossip (`environment.py`) and the
supervisor (`machine.py`), and nothing else.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from laminar.node.catalog.controller import Controller
from laminar.node.runtime.boot import StatusBoard
from laminar.node.runtime.process import Process
from membership.records import (
    CatalogState,
)
from tests.sim.environment import SimGossip
from tests.sim.loop import SimLoop
from tests.sim.machine import Machine
from tests.sim.network import Wires


@dataclass(slots=True)
class Options:
    """What a seed's world is like; printed with a failure."""

    seed: int
    nodes: int = 3
    shards: int = 1
    partitions: int = 2
    replicas: int = 3
    clients: int = 2
    # Of one sink, all at a time.
    drivers: int = 2
    # Those of which each batch has a sink of its own. None by default: a seed's history would be another.
    once: int = 0
    # Who append records larger than a batch. None by default, as before.
    uploaders: int = 0
    client_pause_s: float = 0.5
    fault_pause_s: float = 10.0
    # The last so many nodes have not joined when the trouble begins.
    late: int = 0
    trouble_s: float = 120.0
    # Between two wishes that partitions split, merge or move (`routes.py`); 0: there are none.
    route_pause_s: float = 0.0
    # Between two wishes that a partition that has ended is reclaimed (`reclaimers.py`); 0: there are none.
    reclaim_pause_s: float = 0.0
    # Between two deeds of a person with the topic's channels (`channels.py`); 0: there are none.
    channel_pause_s: float = 0.0
    # Who acknowledge jobs of these channels with batches of sinks (`pinners.py`).
    pinners: int = 0
    # Between two deeds of administrators; 0: there are none.
    admin_pause_s: float = 0.0
    # Whether these go down to one replica.
    thin: bool = False
    # A write or sync takes up to so long.
    disk_s: float = 0.001
    election_timeout_ms: int = 1500
    heartbeat_ms: int = 200
    # Further settings of every node, and those of the topic.
    node_settings: dict[str, Any] = field(default_factory=dict)
    topic_settings: dict[str, int | str] = field(default_factory=dict)

    @property
    def is_interval(self) -> bool:
        """Whether appends are acknowledged before they are synced."""
        return self.topic_settings.get("flush") == "interval"


def _term(controller: Controller) -> int:
    return controller.group.replica.core.term if controller.group is not None else 0


class World:
    """All machines, and what everybody in them shares: time, chance, wires."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rng = random.Random(options.seed)
        self.loop = SimLoop()  # type: ignore[abstract]  # sockets and signals: nobody has any here
        self.wires = Wires(self.loop, random.Random(self.rng.getrandbits(64)))
        self.board = StatusBoard(8)
        self._digest = hashlib.sha256()
        self.trace: list[str] | None = None
        self.events = 0
        names = [chr(ord("a") + number) for number in range(options.nodes)]
        self.machines = {
            node: Machine(self, node, shards=options.shards, join=tuple(names[:1]) if place else ())
            for place, node in enumerate(names)
        }
        # Told of a node that ends as it cannot go on; it does not come back by itself.
        self.gave_up: Callable[[Machine], None] = lambda machine: None
        # Told of each process as it begins, and of each that failed by itself.
        self.watch: Callable[[Machine, Process], None] = lambda machine, process: None
        self.process_failed: Callable[[Machine, BaseException], None] = lambda machine, error: None
        # What was missing on the work lists of shards.
        self.missed: list[str] = []
        # Told before so many machines lose power that what was not synced may be gone for good.
        self.losing: Callable[[], None] = lambda: None
        # Told of a machine of which processes are about to end, and of one whose disk is another one now, or
        # has lost what was synced.
        self.ending: Callable[[Machine], None] = lambda machine: None
        self.forgetting: Callable[[Machine], None] = lambda machine: None

    def note(self, text: str) -> None:
        """One line of the trace, which is the same for the same seed."""
        line = f"{self.loop.time():.6f} {text}\n"
        self.events += 1
        self._digest.update(line.encode())
        if self.trace is not None:
            self.trace.append(line)

    @property
    def digest(self) -> str:
        """SHA-256 of the trace so far."""
        return self._digest.hexdigest()

    @property
    def up(self) -> list[Machine]:
        """Machines whose node runs."""
        return [machine for machine in self.machines.values() if machine.up]

    def all_known(self) -> bool:
        """Whether every running node's copy of the catalog names every node that was ever started."""
        started = sum(bool(machine.starts) for machine in self.machines.values())
        return all(
            machine.controller is not None and len(machine.controller.state().nodes) == started
            for machine in self.up
        )

    def all_remember(self, machine: Machine) -> bool:
        """Whether every node runs, and has it on its disk which start of this machine's node is the last."""
        own = machine.controller
        others = [each.controller for each in self.machines.values()]
        return own is not None and all(
            controller is not None and controller.remembers(machine.name, own.boot.boot_history[-1])
            for controller in others
        )

    def catalog_leader(self) -> tuple[Machine, Controller] | None:
        """Who leads group 0 and has applied all that is committed; of two the one of the later term."""
        found = [
            (machine, machine.controller)
            for machine in self.up
            if machine.controller is not None
            and machine.controller.group is not None
            and machine.controller.group.replica.core.is_leader
            and machine.controller.group.applied_index == machine.controller.group.committed_index
        ]
        return max(found, key=lambda each: _term(each[1]), default=None)

    def catalog(self) -> CatalogState | None:
        """What is where, by the word of the catalog's leader; None while there is none."""
        leader = self.catalog_leader()
        return leader[1].state() if leader is not None else None

    def gossip_changed(self, *, at_once: bool = False) -> None:
        """Let news of who is alive go round: soon, and not everywhere at the same time."""
        for machine in self.machines.values():
            gossip = machine.gossip
            if gossip is None:
                continue
            for other in self.machines.values():
                delay_s = 0.01 if at_once else 0.5 + 3.0 * self.rng.random()
                self.loop.call_in(gossip.life, delay_s, self._hear, machine, gossip, other)

    def _hear(self, machine: Machine, gossip: SimGossip, other: Machine) -> None:
        if machine.gossip is gossip:
            passes = self.wires.passes(machine.node, other.node) and self.wires.passes(
                other.node, machine.node
            )
            gossip.believe(other.name, other.up and other.gossip is not None and passes)

    def cut(self, pairs: Sequence[tuple[str, str]]) -> None:
        """From now on nothing passes from the first to the second of each pair."""
        self.note(f"cut {sorted(pairs)}")
        self.wires.cuts = set(pairs)
        self.gossip_changed()

    def close(self) -> None:
        self.loop.close()
        assert not self.missed, self.missed
