"""What it is worth that a request reaches the shard that owns what it asks for, and its CPU.

    python -m benches.http.bench_steer

One node of two shards, and a client beside it on a veth pair between two network namespaces. Reads of one
record, over connections that always have one request on their way, four ways:

- `reuseport`: the shared port as the kernel spreads it by itself (the node's program is taken off it);
- `sockets`: the shared port, from source ports that lead to the owner's socket;
- `xdp`: the same, and each packet worked on by the owner's CPU (`--steer require`);
- `ports`: each shard's own port.

The ways alternate, so that a slow moment of the machine hits all; figures are medians of the rounds. The CPU
is that of the node's processes and of the kernel's threads that take steered packets; what the kernel does in
whoever's time a packet comes in is not seen. Needs root; `--quick` is the same for a moment, and measures
nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import uvloop

import laminar
from benches.common.floors import percentile
from benches.common.usage import cpu_s
from ebpf.requirements import first_unmet
from laminar.testing.cluster import LocalCluster, Node
from router import owner_shard, partition_hash, shard_of_source_port

SHARDS, PARTITIONS, CONNECTIONS = 2, 8, 32
WAYS = ("reuseport", "sockets", "xdp", "ports")
HOST, CLIENT = "10.77.0.1", "10.77.0.2"
TOPIC = "steered"
FIRST_SOURCE_PORT = 20_000
_CLONE_NEWNET = 0x40000000
_PIDFD_GETFD = 438
_SO_DETACH_REUSEPORT_BPF = 68
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class Figures:
    """One way, one round."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    """Of the node, per request."""
    passed_on: float
    """Share of the requests that reached another shard than the owner."""


@dataclass(slots=True)
class Tally:
    """What came back."""

    latencies_s: list[float] = field(default_factory=list)
    passed_on: int = 0


class Asker(asyncio.Protocol):
    """A connection that always has one request on its way, for each of its partitions in turn."""

    def __init__(self, partitions: Sequence[int], tally: Tally) -> None:
        self._requests = itertools.cycle([request_for(partition) for partition in partitions])
        self._tally = tally
        self._received = b""
        self._sent_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def _send(self) -> None:
        self._sent_s = time.perf_counter()
        self._transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, mark, body = self._received.partition(b"\r\n\r\n")
        if not mark:
            return
        assert head.startswith(b"HTTP/1.1 200"), self._received
        headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if len(body) < int(headers[b"content-length"]):
            return
        self._tally.latencies_s.append(time.perf_counter() - self._sent_s)
        arrived = headers[b"laminar-socket"].partition(b";")[0].partition(b"=")[2]
        self._tally.passed_on += arrived != headers[b"laminar-shard"]
        self._received = b""
        self._send()


def request_for(partition: int) -> bytes:
    """A read of the partition's first record, that says where it arrived."""
    return (
        f"GET /v1/topics/{TOPIC}/partitions/{partition}/records?offset=0&limit=1 HTTP/1.1\r\n"
        f"Host: {HOST}\r\nAccept: application/json\r\nLaminar-Socket: 1\r\n\r\n"
    ).encode()


def connections(way: str, node: Node) -> Iterator[tuple[socket.socket, list[int]]]:
    """Connected sockets, each with the partitions that are asked for on it.

    Where the kernel spreads connections a client can't know whose socket it is on, and asks for all.
    """
    owned: dict[int, list[int]] = {shard: [] for shard in range(SHARDS)}
    for partition in range(PARTITIONS):
        owned[owner_shard(partition_hash(TOPIC, partition), SHARDS)].append(partition)
    source = FIRST_SOURCE_PORT
    for number in range(CONNECTIONS):
        owner = number % SHARDS
        sock = socket.socket()
        port = node.port + 1 + owner if way == "ports" else node.port
        if way in ("sockets", "xdp"):
            source += 1
            while shard_of_source_port(source, SHARDS) != owner:
                source += 1
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((CLIENT, source))
        sock.connect((node.host, port))
        sock.setblocking(False)
        yield sock, list(range(PARTITIONS)) if way == "reuseport" else owned[owner]


async def load(way: str, node: Node, seconds: float) -> Figures:
    """Ask for `seconds`, after a short warm-up."""
    loop = asyncio.get_running_loop()
    tally = Tally()
    transports = []
    for sock, partitions in connections(way, node):
        transport, _ = await loop.create_connection(partial(Asker, partitions, tally), sock=sock)
        transports.append(transport)
    await asyncio.sleep(seconds / 4)
    tally.latencies_s.clear()
    tally.passed_on = 0
    before, began = cpu_by_pid(node), time.perf_counter()
    await asyncio.sleep(seconds)
    took_s, after, done = time.perf_counter() - began, cpu_by_pid(node), len(tally.latencies_s)
    used_s = sum(after[pid] - before[pid] for pid in before.keys() & after.keys())
    for transport in transports:
        transport.abort()
    await asyncio.sleep(0.05)
    milliseconds = [1000 * each for each in tally.latencies_s]
    return Figures(
        done / took_s,
        percentile(milliseconds, 0.5),
        percentile(milliseconds, 0.99),
        1e6 * used_s / done,
        tally.passed_on / done,
    )


def node_pids(node: Node) -> list[int]:
    """The node's processes."""
    found = json.loads((node.data / "node.json").read_text())
    return [found["pid"], *found["pids"].values()]


def cpu_by_pid(node: Node) -> dict[int, float]:
    """CPU seconds of the node's processes, and of the kernel's threads that work on redirected packets.

    Those of a program that was detached just now may end at any time.
    """
    found = {pid: cpu_s([pid]) for pid in node_pids(node)}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and (entry / "comm").read_text().startswith("cpumap/"):
                found[int(entry.name)] = cpu_s([int(entry.name)])
        except OSError:
            continue
    return found


def take_choice_off(node: Node) -> None:
    """Take the node's program off its shared port: the kernel spreads by its own hash."""
    pid = node_pids(node)[0]
    process = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=_libc.syscall(_PIDFD_GETFD, process, int(name), 0)) as sock:
                is_tcp = sock.family == socket.AF_INET and sock.type == socket.SOCK_STREAM
                if is_tcp and sock.getsockname()[1] == node.port:
                    sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_REUSEPORT_BPF, 0)
                    return
    finally:
        os.close(process)
    raise AssertionError(f"no socket on port {node.port}")


@contextmanager
def wire() -> Iterator[tuple[int, int]]:
    """Two network namespaces joined by a veth pair, by descriptor: the node's, and the client's.

    This thread is in the client's meanwhile.
    """
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    made = []
    try:
        for _ in range(2):
            if _libc.unshare(_CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "no network namespace can be made")
            made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
            run_ip("link set lo up")
        run_ip(f"link add wire1 type veth peer name wire0 netns /proc/{os.getpid()}/fd/{made[0]}")
        run_ip(f"address add {CLIENT}/24 dev wire1")
        run_ip("link set wire1 up")
        enter(made[0])
        run_ip(f"address add {HOST}/24 dev wire0")
        run_ip("link set wire0 up")
        enter(made[1])
        yield made[0], made[1]
    finally:
        enter(home)
        for fd in (home, *made):
            os.close(fd)


def enter(namespace: int) -> None:
    """What this thread opens or starts from now on is in that network namespace."""
    if _libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "a network namespace can't be entered")


def run_ip(arguments: str) -> None:
    """Run `ip`."""
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, timeout=30)


@contextmanager
def started(way: str, namespaces: tuple[int, int], directory: Path) -> Iterator[Node]:
    """A node for one way, with a topic that has a record in each partition."""
    settings = {
        "pin": "on",
        "steer": "require" if way == "xdp" else "off",
        "secret": "of the bench, no other",
        "insecure": True,
        "log_level": "error",
    }
    enter(namespaces[0])
    try:
        cluster = LocalCluster(
            directory, nodes=1, shards=SHARDS, hosts=[HOST], ports=[7070], settings=settings
        )
        with cluster:
            enter(namespaces[1])
            node = cluster.members[0]
            with laminar.connect(node.url, timeout=60) as client:
                topic = client.create_topic(TOPIC, partitions=PARTITIONS, replicas=1)
                for partition in range(PARTITIONS):
                    topic.append(b"x" * 1000, partition=partition)
            if way == "reuseport":
                take_choice_off(node)
            yield node
            enter(namespaces[0])
    finally:
        enter(namespaces[1])


def run(*, rounds: int, seconds: float) -> dict[str, Figures]:
    """The median of each figure, by way."""
    found: dict[str, list[Figures]] = {way: [] for way in WAYS}
    with wire() as namespaces, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for _ in range(rounds):
            for way in WAYS:
                with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder, ExitStack() as stack:
                    node = stack.enter_context(started(way, namespaces, Path(folder)))
                    found[way].append(runner.run(load(way, node, seconds)))
    return {way: median(each) for way, each in found.items()}


def median(rounds: Sequence[Figures]) -> Figures:
    """Of each figure apart."""
    names = ("requests_per_s", "p50_ms", "p99_ms", "cpu_us", "passed_on")
    return Figures(*(statistics.median(getattr(each, name) for each in rounds) for name in names))


def main(arguments: Sequence[str]) -> int:
    """Print a line for each way, what each is to the first, and a line for programs."""
    unmet = first_unmet()
    if unmet is not None or shutil.which("ip") is None:
        print(f"bench-steer: skipped: {unmet.reason if unmet else 'there is no ip command'}")
        return 0
    found = run(rounds=1, seconds=0.2) if "--quick" in arguments else run(rounds=5, seconds=2.0)
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}"
    print(f"{machine}, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}")
    base = found["reuseport"]
    for way, each in found.items():
        print(
            f"{way:>9}: {each.requests_per_s:8,.0f} requests/s, p50 {each.p50_ms:6.2f} ms,"
            f" p99 {each.p99_ms:6.2f} ms,"
            f" {each.cpu_us:5.0f} us of CPU a request, {each.passed_on:4.0%} passed on;"
            f" {each.requests_per_s / base.requests_per_s:.2f} times the requests,"
            f" {each.cpu_us / base.cpu_us:.2f} of the CPU"
        )
    rates = " ".join(f"{way}={each.requests_per_s:.0f}" for way, each in found.items())
    print(f"bench-steer: {rates} passed_on={base.passed_on:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
