"""The same work on PySyncObj's own Raft: one process of three, with an object for each group.

Its journal (`journalFile`) is a file mapped into memory, which nothing of it syncs: what a power loss leaves
of it is the kernel's affair. The objects are ticked by turns in one thread, as the threads they start by
themselves would only wait for one another. Compaction is put off, which rewrites the journal.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from pysyncobj import FAIL_REASON, SyncObj, SyncObjConf, replicated

from benches.consensus.raft_groups import NODES, VALUE, Loaded

# How long an only object waits in its poll; many are polled by turns.
_ONLY_WAITS_S = 0.02
_NEVER = 10**9


class Regrets(logging.Handler):
    """Counts how often PySyncObj says that it cuts entries which it has applied already."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "already-applied" in record.getMessage()


class Sink(SyncObj):  # type: ignore[misc]
    """A group: it counts what is applied."""

    def __init__(self, ports: Sequence[int], place: int, journal: Path, *, batched: bool) -> None:
        addresses = [f"127.0.0.1:{port}" for port in ports]
        others = [address for number, address in enumerate(addresses) if number != place]
        super().__init__(
            addresses[place],
            others,
            SyncObjConf(
                autoTick=False,
                journalFile=str(journal),
                appendEntriesUseBatch=batched,
                logCompactionMinEntries=_NEVER,
                logCompactionMinTime=_NEVER,
                connectionRetryTime=0.2,  # else five seconds go by before all have found one another
            ),
        )
        self.applied = 0

    @replicated  # type: ignore[untyped-decorator]
    def put(self, value: bytes) -> None:
        """One proposal."""
        self.applied += 1


class Objects:
    """The objects of one process, and their load."""

    def __init__(self, place: int, folder: Path) -> None:
        self.place = place
        self.folder = folder
        self.sinks: list[Sink] = []
        self._latencies_ms: list[float] = []
        self._in_flight = 0
        self._loading = False
        self._regrets = Regrets()
        logging.getLogger().addHandler(self._regrets)

    def regrets(self) -> int:
        """See `Regrets`."""
        return self._regrets.count

    def make(self, ports: Sequence[Sequence[int]], batched: bool) -> None:
        """An object for each group, with the three nodes' ports."""
        for number, each in enumerate(ports):
            self.sinks.append(Sink(each, self.place, self.folder / f"{number}", batched=batched))

    def tick(self) -> None:
        """One turn for each object."""
        waits_s = _ONLY_WAITS_S if len(self.sinks) == 1 else 0.0
        for sink in self.sinks:
            sink.doTick(waits_s)

    def led(self) -> list[Sink]:
        return [sink for sink in self.sinks if sink._isLeader()]

    def serves(self) -> tuple[int, float]:
        """How many objects are led here and have been brought up to their log, and now."""
        return sum(sink.isReady() for sink in self.led()), time.monotonic()

    def load(self, groups: int, in_flight: int, seconds: float) -> Loaded:
        """As `GroupProcess.load`."""
        self._loading = True
        each, rest = divmod(in_flight, groups)
        for number, sink in enumerate(self.sinks):
            if sink._isLeader():
                for _ in range(each + (number < rest)):
                    self._put(sink)
        self._tick_for(seconds / 4)
        self._latencies_ms = []
        began = time.perf_counter()
        self._tick_for(seconds)
        while self.led() and not self._latencies_ms and time.perf_counter() < began + 5:
            self.tick()
        self._loading = False
        found = Loaded(time.perf_counter() - began, tuple(self._latencies_ms))
        give_up = time.perf_counter() + 10
        while self._in_flight and time.perf_counter() < give_up:
            self.tick()
        return found

    def _tick_for(self, seconds: float) -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            self.tick()

    def _put(self, sink: Sink) -> None:
        began = time.perf_counter()

        def done(result: object, error: int) -> None:
            self._in_flight -= 1
            if error == FAIL_REASON.SUCCESS:
                self._latencies_ms.append((time.perf_counter() - began) * 1000)
            if self._loading:
                self._put(sink)

        self._in_flight += 1
        sink.put(VALUE, callback=done)


def run_objects(node: str, folder: Path, sockets: Sequence[socket.socket], orders: Connection) -> None:
    """The body of a process of the trio. PySyncObj binds ports itself: these `sockets` are let go."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for sock in sockets:
        sock.close()
    objects = Objects(NODES.index(node), folder)
    orders.send("waits")
    while True:
        if not objects.sinks or orders.poll():
            try:
                name, arguments = orders.recv()
            except EOFError:
                break
            if name == "end":
                break
            orders.send(getattr(objects, name)(*arguments))
        objects.tick()
    # Its own way to end tells threads that were never started.
    os._exit(0)
