"""What the HTTP tests share: an application that shows what it was asked, a server, and raw sockets."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from laminar.http.api.problem_response import answer_error
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Buffer, Request, Response
from laminar.http.server.server import HttpServer
from laminar.http.server.state import ServerLimits

# How long tests wait for what should come at once.
PATIENCE_S = 60.0
# Requests, and what they still want: number, length and body; or the rest of the target.
POST = b"POST /a?n=%d HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b"
GET = b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = (
    b"POST /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"
)


class Mirror:
    """Answers what it was asked; some paths behave otherwise."""

    def __init__(self) -> None:
        self.bodies: list[Buffer] = []
        self.handled: list[str] = []
        self.long = True
        self.parsed_in: list[int] = []
        self.gate = asyncio.Event()
        self.cancelled = 0
        self.ended = asyncio.Event()
        self.paths: dict[str, Callable[[Request], Response | Awaitable[Response]]] = {
            "/gate": self._wait,
            "/bug": self._bug,
            "/bug-later": self._bug_later,
            "/problem": self._problem,
            "/big": lambda request: Response(200, body=[b"x" * (3 << 20), b"", bytearray(b"y" * 5)]),
            "/stream": lambda request: Response(200, body=_stream()),
            "/measured-stream": lambda request: Response(200, body=_stream(), length=200_000),
            "/short-stream": lambda request: Response(200, body=_stream(), length=200_001),
            "/long-stream": lambda request: Response(200, body=_stream(), length=199_999),
            "/broken-stream": lambda request: Response(200, body=_broken_stream()),
            "/endless-stream": lambda request: Response(200, body=self._endless(), endless=True),
            "/nothing": lambda request: Response(204),
            "/close": lambda request: Response(200, body=b"bye", close=True),
        }

    def head(self, request: Request) -> Response | None:
        """Refuses what is under /refused, redirects what is under /moved."""
        if request.path == "/refused":
            raise Problem("too_large", field="body", value=request.content_length, limit=1)
        if request.path == "/moved":
            return Response(307, [("Location", "http://elsewhere:1/moved")])
        return None

    def parses_long(self, request: Request) -> bool:
        """Say what `long` says."""
        return self.long

    def parse(self, request: Request) -> None:
        """Nothing to be read of a body; the thread is noted."""
        self.parsed_in.append(threading.get_ident())

    def handle(self, request: Request) -> Response | Awaitable[Response]:
        """See the class."""
        self.handled.append(request.target)
        self.bodies.append(request.body)
        special = self.paths.get(request.path)
        if special is not None:
            return special(request)
        return Response.json(
            {
                "method": request.method,
                "path": request.path,
                "query": request.query,
                "length": len(request.body),
            }
        )

    async def _wait(self, request: Request) -> Response:
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Response.json({"query": request.query})

    async def _endless(self) -> AsyncIterator[Buffer]:
        """One part, and then nothing until it is closed."""
        try:
            yield b"begun"
            await asyncio.Event().wait()
        finally:
            self.ended.set()

    def _bug(self, request: Request) -> Response:
        raise RuntimeError("a mistake")

    async def _bug_later(self, request: Request) -> Response:
        raise RuntimeError("a later mistake")

    def _problem(self, request: Request) -> Response:
        raise Problem("no_leader", "nobody leads", retry_after_ms=1500)


async def _stream() -> AsyncIterator[Buffer]:
    for number in range(50):
        await asyncio.sleep(0)
        yield b"%04d" % number * 1000


async def _broken_stream() -> AsyncIterator[Buffer]:
    yield b"begun"
    raise RuntimeError("the stream broke")


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[str]:
    """A server that does exactly this on each connection, then closes it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def saying(*parts: bytes, requests: int = 1) -> Script:
    """Reads so many heads, says the parts one by one."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(requests):
            await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)

    return script


@asynccontextmanager
async def serving(app: Any, **limits: Any) -> AsyncIterator[tuple[HttpServer, str]]:
    """A server on a free port of loopback, and its URL; drained at the end."""
    server = HttpServer(app, ServerLimits(**limits), on_error=answer_error)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        await server.serve(sock)
        try:
            yield server, f"http://127.0.0.1:{port}"
        finally:
            await server.drain(timeout_s=0.1)


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A raw connection."""
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def exchange(url: str, *parts: bytes, eof: bool = True, pause: bool = True) -> bytes:
    """Send the parts one by one, then EOF; everything that comes back until the server closes."""
    reader, writer = await connect(url)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            if pause:
                await asyncio.sleep(0)
        if eof:
            writer.write_eof()
        return await reader.read()
    finally:
        writer.close()
        try:
            await writer.wait_closed()
        except ConnectionError:
            pass


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """One answer with a Content-Length."""
    raw = await reader.readuntil(b"\r\n\r\n")
    status_line, *lines = raw.decode().split("\r\n")[:-2]
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    status = int(status_line.split()[1])
    body = await reader.readexactly(int(headers.get("content-length", "0"))) if status >= 200 else b""
    return status, headers, body


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection as a killed process's machine would: by a reset."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def answers_in(raw: bytes) -> list[tuple[int, bytes]]:
    """Status and body of each answer in `raw`, all of them with a Content-Length."""
    found = []
    while raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        found.append((int(head.split()[1]), raw[:length]))
        raw = raw[length:]
    return found


async def until(condition: Callable[[], bool], *, seconds: float = PATIENCE_S) -> None:
    """Wait, a turn of the loop at a time, until something visible from outside has happened."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # counters have no event of their own
            await asyncio.sleep(0.002)
