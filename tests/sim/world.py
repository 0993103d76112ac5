"""A cluster in one thread: real controllers and shards on simulated machines.

A `Machine` is a host with a disk and clocks; while its node runs it has a life for each process. Starting one
does what the supervisor does (recovery, then the controller and the shards); killing it, cutting its power or
pausing it does what happens to real processes. What is simulated is listed here and nowhere else: time,
chance, disks, wires, gossip and the supervisor.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from laminar.log.document import Document
from laminar.log.errors import DiskError
from laminar.log.manifest import ReplicaEntry
from laminar.log.node_recovery import Map, controller_home, logs_directory, recover_node, shard_home
from laminar.log.settings import StorageSettings
from laminar.log.storage import Storage
from laminar.node.boot import (
    CONTROLLER,
    Addresses,
    Boot,
    Role,
    StatusBoard,
    node_roles,
    role_name,
    role_number,
)
from laminar.node.clock import Clock
from laminar.node.controller import Controller
from laminar.node.environment import Environment
from laminar.node.forking import Hopeless
from laminar.node.identity import open_data_folder
from laminar.node.process import Process
from laminar.node.settings import Settings
from laminar.node.shard import Shard
from laminar.node.transport import Address, TcpAddress
from membership.records import CatalogState
from raft.values import Trace
from router import owner_shard
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import InlineExecutor
from tests.sim.loop import Life, SimLoop
from tests.sim.network import SimTransport, Wires

DATA = "data"
EPOCH_MS = 1_700_000_000_000
SIZES = StorageSettings(
    first_journal_file_bytes=64 << 10,
    journal_file_bytes=128 << 10,
    checkpoint_bytes=96 << 10,
    segment_size_bytes=16 << 10,
    recent_bytes=32 << 10,
)


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
    # Who append records larger than a batch. None by default: a seed's history would be another.
    uploaders: int = 0
    client_pause_s: float = 0.5
    fault_pause_s: float = 10.0
    # The last so many nodes have not joined when the trouble begins.
    late: int = 0
    trouble_s: float = 120.0
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

    def __init__(self, machine: Machine, life: Life) -> None:
        self._machine = machine
        self._life = life
        self.disk = machine.disk

    def clock(self) -> Clock:
        return SimClock(self._machine)

    def rng(self) -> random.Random:
        return random.Random(self._machine.world.rng.getrandbits(64))

    def storage(self, home: str, logs_directory: str, *, settings: StorageSettings) -> Storage:
        return Storage.open(
            self._machine.disk,
            home,
            logs_directory,
            settings=SIZES,
            rng=self.rng(),
            workers=lambda name: SimWorker(self._machine, self._life),
            readers=InlineExecutor(),
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
            chain=arguments["chain"],
        )

    def gossip(self, **arguments: Any) -> Any:
        return SimGossip(self._machine, self._life, arguments["info"])

    async def find_controllers(self, joins: Sequence[str]) -> list[Address]:
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


@dataclass(slots=True)
class Running:
    """One process of a running node."""

    role: Role
    life: Life
    process: Process


class Machine:
    """One host of the cluster. `node` is its address for good, `name` what its node is called at present."""

    def __init__(self, world: World, node: str, *, shards: int, join: tuple[str, ...]) -> None:
        self.world = world
        self.node = node
        self.name = node
        # Which of its data folders this is.
        self.folder = 1
        self.shards = shards
        self.join = join
        self.disk = FaultDisk()
        # Copies of documents that have rotted: the other copy of each does not.
        self.rotten: set[str] = set()
        self.running: dict[Role, Running] = {}
        self.up = False
        self.uptime_ms = 0
        self.wall_offset_ms = 0
        self.drift = 1.0
        self.slow_disk_s = 0.0
        self.gossip: SimGossip | None = None
        self.starts = 0
        # Why the node ended for good, if it did since its last start.
        self.hopeless = ""
        # What was on its disk when an older copy was put back.
        self._newest: FaultDisk | None = None

    def __repr__(self) -> str:
        return f"<Machine {self.node} {'up' if self.up else 'down'}>"

    def disk_takes_s(self) -> float:
        """One write or sync."""
        return self.world.rng.random() * (self.world.options.disk_s + self.slow_disk_s)

    # -- as the supervisor -----------------------------------------------------------------

    def start(self) -> None:
        """Recover the disk, then run the controller and the shards."""
        assert not self.up, f"{self} runs"
        world = self.world
        world.note(f"start {self.node} shards={self.shards}")
        self.up = True
        self.starts += 1
        self.hopeless = ""
        self.uptime_ms = world.rng.randrange(1 << 20)
        try:
            self._recover()
        except DiskError as error:
            # The disk is full: the start fails, and whoever looks after the machine tries again.
            world.note(f"start {self.node} fails: {error}")
            self.up = False
            self.disk.kill()
            world.loop.call_in(None, 2.0, lambda: None if self.up else self.start())
            return
        for role in node_roles(self.shards):
            self._run(role)
        world.gossip_changed()

    def _recover(self) -> None:
        """What the supervisor does before there is any child."""
        world = self.world
        folder = open_data_folder(
            self.disk,
            DATA,
            node=self.name,
            joining=bool(self.join),
            random_bytes=world.rng.randbytes,
        )
        recover_node(
            self.disk,
            DATA,
            shards=self.shards,
            shard_of=_owner,
            settings=SIZES,
            rng=random.Random(world.rng.getrandbits(64)),
        )
        self._folder = folder

    def _run(self, role: Role) -> None:
        world = self.world
        life = Life(f"{self.node}/{role_name(role)}#{self.starts}")
        identity = self._folder.read_identity()
        nobody: Any = None
        boot = SimBoot(
            settings=Settings(
                data=DATA,
                node=self.name,
                join=self.join,
                shards=self.shards,
                election_timeout_ms=world.options.election_timeout_ms,
                heartbeat_ms=world.options.heartbeat_ms,
                **world.options.node_settings,
            ),
            data_directory=DATA,
            cluster_id=identity.cluster_id or None,
            store_id=identity.store_id,
            node=self.name,
            role=role,
            shards=self.shards,
            nonce=world.rng.randbytes(16),
            http_shared=None,
            http_own=None,
            peer=_peer(self.node, role),
            gossip=_nothing(),
            addresses=Addresses(
                host=self.node,
                http_port=80,
                shard_http_ports=tuple(range(81, 81 + self.shards)),
                peer_ports=tuple(range(1, 2 + self.shards)),
                gossip_port=9,
            ),
            board=world.board,
            lifeline=nobody,
            ready_fd=-1,
            founding=identity.founding,
            record_cluster=self._folder.record_cluster,
            lives=identity.lives,
            record_lives=self._folder.record_lives,
            company=identity.company,
            record_company=self._folder.record_company,
            environment=SimEnvironment(self, life),
        )
        world.loop.start(life, self._live(boot, role, life))

    async def _live(self, boot: Boot, role: Role, life: Life) -> None:
        if role == CONTROLLER:
            home = controller_home(DATA)
        else:
            payload = Document(self.disk, DATA, "map").read()
            assert payload is not None, "no map of shards"
            home = shard_home(DATA, msgspec.msgpack.decode(payload, type=Map), role_number(role) - 1)
        try:
            storage = boot.environment.storage(home, logs_directory(DATA), settings=SIZES)
        except DiskError as error:
            # As the child itself, while the disk is full.
            self.world.note(f"{life.name} cannot recover: {error}")
            self.running.pop(role, None)
            self.world.loop.call_in(None, 1.0, self._recover_again, role, life)
            return
        process: Process = (
            Controller(boot, storage=storage) if role == CONTROLLER else Shard(boot, storage=storage)
        )
        self.running[role] = Running(role, life, process)
        self.world.watch(self, process)
        try:
            await process.run()
        except Exception as error:  # noqa: BLE001  # what ends a process is told to the world
            process.fatal(error)
        if isinstance(process.failure, Hopeless) and self.up:
            # As the supervisor: the node ends, and whoever looks after the machine must do something.
            self.world.note(f"{life.name} is hopeless: {process.failure}")
            self.hopeless = str(process.failure)
            self._end(silently=False)
            self.disk.kill()
            self.world.gave_up(self)
        elif process.failure is not None and self.up:
            # As the supervisor: the rest of the process is gone, another one follows.
            self.world.note(f"{life.name} failed: {process.failure!r}")
            self.world.process_failed(self, process.failure)
            life.alive = False
            transport: Any = process.transport
            self.world.wires.gone(transport, silently=False)
            self.disk.locked.discard(f"{home}/lock")
            self.world.loop.call_in(None, 0.5, self._run_again, role, life)

    def _recover_again(self, role: Role, life: Life) -> None:
        if self.up and life.alive:
            life.alive = False
            self._run(role)

    def _run_again(self, role: Role, life: Life) -> None:
        if self.up and self.running[role].life is life:
            self._run(role)

    # -- what happens to it ----------------------------------------------------------------

    def _end(self, *, silently: bool) -> None:
        assert self.up, f"{self} is down"
        self.up = False
        for running in self.running.values():
            running.life.alive = False
            transport: Any = running.process.transport
            self.world.wires.gone(transport, silently=silently)
        self.running = {}
        self.gossip = None
        self.world.gossip_changed()

    def kill(self) -> None:
        """kill -9 of all its processes: the page cache stays."""
        self.world.note(f"kill {self.node}")
        self._end(silently=False)
        self.disk.kill()

    def cut_power(self, *, keep: float) -> None:
        """What was not synced is there in parts, or not at all; nobody's connections are closed."""
        self.world.note(f"power {self.node} keep={keep}")
        self._end(silently=True)
        self.disk.crash(self.world.rng, keep)

    def pause(self) -> None:
        """SIGSTOP."""
        self.world.note(f"pause {self.node}")
        for running in self.running.values():
            running.life.paused = True

    def resume(self) -> None:
        """SIGCONT."""
        self.world.note(f"resume {self.node}")
        for running in self.running.values():
            self.world.loop.resume(running.life)

    def wipe(self, name: str, *, join: tuple[str, ...]) -> None:
        """While it is down: another disk, without anything; the next start joins as `name`."""
        assert not self.up, f"{self} runs"
        self.world.note(f"wipe {self.node} {name}")
        self.disk = FaultDisk()
        self.rotten = set()
        self.folder += 1
        self.name, self.join = name, join

    def lose_power(self, *, keep: float) -> None:
        """Also of a host on which nothing runs: what its last processes wrote may be gone."""
        if self.up:
            self.cut_power(keep=keep)
        else:
            self.world.note(f"power {self.node} keep={keep}")
            self.disk.crash(self.world.rng, keep)

    def picture(self) -> FaultDisk:
        """What lies on its disk now, as a backup that is taken at one instant."""
        return self.disk.copy()

    def put_back(self, picture: FaultDisk) -> None:
        """Its disk becomes what it was. Of a machine whose node is down."""
        assert not self.up, f"{self} runs"
        self.world.note(f"put back {self.node}")
        self._newest, self.disk = self.disk, picture.copy()
        # The machine is the same, and was not started anew: no mark tells of a loss.
        self.disk.boots = self._newest.boots

    def put_back_newest(self) -> None:
        """Its disk is again what it was before `put_back`."""
        assert not self.up and self._newest is not None, f"{self} runs, or was never put back"
        self.world.note(f"put back the newest of {self.node}")
        self._newest.boots = self.disk.boots
        self.disk, self._newest = self._newest, None

    @property
    def is_old(self) -> bool:
        """Whether its disk is a copy that was put back."""
        return self._newest is not None

    def has_failed_logs(self) -> bool:
        """Whether a log takes no more entries before a restart."""
        return any(
            partition.log.failure is not None
            for shard in self.shard_processes
            for partition in shard.partitions.values()
        )

    def holds_all(self) -> bool:
        """Whether it runs, and none of its replicas may have forgotten what it acknowledged."""
        shards = self.shard_processes
        return (
            self.up
            and len(shards) == self.shards
            and all(shard.ready and not shard.lost for shard in shards)
            and not self.has_failed_logs()
            and not any(
                replica.core.marked
                for running in self.running.values()
                for replica in running.process.driver.replicas.values()
            )
        )

    @property
    def shard_processes(self) -> list[Shard]:
        """Its running shards."""
        return [each.process for each in self.running.values() if isinstance(each.process, Shard)]

    @property
    def controller(self) -> Controller | None:
        """Its running controller."""
        running = self.running.get(CONTROLLER)
        return running.process if running is not None and isinstance(running.process, Controller) else None


def _owner(entry: ReplicaEntry, shards: int) -> int:
    return owner_shard(entry.partition_hash, shards)


def _term(controller: Controller) -> int:
    return controller.group.replica.core.term if controller.group is not None else 0


def _peer(node: str, role: Role) -> Any:
    return TcpAddress(node, 1 + role_number(role))


def _nothing() -> Any:
    return object()


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
        # Told before so many machines lose power that what was not synced may be gone for good.
        self.losing: Callable[[], None] = lambda: None

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
            controller is not None and controller.remembers(machine.name, own.boot.lives[-1])
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
