"""Three processes on loopback, of Laminar's groups or of PySyncObj's objects and their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from benches.consensus.raft_groups import NODES

PATIENCE_S = 240.0

Body = Callable[[str, Path, Sequence[socket.socket], Connection], None]


class Trio:
    """Three forked processes that each run `body(node, folder, sockets, orders)`; a context manager."""

    def __init__(self, body: Body, folder: Path) -> None:
        context = multiprocessing.get_context("fork")
        sockets = [_listening() for _ in NODES]
        self.orders: dict[str, Connection] = {}
        self.processes: dict[str, ForkProcess] = {}
        for node in NODES:
            here, there = context.Pipe()
            (folder / node).mkdir(parents=True)
            process = context.Process(target=body, args=(node, folder / node, sockets, there), daemon=True)
            process.start()
            there.close()
            self.orders[node] = here
            self.processes[node] = process
        for sock in sockets:
            sock.close()
        self._answers(NODES)

    def __enter__(self) -> Trio:
        return self

    def __exit__(self, *raised: object) -> None:
        for node, process in self.processes.items():
            if raised[0] is None and process.is_alive():
                self.orders[node].send(("end", ()))
                process.join(30)
            if process.is_alive():
                process.kill()
            process.join()

    @property
    def pids(self) -> list[int]:
        """Of those that live."""
        return [process.pid for process in self.processes.values() if process.is_alive() and process.pid]

    @property
    def alive(self) -> list[str]:
        return [node for node, process in self.processes.items() if process.is_alive()]

    def all(self, command: str, *arguments: object) -> list[Any]:
        """Give all of them a command at once; their answers."""
        alive = self.alive
        for node in alive:
            self.orders[node].send((command, arguments))
        return self._answers(alive)

    def _answers(self, nodes: Sequence[str]) -> list[Any]:
        found: dict[str, Any] = {}
        give_up = time.monotonic() + PATIENCE_S
        while len(found) < len(nodes):
            waiting = {self.orders[node]: node for node in nodes if node not in found}
            ready = wait(list(waiting), timeout=max(0.0, give_up - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no answer of {sorted(waiting.values())} within {PATIENCE_S:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    found[waiting[pipe]] = pipe.recv()
                except EOFError:
                    raise RuntimeError(f"the process of node {waiting[pipe]} ended") from None
        return [found[node] for node in nodes]

    def kill(self, node: str) -> float:
        """SIGKILL; the moment, of the monotonic clock."""
        pid = self.processes[node].pid
        assert pid is not None
        at_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self.processes[node].join()
        return at_s

    def until_served(self, groups: int, *, within_s: float) -> tuple[int, float]:
        """Wait until so many groups have a leader that serves: how many have, and since when."""
        give_up = time.monotonic() + within_s
        while True:
            answers = self.all("serves")
            count = sum(each for each, _ in answers)
            if count >= groups or time.monotonic() > give_up:
                return count, max(since for _, since in answers)
            time.sleep(0.02)


def _listening() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(64)
    return sock
