"""The chunked coding: read whole, split at every byte, and with what follows left alone."""

from __future__ import annotations

from itertools import pairwise

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.http.protocol.chunked import (
    LAST_CHUNK,
    ChunkedDecoder,
    ChunkedError,
    TooLargeError,
    encode_chunk,
)

BODY = b"5\r\nhello\r\n6;a=b\r\n world\r\n0\r\nX-Sum: 1\r\nY: 2\r\n\r\n"
NEXT = b"GET / HTTP/1.1\r\n"


def decode(*parts: bytes, limit_bytes: int = 1000) -> tuple[bytes, bytes]:
    """The body and what was left over."""
    decoder = ChunkedDecoder(limit_bytes=limit_bytes)
    left = b""
    for part in parts:
        if decoder.done:
            left += part
            continue
        used = decoder.feed(part)
        left += part[used:]
    assert decoder.done
    return bytes(decoder.body), left


def test_a_body_is_read_whole() -> None:
    """Extensions and trailers are read over."""
    assert (b"hello world", b"") == decode(BODY)


@pytest.mark.parametrize("at", range(1, len(BODY)))
def test_a_body_may_be_split_anywhere(at: int) -> None:
    """Where the network cuts means nothing."""
    assert (b"hello world", NEXT) == decode(BODY[:at], BODY[at:] + NEXT)


def test_a_body_may_come_byte_by_byte() -> None:
    """And the next request isn't touched."""
    assert (b"hello world", NEXT) == decode(*[bytes([byte]) for byte in BODY + NEXT])


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"g\r\n",
        b"-1\r\n",
        b"+1\r\n",
        b"0x1\r\n",
        b" 1\r\n",
        b"1 \r\n",
        b"000000001\r\n",
        b"1\n",
        b"1\rx\r\n",
        b"1\r\nab\r\n",
        b"1\r\na\n",
        b"1\r\na0\r\n\r\n",
        b"1;" + b"a" * 5000,
        b"0\r\n" + b"a: b\r\n" * 3000,
        b"0\r\n" + b"a" * 5000,
        "١\r\n".encode(),
    ],
)
def test_a_body_that_bends_the_rules_is_refused(data: bytes) -> None:
    """Whole or byte by byte: leniency here is how requests are smuggled."""
    with pytest.raises(ChunkedError):
        ChunkedDecoder(limit_bytes=1000).feed(data)
    decoder = ChunkedDecoder(limit_bytes=1000)
    with pytest.raises(ChunkedError):
        for byte in data:
            decoder.feed(bytes([byte]))


def test_a_length_over_the_limit_is_refused_before_its_bytes() -> None:
    """The announcement is enough."""
    decoder = ChunkedDecoder(limit_bytes=10)
    decoder.feed(b"8\r\n12345678\r\n")

    with pytest.raises(TooLargeError) as refused:
        decoder.feed(b"3\r\n")

    assert (11, 10) == (refused.value.received_bytes, refused.value.limit_bytes)


@given(st.lists(st.binary(max_size=50)), st.lists(st.integers(0, 2000), max_size=6))
def test_what_is_encoded_is_decoded(parts: list[bytes], cuts: list[int]) -> None:
    """Whatever the chunks and the cuts, and httptools reads the same."""
    data = b"".join(bytes(piece) for part in parts for piece in encode_chunk(part)) + LAST_CHUNK
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    pieces = [data[start:end] for start, end in pairwise(places)]

    assert (b"".join(parts), NEXT) == decode(*pieces, NEXT)
    assert b"".join(parts) == _by_httptools(data)


def _by_httptools(data: bytes) -> bytes:
    class Collector:
        body = b""

        def on_body(self, part: bytes) -> None:
            self.body += part

    collector = Collector()
    parser = httptools.HttpRequestParser(collector)
    parser.feed_data(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + data)
    return collector.body
