"""Small requests whose bodies take long to read: they are refused early, and read beside the loop."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Callable

import pytest

from laminar.http.api.append_body import ENVELOPE_LINES_TYPE, ENVELOPES_TYPE, NDJSON_TYPE
from tests.http.attacks.watching import Appends, watched
from tests.http.serving import connect, read_answer, serving, until

MIB = 1 << 20


def post(body: bytes, kind: str, *, coded: bool = True) -> bytes:
    """An append with this body."""
    sent = gzip.compress(body, 1) if coded else body
    coding = b"Content-Encoding: gzip\r\n" if coded else b""
    head = b"POST /a HTTP/1.1\r\nHost: localhost\r\nContent-Type: %b\r\n%bContent-Length: %d\r\n\r\n"
    return head % (kind.encode(), coding, len(sent)) + sent


async def ask(url: str, request: bytes) -> tuple[int, bytes]:
    """Status and body of the answer."""
    reader, writer = await connect(url)
    try:
        writer.write(request)
        status, _, body = await read_answer(reader)
        return status, body
    finally:
        writer.close()


def many_headers() -> bytes:
    """One record with 1.5 million headers."""
    headers = b",".join(b'"%d":""' % number for number in range(1_500_000))
    return b'[{"value":"","headers":{' + headers + b"}}]"


# What is sent, its type, and what its refusal names.
BODIES: list[tuple[str, Callable[[], bytes], str, str]] = [
    ("values", lambda: b"1\n" * (8 * MIB), NDJSON_TYPE, "lines"),
    ("values-in-limit", lambda: b"1\n" * 150_000, NDJSON_TYPE, "records"),
    ("empty-lines", lambda: b"\n" * (16 * MIB), NDJSON_TYPE, "lines"),
    ("blank-lines", lambda: b" \n" * (8 * MIB), NDJSON_TYPE, "lines"),
    ("empty-envelopes", lambda: b"[" + b"{}," * (5 * MIB) + b"{}]", ENVELOPES_TYPE, "records"),
    ("envelopes", lambda: b'{"records":[' + b'{"value":""},' * MIB + b"0]}", ENVELOPES_TYPE, "records"),
    ("envelope-lines", lambda: b'{"value":""}\n' * MIB, ENVELOPE_LINES_TYPE, "lines"),
    ("headers", many_headers, ENVELOPES_TYPE, "[0].headers"),
]


@pytest.mark.parametrize(
    ("make", "kind", "field"), [row[1:] for row in BODIES], ids=[row[0] for row in BODIES]
)
async def test_a_body_of_too_many_parts_is_refused_before_it_is_read(
    make: Callable[[], bytes], kind: str, field: str
) -> None:
    """Tens of kilobytes that unfold to megabytes stop nobody, and take no more than their own size again."""
    request = post(make(), kind)
    app = Appends()
    tracemalloc.start()
    try:
        async with serving(app) as (_, url), watched(url) as watch:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            status, body = await ask(url, request)
            peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()

    print(f"{len(request)} bytes sent, {peak / MIB:.0f} MiB at most")
    assert (413, field) == (status, json.loads(body)["field"])
    assert [] == app.counts
    assert peak < 100 * MIB
    assert watch.wait_s < 5


async def test_a_large_append_is_read_beside_the_loop() -> None:
    """As many records as are allowed."""
    app = Appends()
    async with serving(app) as (_, url), watched(url):
        status, body = await ask(url, post(b'{"value":"x"}\n' * 100_000, ENVELOPE_LINES_TYPE))

    assert (200, b"100000") == (status, body)


@pytest.mark.parametrize("coded", [True, False])
async def test_what_comes_after_a_large_body_is_begun_after_it(coded: bool) -> None:
    """A client's pipelined appends keep their order; the connection goes on."""
    app = Appends()
    sizes = [3, 60_000, 2, 50_000, 1]
    async with serving(app) as (server, url):
        reader, writer = await connect(url)
        for size in sizes:
            writer.write(post(b'{"a":1}\n' * size, NDJSON_TYPE, coded=coded and size > 100))
        got = [await read_answer(reader) for _ in sizes]
        assert 0 == server.statistics()["reserved_bytes"]
        writer.write_eof()
        assert b"" == await reader.read()
        writer.close()

    assert sizes == app.counts
    assert [b"%d" % size for size in sizes] == [body for _, _, body in got]


async def test_a_large_append_of_a_client_that_went_away_is_carried_out() -> None:
    """As any change that was taken up; its bytes are counted no more."""
    app = Appends()
    async with serving(app) as (server, url):
        _, writer = await connect(url)
        writer.write(post(b"1\n" * 90_000, NDJSON_TYPE))
        await writer.drain()
        writer.transport.abort()
        await until(lambda: bool(app.counts))
        assert 0 == server.statistics()["reserved_bytes"]

    assert [90_000] == app.counts


async def test_a_body_that_unfolds_beyond_the_budget_is_refused() -> None:
    """What it has become counts, not what came."""
    app = Appends()
    async with serving(app, body_budget_bytes=MIB) as (server, url):
        status, body = await ask(url, post(b"x" * (2 * MIB), "application/octet-stream"))
        assert 0 == server.statistics()["reserved_bytes"]

    assert (503, "overloaded") == (status, json.loads(body)["code"])
    assert [] == app.counts
