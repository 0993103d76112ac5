"""Bodies in many small chunks: the work for them is bounded by the bytes that come."""

from __future__ import annotations

import json

import pytest

from laminar.http.protocol.chunked import MOST_OVERHEAD_BYTES, ChunkedDecoder, ChunkedError
from tests.http.attacks.watching import Appends, watched
from tests.http.serving import connect, read_answer, serving

HEAD = b"POST /a HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
LIMIT = 16 << 20


@pytest.mark.parametrize(
    "piece",
    [b"1\r\nx\r\n", b"4\r\nxxxx\r\n", b"1;%b\r\nx\r\n" % (b"e" * 1000)],
    ids=["of one byte", "of four", "with extensions"],
)
def test_a_body_that_is_mostly_coding_is_refused(piece: bytes) -> None:
    """As soon as the coding has taken 64 KiB more than the data."""
    decoder = ChunkedDecoder(limit_bytes=LIMIT)
    fed = 0
    with pytest.raises(ChunkedError, match="bytes of coding for"):
        while fed < LIMIT:
            fed += decoder.feed(piece)

    assert fed < 2 * MOST_OVERHEAD_BYTES + 10 * len(decoder.body) + len(piece)


def test_small_chunks_of_a_stream_are_taken() -> None:
    """A program that sends a line at a time."""
    decoder = ChunkedDecoder(limit_bytes=LIMIT)
    for _ in range(100_000):
        decoder.feed(b"6\r\n{}{}{}\r\n")
    decoder.feed(b"0\r\n\r\n")

    assert decoder.done
    assert 600_000 == len(decoder.body)


async def test_connections_that_send_chunks_of_one_byte_are_ended() -> None:
    """Twenty of them, each with a megabyte, take no turn of the loop for long."""
    app = Appends()
    async with serving(app) as (_, url), watched(url):
        for _ in range(20):
            reader, writer = await connect(url)
            writer.write(HEAD + b"1\r\nx\r\n" * 170_000)
            status, _, body = await read_answer(reader)
            writer.transport.abort()
            assert (400, "malformed") == (status, json.loads(body)["code"])

    assert [] == app.counts
