"""SWIM as a pure core: it finds by probing which members seem alive, and disseminates that by gossip.

After A. Das, I. Gupta, A. Motivala, "SWIM: Scalable Weakly-consistent Infection-style Process Group
Membership Protocol" (2002), with an addition of A. Dadgar and others in "Lifeguard" (2017): a member that
seems to be slow itself waits longer before it doubts others. Packets and statuses are swim-protocol's. Inputs
are datagrams and instants; outputs are datagrams to send and the names of members that changed. The core
reads no clock, opens no socket, and draws from the generator it is given. Its view is a hint: nothing may be
deleted, elected or counted because of it.

1. A claim about a member is replaced only by one with a higher clock, or by a worse one with the same clock
   (online < suspect < offline).
2. Only the member itself raises its clock; it does when it receives a claim that it isn't online.
3. Probing never ends: it goes in rounds over all available members, in shuffled order. Seeds that are not
   known as available members are pinged, too.
4. An offline member is remembered for a while, so that old updates don't revive it, and then forgotten.
5. By one member's second-hand claim, an online member becomes suspect at worst (`Status.transition`): it can
   always answer before it counts as offline. Only its own announcement that it leaves counts at once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from swimprotocol.packet import Ack, Gossip, Packet, Ping, PingReq, Source
from swimprotocol.status import Status

from membership.gossip.packets import ADDRESS, LEFT, Datagram, address_of, encode, update_size
from membership.gossip.precedence import SEVERITY, Peer, doubts, follow, newer, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class SwimSettings:
    """Periods and limits of the protocol. With the defaults a dead member is found within about 5 s."""

    probe_period_ms: int = 1_000
    probe_timeout_ms: int = 300
    indirect_probes: int = 3
    suspicion_ms: int = 3_000
    gossip_period_ms: int = 200
    gossip_fanout: int = 3
    retransmit_factor: int = 3
    sync_period_ms: int = 15_000
    seek_period_ms: int = 5_000
    remember_ms: int = 60_000
    late_ms: int = 100
    max_doubt: int = 4
    max_body_bytes: int = 1_148  # 1,200 on the wire less the signature
    max_update_bytes: int = 800  # so that a ping holds it whatever the names


@dataclass(slots=True)
class _Probe:
    target: str
    number: int
    indirect_ms: int | None  # when others are asked to try
    end_ms: int
    answered: bool = False


@dataclass(slots=True)
class _Relay:
    requester: str
    number: int
    end_ms: int


Item = TypeVar("Item")
_MAX_RELAYS = 1_000


class PiggybackQueue:
    """The members about which an update is still to be sent, each with the number of times it was sent.

    An update rides on packets that are sent anyway, the least sent first. One member sends it at most about
    log N times, which reaches every member with high probability (SWIM paper, section 4.1). The content of
    the updates is not kept here; a newer update about a member takes the place of the queued one.
    """

    def __init__(self, *, factor: int) -> None:
        assert factor > 0, factor
        self._factor = factor
        self._sent: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, name: str) -> None:
        """Queue a new update about the member, with no sendings counted so far."""
        self._sent.pop(name, None)
        self._sent[name] = 0

    def discard(self, name: str) -> None:
        """Remove the member's update from the queue, if there is one."""
        self._sent.pop(name, None)

    def limit(self, members: int) -> int:
        """Return how many times a member sends each update, in a cluster of `members` members."""
        return self._factor * max(1, members.bit_length())

    def least_sent(self) -> Iterator[str]:
        """Iterate over the members' names: least sent first, among equals newest first."""
        names = list(reversed(self._sent))
        names.sort(key=self._sent.__getitem__)
        return iter(names)

    def count_send(self, name: str, *, members: int) -> None:
        """Count one sending of the member's update; remove it once it was sent `limit(members)` times."""
        sent = self._sent[name] + 1
        if sent >= self.limit(members):
            del self._sent[name]
        else:
            self._sent[name] = sent


class Swim:
    """The SWIM state of one member: its claims about all others, and `own`, its claim about itself.

    `source` names this member and this incarnation of it. `clock` should be higher than in any earlier
    incarnation (wall time in ms will do: if it isn't, the member catches up as soon as it receives a claim of
    the earlier one). `metadata` must hold `ADDRESS`.
    """

    def __init__(
        self,
        *,
        source: Source,
        clock: int,
        metadata: Mapping[str, bytes],
        settings: SwimSettings,
        rng: random.Random,
        now_ms: int,
    ) -> None:
        self.source = source
        self.settings = settings
        self.peers: dict[str, Peer] = {}
        self.own = self._own(clock, metadata)
        self.doubt = 0
        """How slow this member takes itself to be, from 0 to `max_doubt`; its timeouts grow with that."""
        self.refutations = 0
        self.namesakes = 0
        self._rng = rng
        self._seeds: list[str] = []
        self._left = False
        self._number = rng.getrandbits(
            48
        )  # so that an answer to an earlier incarnation's probe answers none of ours
        self._round: list[str] = []
        self._probe: _Probe | None = None
        self._relays: dict[int, _Relay] = {}
        self._piggyback = PiggybackQueue(factor=settings.retransmit_factor)
        self._outbox: list[tuple[str, Datagram]] = []
        self._changed: dict[str, None] = {}
        self._next_probe_ms = self._next_seek_ms = now_ms
        self._next_gossip_ms = now_ms + settings.gossip_period_ms
        self._next_sync_ms = now_ms + settings.sync_period_ms

    def __repr__(self) -> str:
        counts = dict.fromkeys(SEVERITY, 0)
        for peer in self.peers.values():
            counts[peer.claim.status] += 1
        shown = ", ".join(f"{count} {status.name.lower()}" for status, count in counts.items())
        return f"<Swim {self.source.name} @{self.own.clock}: {shown}; doubt {self.doubt}>"

    # Inputs.

    def set_seeds(self, addresses: Iterable[str]) -> None:
        """Set the numeric addresses at which members may be found; this member's own may be among them."""
        self._seeds = [address for address in addresses if address != address_of(self.own.metadata or {})]

    def set_metadata(self, metadata: Mapping[str, bytes]) -> None:
        """Change what this member announces about itself.

        Raises:
            ValueError: it does not fit a datagram.
        """
        self.own = self._own(self.own.clock + 1, metadata)
        self._piggyback.add(self.source.name)

    def leave(self) -> None:
        """Announce that this member leaves, to a few members at once, which pass that on to the others."""
        self._left = True
        self._probe = None
        self.own = replace(self.own, clock=self.own.clock + 1, status=Status.OFFLINE, metadata={LEFT: b""})
        for peer in self._some_available(self.settings.gossip_fanout + 2):
            self._send(peer.address, self.own)

    def receive(self, datagram: Datagram, *, sender: str, now_ms: int) -> None:
        """Process an authenticated datagram that came from the address `sender`."""
        packet = datagram.packet
        if packet.source.name == self.source.name:
            if packet.source != self.source:
                self.namesakes += 1  # an earlier incarnation's last packets, or another node with this name
            return
        for update in datagram.updates:
            self._merge(update, now_ms)
        if isinstance(packet, Gossip):
            self._merge(packet, now_ms)
        elif isinstance(packet, Ping):
            self._answer(packet, datagram, sender)
        elif isinstance(packet, PingReq):
            self._try_for(packet, datagram, sender, now_ms)
        elif isinstance(packet, Ack):
            self._answered(packet, datagram)

    def deadline_ms(self) -> int | None:
        """Return the time in ms at which `expire` must be called next; None after `leave`."""
        if self._left:
            return None
        if self._piggyback:
            # While no updates are queued, `_next_gossip_ms` is not advanced, so it may lie in the past. The
            # other deadlines never do, and only they show that a wake-up is late (`expire`).
            return min(self._next_gossip_ms, self._timer_ms())
        return self._timer_ms()

    def expire(self, *, now_ms: int) -> None:
        """Perform everything that is due: timeouts, probes, gossip, synchronisation."""
        if self._left:
            return
        late_ms = now_ms - self._timer_ms()
        if late_ms > self.settings.late_ms:
            self._be_patient(late_ms)
        self._expire_peers(now_ms)
        self._expire_probe(now_ms)
        if self._piggyback and now_ms >= self._next_gossip_ms:
            self._next_gossip_ms = now_ms + self.settings.gossip_period_ms
            self._gossip()
        if now_ms >= self._next_seek_ms:
            self._seek(now_ms)
        if now_ms >= self._next_sync_ms:
            self._next_sync_ms = now_ms + self.settings.sync_period_ms
            for peer in self._some_available(1):
                self._send_everything(peer.address)

    # Outputs.

    def take_outbox(self) -> list[tuple[str, Datagram]]:
        """Return the datagrams to send, each with its address, and clear the outbox."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def take_changed(self) -> list[str]:
        """Return the names whose claim changed since the last call."""
        changed, self._changed = list(self._changed), {}
        return changed

    def _timer_ms(self) -> int:
        timer_ms = min(self._next_probe_ms, self._next_seek_ms, self._next_sync_ms)
        if self._probe is not None and self._probe.indirect_ms is not None:
            timer_ms = min(timer_ms, self._probe.indirect_ms)
        return min([timer_ms, *(peer.until_ms for peer in self.peers.values() if peer.until_ms is not None)])

    # Claims.

    def _own(self, clock: int, metadata: Mapping[str, bytes]) -> Gossip:
        own = Gossip(self.source, self.source.name, clock, Status.ONLINE, dict(metadata))
        assert ADDRESS in metadata, "a member says where it is"
        size, limit = update_size(own), self.settings.max_update_bytes
        if size > limit:
            raise ValueError(f"the announced information takes {size} bytes, of at most {limit}")
        return own

    def _merge(self, update: Gossip, now_ms: int) -> None:
        if update.name == self.source.name:
            self._merge_own(update)
            return
        peer = self.peers.get(update.name)
        if peer is None:
            # An unknown member that is offline is not added: updates about dead members would never end.
            if update.status & Status.AVAILABLE and update.metadata and ADDRESS in update.metadata:
                peer = self.peers[update.name] = Peer(update)
                self._round.insert(self._rng.randint(0, len(self._round)), update.name)
                self._claimed(peer, now_ms)
            return
        if not newer(update, peer.claim):
            return
        peer.claim = follow(update, peer.claim)
        self._claimed(peer, now_ms)

    def _merge_own(self, update: Gossip) -> None:
        if self._left or not newer(update, self.own):
            return
        # A member doubts us, or remembers an earlier incarnation whose clock was ahead.
        self.own = replace(self.own, clock=update.clock + 1)
        self._piggyback.add(self.source.name)
        self.refutations += 1
        if update.status == Status.SUSPECT:
            self._doubt_self()

    def _claimed(self, peer: Peer, now_ms: int) -> None:
        """Handle a new claim about `peer`: set its timer, queue it for dissemination, report the change."""
        if peer.claim.status == Status.SUSPECT:
            peer.until_ms = now_ms + self._suspicion_ms()
        elif peer.claim.status == Status.OFFLINE:
            peer.until_ms = now_ms + self.settings.remember_ms
        else:
            peer.until_ms = None
        self._piggyback.add(peer.claim.name)
        self._changed[peer.claim.name] = None

    def _expire_peers(self, now_ms: int) -> None:
        for name, peer in list(self.peers.items()):
            if peer.until_ms is None or now_ms < peer.until_ms:
                continue
            if peer.claim.status == Status.SUSPECT:
                peer.claim = replace(peer.claim, source=self.source, status=Status.OFFLINE)
                self._claimed(peer, now_ms)
            else:
                del self.peers[name]
                self._piggyback.discard(name)

    # Patience.

    def _suspicion_ms(self) -> int:
        # In a large cluster a refutation travels further.
        size = max(1.0, math.log10(len(self.peers) + 1))
        return int(self.settings.suspicion_ms * size * (1 + self.doubt))

    def _doubt_self(self) -> None:
        self.doubt = min(self.settings.max_doubt, self.doubt + 1)

    def _be_patient(self, late_ms: int) -> None:
        """Extend the probe and all suspicions by `late_ms`, because this member was woken late by that time.

        Answers may lie unread in its socket. The member also raises its `doubt` about itself.
        """
        self._doubt_self()
        if self._probe is not None:
            self._probe.end_ms += late_ms
            self._next_probe_ms = self._probe.end_ms
            if self._probe.indirect_ms is not None:
                self._probe.indirect_ms += late_ms
        for peer in self.peers.values():
            if peer.claim.status == Status.SUSPECT and peer.until_ms is not None:
                peer.until_ms += late_ms

    # Probing.

    def _expire_probe(self, now_ms: int) -> None:
        probe = self._probe
        if probe is not None and probe.indirect_ms is not None and now_ms >= probe.indirect_ms:
            probe.indirect_ms = None
            for helper in self._some_available(self.settings.indirect_probes, besides=probe.target):
                self._send(helper.address, PingReq(self.source, probe.target), probe=probe.number)
        if now_ms < self._next_probe_ms:
            return
        if probe is not None and not probe.answered:
            peer = self.peers.get(probe.target)
            if peer is not None and peer.claim.status == Status.ONLINE:
                peer.claim = replace(peer.claim, source=self.source, status=Status.SUSPECT)
                self._claimed(peer, now_ms)
                self._ping(peer)  # It gets the claim first, as only it can refute it.
        self._relays = {number: relay for number, relay in self._relays.items() if now_ms < relay.end_ms}
        self._start_probe(now_ms)

    def _start_probe(self, now_ms: int) -> None:
        patience = 1 + self.doubt
        self._next_probe_ms = now_ms + self.settings.probe_period_ms * patience
        self._probe = None
        target = self._next_target()
        if target is None:
            return
        indirect_ms = now_ms + self.settings.probe_timeout_ms * patience
        number = self._ping(target)
        self._probe = _Probe(target.claim.name, number, indirect_ms, self._next_probe_ms)

    def _next_target(self) -> Peer | None:
        for _ in range(2):
            while self._round:
                peer = self.peers.get(self._round.pop())
                if peer is not None and peer.available:
                    return peer
            self._round = [name for name, peer in self.peers.items() if peer.available]
            self._rng.shuffle(self._round)
        return None

    def _ping(self, peer: Peer) -> int:
        self._number += 1
        self._send(peer.address, Ping(self.source), probe=self._number, first=[self.own, *doubts(peer)])
        return self._number

    def _answer(self, ping: Ping, datagram: Datagram, sender: str) -> None:
        if self._left:
            return
        peer = self.peers.get(ping.source.name)
        self._send(sender, Ack(self.source), probe=datagram.probe, first=doubts(peer))
        if datagram.wants_all:
            self._send_everything(sender)

    def _try_for(self, request: PingReq, datagram: Datagram, sender: str, now_ms: int) -> None:
        target = self.peers.get(request.target)
        if target is None or self._left or len(self._relays) >= _MAX_RELAYS:
            return
        number = self._ping(target)
        end_ms = now_ms + self.settings.probe_period_ms * (1 + self.settings.max_doubt)
        self._relays[number] = _Relay(sender, datagram.probe, end_ms)

    def _answered(self, ack: Ack, datagram: Datagram) -> None:
        relay = self._relays.pop(datagram.probe, None)
        if relay is not None:
            # The target's own source, as in swim-protocol: the requester gets the target's answer, not ours.
            self._send(relay.requester, ack, probe=relay.number)
            return
        probe = self._probe
        if probe is None or (datagram.probe, ack.source.name) != (probe.number, probe.target):
            return
        if not probe.answered:
            probe.answered, probe.indirect_ms = True, None
            self.doubt = max(0, self.doubt - 1)

    # Dissemination.

    def _seek(self, now_ms: int) -> None:
        """Ping seeds at which no available member is known, and one member that counts as offline."""
        reached = {peer.address for peer in self.peers.values() if peer.available}
        alone = not reached
        period_ms = self.settings.probe_period_ms if alone else self.settings.seek_period_ms
        self._next_seek_ms = now_ms + period_ms
        missing = [address for address in self._seeds if address not in reached]
        for address in self._draw(missing, self.settings.gossip_fanout):
            self._send(address, Ping(self.source), first=(self.own,), wants_all=True)
        offline = [peer for peer in self.peers.values() if not peer.available]
        for peer in self._draw(offline, 1):
            self._ping(peer)

    def _gossip(self) -> None:
        for peer in self._some_available(self.settings.gossip_fanout):
            news = next(self._piggyback.least_sent(), None)
            if news is None:
                return
            claim = self._claim_of(news)
            self._piggyback.count_send(news, members=len(self.peers) + 1)
            self._send(peer.address, claim, besides=news)

    def _send_everything(self, address: str) -> None:
        claims = [self.own, *(spread(peer.claim) for peer in self.peers.values())]
        while claims:
            first = claims.pop()
            room = self._room(first)
            rest: list[Gossip] = []
            while claims and update_size(claims[-1]) <= room:
                room -= update_size(claims[-1])
                rest.append(claims.pop())
            self._outbox.append((address, Datagram(replace(first, source=self.source), updates=tuple(rest))))

    def _send(
        self,
        address: str,
        packet: Packet,
        *,
        probe: int = 0,
        first: Sequence[Gossip] = (),
        wants_all: bool = False,
        besides: str | None = None,
    ) -> None:
        """Send a packet with the updates in `first` and as many queued updates as fit."""
        updates = [spread(update) for update in first]
        room = self._room(packet) - sum(map(update_size, updates))
        assert room >= 0, (room, packet, updates)
        riding = {update.name for update in updates} | {besides}
        for name in self._piggyback.least_sent():
            if name in riding:
                continue
            claim = self._claim_of(name)
            size = update_size(claim)
            if size <= room:
                room -= size
                updates.append(claim)
                self._piggyback.count_send(name, members=len(self.peers) + 1)
        if isinstance(packet, Gossip):
            packet = replace(packet, source=self.source)
        self._outbox.append((address, Datagram(packet, probe, wants_all, tuple(updates))))

    def _room(self, packet: Packet) -> int:
        head = len(encode(Datagram(packet, 1 << 61)))
        return self.settings.max_body_bytes - head - 4  # the count of updates may take more than a byte

    def _claim_of(self, name: str) -> Gossip:
        return self.own if name == self.source.name else spread(self.peers[name].claim)

    def _some_available(self, count: int, *, besides: str | None = None) -> list[Peer]:
        return self._draw([p for p in self.peers.values() if p.available and p.claim.name != besides], count)

    def _draw(self, items: list[Item], count: int) -> list[Item]:
        return self._rng.sample(items, min(count, len(items)))
