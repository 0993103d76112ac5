"""Values passed by a supervisor to its child at the fork: settings, identity, sockets, reports.

A `Boot` is made before the fork and passed to the entry point of the controller or of a shard
(`laminar.node.entry_points`), which blocks until its work is over and returns the process's exit code. It
holds no loop and starts nothing.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

import msgspec

from laminar.node.host.certificates import Certificates
from laminar.node.host.settings import Settings
from laminar.node.runtime.environment import Environment
from laminar.node.secret.keyring import Keyring
from membership.boot_history import BootRecord

Role = int | Literal["controller"]
"""A shard's number, from 0, or the controller."""

CONTROLLER: Literal["controller"] = "controller"

ANSWERS, READY = b"a", b"r"
"""What a child reports to its supervisor, each once."""


def role_number(role: Role) -> int:
    """Return the number of a role in ports, handshakes and lists: 0 for the controller, k + 1 for shard k."""
    return 0 if isinstance(role, str) else role + 1


def role_name(role: Role) -> str:
    """Return the role's name for log lines: `controller`, `shard 0`."""
    return role if isinstance(role, str) else f"shard {role}"


def node_roles(shards: int) -> list[Role]:
    """Return the roles of all children of a node with that many shards, in the order of `role_number`."""
    return [CONTROLLER, *range(shards)]


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses of a node. `host` is the one given to other nodes, not the one that is bound."""

    host: str
    gossip_host: str
    """Numeric: gossip is sent to it."""
    http_port: int
    """The port that all shards share."""
    shard_http_ports: tuple[int, ...]
    peer_ports: tuple[int, ...]
    """By role number: the controller's first, then each shard's."""
    gossip_port: int
    """UDP."""


class ChildState(IntEnum):
    """The state of a child process of the supervisor: from its start to its end for good."""

    STARTING = 0
    READY = 1
    DEAD = 2
    """Died; will be started again."""
    GIVEN_UP = 3
    """Died too often, or can't go on: it is not started again while this supervisor runs."""


class ChildStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of one child, as the `StatusBoard` shows it; `restarts` counts since the node's start."""

    role: Role
    state: ChildState
    pid: int
    restarts: int


class StatusBoard:
    """The status of a node's children in shared memory: one page, made before the first fork.

    Only the supervisor writes. Every child can read it at any time, so any shard can answer for the whole
    node, even one that has just been restarted. (Over a pipe, all earlier changes would have to be sent
    again.)
    """

    _LINE = struct.Struct("<III")

    def __init__(self, shards: int) -> None:
        self._roles = node_roles(shards)
        self._page = mmap.mmap(-1, max(4096, len(self._roles) * self._LINE.size))

    def write(self, role: Role, *, state: ChildState, pid: int, restarts: int) -> None:
        """Set the status of a role. Supervisor only."""
        self._LINE.pack_into(self._page, role_number(role) * self._LINE.size, state, pid, restarts)

    def read(self, role: Role) -> ChildStatus:
        """Return the status of a role. While the supervisor writes it, some of its numbers may be older."""
        state, pid, restarts = self._LINE.unpack_from(self._page, role_number(role) * self._LINE.size)
        return ChildStatus(role=role, state=ChildState(state), pid=pid, restarts=restarts)

    def read_all(self) -> list[ChildStatus]:
        """Return the status of every role, the controller's first."""
        return [self.read(role) for role in self._roles]


@dataclass(slots=True, kw_only=True)
class ChildSockets:
    """The sockets of one child. The supervisor bound them, and keeps its own copies."""

    http_shared: socket.socket | None
    """This shard's socket of the shared port, on which the supervisor listens; None for the controller."""
    http_own: socket.socket | None
    """The shard's own HTTP port; None for the controller."""
    peer: socket.socket
    """TCP, for `Transport.serve_tcp`."""
    gossip: socket.socket | None
    """The controller's UDP socket for gossip; None for a shard."""
    datagrams: socket.socket | None = None
    """This shard's UDP socket of the shared port; None for the controller."""


@dataclass(slots=True, kw_only=True)
class Boot:
    """The values that a child process starts with: everything that it cannot find out by itself."""

    settings: Settings
    data_directory: str
    cluster_id: bytes | None
    """16 bytes; None while the node is joining and has no answer yet."""
    store_id: bytes
    node: str
    role: Role
    shards: int
    nonce: bytes
    """16 random bytes of this incarnation of this process."""
    http_shared: socket.socket | None
    """This shard's socket of the shared port, held until the supervisor listens on it; None for the
    controller.
    """
    http_own: socket.socket | None
    """The shard's own HTTP port, held until the shard listens on it; None for the controller."""
    peer: socket.socket
    """Listening TCP socket, for `Transport.serve_tcp`."""
    gossip: socket.socket | None
    """The controller's bound UDP socket for gossip; None for a shard."""
    addresses: Addresses
    board: StatusBoard
    lifeline: int
    """A pipe's read end: end of file on it means that the supervisor is gone, and the child must end."""
    report_fd: int
    """A pipe's write end, to the supervisor: `answers` and `ready`."""
    shared_port_fd: int = -1
    """A pipe's read end: end of file on it means that the supervisor listens on the shared port."""
    recovery_restarts: int = 0
    """How often in a row this process restarted to recover logs that had failed."""
    founding: bool = False
    """This node is making a new cluster and has not finished: only then may the controller found group 0."""
    epoch: bytes = b""
    """Names the last recovery of the cluster's catalog (`laminar.node.catalog.recovery`); empty for none."""
    record_cluster: Callable[[bytes, bytes], None] = lambda cluster_id, epoch: None
    """Writes cluster id and epoch into the folder's identity, which ends joining or founding; blocks. Use
    `join_cluster`.
    """
    boot_history: tuple[BootRecord, ...] = ()
    """The boot records of the data folder's starts (`membership.boot_history`); the last is this start's."""
    record_boot_history: Callable[[tuple[BootRecord, ...]], None] = lambda history: None
    """Writes the history into the identity; blocks. Use `keep_boot_history`."""
    has_peers: bool = False
    """Other nodes have joined this node's cluster."""
    record_has_peers: Callable[[], None] = lambda: None
    """Writes `has_peers` into the folder's identity; blocks. Use `keep_has_peers`."""
    folder_version: int = 1
    """The code version that a program must know to use the data folder."""
    record_folder_version: Callable[[int], None] = lambda version: None
    """Writes it into the identity; blocks. Use `keep_folder_version`."""
    datagrams: socket.socket | None = None
    """This shard's UDP socket of the shared port, bound; None for the controller."""
    certificates: Certificates | None = None
    """What HTTP ports and other nodes are spoken to with; None without TLS."""
    secrets: Keyring = field(default_factory=Keyring)
    """The secrets that the nodes of the cluster share; none where it has no secret."""
    environment: Environment = field(default_factory=Environment)

    @property
    def role_number(self) -> int:
        """This child's role as a number: 0 for the controller, k + 1 for shard k."""
        return role_number(self.role)

    @property
    def roles(self) -> list[Role]:
        """Every role of this node, this one too."""
        return node_roles(self.shards)

    def unix_name(self, role: Role, purpose: str = "peer") -> str:
        """Return the name of the abstract Unix socket on which `role` serves this node's other processes.

        The name is without the leading zero byte.
        """
        return f"laminar-{self.store_id.hex()}-{purpose}-{role_number(role)}"

    async def join_cluster(self, cluster_id: bytes, epoch: bytes = b"") -> None:
        """Record the cluster's id in the data folder, durably: the node belongs to it from now on.

        Only the controller calls this, after it has joined a cluster or has founded group 0 of a new one.
        """
        await asyncio.get_running_loop().run_in_executor(None, self.record_cluster, cluster_id, epoch)
        self.cluster_id, self.epoch = cluster_id, epoch
        self.founding = False

    async def keep_boot_history(self, history: tuple[BootRecord, ...]) -> None:
        """Record the boot history in the data folder, durably (controller only).

        Raises:
            StorageError: it could not be written.
        """
        await asyncio.get_running_loop().run_in_executor(None, self.record_boot_history, history)
        self.boot_history = history

    async def keep_has_peers(self) -> None:
        """Record that this node is not alone in its cluster, durably (controller only).

        Raises:
            StorageError: it could not be written.
        """
        await asyncio.get_running_loop().run_in_executor(None, self.record_has_peers)
        self.has_peers = True

    async def keep_folder_version(self, version: int) -> None:
        """Record, durably, that programs without this code version can't use the folder (controller only).

        Raises:
            StorageError: it could not be written.
        """
        await asyncio.get_running_loop().run_in_executor(None, self.record_folder_version, version)
        self.folder_version = version

    def answers(self) -> None:
        """Report to the supervisor that this shard answers HTTP requests, or will at once. Call it once."""
        os.write(self.report_fd, ANSWERS)

    def ready(self) -> None:
        """Report to the supervisor that this process serves. Call it once, in a shard after `answers`."""
        os.write(self.report_fd, READY)
        os.close(self.report_fd)
        self.report_fd = -1

    async def until_shared_port_listens(self) -> None:
        """Wait until the supervisor listens on the shared port; return also if the supervisor has ended."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self.shared_port_fd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self.shared_port_fd)
