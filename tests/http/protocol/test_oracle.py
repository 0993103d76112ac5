"""Requests held against h11, another reader of HTTP/1.1: what we accept, it accepts, and reads the same.

If two readers disagree about where a request ends, one can be smuggled past a proxy. So we may refuse more
than h11, and accept nothing that it refuses, except for what `STRICTER_THAN_WE` lists.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from laminar.http.protocol.chunked import ChunkedDecoder, ChunkedError
from laminar.http.protocol.errors import HttpError
from laminar.http.protocol.request_head import END_OF_HEAD, parse_request_head

LIMIT_BYTES = 1 << 20

# What h11 refuses and we accept, and why. A request is changed to what h11 takes before it is compared.
STRICTER_THAN_WE = {
    "empty lines before a request": "RFC 9112, 2.2: to be ignored, as some clients end a body so",
    "white space before a chunk's extension": "RFC 9112, 7.1.1: to be removed by a recipient; it is no data",
}


@dataclass(frozen=True)
class Read:
    """A request as a reader found it, and the bytes after it."""

    method: str
    target: str
    version: str
    headers: dict[str, str]
    body: bytes
    rest: bytes


def ours(data: bytes) -> Read | None:
    """The first request as our server reads it; None if it is refused, or not whole."""
    while data.startswith(b"\r\n"):
        data = data[2:]
    end = data.find(END_OF_HEAD)
    if end < 0:
        return None
    position = end + len(END_OF_HEAD)
    try:
        head = parse_request_head(data[:position])
        body = data[position : position + head.content_length]
        if len(body) < head.content_length:
            return None
        position += head.content_length
        if head.chunked:
            decoder = ChunkedDecoder(limit_bytes=LIMIT_BYTES)
            position = decoder.feed(data, position)
            body = bytes(decoder.body)
            if not decoder.done:
                return None
    except (HttpError, ChunkedError):
        return None
    version = "1.1" if head.http11 else "1.0"
    return Read(head.method, head.target, version, head.headers, body, data[position:])


def as_h11_takes_it(data: bytes) -> bytes:
    """The same without what `STRICTER_THAN_WE` has."""
    while data.startswith(b"\r\n"):
        data = data[2:]
    head, end, rest = data.partition(END_OF_HEAD)
    return head + end + re.sub(rb"(?m)^([0-9A-Fa-f]+)[ \t]+;", rb"\1;", rest)


def of_h11(data: bytes) -> Read | None:
    """The first request as h11 reads it."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=LIMIT_BYTES)
    connection.receive_data(data)
    request, body = None, b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                break
            else:
                return None
    except h11.RemoteProtocolError:
        return None
    assert request is not None
    headers: dict[str, str] = {}
    for raw_name, raw_value in request.headers:
        name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
        joint = "; " if name == "cookie" else ", "
        headers[name] = f"{headers[name]}{joint}{value}" if name in headers else value
    return Read(
        request.method.decode("ascii"),
        request.target.decode("ascii"),
        request.http_version.decode("ascii"),
        headers,
        body,
        connection.trailing_data[0],
    )


def compare(data: bytes) -> bool:
    """Whether we accept it; fails if h11 reads another request, or none."""
    mine = ours(data)
    if mine is None:
        return False
    other = of_h11(as_h11_takes_it(data))
    assert other is not None, f"h11 refuses {data!r}"
    changed = as_h11_takes_it(mine.rest) if mine.rest else b""
    assert (mine.method, mine.version, mine.body) == (other.method, other.version, other.body)
    assert mine.rest in (other.rest, changed) or other.rest == changed
    # Of a target with a server's name the path is left.
    assert other.target == mine.target or other.target.partition("://")[2].endswith(mine.target.lstrip("/"))
    # h11 makes the coding small.
    own = mine.headers | {
        name: value.lower() for name, value in mine.headers.items() if name == "transfer-encoding"
    }
    assert own == other.headers
    return True


OWS = st.sampled_from([b" ", b"", b"\t", b"  ", b" \t"])
LINE_END = st.sampled_from([b"\r\n"] * 12 + [b"\n", b"\r", b"\r\r\n", b"\n\r\n", b"\r\n ", b"\r\n\t"])
METHODS = st.sampled_from([b"GET", b"POST", b"PUT", b"DELETE", b"PATCH", b"HEAD", b"get", b"G@T", b"OPTIONS"])
TARGETS = st.sampled_from(
    [
        b"/",
        b"/a/b?c=d",
        b"/%41",
        b"*",
        b"http://a/b",
        b"http://a",
        b"http://b/",
        b"a",
        b"//x",
        b"/a b",
        b"/\x7f",
    ]
)
VERSIONS = st.sampled_from(
    [b"HTTP/1.1"] * 6 + [b"HTTP/1.0", b"HTTP/1.2", b"HTTP/2.0", b"http/1.1", b"HTTP/1.1 "]
)
FIELDS = st.sampled_from(
    [
        *(
            (b"Content-Length", value)
            for value in (b"3", b"0", b"03", b"+3", b"3, 3", b"3 3", b"0x3", b"", b"3;")
        ),
        *((b"content-LENGTH", value) for value in (b"3", b"4")),
        *((b"Transfer-Encoding", value) for value in (b"chunked", b"Chunked", b"gzip, chunked", b"identity")),
        *((b"Transfer-Encoding", value) for value in (b"chunked, chunked", b"\x0bchunked", b"xchunked", b"")),
        *((b"X", value) for value in (b"", b"a b", b"a\tb", b"\xe9", b"\x00", b"\x01", b"a\x7f", b"a:b")),
        *(
            (name, b"v")
            for name in (b"X-Y", b"X Y", b"X\x00", b"", b" X", b"X ", b"X\xe9", b"(x)", b"Cookie")
        ),
        *((b"Connection", value) for value in (b"close", b"keep-alive", b"Upgrade")),
        *((b"Host", value) for value in (b"a", b"b")),
        (b"Upgrade", b"websocket"),
        (b"Expect", b"100-continue"),
    ]
)


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """A head, mostly right."""
    gaps = st.sampled_from([b" "] * 8 + [b"  ", b"\t"])
    line = draw(METHODS) + draw(gaps) + draw(TARGETS) + draw(gaps) + draw(VERSIONS) + draw(LINE_END)
    fields = [(b"Host", b"a")] * draw(st.sampled_from([1, 1, 1, 1, 0])) + draw(st.lists(FIELDS, max_size=4))
    colon = st.sampled_from([b":"] * 10 + [b" :", b"", b"::"])
    rows = [name + draw(colon) + draw(OWS) + value + draw(OWS) + draw(LINE_END) for name, value in fields]
    before = draw(st.sampled_from([b""] * 6 + [b"\r\n", b"\n", b"\r", b"X\r\n"]))
    return before + line + b"".join(draw(st.permutations(rows))) + draw(LINE_END)


@st.composite
def chunks(draw: st.DrawFn) -> bytes:
    """A chunked body, mostly right."""
    parts = []
    for data in draw(st.lists(st.sampled_from([b"a", b"abc", b"x" * 17, b"\r\n", b"0\r\n\r\n"]), max_size=3)):
        size = draw(st.sampled_from([b"%x", b"%X", b"0%x", b"00000%x", b" %x", b"0x%x", b"-%x", b"%x "]))
        extension = draw(
            st.sampled_from([b""] * 5 + [b";a", b" ;a=b", b';a="b"', b";", b" ", b"\t;x", b";\x00"])
        )
        off = draw(st.sampled_from([0] * 12 + [1]))
        end = draw(st.sampled_from([b"\r\n"] * 8 + [b"\n", b"", b"\r"]))
        parts.append(size % (len(data) + off) + extension + draw(LINE_END) + data + end)
    last = draw(st.sampled_from([b"0"] * 6 + [b"00", b"000000000", b"", b"0;x"]))
    trailer = draw(
        st.sampled_from(
            [b""] * 6 + [b"A: b\r\n", b"A:b\r\nC: d\r\n", b"A b\r\n", b": x\r\n", b"A : b\r\n", b"A:\x00\r\n"]
        )
    )
    return b"".join(parts) + last + draw(LINE_END) + trailer + draw(LINE_END)


AFTER = st.sampled_from(
    [b"", b"GET /next HTTP/1.1\r\nHost: a\r\n\r\n", b"\r\nGET /next HTTP/1.1\r\n\r\n", b"x"]
)
BODIES = st.one_of(st.sampled_from([b"", b"abc", b"abcd", b"ab"]), chunks())
CHUNKED_HEAD = b"POST /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
ODD_BYTES = st.sampled_from(
    [b"\r", b"\n", b"\r\n", b" ", b"\t", b"\0", b":", b";", b"0", b"\x0b", b"\x0c", b"\x7f", b"\xe9"]
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A whole request in which some bytes are replaced, removed or added."""
    data = draw(heads()) + draw(BODIES) + draw(AFTER)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(ODD_BYTES | st.just(b"")) + data[at + draw(st.integers(0, 2)) :]
    return data


@given(head=heads(), body=BODIES, after=AFTER)
@example(head=b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", body=b"", after=b"")
@example(head=b"\rGET / HTTP/1.1\r\nHost: a\r\n\r\n", body=b"", after=b"")
@example(head=b"\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", body=b"", after=b"")
@example(head=b"\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", body=b"", after=b"\r\n")
def test_what_we_accept_h11_accepts_and_reads_the_same(head: bytes, body: bytes, after: bytes) -> None:
    compare(head + body + after)


@given(data=mutated())
def test_so_it_is_with_bytes_that_were_changed(data: bytes) -> None:
    compare(data)


@given(body=chunks(), after=AFTER)
@example(body=b"3 ;a=b\r\nabc\r\n0\r\n\r\n", after=b"GET /")
@example(body=b"0\r\nno field\r\n\r\n", after=b"")
def test_a_chunked_body_ends_where_h11_sees_its_end(body: bytes, after: bytes) -> None:
    compare(CHUNKED_HEAD + body + after)


NAMES = st.from_regex(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,12}", fullmatch=True)
VALUES = st.from_regex(rb"([!-~\x80-\xff]+([ \t]+[!-~\x80-\xff]+)*)?", fullmatch=True)
READ_BY_US = (b"host", b"content-length", b"transfer-encoding", b"expect", b"connection", b"upgrade")


@given(
    target=st.from_regex(rb"/[A-Za-z0-9/._~-]*", fullmatch=True),
    fields=st.lists(st.tuples(NAMES, VALUES), max_size=5, unique_by=lambda field: field[0].lower()),
    parts=st.none() | st.lists(st.binary(min_size=1, max_size=40), max_size=4),
    after=AFTER,
)
def test_what_is_right_is_accepted_by_both(
    target: bytes, fields: list[tuple[bytes, bytes]], parts: list[bytes] | None, after: bytes
) -> None:
    """Else the rules above would hold for a reader that refuses everything."""
    rows = [name + b": " + value + b"\r\n" for name, value in fields if name.lower() not in READ_BY_US]
    head = b"POST " + target + b" HTTP/1.1\r\nHost: a\r\n" + b"".join(rows)
    if parts is None:
        assert compare(head + b"\r\n" + after)
        return
    whole = b"".join(parts)
    assert compare(head + b"Content-Length: %d\r\n\r\n" % len(whole) + whole + after)
    sent = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    assert compare(head + b"Transfer-Encoding: chunked\r\n\r\n" + sent + b"0\r\n\r\n" + after)


@pytest.mark.parametrize(
    "data",
    [b"\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", CHUNKED_HEAD + b"3 ;x\r\nabc\r\n0\r\n\r\n"],
    ids=list(STRICTER_THAN_WE),
)
def test_what_is_listed_as_stricter_is_so(data: bytes) -> None:
    """A line that is not needed any more goes."""
    assert ours(data) is not None
    assert of_h11(data) is None
