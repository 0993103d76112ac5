"""Accept connections of TLS: each handshake is bounded in time, all together in number.

An event loop's own server reports no failed handshake, and allows any number at once. Here each handshake is
a task. When there are too many, the oldest is dropped: an honest client needs milliseconds, so the oldest
ones are the most likely never to end.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger("laminar.tls")

P = TypeVar("P", bound=asyncio.BaseProtocol)

HANDSHAKE_S = 5.0
SHUTDOWN_S = 30.0
"""How long a closed connection may take to send what it still has, and to hear the end of the other side."""
_AT_ONCE = 64
"""Connections taken in one turn of the loop."""
_PAUSE_S = 1.0
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class TlsListener(Generic[P]):
    """Accepts TLS connections on one listening socket, which it closes at its end.

    `make` returns the protocol of a new connection; `failed` is called with that protocol if the handshake
    failed. `context` is called for each connection and returns the TLS context.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        make: Callable[[], P],
        failed: Callable[[P, BaseException], None],
        context: Callable[[], ssl.SSLContext],
        most: int,
        handshake_s: float = HANDSHAKE_S,
        shutdown_s: float = SHUTDOWN_S,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Begin to accept; the socket listens already. At most `most` handshakes are under way at a time."""
        self._sock = sock
        self._make = make
        self._failed = failed
        self._context = context
        self._most = most
        self._handshake_s = handshake_s
        self._shutdown_s = shutdown_s
        self._loop = loop or asyncio.get_running_loop()
        self._handshakes: dict[asyncio.Task[None], socket.socket] = {}
        self._resume: asyncio.TimerHandle | None = None
        self._closed = False
        sock.setblocking(False)
        self._loop.add_reader(sock, self._accept)

    @property
    def handshakes(self) -> int:
        """Number of handshakes under way."""
        return len(self._handshakes)

    def close(self) -> None:
        """Accept no further connection, and drop those whose handshake is not over. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._resume is not None:
            self._resume.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for sock in self._handshakes.values():
            _end(sock)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_FILES:
                    raise
                log.error("connections wait for %g s: %s", _PAUSE_S, error)
                self._loop.remove_reader(self._sock)
                self._resume = self._loop.call_later(_PAUSE_S, self._go_on)
                return
            sock.setblocking(False)
            if len(self._handshakes) >= self._most:
                _end(self._handshakes.pop(next(iter(self._handshakes))))
            task = self._loop.create_task(self._shake(sock), name="TLS handshake")
            self._handshakes[task] = sock
            task.add_done_callback(self._ended)

    def _go_on(self) -> None:
        self._resume = None
        if not self._closed:
            self._loop.add_reader(self._sock, self._accept)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._handshakes.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            log.error("a connection was dropped by a bug", exc_info=task.exception())

    async def _shake(self, sock: socket.socket) -> None:
        protocol = self._make()
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                sock,
                ssl=self._context(),
                ssl_handshake_timeout=self._handshake_s,
                ssl_shutdown_timeout=self._shutdown_s,
            )
        except OSError as error:
            self._failed(protocol, error)


def _end(sock: socket.socket) -> None:
    """End a handshake, which then fails: its task closes the socket."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended by itself
