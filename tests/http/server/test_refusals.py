"""What is refused over real sockets: with a clear status, unread, and without costing anybody else."""

from __future__ import annotations

import pytest

from tests.http.serving import CHUNKED, GET, POST, Mirror, answers_in, exchange, serving

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
