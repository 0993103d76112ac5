"""The connection: answers whole and split, of every framing, pipelined, lost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.client.connection import Answer, Connection, ConnectionFailed, head_bytes
from laminar.client.pool import Pool

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\n\r\n"
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
BIG = b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + b"x" * 200_000


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True


def deliver(connection: Connection, data: bytes, cuts: list[int]) -> None:
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
    connection = Connection("http://x", asyncio.get_running_loop())
    connection.connection_made(Wire())
    found: list[Answer | ConnectionFailed | None] = []
    for _ in range(requests):
        connection.request(b"GET / HTTP/1.1\r\n\r\n", (), lambda a, f: found.append(a or f), timeout_s=5)
    deliver(connection, data, cuts)
    connection.connection_lost(None)
    return found


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
    first, second = asyncio.run(answers(BIG + PLAIN, 2, cuts))

    assert isinstance(first, Answer) and isinstance(second, Answer)
    assert (200_000, b"hello") == (len(first.body), bytes(second.body))


async def test_what_ends_with_the_connection_is_a_body() -> None:
    (answer,) = await answers(b"HTTP/1.0 200 OK\r\n\r\nuntil the end", 1, [20])

    assert isinstance(answer, Answer)
    assert b"until the end" == answer.body


@pytest.mark.parametrize(
    "data", [PLAIN[:-1], CHUNKED[:-4], b"HTTP/1.1 200", b"SMTP hello\r\n\r\n", PLAIN.replace(b"5", b"-5")]
)
async def test_half_an_answer_is_a_failure(data: bytes) -> None:
    """Truncated, or no HTTP at all: never an answer."""
    (failure,) = await answers(data, 1, [])

    assert isinstance(failure, ConnectionFailed)
    assert failure.sent


async def test_behind_a_closing_answer_the_rest_fails() -> None:
    """Connection: close after the first of three: two are lost, and may have been acted on."""
    found = await answers(PLAIN.replace(b"X-A: b", b"Connection: close"), 3, [])

    assert [Answer, ConnectionFailed, ConnectionFailed] == [type(each) for each in found]


def test_a_header_cannot_smuggle_another() -> None:
    with pytest.raises(AssertionError, match="line break"):
        head_bytes("GET", "/", "h", {"X": "a\r\nY: b\r\n\r\n"})


@asynccontextmanager
async def unix_server(
    handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], name: str
) -> AsyncIterator[None]:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(f"\0{name}")
    server = await asyncio.start_unix_server(handle, sock=sock)
    yield
    server.close()
    await server.wait_closed()


async def test_unix_sockets_and_time_outs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """An abstract socket answers; one that is silent is given up in time, and says who it was."""
    name = f"laminar-test-{tmp_path_factory.getbasetemp().name}-{id(tmp_path_factory)}"
    writers: list[asyncio.StreamWriter] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/answer" in head:
            writer.write(PLAIN)
            await writer.drain()

    pool = Pool(asyncio.get_running_loop(), connect_timeout_s=1, idle_s=1)
    async with unix_server(handle, name):
        url = f"unix:@{name}"
        answer = await pool.ask(url, head_bytes("GET", "/answer", "x", {}), timeout_s=2)
        with pytest.raises(ConnectionFailed, match="did not answer in time") as caught:
            await pool.ask(url, head_bytes("GET", "/silent", "x", {}), timeout_s=0.05)
        await pool.close()
        for writer in writers:
            writer.close()
    with pytest.raises(ConnectionFailed) as refused:
        await pool.open(url)

    assert (b"hello", True, False) == (bytes(answer.body), caught.value.sent, refused.value.sent)
