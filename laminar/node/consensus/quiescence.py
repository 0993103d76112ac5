"""Quiet groups, and the processes that they rest on.

A group that has nothing to do has neither timers nor messages (`raft.rest`). What stands for all its
heartbeats is one *beat* between two processes that share quiet groups, in both directions, five times a
second. It says that a certain life of a process goes on, by the boot nonce with which its connection was
greeted; so a group rests only on a process in the life in which it agreed. This module holds what is known of
each such process, and wakes the groups that rest on it when it is silent, gone, or has begun a new life.

A beat says nothing of a single group, so each follower asks about each of its quiet groups once a minute:
whether the one it takes for the leader is that still, and as quiet. The question travels in the beats.

News of a process may concern thousands of groups. They are told in portions, a turn of the loop each, those
first that somebody waits for or asks about; and where they stand for election, they do so over a time that
grows with their number, so that pre-votes and votes travel and are synced many at a time and few collide.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from laminar.node.consensus.raft_wire import PLAIN_BEAT, Beat
from laminar.node.consensus.replica import Replica
from laminar.node.host.clock import Clock
from laminar.node.transport.transport import Address, Peer
from raft.values import Role

# Each follower of a quiet group asks once in so long.
AUDIT_MS = 60_000
# So many groups are told of news in one turn of the loop.
MOST_AT_ONCE = 256
# What an election costs the loops of those who take part, about; elections are spread accordingly.
ELECTION_COST_MS = 1


class Pair:
    """What this process knows of one other with which it shares groups."""

    __slots__ = ("_credit", "_round", "address", "heard_ms", "is_up", "node", "nonce", "resting", "role")

    def __init__(self, peer: Peer, *, heard_ms: int) -> None:
        self.node = peer.node
        self.role = peer.role
        # Of the life that was heard last.
        self.nonce = peer.nonce
        self.heard_ms = heard_ms
        # Whether it is connected with us, as far as there is news.
        self.is_up = False
        self.address: Address | None = None
        # Quiet groups that rest on it, by group id.
        self.resting: dict[bytes, Replica] = {}
        # Groups still to be asked about in this round of the audit, and how many are due.
        self._round: list[Replica] = []
        self._credit = 0.0

    def __repr__(self) -> str:
        return f"<Pair {self.node}/{self.role} {len(self.resting)} resting>"

    def questions(self, *, interval_ms: int) -> list[tuple[bytes, int]]:
        """What to ask in this beat: each group that follows somebody there, once in `AUDIT_MS`."""
        asks: list[tuple[bytes, int]] = []
        self._credit += len(self.resting) * interval_ms / AUDIT_MS
        while self._credit >= 1:
            self._credit -= 1
            if not self._round:
                self._round = list(self.resting.values())
            replica = self._round.pop()
            if replica.group in self.resting and replica.core.role is Role.FOLLOWER:
                asks.append((replica.group, replica.core.term))
        return asks


class Pairs:
    """All of a process. `settle(replica)` is called after each input that is given to a core here, and
    `on_failed(replica, error)` when the core raised.

    `address_of(node, replica)` and `address_of_peer(peer)` give addresses, or None while they aren't known.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        replicas: Mapping[bytes, Replica],
        election_timeout_ms: int,
        heartbeat_ms: int,
        address_of: Callable[[str, Replica], Address | None],
        address_of_peer: Callable[[Peer], Address | None],
        send: Callable[[Address, Beat], None],
        settle: Callable[[Replica], None],
        on_failed: Callable[[Replica, Exception], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._clock = clock
        self._replicas = replicas
        self._silence_ms = election_timeout_ms
        self._heartbeat_ms = heartbeat_ms
        self._address_of = address_of
        self._address_of_peer = address_of_peer
        self._send = send
        self._settle = settle
        self._on_failed = on_failed
        self._on_error = on_error
        self._loop = asyncio.get_running_loop()
        self._pairs: dict[tuple[str, int], Pair] = {}
        # Groups led here that rest without a member; where they would find it, and how many of them.
        self._seekers: dict[bytes, Replica] = {}
        self._sought: Counter[Address] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._due_ms = 0
        self._next_grace_ms = 0
        # Groups that are still to be told: which of their members are gone.
        self._news: dict[bytes, list[int]] = {}
        self._spread_ms = 0
        self._telling = False
        self._closed = False
        self.quiet_groups = 0
        self.woken = 0
        self.beats = 0

    def close(self) -> None:
        """No more beats, no more news."""
        self._closed = True
        self._news.clear()
        if self._timer is not None:
            self._timer.cancel()

    # -- falling quiet ---------------------------------------------------------------------

    def offer(self, replica: Replica) -> None:
        """A leader has nothing to do: let it ask the others to rest, but for those whose node is gone.

        One that is connected and doesn't answer may need what only a leader that is awake tells it. One that
        is gone may not be able to reach us when it is back, as it may have forgotten where we live: so the
        beats go there too, and when a connection stands again, the groups that rest without it are woken.
        """
        up = {pair.node for pair in self._pairs.values() if pair.is_up}
        absent = [
            member
            for member in replica.configuration.members()
            if member != replica.replica_id and replica.nodes[member] not in up
        ]
        replica.core.offer_rest(absent=absent)

    def settled(self, replica: Replica) -> None:
        """Its core has dealt with an input: it may have fallen quiet by it, or have been woken."""
        if not replica.core.quiet:
            if replica.resting is not None:
                self._get_up(replica)
        elif replica.resting is None:
            self.quiet_groups += 1
            self._lie_down(replica)

    def _lie_down(self, replica: Replica) -> None:
        replica.resting = [replica.pairs[member] for member in replica.core.rests_on]
        for member, pair in zip(replica.core.rests_on, replica.resting, strict=True):
            pair.address = self._address_of(replica.nodes[member], replica)
            pair.resting[replica.group] = replica
        if replica.core.role is Role.LEADER:
            self._seek_absent(replica)
        if replica.resting or replica.sought:
            self._arm()

    def _seek_absent(self, replica: Replica) -> None:
        known = {replica.replica_id, *replica.core.rests_on}
        absent = [member for member in replica.configuration.members() if member not in known]
        if not absent:
            return
        self._seekers[replica.group] = replica
        addresses = (self._address_of(replica.nodes[member], replica) for member in absent)
        replica.sought = [address for address in addresses if address is not None]
        self._sought.update(replica.sought)

    def addresses_changed(self) -> None:
        """Who is away may come back elsewhere: a learner there waits for a leader that finds it."""
        for replica in list(self._seekers.values()):
            self._seek_no_more(replica)
            self._seek_absent(replica)
        if self._sought:
            self._arm()

    def _seek_no_more(self, replica: Replica) -> None:
        if self._seekers.pop(replica.group, None) is None:
            return
        for address in replica.sought:
            self._sought[address] -= 1
            if not self._sought[address]:
                del self._sought[address]
        replica.sought = ()

    def removed(self, replica: Replica) -> None:
        """It is driven no more. Those who rest on it hear our beats as before, so they are told."""
        self._news.pop(replica.group, None)
        if replica.resting is not None:
            if replica.core.role is Role.LEADER:
                for pair in replica.resting:
                    if pair.address is not None:
                        self._send(pair.address, Beat([], [replica.group]))
            self._get_up(replica)

    def _get_up(self, replica: Replica) -> None:
        self._leave_pairs(replica)
        self.quiet_groups -= 1
        self.woken += 1

    def _leave_pairs(self, replica: Replica) -> None:
        for pair in replica.resting or ():
            del pair.resting[replica.group]
        replica.resting = None
        self._seek_no_more(replica)

    # -- signs of life ---------------------------------------------------------------------

    def hears(self, replica: Replica, member: int) -> bool:
        """Whether the process of a member is connected, and was heard within an election timeout."""
        pair = replica.pairs.get(member)
        return (
            pair is not None
            and pair.is_up
            and self._clock.monotonic_ms() - pair.heard_ms <= self._silence_ms + self._heartbeat_ms
        )

    def heard(self, peer: Peer, *, now_ms: int) -> Pair:
        """Something came from a process, in this life of it."""
        key = (peer.node, peer.role)
        pair = self._pairs.get(key)
        if pair is None:
            pair = self._pairs[key] = Pair(peer, heard_ms=now_ms)
        elif pair.nonce != peer.nonce:
            pair.nonce = peer.nonce
            self._tell_all(
                (replica, [member for member, its in replica.pairs.items() if its is pair])
                for replica in self._replicas.values()
            )
        pair.heard_ms = now_ms
        if not pair.is_up:
            self._came_up(pair)
        return pair

    def _came_up(self, pair: Pair) -> None:
        """It was gone until now: groups that rest without its node have somebody to bring up."""
        pair.is_up = True
        self._tell_all(
            (replica, [member for member, node in replica.nodes.items() if node == pair.node])
            for replica in self._replicas.values()
            if replica.core.role is Role.LEADER
            and replica.resting is not None
            and pair not in replica.resting
        )

    def up(self, peer: Peer) -> None:
        """A connection with it stands."""
        self.heard(peer, now_ms=self._clock.monotonic_ms())

    def lost(self, address: Address, peer: Peer | None) -> None:
        """News: the process at an address is gone, or can't be reached."""
        if peer is not None:
            pair = self._pairs.get((peer.node, peer.role))
            if pair is not None and pair.nonce == peer.nonce:
                pair.is_up = False
        self._tell_all(
            (replica, members)
            for replica in self._replicas.values()
            if (members := self._members_at(address, replica)) and not self._rests_without(replica, members)
        )

    def _rests_without(self, replica: Replica, members: list[int]) -> bool:
        """Whether a quiet leader just rests on, on the others: thousands need not wake to agree on that.

        Only without those whose coming back is news, by which it is woken.
        """
        if replica.resting is None or replica.core.role is not Role.LEADER:
            return False
        pairs = (replica.pairs.get(member) for member in members)
        if any(pair is None or pair.is_up for pair in pairs) or not replica.core.rest_without(members):
            return False
        self._leave_pairs(replica)
        self._lie_down(replica)
        return True

    def _members_at(self, address: Address, replica: Replica) -> list[int]:
        members = [
            member
            for member, node in replica.nodes.items()
            if member != replica.replica_id and self._address_of(node, replica) == address
        ]
        if replica.resting is not None and replica.core.role is Role.LEADER:
            # Those that it rests without were gone before: that a beat did not reach them is no news.
            return [member for member in members if member in replica.core.rests_on]
        return members

    def postpone(self, *, by_ms: int) -> None:
        """This loop stood still: the silence was ours. One that is always late is busy, and hears the others
        all the same: so it is forgiven once in an election timeout.
        """
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._next_grace_ms:
            return
        self._next_grace_ms = now_ms + self._silence_ms
        for pair in self._pairs.values():
            pair.heard_ms += by_ms

    # -- beats -----------------------------------------------------------------------------

    def _arm(self) -> None:
        if self._timer is None and not self._closed:
            # On the leaders' grid (`raft.leadership`), so that a beat leaves with the heartbeats.
            now_ms = self._clock.monotonic_ms()
            self._due_ms = now_ms - now_ms % self._heartbeat_ms + self._heartbeat_ms
            self._timer = self._loop.call_later((self._due_ms - now_ms) / 1000, self._beat)

    def _beat(self) -> None:
        self._timer = None
        try:
            now_ms = self._clock.monotonic_ms()
            if now_ms - self._due_ms > self._heartbeat_ms // 2:
                self.postpone(by_ms=now_ms - self._due_ms + self._heartbeat_ms)
            rested_on = [pair for pair in self._pairs.values() if pair.resting]
            for pair in rested_on:
                if now_ms - pair.heard_ms >= self._silence_ms:
                    self._tell_all(
                        (replica, [member for member, its in replica.pairs.items() if its is pair])
                        for replica in list(pair.resting.values())
                    )
                elif pair.address is not None:
                    self.beats += 1
                    asks = pair.questions(interval_ms=self._heartbeat_ms)
                    self._send(pair.address, Beat(asks) if asks else PLAIN_BEAT)
            for address in self._sought:
                self._send(address, PLAIN_BEAT)
            if rested_on or self._sought:
                self._arm()
        except Exception as error:  # noqa: BLE001  # the owner ends the process
            self._on_error(error)

    def take_beat(self, peer: Peer, beat: Beat, *, now_ms: int) -> None:
        """A beat came: answer what it asks, and believe what it answers."""
        pair = self.heard(peer, now_ms=now_ms)
        if beat is PLAIN_BEAT:
            return
        wakes = [group for group, term in beat.asks if not self._leads_quietly(group, term)]
        address = pair.address or (self._address_of_peer(peer) if wakes else None)
        if wakes and address is not None:
            self._send(address, Beat([], wakes))
        found = [pair.resting[group] for group in beat.wakes if group in pair.resting]
        self._tell_all(
            (replica, [replica.core.leader_id]) for replica in found if replica.core.role is Role.FOLLOWER
        )

    def _leads_quietly(self, group: bytes, term: int) -> bool:
        replica = self._replicas.get(group)
        return (
            replica is not None
            and replica.core.role is Role.LEADER
            and replica.core.quiet
            and replica.core.term == term
        )

    # -- waking ----------------------------------------------------------------------------

    def _tell_all(self, gone: Iterable[tuple[Replica, list[int]]]) -> None:
        """Tell each of these groups that these members of it are gone."""
        elections = 0
        for replica, members in gone:
            if not members:
                continue
            if replica.core.leader_id in members:
                elections += 1
            elif replica.core.role is not Role.LEADER:
                continue
            known = self._news.setdefault(replica.group, members)
            if known is not members:
                known.extend(members)
        self._spread_ms = max(self._spread_ms, elections * ELECTION_COST_MS)
        if self._news and not self._telling:
            self._tell_some()

    def _tell_some(self) -> None:
        self._telling = False
        try:
            for group in list(self._news)[:MOST_AT_ONCE]:
                self._tell(group, spread_ms=self._spread_ms)
        except Exception as error:  # noqa: BLE001  # the owner ends the process
            self._on_error(error)
        if self._news and not self._closed:
            self._telling = True
            self._loop.call_soon(self._tell_some)
        else:
            self._spread_ms = 0

    def _tell(self, group: bytes, *, spread_ms: int) -> None:
        members = self._news.pop(group)
        replica = self._replicas.get(group)
        if replica is None:
            return
        core = replica.core
        now_ms = self._clock.monotonic_ms()
        try:
            if core.role is Role.LEADER:
                core.wake(now_ms=now_ms)
                for member in members:
                    core.unreachable(member)
            elif core.leader_id in members:
                core.suspect_leader(now_ms=now_ms, spread_ms=spread_ms)
        except Exception as error:  # noqa: BLE001  # stops this replica
            self._on_failed(replica, error)
        else:
            self._settle(replica)

    def tell_first(self, replica: Replica) -> None:
        """If there is news for this group it hears it now: another member asks it for something."""
        if self._news and replica.group in self._news:
            self._tell(replica.group, spread_ms=self._spread_ms)

    def wanted(self, replica: Replica) -> None:
        """Somebody waits for a group that is not led: let it be among the first to find a leader."""
        self.tell_first(replica)
        replica.core.expedite_election(now_ms=self._clock.monotonic_ms())
        self._settle(replica)
