"""Turns: how many requests of others are begun before one's own. Positions are counted, not times."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import AsyncIterator
from itertools import pairwise

import msgspec
import pytest

from laminar.http.protocol.flows import ALONE, REQUEST, TURN, Flow
from laminar.http.protocol.messages import WAIT, Later, Request, Response
from laminar.http.server.server import HttpServer
from laminar.http.server.turns import Turns


class Shared:
    """An application that notes whose requests begin, in their order: the path says whose.

    It notes too when an answer is made, of those that come `later`.
    """

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.later: asyncio.Future[None] | None = None
        self.made: list[str] = []
        self.flows: dict[str, Flow] = {}
        self.changed = asyncio.Event()

    def head(self, request: Request) -> Response | None:
        """Have the connection join its flow; `none` has no flow."""
        name = request.segments[0]
        if name != "none":
            flow = self.flows.setdefault(name, Flow())
            if request.connection.flow is not flow:
                request.connection.join(flow)
                if flow.is_spent:
                    return WAIT
        self.begun.append(name)
        self.changed.set()
        return None

    def parses_long(self, request: Request) -> bool:
        return True

    def parse(self, request: Request) -> None:
        """Nothing to parse."""

    def handle(self, request: Request) -> Response | Later:
        """Answer with the body; a POST once `later` is resolved."""
        name = request.segments[0]

        def make(_: object) -> Response:
            self.made.append(name)
            return Response(200, body=bytes(request.body))

        if request.method == "POST":
            self.later = self.later or asyncio.get_running_loop().create_future()
            future = asyncio.get_running_loop().create_future()
            self.later.add_done_callback(lambda _: future.set_result(None))
            return Later(future, make)
        return make(None)

    async def until(self, count: int, name: str) -> None:
        """Wait until so many requests of a flow were begun."""
        while self.begun.count(name) < count:
            self.changed.clear()
            await self.changed.wait()


def get(name: str, count: int = 1) -> bytes:
    """So many requests."""
    return f"GET /{name} HTTP/1.1\r\nHost: a\r\n\r\n".encode() * count


async def answers(reader: asyncio.StreamReader, count: int) -> None:
    """Read so many answers without a body."""
    for _ in range(count):
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")


class Client:
    """Connections to the server, which are closed at the end."""

    def __init__(self, app: Shared, server: HttpServer, name: str) -> None:
        self.app, self.server, self._name = app, server, name
        self.writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a new connection."""
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(self._name)
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        self.writers.append(writer)
        return reader, writer

    async def flood(self, name: str, *, connections: int, requests: int) -> list[asyncio.StreamReader]:
        """Send many requests on many connections, in whole; return what reads the answers."""
        readers = []
        for _ in range(connections):
            reader, writer = await self.connect()
            writer.write(get(name, requests))
            readers.append(reader)
        return readers


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """A client of a server of the application.

    What is written to a Unix socket is there at once. With TCP a busy kernel delivers it some passes of the
    loop later, and that many turns would have begun before.
    """
    app = Shared()
    server = HttpServer(app)
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(f"\0laminar-test-{uuid.uuid4()}")
    await server.serve(sock)
    client = Client(app, server, sock.getsockname().decode())
    yield client
    for writer in client.writers:
        writer.transport.abort()
    await server.drain(timeout_s=1)


async def test_one_request_waits_for_one_turn_of_a_flood(client: Client) -> None:
    """However many requests on however many connections: all that the loop begins before is one turn."""
    app, server = client.app, client.server
    reader, writer = await client.connect()
    writer.write(get("one"))
    await answers(reader, 1)
    flooding = await client.flood("many", connections=40, requests=200)
    await app.until(TURN, "many")
    waits = []
    for _ in range(50):
        before = len(app.begun)
        writer.write(get("one"))
        await answers(reader, 1)
        waits.append(app.begun.index("one", before) - before)
    assert app.begun.count("many") < 8000, "the flood was over before it could disturb"

    # A turn is begun while the request is on its way, and one or two when it comes.
    assert max(waits) <= 4 * TURN, waits
    for each in flooding:
        await answers(each, 200)
    assert 8000 == app.begun.count("many") and server.turns.waits > 0
    assert not app.flows["many"].waiting


async def test_connections_of_one_flow_take_turns(client: Client) -> None:
    """So one that pipelines without end does not keep the flow's other connections waiting."""
    app = client.app
    (endless,) = await client.flood("many", connections=1, requests=2000)
    await app.until(1, "many")
    (other,) = await client.flood("many", connections=1, requests=1)
    await answers(other, 1)
    assert app.begun.count("many") < 1900
    await answers(endless, 2000)


async def test_a_flow_that_is_alone_is_served_in_whole(client: Client) -> None:
    """In the order in which it came, also if the client has closed its side after the last one."""
    app, turns = client.app, client.server.turns
    reader, writer = await client.connect()
    for number in range(3 * ALONE):
        body = str(number).encode()
        head = f"PUT /many HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
    writer.write_eof()
    got = await reader.read()
    bodies = [int(part.partition(b"HTTP/1.1")[0]) for part in got.split(b"\r\n\r\n")[1:]]
    assert list(range(3 * ALONE)) == bodies
    assert 3 * ALONE == app.begun.count("many")
    assert turns.turns <= 1 + 2 * 3, "a turn of half a share, at least"


async def test_a_new_connection_begins_no_turn_of_its_own(client: Client) -> None:
    """Its first request waits like those of the flow's other connections, and is begun once."""
    app, server = client.app, client.server
    (reader,) = await client.flood("many", connections=1, requests=3 * TURN)
    await answers(reader, 3 * TURN)
    flow = app.flows["many"]
    flow.left = 0
    server.turns.end(flow)
    assert flow.is_spent
    readers = await client.flood("many", connections=5, requests=1)
    for each in readers:
        await answers(each, 1)
    assert 3 * TURN + 5 == app.begun.count("many")
    assert 6 == flow.connections


async def test_a_connection_leaves_its_flow_when_it_ends_or_joins_another(
    client: Client,
) -> None:
    """Also one that waits for its turn."""
    app, server = client.app, client.server
    reader, writer = await client.connect()
    for name in ("a", "b", "none"):
        writer.write(get(name))
        await answers(reader, 1)
    assert (0, 1) == (app.flows["a"].connections, app.flows["b"].connections)
    await client.flood("many", connections=10, requests=500)
    await app.until(TURN, "many")
    for each in client.writers:
        each.transport.abort()
    while server.statistics()["open_connections"]:  # noqa: ASYNC110  # the server tells no one
        await asyncio.sleep(0.005)
    assert {"a": 0, "b": 0, "many": 0} == {name: flow.connections for name, flow in app.flows.items()}
    (after,) = await client.flood("many", connections=1, requests=1)
    await answers(after, 1)


async def test_a_large_body_counts_like_several_requests(client: Client) -> None:
    """And takes of the turns that come, which it gives back."""
    app, server = client.app, client.server
    (other,) = await client.flood("other", connections=1, requests=1)
    await answers(other, 1)
    reader, writer = await client.connect()
    body = b"x" * (10 * 65536)
    writer.write(f"PUT /many HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    await reader.readuntil(b"\r\n\r\n")
    assert body == await reader.readexactly(len(body))
    left = REQUEST * (TURN - 11 + 2 * TURN) - 1  # it was parsed in a thread, so its answer came later
    assert (left, 2) == (app.flows["many"].left, server.turns.turns)


async def test_answers_that_become_due_at_once_are_sent_in_turns(client: Client) -> None:
    """As those of one sync are: another flow's request waits for a turn or two of them, not for all."""
    app = client.app
    reader, writer = await client.connect()
    writer.write(get("one"))
    await answers(reader, 1)
    flooding = []
    for number in range(8):
        many, sends = await client.connect()
        bodies = [f"{number}:{each};".encode() for each in range(100)]
        for body in bodies:
            sends.write(b"POST /many HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        flooding.append((many, bodies))
    await app.until(800, "many")
    assert app.later is not None
    turn, places = REQUEST * TURN, []
    writer.write(get("one"))
    app.later.set_result(None)
    while app.made.count("many") < 800:
        before = len(app.made)
        await answers(reader, 1)
        places.append(app.made.index("one", before) - before)
        writer.write(get("one"))
    assert max(places) <= 4 * turn, places
    assert len(places) >= 800 / (4 * turn)
    for many, bodies in flooding:
        for body in bodies:
            assert b" 200 " in await many.readuntil(b"\r\n\r\n")
            assert body == await many.readexactly(len(body))
    assert not app.flows["many"].waiting


async def test_answers_of_a_flow_that_is_alone_wait_for_a_few_turns(client: Client) -> None:
    """Also of one whose client has closed its side; a client that has left takes none."""
    app, server = client.app, client.server
    post = b"POST /many HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"
    reader, writer = await client.connect()
    writer.write(post * 1000)
    writer.write_eof()
    _, left = await client.connect()
    left.write(post * 1000)
    await app.until(2000, "many")
    assert app.later is not None
    turns = server.turns.turns
    app.later.set_result(None)
    left.transport.abort()
    got = await reader.read()
    assert 1000 == got.count(b" 200 ")
    assert server.turns.turns - turns <= 1 + 2 * 2000 / (REQUEST * ALONE)
    assert 0 == server.statistics()["reserved_bytes"] and not app.flows["many"].waiting


async def test_a_flow_that_is_alone_is_spent_by_no_sum_over_passes_of_the_loop() -> None:
    """What it begins in one pass counts: of less than a share nothing waits; a whole one ends its turn."""
    turns, many, other = Turns(), Flow(), Flow()

    async def begun(most: int) -> int:
        """Return how many requests are begun in one pass of the loop, of these that have come."""
        count = 0
        while count < most and not many.is_spent:
            turns.take(many, REQUEST)
            count += 1
        await asyncio.sleep(0)
        return count

    turns.join(many)
    assert await begun(2 * ALONE) == TURN, "a flow begins with the share of one that is not alone"
    assert [ALONE - TURN] * 20 == [await begun(ALONE - TURN) for _ in range(20)]
    assert await begun(2 * ALONE) == ALONE

    turns.join(other)
    assert await begun(2 * ALONE) == ALONE, "it was filled up before the other came"
    assert await begun(2 * ALONE) == TURN
    assert [TURN - 1, 1] == [await begun(TURN - 1), await begun(TURN)], "a turn goes over passes of the loop"


class Passed:
    """Requests that come on no connection of their flow, and the order in which they begin."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.begun: list[str] = []

    def come(self, flow: Flow, name: str) -> asyncio.Task[None]:
        """Have a request come."""

        async def carry_out() -> None:
            self.turns.enter(flow)
            try:
                await self.turns.turn(flow, REQUEST)
                self.begun.append(name)
            finally:
                self.turns.exit(flow)

        return asyncio.ensure_future(carry_out())


async def test_passed_requests_take_turns_in_their_order() -> None:
    """Those of one flow begin as they came; another's waits for no more than a turn."""
    passed, many, other = Passed(), Flow(), Flow()
    passed.turns.join(other)
    tasks = [passed.come(many, str(number)) for number in range(200)]
    await tasks[0]
    tasks.append(passed.come(other, "other"))
    await tasks[-1]
    assert passed.begun.index("other") <= 3 * TURN
    await asyncio.gather(*tasks)
    passed.begun.remove("other")
    assert [str(number) for number in range(200)] == passed.begun
    assert (0, 0, 0, 1) == (many.passed, many.woken, len(many.waiting), passed.turns.flows)


async def test_a_passed_request_does_not_overtake_one_that_was_woken() -> None:
    """Not even one that comes between the moment in which that gets its turn, and its going on."""
    passed, many = Passed(), Flow()
    many.left = 0
    tasks = [passed.come(many, "waits")]
    passed.turns.end(many)
    tasks.append(passed.come(many, "late"))
    await asyncio.sleep(0)
    assert (1, False) == (many.woken, "late" in passed.begun)
    await asyncio.gather(*tasks)
    assert ["waits", "late"] == passed.begun


async def test_passed_requests_that_are_cancelled_take_nothing() -> None:
    """Neither a turn, nor a place among those that are here."""
    passed, many, other = Passed(), Flow(), Flow()
    passed.turns.join(other)
    tasks = [passed.come(many, str(number)) for number in range(10 * TURN)]
    await tasks[0]
    for task in tasks[TURN:-1]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(number) for number in range(TURN)] + [str(10 * TURN - 1)] == passed.begun[: TURN + 1]
    assert (0, 0, False) == (many.passed, many.woken, many.is_used)
    assert 1 == passed.turns.flows


async def test_connections_of_strangers_end_before_those_of_others(client: Client) -> None:
    """Also if something was asked on them: what lets in strangers lets them keep no one out."""
    app, server = client.app, client.server
    app.flows["strange"] = Flow(are_strangers=True)
    connections = []
    for name in ("strange", "one", "strange"):
        reader, writer = await client.connect()
        writer.write(get(name))
        await answers(reader, 1)
        connections.append((reader, writer))
    server.limits = msgspec.structs.replace(server.limits, max_connections=3)
    (late,) = await client.flood("one", connections=1, requests=1)
    await answers(late, 1)
    assert b"" == await connections[0][0].read()
    for name, (reader, writer) in zip(("one", "strange"), connections[1:], strict=True):
        writer.write(get(name))
        await answers(reader, 1)
    assert 1 == server.statistics()["displaced"]


async def test_without_flows_one_read_begins_few_requests_in_a_pass_of_the_loop(client: Client) -> None:
    """A client that sends a thousand at once does not keep the loop for all of them; each is answered."""
    loop = asyncio.get_running_loop()
    passes: list[int] = []

    def count() -> None:
        passes.append(len(client.app.begun))
        handles[0] = loop.call_soon(count)

    handles = [loop.call_soon(count)]
    reader, writer = await client.connect()
    writer.write(get("none", 1000))
    await answers(reader, 1000)
    handles[0].cancel()

    assert len(client.app.begun) == 1000
    assert max(after - before for before, after in pairwise(passes)) <= ALONE
