"""Clients that announce, ask for or leave a lot: what is held for them is bounded, and others are served."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable

import pytest

from laminar.http.protocol.flows import Flow
from laminar.http.protocol.messages import Request, Response
from laminar.http.server.budget import SMALL_BYTES, Budget, address_of
from tests.http.serving import connect, exchange, read_answer, reset, serving, until

MIB = 1 << 20
GET = b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"


class Large:
    """Answers `/wait` when it is told to, and everything else with a megabyte or what the path says."""

    def __init__(self) -> None:
        self.handled = 0
        self.gate = asyncio.Event()

    def head(self, request: Request) -> Response | None:
        request.answer_bytes = MIB
        return None

    def parses_long(self, request: Request) -> bool:
        return True

    def parse(self, request: Request) -> None:
        return None

    async def handle(self, request: Request) -> Response:
        self.handled += 1
        if request.path == "/small":
            return Response(200, body=b"x" * 1000)
        if request.path == "/wait":
            await self.gate.wait()
        return Response(200, body=b"x" * (MIB if request.method == "GET" else 10))


def test_a_budget_has_a_share_for_each_address_and_room_for_what_is_small() -> None:
    """Whoever uses up the share, or the rest, stops neither others nor small requests."""
    budget = Budget(100 * MIB, 40 * MIB)

    budget.take("a", 30 * MIB)
    assert 30 * MIB == budget.lacks("a", MIB)
    assert 30 * MIB == budget.lacks("a", 1000, of=MIB)
    assert budget.lacks("a", SMALL_BYTES) is None
    assert budget.lacks("b", 30 * MIB) is None
    budget.take("b", 30 * MIB)
    assert 75 * MIB == budget.lacks("c", 16 * MIB)
    assert budget.lacks("c", SMALL_BYTES) is None
    budget.give("a", 30 * MIB)
    assert (30 * MIB, None) == (budget.held_bytes, budget.lacks("a", 30 * MIB))


def test_addresses_of_one_network_share() -> None:
    """Of IPv6 one client has 64 bits."""
    assert "10.1.2.3" == address_of(("10.1.2.3", 1)) == address_of(("::ffff:10.1.2.3", 1, 0, 0))
    assert address_of(("2001:db8::1", 1, 0, 0)) == address_of(("2001:db8::2:3%eth0", 9, 0, 0))
    assert address_of(("2001:db8:0:1::1", 1, 0, 0)) != address_of(("2001:db8::1", 1, 0, 0))
    assert "unix" == address_of("") == address_of(None)


async def test_pipelined_reads_wait_until_the_answers_before_them_are_taken() -> None:
    """A hundred answers of a megabyte that nobody reads: a few are made; all come when they are read."""
    app = Large()
    async with serving(app, connection_answer_bytes=4 * MIB) as (server, url):
        reader, writer = await connect(url)
        writer.write(GET % b"a" * 100)
        await until(lambda: server.statistics()["answer_bytes"] > 0)
        for _ in range(50):
            await asyncio.sleep(0.001)
            assert server.statistics()["answer_bytes"] <= 5 * MIB
        # What the kernel's buffers took has made room for some.
        assert app.handled < 30
        assert 200 == (await ask_small(url))

        for _ in range(100):
            status, _, body = await read_answer(reader)
            assert (200, MIB) == (status, len(body))
        assert 0 == server.statistics()["answer_bytes"]
        writer.close()


async def ask_small(url: str) -> int:
    """The status of another client's small read."""
    raw = await exchange(url, GET % b"small")
    return int(raw.split()[1])


async def test_answers_beyond_the_budget_are_refused_and_small_ones_are_not() -> None:
    """Connections that take nothing; one that is cut gives its part back."""
    app = Large()
    limits = {"answer_budget_bytes": 8 * MIB, "answer_share_bytes": 8 * MIB}
    async with serving(app, write_high_bytes=1, **limits) as (server, url):
        held = []
        for _ in range(20):
            _, writer = await connect(url)
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(GET % b"a" * 20)
            held.append(writer)
        await until(lambda: server.counts.responses_5xx > 0)

        assert server.statistics()["answer_bytes"] <= 6 * MIB
        assert 200 == await ask_small(url)

        for writer in held:
            writer.transport.abort()
        await until(lambda: server.statistics()["answer_bytes"] == 0)


async def test_waiting_reads_of_a_connection_are_bounded() -> None:
    """A thousand long polls of one connection: no more are begun than may be answered together."""
    app = Large()
    async with serving(app, connection_answer_bytes=8 * MIB) as (_, url):
        reader, writer = await connect(url)
        writer.write(GET % b"wait" * 1000)
        await until(lambda: app.handled == 8)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert 8 == app.handled

        app.gate.set()
        for _ in range(1000):
            assert 200 == (await read_answer(reader))[0]
        writer.close()


async def test_a_reader_that_takes_little_of_much_is_cut() -> None:
    """1.1 KB/s was enough to keep gigabytes."""
    async with serving(Large(), write_timeout_s=0.2, transfer_timeout_s=0.5) as (server, url):
        reader, writer = await connect(url)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.write(GET % b"a" * 16)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            async with asyncio.timeout(30):
                while True:
                    await reader.readexactly(100)
                    await asyncio.sleep(0.01)
        assert 1 == server.statistics()["slow_readers"]
        assert 0 == server.statistics()["answer_bytes"]
        writer.close()


async def test_a_large_body_that_trickles_in_is_given_up() -> None:
    """It has to come within the time for transfers; at 1 KiB/s it would be held for hours."""
    async with serving(Large(), body_timeout_s=0.2, transfer_timeout_s=1.0) as (server, url):
        reader, writer = await connect(url)
        writer.write(POST % (16 * MIB))
        await until(lambda: server.statistics()["reserved_bytes"] == 16 * MIB)

        async def trickle() -> None:
            while True:
                writer.write(b"x" * 100)
                await asyncio.sleep(0.01)

        task = asyncio.create_task(trickle())
        try:
            async with asyncio.timeout(30):
                status, _, _ = await read_answer(reader)
        finally:
            task.cancel()
        assert (408, 0) == (status, server.statistics()["reserved_bytes"])
        writer.close()


async def test_announced_bodies_leave_room_for_small_ones() -> None:
    """Connections that announce bodies and send nothing: large ones are refused, small ones are taken."""
    app = Large()
    async with serving(app, body_budget_bytes=64 * MIB, body_share_bytes=32 * MIB) as (server, url):
        held = []
        for _ in range(8):
            _, writer = await connect(url)
            writer.write(POST % (16 * MIB))
            held.append(writer)
        await until(lambda: server.counts.refused == 7)
        assert 16 * MIB == server.statistics()["reserved_bytes"]

        for size in (1, 4096, SMALL_BYTES):
            assert b" 200 " in (await exchange(url, POST % size + b"x" * size))[:20]
        assert b" 503 " in (await exchange(url, POST % (16 * MIB)))[:20]
        for writer in held:
            writer.transport.abort()
        await until(lambda: server.statistics()["reserved_bytes"] == 0)


class Waiting:
    """Answers reads when it is told to; a POST is one, too. The path says of which flow a connection is."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.flows: dict[str, Flow] = {}
        self.begun = 0
        self.refused: list[tuple[int, int]] = []

    def head(self, request: Request) -> Response | None:
        flow = self.flows.setdefault(request.path, Flow())
        if request.connection.flow is None:
            request.connection.join(flow)
        return None

    def parses_long(self, request: Request) -> bool:
        return True

    def parse(self, request: Request) -> None:
        return None

    def handle(self, request: Request) -> Response | Awaitable[Response]:
        refusal = request.connection.read_refusal()
        if refusal is not None:
            self.refused.append(refusal)
            return Response(503)
        self.begun += 1
        request.answer_bytes = 1 if request.method == "POST" else 0
        return self._answer()

    async def _answer(self) -> Response:
        await self.gate.wait()
        return Response(200)


async def test_reads_under_way_are_counted_for_their_flow() -> None:
    """Also those by POST; until they are answered, or their client is gone. One flow leaves room."""
    app = Waiting()
    async with serving(app, max_reads=10) as (server, url):
        stays, gone = await connect(url), await connect(url)
        stays[1].write(GET % b"many" * 3)
        gone[1].write(b"POST /many HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n" * 5)
        await until(lambda: app.begun == 8)
        stays[1].write(GET % b"many")
        await until(lambda: bool(app.refused))
        many, found = app.flows["/many"], server.statistics()
        assert [(8, 8)] == app.refused
        assert (8, 8, 1) == (many.reads, found["reads"], found["reads_refused"])
        other = await connect(url)
        other[1].write(GET % b"other")
        await until(lambda: app.begun == 9)
        reset(gone[1])
        await until(lambda: many.reads == 3)
        stays[1].write(GET % b"many")
        await until(lambda: app.begun == 10)
        app.gate.set()
        answered = [(await read_answer(reader))[0] for reader in [stays[0]] * 5 + [other[0]]]
        assert [200, 200, 200, 503, 200, 200] == answered
        assert (0, 0, 0) == (server.statistics()["reads"], many.reads, app.flows["/other"].reads)
        for _, writer in (stays, other):
            writer.transport.abort()
