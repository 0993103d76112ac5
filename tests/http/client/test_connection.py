"""The client's connection: answers whole and split, of every framing, pipelined, lost."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.http.api.problem_response import answer_error
from laminar.http.client import connection as client
from laminar.http.client.connection import ClientConnection, ask_once, head_bytes, open_connection
from laminar.http.protocol.answer import Answer, Buffer, ConnectionFailed, Target
from laminar.http.server.server import HttpServer
from tests.http.serving import PATIENCE_S, Mirror, saying, scripted, serving, until

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nX-Sum: 1\r\n\r\n"
)
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
BIG = b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + b"x" * 200_000


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.aborted = False

    def write(self, data: Buffer) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


def deliver(connection: ClientConnection, data: bytes, cuts: list[int]) -> None:
    """Hand `data` to the protocol in pieces that end at `cuts`, as a socket would."""
    ends = sorted({cut for cut in cuts if 0 < cut < len(data)} | {len(data)})
    position = 0
    for end in ends:
        while position < end:
            if connection.closed:
                return
            buffer = connection.get_buffer(-1)
            size = min(len(buffer), end - position)
            buffer[:size] = data[position : position + size]
            connection.buffer_updated(size)
            position += size


async def answers(data: bytes, requests: int, cuts: list[int]) -> list[Answer | ConnectionFailed | None]:
    """What becomes of so many requests when the server says `data`, then nothing more."""
    connection = ClientConnection("http://x", asyncio.get_running_loop())
    connection.connection_made(Wire())
    found: list[Answer | ConnectionFailed | None] = []
    for _ in range(requests):
        connection.request(
            b"GET / HTTP/1.1\r\n\r\n", (), lambda a, f: found.append(a or f), timeout_s=PATIENCE_S
        )
    deliver(connection, data, cuts)
    if not connection.closed:
        connection.eof_received()
    connection.connection_lost(None)
    return found


async def ask(
    connection: ClientConnection,
    target: str,
    body: bytes = b"",
    *,
    method: str = "GET",
    timeout_s: float = PATIENCE_S,
) -> Answer:
    """A request as the client would make it."""
    headers = {"Content-Length": str(len(body))} if body else {}
    head = head_bytes(method, target, "x", headers)
    return await connection.ask(head, (body,), timeout_s=timeout_s, bodyless=method == "HEAD")


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[ClientConnection]:
    """A connection, gone afterwards."""
    connection = await open_connection(url, timeout_s=PATIENCE_S)
    try:
        yield connection
    finally:
        connection.abort()
        await connection.lost


# -- answers -----------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from([PLAIN, CHUNKED, EMPTY, INTERIM + PLAIN]), max_size=4),
    st.lists(st.integers(1, 300)),
)
def test_answers_are_the_same_however_they_are_cut(parts: list[bytes], cuts: list[int]) -> None:
    """Pipelined answers come in order, with the same bodies, whole or byte by byte."""
    found = asyncio.run(answers(b"".join(parts), len(parts), cuts))

    bodies = [bytes(each.body) for each in found if isinstance(each, Answer)]
    assert [b"" if part == EMPTY else b"hello" for part in parts] == bodies


@given(st.lists(st.integers(1, 210_000), max_size=5))
def test_a_large_body_goes_into_its_own_buffer(cuts: list[int]) -> None:
    """However it is cut, the next answer is not touched."""
    first, second = asyncio.run(answers(BIG + PLAIN, 2, cuts))

    assert isinstance(first, Answer) and isinstance(second, Answer)
    assert (200_000, b"hello") == (len(first.body), bytes(second.body))


async def test_a_large_chunked_body_may_come_in_any_pieces() -> None:
    """Far larger than the buffer, in chunks larger and smaller than it."""
    chunks = [b"x" * size for size in (1, 100_000, 70_000, 3)]
    coded = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + coded + b"0\r\n\r\n"
    first, second = await answers(data + PLAIN, 2, list(range(0, len(data), 997)))

    assert isinstance(first, Answer) and isinstance(second, Answer)
    assert (170_004, b"hello") == (len(first.body), bytes(second.body))


@pytest.mark.parametrize("cuts", [[], [20], list(range(40))])
async def test_what_ends_with_the_connection_is_a_body(cuts: list[int]) -> None:
    """As HTTP/1.0 servers do."""
    (answer,) = await answers(b"HTTP/1.0 200 OK\r\n\r\nuntil the end", 1, cuts)

    assert isinstance(answer, Answer)
    assert b"until the end" == answer.body


async def test_a_body_cut_off_by_a_fault_is_no_answer() -> None:
    """Only the server's own end of sending ends a body of unknown length."""
    connection = ClientConnection("http://x", asyncio.get_running_loop())
    connection.connection_made(Wire())
    found: list[Answer | ConnectionFailed | None] = []
    connection.request(b"GET / HTTP/1.1\r\n\r\n", (), lambda a, f: found.append(a or f), timeout_s=PATIENCE_S)
    deliver(connection, b"HTTP/1.0 200 OK\r\n\r\nuntil the", [])
    connection.connection_lost(ConnectionResetError("reset"))

    assert isinstance(found[0], ConnectionFailed) and found[0].sent


@pytest.mark.parametrize(
    "data",
    [
        b"",
        PLAIN[:-1],
        CHUNKED[:-4],
        CHUNKED.replace(b"3\r\n", b"x\r\n"),
        b"HTTP/1.1 200",
        b"SMTP hello\r\n\r\n",
        PLAIN.replace(b"5", b"-5"),
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"b" * (64 << 10),
    ],
    ids=lambda data: repr(data[:30]),
)
async def test_half_an_answer_is_a_failure(data: bytes) -> None:
    """Truncated, or no HTTP at all: never an answer, and the request may have been carried out."""
    (failure,) = await answers(data, 1, [])

    assert isinstance(failure, ConnectionFailed)
    assert failure.sent


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\n" + b"x" * 100 + b"\r\n1\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 101,
    ],
)
async def test_an_answer_over_the_limit_is_refused(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every framing, before memory is spent on it."""
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 100)
    (failure,) = await answers(data, 1, [])

    assert isinstance(failure, ConnectionFailed)
    assert "101" in str(failure) or "more than 100" in str(failure)


async def test_an_answer_to_nothing_ends_the_connection() -> None:
    """It would be taken for the next request's."""
    connection = ClientConnection("http://x", asyncio.get_running_loop())
    wire = Wire()
    connection.connection_made(wire)
    deliver(connection, PLAIN, [])

    assert (True, True) == (connection.closed, wire.aborted)


# -- ends --------------------------------------------------------------------------------------


async def test_what_is_pipelined_behind_a_closing_answer_was_not_done() -> None:
    """RFC 9112, 9.6: so it may be sent again elsewhere."""
    found = await answers(PLAIN.replace(b"X-A: b", b"Connection: close") + PLAIN, 3, [])

    assert [Answer, ConnectionFailed, ConnectionFailed] == [type(each) for each in found]
    assert [False, False] == [each.sent for each in found if isinstance(each, ConnectionFailed)]


async def test_a_request_on_a_closed_connection_was_not_sent() -> None:
    """Nor is one that finds the connection closed by the server meanwhile."""
    async with scripted(saying(requests=0)) as url, connected(url) as connection:
        await until(lambda: connection.closed)

        with pytest.raises(ConnectionFailed) as failed:
            await ask(connection, "/")
        assert not failed.value.sent


async def test_no_connection_is_a_failure_of_its_own() -> None:
    """Refused, or an abstract name that nobody has: nothing was sent."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        unused = f"http://127.0.0.1:{sock.getsockname()[1]}"
        for url in (unused, f"unix:@laminar-test-{uuid.uuid4()}"):
            with pytest.raises(ConnectionFailed) as failed:
                await ask_once(url, "GET", "/", timeout_s=PATIENCE_S)
            assert not failed.value.sent


async def test_a_silent_server_is_given_up_in_time() -> None:
    """The failure says who it was, the outcome is unknown, and the server hears of it."""
    app = Mirror()
    async with serving(app) as (server, url), connected(url) as connection:
        with pytest.raises(ConnectionFailed, match="did not answer in time") as failed:
            await ask(connection, "/gate", timeout_s=0.02)
        assert (True, True) == (failed.value.sent, connection.closed)
        await until(lambda: server.statistics()["open_connections"] == 0)
        assert len(app.handled) == app.cancelled


async def test_a_cancelled_request_ends_the_connection_at_the_server_too() -> None:
    """By a reset: after a mere end of our sending it would go on answering."""
    app = Mirror()
    async with serving(app) as (_, url), connected(url) as connection:
        asking = asyncio.ensure_future(ask(connection, "/gate"))
        await until(lambda: len(app.handled) == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: app.cancelled == 1)


async def test_an_early_refusal_is_heard_while_the_body_is_still_being_sent() -> None:
    """The server closes over what it did not read, yet its answer comes through."""
    async with serving(Mirror()) as (_, url), connected(url) as connection:
        answer = await ask(connection, "/refused", bytes(8 << 20), method="POST")

        assert 413 == answer.status
        assert connection.closed


def test_a_header_cannot_smuggle_another() -> None:
    """A line break in a header is our mistake, not a request."""
    with pytest.raises(AssertionError, match="line break"):
        head_bytes("GET", "/", "h", {"X": "a\r\nY: b\r\n\r\n"})


# -- with a server -----------------------------------------------------------------------------


async def test_concurrent_requests_are_matched_in_order() -> None:
    """Pipelined on one connection, of all sizes, answered at different times."""
    app = Mirror()
    async with serving(app) as (_, url), connected(url) as connection:
        asking = [
            asyncio.ensure_future(
                ask(
                    connection,
                    f"/gate?{number}" if number % 3 == 0 else f"/{number}",
                    b"x" * number * 999,
                    method="POST",
                )
            )
            for number in range(50)
        ]
        await until(lambda: len(app.handled) == 50)
        assert 50 == connection.outstanding
        app.gate.set()
        found = [(await answer).json() for answer in asking]

        for number, answer in enumerate(found):
            if number % 3 == 0:
                assert {"query": {str(number): ""}} == answer
            else:
                assert (f"/{number}", number * 999) == (answer["path"], answer["length"])


async def test_answers_of_every_framing_come_whole() -> None:
    """Large, streamed, absent, and the head of a large one alone."""
    async with serving(Mirror()) as (_, url), connected(url) as connection:
        big = await ask(connection, "/big")
        stream = await ask(connection, "/stream")
        nothing = await ask(connection, "/nothing")
        head = await ask(connection, "/big", method="HEAD")

    assert b"x" * (3 << 20) + b"y" * 5 == big.body
    assert 50 * 4000 == len(stream.body)
    assert (204, b"") == (nothing.status, nothing.body)
    assert (str((3 << 20) + 5), b"") == (head.headers["content-length"], head.body)


async def test_abstract_unix_sockets_work_as_tcp_does() -> None:
    """Between the shards of a node."""
    name = f"laminar-test-{uuid.uuid4()}"
    server = HttpServer(Mirror(), on_error=answer_error)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind("\0" + name)
        await server.serve(sock)
        try:
            answer = await ask_once(f"unix:@{name}", "GET", "/a", timeout_s=PATIENCE_S)
        finally:
            await server.drain(timeout_s=1)

    assert (200, "/a") == (answer.status, answer.json()["path"])


def test_plain_asyncio_serves_the_client_too() -> None:
    """A user's program may have any loop; the server runs on it as well."""

    async def main() -> None:
        async with serving(Mirror()) as (_, url), connected(url) as connection:
            asking = [ask(connection, "/a", b"x" * 900_000, method="POST") for _ in range(10)]
            assert [900_000] * 10 == [answer.json()["length"] for answer in await asyncio.gather(*asking)]
            assert (3 << 20) + 5 == len((await ask(connection, "/big")).body)

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(main())


@pytest.mark.parametrize(
    ("url", "target", "authority"),
    [
        ("http://a:7070", Target("a", 7070, None, False), "a:7070"),
        ("http://[::1]:7070/path", Target("::1", 7070, None, False), "[::1]:7070"),
        ("https://a", Target("a", 443, None, True), "a:443"),
        ("unix:@n", Target("localhost", 0, "\0n", False), "localhost"),
        ("http+unix://%2Ftmp%2Fn", Target("localhost", 0, "/tmp/n", False), "localhost"),
    ],
)
def test_targets_are_read_from_urls(url: str, target: Target, authority: str) -> None:
    """With the Host header that belongs to each."""
    assert (target, authority) == (Target.of(url), target.authority)


@pytest.mark.parametrize("url", ["a:7070", "ftp://a", "http://", ""])
def test_what_is_no_url_of_a_node_is_refused(url: str) -> None:
    """Before anything is tried."""
    with pytest.raises(ValueError, match="not a URL"):
        Target.of(url)
