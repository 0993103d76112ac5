"""Content codings of request bodies: zstd and gzip, removed under a limit.

The limit holds for the decompressed bytes, so that a small body cannot fill the memory. zstd's window is
limited too (to 8 MiB, as RFC 9659 asks), because a frame may require its whole window before its first byte
is decompressed.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from typing import Any, Final

from laminar.http.protocol.errors import HttpError

CODINGS: Final = ("zstd", "gzip")
_LARGEST_WINDOW_LOG: Final = 23


def check_coding(coding: str) -> None:
    """Raise `HttpError` 415, which names the supported codings, if `coding` is not one of them."""
    if coding.strip().lower() not in (*CODINGS, "identity", "x-gzip"):
        raise HttpError(
            415,
            "unsupported_media_type",
            "the content coding is not supported",
            field="content-encoding",
            value=coding,
            limit=list(CODINGS),
            headers=[("Accept-Encoding", ", ".join(CODINGS))],
        )


def decode_content(body: bytes | bytearray | memoryview, coding: str, *, limit_bytes: int) -> bytes:
    """Return the decompressed body.

    Raises `HttpError` 413 if it is larger than `limit_bytes`, and 400 if it is damaged or cut short.
    """
    check_coding(coding)
    coding = coding.strip().lower()
    if coding == "identity":
        return bytes(body)
    try:
        if coding == "zstd":
            return _decode_zstd(bytes(body), limit_bytes)
        return _decode_gzip(bytes(body), limit_bytes)
    except _TooLarge:
        raise HttpError(
            413, "too_large", "the decompressed body is too large", field="body", limit=limit_bytes
        ) from None
    except (zlib.error, EOFError, ValueError) as error:
        raise HttpError(400, "malformed", f"the body is no {coding}: {error}", field="body") from error


class _TooLarge(Exception):
    """The decompressed body exceeds the limit."""


def _decode_gzip(body: bytes, limit_bytes: int) -> bytes:
    return _decode_members(body, limit_bytes, lambda: zlib.decompressobj(wbits=31))


def _decode_zstd(body: bytes, limit_bytes: int) -> bytes:
    zstd = _zstd_module()
    options = {zstd.DecompressionParameter.window_log_max: _LARGEST_WINDOW_LOG}
    try:
        return _decode_members(body, limit_bytes, lambda: zstd.ZstdDecompressor(options=options))
    except zstd.ZstdError as error:
        raise ValueError(str(error)) from error


def _decode_members(body: bytes, limit_bytes: int, decompressor: Callable[[], Any]) -> bytes:
    """Return the decompressed bytes of all members (of gzip) or frames (of zstd) in `body`, joined."""
    parts: list[bytes] = []
    left = limit_bytes
    while body:
        member = decompressor()
        part = member.decompress(body, left + 1)
        left -= len(part)
        if left < 0:
            raise _TooLarge
        if not member.eof:
            raise EOFError("cut short")
        parts.append(part)
        body = member.unused_data
    return b"".join(parts)


def _zstd_module() -> Any:
    """Return Python's own zstd, from 3.14 on, or its backport; loaded with the first body that needs it."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd
