"""Our server to h11, another implementation: its requests are answered, what it refuses is refused."""

from __future__ import annotations

import asyncio
import json

import h11
import pytest

from tests.http.serving import PATIENCE_S, Mirror, serving


def serialised(method: str, headers: list[tuple[str, str]], *parts: bytes) -> bytes:
    """A request as h11 writes it, whole."""
    connection = h11.Connection(h11.CLIENT)
    request = h11.Request(method=method, target="/a?k=v", headers=[("Host", "a"), *headers])
    events: list[h11.Event] = [request, *(h11.Data(data=part) for part in parts), h11.EndOfMessage()]
    return b"".join(connection.send(event) or b"" for event in events)


REQUESTS = {
    "without a body": (serialised("GET", []), 0),
    "of known length": (serialised("POST", [("Content-Length", "26")], b"ab" * 13), 26),
    "chunked": (serialised("PUT", [("Transfer-Encoding", "chunked")], b"a", b"bc" * 9, b"d"), 20),
    "chunked and empty": (serialised("POST", [("Transfer-Encoding", "chunked")]), 0),
    "with many headers": (serialised("PATCH", [(f"X-{n}", "v" * n) for n in range(9)]), 0),
}


async def answered(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The status and body of one answer, as h11 reads it."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("Host", "a")]))
    found, body = 0, b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await asyncio.wait_for(reader.read(1 << 16), PATIENCE_S))
        elif isinstance(event, h11.Response):
            found = event.status_code
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            return found, body
        else:
            assert isinstance(event, h11.InformationalResponse) and event.status_code == 100, event


@pytest.mark.parametrize("case", REQUESTS)
async def test_a_request_of_h11_is_answered_however_it_is_cut(case: str) -> None:
    """On one connection that is kept alive, cut in two at each position."""
    raw, length = REQUESTS[case]
    async with serving(Mirror()) as (server, url):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        for cut in range(1, len(raw)):
            writer.write(raw[:cut])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            writer.write(raw[cut:])
            status, body = await answered(reader)

            assert (200, length) == (status, json.loads(body)["length"]), cut
        assert 1 == server.statistics()["connections"]
        writer.close()


async def test_a_body_is_asked_for_with_100_continue() -> None:
    """h11 sees the interim answer, sends the body, and gets the final one."""
    async with serving(Mirror()) as (_, url):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        connection = h11.Connection(h11.CLIENT)
        headers = [("Host", "a"), ("Content-Length", "3"), ("Expect", "100-continue")]
        writer.write(connection.send(h11.Request(method="POST", target="/a", headers=headers)) or b"")
        while (event := connection.next_event()) is h11.NEED_DATA:
            connection.receive_data(await asyncio.wait_for(reader.read(1 << 16), PATIENCE_S))
        assert isinstance(event, h11.InformationalResponse) and 100 == event.status_code
        for part in (h11.Data(data=b"abc"), h11.EndOfMessage()):
            writer.write(connection.send(part) or b"")
        status, body = await answered(reader)

        assert (200, 3) == (status, json.loads(body)["length"])
        writer.close()


@pytest.mark.parametrize("path", ["a", "stream", "big", "nothing", "close", "problem", "measured-stream"])
async def test_every_kind_of_answer_is_read_by_h11(path: str) -> None:
    """Of known length, chunked, empty, closing."""
    async with serving(Mirror()) as (_, url):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n" % path.encode())
        status, body = await answered(reader)

        assert ({"nothing": 204, "problem": 503}.get(path, 200), path == "nothing") == (status, not body)
        writer.close()


def refused_by_h11(data: bytes) -> bool:
    """Whether h11 takes these bytes for no request."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    try:
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA or event is h11.PAUSED:
                return False
    except h11.RemoteProtocolError:
        return True
    return False


# Requests, and where the two differ the reason: we are stricter wherever we do.
MALFORMED: dict[bytes, str | None] = {
    b"GET /a HTTP/1.1\r\n\r\n": None,
    b"GET /a HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n": None,
    b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n": None,
    b"GET   /a HTTP/1.1\r\nHost: a\r\n\r\n": None,
    b"GET http://b/a HTTP/1.1\r\nHost: a\r\n\r\n": "two servers; h11 leaves the target to its program",
    b"GET /a\r\nHost: a\r\n\r\n": None,
    b"G@T /a HTTP/1.1\r\nHost: a\r\n\r\n": None,
    b"GET /a HTTP/1.1\r\nHost : a\r\n\r\n": None,
    b"GET /a HTTP/1.1\r\nHost: a\r\nB b\r\n\r\n": None,
    b"GET /a HTTP/1.1\r\nHost: a\r\nB(: b\r\n\r\n": None,
    b"GET /a HTTP/1.1\r\nHost: a\r\nB: b\0\r\n\r\n": None,
    b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n": None,
    b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n": None,
    b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n": None,
    b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n": None,
    b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, chunked\r\n\r\n": None,
    b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n": None,
    b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n": None,
    b"GET /a HTTP/2.0\r\nHost: a\r\n\r\n": "we speak 1.0 and 1.1",
    b"GET /a HTTP/1.1\r\nHost: a\r\n b: c\r\n\r\n": "folded lines (RFC 9112, 5.2: obsolete)",
    b"GET /a HTTP/1.1\nHost: a\n\n": "a bare LF is no line end (RFC 9112, 2.2: may be recognised)",
    b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n": "a length given twice",
    b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n": "two framings",
    b"POST /a HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n": "faulty in 1.0 (RFC 9112, 6.1)",
}


@pytest.mark.parametrize("data", MALFORMED, ids=repr)
async def test_a_malformed_request_is_refused_by_both_or_by_us(data: bytes) -> None:
    """All of these are refused by us; where h11 takes one, the table has the reason."""
    async with serving(Mirror()) as (_, url):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(data)
        status, _ = await answered(reader)
        writer.close()

    assert status in (400, 501, 505)
    assert refused_by_h11(data) == (MALFORMED[data] is None)
