"""The pool of a client's connections: which one a request uses, when they are opened and closed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from laminar.client.net.shared_port import SharedPorts
from laminar.http.client.connection import ClientConnection, open_connection
from laminar.http.client.tls import SYSTEM, Trust
from laminar.http.protocol.answer import Answer, Buffer, Target, TlsFailed


class Pool:
    """Connections by URL: a shared one for pipelined appends, and others that carry one request at a time.

    With `tls_only` no connection without TLS is opened, wherever an answer leads.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        connect_timeout_s: float,
        idle_s: float,
        shared_ports: SharedPorts | None = None,
        trust: Trust = SYSTEM,
        tls_only: bool = False,
    ) -> None:
        self._loop = loop
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        self._shared_ports = shared_ports
        self._trust = trust
        self._tls_only = tls_only
        self._shared: dict[str, ClientConnection] = {}
        self._opening: dict[str, asyncio.Task[ClientConnection]] = {}
        self._idle: dict[str, list[ClientConnection]] = {}
        self._all: set[ClientConnection] = set()
        self.opened = 0

    async def open(self, url: str) -> ClientConnection:
        """Open a connection and return it. Raises ConnectionFailed (`sent` is false) if that fails."""
        place = None if self._shared_ports is None else await self._shared_ports.place(url)
        reached = url if place is None else place.url
        if self._tls_only and not Target.of(reached).tls:
            raise TlsFailed(
                f"{reached} is not connected to without TLS, as https alone was given",
                hint="give its node a certificate (tls_certificate)",
            )
        connection = await open_connection(
            reached,
            timeout_s=self._connect_timeout_s,
            shard=None if place is None else (place.shard, place.shards),
            trust=self._trust,
        )
        self.opened += 1
        self._all = {each for each in self._all if not each.lost.done()}
        self._all.add(connection)
        return connection

    def shared_nowait(self, url: str) -> ClientConnection | None:
        """Return the shared connection to `url`, for pipelined requests; None if it is not open."""
        connection = self._shared.get(url)
        return None if connection is None or connection.closed else connection

    async def shared(self, url: str) -> ClientConnection:
        """Return the shared connection to `url`; open it if needed, once for all callers that wait.

        Raises:
            ConnectionFailed: (`sent` is false) it cannot be opened.
        """
        connection = self.shared_nowait(url)
        if connection is not None:
            return connection
        opening = self._opening.get(url)
        if opening is None:
            opening = self._opening[url] = self._loop.create_task(self.open(url))
            opening.add_done_callback(lambda _: self._opening.pop(url, None))
        connection = await asyncio.shield(opening)
        self._shared[url] = connection
        return connection

    async def ask(
        self,
        url: str,
        head: bytes,
        body: Sequence[Buffer] = (),
        *,
        timeout_s: float,
        bodyless: bool = False,
    ) -> Answer:
        """Send a request on a connection that no other request uses meanwhile; return its answer.

        Raises:
            ConnectionFailed: no answer came within `timeout_s`, or the connection failed.
        """
        connection = self._idle_connection(url) or await self.open(url)
        answer = await connection.ask(head, body, timeout_s=timeout_s, bodyless=bodyless)
        if not connection.closed:
            self._idle.setdefault(url, []).append(connection)
        return answer

    def _idle_connection(self, url: str) -> ClientConnection | None:
        idle = self._idle.get(url)
        while idle:
            connection = idle.pop()
            if connection.closed:
                continue
            if self._loop.time() - connection.idle_since > self._idle_s:
                # A server closes idle connections. If we wrote to this one while it does, the request would
                # fail, so we close it first.
                connection.abort("idle")
                continue
            return connection
        return None

    async def close(self) -> None:
        """Close every connection, and wait until the loop has released them."""
        for opening in list(self._opening.values()):
            opening.cancel()
        for connection in self._all:
            connection.abort("the client was closed")
        await asyncio.gather(
            *self._opening.values(), *(each.lost for each in self._all), return_exceptions=True
        )
        self._all.clear()
        self._idle.clear()
        self._shared.clear()
