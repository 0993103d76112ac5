"""The server over real sockets: framing, order, versions, streams, and ends."""

from __future__ import annotations

import asyncio
import gzip
import random
import socket
import threading

import pytest

from laminar.http.protocol.messages import OFF_LOOP_BYTES, Request, Response
from laminar.http.server.server import HttpServer
from tests.http.serving import (
    CHUNKED,
    GET,
    POST,
    Mirror,
    answers_in,
    connect,
    exchange,
    read_answer,
    serving,
    until,
)

PIPELINE = POST % (1, 5, b"hello") + CHUNKED + GET % b"last"


async def received(server: HttpServer, size: int) -> None:
    """Wait until the server has so many bytes."""
    await until(lambda: server.counts.bytes_in == size)


async def test_pipelined_requests_are_answered_in_order() -> None:
    """In one segment, all of them."""
    app = Mirror()
    async with serving(app) as (_, url):
        raw = await exchange(url, PIPELINE)

    assert [200, 200, 200] == [status for status, _ in answers_in(raw)]
    assert ["/a?n=1", "/c", "/last"] == app.handled
    assert [b"hello", b"abcdefg", b""] == [bytes(body) for body in app.bodies]


async def test_a_cut_anywhere_changes_nothing() -> None:
    """Split at every byte: heads, known bodies, chunks, and what is pipelined behind them."""
    app = Mirror()
    async with serving(app) as (server, url):
        for at in range(1, len(PIPELINE)):
            reader, writer = await connect(url)
            before = server.counts.bytes_in
            writer.write(PIPELINE[:at])
            await received(server, before + at)
            writer.write(PIPELINE[at:])
            for _ in range(3):
                status, _, _ = await read_answer(reader)
                assert status == 200, at
            writer.close()

    assert [b"hello", b"abcdefg", b""] * (len(PIPELINE) - 1) == [bytes(body) for body in app.bodies]


async def test_byte_by_byte_is_enough() -> None:
    """A peer with a window of one byte is served like any other."""
    app = Mirror()
    async with serving(app) as (server, url):
        reader, writer = await connect(url)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number, byte in enumerate(PIPELINE, start=1):
            writer.write(bytes([byte]))
            await received(server, number)
        for _ in range(3):
            assert (await read_answer(reader))[0] == 200
        writer.close()

    assert [b"hello", b"abcdefg", b""] == [bytes(body) for body in app.bodies]


async def test_answers_wait_for_those_before_them() -> None:
    """A later request that is ready first is answered later, and the app still saw it first."""
    app = Mirror()
    async with serving(app) as (_, url):
        reader, writer = await connect(url)
        writer.write(GET % b"gate?first" + GET % b"second" + GET % b"gate?third")
        await until(lambda: len(app.handled) == 3)
        app.gate.set()
        bodies = [(await read_answer(reader))[2] for _ in range(3)]
        writer.close()

    assert b'{"query":{"first":""}}\n' == bodies[0]
    assert b'"path":"/second"' in bodies[1]
    assert b'{"query":{"third":""}}\n' == bodies[2]


async def test_answers_that_are_ready_together_leave_in_one_write() -> None:
    """A group commit resolves many at once."""
    app = Mirror()
    async with serving(app) as (_, url):
        reader, writer = await connect(url)
        writer.write(GET % b"gate" * 100)
        await until(lambda: len(app.handled) == 100)
        app.gate.set()
        first = await reader.read(1 << 20)
        writer.close()

    assert [200] * 100 == [status for status, _ in answers_in(first)]


async def test_a_large_body_is_received_into_its_own_buffer() -> None:
    """And handed over as that."""
    app = Mirror()
    body = bytes(range(256)) * 20_000
    async with serving(app) as (server, url):
        raw = await exchange(url, POST % (1, len(body), body) + GET % b"next")

        assert [200, 200] == [status for status, _ in answers_in(raw)]
        assert 0 == server.statistics()["reserved_bytes"]
    assert isinstance(app.bodies[0], bytearray)
    assert body == app.bodies[0]


@pytest.mark.parametrize(
    ("long", "coding", "threads"),
    [(True, b"", 1), (False, b"", 0), (False, b"Content-Encoding: gzip\r\n", 1)],
)
async def test_a_large_body_goes_to_a_thread_if_it_takes_long_or_is_compressed(
    long: bool, coding: bytes, threads: int
) -> None:
    """One that is parsed fast is handed over at once. The next request is not begun before it."""
    app = Mirror()
    app.long = long
    body = random.Random(1).randbytes(OFF_LOOP_BYTES + 1)
    sent = gzip.compress(body, 1) if coding else body
    assert len(sent) > OFF_LOOP_BYTES
    request = b"POST /a HTTP/1.1\r\nHost: a\r\n%bContent-Length: %d\r\n\r\n%b" % (coding, len(sent), sent)
    async with serving(app) as (server, url):
        raw = await exchange(url, request + GET % b"next")

        assert 0 == server.statistics()["reserved_bytes"]
    assert [200, 200] == [status for status, _ in answers_in(raw)]
    assert ["/a", "/next"] == app.handled and body == app.bodies[0]
    assert threads == len(app.parsed_in) and threading.get_ident() not in app.parsed_in


async def test_empty_lines_before_a_request_are_skipped() -> None:
    """RFC 9112, 2.2: some clients end a body with a line end too many."""
    app = Mirror()
    async with serving(app) as (_, url):
        raw = await exchange(url, b"\r\n\r\n\r\n" + GET % b"a" + b"\r\n" + GET % b"b" + b"\r\n")

    assert [200, 200] == [status for status, _ in answers_in(raw)]
    assert ["/a", "/b"] == app.handled


async def test_the_body_is_asked_for_only_if_it_is_wanted() -> None:
    """`Expect: 100-continue`: 100 and then the answer, or the refusal alone."""
    expecting = b"POST /%b HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
    async with serving(Mirror()) as (_, url):
        reader, writer = await connect(url)
        writer.write(expecting % b"ok")
        interim = await read_answer(reader)
        writer.write(b"hello")
        final = await read_answer(reader)
        writer.write(expecting % b"refused")
        refusal = await read_answer(reader)
        writer.close()

    assert (100, 200, 413) == (interim[0], final[0], refusal[0])


async def test_an_interim_answer_keeps_its_turn() -> None:
    """Behind an unanswered request, 100 would be taken for that request's."""
    app = Mirror()
    expecting = b"POST /b HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
    async with serving(app) as (_, url):
        reader, writer = await connect(url)
        writer.write(GET % b"gate" + expecting)
        await until(lambda: app.handled == ["/gate"])
        app.gate.set()
        statuses = [(await read_answer(reader))[0] for _ in range(2)]
        writer.write(b"hello")
        statuses.append((await read_answer(reader))[0])
        writer.close()

    assert [200, 100, 200] == statuses


async def test_who_has_sent_all_and_shut_down_is_still_answered() -> None:
    """As `nc -N` does, with a future still open."""
    app = Mirror()
    async with serving(app) as (_, url):
        asking = asyncio.ensure_future(exchange(url, GET % b"gate"))
        await until(lambda: len(app.handled) == 1)
        app.gate.set()

        assert [200] == [status for status, _ in answers_in(await asking)]


async def test_head_answers_as_get_does_without_the_body() -> None:
    """Also for streams, and the connection goes on."""
    head = b"HEAD /%b HTTP/1.1\r\nHost: a\r\n\r\n"
    async with serving(Mirror()) as (_, url):
        raw = await exchange(url, head % b"a" + head % b"stream" + head % b"big" + GET % b"nothing")

    assert 3 == raw.count(b"HTTP/1.1 200 OK")
    assert b"Content-Length: %d\r\n" % ((3 << 20) + 5) in raw
    assert raw.endswith(b"\r\n\r\n")
    no_content = raw[raw.index(b"HTTP/1.1 204") :]
    assert b"Content-Length" not in no_content


async def test_http_1_0_is_closed_unless_it_asks_otherwise() -> None:
    """And its streams end with the connection."""
    async with serving(Mirror()) as (_, url):
        kept = await exchange(
            url,
            b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
            b"GET /b HTTP/1.0\r\n\r\nGET /c HTTP/1.0\r\n\r\n",
        )
        stream = await exchange(url, b"GET /stream HTTP/1.0\r\n\r\n", eof=False)

    assert [200, 200] == [status for status, _ in answers_in(kept)]
    assert b"Connection: keep-alive" in kept
    head, _, body = stream.partition(b"\r\n\r\n")
    assert b"Transfer-Encoding" not in head
    assert b"".join(b"%04d" % number * 1000 for number in range(50)) == body


async def test_a_stream_of_known_length_says_it_and_the_connection_goes_on() -> None:
    """As an answer that is whole: also in HTTP/1.0, and to HEAD."""
    expected = b"".join(b"%04d" % number * 1000 for number in range(50))
    head = b"HEAD /measured-stream HTTP/1.1\r\nHost: a\r\n\r\n"
    kept = b"GET /measured-stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    async with serving(Mirror()) as (_, url):
        raw = await exchange(url, kept + GET % b"measured-stream" + head)

    answers = raw.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert 3 == len(answers)
    assert [expected, expected, b""] == [answer.partition(b"\r\n\r\n")[2] for answer in answers]
    for answer in answers:
        assert b"Content-Length: 200000\r\n" in answer
        assert b"Transfer-Encoding" not in answer


@pytest.mark.parametrize("stream", [b"short-stream", b"long-stream"])
async def test_a_stream_of_another_length_than_it_says_cuts_the_connection(stream: bytes) -> None:
    """What comes behind it is never taken for some of it, nor the other way round."""
    async with serving(Mirror()) as (_, url):
        raw = b""
        try:
            raw = await exchange(url, GET % stream + GET % b"a")
        except ConnectionError:
            pass

    assert raw.count(b"HTTP/1.1") <= 1


async def test_a_stream_that_breaks_cuts_the_connection() -> None:
    """An end that looked like the body's end would be believed."""
    async with serving(Mirror()) as (_, url):
        reader, writer = await connect(url)
        writer.write(GET % b"broken-stream")
        raw = b""
        try:
            raw = await reader.read()
        except ConnectionError:
            pass
        writer.close()

    assert not raw.endswith(b"0\r\n\r\n")


async def test_an_answer_that_closes_is_the_last() -> None:
    """What is pipelined behind it isn't done."""
    app = Mirror()
    async with serving(app) as (_, url):
        raw = await exchange(url, GET % b"close" + GET % b"a")

    assert [(200, b"bye")] == answers_in(raw)
    assert ["/close"] == app.handled


async def test_a_response_may_be_shared_between_requests() -> None:
    """Nothing is written into it, so an application may keep a constant one."""
    shared = Response(200, body=b"same")

    class Constant:
        def head(self, request: Request) -> Response | None:
            return None

        def parses_long(self, request: Request) -> bool:
            return True

        def parse(self, request: Request) -> None:
            return None

        def handle(self, request: Request) -> Response:
            return shared

    async with serving(Constant()) as (_, url):
        await exchange(url, b"GET / HTTP/1.0\r\n\r\n")
        raw = await exchange(url, GET % b"" + GET % b"")

    assert [(200, b"same")] * 2 == answers_in(raw)
    assert b"close" not in raw
