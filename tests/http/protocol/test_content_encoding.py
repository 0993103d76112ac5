"""Codings of bodies: taken off before the application sees them, and under its limit."""

from __future__ import annotations

import gzip

import pytest

from laminar.http.protocol.content_encoding import decode_content
from laminar.http.protocol.errors import HttpError
from tests.http.serving import Mirror, answers_in, exchange, serving


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
    from laminar.http.protocol.content_encoding import _zstd_module

    zstd = _zstd_module()
    for coding, pack in (("gzip", gzip.compress), ("zstd", zstd.compress)):
        bomb = pack(bytes(10_000_000))
        with pytest.raises(HttpError) as refused:
            decode_content(bomb, coding, limit_bytes=1_000_000)
        assert ("too_large", 1_000_000) == (refused.value.reason, refused.value.limit)
        assert b"ab" == decode_content(pack(b"a") + pack(b"b"), coding, limit_bytes=2)
        for broken in (pack(b"hello")[:-3], pack(b"hello") + b"x", b"hello"):
            with pytest.raises(HttpError) as refused:
                decode_content(broken, coding, limit_bytes=1000)
            assert "malformed" == refused.value.reason
    with pytest.raises(HttpError) as refused:
        options = {zstd.CompressionParameter.window_log: 25}
        huge_window = zstd.ZstdCompressor(options=options)
        decode_content(huge_window.compress(b"a") + huge_window.flush(), "zstd", limit_bytes=1000)
    assert "malformed" == refused.value.reason
