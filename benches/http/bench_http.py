"""Single-record POST/s of the HTTP server beside a bare uvloop + httptools echo.

Both serve from one process each, one core each for server and client; the client
holds 64 connections, each with one request on its way, and does as little as it
can. The rounds alternate, so that a slow moment of the machine hits both.

Run: ``python -m benches.http.bench_http``
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import statistics
import time
from collections.abc import Callable, Coroutine
from typing import cast

import uvloop

from benches.common.echo import HEADERS, RECEIPT, VALUE_BYTES, Echo
from laminar.http.protocol.messages import Request, Response
from laminar.http.server.server import HttpServer

CONNECTIONS = 64
MOST_PERIODS = 60


class Trivial:
    """Answers every append with the same receipt: at once, or by a future of the same loop turn."""

    def __init__(self, *, futures: bool) -> None:
        self.futures = futures
        self._loop = asyncio.get_running_loop()
        self._waiting: list[asyncio.Future[Response]] = []

    def head(self, request: Request) -> Response | None:
        return None

    def parses_long(self, request: Request) -> bool:
        return True

    def parse(self, request: Request) -> None:
        return None

    def handle(self, request: Request) -> Response | asyncio.Future[Response]:
        assert len(request.body) == VALUE_BYTES
        if not self.futures:
            return Response(200, body=RECEIPT, header_block=HEADERS)
        if not self._waiting:
            self._loop.call_soon(self._commit)
        future: asyncio.Future[Response] = self._loop.create_future()
        self._waiting.append(future)
        return future

    def _commit(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.set_result(Response(200, body=RECEIPT, header_block=HEADERS))


class Caller(asyncio.Protocol):
    """One connection that always has one request on its way."""

    count = 0

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        if self.seen:
            data = self.seen + data
        if not data.endswith(RECEIPT):
            self.seen = data
            return
        self.seen = b""
        Caller.count += 1
        self.transport.write(self.request)


async def _serve_laminar(sock: socket.socket, *, futures: bool) -> None:
    await HttpServer(Trivial(futures=futures)).serve(sock)
    await asyncio.Event().wait()


async def _serve_echo(sock: socket.socket) -> None:
    await asyncio.get_running_loop().create_server(Echo, sock=sock)
    await asyncio.Event().wait()


def _fork_server(serve: Callable[[socket.socket], Coroutine[None, None, None]]) -> tuple[int, int]:
    """The process and its port."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(1024)
    port = sock.getsockname()[1]
    pid = os.fork()
    if pid == 0:
        try:
            gc.freeze()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve(sock))
        finally:
            os._exit(1)
    sock.close()
    return pid, port


async def _load(port: int, seconds: float) -> float:
    """Requests/s over `seconds`, or several times that until an answer came, after a short warm-up."""
    loop = asyncio.get_running_loop()
    request = (
        b"POST /v1/topics/flights/partitions/3/records HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
        b"User-Agent: bench\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n%b"
    ) % (port, VALUE_BYTES, b"x" * VALUE_BYTES)
    transports = [
        (await loop.create_connection(lambda: Caller(request), "127.0.0.1", port))[0]
        for _ in range(CONNECTIONS)
    ]
    await asyncio.sleep(0.2)
    before, began = Caller.count, time.perf_counter()
    for _ in range(MOST_PERIODS):
        await asyncio.sleep(seconds)
        if Caller.count > before:  # on a busy machine a server may not run for so long
            break
    else:
        raise TimeoutError(
            f"a server on port {port} answered nothing in {MOST_PERIODS} periods of {seconds:g} s"
        )
    rate = (Caller.count - before) / (time.perf_counter() - began)
    for transport in transports:
        transport.abort()
    await asyncio.sleep(0.05)
    return rate


def run(*, rounds: int = 3, seconds: float = 1.0) -> dict[str, float]:
    """Medians in requests/s, and what fraction of the echo's the server's are."""
    servers = {
        "echo": _fork_server(_serve_echo),
        "server": _fork_server(lambda sock: _serve_laminar(sock, futures=False)),
        "server_futures": _fork_server(lambda sock: _serve_laminar(sock, futures=True)),
    }
    rates: dict[str, list[float]] = {name: [] for name in servers}
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            for _ in range(rounds):
                for name, (_, port) in servers.items():
                    rates[name].append(runner.run(_load(port, seconds)))
    finally:
        for pid, _ in servers.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    result = {name: statistics.median(found) for name, found in rates.items()}
    result["ratio"] = result["server"] / result["echo"]
    result["ratio_futures"] = result["server_futures"] / result["echo"]
    return result


def main() -> None:
    """Print one line a figure."""
    for name, value in run().items():
        unit = "of the echo" if name.startswith("ratio") else "POST/s"
        print(f"{name:>16} {value:12,.2f} {unit}")


if __name__ == "__main__":
    main()
