"""Heads of requests, as pure functions from bytes.

httptools (llhttp) reads the syntax; `parse_request_head` refuses what httptools accepts and should not
(docs/protocol.md#the-connection). The caller finds the empty line and passes one complete head, without the
bytes after it. So no parser state outlives a message, and equal bytes give equal heads. That lets a server
cache parsed heads (`RequestHeads`): the heads that one client sends on a connection differ at most in their
targets, so most are parsed once.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Final
from urllib.parse import unquote_to_bytes

import httptools

from laminar.http.protocol.errors import HttpError

LONGEST_HEAD_BYTES: Final = 65536
MOST_HEADERS: Final = 100
LONGEST_TARGET_BYTES: Final = 8192

END_OF_HEAD: Final = b"\r\n\r\n"

_HOST: Final = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*\Z")
# llhttp would also accept HTTP/0.9 and 2.0, ICE and RTSP.
_VERSIONS: Final = {b"HTTP/1.1": True, b"HTTP/1.0": False}
# Headers that may occur once. Two that differ would be read differently by two readers.
_SINGLE: Final = frozenset(
    {"host", "content-length", "transfer-encoding", "content-type", "expect", "authorization"}
)


class RequestHead:
    """A request line and its headers; requests with equal heads share it, so it must not be changed.

    `headers` has lower-case names; values of a repeated header are joined by ``", "``. `content_length` is 0
    without a body and for a chunked one. `segments` is the path split at ``/`` and then percent-decoded, so
    an encoded slash stays inside its segment. In `memo` the application stores the route and the principal
    that it found for the head.
    """

    __slots__ = (
        "chunked",
        "close",
        "coding",
        "content_length",
        "expects_continue",
        "headers",
        "http11",
        "memo",
        "method",
        "path",
        "query",
        "segments",
        "target",
        "wants_socket_header",
    )

    def __init__(self, method: str, target: str, headers: dict[str, str], *, http11: bool = True) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.http11 = http11
        self.path, _, query = target.partition("?")
        self.segments = split_path(self.path)
        self.query = parse_query(query) if query else {}
        self.content_length = 0
        self.chunked = False
        self.close = False
        self.wants_socket_header = "laminar-socket" in headers
        self.expects_continue = False
        self.coding = headers.get("content-encoding", "")
        self.memo: Any = None


class _Collector:
    """The callbacks of httptools for one head: they collect the target and the headers that it reports."""

    __slots__ = ("begun", "body", "headers", "target")

    def __init__(self) -> None:
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.begun = 0
        self.body = False

    def on_message_begin(self) -> None:
        self.begun += 1

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self.body = True


def parse_request_head(data: bytes) -> RequestHead:
    """Return the request head in `data`, one whole head with its empty line.

    Raises `HttpError` (400 `malformed`, 414, 417, 431, 501 or 505) for a head that is wrong, that exceeds a
    limit, or that another HTTP program might understand differently.
    """
    assert data.endswith(END_OF_HEAD), data[-8:]
    line = data[: data.index(b"\r\n")]
    http11 = _check_request_line(line)
    collector = _Collector()
    parser = httptools.HttpRequestParser(collector)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass  # an offer to speak something else may be ignored (RFC 9110, 7.8)
    except httptools.HttpParserInvalidMethodError as error:
        raise HttpError(
            501, "not_implemented", "the method is not known", field="method", value=line.split(b" ")[0]
        ) from error
    except httptools.HttpParserError as error:
        raise HttpError(
            400, "malformed", f"the head cannot be parsed: {error}", field="head", value=line
        ) from error
    if collector.begun != 1 or collector.body:
        raise HttpError(400, "malformed", "the head ends before its empty line", field="head", value=line)
    if len(collector.headers) > MOST_HEADERS:
        raise HttpError(
            431,
            "headers_too_large",
            "too many headers",
            field="headers",
            value=len(collector.headers),
            limit=MOST_HEADERS,
        )
    headers = _join_headers(collector.headers)
    method = parser.get_method().decode("ascii")
    if method == "CONNECT":
        raise HttpError(501, "not_implemented", "this is no proxy", field="method", value=method)
    target, authority = _origin_form(collector.target)
    head = RequestHead(method, target, headers, http11=http11)
    if http11 and "host" not in headers:
        raise HttpError(400, "malformed", "HTTP/1.1 needs a Host header", field="host")
    if not _HOST.match(headers.get("host", "").encode("latin-1")):
        raise HttpError(400, "malformed", "no valid host", field="host", value=headers["host"])
    if authority is not None and authority.lower() != headers.get("host", authority).lower():
        # Who looks at one of them, as a proxy does, would take the request for another server's.
        raise HttpError(
            400, "malformed", "the target and Host name two servers", field="host", value=headers["host"]
        )
    _frame_body(head)
    return head


def head_too_large(size: int) -> HttpError:
    """Return the error 431 for a head of `size` bytes, which is too large."""
    return HttpError(
        431, "headers_too_large", "the head is too large", field="head", value=size, limit=LONGEST_HEAD_BYTES
    )


def fault_of_unfinished_head(data: bytes, position: int) -> HttpError | None:
    """Return the error if the bytes from `position` cannot be the beginning of a head; None if they can."""
    size = len(data) - position
    if size > LONGEST_HEAD_BYTES:
        return head_too_large(size)
    if size and not (65 <= data[position] <= 90 or data[position] == 13):
        return HttpError(
            400, "malformed", "no HTTP request", field="head", value=data[position : position + 20]
        )
    if data.find(b"\n\n", position) >= 0 or data.find(b"\n\r\n", position) >= 0:
        return HttpError(400, "malformed", "lines end with CR LF", field="head")
    return None


def _check_request_line(line: bytes) -> bool:
    """Check the limits that need no parsing; return whether the line says HTTP/1.1 (else 1.0)."""
    longest = LONGEST_TARGET_BYTES + 32
    if len(line) > longest:
        raise HttpError(
            414,
            "target_too_long",
            "the request target is too long",
            field="target",
            value=len(line),
            limit=LONGEST_TARGET_BYTES,
        )
    version = line[-8:]
    if version not in _VERSIONS:
        if line.count(b" ") < 2 or version.startswith(b"HTTP/"):
            raise HttpError(505, "unsupported_version", "not HTTP/1.x", field="version", value=line[-20:])
        raise HttpError(400, "malformed", "no request line", field="head", value=line)
    if line.count(b" ") != 2 or line[0] in b"\r\n":  # llhttp skips what is more
        raise HttpError(400, "malformed", "no request line", field="head", value=line)
    return _VERSIONS[version]


def _join_headers(pairs: list[tuple[bytes, bytes]]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for raw_name, raw_value in pairs:
        name = raw_name.decode("ascii").lower()
        value = raw_value.strip(b" \t").decode("latin-1")
        if name not in headers:
            headers[name] = value
        elif name in _SINGLE:
            shown = None if name == "authorization" else value  # a token is not repeated in an answer
            raise HttpError(400, "malformed", f"the header {name} occurs twice", field=name, value=shown)
        else:
            headers[name] += ("; " if name == "cookie" else ", ") + value
    return headers


def _origin_form(target: bytes) -> tuple[str, str | None]:
    """Return the target as path and query, and the authority, if it has one; a fragment is refused."""
    if len(target) > LONGEST_TARGET_BYTES:
        raise HttpError(
            414,
            "target_too_long",
            "the request target is too long",
            field="target",
            value=len(target),
            limit=LONGEST_TARGET_BYTES,
        )
    text = target.decode("ascii")
    if "#" in text:
        raise HttpError(400, "malformed", "a target has no fragment", field="target", value=text)
    if text.startswith("/") or text == "*":
        return text, None
    scheme, mark, rest = text.partition("://")
    if not mark or scheme.lower() not in ("http", "https"):
        raise HttpError(400, "malformed", "the target is no path", field="target", value=text)
    at = min((i for i in (rest.find("/"), rest.find("?")) if i >= 0), default=-1)
    if at < 0:
        return "/", rest
    return rest[at:] if rest[at] == "/" else "/" + rest[at:], rest[:at]


def _frame_body(head: RequestHead) -> None:
    """Set the attributes of a head that say how its body is framed, and whether the connection then ends."""
    headers = head.headers
    if "connection" in headers:
        options = {option.strip().lower() for option in headers["connection"].split(",")}
        head.close = "close" in options or (not head.http11 and "keep-alive" not in options)
    else:
        head.close = not head.http11
    coding = headers.get("transfer-encoding")
    length = headers.get("content-length")
    if coding is not None:
        if length is not None:
            raise HttpError(
                400, "malformed", "both Content-Length and Transfer-Encoding", field="content-length"
            )
        if not head.http11:
            raise HttpError(400, "malformed", "HTTP/1.0 has no transfer codings", field="transfer-encoding")
        if coding.lower() != "chunked":
            raise HttpError(
                501, "not_implemented", "only `chunked` is known", field="transfer-encoding", value=coding
            )
        head.chunked = True
    elif length is not None:
        if not (length.isascii() and length.isdigit()) or len(length) > 18:
            raise HttpError(400, "malformed", "not a length", field="content-length", value=length)
        head.content_length = int(length)
    expectation = headers.get("expect")
    if expectation is not None and head.http11:  # RFC 9110, 10.1.1: to be ignored from HTTP/1.0
        if expectation.lower() != "100-continue":
            raise HttpError(417, "expectation_failed", field="expect", value=expectation)
        head.expects_continue = head.chunked or head.content_length > 0


class RequestHeads:
    """A cache of parsed request heads, by their bytes; when it is full, it is emptied as a whole."""

    MOST: ClassVar = 1024
    LONGEST_BYTES: ClassVar = 2048

    def __init__(self) -> None:
        self._heads: dict[bytes, RequestHead] = {}
        # Looked up by the connection itself: a method call would cost as much as the lookup.
        self.get = self._heads.get

    def parse(self, data: bytes) -> RequestHead:
        """Parse a head that the cache does not have, and add it; return the head."""
        head = parse_request_head(data)
        if len(data) <= self.LONGEST_BYTES:
            if len(self._heads) >= self.MOST:
                self._heads.clear()
            self._heads[data] = head
        return head


def split_path(path: str) -> tuple[str, ...]:
    """Return the segments of a path, each percent-decoded: ``/v1/a%2Fb`` is ``("v1", "a/b")``."""
    segments = path[1:].split("/")
    if "%" in path:
        return tuple(decode_percent(segment, field="path") for segment in segments)
    return tuple(segments)


def parse_query(query: str) -> dict[str, str]:
    """Return the parameters of a query string, decoded, by name.

    ``+`` stands for a space, as in forms, because the functions by which clients make queries write it so.
    Raises 400 `malformed` for a repeated name or for text that is not UTF-8.
    """
    found: dict[str, str] = {}
    for part in query.split("&"):
        if not part:
            continue
        name, _, value = part.partition("=")
        if "%" in part or "+" in part:
            name = decode_percent(name.replace("+", " "), field="query")
            value = decode_percent(value.replace("+", " "), field=name)
        if name in found:
            raise HttpError(
                400, "malformed", f"the query parameter {name} occurs twice", field=name, value=value
            )
        found[name] = value
    return found


_BROKEN_PERCENT: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")


def decode_percent(text: str, *, field: str) -> str:
    """Return percent-decoded text; raise 400 `malformed` if it is not UTF-8 or has a stray percent sign."""
    if "%" not in text:
        return text
    try:
        if _BROKEN_PERCENT.search(text):
            raise ValueError("a percent sign without two hexadecimal digits")
        return unquote_to_bytes(text).decode("utf-8")
    except ValueError as error:
        raise HttpError(400, "malformed", f"percent-encoding: {error}", field=field, value=text) from error
