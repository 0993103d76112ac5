"""The client's side: order, buffers, failures that say what may have happened; and the pool."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from laminar.http.client import (
    BadResponse,
    ConnectFailed,
    ConnectionLost,
    Endpoint,
    HttpConnection,
    HttpError,
    RequestTimeout,
    fetch_once,
)
from laminar.http.messages import Buffer
from laminar.http.pool import ConnectionPool
from laminar.http.server import HttpServer
from tests.http.serving import Mirror, serving, until

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


async def test_concurrent_requests_are_matched_in_order() -> None:
    """Pipelined on one connection, of all sizes, answered at different times."""
    app = Mirror()
    async with serving(app) as (_, url), await HttpConnection.open(url) as connection:
        asking = [
            asyncio.ensure_future(
                connection.request(
                    "POST", f"/gate?{number}" if number % 3 == 0 else f"/{number}", body=b"x" * number * 999
                )
            )
            for number in range(50)
        ]
        await until(lambda: len(app.handled) == 50)
        assert 50 == connection.outstanding
        app.gate.set()
        answers = [(await answer).json() for answer in asking]

        for number, answer in enumerate(answers):
            if number % 3 == 0:
                assert {"query": {str(number): ""}} == answer
            else:
                assert (f"/{number}", number * 999) == (answer["path"], answer["length"])


async def test_a_body_may_be_many_buffers_or_an_iterator() -> None:
    """Written without joining; the server sees one body."""

    async def parts() -> AsyncIterator[Buffer]:
        for _ in range(100):
            yield b"chunk" * 1000
            yield b""

    app = Mirror()
    async with serving(app) as (_, url), await HttpConnection.open(url) as connection:
        buffers: list[Buffer] = [b"head", memoryview(bytearray(5 << 20)), bytearray(b"tail")]
        sent, streamed, after = await asyncio.gather(
            connection.request("POST", "/a", body=buffers),
            connection.request("POST", "/b", body=parts()),
            connection.request("POST", "/c", body=b"small"),
        )

    assert (5 << 20) + 8 == sent.json()["length"]
    assert 500_000 == streamed.json()["length"]
    assert 5 == after.json()["length"]
    assert ["/a", "/b", "/c"] == app.handled


async def test_a_known_body_is_received_into_one_buffer() -> None:
    """Large, small, empty, chunked, absent: all come whole."""
    async with serving(Mirror()) as (_, url), await HttpConnection.open(url) as connection:
        big = await connection.request("GET", "/big")
        stream = await connection.request("GET", "/stream")
        nothing = await connection.request("GET", "/nothing")
        head = await connection.request("HEAD", "/big")

    assert isinstance(big.body, bytearray)
    assert b"x" * (3 << 20) + b"y" * 5 == big.body
    assert 50 * 4000 == len(stream.body)
    assert (204, b"") == (nothing.status, nothing.body)
    assert (str((3 << 20) + 5), b"") == (head.headers["content-length"], head.body)


ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nA: b\r\n\r\nhello"
STREAMED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"


@pytest.mark.parametrize("answer", [ANSWER, STREAMED, b"HTTP/1.1 103 Early\r\n\r\n" + ANSWER])
async def test_an_answer_may_be_cut_anywhere(answer: bytes) -> None:
    """And another one may follow in the same segment."""
    for at in range(1, len(answer)):
        async with (
            scripted(saying(answer[:at], answer[at:] + ANSWER, requests=2)) as url,
            await HttpConnection.open(url) as connection,
        ):
            first, second = await asyncio.gather(
                connection.request("GET", "/1"), connection.request("GET", "/2")
            )
            assert (b"hello", b"hello") == (first.body, second.body)


async def test_a_body_may_end_with_the_connection() -> None:
    """As HTTP/1.0 servers do."""
    async with scripted(saying(b"HTTP/1.0 200 OK\r\n\r\nhel", b"lo")) as url:
        connection = await HttpConnection.open(url)

        assert b"hello" == (await connection.request("GET", "/")).body
        assert not connection.usable
        await connection.close()


@pytest.mark.parametrize(
    ("said", "kind", "outcome"),
    [
        (b"", ConnectionLost, "unknown"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", ConnectionLost, "unknown"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello", ConnectionLost, "unknown"),
        (STREAMED[:-3], ConnectionLost, "unknown"),
        (b"SSH-2.0\r\n\r\n", BadResponse, "unknown"),
        (STREAMED.replace(b"5\r\n", b"x\r\n"), BadResponse, "unknown"),
        (b"HTTP/1.1 101 Switching\r\n\r\n", BadResponse, "unknown"),
    ],
)
async def test_an_answer_that_does_not_come_whole_is_unknown(
    said: bytes, kind: type[HttpError], outcome: str
) -> None:
    """The request may have been carried out."""
    async with scripted(saying(said)) as url:
        connection = await HttpConnection.open(url)

        with pytest.raises(kind) as failed:
            await connection.request("POST", "/", body=b"hi")
        assert outcome == failed.value.outcome
        assert not connection.usable
        await connection.close()


async def test_what_is_pipelined_behind_a_closing_answer_was_not_done() -> None:
    """RFC 9112, 9.6: so it may be sent again elsewhere."""
    closing = ANSWER.replace(b"A: b", b"Connection: close")
    async with scripted(saying(closing, requests=2)) as url:
        connection = await HttpConnection.open(url)
        first, second = await asyncio.gather(
            connection.request("POST", "/1"), connection.request("POST", "/2"), return_exceptions=True
        )
        await connection.close()

    assert not isinstance(first, BaseException) and first.status == 200
    assert isinstance(second, ConnectionLost) and second.outcome == "not_sent"


async def test_a_request_on_a_closed_connection_was_not_sent() -> None:
    """Nor is one that finds the connection closed by the server meanwhile."""
    async with scripted(saying(requests=0)) as url:
        connection = await HttpConnection.open(url)
        await until(lambda: not connection.usable)

        with pytest.raises(ConnectionLost) as failed:
            await connection.request("POST", "/")
        assert "not_sent" == failed.value.outcome
        await connection.close()


async def test_no_connection_is_a_failure_of_its_own() -> None:
    """Refused, or an abstract name that nobody has: nothing was sent."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        unused = f"http://127.0.0.1:{sock.getsockname()[1]}"
        for url in (unused, f"unix:@laminar-test-{uuid.uuid4()}"):
            with pytest.raises(ConnectFailed) as failed:
                await fetch_once(url, "GET", "/")
            assert "not_sent" == failed.value.outcome


async def test_a_timeout_is_a_timeout_error_with_an_unknown_outcome() -> None:
    """The connection takes no more requests; those before it are still answered."""
    app = Mirror()
    async with serving(app) as (_, url):
        connection = await HttpConnection.open(url)
        patient = asyncio.ensure_future(connection.request("GET", "/gate?patient"))
        with pytest.raises(TimeoutError) as failed:
            await connection.request("GET", "/gate?hasty", timeout=0.02)
        assert isinstance(failed.value, RequestTimeout) and failed.value.outcome == "unknown"
        assert not connection.usable
        app.gate.set()
        assert {"query": {"patient": ""}} == (await patient).json()
        await connection.close()


async def test_a_cancelled_request_ends_the_connection_when_nobody_else_waits() -> None:
    """The answer would otherwise be taken for the next request's."""
    app = Mirror()
    async with serving(app) as (server, url):
        connection = await HttpConnection.open(url)
        asking = asyncio.ensure_future(connection.request("GET", "/gate"))
        await until(lambda: len(app.handled) == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: server.statistics()["open_connections"] == 0)
        await connection.close()


async def test_an_early_refusal_is_heard_while_the_body_is_still_being_sent() -> None:
    """413 to a stream that has no end of its own."""

    async def endless() -> AsyncIterator[Buffer]:
        while True:
            yield bytes(65536)

    async with serving(Mirror()) as (_, url):
        connection = await HttpConnection.open(url)
        answer = await connection.request("POST", "/refused", body=endless(), timeout=10)

        assert 413 == answer.status
        assert not connection.usable
        await connection.close()


async def test_a_body_that_fails_half_way_ends_the_connection() -> None:
    """The server must not take what follows for its rest."""

    async def failing() -> AsyncIterator[Buffer]:
        yield b"begun"
        raise ValueError("no more")

    app = Mirror()
    async with serving(app) as (_, url):
        connection = await HttpConnection.open(url)
        with pytest.raises(ValueError, match="no more"):
            await connection.request("POST", "/a", body=failing())
        assert not connection.usable
        await connection.close()

    assert [] == app.handled


async def test_abstract_unix_sockets_work_as_tcp_does() -> None:
    """Between the shards of a node."""
    name = f"laminar-test-{uuid.uuid4()}"
    server = HttpServer(Mirror())
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind("\0" + name)
        await server.serve(sock)
        try:
            answer = await fetch_once(f"unix:@{name}", "POST", "/a", body=b"hello")
        finally:
            await server.drain(timeout_s=1)

    assert 5 == answer.json()["length"]


def test_plain_asyncio_serves_the_client_too() -> None:
    """A user's program may have any loop; the server runs on it as well."""

    async def main() -> None:
        app = Mirror()
        async with serving(app) as (_, url), await HttpConnection.open(url) as connection:
            answers = await asyncio.gather(
                *[connection.request("POST", "/a", body=[b"x" * 300_000] * 3) for _ in range(10)]
            )
            assert [900_000] * 10 == [answer.json()["length"] for answer in answers]
            assert (3 << 20) + 5 == len((await connection.request("GET", "/big")).body)

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(main())


@pytest.mark.parametrize(
    ("url", "endpoint", "authority"),
    [
        ("http://a:7070", Endpoint("a", 7070), "a:7070"),
        ("http://[::1]:7070/path", Endpoint("::1", 7070), "[::1]:7070"),
        ("https://a", Endpoint("a", 443, tls=True), "a:443"),
        ("unix:@n", Endpoint("", 0, "n"), "localhost"),
    ],
)
def test_endpoints_are_read_from_urls(url: str, endpoint: Endpoint, authority: str) -> None:
    """With the Host header that belongs to each."""
    assert endpoint == Endpoint.parse(url)
    assert authority == endpoint.authority


@pytest.mark.parametrize("url", ["a:7070", "ftp://a", "http://", "unix:/path", ""])
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    """Before anything is tried."""
    with pytest.raises(ValueError, match="no URL"):
        Endpoint.parse(url)


def test_a_header_cannot_smuggle_another() -> None:
    """A line break in a header is our mistake, not a request."""

    async def main() -> None:
        async with serving(Mirror()) as (_, url), await HttpConnection.open(url) as connection:
            with pytest.raises(AssertionError):
                await connection.request("GET", "/", headers={"A": "b\r\nC: d"})

    asyncio.run(main())


async def test_the_pool_keeps_connections_and_replaces_stale_ones() -> None:
    """One connection serves many requests; when the server closed it, another is opened unseen."""
    app = Mirror()
    async with serving(app) as (server, url), ConnectionPool() as pool:
        for _ in range(5):
            await pool.request(url, "POST", "/a")
        assert 1 == pool.opened
        await pool.request(url, "GET", "/close")
        assert 200 == (await pool.request(url, "POST", "/a")).status
        assert 2 == pool.opened
        assert 2 == server.statistics()["connections"]


async def test_the_pool_has_a_limit_for_each_endpoint() -> None:
    """What is beyond waits its turn, or times out without having been sent."""
    app = Mirror()
    async with serving(app) as (_, url), ConnectionPool(most_per_endpoint=2) as pool:
        waiting = [asyncio.ensure_future(pool.request(url, "GET", f"/gate?{n}")) for n in range(3)]
        await until(lambda: len(app.handled) == 2)
        with pytest.raises(RequestTimeout) as failed:
            await pool.request(url, "GET", "/a", timeout=0.02)
        assert "not_sent" == failed.value.outcome
        app.gate.set()
        assert [200] * 3 == [answer.status for answer in await asyncio.gather(*waiting)]
        assert 2 == pool.opened


async def test_the_pool_does_not_repeat_what_may_have_been_done() -> None:
    """A connection lost after the request was sent is the caller's to judge."""
    async with scripted(saying(ANSWER, b"", requests=1)) as url, ConnectionPool() as pool:
        await pool.request(url, "POST", "/1")

        async with scripted(saying(b"")) as dying:
            with pytest.raises(ConnectionLost) as failed:
                await pool.request(dying, "POST", "/2")
        assert "unknown" == failed.value.outcome
