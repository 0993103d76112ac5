"""The target of a client's request, and its two possible results: an answer, or a failure.

A failure says whether the server may have acted on the request. That is all that a caller needs to decide
whether the request may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

import msgspec

Buffer: TypeAlias = bytes | bytearray | memoryview


class ConnectionFailed(Exception):
    """A request got no answer. If `sent` is true, the server may have acted on it; if false, it has not."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


class TlsFailed(ConnectionFailed):
    """The TLS handshake with the server failed because of a certificate, a CA or the URL.

    A retry helps only after one of these was changed. `hint` says what to change; None if that is not known.
    """

    def __init__(self, reason: str, *, hint: str | None = None) -> None:
        super().__init__(reason, sent=False)
        self.hint = hint


@dataclass(slots=True)
class Answer:
    """A response: header names in lower case, the body whole."""

    status: int
    headers: dict[str, str]
    body: Buffer

    def json(self) -> Any:
        """Return the body as JSON; {} if it is empty or not JSON."""
        try:
            return msgspec.json.decode(self.body) if self.body else {}
        except msgspec.DecodeError:
            return {}


OnAnswer: TypeAlias = Callable[[Answer | None, ConnectionFailed | None], None]


@dataclass(frozen=True, slots=True)
class Target:
    """The server that a URL names: a host and port, or the `path` of a Unix socket.

    The `path` of an abstract Unix socket begins with NUL.
    """

    host: str
    port: int
    path: str | None
    tls: bool

    @classmethod
    def of(cls, url: str) -> Target:
        """Return the target of a URL.

        It may be ``http://host:port``, ``https://…``, ``unix:@name``, ``unix:/path`` or ``http+unix://…``.
        Raises ValueError for anything else.
        """
        if url.startswith("unix:"):
            return cls("localhost", 0, _unix_path(url[5:]), False)
        parts = urlsplit(url)
        if parts.scheme == "http+unix":
            return cls("localhost", 0, _unix_path(unquote(parts.netloc + parts.path)), False)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not a URL of a node: {url!r}")
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), None, tls)

    @property
    def authority(self) -> str:
        """The value of the Host header of requests to this target."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.path is not None else f"{host}:{self.port}"


def _unix_path(name: str) -> str:
    name = name.removeprefix("//")
    return "\0" + name[1:] if name.startswith("@") else name
