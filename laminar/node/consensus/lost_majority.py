"""Release of groups whose replicas are recovering: they elect a leader once all replicas have answered.

A recovering replica may have lost entries that it acknowledged, so its vote does not count
(docs/consensus.md#recovering). After a power loss of the whole cluster a group with `flush=interval` can have
only such replicas, and so no leader. No single replica knows which members must be asked, because it may have
lost the configuration, too. So those asked are the members in the catalog, as its leader confirms, and the
members of every configuration that any of them knows. Each is asked twice: for its incarnation, and, when all
have answered, for the end of its log. If all answers agree and none of the replicas leads, each is sent the
latest of the log ends (`Core.release`), and its vote counts for candidates whose log reaches that end. If a
replica does not answer, the group waits for it, or until an operator decides.

Any process with a recovering replica does this for its own groups; several may do it at the same time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Protocol

import msgspec

from laminar.log.storage import Storage
from laminar.node.consensus.driver import Driver
from laminar.node.consensus.replica import Replica
from laminar.node.host.clock import Clock
from laminar.node.transport.transport import Address, Peer, TransportError
from raft.values import Role

_log = logging.getLogger("laminar.release")

ENDS = "log_ends"
RELEASE = "release"
CHECK_S = 1.0
ASK_TIMEOUT_S = 5.0
# Most groups that one `check` tries to release; the others come with the next one.
MOST_AT_ONCE = 1000

# Replica id to node.
Members = dict[int, str]


class LogEnd(msgspec.Struct, frozen=True, array_like=True):
    """The answer of a process about a group: its replica, and the end of that replica's log.

    `replica_id` is 0 if the process has no replica of the group, and knows this from an intact manifest.
    `members` maps the ids of the members that it knows to their nodes.
    """

    replica_id: int = 0
    incarnation: int = 0
    leading: bool = False
    last_term: int = 0
    last_index: int = 0
    members: Members = {}


class Floor(msgspec.Struct, frozen=True, array_like=True):
    """The request to release one incarnation of one replica, with the latest end of its group's logs."""

    group: bytes
    replica_id: int
    incarnation: int
    last_term: int
    last_index: int


class RecordedMembers(Protocol):
    """The members of a process's groups, as the catalog knows them."""

    def waiting(self) -> Iterable[Replica]:
        """Return the recovering replicas of this process whose groups may be released."""

    async def refresh(self) -> bool:
        """Fetch the present state of the catalog from its leader; return False if that fails now."""

    def recorded(self, replica: Replica) -> Members | None:
        """Return the members in the catalog that must answer, or None if they are not known.

        Members that the logs name must answer, too.
        """

    def complete(self, members: Members) -> bool:
        """Return whether `members` include every member that must be asked."""

    def unmade(self, replica: Replica, replica_id: int) -> bool:
        """Return whether the catalog has no record that member `replica_id` of the group was created."""

    def removed(self, replica: Replica, replica_id: int) -> bool:
        """Return whether the catalog knows that the removal of member `replica_id` is committed."""


_ends_decoder = msgspec.msgpack.Decoder(list[LogEnd | None])
_floors_decoder = msgspec.msgpack.Decoder(list[Floor])
_groups_decoder = msgspec.msgpack.Decoder(list[bytes])
_encoder = msgspec.msgpack.Encoder()

# By group and replica id.
_Ends = dict[bytes, dict[int, LogEnd]]


class Releases:
    """Releases the groups of one process, which runs on `node`, and answers the questions of others.

    `call(address, method, payload, timeout=...)` asks another process; `methods` are those that this process
    answers. `address_of(node, replica)` returns the address of the process on `node` that owns the replica's
    group.
    """

    def __init__(
        self,
        members: RecordedMembers,
        *,
        node: str,
        driver: Driver,
        storage: Storage,
        clock: Clock,
        election_timeout_ms: int,
        call: Callable[..., Awaitable[bytes]],
        address_of: Callable[[str, Replica], Address | None],
    ) -> None:
        self._recorded = members
        self._node = node
        self._driver = driver
        self._storage = storage
        self._clock = clock
        self._patience_ms = 2 * election_timeout_ms
        self._call = call
        self._address_of = address_of
        # By group, since when (ms) a recovering replica has had no leader.
        self._waiting_since_ms: dict[bytes, int] = {}
        self.released = 0
        self.methods = {ENDS: self._on_ends, RELEASE: self._on_release}

    def check(self) -> Coroutine[Any, Any, None] | None:
        """Return a coroutine that tries to release the groups that need it, for the caller to run.

        These are groups of recovering replicas that have had no leader for two election timeouts. Return None
        if there are none.
        """
        now_ms = self._clock.monotonic_ms()
        leaderless = [each for each in self._recorded.waiting() if is_leaderless(each)]
        since = self._waiting_since_ms
        self._waiting_since_ms = {each.group: since.get(each.group, now_ms) for each in leaderless}
        since = self._waiting_since_ms
        due = [each for each in leaderless if now_ms - since[each.group] >= self._patience_ms]
        return self._try(due[:MOST_AT_ONCE]) if due else None

    async def _try(self, replicas: list[Replica]) -> None:
        first = await self._ends(replicas)
        if not first or not await self._recorded.refresh():
            return
        # Each replica has answered with its incarnation, so it can lose no more entries by the power loss.
        # The members were read after that: they include those to which it acknowledged the lost entries.
        second = await self._ends([each for each in replicas if each.group in first])
        floors: dict[Address | None, list[Floor]] = {}
        for replica in replicas:
            ends = second.get(replica.group, {})
            if not ends or not agree(first[replica.group], ends):
                continue
            nodes = self._members(replica, ends)
            if not self._recorded.complete(nodes):
                continue
            last = max((end.last_term, end.last_index) for end in ends.values())
            _log.warning(
                "%s: no majority of replicas is sure to have all acknowledged entries, but all %d replicas "
                "have answered: the group continues with the latest of their logs, which ends with entry %d "
                "of term %d",
                replica.name,
                len(ends),
                *reversed(last),
            )
            self.released += 1
            # If this release fails, the next attempt comes after two more election timeouts.
            self._waiting_since_ms[replica.group] = self._clock.monotonic_ms()
            for end in ends.values():
                if end.replica_id:
                    address = self._remote(nodes[end.replica_id], replica)
                    floor = Floor(replica.group, end.replica_id, end.incarnation, *last)
                    floors.setdefault(address, []).append(floor)
        await asyncio.gather(*(self._send_floors(address, each) for address, each in floors.items()))

    def _members(self, replica: Replica, ends: dict[int, LogEnd]) -> Members:
        members = dict(self._recorded.recorded(replica) or {}) | members_of(replica)
        for end in ends.values():
            members |= end.members
        # Removed replicas need not answer: they may be deleted, or gone for good. A removal is reported to
        # the catalog only when it is committed, and it is synced before any later entry: so one of the other
        # members has its entry, and all before it.
        return {each: node for each, node in members.items() if not self._recorded.removed(replica, each)}

    def _remote(self, node: str, replica: Replica) -> Address | None:
        """Return the address of the process on `node` to ask; None for this process, or if unknown."""
        return None if node == self._node else self._address_of(node, replica)

    async def _ends(self, replicas: list[Replica]) -> _Ends:
        """Ask all members of these groups for the ends of their logs; return them by group and member.

        A group is left out if one of its members does not answer.
        """
        found: _Ends = {each.group: {} for each in replicas if self._recorded.recorded(each) is not None}
        while True:
            asked: dict[Address | None, list[tuple[Replica, int]]] = {}
            for replica in replicas:
                ends = found.get(replica.group)
                if ends is None:
                    continue
                for member, node in self._members(replica, ends).items():
                    if member in ends:
                        continue
                    address = self._remote(node, replica)
                    if address is None and node != self._node:
                        found.pop(replica.group, None)
                        break
                    asked.setdefault(address, []).append((replica, member))
            asked = {
                address: kept
                for address, pairs in asked.items()
                if (kept := [pair for pair in pairs if pair[0].group in found])
            }
            if not asked:
                return found
            answers = await asyncio.gather(
                *(
                    self._ask(address, [replica.group for replica, _ in pairs])
                    for address, pairs in asked.items()
                )
            )
            for pairs, reported in zip(asked.values(), answers, strict=True):
                for (replica, member), end in zip(pairs, reported, strict=True):
                    if end is not None and not self._counts(replica, member, end):
                        end = None
                    if end is None:
                        found.pop(replica.group, None)
                    elif replica.group in found:
                        found[replica.group][member] = end

    def _counts(self, replica: Replica, member: int, end: LogEnd) -> bool:
        return end.replica_id == member or (end.replica_id == 0 and self._recorded.unmade(replica, member))

    async def _ask(self, address: Address | None, groups: list[bytes]) -> list[LogEnd | None]:
        if address is None:
            return [self._end(group) for group in groups]
        nothing: list[LogEnd | None] = [None] * len(groups)
        try:
            payload = await self._call(address, ENDS, _encoder.encode(groups), timeout=ASK_TIMEOUT_S)
            ends = _ends_decoder.decode(payload)
        except (TransportError, msgspec.DecodeError) as error:
            _log.debug(
                "%s does not answer where its logs end; its groups are not released: %s", address, error
            )
            return nothing
        return ends if len(ends) == len(groups) else nothing

    async def _send_floors(self, address: Address | None, floors: list[Floor]) -> None:
        if address is None:
            self._release(floors)
            return
        try:
            await self._call(address, RELEASE, _encoder.encode(floors), timeout=ASK_TIMEOUT_S)
        except TransportError as error:
            _log.debug("the release of replicas was not sent to %s: %s", address, error)

    # -- answering ---------------------------------------------------------------------

    async def _on_ends(self, peer: Peer, payload: bytes) -> bytes:
        return _encoder.encode([self._end(group) for group in _groups_decoder.decode(payload)])

    async def _on_release(self, peer: Peer, payload: bytes) -> bytes:
        self._release(_floors_decoder.decode(payload))
        return b""

    def _end(self, group: bytes) -> LogEnd | None:
        """Return the log end of this process's replica of a group; None while it can't answer."""
        driver = self._driver
        replica = driver.replicas.get(group)
        if replica is None:
            manifest = self._storage.manifest
            held = manifest.of_group(group) is not None
            # A process that has lost its manifest does not know what was promised here.
            return None if held or not manifest.known else LogEnd()
        core = replica.core
        return LogEnd(
            replica_id=replica.replica_id,
            incarnation=core.incarnation,
            leading=core.role is Role.LEADER,
            last_term=core.last_term,
            last_index=core.last_index,
            members=members_of(replica) | (self._recorded.recorded(replica) or {}),
        )

    def _release(self, floors: list[Floor]) -> None:
        driver = self._driver
        for floor in floors:
            replica = driver.replicas.get(floor.group)
            if replica is None or replica.replica_id != floor.replica_id:
                continue
            driver.release(
                replica,
                incarnation=floor.incarnation,
                last_term=floor.last_term,
                last_index=floor.last_index,
            )


def is_leaderless(replica: Replica) -> bool:
    """Return whether this replica is recovering and knows of no leader."""
    core = replica.core
    return core.recovering and core.role is not Role.LEADER and not core.leader_id


def members_of(replica: Replica) -> Members:
    """Return the members of this group, with their nodes, in any configuration in the replica's own log."""
    return {
        member: replica.nodes[member] for member in replica.core.possible_members if member in replica.nodes
    }


def agree(first: dict[int, LogEnd], second: dict[int, LogEnd]) -> bool:
    """Return whether the same replicas answered twice, in the same incarnations, and none of them leads."""
    return first.keys() == second.keys() and all(
        not end.leading
        and (end.replica_id, end.incarnation) == (first[member].replica_id, first[member].incarnation)
        for member, end in second.items()
    )
