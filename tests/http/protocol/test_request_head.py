"""Heads of requests: what is read, and what is refused with which status."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.http.protocol.errors import HttpError
from laminar.http.protocol.request_head import (
    RequestHeads,
    parse_query,
    parse_request_head,
    split_path,
)

HOST = b"Host: localhost\r\n"


def get(*lines: bytes, start: bytes = b"GET / HTTP/1.1", host: bytes = HOST) -> bytes:
    return start + b"\r\n" + host + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


# What is sent, the code and the field it is refused with.
HOSTILE = {
    "no host": (get(host=b""), "malformed", "host"),
    "two hosts": (get(b"Host: other"), "malformed", "host"),
    "a host with a path": (get(host=b"Host: a/b\r\n"), "malformed", "host"),
    "a host with a user": (get(host=b"Host: a@b\r\n"), "malformed", "host"),
    "101 headers": (get(*[b"A%d: b" % n for n in range(100)]), "headers_too_large", "headers"),
    "a target over 8 KiB": (get(start=b"GET /" + b"a" * 8192 + b" HTTP/1.1"), "target_too_long", "target"),
    "a target over 9 KiB": (get(start=b"GET /" + b"a" * 9000 + b" HTTP/1.1"), "target_too_long", "target"),
    "chunked in HTTP/1.0": (
        get(b"Transfer-Encoding: chunked", start=b"POST / HTTP/1.0"),
        "malformed",
        "transfer-encoding",
    ),
    "length and chunked": (
        get(b"Content-Length: 3", b"Transfer-Encoding: chunked", start=b"POST / HTTP/1.1"),
        "malformed",
        "head",
    ),
    "chunked and length": (
        get(b"Transfer-Encoding: chunked", b"Content-Length: 3", start=b"POST / HTTP/1.1"),
        "malformed",
        "head",
    ),
    "gzip, then chunked": (
        get(b"Transfer-Encoding: gzip, chunked", start=b"POST / HTTP/1.1"),
        "not_implemented",
        "transfer-encoding",
    ),
    "chunked twice": (
        get(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", start=b"POST / HTTP/1.1"),
        "malformed",
        None,
    ),
    "another transfer coding": (get(b"Transfer-Encoding: xchunked"), "malformed", "head"),
    "two lengths": (get(b"Content-Length: 1", b"Content-Length: 1"), "malformed", "head"),
    "two lengths in one": (get(b"Content-Length: 1, 1"), "malformed", "head"),
    "a signed length": (get(b"Content-Length: +1"), "malformed", "head"),
    "a negative length": (get(b"Content-Length: -1"), "malformed", "head"),
    "an empty length": (get(b"Content-Length:"), "malformed", "head"),
    "a huge length": (get(b"Content-Length: 99999999999999999999"), "malformed", "head"),
    "a length over 18 digits": (get(b"Content-Length: 9999999999999999999"), "malformed", "content-length"),
    "a folded header": (get(b"A: b", b" c"), "malformed", "head"),
    "a space before the colon": (get(b"A : b"), "malformed", "head"),
    "no colon": (get(b"A"), "malformed", "head"),
    "an empty name": (get(b": b"), "malformed", "head"),
    "a NUL": (get(b"A: b\0c"), "malformed", "head"),
    "a bare CR": (get(b"A: b\rc"), "malformed", "head"),
    "a bare LF": (get(b"A: b\nC: d"), "malformed", "head"),
    "an unknown method": (get(start=b"FROB / HTTP/1.1"), "not_implemented", "method"),
    "a small method": (get(start=b"get / HTTP/1.1"), "not_implemented", "method"),
    "CONNECT": (get(start=b"CONNECT a:80 HTTP/1.1"), "not_implemented", "method"),
    "HTTP/0.9": (b"GET /\r\n\r\n", "unsupported_version", "version"),
    "HTTP/2.0": (get(start=b"GET / HTTP/2.0"), "unsupported_version", "version"),
    "the preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\n", "unsupported_version", "version"),
    "HTTP/1.2": (get(start=b"GET / HTTP/1.2"), "unsupported_version", "version"),
    "RTSP": (get(start=b"DESCRIBE / RTSP/1.0"), "malformed", "head"),
    "a space in the target": (get(start=b"GET /a b HTTP/1.1"), "malformed", "head"),
    "a byte above 127 in the target": (get(start=b"GET /\xe9 HTTP/1.1"), "malformed", "head"),
    "a control byte in the target": (get(start=b"GET /\x01 HTTP/1.1"), "malformed", "head"),
    "a fragment": (get(start=b"GET /a#b HTTP/1.1"), "malformed", "target"),
    "a relative target": (get(start=b"GET a HTTP/1.1"), "malformed", "head"),
    "another server than that of Host": (get(start=b"GET http://a/ HTTP/1.1"), "malformed", "host"),
    "a user in the target": (get(start=b"GET http://u@localhost/ HTTP/1.1"), "malformed", "host"),
    "two spaces before the target": (get(start=b"GET  / HTTP/1.1"), "malformed", "head"),
    "a CR before the method": (get(start=b"\rGET / HTTP/1.1"), "malformed", "head"),
    "an LF before the method": (get(start=b"\nGET / HTTP/1.1"), "malformed", "head"),
    "another scheme": (get(start=b"GET ftp://a/b HTTP/1.1"), "malformed", "target"),
    "broken percent-encoding": (get(start=b"GET /%zz HTTP/1.1"), "malformed", "path"),
    "a path that isn't UTF-8": (get(start=b"GET /%ff HTTP/1.1"), "malformed", "path"),
    "a query that isn't UTF-8": (get(start=b"GET /?a=%ff HTTP/1.1"), "malformed", "a"),
    "a query name twice": (get(start=b"GET /?a=1&a=2 HTTP/1.1"), "malformed", "a"),
    "another expectation": (get(b"Expect: tea", b"Content-Length: 1"), "expectation_failed", "expect"),
    "two content types": (get(b"Content-Type: a/b", b"Content-Type: c/d"), "malformed", "content-type"),
    "two credentials": (get(b"Authorization: a", b"Authorization: b"), "malformed", "authorization"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_two_readers_could_understand_differently_is_refused(name: str) -> None:
    """Each hostile head has its code and names the field."""
    data, code, field = HOSTILE[name]

    with pytest.raises(HttpError) as refused:
        parse_request_head(data)

    assert code == refused.value.reason
    assert field is None or field == refused.value.field


def test_a_token_that_is_sent_twice_is_not_in_the_error() -> None:
    """Errors are answered, and proxies and programs log answers; other headers are named with their value."""
    for name, shown in (("Authorization", None), ("Expect", "lam_x")):
        line = f"{name}: lam_x".encode()
        with pytest.raises(HttpError) as refused:
            parse_request_head(get(line, line))

        assert ("malformed", name.lower(), shown) == (
            refused.value.reason,
            refused.value.field,
            refused.value.value,
        )


def test_a_head_says_what_is_asked() -> None:
    """Method, path, decoded segments, query and headers, however they are written."""
    head = parse_request_head(
        get(b"ACCEPT:  a ", b"X-A: 1", b"x-a: 2", start=b"PUT /v1/a%2Fb/%c3%a9?k=S+F%26O&e= HTTP/1.1")
    )

    assert ("PUT", "/v1/a%2Fb/%c3%a9") == (head.method, head.path)
    assert ("v1", "a/b", "é") == head.segments
    assert {"k": "S F&O", "e": ""} == head.query
    assert {"host": "localhost", "accept": "a", "x-a": "1, 2"} == head.headers


def test_an_absolute_target_loses_its_authority() -> None:
    """As a proxy's request would have it (RFC 9112, 3.2.2)."""
    targets = [
        parse_request_head(get(start=b"GET " + target + b" HTTP/1.1", host=b"Host: " + host + b"\r\n")).target
        for target, host in (
            (b"http://a:1/b?c", b"a:1"),
            (b"HTTP://a", b"A"),
            (b"http://a?b", b"a"),
        )
    ]

    assert ["/b?c", "/", "/?b"] == targets


def test_an_offer_to_upgrade_is_ignored() -> None:
    """curl --http2 sends one; the body behind it is a body."""
    head = parse_request_head(
        get(b"Connection: Upgrade", b"Upgrade: h2c", b"Content-Length: 3", start=b"POST / HTTP/1.1")
    )

    assert (3, False) == (head.content_length, head.close)


@pytest.mark.parametrize(
    ("start", "connection", "closes"),
    [
        (b"GET / HTTP/1.1", b"", False),
        (b"GET / HTTP/1.1", b"close", True),
        (b"GET / HTTP/1.1", b"Foo, CLOSE", True),
        (b"GET / HTTP/1.0", b"", True),
        (b"GET / HTTP/1.0", b"Keep-Alive", False),
        (b"GET / HTTP/1.0", b"keep-alive, close", True),
    ],
)
def test_the_version_and_connection_header_decide_whether_it_goes_on(
    start: bytes, connection: bytes, closes: bool
) -> None:
    """RFC 9112, 9.3."""
    lines = [b"Connection: " + connection] if connection else []

    assert closes == parse_request_head(get(*lines, start=start)).close


def test_equal_heads_are_parsed_once_and_different_ones_are_not_mixed() -> None:
    """The memory of heads is by their bytes, bounded, and keeps no refusal."""
    heads = RequestHeads()
    first = heads.parse(get(b"A: 1"))

    assert heads.get(get(b"A: 1")) is first
    assert heads.get(get(b"A: 2")) is None
    with pytest.raises(HttpError):
        heads.parse(get(b"A : 1"))
    assert heads.get(get(b"A : 1")) is None
    for number in range(RequestHeads.MOST + 1):
        heads.parse(get(b"A: %d" % number))
    assert heads.get(get(b"A: 2")) is None


@given(st.dictionaries(st.text(), st.text(), max_size=5))
def test_any_query_comes_back_as_it_was_encoded(query: dict[str, str]) -> None:
    """`urlencode`, which clients use, is undone."""
    from urllib.parse import urlencode

    assert query == parse_query(urlencode(query)) or "" in query


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5))
def test_any_path_comes_back_as_it_was_encoded(segments: list[str]) -> None:
    """`quote` without safe characters is undone, slashes included."""
    from urllib.parse import quote

    assert tuple(segments) == split_path("/" + "/".join(quote(segment, safe="") for segment in segments))


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_problem(junk: bytes) -> None:
    """Whatever comes is answered."""
    data = junk.replace(b"\r\n\r\n", b"") + b"\r\n\r\n"
    for start in (b"", b"GET /", b"POST / HTTP/1.1\r\nHost: a\r\n"):
        try:
            parse_request_head(start + data)
        except HttpError:
            pass
