"""A connection that is not read after a refusal: what is begun on it, when it goes on, and how it ends."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from laminar.http.protocol.flows import Flow
from laminar.http.protocol.messages import Buffer, Request, Response
from laminar.http.server.mutes import GAP_S, LONGEST_S
from laminar.http.server.reader import SKIPPED_BYTES, WAITING_BYTES
from laminar.http.server.server import HttpServer
from tests.certificates import Authority
from tests.http.serving import GET, PATIENCE_S, answers_in, read_answer, reset, serving, until

GOOD, SECOND = GET % b"good", GET % b"second"
# What the timers of a loop may be early by, and what `until` may notice too late.
SLACK_S = 0.02
POST = b"POST /over HTTP/1.1\r\nHost: a\r\n%bContent-Length: %d\r\n\r\n"


class Quota:
    """Refuses what is asked of `/over...` while `is_over`, and has its connection muted for `mute_s`."""

    def __init__(self, mute_s: float = 0.3) -> None:
        self.is_over = True
        self.mute_s = mute_s
        self.begun: list[str] = []
        self.begun_s: list[float] = []
        self.at_once = self.most_at_once = 0
        self.flow = Flow()
        self.flows: dict[str, Flow] = {}
        self.go_on = asyncio.Event()

    def head(self, request: Request) -> Response | None:
        """See the class."""
        self.begun.append(request.path)
        self.begun_s.append(time.monotonic())
        if request.path == "/over-again":
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            asyncio.get_running_loop().call_soon(self.next_turn)
        flow = self.flows.get(request.path, self.flow)
        if request.connection.flow is not flow:
            request.connection.join(flow)
        if not request.path.startswith("/over") or not self.is_over:
            return None
        refusal = Response(429)
        refusal.mute_s = self.mute_s
        return refusal

    def next_turn(self) -> None:
        """What went on before this did so in a turn of the loop before."""
        self.at_once = 0

    def pauses(self) -> list[float]:
        """Return for how long each refusal of a connection held up what came after it on that connection."""
        times = zip(self.begun, self.begun_s, self.begun_s[1:], strict=False)
        return [after_s - before_s for path, before_s, after_s in times if path == "/over"]

    def parses_long(self, request: Request) -> bool:
        return True

    def parse(self, request: Request) -> None:
        """Nothing to parse."""

    def handle(self, request: Request) -> Response:
        """Answer with the body; `/events` by a stream whose second part comes when it may."""
        if request.path == "/events":
            return Response(200, body=self._events(), endless=True)
        return Response(200, body=bytes(request.body))

    async def _events(self) -> AsyncIterator[Buffer]:
        yield b"first"
        await self.go_on.wait()
        yield b"second"


class Client:
    """A connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def status(self) -> int:
        """Return the status of the next answer."""
        return (await asyncio.wait_for(read_answer(self.reader), PATIENCE_S))[0]


@asynccontextmanager
async def connected(app: Quota, **limits: Any) -> AsyncIterator[tuple[Client, HttpServer]]:
    """A client of a server of `app`."""
    async with serving(app, **limits) as (server, url):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        yield Client(reader, writer), server
        writer.transport.abort()


async def test_what_follows_a_refused_request_is_begun_later_and_in_its_order() -> None:
    """However many were sent with it: a client that does not wait costs one refusal in that time."""
    app = Quota()
    async with connected(app) as (client, server):
        client.writer.write(GOOD + GET % b"over" * 3 + SECOND)
        assert [200, 429] == [await client.status() for _ in range(2)]
        client.writer.write(GET % b"last")
        assert [429, 429, 200, 200] == [await client.status() for _ in range(4)]
        assert min(app.pauses()) >= app.mute_s - SLACK_S
        assert ["/good", "/over", "/over", "/over", "/second", "/last"] == app.begun
        assert 3 == server.statistics()["muted"]


async def test_no_mute_is_longer_than_a_second() -> None:
    """Then the limit may be another one. It is asked for an hour, and waited for a minute."""
    app = Quota(mute_s=3600)
    async with connected(app) as (client, _):
        client.writer.write(GET % b"over" * 2)
        assert 429 == await client.status()
        app.is_over = False
        assert 200 == await client.status()
        assert min(app.pauses()) >= LONGEST_S - SLACK_S


async def test_a_client_that_waits_is_answered_at_once() -> None:
    """And one that asks too early on another connection is."""
    app = Quota(mute_s=0.2)
    async with serving(app) as (_, url):
        host, port = url.removeprefix("http://").split(":")
        one, other = [Client(*await asyncio.open_connection(host, int(port))) for _ in range(2)]
        one.writer.write(GET % b"over")
        assert 429 == await one.status()
        other.writer.write(GOOD)
        assert 200 == await other.status()
        await until(lambda: app.flow.muted == 0)
        one.writer.write(GOOD)
        waiting = asyncio.ensure_future(one.status())
        # Before another client has had so many answers, which takes a part of the mute.
        for _ in range(20):
            other.writer.write(GOOD)
            assert 200 == await other.status()
        assert waiting.done()
        assert 200 == await waiting
        for each in (one, other):
            each.writer.transport.abort()


async def test_a_muted_connection_keeps_little() -> None:
    """What is more than that of one read is refused at once, and later reads are small."""
    app = Quota(mute_s=60)
    request = GET % b"over"
    async with connected(app) as (client, server):
        (connection,) = server._connections
        assert len(connection.get_buffer(-1)) > 10 * WAITING_BYTES  # type: ignore[attr-defined]
        client.writer.write(request * (10 * WAITING_BYTES // len(request)))
        await until(lambda: server.statistics()["muted"] == 1)
        assert WAITING_BYTES - len(request) <= len(connection._tail) <= WAITING_BYTES  # type: ignore[attr-defined]
        assert WAITING_BYTES == len(connection.get_buffer(-1))  # type: ignore[attr-defined]
        for _ in app.begun:
            assert 429 == await client.status()


async def test_a_small_body_after_its_refused_head_is_skipped() -> None:
    """So the connection stays; a larger one, one that is asked for, and the last request end it."""
    app = Quota(mute_s=0.05)
    async with connected(app) as (client, _):
        for size in (1, SKIPPED_BYTES):
            client.writer.write(POST % (b"", size))
            assert 429 == await client.status()
            client.writer.write(b"x" * (size - 1))
            await client.writer.drain()
            client.writer.write(b"x" + GOOD)
            assert 200 == await client.status()
        client.writer.write(POST % (b"", SKIPPED_BYTES + 1))
        assert 429 == await client.status()
        client.writer.write_eof()
        assert b"" == await client.reader.read()
    for header in (b"Connection: close\r\n", b"Expect: 100-continue\r\n"):
        async with connected(app) as (client, server):
            client.writer.write(POST % (header, 1))
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert b" 429 " in head and b"Connection: close" in head
            assert 0 == server.statistics()["muted"]


async def test_a_client_that_closed_its_side_is_answered_to_its_end() -> None:
    """Also if that is noticed only after a mute; then the connection ends."""
    app = Quota(mute_s=0.1)
    async with connected(app) as (client, server):
        client.writer.write(GET % b"over" * 3)
        client.writer.write_eof()
        raw = await asyncio.wait_for(client.reader.read(), PATIENCE_S)
        assert [429] * 3 == [status for status, _ in answers_in(raw)]
        await until(lambda: server.statistics()["open_connections"] == 0)


async def test_a_client_that_is_gone_is_noticed_when_the_mute_ends() -> None:
    """And nothing of it is left: no connection, no timer that begins its requests."""
    app = Quota(mute_s=0.1)
    async with connected(app) as (client, server):
        client.writer.write(GET % b"over" * 2)
        assert 429 == await client.status()
        reset(client.writer)
        await until(lambda: server.statistics()["open_connections"] == 0)
        assert len(app.begun) <= 2


async def test_a_server_that_drains_wakes_the_muted() -> None:
    """What was sent is answered, and the last answer says that the connection ends."""
    app = Quota(mute_s=60)
    async with connected(app) as (client, server):
        client.writer.write(GET % b"over" + GOOD)
        assert 429 == await client.status()
        assert await server.drain(timeout_s=PATIENCE_S)
        assert 503 == await client.status()
        assert b"" == await client.reader.read()
        assert ["/over"] == app.begun


async def test_time_outs_leave_a_muted_connection_alone() -> None:
    """It waits for the server, not the server for it; afterwards they hold as for any."""
    app = Quota(mute_s=0.6)
    async with connected(app, idle_timeout_s=0.2, head_timeout_s=0.2) as (client, server):
        client.writer.write(GET % b"over" + GOOD[:-2])
        assert 429 == await client.status()
        await asyncio.sleep(app.mute_s)
        client.writer.write(GOOD[-2:])
        assert 200 == await client.status()
        client.writer.write(GET % b"over")
        assert 429 == await client.status()
        assert b"" == await asyncio.wait_for(client.reader.read(), PATIENCE_S)
        assert 0 == server.statistics()["timed_out"]


async def test_a_stream_goes_on_while_its_connection_is_muted() -> None:
    """The refused request behind it has its answer when the stream is over."""
    app = Quota(mute_s=0.3)
    async with connected(app) as (client, server):
        client.writer.write(GET % b"events")
        await client.reader.readuntil(b"first\r\n")
        client.writer.write(GET % b"over" + GOOD)
        await until(lambda: server.statistics()["muted"] == 1)
        app.go_on.set()
        assert b"6\r\nsecond\r\n0\r\n\r\n" == await client.reader.readexactly(16)
        assert [429, 200] == [await client.status() for _ in range(2)]


async def test_a_connection_with_tls_is_muted_too(tmp_path: Path) -> None:
    """It pauses what it decrypts, and goes on with all that came."""
    authority = Authority(tmp_path / "ca")
    node = authority.files(authority.node("n1"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(node.certificate, node.key)
    app = Quota(mute_s=0.1)
    server = HttpServer(app)
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(server.protocol_factory, "127.0.0.1", 0, ssl=context)
    port = listener.sockets[0].getsockname()[1]
    client = Client(*await asyncio.open_connection("127.0.0.1", port, ssl=authority.context()))
    client.writer.write(GET % b"over" * 2)
    assert 429 == await client.status()
    client.writer.write(GOOD * 3000)
    assert [429, *[200] * 3000] == [await client.status() for _ in range(3001)]
    assert min(app.pauses()) >= app.mute_s - SLACK_S
    client.writer.transport.abort()
    listener.close()
    await server.drain(timeout_s=1)


@pytest.mark.parametrize("mute_s", [0.0, 0.3])
async def test_only_those_that_say_so_are_muted(mute_s: float) -> None:
    """Other refusals are answered as fast as they come."""
    app = Quota(mute_s)
    async with connected(app) as (client, server):
        client.writer.write(GET % b"over" * 3)
        assert [429] * 3 == [await client.status() for _ in range(3)]
        assert (3 if mute_s else 0) == server.statistics()["muted"]


async def test_a_connection_of_several_principals_is_not_muted() -> None:
    """As a proxy's: one that is over its limit would hold up the others. Strangers' requests don't count."""
    app = Quota()
    async with connected(app) as (client, server):
        app.flows = {"/over": Flow(), "/good": Flow(are_strangers=True)}
        client.writer.write(GOOD + GET % b"over")
        assert [200, 429] == [await client.status() for _ in range(2)]
        assert 1 == server.statistics()["muted"]
        app.flows["/good"] = Flow()
        client.writer.write(GOOD + GET % b"over" * 3 + GOOD)
        assert [200, 429, 429, 429, 200] == [await client.status() for _ in range(5)]
        assert 1 == server.statistics()["muted"]


async def test_of_many_that_pause_one_goes_on_at_a_time() -> None:
    """However many were refused at once: the rest waits, and what others ask is answered meanwhile."""
    app = Quota(mute_s=LONGEST_S)
    app.flows = {"/good": Flow()}
    count = 40
    async with connected(app) as (other, server):
        clients = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection(*other.writer.get_extra_info("peername"))
            clients.append(Client(reader, writer))
            writer.write(GET % b"over" + GET % b"over-again")
            assert 429 == await clients[-1].status()
        between = []
        while app.begun.count("/over-again") < count:
            before = app.begun.count("/over-again")
            other.writer.write(GOOD)
            assert 200 == await other.status()
            between.append(app.begun.count("/over-again") - before)
        went_on_s = [at_s for path, at_s in zip(app.begun, app.begun_s, strict=True) if path == "/over-again"]
        assert went_on_s[-1] - went_on_s[0] >= (count - 2) * GAP_S - SLACK_S
        assert 1 == app.most_at_once
        # An answer takes a few turns of the loop; more where the kernel delivers it late.
        assert max(between) <= count / 2, between
        assert [429] * count == [await client.status() for client in clients]
        assert 2 * count == server.statistics()["muted"]
        for client in clients:
            client.writer.transport.abort()
        await until(lambda: app.flow.muted == 0)


async def test_one_that_is_gone_holds_up_no_other() -> None:
    """The next in its line goes on at its own time: before one of another line that is muted twice."""
    app = Quota(mute_s=0.3)
    app.flows = {"/over-there": Flow()}
    async with connected(app) as (gone, server):
        reader, writer = await asyncio.open_connection(*gone.writer.get_extra_info("peername"))
        stays = Client(reader, writer)
        reader, writer = await asyncio.open_connection(*gone.writer.get_extra_info("peername"))
        there = Client(reader, writer)
        gone.writer.write(GET % b"over" * 3)
        assert 429 == await gone.status()
        # It resets, so that the server learns of it when it answers the second one, and mutes it once more.
        reset = struct.pack("ii", 1, 0)
        gone.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        gone.writer.transport.abort()
        await until(lambda: server.statistics()["open_connections"] == 2)
        stays.writer.write(GET % b"over-first" + GET % b"over-next")
        assert 429 == await stays.status()
        there.writer.write(GET % b"over-there" * 3)
        assert [429] * 3 == [await there.status() for _ in range(3)]
        # Not before the second: where the loop stands still, both lines go on in the same turn.
        assert app.begun[-1] == "/over-there" and "/over-next" in app.begun[:-1]
        assert 429 == await stays.status()
        first_s, next_s = (app.begun_s[app.begun.index(path)] for path in ("/over-first", "/over-next"))
        assert next_s - first_s >= app.mute_s - SLACK_S
        for each in (stays, there):
            each.writer.transport.abort()
        await until(lambda: server.statistics()["open_connections"] == 0)
        assert 0 == app.flow.muted
