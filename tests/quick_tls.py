"""One TLS context for all clients of httpx that ask for the default one.

Each client makes its own by default, which reads every CA of the machine: 27 ms of CPU, also where only plain
HTTP is spoken. Tests make thousands of clients, some in loops that wait for a node.
"""

from __future__ import annotations

import ssl
from functools import cache
from typing import Any

import httpx
from httpx._transports import default as transports

_create = httpx.create_ssl_context


@cache
def _default(trust_env: bool) -> ssl.SSLContext:
    return _create(trust_env=trust_env)


def _shared(verify: ssl.SSLContext | str | bool = True, cert: Any = None, trust_env: bool = True) -> Any:
    return _default(trust_env) if verify is True and cert is None else _create(verify, cert, trust_env)


def share_context() -> None:
    """Let all clients have the same; it is made when the first is."""
    transports.create_ssl_context = _shared  # type: ignore[attr-defined]
