"""Gossip over UDP: a driver of the SWIM core, with a socket, a timer and a seal (the authentication).

Packets and statuses are those of the package swim-protocol. The rest of that package is not used: no tasks
for suspicions, no pickle, no TCP. A datagram is checked (size, seal, types) before anything in it is used; if
that fails it is counted and dropped. The information that members announce is passed on without being
interpreted, and all of it is a hint.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec
from swimprotocol.packet import Gossip as Claim
from swimprotocol.packet import Source
from swimprotocol.status import Status

from membership.gossip.packets import (
    ADDRESS,
    LEFT,
    Datagram,
    PacketError,
    address_of,
    address_text,
    decode,
    encode,
    numeric_address,
)
from membership.gossip.swim import Swim, SwimSettings
from membership.sealing.seal import GossipKey, Seal

log = logging.getLogger("membership.gossip")

MAX_DATAGRAM_BYTES = 1_200
_DATAGRAMS_A_TURN = 64
_SEEDS_AGAIN_S = 30.0

InfoValue = str | int | float | bytes | list[int]
_STATUS_WORDS: dict[Status, Literal["alive", "suspect", "dead"]] = {
    Status.ONLINE: "alive",
    Status.SUSPECT: "suspect",
    Status.OFFLINE: "dead",
}


class Member(msgspec.Struct, frozen=True):
    """One member as this node sees it. A dead member is listed for a while (`SwimSettings.remember_ms`)."""

    node: str
    address: str
    status: Literal["alive", "suspect", "dead"]
    info: dict[str, InfoValue]
    incarnation: int


def monotonic_ms() -> int:
    """Return the time of the process's monotonic clock in ms."""
    return time.monotonic_ns() // 1_000_000


class Gossip:
    """One node's part in the gossip, over a bound UDP socket, which the caller closes.

    `address` is where other nodes reach this one, numeric ``host:port``. `on_change` is called with each
    member whose status or information changed. `clock` counts ms and never goes back. `keys` and `is_newer`
    are those of `Seal`.
    """

    def __init__(
        self,
        *,
        sock: socket.socket,
        node: str,
        address: str,
        keys: Callable[[], Sequence[GossipKey]],
        info: Mapping[str, InfoValue],
        is_newer: Callable[[], bool] = lambda: True,
        rng: random.Random | None = None,
        clock: Callable[[], int] = monotonic_ms,
        settings: SwimSettings | None = None,
        on_change: Callable[[Member], None] | None = None,
    ) -> None:
        numeric_address(address)  # a ValueError here, not at every peer
        self.on_change = on_change
        self._sock = sock
        self._address = address
        self._seal = Seal(keys, is_newer=is_newer, draw=secrets.token_bytes)
        self._clock = clock
        self._core = Swim(
            source=Source(node, secrets.token_bytes(8)),
            clock=time.time_ns() // 1_000_000,
            metadata=_metadata(address, info),
            settings=settings or SwimSettings(),
            rng=rng or random.Random(),
            now_ms=clock(),
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._seeds: tuple[str, ...] = ()
        # Addresses of the seeds that are host names, as found by the last look-up that found any.
        self._found: dict[str, list[str]] = {}
        self._resolving: asyncio.Task[None] | None = None
        self._counts = dict.fromkeys(
            (
                *("received", "sent", "bad_signature", "malformed", "oversize", "unsent", "unresolved"),
                *("replayed", "challenged", "asked_again", "outdated"),
            ),
            0,
        )

    def __repr__(self) -> str:
        return repr(self._core).replace("Swim", "Gossip", 1)

    def start(self, seeds: Sequence[str] = ()) -> None:
        """Start gossiping. `seeds` are ``host:port`` of members; host names are resolved without blocking."""
        assert self._loop is None, "started twice"
        self._loop = asyncio.get_running_loop()
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock, self._readable)
        self.set_seeds(seeds)
        self._wake()

    def set_seeds(self, seeds: Sequence[str]) -> None:
        """Replace the seeds, as in `start`. A seed is pinged while no available member has its address.

        Host names are looked up now, and every 30 s: a member that was stopped may come back elsewhere.
        """
        if tuple(seeds) == self._seeds:
            return
        self._seeds = tuple(seeds)
        names = {seed for seed in seeds if not _is_numeric(seed)}
        self._found = {name: found for name, found in self._found.items() if name in names}
        self._use_seeds()
        if self._resolving is not None:
            self._resolving.cancel()
            self._resolving = None
        if names and self._loop is not None:
            self._resolving = self._loop.create_task(self._resolve(names))
        self._wake()

    def _use_seeds(self) -> None:
        """Give the core the numeric seeds, and the addresses that were found for the other seeds."""
        addresses: list[str] = []
        for seed in self._seeds:
            addresses += [seed] if _is_numeric(seed) else self._found.get(seed, [])
        self._core.set_seeds(addresses)

    def members(self) -> dict[str, Member]:
        """Return all members by node name, this one included."""
        claims = [self._core.own, *(peer.claim for peer in self._core.peers.values())]
        return {claim.name: _member(claim) for claim in claims}

    def update_info(self, info: Mapping[str, InfoValue]) -> None:
        """Replace the information that this node announces.

        Raises:
            ValueError: it is too long for a datagram.
        """
        self._core.set_metadata(_metadata(self._address, info))
        self._after()

    def statistics(self) -> dict[str, int]:
        """Return counts of datagrams by outcome, and `refutations`, `namesakes` and `doubt`.

        `refutations` counts claims about this member that it refuted; `namesakes`, packets of other processes
        under its name; `doubt` is how much it doubts itself (see `Swim`). Of datagrams, `replayed` counts
        those that were repeated or meant for another process; `challenged`, those without the requested
        nonce; `asked_again`, those that we sent again because they were challenged; `outdated`, those in the
        older form although all nodes support the newer one.
        """
        return {
            **self._counts,
            "refutations": self._core.refutations,
            "namesakes": self._core.namesakes,
            "doubt": self._core.doubt,
        }

    async def close(self) -> None:
        """Announce that this node leaves, and stop; the socket stays open."""
        if self._loop is None:
            return
        self._loop.remove_reader(self._sock)
        self._core.leave()
        self._flush()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._resolving is not None:
            self._resolving.cancel()
            await asyncio.gather(self._resolving, return_exceptions=True)
        self._loop = None

    def _readable(self) -> None:
        for _ in range(_DATAGRAMS_A_TURN):
            try:
                data, sender = self._sock.recvfrom(MAX_DATAGRAM_BYTES + 1)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                # Linux reports here that an earlier datagram found no receiver (ICMP). Ignored: the probes
                # find dead members.
                log.debug("gossip socket: %s", error)
                continue
            address = address_text(sender[0], sender[1])
            datagram = self._opened(data, address)
            if datagram is not None:
                self._core.receive(datagram, sender=address, now_ms=self._clock())
        self._after()

    def _opened(self, data: bytes, sender: str) -> Datagram | None:
        self._counts["received"] += 1
        if len(data) > MAX_DATAGRAM_BYTES:
            self._counts["oversize"] += 1
            return None
        opened = self._seal.open(data, sender)
        if opened.outcome:
            self._counts[opened.outcome] += 1
        if opened.send is not None:
            self._send(*opened.send)
        if opened.body is None:
            return None
        try:
            return decode(opened.body)
        except PacketError as error:
            self._counts["malformed"] += 1
            log.warning("gossip: a signed datagram that makes no sense: %s", error)
            return None

    def _wake(self) -> None:
        self._core.expire(now_ms=self._clock())
        self._after()

    def _after(self) -> None:
        """Perform the core's outputs after any input: send datagrams, report changes, set the timer."""
        self._flush()
        changed = self._core.take_changed()
        if self._loop is not None:
            if self._timer is not None:
                self._timer.cancel()
            deadline_ms = self._core.deadline_ms()
            if deadline_ms is not None:
                delay_ms = max(0, deadline_ms - self._clock())
                self._timer = self._loop.call_later(delay_ms / 1000, self._wake)
        for name in changed:
            self._report(name)

    def _report(self, name: str) -> None:
        peer = self._core.peers.get(name)
        if self.on_change is not None and peer is not None:
            self.on_change(_member(peer.claim))

    def _flush(self) -> None:
        for address, datagram in self._core.take_outbox():
            data = self._seal.close(encode(datagram), address)
            assert len(data) <= MAX_DATAGRAM_BYTES, len(data)
            self._send(address, data)

    def _send(self, address: str, data: bytes) -> None:
        host, port = numeric_address(address).host, numeric_address(address).port
        try:
            self._sock.sendto(data, (host, port))
        except OSError as error:
            # Full buffer, no route, wrong family: the same as a loss on the way, which SWIM expects.
            self._counts["unsent"] += 1
            log.debug("gossip to %s: %s", address, error)
        else:
            self._counts["sent"] += 1

    async def _resolve(self, names: set[str]) -> None:
        """Look up the seeds' host names periodically; a found address is used until another one is found."""
        pause_s, failed = 1.0, set[str]()
        while True:
            for name in sorted(names):
                try:
                    found = await self._look_up(name)
                except (OSError, UnicodeError) as error:  # UnicodeError: a name that can't be one
                    self._counts["unresolved"] += 1
                    level = logging.DEBUG if name in failed else logging.WARNING
                    log.log(level, "gossip: seed %s: %s", name, error)
                    failed.add(name)
                else:
                    failed.discard(name)
                    if found != self._found.get(name):
                        self._found[name] = found
                        self._use_seeds()
            pause_s = min(_SEEDS_AGAIN_S, 2 * pause_s) if failed else _SEEDS_AGAIN_S
            await asyncio.sleep(pause_s)

    async def _look_up(self, name: str) -> list[str]:
        host, _, port = name.rpartition(":")
        infos = await asyncio.get_running_loop().getaddrinfo(
            host, port, family=self._sock.family, type=socket.SOCK_DGRAM
        )
        return [address_text(str(info[4][0]), int(info[4][1])) for info in infos]


def _is_numeric(address: str) -> bool:
    try:
        numeric_address(address)
    except ValueError:
        return False
    return True


def _metadata(address: str, info: Mapping[str, InfoValue]) -> dict[str, bytes]:
    taken = {ADDRESS, LEFT} & info.keys()
    if taken:
        raise ValueError(f"information under a reserved name: {sorted(taken)}")
    return {ADDRESS: address.encode(), **{key: msgspec.msgpack.encode(value) for key, value in info.items()}}


def _member(claim: Claim) -> Member:
    metadata = claim.metadata or {}
    info: dict[str, InfoValue] = {}
    for key, value in metadata.items():
        if key in (ADDRESS, LEFT):
            continue
        decoded = _decoded(value)
        if decoded is None:
            log.warning("gossip: %s of %s is of a kind we don't know", key, claim.name)
        else:
            info[key] = decoded
    return Member(claim.name, address_of(metadata), _STATUS_WORDS[claim.status], info, claim.clock)


def _decoded(value: bytes) -> InfoValue | None:
    try:
        decoded = msgspec.msgpack.decode(value)
    except msgspec.MsgspecError:
        return None
    if isinstance(decoded, str | int | float | bytes):
        return decoded
    if isinstance(decoded, list) and all(isinstance(item, int) for item in decoded):
        return decoded
    return None
