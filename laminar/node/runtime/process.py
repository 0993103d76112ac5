"""The common part of controller and shard: storage, transport, driver, clocks, and an orderly end.

Neither owns module-level state or installs a signal handler, so both also run inside a user's own loop;
`laminar.node.entry_points` puts them into processes.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import logging
import select
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
import uvloop

from laminar.log.disk.errors import DiskError
from laminar.log.format.manifest import ReplicaEntry
from laminar.log.recovery.node import logs_directory
from laminar.log.storage import Storage
from laminar.node.consensus.driver import Driver
from laminar.node.consensus.lost_majority import RecordedMembers, Releases
from laminar.node.consensus.peer_repair import METHOD as REPAIR
from laminar.node.consensus.peer_repair import PeerRepair
from laminar.node.consensus.replica import Replica
from laminar.node.host.certificates import CHECK_S as CERTIFICATES_CHECK_S
from laminar.node.host.failed_logs import (
    CHECK_S,
    EXIT_TO_RECOVER,
    RestartToRecover,
    failed_logs,
    is_retriable,
    pause_s,
)
from laminar.node.host.fork import Unrecoverable
from laminar.node.host.loop_health import LoopHealth
from laminar.node.host.periodic import Check, PeriodicTasks
from laminar.node.runtime.boot import Boot
from laminar.node.runtime.cluster_view import View
from laminar.node.runtime.peer_admission import PeerAdmission, encode_history
from laminar.node.runtime.process_report import ProcessReport, report_of
from laminar.node.runtime.recent_log import RecentLog
from laminar.node.runtime.replica_factory import ReplicaFactory
from laminar.node.transport.transport import Address, Peer
from membership.boot_history import BootRecord
from membership.catalog import CODE_VERSION
from raft.values import Settings

_log = logging.getLogger("laminar.process")
_QUIET_S = 1.0
# How long a thread that decodes a body may keep the interpreter lock when the loop wants it. With Python's
# 5 ms a turn beside such threads is blocked for 20 to 40 ms, as each call of the system gives the lock away.
_SWITCH_S = 0.0005
_LONGEST_WAIT_S = 30.0

HOW_TO_REJOIN = (
    "Start it on an empty folder under a new name (--node); or, if this folder is to be kept in the cluster, "
    "`laminar catalog recover --into` first"
)

Method = Callable[[Peer, bytes], Awaitable[bytes]]


class Process:
    """Base of `Controller` and `Shard`. Make it inside the loop that it runs in."""

    def __init__(self, boot: Boot, *, storage: Storage) -> None:
        self.boot = boot
        self.role = boot.role_number
        self.environment = boot.environment
        self.clock = self.environment.clock()
        self.rng = self.environment.rng()
        self.storage = storage
        self.cluster_id: bytes | None = boot.cluster_id
        self.epoch = boot.epoch
        self.stopping = asyncio.Event()
        self.health = LoopHealth()
        self.recent_log: RecentLog | None = None
        """The last lines of the log; None where the process has no log of its own."""
        self.failure: BaseException | None = None
        self.view = View(node=boot.node, unix_name=boot.unix_name)
        self.replica_factory = ReplicaFactory(
            cluster_id=lambda: self.cluster_id,
            storage=storage,
            settings=Settings(
                election_timeout_ms=boot.settings.election_timeout_ms,
                heartbeat_ms=boot.settings.heartbeat_ms,
            ),
            clock=self.clock,
            rng=self.rng,
            trace=self.environment.trace,
        )
        self.methods: dict[str, Method] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._periodic = PeriodicTasks(spawn=self.spawn, on_error=self.fatal)
        self._admission = PeerAdmission(
            boot.node,
            knows=self.knows,
            known_boot=self.known_boot,
            known_store=self.known_store,
            is_removed=self.is_removed,
        )
        self.transport = self.environment.transport(
            cluster_id=lambda: self.cluster_id,
            node=boot.node,
            role=self.role,
            nonce=boot.nonce,
            secrets=boot.secrets,
            certificates=boot.certificates,
            history=encode_history(boot.boot_history),
            store_id=boot.store_id,
            epoch=lambda: self.epoch,
            code_version=CODE_VERSION,
            enabled=self.enabled,
            rng=self.rng,
        )
        self.driver = Driver(
            storage=storage,
            transport=self.transport,
            clock=self.clock,
            address_of=self.address_of,
            address_of_peer=self.address_of_peer,
            admits=self.admits,
            on_fatal=self.fatal,
            election_timeout_ms=boot.settings.election_timeout_ms,
            heartbeat_ms=boot.settings.heartbeat_ms,
            elections_at_once=self.environment.elections_at_once,
            receive_budget_bytes=self.environment.receive_budget_bytes,
        )
        storage.on_failure = self.fatal
        self.repairs = PeerRepair(
            cluster_id=lambda: self.cluster_id,
            call=self.transport.call,
            nodes_of=self.holders_of,
            address_of=self.holder_address,
            hand_over=self._hand_over_to,
            spawn=self.spawn,
            rng=self.rng,
        )
        storage.on_damage = self.repairs.found
        self.methods[REPAIR] = self.repairs.answer
        self.methods["process_report"] = self._on_report
        self.transport.on_call = self._on_call
        self.transport.on_lost = self._on_lost
        self.transport.on_outdated = lambda text: self.fatal(Unrecoverable(f"{text}. {HOW_TO_REJOIN}"))

    def enabled(self) -> int:
        """Return the highest code version that the cluster is known here to have enabled."""
        return max(self.boot.folder_version, self.view.code_version)

    # -- overridden by `Controller` and `Shard` ------------------------------------------

    def knows(self, node: str) -> bool:
        """Return whether this process knows a node: it has the node's record or address."""
        raise AssertionError("each kind of process says what it knows of the others")

    def known_boot(self, node: str) -> BootRecord | None:
        """Return the newest boot record of another node's data folder that the catalog has named here."""
        raise AssertionError("each kind of process says what it knows of the others")

    def known_store(self, node: str) -> bytes | None:
        """Return the store id of another node's data folder that the catalog has named here."""
        raise AssertionError("each kind of process says what it knows of the others")

    def is_removed(self, store_id: bytes) -> bool:
        """Return whether the data folder with this id was a removed node's, as far as is known here."""
        raise AssertionError("each kind of process says what it knows of the others")

    def address_of(self, node: str, replica: Replica) -> Address | None:
        """Return the address of the process on `node` that owns the replica's group."""
        raise AssertionError("each kind of process says where its groups live")

    def address_of_peer(self, peer: Peer) -> Address | None:
        """Return the address at which another process listens for its peers; None if unknown."""
        return self.view.address(peer.node, peer.role)

    def holder_address(self, node: str, entry: ReplicaEntry) -> Address | None:
        """Return the address of the process on `node` that owns a group, also if it is not open here."""
        raise AssertionError("each kind of process says where its groups live")

    def holders_of(self, entry: ReplicaEntry, replica: Replica | None) -> list[str]:
        """Return the nodes of the other members of a group, the leader's first."""
        if replica is None:
            return [node for member, node in entry.voters if member != entry.replica_id]
        leader = replica.leader_node
        nodes = [
            replica.nodes[member]
            for member in replica.configuration.members()
            if member != replica.replica_id
        ]
        return sorted(nodes, key=lambda node: node != leader)

    def _hand_over_to(self, replica: Replica, node: str) -> None:
        """Transfer leadership to the voter on `node`, if it holds what is committed."""
        for member in replica.configuration.voters:
            held = replica.match_index(member) >= replica.core.committed_index
            if replica.nodes[member] == node and held and replica.core.is_leader:
                self.driver.transfer(replica, member)

    def answer_releases(self, members: RecordedMembers) -> Releases:
        """Return the object that releases recovering replicas (`lost_majority`), and serve its calls."""
        releases = Releases(
            members,
            node=self.boot.node,
            driver=self.driver,
            storage=self.storage,
            clock=self.clock,
            election_timeout_ms=self.boot.settings.election_timeout_ms,
            call=self.transport.call,
            address_of=self.address_of,
        )
        self.methods |= releases.methods
        return releases

    # -- transport -----------------------------------------------------------------------

    def admits(self, peer: Peer) -> bool:
        """Return whether this process accepts Raft messages of `peer` now."""
        return self._admission.admits(peer)

    async def listen(self) -> None:
        """Start serving the other processes: TCP for other nodes, an abstract Unix socket for this one's."""
        self.every(CERTIFICATES_CHECK_S, self.check_certificates)
        self.every(CERTIFICATES_CHECK_S, self.check_secrets)
        await self.transport.serve_unix(self.boot.unix_name(self.boot.role))
        await self.transport.serve_tcp(self.boot.peer)

    async def _on_call(self, peer: Peer, method: str, payload: bytes) -> bytes:
        handler = self.methods.get(method)
        if handler is None:
            raise LookupError(f"no method {method!r}")
        return await handler(peer, payload)

    def _on_lost(self, lost: Peer | Address) -> None:
        # Else a process that ends could win an election that it has to hand over again.
        if not self.stopping.is_set():
            self.driver.lost(lost)

    # -- certificates and secrets ----------------------------------------------------------

    def check_certificates(self) -> Coroutine[Any, Any, None] | None:
        """Return the work that checks for newer certificates; None without TLS."""
        return None if self.boot.certificates is None else self._refresh_certificates(again=False)

    def check_secrets(self) -> Coroutine[Any, Any, None] | None:
        """Return the work that checks the file of secrets for changes; None without such a file."""
        return self._refresh_secrets(again=False) if self.boot.secrets.changes else None

    def reload(self) -> None:
        """Load the certificates and the secrets again (SIGHUP), where there are any."""
        if self.stopping.is_set():
            return
        if self.boot.certificates is not None:
            self.spawn(self._refresh_certificates(again=True))
        if self.boot.secrets.changes:
            self.spawn(self._refresh_secrets(again=True))

    def histograms(self) -> dict[str, tuple[list[int], float]]:
        """Return the counts and sums of this process's histograms, by the names of their metrics."""
        return {
            "laminar_append_commit_seconds": self.driver.commit_times.stored(),
            "laminar_disk_sync_seconds": self.storage.sync_times.stored(),
            "laminar_loop_delay_seconds": self.health.delays.stored(),
        }

    def report(self) -> ProcessReport:
        """Return this process's report for a bundle (`laminar doctor --bundle`)."""
        return report_of(self.role, self.health, self.recent_log)

    async def _on_report(self, peer: Peer, payload: bytes) -> bytes:
        """Answer a call of another process of this node with this process's report."""
        return msgspec.msgpack.encode(self.report())

    def tls_statistics(self) -> dict[str, int]:
        """Return counters and remaining times of the certificates; empty without TLS."""
        return {} if self.boot.certificates is None else self.boot.certificates.statistics()

    async def _refresh_certificates(self, *, again: bool) -> None:
        assert self.boot.certificates is not None
        refresh = functools.partial(self.boot.certificates.refresh, again=again)
        await asyncio.get_running_loop().run_in_executor(None, refresh)

    async def _refresh_secrets(self, *, again: bool) -> None:
        refresh = functools.partial(self.boot.secrets.refresh, again=again)
        await asyncio.get_running_loop().run_in_executor(None, refresh)

    # -- logs that failed -----------------------------------------------------------------

    def check_failed_logs(self) -> Coroutine[Any, Any, None] | None:
        """Return the work that recovers failed logs, or None if none has failed."""
        return self._restart_to_recover() if self.awaiting_restart() else None

    def awaiting_restart(self) -> list[str]:
        """Return, as text, name and fault of each log that has failed: only a restart recovers these."""
        return failed_logs(self.storage)

    async def _restart_to_recover(self) -> None:
        """Wait for the pause, then until the disk has room, then end this process to be restarted."""
        wait_s = pause_s(self.boot.recovery_restarts)
        waiting = ", ".join(self.awaiting_restart())
        _log.warning("in %d s this process starts again, if the disk has room: %s", wait_s, waiting)
        if await self.stopped_within(wait_s):
            return
        while not await self._has_room():
            if await self.stopped_within(CHECK_S):
                return
        self.fatal(RestartToRecover(", ".join(self.awaiting_restart())))

    async def _has_room(self) -> bool:
        """Return whether the disk has room for a recovery, which begins a new journal."""
        if self.storage.refusal == "disk":
            return False
        disk, directory = self.environment.disk, self.boot.data_directory
        try:
            free = await asyncio.get_running_loop().run_in_executor(None, disk.free_bytes, directory)
        except DiskError:
            return False
        return free >= 2 * self.boot.settings.journal_file_bytes

    # -- life ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Do this process's work; return after an orderly stop."""
        raise AssertionError("each kind of process says what it serves")

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` as a task; its failure is logged and ends the process."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def every(self, period_s: float, check: Check, *, to_the_end: bool = False) -> None:
        """Call `check` every `period_s` seconds until stopped; `to_the_end`: also while the process ends.

        An exception of the check or of its work ends the process.
        """
        self._periodic.every(
            period_s, check if to_the_end else lambda: None if self.stopping.is_set() else check()
        )

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            self.fatal(task.exception())

    def fatal(self, error: BaseException | None) -> None:
        """End this process for an error that it cannot go on from; the supervisor starts it again."""
        if self.failure is None:
            self.failure = error
            if isinstance(error, RestartToRecover):
                _log.warning("%s restarts to recover: %s", self.transport, error)
            elif not isinstance(error, Unrecoverable):  # its text is logged at the end
                _log.critical("%s ends: %r", self.transport, error, exc_info=error)
        self.stopping.set()

    async def stopped_within(self, timeout_s: float) -> bool:
        """Sleep, but no longer than until this process is asked to stop; return whether it was."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.stopping.wait()
        except TimeoutError:
            return False
        return True

    def stop(self) -> None:
        """Ask the process to shut down: `run` then returns."""
        self.stopping.set()

    async def close(self) -> None:
        """Stop checks, tasks, driver and transport, then close the storage; what was recorded is synced."""
        self._periodic.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.driver.close()
        await self.transport.close()
        await self.storage.close()


def open_store(boot: Boot, store: str) -> Storage:
    """Lock and recover the store directory of a controller or shard. Blocks; needs no loop.

    Only a shard may go on if its manifest is lost (`forget`): it asks the catalog which replicas it held. A
    controller has no process to ask.
    """
    settings = boot.settings
    return boot.environment.storage(
        store,
        logs_directory(boot.data_directory),
        settings=settings.of_storage,
        forget=isinstance(boot.role, int),
    )


def _open_when_there_is_room(boot: Boot, store: str) -> Storage | None:
    """Call `open_store`, again while the disk is full; return None when asked to stop meanwhile."""
    tries = 0
    while True:
        try:
            return open_store(boot, store)
        except DiskError as error:
            if not is_retriable(error):
                raise
            _log.error("%s cannot be recovered now: %s", store, error)
        # The pipe ends when the supervisor does.
        if select.select([boot.lifeline], [], [], min(2.0**tries, _LONGEST_WAIT_S))[0]:
            return None
        tries += 1


def run_process(boot: Boot, store: str, make: Callable[[Boot, Storage], Process]) -> int:
    """Recover the store directory of a forked child, run its loop until stopped; return its exit code."""
    recent = RecentLog()
    logging.getLogger().addHandler(recent)
    storage = _open_when_there_is_room(boot, store)
    if storage is None:
        return 0

    async def main() -> int:
        loop = asyncio.get_running_loop()
        process = make(boot, storage)
        process.recent_log = recent
        loop.add_signal_handler(signal.SIGTERM, process.stop)
        loop.add_signal_handler(signal.SIGHUP, process.reload)
        loop.add_reader(boot.lifeline, process.stop)
        sys.setswitchinterval(_SWITCH_S)
        gc.collect()
        gc.freeze()
        process.health.start()
        process.spawn(_give_back_when_quiet(storage))
        await process.run()
        if isinstance(process.failure, Unrecoverable):
            raise process.failure
        if isinstance(process.failure, RestartToRecover):
            return EXIT_TO_RECOVER
        return 0 if process.failure is None else 1

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


async def _give_back_when_quiet(storage: Storage) -> None:
    """Return free memory to the system when a burst of writes is over.

    glibc keeps freed memory between small objects: after a burst up to as much again as is in use. While
    records come in nothing is returned, because the memory is needed again at once (returning it each time
    cost a tenth of the throughput). Other C libraries have no such call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    trimmed = before = storage.journal_lsn
    while trim is not None:
        await asyncio.sleep(_QUIET_S)
        lsn = storage.journal_lsn
        if lsn == before != trimmed:
            trim(0)
            trimmed = lsn
        before = lsn
