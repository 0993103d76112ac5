"""The receiving side of a catch-up: a new log beside the old one, then one journal record that switches.

The replica goes on with its old log while the new one is built: it answers its leader and votes, but does not
campaign. Nothing refers to the new log before the switch. So if the process crashes, the source fails or
another leader is elected, the replica keeps its old log; the new one is deleted, and the next offer begins
again.

The switch must take nothing back that the replica acknowledged (`refusal_to_replace`). All entries of the new
log are committed. So each entry of the old log up to the new log's end is in the new log, too, or was never
committed. Entries of the old log *after* the new log's end may have been acknowledged, unless the old log
differs from the new one at that end. Hard state, recovering state and incarnation belong to the replica and
are kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from laminar.batch import HEADER_SIZE, BatchError, Buffer, Header, verify
from laminar.log.disk.errors import BrokenChain, StorageClosed, StorageError
from laminar.log.format.manifest import ReplicaEntry
from laminar.log.partition_log.log import Log
from laminar.log.storage import Storage
from laminar.node.catch_up.messages import (
    BEGINNING,
    GONE,
    PIECE,
    Beginning,
    BeginningRequest,
    Offer,
    OfferAnswer,
    PieceRequest,
)
from laminar.node.consensus.driver import Driver
from laminar.node.consensus.replica import Replica
from laminar.node.partition import snapshot
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.state import PartitionState
from laminar.node.transport.transport import Address, Peer, RemoteError, Transport, TransportError

_log = logging.getLogger("laminar.catch_up")

# Most new logs that a shard builds at one time; further offers are declined, and come again.
AT_ONCE = 2
# A round copies what is committed at its beginning. After one of at most this many pieces the copy ends, and
# appends bring the rest.
LAST_PIECES = 4
# Timeout of a call to the source, which limits its rate. The replica does not campaign while it waits.
CALL_TIMEOUT_S = 20.0
# Interval of checks whether the shard has room again.
PAUSE_S = 0.2
# Most time that a catch-up waits for room in its shard, as the replica does not campaign meanwhile.
ROOM_PATIENCE_S = 30.0
# Pause after a failed attempt before the next from the same source; it doubles each time.
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
# Suffix of the name of a log that is being built, which it keeps after the switch. At a start, one with this
# suffix that the manifest does not name, not even by a replaced id, is deleted.
UNFINISHED = "+"

_offer_decoder = msgspec.msgpack.Decoder(Offer)
_beginning_decoder = msgspec.msgpack.Decoder(Beginning)


class Abandoned(Exception):
    """The end of a catch-up without a switch; the text says why."""


class InstallHost(Protocol):
    """The interface of a shard that an `Installer` uses: storage, driver, transport, manifest, clock."""

    @property
    def storage(self) -> Storage:
        """The storage that holds the logs."""

    @property
    def driver(self) -> Driver:
        """The driver of the replicas."""

    @property
    def transport(self) -> Transport:
        """The transport to the source."""

    def refusal(self) -> str:
        """Return why no new log may be built now; empty if it may."""

    def entry_of(self, group: bytes) -> ReplicaEntry | None:
        """Return the group's manifest entry if the log that it names is in use, else None."""

    async def log_replaced(self, entry: ReplicaEntry) -> None:
        """Open the replica with its new log, and schedule a write of the manifest.

        `entry` names the new log. If the replica was deleted meanwhile, delete the new log.
        """

    def now_ms(self) -> int:
        """Return the time of the monotonic clock in ms."""


@dataclass(slots=True)
class Progress:
    """The progress of a new log that is being built.

    `source` is the node that sends it, `size_bytes` the size of the source's log, `index` the new log's last
    entry.
    """

    offer: Offer
    source: str
    size_bytes: int = 0
    received_bytes: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True)
class _Failed:
    """The source of a group's last failed catch-up. Its offers are declined until `until_s` (loop time).

    `wait_s` is how long that is; it doubles with each failure in a row.
    """

    source: str
    wait_s: float
    until_s: float


class Installer:
    """Builds new logs for those of this shard's replicas that a leader offers a catch-up.

    `by_group` has the shard's partitions by group id. `address_of(node, replica)` returns the address of the
    process on `node` that owns the replica's group, or None. `running` has the new logs being built.
    """

    def __init__(
        self,
        host: InstallHost,
        *,
        by_group: Mapping[bytes, Partition],
        address_of: Callable[[str, Replica], Address | None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._host = host
        self._by_group = by_group
        self._address_of = address_of
        self._spawn = spawn
        self.running: dict[bytes, Progress] = {}
        self._failed: dict[bytes, _Failed] = {}
        self.received_bytes = 0
        self.installed = 0
        self.abandoned = 0

    async def on_offer(self, peer: Peer, payload: bytes) -> bytes:
        """Answer the leader's offer, and start to build the new log unless it is declined or under way."""
        offer = _offer_decoder.decode(payload)
        detail = self._refusal(peer, offer)
        if not detail and offer.group not in self.running:
            self.running[offer.group] = Progress(offer, peer.node)
            self._spawn(self._run(self._by_group[offer.group], offer, peer.node))
        return msgspec.msgpack.encode(OfferAnswer(not detail, detail))

    def _refusal(self, peer: Peer, offer: Offer) -> str:
        partition = self._by_group.get(offer.group)
        if partition is None or partition.replica.failure is not None:
            return "no such replica here"
        replica = partition.replica
        if replica.replica_id != offer.receiver:
            return f"replica {replica.replica_id} is here, not {offer.receiver}"
        if offer.group in self.running:
            return ""
        if replica.core.term != offer.term or replica.leader_node not in (None, peer.node):
            return f"this replica is in term {replica.core.term}, or follows another leader"
        if len(self.running) >= AT_ONCE:
            return f"{AT_ONCE} others are being caught up"
        failed = self._failed.get(offer.group)
        if failed is not None and failed.source == peer.node and _now_s() < failed.until_s:
            return f"the last attempt failed; the next is allowed in {failed.until_s - _now_s():.1f} s"
        if self._host.entry_of(offer.group) is None:
            return "the manifest does not name the replica's log yet"
        return self._host.refusal()

    # -- one catch-up ------------------------------------------------------------------

    async def _run(self, partition: Partition, offer: Offer, node: str) -> None:
        replica = partition.replica
        name = replica.name
        new: Log | None = None
        host = self._host
        try:
            replica.core.inhibit_campaign(True, now_ms=host.now_ms())
            new = host.storage.create_log(new_name(partition.topic, partition.number))
            await self._build(partition, new, offer, node)
            entry = await self._switch(partition, new)
            new = None
            self.installed += 1
            self._failed.pop(offer.group, None)
            _log.info("%s: the log was replaced by a copy from %s", name, node)
            await host.log_replaced(entry)
        except (Abandoned, TransportError, StorageError, BrokenChain, msgspec.MsgspecError) as error:
            self.abandoned += 1
            self._leave_alone(offer.group, node)
            _log.warning("%s: catch-up from %s failed: %s", name, node, error)
        finally:
            del self.running[offer.group]
            if host.driver.is_current(replica):
                replica.core.inhibit_campaign(False, now_ms=host.now_ms())
                host.driver.process_ready(replica)
            if new is not None and new.log_id in host.storage.logs:
                dropped = host.storage.delete_log(new.log_id)
                dropped.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _leave_alone(self, group: bytes, node: str) -> None:
        """Decline offers of a failed source for a while, twice as long after each failure in a row.

        Otherwise, if the source has a damaged entry, each offer would copy everything before that entry
        again, in vain.
        """
        before = self._failed.get(group)
        wait_s = FIRST_WAIT_S
        if before is not None and before.source == node:
            wait_s = min(2 * before.wait_s, LONGEST_WAIT_S)
        self._failed[group] = _Failed(node, wait_s, _now_s() + wait_s)

    async def _build(self, partition: Partition, new: Log, offer: Offer, node: str) -> None:
        """Copy the source's committed entries into the new log, and write its state snapshot.

        It copies in rounds, each up to the commit index at the round's beginning.
        """
        storage, progress = self._host.storage, self.running[offer.group]
        beginning = await self._beginning(partition, offer, node)
        if beginning.index:
            new.set_start(
                index=beginning.index,
                term=beginning.term,
                offset=beginning.offset,
                time_ms=beginning.time_ms,
            )
        tables = PartitionState(new.start.index)
        before = 0
        while True:
            pieces = 0
            settled = storage.sync_log(new)
            progress.size_bytes = beginning.size_bytes
            while new.last_index < beginning.committed_index:
                await self._room(partition)
                frames = await self._piece(partition, offer, node, new.last_index + 1)
                await settled  # the sync of the previous piece, which went on during this transfer
                for header, frame in frames[: beginning.committed_index - new.last_index]:
                    new.append([frame])
                    tables.appended(header, frame)
                    progress.received_bytes += len(frame)
                    self.received_bytes += len(frame)
                tables.committed(new.last_index)
                progress.index = new.last_index
                pieces += 1
                settled = storage.sync_log(new)
            await settled
            # Few pieces are left to appends. So are many, if this round was more than half as long as the one
            # before: then the group appends about as fast as this copies, and further rounds gain nothing.
            if pieces <= LAST_PIECES or (before and 2 * pieces > before):
                break
            before = pieces
            beginning = await self._beginning(partition, offer, node)
        await self._write_snapshot(new, tables)

    async def _room(self, partition: Partition) -> None:
        """Wait until this shard's storage has room for more data.

        The wait is short, as the replica does not campaign meanwhile, and may be the only one that could
        lead.

        Raises:
            Abandoned: when there is no room for `ROOM_PATIENCE_S`, or the replica is not here any more.
        """
        patient_until_s = _now_s() + ROOM_PATIENCE_S
        while True:
            if not self._host.driver.is_current(partition.replica):
                raise Abandoned("the replica has gone meanwhile")
            if not self._host.storage.refusal:
                return
            if _now_s() >= patient_until_s:
                raise Abandoned(f"this shard has had no room for {ROOM_PATIENCE_S:g} s")
            await asyncio.sleep(PAUSE_S)

    async def _write_snapshot(self, log: Log, tables: PartitionState) -> None:
        """Write a state snapshot beside the new log, so that the replica opens it without a replay.

        A replica can open without a snapshot, so a failure is only logged.
        """
        known = snapshot.snapshot_of(log, tables)
        if known is None:
            return
        try:
            await self._host.storage.write_log_document(log, snapshot.NAME, msgspec.msgpack.encode(known))
        except StorageClosed:
            raise
        except StorageError as error:
            _log.warning("%s: its state snapshot cannot be written: %s", log.name, error)

    async def _switch(self, partition: Partition, new: Log) -> ReplicaEntry:
        """Write the one record that makes the new log the replica's; return when it is durable.

        Return the manifest entry with the new log's id. The replica is removed from the driver before.

        Raises:
            Abandoned: when the new log must not replace the old one; then nothing has changed.
        """
        host, replica, old = self._host, partition.replica, partition.log
        await host.storage.sync_log(new)
        # No await from here until the record is written: the replica may not change in between.
        entry = host.entry_of(replica.group)
        if entry is None or not host.driver.is_current(replica):
            raise Abandoned("the replica has gone meanwhile")
        refusal = refusal_to_replace(replica, new)
        if refusal:
            raise Abandoned(refusal)
        host.driver.remove(replica.group, StorageClosed("its log is replaced by a newer one"))
        if old.recovering or old.incarnation:
            new.copy_recovering(old)
        await host.storage.replace_log(old.log_id, new)
        return msgspec.structs.replace(entry, log_id=new.log_id)

    # -- asking ------------------------------------------------------------------------

    async def _call(self, partition: Partition, node: str, method: str, request: msgspec.Struct) -> bytes:
        address = self._address_of(node, partition.replica)
        if address is None:
            raise Abandoned(f"the address of {node} is not known")
        payload = msgspec.msgpack.encode(request)
        return await self._host.transport.call(address, method, payload, timeout=CALL_TIMEOUT_S)

    async def _beginning(self, partition: Partition, offer: Offer, node: str) -> Beginning:
        request = BeginningRequest(offer.group, offer.receiver)
        return _beginning_decoder.decode(await self._call(partition, node, BEGINNING, request))

    async def _piece(
        self, partition: Partition, offer: Offer, node: str, index: int
    ) -> list[tuple[Header, Buffer]]:
        request = PieceRequest(offer.group, offer.receiver, index)
        frames = whole_frames(await self._call(partition, node, PIECE, request), index)
        if not frames:
            # The bytes of the source's file are damaged: have it verify each frame, and read from its log.
            request = msgspec.structs.replace(request, verified=True)
            frames = whole_frames(await self._call(partition, node, PIECE, request), index)
        if not frames:
            raise RemoteError(GONE, f"the source sent no intact entry {index}")
        return frames


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def new_name(topic: str, number: int) -> str:
    """Return the name of a partition's new log; a start deletes such a log if no replica uses it."""
    return f"{topic}-{number}{UNFINISHED}"


def whole_frames(data: bytes, index: int) -> list[tuple[Header, Buffer]]:
    """Return the verified frames at the start of a piece, whose first should be entry `index`.

    They end before the first frame that is cut off, damaged, or not the next entry.
    """
    found: list[tuple[Header, Buffer]] = []
    view = memoryview(data)
    position = 0
    while position + HEADER_SIZE <= len(view):
        try:
            size = Header.unpack(view, position).frame_size
            frame = view[position : position + size]
            header = verify(frame)
        except BatchError:
            break
        if header.index != index + len(found):
            break
        found.append((header, frame))
        position += size
    return found


def refusal_to_replace(replica: Replica, new: Log) -> str:
    """Return why `new`, a log of committed entries, must not replace the replica's; empty if it may."""
    core, old = replica.core, replica.log
    if core.term < new.last_term:
        return f"term {core.term} is known here, the new log is of term {new.last_term}"
    if old.last_index > new.last_index and old.term(new.last_index) in (new.last_term, None):
        return f"the old log has gone on to {old.last_index}, the new one ends at {new.last_index}"
    assert core.committed_index <= new.last_index, f"{core!r} has committed more than {new!r} holds"
    return ""
