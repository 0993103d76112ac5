"""A simulated network of SWIM cores: virtual time, one seed, loss, cuts and stalls."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable

from swimprotocol.packet import Source
from swimprotocol.status import Status

from membership.gossip.packets import ADDRESS, Datagram, decode, encode
from membership.gossip.swim import Swim, SwimSettings


class World:
    """Members by name; each datagram is really encoded, may get lost, and takes 1 to 10 ms."""

    def __init__(self, seed: int, *, loss: float = 0.0, settings: SwimSettings | None = None) -> None:
        self.rng = random.Random(seed)
        self.loss = loss
        self.settings = settings or SwimSettings()
        self.now_ms = 1_000
        self.members: dict[str, Swim] = {}
        self.sent = 0
        self.longest = 0
        self.stalled: dict[str, int] = {}
        self.cut: Callable[[str, str], bool] = lambda sender, receiver: False
        self.declared: list[tuple[int, str, str, Status]] = []
        self._events: list[tuple[int, int, str, str, bytes]] = []
        self._order = 0
        self._lives = 0

    def add(self, name: str, *, seeds: Iterable[str] = (), clock: int | None = None, size: int = 0) -> Swim:
        """Start a member (or a new life of one) whose address stands for its name."""
        self._lives += 1
        metadata = {ADDRESS: address(name).encode(), "pad": b"x" * size}
        swim = Swim(
            source=Source(name, self._lives.to_bytes(8, "big")),
            clock=self.now_ms if clock is None else clock,
            metadata=metadata,
            settings=self.settings,
            rng=random.Random(self.rng.getrandbits(64)),
            now_ms=self.now_ms,
        )
        swim.set_seeds([address(seed) for seed in seeds])
        self.members[name] = swim
        return swim

    def cluster(self, count: int, *, size: int = 0) -> list[str]:
        """Start members that all know the first as seed, and run until everybody sees everybody."""
        names = [f"n{i}" for i in range(count)]
        for name in names:
            self.add(name, seeds=names[:1], size=size)
        assert self.run_until(self.agreed, limit_ms=30_000), self
        return names

    def kill(self, name: str) -> None:
        """End a member without a word."""
        del self.members[name]

    def agreed(self) -> bool:
        """Whether each member sees exactly the running ones, all online."""
        return all(self.online(name) == self.members.keys() for name in self.members)

    def online(self, name: str) -> set[str]:
        """Whom this member sees online, itself included."""
        peers = self.members[name].peers
        return {name} | {peer for peer in peers if peers[peer].claim.status == Status.ONLINE}

    def status(self, viewer: str, name: str) -> Status | None:
        """How one member sees another."""
        peer = self.members[viewer].peers.get(name)
        return None if peer is None else peer.claim.status

    def all_see(self, name: str, status: Status) -> bool:
        """Whether all others see the member so."""
        return all(self.status(viewer, name) == status for viewer in self.members if viewer != name)

    def stall(self, name: str, duration_ms: int) -> None:
        """Keep a member's loop from running; what is sent to it waits."""
        self.stalled[name] = self.now_ms + duration_ms

    def deliver(self, name: str, sender: str, datagram: Datagram) -> None:
        """Hand a member a datagram at once."""
        self.members[name].receive(datagram, sender=address(sender), now_ms=self.now_ms)
        self._collect(name)

    def run(self, duration_ms: int) -> None:
        """Let time pass."""
        self.run_until(lambda: False, limit_ms=duration_ms)

    def run_until(self, done: Callable[[], bool], *, limit_ms: int) -> bool:
        """Let time pass until the condition holds; return whether it did within the limit."""
        end_ms = self.now_ms + limit_ms
        # A member's deadline moves only when something happens to it.
        deadlines_ms = {name: self._deadline_ms(name) for name in self.members}
        while not done():
            wake_ms, sleeper = min(
                (
                    (max(deadline_ms, self.stalled.get(name, 0), self.now_ms), name)
                    for name, deadline_ms in deadlines_ms.items()
                ),
                default=(end_ms, ""),
            )
            arrival_ms = self._events[0][0] if self._events else end_ms
            if min(wake_ms, arrival_ms) >= end_ms:
                self.now_ms = end_ms
                return done()
            if wake_ms <= arrival_ms:
                self.now_ms = wake_ms
                self.members[sleeper].expire(now_ms=wake_ms)
                self._collect(sleeper)
                touched = sleeper
            else:
                touched = self._arrive()
            if touched in self.members:
                deadlines_ms[touched] = self._deadline_ms(touched)
        return True

    def _deadline_ms(self, name: str) -> int:
        deadline_ms = self.members[name].deadline_ms()
        assert deadline_ms is not None
        return deadline_ms

    def _arrive(self) -> str:
        """Deliver the next datagram, or put it off; to whom it goes."""
        at_ms, order, sender, receiver, data = heapq.heappop(self._events)
        self.now_ms = max(self.now_ms, at_ms)
        if self.stalled.get(receiver, 0) > at_ms:
            # After a stall timers run first, then what lies in the socket: the harder order for the core.
            heapq.heappush(self._events, (self.stalled[receiver] + 1, order, sender, receiver, data))
        elif receiver in self.members:
            self.members[receiver].receive(decode(data), sender=address(sender), now_ms=self.now_ms)
            self._collect(receiver)
        return receiver

    def _collect(self, name: str) -> None:
        swim = self.members[name]
        for changed in swim.take_changed():
            self.declared.append((self.now_ms, name, changed, swim.peers[changed].claim.status))
        for target, datagram in swim.take_outbox():
            data = encode(datagram)
            self.sent += 1
            self.longest = max(self.longest, len(data))
            assert len(data) <= self.settings.max_body_bytes
            receiver = name_at(target)
            if self.rng.random() < self.loss or self.cut(name, receiver):
                continue
            self._order += 1
            at_ms = self.now_ms + self.rng.randint(1, 10)
            heapq.heappush(self._events, (at_ms, self._order, name, receiver, data))

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.members.values()))


def address(name: str) -> str:
    """The address that stands for a name ("n258" is at 10.0.1.2)."""
    number = int(name[1:])
    return f"10.0.{number >> 8}.{number & 255}:7000"


def name_at(text: str) -> str:
    """The name that an address stands for."""
    high, low = text.split(":")[0].split(".")[2:]
    return f"n{(int(high) << 8) + int(low)}"
