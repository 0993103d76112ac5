"""What a controller and a shard have in common: storage, transport, driver, clocks, an end.

Neither owns module-level state or installs a signal handler, so both also run inside a
user's own loop; `laminar.node.entry` puts them into processes.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import random
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import uvloop

from laminar.batch import Header
from laminar.log.disk import RealDisk
from laminar.log.manifest import ReplicaEntry
from laminar.log.node_recovery import logs_directory
from laminar.log.settings import StorageSettings
from laminar.log.storage import Storage
from laminar.node.boot import Boot
from laminar.node.clock import Clock
from laminar.node.driver import Driver
from laminar.node.forking import Hopeless
from laminar.node.replica import Machine, Replica, replay
from laminar.node.transport import Address, Peer, Transport
from laminar.node.view import View
from laminar.node.wire import Buffer, ConfigurationRecord
from raft.values import HardState, Settings

_log = logging.getLogger("laminar.process")
_READ_BYTES = 4 * 1024 * 1024
_QUIET_S = 1.0

Method = Callable[[Peer, bytes], Awaitable[bytes]]


class Process:
    """Base of `Controller` and `Shard`. Made inside the loop it lives in."""

    def __init__(self, boot: Boot, *, storage: Storage) -> None:
        self.boot = boot
        self.role = boot.role_number
        self.clock = Clock()
        self.rng = random.Random()
        self.storage = storage
        self.cluster_id: bytes | None = boot.cluster_id
        self.stopping = asyncio.Event()
        self.failure: BaseException | None = None
        self.view = View(node=boot.node, unix_name=boot.unix_name)
        self.raft_settings = Settings(
            election_timeout_ms=boot.settings.election_timeout_ms, heartbeat_ms=boot.settings.heartbeat_ms
        )
        self.methods: dict[str, Method] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        secret = boot.settings.secret
        self.transport = Transport(
            cluster_id=lambda: self.cluster_id,
            node=boot.node,
            role=self.role,
            nonce=boot.nonce,
            secret=secret.encode() if secret else None,
            rng=self.rng,
        )
        self.driver = Driver(
            storage=storage,
            transport=self.transport,
            clock=self.clock,
            address_of=self.address_of,
            on_fatal=self.fatal,
            heartbeat_ms=boot.settings.heartbeat_ms,
        )
        storage.on_failure = self.fatal
        self.transport.on_call = self._on_call
        self.transport.on_lost = self._on_lost

    # -- to be said by each kind ---------------------------------------------------------

    def address_of(self, node: str, replica: Replica) -> Address | None:
        """Address of the process on `node` that owns the replica's group."""
        raise AssertionError("each kind of process says where its groups live")

    # -- transport -----------------------------------------------------------------------

    async def listen(self) -> None:
        """Serve the other processes: TCP for other nodes, an abstract Unix socket for this one's."""
        await self.transport.serve_unix(self.boot.unix_name(self.boot.role))
        await self.transport.serve_tcp(self.boot.peer)

    async def _on_call(self, peer: Peer, method: str, payload: bytes) -> bytes:
        handler = self.methods.get(method)
        if handler is None:
            raise LookupError(f"no method {method!r}")
        return await handler(peer, payload)

    def _on_lost(self, lost: Peer | Address) -> None:
        address = self.view.address(lost.node, lost.role) if isinstance(lost, Peer) else lost
        if address is None or self.stopping.is_set():
            return
        for replica in list(self.driver.replicas.values()):
            if replica.leading:
                for member, node in replica.nodes.items():
                    if node != self.boot.node and self.address_of(node, replica) == address:
                        self.driver.unreachable(replica, member)
                continue
            leader = replica.leader_node
            if leader is None or leader == self.boot.node:
                continue
            if self.address_of(leader, replica) == address:
                self.driver.suspect_leader(replica)

    # -- replicas ------------------------------------------------------------------------

    async def open_replica(self, entry: ReplicaEntry, *, name: str, machine: Machine) -> Replica:
        """A replica that the manifest names: its state is made from its log, then it is driven.

        `machine.replica` must be set by the caller before messages arrive: do it in the same turn.
        """
        assert self.cluster_id is not None
        log = self.storage.logs[self.storage.resolve(entry.log_id)]
        configurations: list[tuple[int, ConfigurationRecord]] = [
            (0, ConfigurationRecord(voters=tuple((replica, node) for replica, node in entry.voters)))
        ]
        committed_index = log.start.index
        index = log.first_index
        while index <= log.last_index:
            frames = await log.read(index, log.last_index, max_bytes=_READ_BYTES)
            configurations.extend(replay(frames, machine))
            committed_index = max(committed_index, replay_committed(frames))
            index += len(frames)
        hard = self.storage.hard_states.get(entry.replica_id)
        assert hard is not None or log.last_index == 0, f"{name}: a log without a term and vote is lost"
        return Replica(
            name=name,
            cluster=self.cluster_id,
            group=entry.group,
            replica_id=entry.replica_id,
            incarnation=entry.incarnation,
            log=log,
            machine=machine,
            hard_state=HardState(hard.term, hard.vote) if hard is not None else HardState(),
            committed_index=min(committed_index, log.last_index),
            configurations=configurations,
            settings=self.raft_settings,
            rng=random.Random(self.rng.getrandbits(64)),
            now_ms=self.clock.monotonic_ms(),
            wall_ms=self.clock.wall_ms,
        )

    # -- life ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until stopped."""
        raise AssertionError("each kind of process says what it serves")

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something beside the rest; its failure is logged and ends the process."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.fatal(task.exception())

    def fatal(self, error: BaseException | None) -> None:
        """Something this process cannot go on from: it ends, and is started again by the supervisor."""
        if self.failure is None:
            self.failure = error
            if not isinstance(error, Hopeless):  # its text is all there is to say, and is said at the end
                _log.critical("%s ends: %r", self.transport, error, exc_info=error)
        self.stopping.set()

    async def stopped_within(self, timeout_s: float) -> bool:
        """Sleep, but no longer than until this process is told to stop."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.stopping.wait()
        except TimeoutError:
            return False
        return True

    def stop(self) -> None:
        """Ask the process to end in order."""
        self.stopping.set()

    async def close(self) -> None:
        """End: no more messages, what was recorded is synced."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.driver.close()
        await self.transport.close()
        await self.storage.close()


def run_process(boot: Boot, home: str, make: Callable[[Boot, Storage], Process]) -> int:
    """The body of a forked child: recover its home, then turn one loop until told to stop; its exit code."""
    settings = boot.settings
    storage = Storage.open(
        RealDisk(),
        home,
        logs_directory(boot.data_directory),
        settings=StorageSettings(
            segment_size_bytes=settings.segment_size_bytes, journal_file_bytes=settings.journal_file_bytes
        ),
    )

    async def main() -> int:
        loop = asyncio.get_running_loop()
        process = make(boot, storage)
        loop.add_signal_handler(signal.SIGTERM, process.stop)
        loop.add_reader(boot.lifeline, process.stop)
        gc.collect()
        gc.freeze()
        process.spawn(_give_back_when_quiet(storage))
        await process.run()
        if isinstance(process.failure, Hopeless):
            raise process.failure
        return 0 if process.failure is None else 1

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


async def _give_back_when_quiet(storage: Storage) -> None:
    """Hand free memory back to the system when a burst of writes is over.

    glibc keeps what lies free between small objects: after a burst that is up to as much again as is in use.
    While records come in it is left alone, as they need it at once (giving it back each time cost a tenth of
    the throughput). Another libc has no such call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    trimmed = before = storage.statistics()["journal_lsn"]
    while trim is not None:
        await asyncio.sleep(_QUIET_S)
        lsn = storage.statistics()["journal_lsn"]
        if lsn == before != trimmed:
            trim(0)
            trimmed = lsn
        before = lsn


def replay_committed(frames: Sequence[Buffer]) -> int:
    """The highest commit index that a leader stamped on these frames: certainly committed."""
    return Header.unpack(frames[-1]).committed_index if frames else 0
