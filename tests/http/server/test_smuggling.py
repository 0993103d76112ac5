"""Requests that two readers may take for one or for two: each is refused, and so is all that comes after it.

The tricks are those of the literature on request smuggling (CL.TE, TE.CL, TE.TE, CL.0), and those that other
servers had to mend. `tests/http/protocol/test_oracle.py` holds our reader against another one.
"""

from __future__ import annotations

import pytest

from tests.http.serving import GET, Mirror, answers_in, exchange, serving

CHUNKS = b"3\r\nabc\r\n0\r\n\r\n"


def post(*fields: bytes, body: bytes = CHUNKS, start: bytes = b"POST /a HTTP/1.1") -> bytes:
    return b"\r\n".join([start, b"Host: a", *fields]) + b"\r\n\r\n" + body


TE = b"Transfer-Encoding: chunked"

# What is sent, and the status.
SMUGGLING: dict[str, tuple[bytes, int]] = {
    "a length, then chunked": (post(b"Content-Length: 3", TE), 400),
    "chunked, then a length": (post(TE, b"Content-Length: 3"), 400),
    "a length that is 0, and chunked": (post(b"Content-Length: 0", TE), 400),
    "two lengths that differ": (post(b"Content-Length: 3", b"Content-Length: 4", body=b"abc"), 400),
    "two lengths that are equal": (post(b"Content-Length: 3", b"Content-Length: 3", body=b"abc"), 400),
    "two lengths in one": (post(b"Content-Length: 3, 3", body=b"abc"), 400),
    "a length with a sign": (post(b"Content-Length: +3", body=b"abc"), 400),
    "a length in hexadecimal": (post(b"Content-Length: 0x3", body=b"abc"), 400),
    "a length with an underscore": (post(b"Content-Length: 1_0", body=b"0123456789"), 400),
    "a length of other digits": (post("Content-Length: ٣".encode(), body=b"abc"), 400),
    "a length with a space in it": (post(b"Content-Length: 1 0", body=b"0123456789"), 400),
    "a folded length": (post(b"Content-Length:", b" 3", body=b"abc"), 400),
    "a folded coding": (post(b"Transfer-Encoding:", b" chunked"), 400),
    "a folded first field": (b"POST /a HTTP/1.1\r\n Host: a\r\n" + TE + b"\r\n\r\n" + CHUNKS, 400),
    "a space before the colon": (post(b"Transfer-Encoding : chunked"), 400),
    "a tab before the colon": (post(b"Transfer-Encoding\t: chunked"), 400),
    "a space before the name": (post(b"X: y", b" Transfer-Encoding: chunked"), 400),
    "a byte of control before the coding": (post(b"Transfer-Encoding: \x0bchunked"), 400),
    "a NUL in a name": (post(b"Transfer\0-Encoding: chunked"), 400),
    "a coding of another name": (post(b"Transfer-Encoding: xchunked"), 400),
    "chunked twice": (post(TE, TE), 400),
    "identity after chunked": (post(b"Transfer-Encoding: chunked, identity"), 400),
    "another coding before chunked": (post(b"Transfer-Encoding: gzip, chunked"), 501),
    "chunked in HTTP/1.0": (post(TE, start=b"POST /a HTTP/1.0"), 400),
    "a bare CR in a value": (post(b"X: y\rContent-Length: 3", body=b"abc"), 400),
    "a bare LF in a value": (post(b"X: y\nContent-Length: 3", body=b"abc"), 400),
    "a CR before the method": (b"\rGET /a HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a LF before the method": (b"\nGET /a HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a byte before an empty line": (b"X\r\n\r\n", 505),
    "two spaces after the method": (b"GET  /a HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "two hosts": (post(b"Host: b", b"Content-Length: 3", body=b"abc"), 400),
    "a target of another server than Host": (post(TE, start=b"POST http://b/a HTTP/1.1"), 400),
    "a chunk's length with 0x": (post(TE, body=b"0x3\r\nabc\r\n0\r\n\r\n"), 400),
    "a chunk's length with a sign": (post(TE, body=b"-1\r\nabc\r\n0\r\n\r\n"), 400),
    "a chunk's length after a space": (post(TE, body=b" 3\r\nabc\r\n0\r\n\r\n"), 400),
    "a chunk's length with a space in it": (post(TE, body=b"3 0\r\nabc\r\n0\r\n\r\n"), 400),
    "a chunk's length above 32 bits": (post(TE, body=b"100000003\r\nabc\r\n0\r\n\r\n"), 400),
    "a chunk's length above 64 bits": (post(TE, body=b"10000000000000003\r\nabc\r\n0\r\n\r\n"), 400),
    "an empty chunk's length": (post(TE, body=b"\r\nabc\r\n0\r\n\r\n"), 400),
    "a chunk that is longer than it says": (post(TE, body=b"3\r\nabcd\r\n0\r\n\r\n"), 400),
    "a chunk that is shorter than it says": (post(TE, body=b"3\r\nab\r\n0\r\n\r\n"), 400),
    "a bare LF after a chunk's length": (post(TE, body=b"3\nabc\r\n0\r\n\r\n"), 400),
    "a bare LF after a chunk": (post(TE, body=b"3\r\nabc\n0\r\n\r\n"), 400),
    "a bare CR in an extension": (post(TE, body=b"3;a\rb\r\nabc\r\n0\r\n\r\n"), 400),
    "a bare LF in an extension": (post(TE, body=b"3;a\nb\r\nabc\r\n0\r\n\r\n"), 400),
    "a bare LF at the end": (post(TE, body=b"3\r\nabc\r\n0\r\n\n"), 400),
    "a trailer that is no field": (post(TE, body=b"0\r\nGET /smuggled HTTP/1.1\r\n\r\n"), 400),
    "a trailer with a space before the colon": (post(TE, body=b"0\r\nX : y\r\n\r\n"), 400),
    "a trailer that is folded": (post(TE, body=b"0\r\nX: y\r\n z\r\n\r\n"), 400),
}


@pytest.mark.parametrize("name", SMUGGLING)
async def test_a_request_with_two_readings_is_refused_and_ends_the_connection(name: str) -> None:
    """Neither it nor what comes after it is handled, at once or in pieces."""
    data, status = SMUGGLING[name]
    app = Mirror()
    async with serving(app) as (_, url):
        whole = await exchange(url, data + GET % b"smuggled")
        pieces = await exchange(url, *(data[at : at + 1] for at in range(len(data))), GET % b"smuggled")

    assert [[status], [status]] == [[found for found, _ in answers_in(raw)] for raw in (whole, pieces)]
    assert [] == app.handled


async def test_empty_lines_before_a_request_are_skipped() -> None:
    """Whole ones, also between two requests (RFC 9112, 2.2)."""
    app = Mirror()
    async with serving(app) as (_, url):
        raw = await exchange(url, b"\r\n\r\n" + GET % b"a", b"\r\n", GET % b"b", b"\r\n\r\n\r\n" + GET % b"c")

    assert [200, 200, 200] == [status for status, _ in answers_in(raw)]
    assert ["/a", "/b", "/c"] == app.handled
