"""Heads of responses: what ends the body, and what is no head."""

from __future__ import annotations

import pytest

from laminar.http.protocol.response_head import BadResponseHead, parse_response_head


def test_a_response_head_says_how_its_body_ends() -> None:
    """By length, in chunks, or with the connection."""
    known = parse_response_head(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nA: b\r\na: c\r\n\r\n")
    chunked = parse_response_head(b"HTTP/1.1 200\r\nTransfer-Encoding: Chunked\r\n\r\n")
    until_end = parse_response_head(b"HTTP/1.0 404 Not \xe9\r\n\r\n")

    assert (3, False, "b, c") == (known.content_length, known.close, known.headers["a"])
    assert (True, None) == (chunked.chunked, chunked.content_length)
    assert (404, True, None) == (until_end.status, until_end.close, until_end.content_length)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 700 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA : b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\nC: d\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
    ],
)
def test_a_response_that_is_none_is_refused(data: bytes) -> None:
    """A client that guessed would take one answer's body for the next answer."""
    with pytest.raises(BadResponseHead):
        parse_response_head(data)
