"""The addresses of this machine that a node can listen at."""

from __future__ import annotations

import socket

HOSTS = ["127.0.0.1", "::1"]


def have(host: str) -> bool:
    """Whether this machine can bind `host`."""
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        return False
    return True
