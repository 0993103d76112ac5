"""Quiescence: idle Raft groups stop their heartbeats; one keepalive per pair of processes replaces them all.

A group that has nothing to do has neither timers nor messages (`raft.quiescence`). Instead of its heartbeats,
processes that share quiesced groups send each other a *keepalive* once in a heartbeat interval. It says that
the sender still runs in the same incarnation, which is known from the nonce in the handshake of its
connection. A group stays quiesced only while the processes that agreed to quiesce run in the same
incarnation. This module keeps the state of each such process, and says which groups must be notified that a
process is silent, gone, or restarted.

A keepalive says nothing about a single group. So each follower audits each of its quiesced groups once in
`AUDIT_MS`: in a keepalive it asks whether the replica that it believes to be the leader still leads,
quiesced, in the same term.

The loss or return of one process may concern thousands of groups. Their notices are delivered in portions,
one in each loop turn; groups for which a request or a message waits come first. Where groups must elect, the
campaigns are spread over a time that grows with their number. In this way many votes share a frame and a
sync, and few campaigns collide.

This module plans, and performs nothing: it has no timer, sends no message, and gives a core no input but
`quiesce_without`. The driver and `keepalives` ask it which actions are due, and perform them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from laminar.node.consensus.awake import Awake
from laminar.node.consensus.raft_wire import PLAIN_KEEPALIVE, Keepalive
from laminar.node.consensus.replica import Replica
from laminar.node.transport.transport import Address, Peer
from raft.values import Role

# Each follower of a quiesced group asks about it once in this time.
AUDIT_MS = 60_000
# About how long (ms) an election keeps the loops that take part busy; elections are spread accordingly.
ELECTION_COST_MS = 1


class PeerLiveness:
    """Another process with which this one shares groups: its last sign of life, and the shared groups."""

    __slots__ = (
        "_credit",
        "_round",
        "address",
        "contact_ms",
        "is_up",
        "members",
        "node",
        "nonce",
        "quiesced_groups",
        "role",
    )

    def __init__(self, peer: Peer, *, contact_ms: int) -> None:
        self.node = peer.node
        self.role = peer.role
        # The nonce of the incarnation that sent its last message.
        self.nonce = peer.nonce
        self.contact_ms = contact_ms
        # Whether it is connected with us, as far as is known.
        self.is_up = False
        self.address: Address | None = None
        # The members of each group whose last messages came from it.
        self.members: dict[Replica, list[int]] = {}
        # By group id, quiesced groups that depend on its signs of life.
        self.quiesced_groups: dict[bytes, Replica] = {}
        # Groups that are still to be asked about in this round of the audit, and how many of them are due.
        self._round: list[Replica] = []
        self._credit = 0.0

    def __repr__(self) -> str:
        return f"<PeerLiveness {self.node}/{self.role} {len(self.quiesced_groups)} quiesced>"

    def forget(self, replica: Replica, member: int) -> None:
        """Forget a group's member whose messages come from another process now."""
        self.members[replica].remove(member)
        if not self.members[replica]:
            del self.members[replica]

    def audit_batch(self, *, interval_ms: int) -> list[tuple[bytes, int]]:
        """Return each (group, term) to ask about in the next keepalive; a group is due once in `AUDIT_MS`."""
        asks: list[tuple[bytes, int]] = []
        self._credit += len(self.quiesced_groups) * interval_ms / AUDIT_MS
        while self._credit >= 1:
            self._credit -= 1
            if not self._round:
                self._round = list(self.quiesced_groups.values())
            replica = self._round.pop()
            if replica.group in self.quiesced_groups and replica.core.role is Role.FOLLOWER:
                asks.append((replica.group, replica.core.term))
        return asks


class Notice(NamedTuple):
    """A notice to a replica that members of its group are gone, restarted or back.

    If the leader is gone, followers campaign at a random time within `spread_ms`.
    """

    replica: Replica
    members: list[int]
    spread_ms: int


class Quiescence:
    """The quiesced groups of one process, and the processes that they depend on.

    `replicas` are those that the process runs. `address_of(node, replica)` and `address_of_peer(peer)` return
    addresses, or None while these are unknown. Some calls produce notices for groups; `notices` has those
    that are not delivered yet.
    """

    def __init__(
        self,
        *,
        replicas: Mapping[bytes, Replica],
        election_timeout_ms: int,
        heartbeat_ms: int,
        address_of: Callable[[str, Replica], Address | None],
        address_of_peer: Callable[[Peer], Address | None],
    ) -> None:
        self._replicas = replicas
        self.awake = Awake()
        self._silence_ms = election_timeout_ms
        self._heartbeat_ms = heartbeat_ms
        self._address_of = address_of
        self._address_of_peer = address_of_peer
        self._peers: dict[tuple[str, int], PeerLiveness] = {}
        # By group and member, the process from which the member's last message came.
        self._members: dict[Replica, dict[int, PeerLiveness]] = {}
        # The quiesced replicas, and the processes that each depends on.
        self._quiesced: dict[Replica, Sequence[PeerLiveness]] = {}
        # Leaders that quiesced without absent members: the addresses at which these would be, which get
        # keepalives, and by address how many leaders seek a member there.
        self._sought_by: dict[Replica, Sequence[Address]] = {}
        self._sought: Counter[Address] = Counter()
        self._next_grace_ms = 0
        # By group, the members about which the group is still to be notified.
        self.notices: dict[bytes, list[int]] = {}
        self._spread_ms = 0
        self.unquiesced = 0
        self.keepalives_sent = 0

    @property
    def quiesced_group_count(self) -> int:
        """The number of groups that are quiesced here."""
        return len(self._quiesced)

    # -- quiescing -------------------------------------------------------------------------

    def absent(self, replica: Replica) -> list[int]:
        """Return the members whose nodes are gone, so that their group may quiesce without asking them.

        A member that is connected and doesn't answer is not included: it may need something that only an
        awake leader sends. A node that is gone may not know our address when it is up again. So keepalives
        are sent to it, too, and once it is connected, the groups that quiesced without it are woken.
        """
        up = {peer.node for peer in self._peers.values() if peer.is_up}
        return [
            member
            for member in replica.configuration.members()
            if member != replica.replica_id and replica.nodes[member] not in up
        ]

    def is_quiesced(self, replica: Replica) -> bool:
        """Return whether a replica was quiesced after its last input."""
        return replica in self._quiesced

    def processed(self, replica: Replica) -> bool:
        """Note that a core has processed an input; return whether its group has quiesced by this input."""
        if not replica.core.quiesced:
            if replica in self._quiesced:
                self._unquiesce(replica)
            return False
        if replica in self._quiesced:
            return False
        self._quiesce(replica)
        if replica.core.role is Role.LEADER:
            self._wake_for_returned(replica)
        return True

    def _quiesce(self, replica: Replica) -> None:
        members = self._members.get(replica, {})
        peers = self._quiesced[replica] = [members[member] for member in replica.core.quiesce_peers]
        for member, peer in zip(replica.core.quiesce_peers, peers, strict=True):
            peer.address = self._address_of(replica.nodes[member], replica)
            peer.quiesced_groups[replica.group] = replica
        if replica.core.role is Role.LEADER:
            self._seek_absent(replica)

    def _wake_for_returned(self, replica: Replica) -> None:
        """Wake a group that quiesced just now without a member whose node has come up meanwhile.

        `_came_up` wakes only groups that are quiesced. This one was not yet, as its members were still being
        asked when the node came up.
        """
        known = {replica.replica_id, *replica.core.quiesce_peers}
        up = {peer.node for peer in self._peers.values() if peer.is_up}
        back = [
            member
            for member in replica.configuration.members()
            if member not in known and replica.nodes[member] in up
        ]
        self._add_notices([(replica, back)])

    def _seek_absent(self, replica: Replica) -> None:
        known = {replica.replica_id, *replica.core.quiesce_peers}
        absent = [member for member in replica.configuration.members() if member not in known]
        if not absent:
            return
        addresses = (self._address_of(replica.nodes[member], replica) for member in absent)
        sought = self._sought_by[replica] = [address for address in addresses if address is not None]
        self._sought.update(sought)

    def _stop_seeking(self, replica: Replica) -> None:
        for address in self._sought_by.pop(replica, ()):
            self._sought[address] -= 1
            if not self._sought[address]:
                del self._sought[address]

    def addresses_changed(self) -> None:
        """Send keepalives for absent members to their present addresses, where a learner may wait for us."""
        for replica in list(self._sought_by):
            self._stop_seeking(replica)
            self._seek_absent(replica)

    def removed(self, replica: Replica) -> list[tuple[Address, Keepalive]]:
        """Forget a replica that is not run any more; return farewells (address, keepalive) to send.

        The other members of a quiesced group still receive this process's keepalives. So if this replica
        led the group, a farewell notifies their processes that it does not lead any more.
        """
        self.notices.pop(replica.group, None)
        self.awake.woken(replica.group)
        farewell = []
        if replica in self._quiesced:
            if replica.core.role is Role.LEADER:
                addresses = [peer.address for peer in self._quiesced[replica]]
                farewell = [(each, Keepalive([], [replica.group])) for each in addresses if each is not None]
            self._unquiesce(replica)
        for peer in set(self._members.pop(replica, {}).values()):
            del peer.members[replica]
        return farewell

    def _unquiesce(self, replica: Replica) -> None:
        self._leave_peers(replica)
        self.unquiesced += 1
        self.awake.woken(replica.group)

    def _leave_peers(self, replica: Replica) -> None:
        for peer in self._quiesced.pop(replica):
            del peer.quiesced_groups[replica.group]
        self._stop_seeking(replica)

    # -- signs of life ---------------------------------------------------------------------

    def is_active(self, replica: Replica, member: int, *, now_ms: int) -> bool:
        """Return whether a member's process is connected and was heard from within an election timeout."""
        peer = self._members.get(replica, {}).get(member)
        return (
            peer is not None
            and peer.is_up
            and now_ms - peer.contact_ms <= self._silence_ms + self._heartbeat_ms
        )

    def contact(self, peer: Peer, *, now_ms: int) -> PeerLiveness:
        """Note that a process, in this incarnation, was heard from; return its state. May produce notices."""
        key = (peer.node, peer.role)
        liveness = self._peers.get(key)
        if liveness is None:
            liveness = self._peers[key] = PeerLiveness(peer, contact_ms=now_ms)
        elif liveness.nonce != peer.nonce:
            liveness.nonce = peer.nonce
            self._add_notices((replica, [*members]) for replica, members in liveness.members.items())
        liveness.contact_ms = now_ms
        if not liveness.is_up:
            self._came_up(liveness)
        return liveness

    def member_seen(self, replica: Replica, member: int, peer: PeerLiveness) -> None:
        """Note that a message of a group's member came from the process `peer`."""
        members = self._members.get(replica)
        if members is None:
            members = self._members[replica] = {}
        known = members.get(member)
        if known is peer:
            return
        if known is not None:
            known.forget(replica, member)
        members[member] = peer
        peer.members.setdefault(replica, []).append(member)

    def _came_up(self, peer: PeerLiveness) -> None:
        """Wake the groups that quiesced without this node: it may have missed entries while it was gone."""
        peer.is_up = True
        self._add_notices(
            (replica, [member for member, node in replica.nodes.items() if node == peer.node])
            for replica, peers in self._quiesced.items()
            if replica.core.role is Role.LEADER and peer not in peers
        )

    def lost(self, lost: Peer | Address) -> None:
        """Note that a process is gone, or that an address can't be reached. May produce notices.

        Only the groups with a member whose messages came from that process are notified, as no others depend
        on it.
        """
        if isinstance(lost, Peer):
            peer = self._peers.get((lost.node, lost.role))
            if peer is not None and peer.nonce == lost.nonce:
                peer.is_up = False
            gone = [] if peer is None else [peer]
        else:
            gone = self._peers_at(lost)
        for peer in gone:
            self._add_notices(
                (replica, members)
                for replica in peer.members
                if (members := self._missed(replica, peer))
                and not self._stays_quiesced_without(replica, peer, members)
            )

    def _peers_at(self, address: Address) -> list[PeerLiveness]:
        """Return the processes at this address; several if a node has it that another node had before."""
        return [
            peer
            for (node, role), peer in self._peers.items()
            if peer.members and self._address_of_peer(Peer(node, role, peer.nonce)) == address
        ]

    def _stays_quiesced_without(self, replica: Replica, peer: PeerLiveness, members: list[int]) -> bool:
        """Keep a leader quiesced without these members of a lost process, if possible; return whether it is.

        Then thousands of groups need not wake when a node is lost. It is possible only if the process is not
        connected, because its return must be noticed to wake the group again.
        """
        if replica not in self._quiesced or replica.core.role is not Role.LEADER:
            return False
        if peer.is_up or not replica.core.quiesce_without(members):
            return False
        self._leave_peers(replica)
        self._quiesce(replica)
        self.awake.woken(
            replica.group
        )  # The group stays quiesced, but checks must see that one less is in sync.
        return True

    def _missed(self, replica: Replica, peer: PeerLiveness) -> list[int]:
        """Return the members of a group in a lost process about which the group must be notified."""
        members = peer.members[replica]
        if replica in self._quiesced and replica.core.role is Role.LEADER:
            # The group quiesced without the other members, which were gone before.
            return [member for member in members if member in replica.core.quiesce_peers]
        return [*members]

    def postpone(self, *, by_ms: int, now_ms: int) -> None:
        """Reduce the silence of all peers by `by_ms`, because this loop stood still and could not read.

        Done at most once in an election timeout: a loop that is always late is only busy, and it does receive
        messages.
        """
        if now_ms < self._next_grace_ms:
            return
        self._next_grace_ms = now_ms + self._silence_ms
        for peer in self._peers.values():
            peer.contact_ms += by_ms

    # -- keepalives ------------------------------------------------------------------------

    def next_keepalive_ms(self, now_ms: int) -> int | None:
        """Return when the next keepalives are due; None while no quiesced group needs them."""
        if not self._sought and not any(peer.quiesced_groups for peer in self._peers.values()):
            return None
        # At the times at which leaders send heartbeats (`raft.leadership`), so that both leave together.
        return now_ms - now_ms % self._heartbeat_ms + self._heartbeat_ms

    def keepalives(self, *, now_ms: int, due_ms: int) -> list[tuple[Address, Keepalive]]:
        """Return the keepalives to send now; `due_ms` is when they were due.

        Groups that depend on a process that was silent for too long get notices.
        """
        if now_ms - due_ms > self._heartbeat_ms // 2:
            self.postpone(by_ms=now_ms - due_ms + self._heartbeat_ms, now_ms=now_ms)
        keepalives = []
        for peer in self._peers.values():
            if not peer.quiesced_groups:
                continue
            if now_ms - peer.contact_ms >= self._silence_ms:
                self._add_notices(
                    (replica, [member for member, its in self._members[replica].items() if its is peer])
                    for replica in peer.quiesced_groups.values()
                )
            elif peer.address is not None:
                self.keepalives_sent += 1
                asks = peer.audit_batch(interval_ms=self._heartbeat_ms)
                keepalives.append((peer.address, Keepalive(asks) if asks else PLAIN_KEEPALIVE))
        return keepalives + [(address, PLAIN_KEEPALIVE) for address in self._sought]

    def answer(self, peer: Peer, keepalive: Keepalive) -> list[tuple[Address, Keepalive]]:
        """Return the keepalive that answers the audit in a received one, if it must be answered.

        The received keepalive may itself answer our audit: groups that its sender does not lead get notices.
        """
        liveness = self._peers[peer.node, peer.role]
        answer = []
        wakes = [group for group, term in keepalive.asks if not self._leads_quiesced(group, term)]
        address = liveness.address or (self._address_of_peer(peer) if wakes else None)
        if wakes and address is not None:
            answer.append((address, Keepalive([], wakes)))
        found = [
            liveness.quiesced_groups[group] for group in keepalive.wakes if group in liveness.quiesced_groups
        ]
        self._add_notices(
            (replica, [replica.core.leader_id]) for replica in found if replica.core.role is Role.FOLLOWER
        )
        return answer

    def _leads_quiesced(self, group: bytes, term: int) -> bool:
        replica = self._replicas.get(group)
        return (
            replica is not None
            and replica.core.role is Role.LEADER
            and replica.core.quiesced
            and replica.core.term == term
        )

    # -- notices ---------------------------------------------------------------------------

    def _add_notices(self, gone: Iterable[tuple[Replica, list[int]]]) -> None:
        """Note that each of these groups is to be notified about these members."""
        elections = 0
        for replica, members in gone:
            if not members:
                continue
            if replica.core.leader_id in members:
                elections += 1
            elif replica.core.role is not Role.LEADER:
                continue
            known = self.notices.setdefault(replica.group, members)
            if known is not members:
                known.extend(members)
        self._spread_ms = max(self._spread_ms, elections * ELECTION_COST_MS)

    def take_notices(self, most: int) -> list[Notice]:
        """Remove and return the notices of up to `most` groups."""
        spread_ms = self._spread_ms
        taken = []
        for group in list(self.notices)[:most]:
            members = self.notices.pop(group)
            replica = self._replicas.get(group)
            if replica is not None:
                taken.append(Notice(replica, members, spread_ms))
        if not self.notices:
            self._spread_ms = 0
        return taken

    def take_notice_of(self, replica: Replica) -> Notice | None:
        """Remove and return the notice of one group, because a message or a request waits for it."""
        members = self.notices.pop(replica.group, None)
        return Notice(replica, members, self._spread_ms) if members is not None else None
