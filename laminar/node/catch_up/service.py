"""The part of one shard in catch-up: its source, its installer, its offers, and the work after a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from laminar.http.api.problems import Problem
from laminar.log.disk.errors import StorageError
from laminar.log.format.manifest import ReplicaEntry
from laminar.log.storage import Storage
from laminar.node.catch_up.install import UNFINISHED, Installer
from laminar.node.catch_up.lagging import Lagging
from laminar.node.catch_up.messages import BEGINNING, OFFER, PIECE
from laminar.node.catch_up.source import Source
from laminar.node.consensus.driver import Driver
from laminar.node.consensus.replica import Replica
from laminar.node.host.clock import Clock
from laminar.node.host.periodic import Work
from laminar.node.partition.partition import Partition
from laminar.node.runtime.boot import Boot
from laminar.node.runtime.environment import Environment
from laminar.node.runtime.process import Method
from laminar.node.transport.transport import Address, Transport

_log = logging.getLogger("laminar.catch_up")

CHECK_S = 0.5


class CatchUpHost(Protocol):
    """The interface of a shard that `CatchUp` uses: addresses, tasks, and the opening of replicas."""

    boot: Boot
    clock: Clock
    environment: Environment
    storage: Storage
    driver: Driver
    transport: Transport

    def address_of(self, node: str, replica: Replica) -> Address | None:
        """Return the address of the process on `node` that owns the replica's group."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` as a task of the shard; its failure ends the process."""
        raise NotImplementedError

    def refusal(self) -> Problem | None:
        """Return the problem with which the shard refuses data now; None if it takes data."""

    def request_reconcile(self) -> None:
        """Ask the shard to reconcile its replicas with its view soon."""

    async def open(self, entry: ReplicaEntry) -> None:
        """Open a replica of the manifest and let it take part in its group."""


class CatchUp:
    """Catch-up in one shard: it serves logs (source), builds them (installer), and finds replicas that lag.

    `methods` are the calls that the shard answers for them.
    """

    def __init__(
        self,
        shard: CatchUpHost,
        *,
        by_group: Mapping[bytes, Partition],
        watched: Callable[[], Iterable[Partition]],
    ) -> None:
        """`watched` returns the partitions in which a replica may lag."""
        settings = shard.boot.settings
        self._shard = shard
        self._watched = watched
        self._by_group = by_group
        # Ids of new logs by those of the logs that they replaced, until the manifest names the new ones.
        self._replaced_logs: dict[int, int] = {}
        self.source = Source(
            by_group=by_group,
            read_bytes=shard.environment.read_bytes,
            bytes_per_s=settings.catch_up_bytes_per_s,
        )
        self.installer = Installer(self, by_group=by_group, address_of=shard.address_of, spawn=shard.spawn)
        self.lagging = Lagging(
            driver=shard.driver,
            transport=shard.transport,
            source=self.source,
            address_of=shard.address_of,
            far_bytes=settings.catch_up_bytes,
        )
        self.methods: dict[str, Method] = {
            OFFER: self.installer.on_offer,
            BEGINNING: self.source.beginning,
            PIECE: self.source.piece,
        }

    def check(self) -> Work | None:
        """Find lagging replicas in the groups led here, which need a catch-up.

        Return the work of sending them offers, for the caller to run; None if there is none.
        """
        return self.lagging.check_all(self._watched())

    def learners_added(self, partition: Partition) -> None:
        """Watch a group led here that has got new learners, so that they are offered a catch-up soon."""
        if partition.log.size_bytes >= self.lagging.learner_bytes:
            self._shard.spawn(self.lagging.watch(partition))

    async def drop_unfinished(self) -> None:
        """Delete, at a start, the new logs that were being built when the process ended.

        It also notes which logs have replaced others although the manifest still names the old ones, for
        `record_replaced_logs`.
        """
        storage = self._shard.storage
        named = {storage.resolve(entry.log_id) for entry in storage.manifest.entries}
        for log_id, log in list(storage.logs.items()):
            if log_id not in named and log.name.endswith(UNFINISHED):
                _log.info("%s: an unfinished catch-up is deleted", log.name)
                await storage.delete_log(log_id)
        for entry in storage.manifest.entries:
            if storage.resolve(entry.log_id) != entry.log_id:
                self._replaced_logs[entry.log_id] = storage.resolve(entry.log_id)

    async def record_replaced_logs(self) -> None:
        """Write the ids of logs that replaced others into the manifest; retry a failure a second later."""
        switched = dict(self._replaced_logs)
        if not switched:
            return
        try:
            await self.storage.change_manifest(
                lambda known: {
                    key: msgspec.structs.replace(entry, log_id=switched[entry.log_id])
                    for key, entry in known.items()
                    if entry.log_id in switched
                }
            )
        except StorageError as error:
            # Until the manifest is written, the journal's record maps the old log to the new one.
            _log.warning("the manifest cannot be written: %s", error)
            asyncio.get_running_loop().call_later(1.0, self._shard.request_reconcile)
            return
        for old in switched:
            del self._replaced_logs[old]

    def progress_of(self, group: bytes) -> tuple[int, int] | None:
        """Return (bytes received, bytes of the source's log) while a group's new log is built, else None."""
        progress = self.installer.running.get(group)
        return None if progress is None else (progress.received_bytes, progress.size_bytes)

    def statistics(self) -> dict[str, int]:
        """Return the counters and gauges of catch-up, by the names of their metrics."""
        return {
            "served_bytes": self.source.sent_bytes,
            "serving": self.source.readers,
            "received_bytes": self.installer.received_bytes,
            "receiving": len(self.installer.running),
            "installed": self.installer.installed,
            "abandoned": self.installer.abandoned,
            "offers": self.lagging.offers,
        }

    # -- the services of `InstallHost` ---------------------------------------------------

    @property
    def storage(self) -> Storage:
        """The storage that holds the logs."""
        return self._shard.storage

    @property
    def driver(self) -> Driver:
        """The driver of the replicas."""
        return self._shard.driver

    @property
    def transport(self) -> Transport:
        """The transport to the source."""
        return self._shard.transport

    def refusal(self) -> str:
        """Return why no new log may be built now; empty if it may."""
        problem = self._shard.refusal()
        return "" if problem is None else problem.detail

    def entry_of(self, group: bytes) -> ReplicaEntry | None:
        """Return the group's manifest entry if the log that it names is in use, else None."""
        partition = self._by_group.get(group)
        entry = self.storage.manifest.of_group(group)
        named = entry is not None and partition is not None and entry.log_id == partition.log.log_id
        return entry if named else None

    async def log_replaced(self, entry: ReplicaEntry) -> None:
        """Open the replica with its new log, and schedule a write of the manifest.

        If the replica was deleted meanwhile, delete the new log.
        """
        partition = self._by_group.get(entry.group)
        if partition is None or partition.replica.replica_id != entry.replica_id:
            # The replica was deleted while the record was being written: delete the new log, too.
            if entry.log_id in self.storage.logs:
                await self.storage.delete_log(entry.log_id, replica_id=entry.replica_id)
            return
        old = self.storage.manifest.of_group(entry.group)
        if old is not None and old.replica_id == entry.replica_id:
            self._replaced_logs[old.log_id] = entry.log_id
        await self._shard.open(entry)
        self._shard.request_reconcile()

    def now_ms(self) -> int:
        """Return the time of the monotonic clock in ms."""
        return self._shard.clock.monotonic_ms()
