"""Repair of damaged entries: they are fetched from other replicas of their group and put back in their place.

Each process has one `PeerRepair`, shards and controller alike. When a storage reports damage, the nodes that
hold the group are asked in turn for the entry, the leader's node first. A node gives only bytes that it has
just verified, and only an entry that has the wanted (index, term) or is committed there: either of these
identifies one entry of the group for ever. Before the bytes are put back, their checksums, the chain to both
neighbours, offsets and size are checked again (`laminar.log.integrity.damage_registry`). All other entries
are served meanwhile. This module knows nothing of topics; its callers tell it where the other replicas are.
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

# What a node says of an entry. HELD: here it is. DAMAGED: its bytes are gone here too. ABSENT: it is not in
# the log yet. TRIMMED: the log begins after it by now, and that is committed. OTHER: there is one of another
# term in its place. UNSURE: ask again, it may be committed soon.
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
    """A replica's copy of the entry; `committed`: it is known to be committed."""

    status: str
    committed: bool = False
    frame: bytes = b""


_ask_decoder = msgspec.msgpack.Decoder(EntryRequest)
_reply_decoder = msgspec.msgpack.Decoder(EntryReply)


@dataclass(slots=True, eq=False)
class _Kept:
    """One replica's log, driven or not yet."""

    entry: ReplicaEntry
    log: Log
    replica: Replica | None = None
    task: asyncio.Task[None] | None = None
    # Damage that no other replica can repair, by its first entry, with their answers; it is logged once.
    gone: dict[int, str] = field(default_factory=dict)
    # Damage that is trimmed elsewhere, by its first entry.
    trimmed: set[int] = field(default_factory=set)
    waiting: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def committed_index(self) -> int:
        """Up to here its entries are known to be committed."""
        return self.replica.core.committed_index if self.replica is not None else self.log.start.index

    def damage_from(self, index: int) -> Damage | None:
        """Return the first damage that includes an entry at or after `index`; None if there is none."""
        return next((each for each in self.log.quarantine if each.last_index >= index), None)

    def wake(self) -> None:
        """Wake everything that waits for progress of this log."""
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


class PeerRepair:
    """The repairs of one process.

    Call `keep` for a log before it is read, and `attach_replica` when its replica exists.
    `nodes_of(entry, replica)` names the nodes that may hold the group, in the order in which to ask them;
    `address_of(node, entry)` says where, or None. `hand_over(replica, node)` lets another node lead.
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
        """Repair a log's damage from now on, and answer other replicas from it.

        If it replaces another log of the group, entries that only that one lacked are not asked for any more.
        """
        self.forget(entry.group)
        kept = _Kept(entry, log)
        self._by_group[entry.group] = self._by_log[log.log_id] = kept
        if log.quarantine:
            self._begin(kept)

    def attach_replica(self, replica: Replica) -> None:
        """Note that the replica of a kept log takes part in its group from now on."""
        kept = self._by_group[replica.group]
        kept.replica = replica
        self._hold_back(kept)

    def forget(self, group: bytes) -> None:
        """Stop repairing a group that is no longer held here, or whose log is about to be replaced."""
        kept = self._by_group.pop(group, None)
        if kept is None:
            return
        del self._by_log[kept.log.log_id]
        if kept.task is not None:
            kept.task.cancel()
        kept.wake()

    def keeps(self, log: Log) -> bool:
        """Return whether this log's damage is repaired: until its replica is removed, or its log replaced."""
        return log.log_id in self._by_log

    def found(self, log: Log, damage: DamagedRange) -> None:
        """Begin to repair damage that a read or the scrubber found: for `Storage.on_damage`."""
        kept = self._by_log.get(log.log_id)
        if kept is not None:
            self._begin(kept)

    def gone(self) -> list[tuple[ReplicaEntry, Damage]]:
        """Return the damage here that no other replica can repair."""
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
        """Return whether an entry is damaged here, and every other voter has said that it doesn't have it."""
        kept = self._by_group.get(group)
        damage = kept.log.quarantine.at(index) if kept is not None else None
        return kept is not None and damage is not None and damage.first_index in kept.gone

    def is_trimmed(self, group: bytes, index: int) -> bool:
        """Return whether an entry is damaged here and trimmed elsewhere, so soon here too."""
        kept = self._by_group.get(group)
        damage = kept.log.quarantine.at(index) if kept is not None else None
        return kept is not None and damage is not None and damage.first_index in kept.trimmed

    async def wait_for_progress(self, group: bytes) -> None:
        """Wait until it is worth checking again what is damaged in a group's log."""
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
        """Let other voters lead before a damaged replica (docs/consensus.md#damage)."""
        if kept.replica is not None:
            kept.replica.core.defers_campaign = bool(kept.log.quarantine) or not kept.replica.machine.is_whole

    async def _work(self, kept: _Kept) -> None:
        """Ask for damaged entries round after round, ever more slowly, until all is whole."""
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
        """Ask every node once for each damage's first entry, and for its next one when that was repaired."""
        index = 0
        while (damage := kept.damage_from(index)) is not None:
            healed = await self._repair_damage(kept, damage)
            index = (damage.first_index if healed else damage.last_index) + 1

    async def _repair_damage(self, kept: _Kept, damage: Damage) -> bool:
        """Ask for the first entry of a damage; return whether it is whole now."""
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
                return True  # whole again, or cut, meanwhile
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
                raise RepairRefused(f"entry {index} is of term {term}, what {node} gave is of {header.term}")
            if not term and not reply.committed:
                raise RepairRefused(f"entry {index} is not known to be committed at {node}")
            await log.repair(index, reply.frame)
            self.repaired += 1
            # Meanwhile the log may begin after it, or end before it.
            if log.first_index <= index <= log.last_index:
                await log.read(index, index, max_bytes=1)
        except (RepairRefused, BatchError) as error:
            self.refused += 1
            _log.warning("%s: what %s has of entry %d is not taken: %s", log.name, node, index, error)
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
        """Return the term of a damage's first entry if the log or the entry after it tells it; else 0."""
        known = log.term(damage.first_index)
        if known or damage.first_index < damage.last_index or damage.last_index == log.last_index:
            return known or 0
        try:
            [frame] = await log.read(damage.last_index + 1, damage.last_index + 1, max_bytes=1)
        except StorageError:
            return 0
        return Header.unpack(frame).prev_term

    def _mark_gone(self, kept: _Kept, damage: Damage, answers: dict[str, str]) -> None:
        """Record and log, once, that all nodes answered and none has the entry.

        They are still asked for it in later rounds.
        """
        if damage.first_index in kept.gone:
            return
        said = ", ".join(f"{node}: {status}" for node, status in sorted(answers.items()))
        kept.gone[damage.first_index] = said
        self._with_gone[kept.log.log_id] = None
        _log.critical(
            "%s: no other replica has what is damaged here (%s): %s; this is refused, all else is served",
            kept.log.name,
            said,
            damage.error(kept.log.files.directory),
        )

    # -- answering -----------------------------------------------------------------------------

    async def answer(self, peer: Peer, payload: bytes) -> bytes:
        """Answer another replica that asks for an entry."""
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
