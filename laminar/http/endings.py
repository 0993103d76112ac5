"""Where a client's request goes, and the ways it can end: with an answer, or with a failure.

A failure says whether the server can have acted on the request. Whoever decides
about repeating it needs nothing else.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from laminar.http.messages import Buffer

Outcome = Literal["not_sent", "unknown"]


class HttpError(Exception):
    """No answer. `outcome` is ``not_sent`` where the server can't have acted on it, else ``unknown``."""

    def __init__(self, message: str, *, outcome: Outcome) -> None:
        super().__init__(message)
        self.outcome: Outcome = outcome


class ConnectFailed(HttpError):
    """There is no connection, so nothing was sent."""

    def __init__(self, message: str) -> None:
        super().__init__(message, outcome="not_sent")


class ConnectionLost(HttpError):
    """The connection ended before the answer."""


class RequestTimeout(HttpError, TimeoutError):
    """The answer, or the connection, didn't come in time."""


class BadResponse(HttpError):
    """What came is no HTTP response, or ended within one."""

    def __init__(self, message: str) -> None:
        super().__init__(message, outcome="unknown")


class Endpoint(NamedTuple):
    """Where to connect: TCP host and port (IPv6 without brackets), or an abstract Unix name."""

    host: str
    port: int
    unix_name: str = ""
    tls: bool = False

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """``http://host:port``, ``https://host``, ``unix:@name``, else `ValueError`. A path is ignored."""
        if url.startswith("unix:@") and len(url) > 6:
            return cls("", 0, url[6:])
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"no URL of a server: {url!r}")
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), "", tls)

    @property
    def authority(self) -> str:
        """What the Host header says."""
        if self.unix_name:
            return "localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"unix:@{self.unix_name}" if self.unix_name else f"http{'s' * self.tls}://{self.authority}"


class ClientResponse:
    """An answer, whole. Header names are lower-case; `body` is the connection's own buffer, not copied."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, headers: dict[str, str], body: Buffer) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    def json(self) -> Any:
        """The body as JSON; `msgspec.DecodeError` if it is none."""
        return msgspec.json.decode(self.body)

    def __repr__(self) -> str:
        return f"<ClientResponse {self.status}, {len(self.body)} bytes>"
