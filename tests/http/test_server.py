"""The server over real sockets: framing, order, refusals, pauses, and ends."""

from __future__ import annotations

import asyncio
import gzip
import socket
from functools import partial

import msgspec
import pytest

from laminar.http.content import decode_content
from laminar.http.errors import Problem
from laminar.http.messages import Request, Response
from laminar.http.server import HttpServer
from tests.http.serving import Mirror, answers_in, connect, exchange, read_answer, reset, serving, until

POST = b"POST /a?n=%d HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b"
GET = b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = (
    b"POST /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"
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


# What is sent, and the status it is answered with; the connection is closed behind each.
HOSTILE: dict[str, tuple[bytes, int]] = {
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00", 400),
    "small letters": (b"hello", 400),
    "bare LF": (b"GET / HTTP/1.1\nHost: a\n\n", 400),
    "a LF between": (b"GET / HTTP/1.1\r\nHost: a\n\r\n", 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
    "a head over 64 KiB": (GET[:-2] % b"" + b"A: " + b"b" * 66000, 431),
    "a whole head over 64 KiB": (
        GET[:-2] % b"" + b"".join(b"A%d: %b\r\n" % (n, b"b" * 700) for n in range(99)) + b"\r\n",
        431,
    ),
    "101 headers": (GET[:-2] % b"" + b"A: b\r\n" * 100 + b"\r\n", 431),
    "a target over 8 KiB": (GET % (b"a" * 8192), 414),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "an unknown method": (b"FROB / HTTP/1.1\r\nHost: a\r\n\r\n", 501),
    "a length and chunks": (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "chunks in HTTP/1.0": (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "a broken chunk": (CHUNKED.replace(b"3\r\n", b"z\r\n"), 400),
    "a chunked body over the limit": (CHUNKED.replace(b"3\r\n", b"fffffff\r\n"), 413),
    "a known body over the limit": (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000001\r\n\r\nabc", 413),
    "another expectation": (b"POST / HTTP/1.1\r\nHost: a\r\nExpect: tea\r\nContent-Length: 1\r\n\r\n", 417),
    "another coding": (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Encoding: br\r\nContent-Length: 5\r\n\r\nab",
        415,
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_input_gets_a_clear_status_and_an_end(name: str) -> None:
    """One problem document, `Connection: close`, nothing of what was pipelined behind it is done."""
    data, status = HOSTILE[name]
    app = Mirror()
    async with serving(app, max_body_bytes=1_000_000) as (_, url):
        raw = await exchange(url, data, GET % b"smuggled")

    answers = answers_in(raw)
    assert [status] == [found for found, _ in answers], raw[:200]
    assert b"connection: close" in raw.lower()
    assert b"application/problem+json" in raw
    assert [] == app.handled


async def test_empty_lines_before_a_request_are_skipped() -> None:
    """RFC 9112, 2.2: some clients end a body with a line end too many."""
    app = Mirror()
    async with serving(app) as (_, url):
        raw = await exchange(url, b"\r\n\r\n\r\n" + GET % b"a" + b"\r\n" + GET % b"b" + b"\r\n")

    assert [200, 200] == [status for status, _ in answers_in(raw)]
    assert ["/a", "/b"] == app.handled


async def test_a_refused_body_is_not_read_and_the_client_still_sees_the_answer() -> None:
    """Even one that sends on without looking: the answer isn't lost in a reset."""
    app = Mirror()
    head = b"POST /refused HTTP/1.1\r\nHost: a\r\nContent-Length: 8000000\r\n\r\n"
    async with serving(app, linger_s=30) as (server, url):
        raw = await exchange(url, head, *[b"x" * 1_000_000] * 8)

        assert [413] == [status for status, _ in answers_in(raw)]
        assert 0 == server.statistics()["reserved_bytes"]
    assert [] == app.handled


async def test_a_refusal_whose_body_has_come_already_keeps_the_connection() -> None:
    """A redirected client goes on at once."""
    async with serving(Mirror()) as (_, url):
        raw = await exchange(url, POST.replace(b"/a", b"/moved") % (1, 5, b"hello") + GET % b"b")

    assert [307, 200] == [status for status, _ in answers_in(raw)]
    assert b"Location: http://elsewhere:1/moved" in raw


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


async def test_mistakes_of_the_application_are_a_bug_with_an_id(caplog: pytest.LogCaptureFixture) -> None:
    """At once or later; other requests go on, and the log has the same id."""
    async with serving(Mirror()) as (_, url):
        raw = await exchange(url, GET % b"bug" + GET % b"bug-later" + GET % b"problem" + GET % b"a")

    answers = answers_in(raw)
    assert [500, 500, 503, 200] == [status for status, _ in answers]
    for _, body in answers[:2]:
        identity = body.split(b"see ")[1].split(b" ")[0].decode()
        assert identity in caplog.text
    assert b"Retry-After: 2\r\n" in raw
    assert b'"retry_after_ms":1500' in answers[2][1]


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
        draining = asyncio.ensure_future(server.drain(timeout_s=5))
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


async def test_an_answer_that_closes_is_the_last() -> None:
    """What is pipelined behind it isn't done."""
    app = Mirror()
    async with serving(app) as (_, url):
        raw = await exchange(url, GET % b"close" + GET % b"a")

    assert [(200, b"bye")] == answers_in(raw)
    assert ["/close"] == app.handled


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


async def test_codings_are_taken_off_before_the_application_sees_the_body() -> None:
    """gzip and zstd, whole or in chunks."""
    app = Mirror()
    text = b"flight " * 1000
    packed = gzip.compress(text)
    async with serving(app) as (_, url):
        head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Encoding: gzip\r\n"
        raw = await exchange(
            url,
            head + b"Content-Length: %d\r\n\r\n" % len(packed) + packed,
            head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(packed) + packed + b"\r\n0\r\n\r\n",
            head + b"Content-Length: 5\r\n\r\nabcde",
        )

    assert [200, 200, 400] == [status for status, _ in answers_in(raw)]
    assert [text, text] == app.bodies


def test_a_coding_is_taken_off_under_the_limit() -> None:
    """A bomb is refused by what comes out; several members are one body; a cut one is malformed."""
    from laminar.http.content import _zstd_module

    zstd = _zstd_module()
    for coding, pack in (("gzip", gzip.compress), ("zstd", zstd.compress)):
        bomb = pack(bytes(10_000_000))
        with pytest.raises(Problem) as refused:
            decode_content(bomb, coding, limit_bytes=1_000_000)
        assert ("too_large", 1_000_000) == (refused.value.code, refused.value.limit)
        assert b"ab" == decode_content(pack(b"a") + pack(b"b"), coding, limit_bytes=2)
        for broken in (pack(b"hello")[:-3], pack(b"hello") + b"x", b"hello"):
            with pytest.raises(Problem) as refused:
                decode_content(broken, coding, limit_bytes=1000)
            assert "malformed" == refused.value.code
    with pytest.raises(Problem) as refused:
        options = {zstd.CompressionParameter.window_log: 25}
        huge_window = zstd.ZstdCompressor(options=options)
        decode_content(huge_window.compress(b"a") + huge_window.flush(), "zstd", limit_bytes=1000)
    assert "malformed" == refused.value.code


async def test_a_response_may_be_shared_between_requests() -> None:
    """Nothing is written into it, so an application may keep a constant one."""
    shared = Response(200, body=b"same")

    class Constant:
        def head(self, request: Request) -> Response | None:
            return None

        def handle(self, request: Request) -> Response:
            return shared

    async with serving(Constant()) as (_, url):
        await exchange(url, b"GET / HTTP/1.0\r\n\r\n")
        raw = await exchange(url, GET % b"" + GET % b"")

    assert [(200, b"same")] * 2 == answers_in(raw)
    assert b"close" not in raw
