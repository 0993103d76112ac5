"""`python -m tests.cluster.held_start SOCKET ...`: a node whose shards wait before they recover their logs.

Each connects to the Unix socket SOCKET and goes on when the other end closes the connection. The rest are the
arguments of `python -m laminar.node`.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

from laminar.log.format.settings import StorageSettings
from laminar.log.storage import Storage
from laminar.node.__main__ import settings_of
from laminar.node.runtime.environment import Environment
from laminar.node.start import serve


class HeldEnvironment(Environment):
    """The machine itself, but a shard's storage opens only when the test lets it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def storage(
        self, store: str, logs_directory: str, *, settings: StorageSettings, forget: bool = False
    ) -> Storage:
        """Open the store directory; that of a shard, which may `forget`, after the wait."""
        if forget:
            with socket.socket(socket.AF_UNIX) as waiting:
                waiting.connect(self.path)
                waiting.recv(1)
        return super().storage(store, logs_directory, settings=settings, forget=forget)


def main(arguments: Sequence[str]) -> int:
    """The exit code of `laminar.node.start.serve`."""
    path, *rest = arguments
    return serve(settings_of(rest), environment=HeldEnvironment(path))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
