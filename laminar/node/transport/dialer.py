"""A dialer: it connects to one address on one channel when there is something to send, and pauses on failure.

A dialer knows when to connect again; the transport that owns it knows the handshake and what a loss means.
While a connection is being made its frames wait in the link's bounded queue; when that fails they are lost,
as they would be on a wire (Raft sends again, a call fails at once).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from laminar.node.transport.handshake import Channel
from laminar.node.transport.link import Link

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
# Pause after a peer was refused for a differing secret.
BACK_OFF_S = 5.0


class TcpAddress(NamedTuple):
    """A process of another node: a host (numeric, or a name to resolve) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return ``host:port``, with brackets around an IPv6 host."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class UnixAddress(NamedTuple):
    """A process of this node: the name of an abstract Unix socket, without the leading zero byte."""

    name: str


Address = TcpAddress | UnixAddress


def pause_s(failures: int, rng: random.Random) -> float:
    """Return the pause before connecting again after `failures` in a row: doubling, jittered by a half."""
    assert failures >= 1, f"{failures} failures"
    longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 16))
    return longest * (0.5 + 0.5 * rng.random())


class Dialer:
    """Opens the connection to one address on one channel. `link` is the one in use, also while it opens."""

    def __init__(
        self,
        address: Address,
        channel: Channel,
        *,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        make_link: Callable[[Dialer], Link],
        connect: Callable[[Dialer, Link], Awaitable[None]],
    ) -> None:
        self.address = address
        self.channel = channel
        self.link: Link | None = None
        self.connecting: asyncio.Task[None] | None = None
        self._loop = loop
        self._rng = rng
        self._make_link = make_link
        self._connect = connect
        self._failures = 0
        self._retry_at = 0.0
        self._backs_off = False

    def __repr__(self) -> str:
        state = repr(self.link) if self.link else f"down, {self._failures} failures"
        return f"<Dialer {self.address} {self.channel.name.lower()} {state}>"

    def open_link(self) -> Link | None:
        """Return the link to send on, connecting if there is none; None in the pause after a failure."""
        if self.link is not None and not self.link.closing:
            return self.link
        if self._failures and self._loop.time() < self._retry_at:
            return None
        link = self.link = self._make_link(self)
        self.connecting = self._loop.create_task(self._open(link), name=f"connect {self.address}")
        return link

    async def _open(self, link: Link) -> None:
        try:
            await self._connect(self, link)
        finally:
            self.connecting = None

    @property
    def place(self) -> str:
        """The address and the channel of this dialer, as text for log lines."""
        address = self.address
        where = address.name if isinstance(address, UnixAddress) else f"{address.host}:{address.port}"
        return f"{where} ({self.channel.name.lower()})"

    def back_off(self) -> None:
        """Wait `BACK_OFF_S` before the next try: the secrets differ, which only an operator can change."""
        self._backs_off = True

    def established(self) -> None:
        """Note that the handshake succeeded, so that the next failure has the shortest pause again."""
        self._failures = 0
        self._backs_off = False

    def ended(self, link: Link, *, failed: bool) -> None:
        """Note that `link` has ended; if opening it `failed`, the next try comes only after a pause."""
        if self.link is not link:
            return
        self.link = None
        if failed:
            self._failures += 1
            pause = BACK_OFF_S if self._backs_off else pause_s(self._failures, self._rng)
            self._retry_at = self._loop.time() + pause
