"""The floor of an HTTP server: uvloop, httptools' callbacks and one write of a fixed receipt."""

from __future__ import annotations

import asyncio
from typing import cast

import httptools

VALUE_BYTES = 1024
RECEIPT = b'{"appended":1,"placed":[{"partition":3,"offset":812,"count":1}],"durable":{"replicas":3}}'
HEADERS = b"Content-Type: application/json\r\nLaminar-Node: n1\r\nLaminar-Shard: 0\r\n"


class Echo(asyncio.Protocol):
    """The floor: httptools' callbacks and one write."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.parser = httptools.HttpRequestParser(self)
        self.headers: list[tuple[bytes, bytes]] = []

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url = url
        self.headers = []
        self.body = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        assert len(self.body) == VALUE_BYTES
        self.transport.write(
            b"HTTP/1.1 200 OK\r\n%bContent-Length: %d\r\n\r\n%b" % (HEADERS, len(RECEIPT), RECEIPT)
        )
