"""Repair of damaged entries: they are fetched from other replicas of their group and put back in their place.

Each process has one `PeerRepair`, shards and controller alike. When a storage reports damage, the nodes that
have replicas of the group are asked in turn for the entry, the leader's node first. A node sends only bytes
that it has just verified, and only an entry that has the wanted (index, term) or is committed there: either
of these identifies one entry of the group for ever. Before the bytes are put back, their checksums, the chain
to both neighbours, offsets and size are checked again (`laminar.log.integrity.damage_registry`). All other
entries are served meanwhile. This module knows nothing of topics; its callers say where the other replicas
are.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec

from laminar.batch import BatchError, Header, term_of
from laminar.log.disk.errors import (
    DamagedRange,
    DiskError,
    EntriesTrimmed,
    RepairRefused,
    StorageClosed,
    StorageError,
)
from laminar.log.format.manifest import ReplicaEntry
from laminar.log.partition_log.log import Log
from laminar.log.segment.quarantine import Damage
from laminar.node.consensus.replica import Replica
from laminar.node.transport.rpc import RemoteError, TransportError
from laminar.node.transport.transport import Address, Peer

_log = logging.getLogger("laminar.repair")

METHOD = "repair"
CALL_TIMEOUT_S = 5.0
# Most logs that a process repairs at a time, and most requests of other replicas that it answers at a time.
AT_ONCE = 2
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0

# The possible answers of a node about an entry. HELD: the answer contains it. DAMAGED: its bytes are lost
# there, too. ABSENT: it is not in the log yet. TRIMMED: it was trimmed, by a committed `log_start`. OTHER:
# the log has an entry of another term at this index. UNSURE: ask again later, it may be committed soon.
HELD, DAMAGED, ABSENT, OTHER, UNSURE = "held", "damaged", "absent", "other", "unsure"
TRIMMED = "trimmed"


class EntryRequest(msgspec.Struct, frozen=True, array_like=True):
    """A question to a replica for its copy of entry (`index`, `term`).

    `term` 0 asks for whichever entry is committed at `index`.
    """

    cluster: bytes
    group: bytes
    index: int
    term: int


class EntryReply(msgspec.Struct, frozen=True, array_like=True):
    """The answer of a replica: a status, and with `held` its copy of the entry.

    `committed` says whether the entry at this index is known to be committed there.
    """

    status: str
    committed: bool = False
    frame: bytes = b""


_ask_decoder = msgspec.msgpack.Decoder(EntryRequest)
_reply_decoder = msgspec.msgpack.Decoder(EntryReply)


@dataclass(slots=True, eq=False)
class _Kept:
    """The log of one replica of this process whose damage is repaired, and what is known of the damage."""

    entry: ReplicaEntry
    log: Log
    replica: Replica | None = None
    task: asyncio.Task[None] | None = None
    # Damage that no other replica can repair: by its first entry, the answers of the nodes. Logged once.
    gone: dict[int, str] = field(default_factory=dict)
    # The first entries of damage that other replicas have trimmed.
    trimmed: set[int] = field(default_factory=set)
    waiting: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def committed_index(self) -> int:
        """Index up to which the entries of this log are known to be committed."""
        return self.replica.core.committed_index if self.replica is not None else self.log.start.index

    def damage_from(self, index: int) -> Damage | None:
        """Return the first damaged range with an entry at or after `index`; None if there is none."""
        return next((each for each in self.log.quarantine if each.last_index >= index), None)

    def wake(self) -> None:
        """Wake the callers of `wait_for_progress` for this log."""
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


class PeerRepair:
    """Repairs the damaged entries of one process, and answers the requests of other processes.

    Call `keep` for a log before it is read, and `attach_replica` when its replica exists.
    `nodes_of(entry, replica)` returns the nodes that may have replicas of the group, in the order in which to
    ask them. `address_of(node, entry)` returns the address of the process there, or None.
    `hand_over(replica, node)` hands leadership to another node. `spawn` starts a task.
    """

    def __init__(
        self,
        *,
        cluster_id: Callable[[], bytes | None],
        call: Callable[..., Awaitable[bytes]],
        nodes_of: Callable[[ReplicaEntry, Replica | None], list[str]],
        address_of: Callable[[str, ReplicaEntry], Address | None],
        hand_over: Callable[[Replica, str], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        rng: random.Random,
    ) -> None:
        self._cluster_id = cluster_id
        self._call = call
        self._nodes_of = nodes_of
        self._address_of = address_of
        self._hand_over = hand_over
        self._spawn = spawn
        self._rng = rng
        self._by_group: dict[bytes, _Kept] = {}
        self._by_log: dict[int, _Kept] = {}
        # The ids of logs in which damage may be that no other replica can repair.
        self._with_gone: dict[int, None] = {}
        self._working = asyncio.Semaphore(AT_ONCE)
        self._answering = asyncio.Semaphore(AT_ONCE)
        self.asked = 0
        self.answered = 0
        self.repaired = 0
        self.refused = 0
        self.missing = 0

    # -- what is kept ------------------------------------------------------------------------

    def keep(self, entry: ReplicaEntry, log: Log) -> None:
        """Start to repair a log's damage, and to answer other replicas with entries of this log.

        If the log replaces an earlier log of the group, the damage of the earlier one is not repaired any
        more.
        """
        self.forget(entry.group)
        kept = _Kept(entry, log)
        self._by_group[entry.group] = self._by_log[log.log_id] = kept
        if log.quarantine:
            self._begin(kept)

    def attach_replica(self, replica: Replica) -> None:
        """Note that the replica of a log passed to `keep` takes part in its group from now on."""
        kept = self._by_group[replica.group]
        kept.replica = replica
        self._hold_back(kept)

    def forget(self, group: bytes) -> None:
        """Stop repairing a group's log: its replica was removed here, or the log is about to be replaced."""
        kept = self._by_group.pop(group, None)
        if kept is None:
            return
        del self._by_log[kept.log.log_id]
        if kept.task is not None:
            kept.task.cancel()
        kept.wake()

    def keeps(self, log: Log) -> bool:
        """Return whether this log's damage is being repaired: it was passed to `keep` and not forgotten."""
        return log.log_id in self._by_log

    def found(self, log: Log, damage: DamagedRange) -> None:
        """Begin to repair damage that a read or the scrubber found: the callback `Storage.on_damage`."""
        kept = self._by_log.get(log.log_id)
        if kept is not None:
            self._begin(kept)

    def gone(self) -> list[tuple[ReplicaEntry, Damage]]:
        """Return the damaged ranges that no other replica can repair, each with its log's manifest entry."""
        found = []
        for log_id in list(self._with_gone):
            kept = self._by_log.get(log_id)
            if kept is None or not kept.gone:
                del self._with_gone[log_id]
                continue
            found += [
                (kept.entry, damage) for damage in kept.log.quarantine if damage.first_index in kept.gone
            ]
        return found

    def is_gone(self, group: bytes, index: int) -> bool:
        """Return whether an entry is damaged here and all other nodes answered that they don't have it."""
        kept = self._by_group.get(group)
        damage = kept.log.quarantine.at(index) if kept is not None else None
        return kept is not None and damage is not None and damage.first_index in kept.gone

    def is_trimmed(self, group: bytes, index: int) -> bool:
        """Return whether an entry is damaged here and trimmed elsewhere, so it will soon be trimmed here."""
        kept = self._by_group.get(group)
        damage = kept.log.quarantine.at(index) if kept is not None else None
        return kept is not None and damage is not None and damage.first_index in kept.trimmed

    async def wait_for_progress(self, group: bytes) -> None:
        """Wait until the next attempt to repair a group's log is over; return at once if it has no damage."""
        kept = self._by_group.get(group)
        if kept is None or not kept.log.quarantine:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        kept.waiting.append(future)
        await future

    def statistics(self) -> dict[str, int]:
        """Return counters, and the number of entries that cannot be repaired."""
        return {
            "asked": self.asked,
            "answered": self.answered,
            "repaired": self.repaired,
            "refused": self.refused,
            "missing": self.missing,
            "gone": len(self.gone()),
        }

    # -- asking --------------------------------------------------------------------------------

    def _begin(self, kept: _Kept) -> None:
        self._hold_back(kept)
        if kept.task is None:
            kept.task = self._spawn(self._work(kept))

    @staticmethod
    def _hold_back(kept: _Kept) -> None:
        """Make a replica with damage delay its campaigns, so that others lead (docs/consensus.md#damage)."""
        if kept.replica is not None:
            kept.replica.core.defers_campaign = bool(kept.log.quarantine) or not kept.replica.machine.is_whole

    async def _work(self, kept: _Kept) -> None:
        """Ask for the damaged entries in rounds, with growing pauses, until the log has no damage."""
        pause_s = FIRST_PAUSE_S
        try:
            while kept.log.quarantine and kept.log.failure is None:
                before = self.repaired
                async with self._working:
                    await self._round(kept)
                self._hold_back(kept)
                kept.wake()
                if not kept.log.quarantine:
                    break
                pause_s = FIRST_PAUSE_S if self.repaired > before else min(2 * pause_s, LONGEST_PAUSE_S)
                await asyncio.sleep(pause_s * (0.5 + self._rng.random()))
        except StorageClosed:
            return
        finally:
            kept.task = None
        self._hold_back(kept)
        kept.wake()

    async def _round(self, kept: _Kept) -> None:
        """Ask all nodes once for the first entry of each damaged range; after a repair, for the next one."""
        index = 0
        while (damage := kept.damage_from(index)) is not None:
            healed = await self._repair_damage(kept, damage)
            index = (damage.first_index if healed else damage.last_index) + 1

    async def _repair_damage(self, kept: _Kept, damage: Damage) -> bool:
        """Ask the nodes for the first entry of a damaged range; return whether it is intact now."""
        log, index = kept.log, damage.first_index
        term = damage.term or await self._term_of(log, damage)
        assert self._cluster_id() is not None, "a replica of no cluster"
        ask = msgspec.msgpack.encode(EntryRequest(self._cluster_id() or b"", kept.entry.group, index, term))
        answers: dict[str, str] = {}
        nodes = self._nodes_of(kept.entry, kept.replica)
        for node in nodes:
            address = self._address_of(node, kept.entry)
            if address is None:
                continue
            self.asked += 1
            try:
                payload = await self._call(address, METHOD, ask, timeout=CALL_TIMEOUT_S)
                reply = _reply_decoder.decode(payload)
            except (TransportError, msgspec.DecodeError) as error:
                _log.debug("%s: %s is asked for entry %d: %s", log.name, node, index, error)
                continue
            if log.quarantine.at(index) is None:
                return True  # It was repaired or truncated meanwhile.
            if reply.status != HELD:
                self.missing += 1
                answers[node] = reply.status
                if reply.status == TRIMMED:
                    kept.trimmed.add(index)
            elif await self._put_back(kept, index, term, reply, node=node):
                return True
            elif log.failure is not None:
                return False
        if nodes and answers.keys() == set(nodes) and not {UNSURE, TRIMMED} & set(answers.values()):
            self._mark_gone(kept, damage, answers)
        else:
            kept.gone.pop(index, None)
        return False

    async def _put_back(self, kept: _Kept, index: int, term: int, reply: EntryReply, *, node: str) -> bool:
        """Put an entry back in its place; return whether it can be read from there now."""
        log = kept.log
        try:
            header = Header.unpack(reply.frame)
            if term and header.term != term:
                raise RepairRefused(f"entry {index} is of term {term}, but {node} sent one of {header.term}")
            if not term and not reply.committed:
                raise RepairRefused(f"entry {index} is not known to be committed at {node}")
            await log.repair(index, reply.frame)
            self.repaired += 1
            # Verify the entry, unless it was trimmed or truncated meanwhile.
            if log.first_index <= index <= log.last_index:
                await log.read(index, index, max_bytes=1)
        except (RepairRefused, BatchError) as error:
            self.refused += 1
            _log.warning("%s: the copy of entry %d that %s sent is refused: %s", log.name, index, node, error)
            return False
        except (DamagedRange, DiskError) as error:
            _log.error("%s: entry %d cannot be repaired on this disk: %s", log.name, index, error)
            if kept.replica is not None and kept.replica.core.is_leader:
                self._hand_over(kept.replica, node)
            return False
        except EntriesTrimmed:
            pass
        kept.gone.pop(index, None)
        return True

    @staticmethod
    async def _term_of(log: Log, damage: Damage) -> int:
        """Return the term of a damaged range's first entry, by the log or the next entry; 0 if unknown."""
        known = log.term(damage.first_index)
        if known or damage.first_index < damage.last_index or damage.last_index == log.last_index:
            return known or 0
        try:
            [frame] = await log.read(damage.last_index + 1, damage.last_index + 1, max_bytes=1)
        except StorageError:
            return 0
        return Header.unpack(frame).prev_term

    def _mark_gone(self, kept: _Kept, damage: Damage, answers: dict[str, str]) -> None:
        """Record that all nodes answered and none has the entry; log it the first time.

        The nodes are still asked for the entry in later rounds.
        """
        if damage.first_index in kept.gone:
            return
        said = ", ".join(f"{node}: {status}" for node, status in sorted(answers.items()))
        kept.gone[damage.first_index] = said
        self._with_gone[kept.log.log_id] = None
        _log.critical(
            "%s: no other replica has the damaged entries (%s): %s; reads of these fail, others are served",
            kept.log.name,
            said,
            damage.error(kept.log.files.directory),
        )

    # -- answering -----------------------------------------------------------------------------

    async def answer(self, peer: Peer, payload: bytes) -> bytes:
        """Answer the request of another process for an entry: an encoded `EntryReply`."""
        ask = _ask_decoder.decode(payload)
        kept = self._by_group.get(ask.group)
        if kept is None or ask.cluster != self._cluster_id():
            raise RemoteError("no_such_group", f"no replica of group {ask.group.hex()} answers here")
        self.answered += 1
        async with self._answering:
            return msgspec.msgpack.encode(await self._find_entry(kept, ask))

    @staticmethod
    async def _find_entry(kept: _Kept, ask: EntryRequest) -> EntryReply:
        log, index = kept.log, ask.index
        if index <= log.start.index:
            return EntryReply(TRIMMED)
        if index > log.last_index:
            return EntryReply(ABSENT)
        if log.quarantine.at(index) is not None:
            return EntryReply(DAMAGED)
        term, committed = log.term(index), index <= kept.committed_index
        if term is None:
            return EntryReply(DAMAGED)
        if ask.term and term != ask.term:
            return EntryReply(OTHER, committed)
        if not ask.term and not committed:
            return EntryReply(UNSURE)
        try:
            [frame] = await log.read(index, index, max_bytes=1)
        except EntriesTrimmed:
            return EntryReply(TRIMMED if index <= log.start.index else ABSENT)
        except StorageError:
            return EntryReply(DAMAGED)
        if term_of(frame) != term:
            return EntryReply(UNSURE)  # truncated and written again while it was read
        return EntryReply(HELD, committed, bytes(frame))
