"""The HTTP server over TLS: what differs from plain TCP is how a connection ends, and nothing else."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from laminar.http.api.problem_response import answer_error
from laminar.http.client.connection import ask_once
from laminar.http.client.tls import Trust
from laminar.http.protocol.messages import Request, Response
from laminar.http.server.reader import Connection
from laminar.http.server.server import HttpServer
from laminar.http.server.state import ServerLimits
from laminar.node.access.certificates import subject_of
from laminar.node.host.certificates import Certificates, node_names
from laminar.node.host.tls_listener import SHUTDOWN_S, TlsListener
from tests.certificates import Authority
from tests.http.serving import GET, PATIENCE_S, POST, Mirror, read_answer, until

VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """A CA."""
    return Authority(tmp_path / "ca")


@asynccontextmanager
async def serving(
    authority: Authority, app: Any, *, shutdown_s: float = SHUTDOWN_S, **limits: Any
) -> AsyncIterator[tuple[HttpServer, int]]:
    """A server that speaks TLS on a free port of loopback."""
    server = HttpServer(app, ServerLimits(**limits), on_error=answer_error)
    certificates = Certificates(authority.files(authority.node("n1")))
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    listener = TlsListener(
        sock,
        make=server.protocol_factory,
        failed=lambda connection, error: None,
        context=lambda: certificates.current.http,
        most=64,
        shutdown_s=shutdown_s,
    )
    try:
        yield server, port
    finally:
        listener.close()
        await server.drain(timeout_s=0.1)


async def connect(port: int, context: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection of TLS."""
    return await asyncio.open_connection("127.0.0.1", port, ssl=context)


@pytest.mark.parametrize("version", VERSIONS)
async def test_bodies_and_answers_of_all_sizes_pass(authority: Authority, version: ssl.TLSVersion) -> None:
    """Kept alive, pipelined, chunked, large in both directions."""
    app = Mirror()
    async with serving(authority, app) as (server, port):
        reader, writer = await connect(port, authority.context(version=version))
        writer.write(b"".join(POST % (number, 3, b"abc") for number in range(200)))
        for number in range(200):
            status, _, body = await asyncio.wait_for(read_answer(reader), PATIENCE_S)
            assert (200, {"n": str(number)}) == (status, json.loads(body)["query"])
        large = bytes(range(256)) * 40_000
        writer.write(POST % (1, len(large), large))
        assert len(large) == json.loads((await read_answer(reader))[2])["length"]
        assert large == bytes(app.bodies[-1])
        for path, size in ((b"big", (3 << 20) + 5), (b"measured-stream", 200_000)):
            writer.write(GET % path)
            assert size == len((await asyncio.wait_for(read_answer(reader), PATIENCE_S))[2])
        writer.close()

        assert 1 == server.statistics()["connections"]


async def test_ordinary_clients_are_served(authority: Authority) -> None:
    """HTTPX, and our own client with a context of its own."""
    async with serving(authority, Mirror()) as (_, port):
        url = f"https://127.0.0.1:{port}"
        async with httpx.AsyncClient(
            verify=authority.context(), trust_env=False, timeout=PATIENCE_S
        ) as client:
            assert 10 == (await client.post(f"{url}/a", content=b"x" * 10)).json()["length"]
        answer = await ask_once(
            url, "GET", "/b", timeout_s=PATIENCE_S, trust=Trust.of(authority.context(), "ca")
        )
        assert "/b" == answer.json()["path"]
        with pytest.raises(httpx.ConnectError, match="self-signed certificate"):
            async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
                await client.get(url)


async def test_the_application_sees_a_verified_certificate(authority: Authority, tmp_path: Path) -> None:
    """Of a client that shows one; one of another CA is refused, and none is as good as before."""
    seen: list[tuple[str, frozenset[str]]] = []

    class Seeing(Mirror):
        def head(self, request: Request) -> Response | None:
            shown = request.connection.certificate
            seen.append((subject_of(shown or {}), node_names(shown)))
            return None

    stranger = Authority(tmp_path / "other").client("billing")
    async with serving(authority, Seeing()) as (_, port):
        for pair in (None, authority.client("billing"), authority.node("n2")):
            reader, writer = await connect(port, authority.context(pair))
            writer.write(GET % b"a")
            assert 200 == (await read_answer(reader))[0]
            writer.close()
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            reader, writer = await connect(port, authority.context(stranger))
            writer.write(GET % b"a")
            await read_answer(reader)

    assert [("", frozenset()), ("CN=billing", frozenset()), ("CN=n2", frozenset({"n2"}))] == seen


async def test_a_refusal_before_the_body_arrives_whole(authority: Authority) -> None:
    """TLS has no half of a connection to end: the rest of the body is read, then the connection ends."""
    async with serving(authority, Mirror(), linger_s=2.5) as (_, port):
        reader, writer = await connect(port, authority.context())
        writer.write(b"POST /refused HTTP/1.1\r\nHost: a\r\nContent-Length: 3000000\r\n\r\n")
        writer.write(b"x" * 1_000_000)

        status, headers, _ = await asyncio.wait_for(read_answer(reader), PATIENCE_S)

        assert (413, "close") == (status, headers["connection"])
        assert b"" == await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()


async def test_an_answer_that_closes_reaches_a_slow_reader_whole(authority: Authority) -> None:
    """The end of TLS waits until all is sent, however slowly the peer reads."""

    class Last(Mirror):
        def handle(self, request: Request) -> Response:
            return Response(200, body=b"z" * 4_000_000, close=True)

    async with serving(authority, Last(), linger_s=0.2) as (_, port):
        context = authority.context()

        def read_slowly() -> int:
            with socket.create_connection(("127.0.0.1", port)) as plain:
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
                with context.wrap_socket(plain, server_hostname="127.0.0.1") as sock:
                    sock.sendall(GET % b"a")
                    size = 0
                    while part := sock.recv(65_536):
                        size += len(part)
                        time.sleep(0.02)
                    return size

        received = await asyncio.get_running_loop().run_in_executor(None, read_slowly)

    assert received > 4_000_000


async def test_the_end_waits_for_no_client_that_is_asleep(authority: Authority) -> None:
    """An idle client that answers the end of TLS with nothing holds a draining server up for a moment."""
    context = authority.context()

    def asleep(port: int) -> ssl.SSLSocket:
        sock = context.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="127.0.0.1")
        sock.sendall(GET % b"a")
        sock.recv(65_536)
        return sock

    async with serving(authority, Mirror()) as (server, port):
        sock = await asyncio.get_running_loop().run_in_executor(None, asleep, port)
        began = time.monotonic()

        assert await server.drain(timeout_s=2 * PATIENCE_S)

        assert time.monotonic() - began < PATIENCE_S
        assert b"" == sock.recv(10)
        sock.close()


async def test_a_client_that_leaves_ends_what_it_waits_for(authority: Authority) -> None:
    """As over plain TCP; the loop has nothing to say to its log."""
    app = Mirror()
    async with serving(authority, app) as (_, port):
        _, writer = await connect(port, authority.context())
        writer.write(GET % b"gate")
        await until(lambda: bool(app.handled))
        writer.close()
        await until(lambda: app.cancelled == 1)


async def test_a_hello_of_tls_is_refused_by_a_plain_port_at_once() -> None:
    """It is no head of HTTP, and no more of it is awaited."""
    from tests.http.serving import serving as plain

    async with plain(Mirror(), head_timeout_s=2 * PATIENCE_S) as (_, url):
        began = time.monotonic()
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(
                "127.0.0.1", int(url.rpartition(":")[2]), ssl=ssl.create_default_context()
            )
        assert time.monotonic() - began < PATIENCE_S


async def test_a_reader_that_stands_still_is_cut_off(authority: Authority) -> None:
    """And until then what it does not read waits in pieces, as over plain TCP."""
    async with serving(authority, Mirror(), write_timeout_s=0.3, write_high_bytes=65_536) as (server, port):
        _, writer = await connect(port, authority.context())
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # of a transport that reads
        writer.write(GET % b"big" * 20)
        await until(lambda: server.statistics()["slow_readers"] == 1)
        await until(lambda: server.statistics()["open_connections"] == 0)
        writer.close()


async def test_one_that_stands_still_before_the_last_piece_is_cut_off_too(authority: Authority) -> None:
    """What the loop has encrypted is not counted: the idle time, and that of the end, bound it."""

    class Small(Mirror):
        def handle(self, request: Request) -> Response:
            return Response(200, body=b"z" * 900_000)

    async with serving(authority, Small(), shutdown_s=0.3, idle_timeout_s=0.3) as (server, port):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        _, writer = await asyncio.open_connection(
            sock=sock, ssl=authority.context(), server_hostname="127.0.0.1"
        )
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # of a transport that reads
        writer.write(GET % b"a")
        await until(lambda: server.statistics()["responses_2xx"] == 1)
        await until(lambda: server.statistics()["open_connections"] == 0)
        writer.transport.abort()


async def test_a_sweep_between_the_end_and_its_report_harms_nothing(authority: Authority) -> None:
    """The loop reports the end of TLS a turn after its socket is gone; a sweep that fails is the last."""
    async with serving(authority, Mirror()) as (server, port):
        _, writer = await connect(port, authority.context())
        await until(lambda: bool(server._connections))
        (connection,) = server._connections
        assert isinstance(connection, Connection)
        writer.transport.abort()
        between = 0
        while connection.transport is not None:
            between += connection.transport.get_extra_info("socket") is None
            connection.sweep(server.now_s)
            await asyncio.sleep(0)

        assert between


async def test_one_that_ends_tcp_and_then_reads_nothing_is_cut_off(authority: Authority) -> None:
    """The loop has begun to close by itself, without a limit, and does not count what is left."""

    class Small(Mirror):
        def handle(self, request: Request) -> Response:
            return Response(200, body=b"z" * 40_000)

    context = authority.context()

    def asleep(port: int) -> ssl.SSLSocket:
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.connect(("127.0.0.1", port))
        return context.wrap_socket(plain, server_hostname="127.0.0.1")

    async with serving(authority, Small(), shutdown_s=0.2) as (server, port):
        sock = await asyncio.get_running_loop().run_in_executor(None, asleep, port)
        await until(lambda: bool(server._connections))
        (connection,) = server._connections
        assert isinstance(connection, Connection) and connection.transport is not None
        small = connection.transport.get_extra_info("socket")
        small.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sock.sendall(GET % b"a")
        await until(lambda: server.statistics()["responses_2xx"] == 1)
        with socket.socket(fileno=socket.dup(sock.fileno())) as tcp:
            tcp.shutdown(socket.SHUT_WR)
        server.limits = msgspec.structs.replace(server.limits, idle_timeout_s=0.3)

        await until(lambda: server.statistics()["open_connections"] == 0)

        assert 1 == server.statistics()["slow_readers"]
        sock.close()
