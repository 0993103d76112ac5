"""A node with children made for tests: run as a program, `supervised.py DATA PORT SHARDS [BEHAVIOUR [HOST]]`.

Each child accepts on its sockets and answers "ROLE PID" and a newline. A connection that sends one byte
gets more: `d` ends the child with exit code 3, `b` shows the board, `t` the number of threads. BEHAVIOUR:
`deaf` children ignore SIGTERM, `stubborn` ones too and have ten minutes to end, `broken` shards exit at once,
`unrecoverable` ones say that no successor could do better, `norecovery` lets recovery fail, `threaded` starts
a thread before serving, `late` lets shard 1 serve only when somebody has connected to its peer port, and
`half` lets it exit at once.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from laminar.log import DamagedDocument
from laminar.node.entry_points import EntryPoints
from laminar.node.host.fork import Unrecoverable, threads
from laminar.node.host.settings import OPEN, Settings
from laminar.node.runtime.boot import Boot, role_name
from laminar.node.runtime.listeners import begin_to_listen
from laminar.node.start import serve

# How long those who ignore SIGTERM are waited for.
DRAIN_MS = {"deaf": 200, "stubborn": 600_000}


class Stopped(Exception):
    """SIGTERM came."""


def stop(number: int, frame: object) -> None:
    """The signal's handler."""
    raise Stopped


def answer(boot: Boot, connection: socket.socket) -> int | None:
    """Serve one connection; an exit code ends the child."""
    connection.setblocking(True)
    connection.sendall(f"{role_name(boot.role)} {os.getpid()}\n".encode())
    order = connection.recv(1)
    if order == b"d":
        return 3
    if order == b"b":
        lines = [f"{role_name(one.role)}={one.state.name}/{one.restarts}" for one in boot.board.read_all()]
        connection.sendall(" ".join(lines).encode() + b"\n")
    if order == b"t":
        connection.sendall(f"{threads()}\n".encode())
    return None


def child(boot: Boot, behaviour: str) -> int:
    """Accept until told to stop."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour in DRAIN_MS else stop)
    listeners = {boot.peer.fileno(): boot.peer}
    awaited: dict[int, socket.socket] = {}
    try:
        if boot.http_own is not None and boot.http_shared is not None:
            if behaviour == "late" and boot.role == 1:
                select.select([boot.peer], [], [])
            begin_to_listen(boot.http_own)
            listeners[boot.http_own.fileno()] = boot.http_own
            boot.answers()
            awaited[boot.shared_port_fd] = boot.http_shared
        boot.ready()
        while True:
            for fd in select.select([*listeners, *awaited], [], [])[0]:
                if fd in awaited:
                    shared = awaited.pop(fd)
                    listeners[shared.fileno()] = shared
                    continue
                try:
                    connection, _ = listeners[fd].accept()
                except BlockingIOError:
                    continue
                code = None
                with connection, suppress(ConnectionError):  # one that leaves without reading ends no child
                    code = answer(boot, connection)
                if code is not None:
                    return code
    except Stopped:
        return 0


def main() -> int:
    """Serve as the arguments say."""
    data, port, shards = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    behaviour = sys.argv[4] if len(sys.argv) > 4 else ""
    if behaviour == "threaded":
        threading.Thread(target=signal.pause, daemon=True).start()

    def recover(directory: str, shards: int) -> None:
        if behaviour == "norecovery":
            raise ValueError("a journal that can't be read")
        if behaviour == "nodocument":
            raise DamagedDocument("no whole copy of layout in data: layout-1.a has a wrong checksum")

    def shard(boot: Boot) -> int:
        if behaviour == "unrecoverable":
            raise Unrecoverable("another has my name")
        broken = behaviour == "broken" or (behaviour == "half" and boot.role == 1)
        return 4 if broken else child(boot, behaviour)

    entry_points = EntryPoints(controller=lambda boot: child(boot, behaviour), shard=shard, recover=recover)
    settings = Settings(
        data=data,
        port=port,
        host=sys.argv[5] if len(sys.argv) > 5 else "127.0.0.1",
        shards=shards,
        access=OPEN,
        pin="off",
        drain_ms=DRAIN_MS.get(behaviour, 60_000),
        default_replicas=1,
    )
    return serve(settings, entry_points=entry_points)


if __name__ == "__main__":
    sys.exit(main())
