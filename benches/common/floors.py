"""The floors: what the machine does with a bare loop, measured in the same run as Laminar.

Each floor is the least that the measured path can do without: the same bytes to the same disk, or through the
same kind of socket, with nothing of ours in between. A ratio to a floor moves less from machine to machine
than the figure itself.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benches.common.echo import Echo

MIB = 1 << 20
# Above this an fdatasync's p99 says that somebody else uses the disk: the run is worth nothing.
QUIET_P99_MS = 1.0


@dataclass(frozen=True, slots=True)
class DiskFloor:
    """4 KiB appends, each synced, to one file; 1 MiB writes, each synced, to three files by turns."""

    syncs_per_s: float
    sync_p50_ms: float
    sync_p99_ms: float
    mib_mb_per_s: float

    @property
    def quiet(self) -> bool:
        """Whether the disk was ours alone, as far as one can tell."""
        return self.sync_p99_ms <= QUIET_P99_MS

    def __str__(self) -> str:
        return (
            f"4 KiB write+fdatasync {self.syncs_per_s:,.0f}/s,"
            f" p50 {self.sync_p50_ms:.3f} ms, p99 {self.sync_p99_ms:.3f} ms;"
            f" 1 MiB writev+fdatasync over 3 files {self.mib_mb_per_s:,.0f} MB/s"
        )


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def disk_floor(directory: Path, *, syncs: int = 2000, blocks: int = 600) -> DiskFloor:
    """Measure both floors in `directory`, which must be on the disk that Laminar will use."""
    took = _synced_appends(directory / "floor-4k", syncs)
    return DiskFloor(
        syncs_per_s=len(took) / sum(took),
        sync_p50_ms=percentile(took, 0.5) * 1000,
        sync_p99_ms=percentile(took, 0.99) * 1000,
        mib_mb_per_s=_synced_blocks([directory / f"floor-1m-{number}" for number in range(3)], blocks),
    )


def _synced_appends(path: Path, count: int) -> list[float]:
    block = os.urandom(4096)
    fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    took = []
    try:
        for _ in range(count):
            began = time.perf_counter()
            os.write(fd, block)
            os.fdatasync(fd)
            took.append(time.perf_counter() - began)
    finally:
        os.close(fd)
        path.unlink()
    return took


def _synced_blocks(paths: list[Path], count: int) -> float:
    """MB/s of 1 MiB blocks, a thread per file, each block synced before that thread's next."""
    block = os.urandom(MIB // 2)
    fds = [os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600) for path in paths]
    each = max(1, count // len(fds))

    def write(fd: int) -> None:
        for _ in range(each):
            written = os.writev(fd, [block, block])
            assert written == MIB, f"{written} of {MIB} bytes written"
            os.fdatasync(fd)

    threads = [threading.Thread(target=write, args=(fd,)) for fd in fds]
    try:
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - began
    finally:
        for fd, path in zip(fds, paths, strict=True):
            os.close(fd)
            path.unlink()
    return each * len(fds) * MIB / took / 1e6


@contextmanager
def forked(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Run `serve` on a listening loopback socket in a process of its own; gives its port."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(1024)
    port = int(sock.getsockname()[1])
    pid = os.fork()
    if pid == 0:
        try:
            gc.freeze()
            serve(sock)
        finally:
            os._exit(1)
    sock.close()
    try:
        yield port
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def serve_echo(sock: socket.socket) -> None:
    """A bare uvloop + httptools server that answers every POST alike."""

    async def serve() -> None:
        await asyncio.get_running_loop().create_server(Echo, sock=sock)
        await asyncio.Event().wait()

    run_loop(serve())


def run_loop(work: Coroutine[None, None, None]) -> None:
    """Run on uvloop, as the nodes do."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


def socket_copy_mb_per_s(*, blocks: int, rounds: int = 3) -> float:
    """MB/s of 1 MiB blocks sent by one process and received by this one over loopback TCP; the median."""

    def serve(sock: socket.socket) -> None:
        block = os.urandom(MIB)
        while True:
            peer, _ = sock.accept()
            with peer:
                for _ in range(blocks):
                    peer.sendall(block)

    rates = []
    buffer = memoryview(bytearray(MIB))
    with forked(serve) as port:
        for _ in range(rounds):
            received = 0
            with socket.create_connection(("127.0.0.1", port)) as sock:
                began = time.perf_counter()
                while size := sock.recv_into(buffer):
                    received += size
                took = time.perf_counter() - began
            assert received == blocks * MIB, f"{received} bytes of {blocks * MIB}"
            rates.append(received / took / 1e6)
    return statistics.median(rates)
