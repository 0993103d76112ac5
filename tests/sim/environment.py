"""What a process of a simulated machine is given for the real thing: clocks, a disk's thread, gossip."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from laminar.log.format.settings import StorageSettings
from laminar.log.storage import Storage
from laminar.node.host.clock import Clock
from laminar.node.runtime.boot import Boot
from laminar.node.runtime.environment import Environment
from laminar.node.transport.transport import Address, TcpAddress
from raft.values import Trace
from tests.log.histories import InlineExecutor
from tests.sim.loop import Life
from tests.sim.network import SimTransport

if TYPE_CHECKING:
    from tests.sim.machine import Machine

EPOCH_MS = 1_700_000_000_000
SIZES = StorageSettings(
    first_journal_file_bytes=64 << 10,
    journal_file_bytes=128 << 10,
    checkpoint_bytes=96 << 10,
    segment_size_bytes=16 << 10,
    recent_bytes=32 << 10,
)


class SimClock(Clock):
    """A machine's clocks: one steady (give or take its drift), one that may be stepped."""

    __slots__ = ("_loop", "_machine")

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._loop = machine.world.loop

    def monotonic_ms(self) -> int:
        machine = self._machine
        return int(self._loop.time() * 1000 * machine.drift) + machine.uptime_ms

    def wall_ms(self) -> int:
        return EPOCH_MS + self.monotonic_ms() + self._machine.wall_offset_ms


class SimWorker:
    """A disk's thread: each task takes its time, and none is begun when its process is dead."""

    def __init__(self, machine: Machine, life: Life) -> None:
        self._machine = machine
        self._life = life
        self._free_at_s = 0.0

    def submit(self, task: Callable[[], None]) -> None:
        loop = self._machine.world.loop
        self._free_at_s = max(self._free_at_s, loop.time()) + self._machine.disk_takes_s()
        loop.call_in(self._life, self._free_at_s - loop.time(), task)

    def close(self) -> None:
        return None


@dataclass(slots=True)
class Member:
    """What gossip says of a node."""

    status: str
    info: dict[str, Any]


class SimGossip:
    """Who seems alive: the truth, late."""

    def __init__(self, machine: Machine, life: Life, info: dict[str, Any]) -> None:
        self._machine = machine
        self.life = life
        self.info = info
        self.on_change: Callable[[Any], None] = lambda member: None
        self._believed: dict[str, bool] = {}

    def start(self, seeds: Sequence[str]) -> None:
        self._machine.gossip = self
        self._machine.world.gossip_changed(at_once=True)

    def set_seeds(self, seeds: Sequence[str]) -> None:
        """Everybody hears of everybody."""

    def believe(self, node: str, alive: bool) -> None:
        """News of a node has come round."""
        if self._believed.get(node) != alive:
            self._believed[node] = alive
            self.on_change(None)

    def members(self) -> dict[str, Member]:
        # Of a name that its machine no longer goes by nothing is heard any more.
        return {
            machine.name: Member("alive" if self._believed[machine.name] else "dead", machine.gossip.info)
            for machine in self._machine.world.machines.values()
            if machine.name in self._believed and machine.gossip is not None
        }

    async def close(self) -> None:
        self._machine.gossip = None


class SimEnvironment(Environment):
    """What one process of a simulated machine is given."""

    # A world has few groups: so they wait for one another too.
    elections_at_once = 1
    # And little is written: two or three batches are enough to stop reading.
    receive_budget_bytes = 1_000

    def __init__(self, machine: Machine, life: Life) -> None:
        self._machine = machine
        self._life = life
        self.disk = machine.disk

    def clock(self) -> Clock:
        return SimClock(self._machine)

    def rng(self) -> random.Random:
        return random.Random(self._machine.world.rng.getrandbits(64))

    def storage(
        self, store: str, logs_directory: str, *, settings: StorageSettings, forget: bool = False
    ) -> Storage:
        return Storage.open(
            self._machine.disk,
            store,
            logs_directory,
            settings=SIZES,
            rng=self.rng(),
            workers=lambda name: SimWorker(self._machine, self._life),
            readers=InlineExecutor(),
            forget=forget,
        )

    async def read_bytes(self, path: str, position: int, size: int) -> bytes:
        machine = self._machine
        await asyncio.sleep(machine.disk_takes_s())
        return bytes(machine.disk.open(path).pread(size, position))

    def transport(self, **arguments: Any) -> Any:
        return SimTransport(
            self._machine.world.wires,
            host=self._machine.node,
            node=arguments["node"],
            role=arguments["role"],
            nonce=arguments["nonce"],
            history=arguments["history"],
            store_id=arguments["store_id"],
        )

    def gossip(self, **arguments: Any) -> Any:
        return SimGossip(self._machine, self._life, arguments["info"])

    async def find_cluster(
        self, joins: Sequence[str], *, secrets: object, certificates: object = None
    ) -> bytes | None:
        return None  # a folder of another cluster is met over real connections

    async def find_controllers(
        self,
        joins: Sequence[str],
        *,
        secrets: object,
        certificates: object = None,
        tell: Callable[[str], None] = lambda reason: None,
    ) -> list[Address]:
        wires = self._machine.world.wires
        addresses: list[Address] = [TcpAddress(node, 1) for node in joins]
        return [
            each
            for each in addresses
            if each in wires.listening
            and wires.passes(self._machine.node, wires.listening[each].node)
            and wires.passes(wires.listening[each].node, self._machine.node)
        ]

    def trace(self, name: str) -> Trace | None:
        world = self._machine.world

        def note(event: str, details: Mapping[str, object]) -> None:
            world.note(f"{name}@{self._machine.node} {event} {dict(details)}")

        return note


class SimBoot(Boot):
    """A `Boot` whose supervisor is this module."""

    def ready(self) -> None:
        """Nobody waits for it."""
