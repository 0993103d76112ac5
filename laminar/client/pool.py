"""The client's connections by URL: which is used for what, and when one is opened or let go."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from laminar.client.connection import Answer, Buffer, Connection, ConnectionFailed, Target


class Pool:
    """Connections by URL: one shared for pipelined appends, others leased for one request each."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, connect_timeout_s: float, idle_s: float) -> None:
        self._loop = loop
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        self._shared: dict[str, Connection] = {}
        self._opening: dict[str, asyncio.Task[Connection]] = {}
        self._idle: dict[str, list[Connection]] = {}
        self._all: set[Connection] = set()
        self.opened = 0

    async def open(self, url: str) -> Connection:
        """A new connection; ConnectionFailed (not sent) if there is none to be had."""
        target = Target.of(url)
        factory = lambda: Connection(url, self._loop)  # noqa: E731
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                if target.path is not None:
                    # Connected by hand: uvloop knows no abstract names.
                    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                    try:
                        await self._loop.sock_connect(sock, target.path)
                    except BaseException:
                        sock.close()
                        raise
                    _, connection = await self._loop.create_unix_connection(factory, sock=sock)
                else:
                    _, connection = await self._loop.create_connection(
                        factory, target.host, target.port, ssl=True if target.tls else None
                    )
        except TimeoutError:
            raise ConnectionFailed(f"{url} did not accept a connection in time", sent=False) from None
        except OSError as fault:
            raise ConnectionFailed(f"{url}: {fault}", sent=False) from None
        self.opened += 1
        self._all = {each for each in self._all if not each.lost.done()}
        self._all.add(connection)
        return connection

    def shared_nowait(self, url: str) -> Connection | None:
        """The pipelining connection to `url`, if it is open."""
        connection = self._shared.get(url)
        return None if connection is None or connection.closed else connection

    async def shared(self, url: str) -> Connection:
        """The pipelining connection to `url`; opened by the first who asks, awaited by all."""
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
        """One request on a connection of its own; ConnectionFailed if no answer came."""
        connection = self._idle_connection(url) or await self.open(url)
        result: asyncio.Future[Answer] = self._loop.create_future()

        def on_answer(answer: Answer | None, failure: ConnectionFailed | None) -> None:
            if result.done():
                return
            if answer is not None:
                result.set_result(answer)
            else:
                assert failure is not None
                result.set_exception(failure)

        connection.request(head, body, on_answer, timeout_s=timeout_s, bodyless=bodyless)
        try:
            answer = await result
        except asyncio.CancelledError:
            connection.abort("cancelled")
            raise
        if not connection.closed:
            self._idle.setdefault(url, []).append(connection)
        return answer

    def _idle_connection(self, url: str) -> Connection | None:
        idle = self._idle.get(url)
        while idle:
            connection = idle.pop()
            if connection.closed:
                continue
            if self._loop.time() - connection.idle_since > self._idle_s:
                # A server may close what idles; better we, than between its close and our write.
                connection.abort("idle")
                continue
            return connection
        return None

    async def close(self) -> None:
        """Drop every connection, and wait until the loop has let go of them."""
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
