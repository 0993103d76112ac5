"""Who stands still, takes too much or goes away: time-outs, budgets, slow readers, and draining."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import pytest

from laminar.http.protocol.messages import Request, Response
from tests.http.serving import (
    GET,
    PATIENCE_S,
    POST,
    Mirror,
    answers_in,
    connect,
    exchange,
    read_answer,
    reset,
    serving,
    until,
)


@pytest.mark.parametrize(
    ("start", "statuses"),
    [
        (b"", [408]),
        (b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhe", [408]),
        (b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe", [408]),
    ],
)
async def test_who_stops_in_the_middle_is_told_so(start: bytes, statuses: list[int]) -> None:
    """408 for a head and for a body, of either framing."""
    data = start or b"GET / HTTP/1.1\r\nHo"
    async with serving(Mirror(), head_timeout_s=0.05, body_timeout_s=0.05, linger_s=0.05) as (server, url):
        raw = await exchange(url, data, eof=False)

        assert statuses == [status for status, _ in answers_in(raw)]
        assert 1 == server.statistics()["timed_out"]
        assert 0 == server.statistics()["reserved_bytes"]


async def test_a_head_that_drips_is_given_up() -> None:
    """A byte now and then prolongs nothing."""
    async with serving(Mirror(), head_timeout_s=0.2, linger_s=0.05) as (_, url):
        reader, writer = await connect(url)

        async def drip() -> None:
            while True:
                writer.write(b"a")
                await asyncio.sleep(0.01)

        writer.write(b"GET / HTTP/1.1\r\nHost: ")
        dripping = asyncio.ensure_future(drip())
        status, _, _ = await read_answer(reader)
        dripping.cancel()
        writer.close()

    assert 408 == status


async def test_an_idle_connection_is_closed_and_one_that_waits_for_an_answer_is_not() -> None:
    """Long polls are not idle."""
    app = Mirror()
    async with serving(app, linger_s=0.05) as (server, url):
        waiting_reader, waiting_writer = await connect(url)
        waiting_writer.write(GET % b"gate")
        reader, writer = await connect(url)
        await until(lambda: bool(app.handled))
        server.limits = msgspec.structs.replace(server.limits, idle_timeout_s=0.05)

        assert b"" == await reader.read()
        app.gate.set()
        assert 200 == (await read_answer(waiting_reader))[0]
        writer.close()
        waiting_writer.close()


async def test_a_reader_that_stands_still_is_closed() -> None:
    """And until then what it doesn't read waits in pieces, not all at once in the transport."""
    async with serving(Mirror(), write_timeout_s=0.2, write_high_bytes=65536) as (server, url):
        reader, writer = await connect(url)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(GET % b"big" * 20)
        await until(lambda: server.statistics()["slow_readers"] == 1)
        await until(lambda: server.statistics()["open_connections"] == 0)
        writer.close()
        del reader


async def test_nothing_more_is_read_while_answers_cannot_leave() -> None:
    """The application isn't asked for what the peer hasn't room for; later everything comes, in order."""
    app = Mirror()
    async with serving(app, write_high_bytes=65536) as (_, url):
        reader, writer = await connect(url)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(GET % b"big" * 20 + GET % b"end")
        await until(lambda: len(app.handled) >= 1)
        for _ in range(20):
            await asyncio.sleep(0.002)
        asked = len(app.handled)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        lengths = [len((await read_answer(reader))[2]) for _ in range(21)]
        writer.close()

    assert asked < 20
    assert [(3 << 20) + 5] * 20 == lengths[:20]


async def test_a_connection_is_read_again_when_its_answers_can_leave() -> None:
    """Also one of which nothing more had come when reading was paused."""
    app = Mirror()
    connections: list[Any] = []

    def note(request: Request) -> Response:
        connections.append(request.connection)
        return Response(200, body=b"noted")

    app.paths["/note"] = note
    async with serving(app) as (_, url):
        reader, writer = await connect(url)
        writer.write(GET % b"note")
        await read_answer(reader)
        connections[0].pause_writing()  # as the loop calls it, with a full transport
        connections[0].resume_writing()
        writer.write(GET % b"note")
        async with asyncio.timeout(PATIENCE_S):
            assert b"noted" == (await read_answer(reader))[2]
        writer.close()


async def test_a_pipeline_has_a_limit_and_loses_nothing() -> None:
    """What is beyond waits in the socket."""
    app = Mirror()
    async with serving(app, max_pipelined=4) as (_, url):
        reader, writer = await connect(url)
        writer.write(b"".join(GET % (b"gate?%d" % number) for number in range(30)))
        await until(lambda: len(app.handled) == 4)
        await asyncio.sleep(0.01)
        assert len(app.handled) == 4
        app.gate.set()
        bodies = [(await read_answer(reader))[2] for _ in range(30)]
        writer.close()

    assert [b'{"query":{"%d":""}}\n' % number for number in range(30)] == bodies


async def test_a_lost_client_ends_its_reads_and_not_its_changes() -> None:
    """A long poll nobody waits for is cancelled; an append is carried out. (A mere EOF may be `nc -N`.)"""
    app = Mirror()
    async with serving(app) as (server, url):
        for start in (GET % b"gate", (POST % (1, 2, b"hi")).replace(b"/a", b"/gate")):
            _, writer = await connect(url)
            handled = len(app.handled)
            writer.write(start)
            await until(partial(lambda before: len(app.handled) > before, handled))
            reset(writer)
        await until(lambda: server.statistics()["open_connections"] == 0)
        await until(lambda: app.cancelled == 1)
        app.gate.set()
        await asyncio.sleep(0)

    assert 1 == app.cancelled


async def test_draining_answers_what_was_asked_and_closes() -> None:
    """Idle connections at once; busy ones behind their last answer, which says so."""
    app = Mirror()
    async with serving(app) as (server, url):
        idle_reader, idle_writer = await connect(url)
        idle_writer.write(GET % b"a")
        await read_answer(idle_reader)
        reader, writer = await connect(url)
        writer.write(GET % b"gate?1" + GET % b"gate?2")
        await until(lambda: len(app.handled) == 3)
        draining = asyncio.ensure_future(server.drain(timeout_s=PATIENCE_S))
        assert b"" == await idle_reader.read()
        app.gate.set()
        first, second = await read_answer(reader), await read_answer(reader)

        assert await draining
        assert (200, 200) == (first[0], second[0])
        assert (None, "close") == (first[1].get("connection"), second[1].get("connection"))
        with pytest.raises(ConnectionError):
            await connect(url)
        idle_writer.close()
        writer.close()


async def test_an_endless_stream_ends_with_its_peer() -> None:
    """Also where that closes only its own side: a process that is killed looks like this."""
    for leave in ("close", "write_eof"):
        app = Mirror()
        async with serving(app) as (_, url):
            reader, writer = await connect(url)
            writer.write(GET % b"endless-stream")
            await reader.readuntil(b"5\r\nbegun\r\n")
            assert not app.ended.is_set()
            getattr(writer, leave)()
            async with asyncio.timeout(PATIENCE_S):
                await app.ended.wait()
            writer.close()


async def test_draining_ends_an_endless_stream() -> None:
    """Its body is whole, and its connection closes; what was asked behind it is answered before."""
    app = Mirror()
    async with serving(app) as (server, url):
        reader, writer = await connect(url)
        writer.write(GET % b"endless-stream" + GET % b"a")
        await reader.readuntil(b"5\r\nbegun\r\n")

        assert await server.drain(timeout_s=PATIENCE_S)

        rest = await reader.read()
        assert app.ended.is_set()
        assert rest.startswith(b"0\r\n\r\nHTTP/1.1 200 OK\r\n") and b"Connection: close" in rest
        writer.close()


async def test_an_endless_stream_ends_when_its_peer_acknowledges_nothing() -> None:
    """The kernel is told how long that may be: else a machine that is gone is sent to for a long time."""
    times: list[int] = []
    async with serving(Mirror(), write_timeout_s=7.0) as (server, url):
        for path in (b"stream", b"endless-stream"):
            reader, writer = await connect(url)
            writer.write(GET % path)
            await reader.readuntil(b"\r\n\r\n")
            (connection,) = server._connections
            sock = connection.transport.get_extra_info("socket")  # type: ignore[attr-defined]
            times.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
            writer.close()
            await until(lambda: not server._connections)

    assert [0, 7_000] == times


async def test_draining_has_an_end() -> None:
    """What isn't answered in time is cut, and the caller is told."""
    app = Mirror()
    async with serving(app) as (server, url):
        reader, writer = await connect(url)
        writer.write(GET % b"gate")
        await until(lambda: len(app.handled) == 1)

        assert not await server.drain(timeout_s=0.05)
        with pytest.raises(asyncio.IncompleteReadError):
            await read_answer(reader)
        writer.close()


async def test_the_budget_for_bodies_holds_over_all_connections() -> None:
    """The second body is refused while the first is on its way, and taken afterwards."""
    body = b"x" * 600_000
    async with serving(Mirror(), body_budget_bytes=1_000_000) as (server, url):
        reader, writer = await connect(url)
        writer.write((POST % (1, len(body), body))[:-1])
        await until(lambda: server.statistics()["reserved_bytes"] == len(body))
        refused = await exchange(url, POST % (2, len(body), body))
        writer.write(b"x")
        assert 200 == (await read_answer(reader))[0]
        taken = await exchange(url, POST % (3, len(body), body))
        writer.close()

    assert [503] == [status for status, _ in answers_in(refused)]
    assert b'"code":"overloaded"' in refused
    assert [200] == [status for status, _ in answers_in(taken)]


async def test_one_connection_cannot_take_the_whole_budget_for_bodies() -> None:
    """Beyond its own share it is not read on until an answer has made room; nothing is refused."""
    app = Mirror()
    body = b"x" * 600_000
    post = b"POST /gate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    async with serving(app, connection_budget_bytes=1_000_000) as (server, url):
        reader, writer = await connect(url)
        writer.write(post * 4)
        await until(lambda: len(app.handled) == 2)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert (2, 2 * len(body)) == (len(app.handled), server.statistics()["reserved_bytes"])

        app.gate.set()

        assert [200] * 4 == [(await read_answer(reader))[0] for _ in range(4)]
        assert 0 == server.statistics()["reserved_bytes"]
        writer.close()


async def test_more_connections_than_allowed_are_closed() -> None:
    """Those that are there go on."""
    async with serving(Mirror(), max_connections=1) as (_, url):
        reader, writer = await connect(url)
        writer.write(GET % b"a")
        await read_answer(reader)

        try:
            refused = await exchange(url, GET % b"a")
        except OSError:
            refused = b""
        assert b"" == refused
        writer.write(GET % b"a")
        assert 200 == (await read_answer(reader))[0]
        writer.close()


async def test_connections_on_which_nothing_is_asked_keep_no_one_out() -> None:
    """The oldest of them ends for each that comes; one on which a request was let in stays."""
    async with serving(Mirror(), max_connections=4) as (server, url):
        reader, writer = await connect(url)
        writer.write(GET % b"a")
        await read_answer(reader)
        silent = [await connect(url) for _ in range(3)]
        await until(lambda: server.statistics()["open_connections"] == 4)

        late = [await connect(url) for _ in range(2)]
        for _, sends in late:
            sends.write(GET % b"b")
        assert [200, 200] == [(await read_answer(reads))[0] for reads, _ in late]
        assert 2 == server.statistics()["displaced"]
        for reads, _ in silent[:2]:
            with suppress(ConnectionError):
                assert b"" == await reads.read()
        for reads, sends in ((reader, writer), silent[2]):
            sends.write(GET % b"c")
            assert 200 == (await read_answer(reads))[0]
        for _, sends in ((reader, writer), *silent, *late):
            sends.close()
