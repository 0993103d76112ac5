"""A whole node in the caller's loop: one shard, its controller, its HTTP port; no other process, no signals.

`laminar.embed` is for programs that want a node's API, topics, cursors and data folder without running one
beside them: the same controller and shard that a supervisor forks, as objects of one loop. This module only
starts and ends them. The folder is a node's: `laminar serve` may open it after the embedded node has ended,
and the other way round, because recovery assigns the logs to any number of shards.

It is a layer above `laminar.node` and the client, which it joins.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from laminar.client.client import Client, connect
from laminar.log import controller_store
from laminar.node.access.cluster_secret import keyring_of
from laminar.node.assembly import make_process
from laminar.node.entry_points import default_entry_points
from laminar.node.host.certificates import Certificates
from laminar.node.host.machine import misplaced_packages
from laminar.node.host.settings import OPEN, SETTINGS, Settings, SettingsError, check_together
from laminar.node.host.settings_sources import convert
from laminar.node.runtime.boot import CONTROLLER, Boot, ChildState, Role, StatusBoard, node_roles, role_name
from laminar.node.runtime.data_folder import DataFolder, open_data_folder
from laminar.node.runtime.environment import Environment
from laminar.node.runtime.listeners import NodeSockets
from laminar.node.runtime.process import Process, open_store
from laminar.node.secret.keyring import Keyring
from laminar.node.shard.shard import store_of
from laminar.node.start import open_certificates, open_sockets_of

_log = logging.getLogger("laminar.embedded")

START_TIMEOUT_S = 15.0
_SHARDS = 1
_ROLES = node_roles(_SHARDS)
# Settings of processes and their logs: here both are the caller's.
_NOT_OURS = frozenset({"data", "shards", "pin", "log_level", "log_format"})


class NodeFailed(Exception):
    """The embedded node could not start, or ended by itself; the text says why."""


@dataclass(slots=True, kw_only=True)
class _Boot(Boot):
    """The start of a node without a supervisor: its parts report by calls, not over a pipe."""

    on_answers: Callable[[], None]
    on_ready: Callable[[], None]

    def answers(self) -> None:
        self.on_answers()

    def ready(self) -> None:
        self.on_ready()

    async def until_shared_port_listens(self) -> None:
        """Return at once, because `on_answers` has begun to listen already."""


class EmbeddedNode:
    """A running node: `client` is connected to it in this loop, other programs connect to `url`."""

    def __init__(
        self,
        settings: Settings,
        folder: DataFolder,
        sockets: NodeSockets,
        certificates: Certificates | None = None,
        secrets: Keyring | None = None,
    ) -> None:
        self._certificates = certificates
        self._secrets = Keyring() if secrets is None else secrets
        self._settings = settings
        self._folder = folder
        self._sockets = sockets
        self._addresses = sockets.addresses(settings.public_host, gossip=settings.gossip_host)
        self._board = StatusBoard(_SHARDS)
        self._ready = {role: asyncio.Event() for role in _ROLES}
        self._processes: dict[Role, Process] = {}
        self._running: dict[Role, asyncio.Task[None]] = {}
        self.node = folder.identity.node
        host = f"[{self._addresses.host}]" if ":" in self._addresses.host else self._addresses.host
        self.url = f"{settings.scheme}://{host}:{self._addresses.http_port}"
        self.client: Client = connect(self.url)

    def __repr__(self) -> str:
        return f"<EmbeddedNode {self.node} {self.url}>"

    @property
    def failure(self) -> BaseException | None:
        """The error that ended a part of the node; None while all parts run."""
        for process in self._processes.values():
            if process.failure is not None:
                return process.failure
        for task in self._running.values():
            if task.done() and not task.cancelled() and task.exception() is not None:
                return task.exception()
        return None

    async def start(self, *, timeout_s: float) -> None:
        """Open the store directories of controller and shard, and serve.

        Raises:
            NodeFailed: the node is not ready within `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        for role in _ROLES:
            boot = self._boot(role)
            store = controller_store(boot.data_directory) if role == CONTROLLER else store_of(boot)
            storage = await loop.run_in_executor(None, open_store, boot, store)
            process = self._processes[role] = make_process(boot, storage)
            self._running[role] = loop.create_task(self._run(process), name=f"laminar {role_name(role)}")
        ready = loop.create_task(self._all_ready())
        try:
            await asyncio.wait(
                {ready, *self._running.values()}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not ready.done():
                why = f"{self.failure}" if self.failure else f"not ready within {timeout_s:g} s"
                raise NodeFailed(f"the node in {self._folder.directory}: {why}") from self.failure
        finally:
            ready.cancel()
        await loop.run_in_executor(None, self._folder.write_node_file, self._node_file())

    def _boot(self, role: Role) -> _Boot:
        sockets = self._sockets.for_child(role)
        identity = self._folder.identity

        def ready() -> None:
            self._board.write(role, state=ChildState.READY, pid=os.getpid(), restarts=0)
            self._ready[role].set()

        return _Boot(
            settings=self._settings,
            data_directory=self._folder.directory,
            cluster_id=identity.cluster_id or None,
            store_id=identity.store_id,
            node=identity.node,
            role=role,
            shards=_SHARDS,
            nonce=os.urandom(16),
            http_shared=sockets.http_shared,
            http_own=sockets.http_own,
            peer=sockets.peer,
            gossip=sockets.gossip,
            datagrams=sockets.datagrams,
            certificates=self._certificates,
            secrets=self._secrets,
            addresses=self._addresses,
            board=self._board,
            lifeline=-1,
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
            on_answers=self._sockets.listen_on_shared_port,
            on_ready=ready,
        )

    async def _run(self, process: Process) -> None:
        try:
            await process.run()
        except BaseException as error:
            process.fatal(error)
            await process.close()
            raise

    async def _all_ready(self) -> None:
        for event in self._ready.values():
            await event.wait()

    def _node_file(self) -> dict[str, object]:
        identity = self._folder.read_identity()
        addresses: dict[str, object] = msgspec.to_builtins(self._addresses)
        return addresses | {
            "node": self.node,
            "url": self.url,
            "shards": _SHARDS,
            "cluster_id": identity.cluster_id.hex(),
            "store_id": identity.store_id.hex(),
            "pid": os.getpid(),
            "pids": {role_name(role): os.getpid() for role in _ROLES},
        }

    async def stop(self) -> None:
        """Stop the node: first the shard, then the controller, which the shard needs to transfer leaders."""
        self._folder.remove_node_file()
        for role in reversed(_ROLES):
            if role in self._processes:
                self._processes[role].stop()
                await asyncio.gather(self._running[role], return_exceptions=True)


@asynccontextmanager
async def embed(
    path: str | os.PathLike[str],
    *,
    port: int = 0,
    start_timeout_s: float = START_TIMEOUT_S,
    **settings: str | float | tuple[str, ...],
) -> AsyncIterator[EmbeddedNode]:
    """Run a node with its data in `path`, in this loop, for the length of a block.

    A free loopback port is used unless `port` is given. `settings` are settings of a node, except those of
    processes (`data`, `shards`, `pin`, `log_level`, `log_format`); `default_replicas` is 1 here. What is
    acknowledged is durable, also if the program is killed within the block.

    Raises:
        NodeFailed: the node could not start, or, at the block's end, it failed meanwhile.
        SettingsError: a setting is unknown or wrong.
        IdentityError: the folder is another node's, or in use.
        StorageError: the folder's data cannot be recovered.
        CertificateError: the files of TLS cannot be used.
        SecretError: the file of the secrets cannot be used.
        OSError: the port is taken.
    """
    chosen = _settings(settings | {"data": os.fspath(path), "port": port})
    if not __debug__:
        raise NodeFailed("python -O removes the checks that keep data safe: start without -O")
    for line in misplaced_packages():
        raise NodeFailed(line)
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        directory = os.path.join(os.getcwd(), chosen.data)
        certificates = await loop.run_in_executor(None, open_certificates, chosen)
        folder = await loop.run_in_executor(None, _open_folder, directory, chosen, certificates)
        stack.callback(folder.close)
        if certificates is not None:
            certificates.name(folder.identity.node)
        sockets = open_sockets_of(chosen, _SHARDS, folder)
        stack.callback(sockets.close)
        recover = default_entry_points(chosen, Environment()).recover
        await loop.run_in_executor(None, recover, directory, _SHARDS)
        secrets = await loop.run_in_executor(None, keyring_of, chosen, directory)
        node = EmbeddedNode(chosen, folder, sockets, certificates, secrets)
        stack.push_async_callback(node.stop)
        await node.start(timeout_s=start_timeout_s)
        await stack.enter_async_context(node.client)
        yield node
        if node.failure is not None:
            raise NodeFailed(f"{node!r} failed: {node.failure!r}") from node.failure


def _settings(given: dict[str, str | float | tuple[str, ...]]) -> Settings:
    known = {setting.name for setting in SETTINGS}
    for name in given:
        if name not in known or name in _NOT_OURS - {"data"}:
            raise SettingsError(f"{name} is no setting of an embedded node", name=name, origin="embed")
    values = {name: convert(name, value, origin="embed") for name, value in given.items()}
    defaults: dict[str, Any] = {"default_replicas": 1, "access": OPEN}
    settings = Settings(**(defaults | values), shards=_SHARDS)
    check_together(settings)
    return settings


def _open_folder(directory: str, settings: Settings, certificates: Certificates | None) -> DataFolder:
    node = settings.node or (certificates.only_name if certificates is not None else "")
    return open_data_folder(Environment.disk, directory, node=node, joining=bool(settings.join))
