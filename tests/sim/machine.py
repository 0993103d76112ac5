"""A host with a disk and clocks; while its node runs it has a life for each process.

Starting one does what the supervisor does (recovery, then the controller and the shards); killing it, cutting
its power or pausing it does what happens to real processes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from laminar.log.disk.document import Document
from laminar.log.disk.errors import DiskError
from laminar.log.format.manifest import ReplicaEntry
from laminar.log.recovery.node import (
    LAYOUT_DOCUMENT,
    ShardLayout,
    controller_store,
    logs_directory,
    recover_node,
    shard_store,
)
from laminar.node.assembly import make_process
from laminar.node.catalog.controller import Controller
from laminar.node.host.fork import Unrecoverable
from laminar.node.host.settings import OPEN, Settings
from laminar.node.runtime.boot import CONTROLLER, Addresses, Boot, Role, node_roles, role_name, role_number
from laminar.node.runtime.data_folder import open_data_folder
from laminar.node.runtime.process import Process
from laminar.node.shard.shard import Shard
from laminar.node.transport.transport import TcpAddress
from router import owner_shard
from tests.disks.fault_disk import FaultDisk
from tests.sim.environment import SIZES, SimBoot, SimEnvironment, SimGossip
from tests.sim.loop import Life

if TYPE_CHECKING:
    from tests.sim.world import World


DATA = "data"
# How often every shard asks whether its work lists lack anything: much more often than in life.
WORK_CHECK_S = 1.0


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
        self.unrecoverable = ""
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
        self.unrecoverable = ""
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
                access=OPEN,
                election_timeout_ms=world.options.election_timeout_ms,
                heartbeat_ms=world.options.heartbeat_ms,
                **({"default_replicas": min(3, world.options.nodes)} | world.options.node_settings),
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
                gossip_host=self.node,
                http_port=80,
                shard_http_ports=tuple(range(81, 81 + self.shards)),
                peer_ports=tuple(range(1, 2 + self.shards)),
                gossip_port=9,
            ),
            board=world.board,
            lifeline=nobody,
            report_fd=-1,
            founding=identity.founding,
            epoch=identity.epoch,
            record_cluster=self._folder.record_cluster,
            boot_history=identity.boot_history,
            record_boot_history=self._folder.record_boot_history,
            has_peers=identity.has_peers,
            record_has_peers=self._folder.record_has_peers,
            folder_version=identity.format_version,
            record_folder_version=self._folder.record_format_version,
            environment=SimEnvironment(self, life),
        )
        world.loop.start(life, self._live(boot, role, life))

    async def _live(self, boot: Boot, role: Role, life: Life) -> None:
        if role == CONTROLLER:
            home = controller_store(DATA)
        else:
            payload = Document(self.disk, DATA, LAYOUT_DOCUMENT).read()
            assert payload is not None, "no shard layout"
            home = shard_store(DATA, msgspec.msgpack.decode(payload, type=ShardLayout), role_number(role) - 1)
        try:
            storage = boot.environment.storage(
                home, logs_directory(DATA), settings=SIZES, forget=role != CONTROLLER
            )
        except DiskError as error:
            # As the child itself, while the disk is full.
            self.world.note(f"{life.name} cannot recover: {error}")
            self.running.pop(role, None)
            self.world.loop.call_in(None, 1.0, self._recover_again, role, life)
            return
        process = make_process(boot, storage)
        self.running[role] = Running(role, life, process)
        process.driver._on_stopped = partial(self._replica_stopped, life)
        if isinstance(process, Shard):
            process.work.on_missed = partial(self._work_missed, life)
            process.every(WORK_CHECK_S, process.work.check_all)
        self.world.watch(self, process)
        try:
            await process.run()
        except Exception as error:  # noqa: BLE001  # what ends a process is told to the world
            process.fatal(error)
        if isinstance(process.failure, Unrecoverable) and self.up:
            # As the supervisor: the node ends, and whoever looks after the machine must do something.
            self.world.note(f"{life.name} is unrecoverable: {process.failure}")
            self.unrecoverable = str(process.failure)
            self._end(silently=False)
            self.disk.kill()
            self.world.gave_up(self)
        elif process.failure is not None and self.up:
            # As the supervisor: the rest of the process is gone, another one follows.
            self.world.ending(self)
            self.world.note(f"{life.name} failed: {process.failure!r}")
            self.world.process_failed(self, process.failure)
            life.alive = False
            transport: Any = process.transport
            self.world.wires.gone(transport, silently=False)
            self.disk.locked.discard(f"{home}/lock")
            self.world.loop.call_in(None, 0.5, self._run_again, role, life)

    def _replica_stopped(self, life: Life, name: str, error: Exception) -> None:
        """A rule was broken in one group: in life the others go on, here the world is told."""
        self.world.note(f"{life.name}: {name} stopped: {error!r}")
        self.world.process_failed(self, error)

    def _work_missed(self, life: Life, what: str) -> None:
        """A shard did not know of its work: in life it is found after a while, here the world is told."""
        self.world.note(f"{life.name}: {what}")
        self.world.missed.append(f"{life.name}: {what}")
        self.world.process_failed(self, AssertionError(f"{life.name}: {what}"))

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
        self.world.ending(self)
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
        self.world.forgetting(self)
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
        self.world.forgetting(self)
        self._newest, self.disk = self.disk, picture.copy()
        # The machine is the same, and was not started anew: no mark tells of a loss.
        self.disk.boots = self._newest.boots

    def put_back_newest(self) -> None:
        """Its disk is again what it was before `put_back`."""
        assert not self.up and self._newest is not None, f"{self} runs, or was never put back"
        self.world.note(f"put back the newest of {self.node}")
        self.world.forgetting(self)
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
                replica.core.recovering
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


def _peer(node: str, role: Role) -> Any:
    return TcpAddress(node, 1 + role_number(role))


def _nothing() -> Any:
    return object()
