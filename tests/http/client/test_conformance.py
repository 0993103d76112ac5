"""Our client to h11, another implementation of HTTP/1.1: what it writes is read, what it refuses is not."""

from __future__ import annotations

import h11
import pytest

from laminar.http.protocol.answer import Answer, ConnectionFailed
from laminar.http.protocol.response_head import BadResponseHead, parse_response_head
from tests.http.client.test_connection import answers

BODY = b"0123456789" * 7


def serialised(status: int, headers: list[tuple[str, str]], *parts: bytes, interim: bool = False) -> bytes:
    """An answer as h11 writes it."""
    connection = h11.Connection(h11.SERVER)
    expects = b"Expect: 100-continue\r\nContent-Length: 1\r\n" if interim else b""
    connection.receive_data(b"GET / HTTP/1.1\r\nHost: a\r\n" + expects + b"\r\n")
    connection.next_event()
    events: list[h11.Event] = []
    if interim:
        events.append(h11.InformationalResponse(status_code=100, headers=[]))
    events.append(h11.Response(status_code=status, headers=headers))
    events += [h11.Data(data=part) for part in parts]
    return b"".join(connection.send(event) or b"" for event in [*events, h11.EndOfMessage()])


LENGTH = [("Content-Length", str(len(BODY)))]
ANSWERS = {
    "of known length": (serialised(200, LENGTH, BODY), 200, BODY),
    "chunked": (
        serialised(201, [("Transfer-Encoding", "chunked")], BODY[:1], BODY[1:40], BODY[40:]),
        201,
        BODY,
    ),
    "chunked and empty": (serialised(200, [("Transfer-Encoding", "chunked")]), 200, b""),
    "after 100 Continue": (serialised(201, LENGTH, BODY, interim=True), 201, BODY),
    "without a body": (serialised(204, []), 204, b""),
    "not modified": (serialised(304, [("Content-Length", "7")]), 304, b""),
    "that closes": (serialised(200, [*LENGTH, ("Connection", "close")], BODY), 200, BODY),
}


@pytest.mark.parametrize("case", ANSWERS)
async def test_an_answer_of_h11_is_read_however_it_is_cut(case: str) -> None:
    """Kept alive, two in a row are two answers, cut at each position; one that closes ends the second."""
    raw, status, body = ANSWERS[case]
    closes = case == "that closes"
    data = raw if closes else raw * 2
    for cut in range(1, len(data)):
        first, second = await answers(data, 2, [cut])

        assert isinstance(first, Answer) and (status, body) == (first.status, bytes(first.body)), cut
        if closes:
            assert isinstance(second, ConnectionFailed) and not second.sent, cut
        else:
            assert isinstance(second, Answer) and (status, body) == (second.status, bytes(second.body)), cut


async def test_an_answer_that_ends_with_the_connection_is_read_however_it_is_cut() -> None:
    """h11 writes one to a client of HTTP/1.0."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(b"GET / HTTP/1.0\r\n\r\n")
    connection.next_event()
    events = [h11.Response(status_code=200, headers=[]), h11.Data(data=BODY), h11.EndOfMessage()]
    data = b"".join(connection.send(event) or b"" for event in events)
    for cut in range(1, len(data)):
        (found,) = await answers(data, 1, [cut])

        assert isinstance(found, Answer) and BODY == bytes(found.body)


def refused_by_h11(data: bytes) -> bool:
    """Whether h11 takes these bytes for no head of an answer."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("Host", "a")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    try:
        return not isinstance(connection.next_event(), h11.Response | h11.InformationalResponse)
    except h11.RemoteProtocolError:
        return True


# Heads, and where the two differ the reason: we are stricter wherever we do.
HEADS = {
    b"HTTP/1.1 200 OK\r\n\r\n": None,
    b"HTTP/1.1 200\r\n\r\n": None,
    b"HTTP/1.1 200 \r\n\r\n": None,
    b"HTTP/1.0 200 OK\r\n\r\n": None,
    b"HTTP/1.1 200 OK\r\nA:b\r\nC:\td \t\r\n\r\n": None,
    b"HTTP/1.1 200 OK\r\nA: \xe9\r\n\r\n": None,
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n": None,
    b"HTTP/1.1 204 No Content\r\nContent-Length: 3\r\n\r\n": None,
    b"HTTP/2 200 OK\r\n\r\n": None,
    b"http/1.1 200 OK\r\n\r\n": None,
    b"SSH-2.0-OpenSSH\r\n\r\n": None,
    b"\r\nHTTP/1.1 200 OK\r\n\r\n": None,
    b"HTTP/1.1  200 OK\r\n\r\n": None,
    b"HTTP/1.1 20 OK\r\n\r\n": None,
    b"HTTP/1.1 2000 OK\r\n\r\n": None,
    b"HTTP/1.1 099 OK\r\n\r\n": None,
    b"HTTP/1.1 200 OK\r\nA b\r\n\r\n": None,
    b"HTTP/1.1 200 OK\r\nA : b\r\n\r\n": None,
    b"HTTP/1.1 200 OK\r\n: b\r\n\r\n": None,
    b"HTTP/1.1 200 OK\r\nA(: b\r\n\r\n": None,
    b"HTTP/1.1 200 OK\r\nA: b\0\r\n\r\n": None,
    b"HTTP/1.1 200 OK\r\nA: b\r\r\n\r\n": None,
    b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n": None,
    b"HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\n": None,
    b"HTTP/1.1 200 OK\r\nContent-Length: \r\n\r\n": None,
    b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n": None,
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n": None,
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n": None,
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, chunked\r\n\r\n": None,
    b"HTTP/1.1 700 OK\r\n\r\n": "no status of RFC 9110, section 15",
    b"HTTP/1.2 200 OK\r\n\r\n": "we speak 1.0 and 1.1",
    b"HTTP/1.1 200 OK\r\nA: b\nC: d\r\n\r\n": "a bare LF is no line end (RFC 9112, 2.2: may be recognised)",
    b"HTTP/1.1 200 OK\r\nA: b\r\n c: d\r\n\r\n": "folded lines (RFC 9112, 5.2: obsolete)",
    b"HTTP/1.1 200 OK\r\nA: b\x01\r\n\r\n": "control characters (RFC 9110, 5.5: invalid)",
    b"HTTP/1.1 200 OK\r\nA: b\x7f\r\n\r\n": "control characters (RFC 9110, 5.5: invalid)",
    b"HTTP/1.1 200 O\x01K\r\n\r\n": "control characters (RFC 9112, 4: invalid)",
    b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n": "a length given twice",
    b"HTTP/1.1 200 OK\r\nContent-Length: 1, 1\r\n\r\n": "a length given twice",
    b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999999999999\r\n\r\n": "more bytes than there can be",
    b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n": "two framings (9112, 6.3)",
    b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n": "chunked in HTTP/1.0 is faulty (9112, 6.1)",
}


@pytest.mark.parametrize("data", HEADS, ids=repr)
def test_a_malformed_head_is_refused_by_both_or_by_us(data: bytes) -> None:
    """What h11 refuses we refuse; what we refuse beside that has its reason in the table."""
    try:
        parse_response_head(data)
        refused = False
    except BadResponseHead:
        refused = True

    if HEADS[data] is None:
        assert refused == refused_by_h11(data)
    else:
        assert refused and not refused_by_h11(data)


def test_close_is_an_option_of_its_own() -> None:
    """Another option that has the word in it keeps the connection."""
    head = b"HTTP/1.1 200 OK\r\nConnection: %b\r\n\r\n"

    assert parse_response_head(head % b"Keep-Alive , Close").close
    assert not parse_response_head(head % b"x-close-y").close
