"""Connections kept by endpoint, each lent to one request at a time.

A kept connection may have been closed by the server just as it was lent; what
was certainly not sent is sent again on a new one, here, once per idle
connection. Everything else about repeating is the caller's.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque

from laminar.http.client import (
    ClientResponse,
    ConnectionLost,
    Endpoint,
    Headers,
    HttpConnection,
    RequestBody,
    RequestTimeout,
)


class _Site:
    """What the pool knows of one endpoint."""

    __slots__ = ("idle", "room", "users")

    def __init__(self, most: int) -> None:
        self.idle: deque[tuple[HttpConnection, float]] = deque()
        self.room = asyncio.Semaphore(most)
        self.users = 0


class ConnectionPool:
    """At most `most_per_endpoint` connections to each endpoint; idle ones are kept for `keep_s` seconds."""

    def __init__(
        self, *, most_per_endpoint: int = 64, keep_s: float = 60.0, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self._most = most_per_endpoint
        self._keep_s = keep_s
        self._ssl_context = ssl_context
        self._sites: dict[Endpoint, _Site] = {}
        self._closed = False
        self.opened = 0

    async def request(
        self,
        url: str | Endpoint,
        method: str,
        target: str,
        *,
        headers: Headers = (),
        body: RequestBody = b"",
        timeout: float = 30.0,
    ) -> ClientResponse:
        """One request; `timeout` seconds cover waiting for room, connecting and the answer."""
        endpoint = Endpoint.parse(url) if isinstance(url, str) else url
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout
        site = self._sites.get(endpoint)
        if site is None:
            site = self._sites[endpoint] = _Site(self._most)
        site.users += 1
        try:
            try:
                async with asyncio.timeout(timeout):
                    await site.room.acquire()
            except TimeoutError as error:
                raise RequestTimeout(f"no free connection to {endpoint}", outcome="not_sent") from error
            try:
                return await self._on_some_connection(
                    endpoint, site, method, target, headers, body, deadline_s
                )
            finally:
                site.room.release()
        finally:
            site.users -= 1
            if not site.users and not site.idle:
                self._sites.pop(endpoint, None)

    async def _on_some_connection(
        self,
        endpoint: Endpoint,
        site: _Site,
        method: str,
        target: str,
        headers: Headers,
        body: RequestBody,
        deadline_s: float,
    ) -> ClientResponse:
        loop = asyncio.get_running_loop()
        while True:
            connection = self._idle(site, loop.time())
            kept = connection is not None
            if connection is None:
                left_s = max(0.001, deadline_s - loop.time())
                connection = await HttpConnection.open(
                    endpoint, timeout=left_s, ssl_context=self._ssl_context
                )
                self.opened += 1
            try:
                return await connection.request(
                    method, target, headers=headers, body=body, timeout=max(0.001, deadline_s - loop.time())
                )
            except ConnectionLost as error:
                if error.outcome != "not_sent" or not kept:
                    raise
            finally:
                if connection.usable and not connection.outstanding and not self._closed:
                    site.idle.append((connection, loop.time()))
                else:
                    connection.retire()

    def _idle(self, site: _Site, now_s: float) -> HttpConnection | None:
        """The connection used last, if it is still good; older ones past their time are closed."""
        while site.idle and site.idle[0][1] < now_s - self._keep_s:
            site.idle.popleft()[0].abort()
        while site.idle:
            connection, _ = site.idle.pop()
            if connection.usable:
                return connection
        return None

    async def close(self) -> None:
        """Close idle connections; lent ones close when they come back."""
        self._closed = True
        sites, self._sites = self._sites, {}
        for site in sites.values():
            while site.idle:
                await site.idle.pop()[0].close()

    async def __aenter__(self) -> ConnectionPool:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
