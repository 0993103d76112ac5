"""Real servers for tests, and checks of what they did.

``with laminar.testing.node() as client`` is a real server on a real disk at a free address,
gone afterwards. The pytest fixture ``laminar_client`` gives the same; it is there as soon as
the distribution is installed. `check_history` compares what was acknowledged with what is read.
"""

from __future__ import annotations

from laminar.testing.history import Read, Sent, Violation, check_history, check_replicas
from laminar.testing.nodes import ServerFailed, aio_node, node

__all__ = [
    "Read",
    "Sent",
    "ServerFailed",
    "Violation",
    "aio_node",
    "check_history",
    "check_replicas",
    "node",
]
