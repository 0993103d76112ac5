"""A cluster of real node processes on this machine: started, killed, restarted and ended by a program.

Each node is `laminar serve` in a process group of its own, with a data folder and a log file that stay after
it. By default every cluster has a loopback net to itself (127.77.N.1, 127.77.N.2, ...), so that ports are
fixed, a restarted node comes back where it was, and clusters never meet. Nothing outlives the program: every
group is tied to it (`laminar.testing.parent_death`), and carries a mark in its environment by which
`leftovers` finds what is still there. Knows processes and addresses; what a node answers is asked only to
know whether it is ready.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from laminar.testing import parent_death
from laminar.testing.nodes import ServerFailed

MARK = "LAMINAR_TEST_CLUSTER"
PORT = 7070
# A node takes port to port + 101 + shards; on one address the next begins behind that.
PORT_STEP = 200
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
_NETS = range(1, 255)
_PAUSE_S = 0.02


class LoopbackNet:
    """Addresses 127.77.N.1 to .254 that no other cluster on this machine uses while this is open.

    The claim is the name of an abstract Unix socket: taken atomically, released by the kernel if this process
    dies.
    """

    def __init__(self) -> None:
        first = secrets.randbelow(len(_NETS))
        for step in range(len(_NETS)):
            self.number = _NETS[(first + step) % len(_NETS)]
            self._claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                self._claim.bind(f"\0test-net-127.77.{self.number}")
            except OSError:
                self._claim.close()
                continue
            return
        raise ServerFailed(f"all {len(_NETS)} loopback nets are taken")

    def hosts(self, count: int) -> list[str]:
        """Return the first `count` addresses."""
        return [f"127.77.{self.number}.{position + 1}" for position in range(count)]

    def close(self) -> None:
        """Release the net. Idempotent."""
        self._claim.close()


@dataclass(slots=True)
class Node:
    """One node: where it listens, where its files are, and its process if it runs."""

    number: int
    host: str
    port: int
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    exit_codes: list[int | None] = field(default_factory=list)
    """How each run ended that `stop` ended; None: it had to be killed."""
    joins: tuple[int, ...] = ()
    """Numbers of the nodes it asks for a place in the cluster; none: it founds one."""
    name: str = ""
    """By default of its number. One that lost its data folder needs another."""

    def __post_init__(self) -> None:
        self.name = self.name or f"node-{self.number + 1}"

    @property
    def url(self) -> str:
        """URL of its HTTP interface."""
        return f"http://{self.host}:{self.port}"

    @property
    def data(self) -> Path:
        """Its data folder."""
        return self.folder / "data"

    @property
    def log(self) -> Path:
        """Its log file."""
        return self.folder / "log"

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.poll() is None

    def log_tail(self, *, size_bytes: int = 4_000) -> str:
        """Return the end of its log, for a message."""
        try:
            return self.log.read_bytes()[-size_bytes:].decode("utf-8", "replace")
        except FileNotFoundError:
            return "(no log)"


@dataclass
class LocalCluster:
    """Nodes on loopback; a context manager that starts them and, whatever happens, ends them.

    Nodes are numbered from 0; the first founds the cluster, the others join it. `hosts` and `ports`
    are one per node, or left out for a net of its own. `settings` are further settings of every node.
    """

    directory: Path
    nodes: int = 3
    shards: int = 2
    hosts: Sequence[str] | None = None
    ports: Sequence[int] | None = None
    settings: Mapping[str, str | int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mark = secrets.token_hex(16)
        self._net = LoopbackNet() if self.hosts is None else None
        hosts = self._net.hosts(self.nodes) if self._net is not None else list(self.hosts or ())
        ports = list(self.ports) if self.ports is not None else [PORT] * self.nodes
        assert len(hosts) == len(ports) == self.nodes, f"{hosts} and {ports} for {self.nodes} nodes"
        self.members = [
            Node(
                number,
                host,
                port,
                Path(self.directory) / f"node-{number + 1}",
                joins=(0,) if number > 0 else (),
            )
            for number, (host, port) in enumerate(zip(hosts, ports, strict=True))
        ]
        # The write end of each process's own pipe, held by no other process: see `parent_death`.
        self._lifelines: list[int] = []
        self._names = self.nodes
        self._stopped = False

    # -- life of the whole ---------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def urls(self) -> list[str]:
        """Every node's HTTP address, running or not."""
        return [node.url for node in self.members]

    def start(self, *, timeout: float = START_TIMEOUT_S) -> None:
        """Start all nodes, and wait until each serves and they see each other. Raises ServerFailed."""
        # Those that join ask until the founder answers, so all may start at once.
        for node in self.members:
            self.spawn(node.number)
        self.wait_ready(timeout=timeout)

    def stop(self) -> None:
        """End every node, first by request, then by force, and release what was held. Idempotent.

        An interrupt (a second Ctrl-C) ends the wait; no process is left in that case either.
        """
        try:
            self._ask_to_end()
        finally:
            for node in self.members:
                self.kill(node.number)
            self._stopped = True
            while self._lifelines:
                os.close(self._lifelines.pop())
            if self._net is not None:
                self._net.close()

    def _ask_to_end(self) -> None:
        """End every node by request, within `STOP_TIMEOUT_S`; note how each ended."""
        for node in self.members:
            if node.running:
                assert node.process is not None
                node.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for node in self.members:
            if node.process is not None:
                try:
                    node.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    node.exit_codes.append(None)
                else:
                    node.exit_codes.append(node.process.returncode)

    def leftovers(self) -> list[int]:
        """Return the pids of this cluster's living processes, also of those with its `environment`."""
        return marked_processes(f"{MARK}={self.mark}")

    # -- life of a node ------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        """Return the environment of the cluster's processes: no LAMINAR_ variable of ours, but the mark."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("LAMINAR_") or name.startswith("LAMINAR_TEST_")
        }
        return kept | {MARK: self.mark}

    def command(self, number: int) -> list[str]:
        """Return the command line of a node."""
        node = self.members[number]
        given: dict[str, str | int] = {
            "data": str(node.data),
            "node": node.name,
            "host": node.host,
            "port": node.port,
            "shards": self.shards,
            "default_replicas": min(3, self.nodes),
            **self.settings,
        }
        if node.joins:
            asked = [self.members[number] for number in node.joins]
            given["join"] = ",".join(f"{other.host}:{other.port}" for other in asked)
        flags: list[str] = []
        for name, value in given.items():
            flag = f"--{name.replace('_', '-')}"
            flags += [flag] if value is True else [flag, str(value)]
        return [sys.executable, "-P", "-m", "laminar.cli", "serve", *flags]

    def spawn(self, number: int) -> None:
        """Start a node without waiting for it."""
        node = self.members[number]
        assert not node.running, f"{node.name} runs already"
        node.folder.mkdir(parents=True, exist_ok=True)
        node.process = self.open_process(self.command(number), log=node.log)

    def open_process(self, command: Sequence[str], *, log: Path) -> subprocess.Popen[bytes]:
        """Start a process of the cluster: marked, in a group of its own, and ended when this process ends."""
        assert not self._stopped, "the cluster was stopped"
        lifeline, end = os.pipe()
        self._lifelines.append(end)
        # Without site packages, which it does not need: that takes a fifth of the time.
        tied = [sys.executable, "-I", "-S", parent_death.__file__, str(lifeline)]
        try:
            with open(log, "ab") as opened:
                return subprocess.Popen(
                    [*tied, *command],
                    env=self.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=opened,
                    stderr=opened,
                    pass_fds=[lifeline],
                    process_group=0,
                )
        finally:
            os.close(lifeline)

    def kill(self, number: int) -> None:
        """Send SIGKILL to all processes of a node at once; return when none is left."""
        node = self.members[number]
        if node.process is None:
            return
        kill_group(node.process)
        node.process = None

    def wipe(self, number: int) -> None:
        """Remove the whole data folder of a node that does not run. From now on it asks all others."""
        node = self.members[number]
        assert not node.running, f"{node.name} runs on the folder"
        shutil.rmtree(node.data)
        # Also the founder: without --join its empty folder would make a cluster of its own.
        node.joins = tuple(other for other in range(self.nodes) if other != number)

    def rename(self, number: int) -> None:
        """Let the node that is started next be another one, at the same address."""
        self._names += 1
        self.members[number].name = f"node-{self._names}"

    def restart(self, number: int, *, timeout: float = START_TIMEOUT_S) -> None:
        """Start a node that was killed, on its data and address; return when it serves."""
        self.spawn(number)
        self.wait_ready([number], timeout=timeout)

    def pids(self, number: int) -> list[int]:
        """Return the pids of a node that is ready: the supervisor's, then its children's."""
        process = self.members[number].process
        document = self._node_file(number)
        if process is None or document is None:
            return []
        return [process.pid, *(int(pid) for pid in document["pids"].values())]

    # -- readiness -----------------------------------------------------------------------------

    def wait_ready(self, numbers: Iterable[int] | None = None, *, timeout: float = START_TIMEOUT_S) -> None:
        """Wait until these nodes (None: all) serve and see every running node alive.

        Raises ServerFailed with the end of a log when a process ended, or the time is over.
        """
        waited = list(range(self.nodes) if numbers is None else numbers)
        deadline = time.monotonic() + timeout
        missing = waited
        while missing := [number for number in missing if not self._is_ready(number)]:
            for number in missing:
                node = self.members[number]
                if not node.running:
                    code = node.process.returncode if node.process is not None else None
                    raise ServerFailed(f"{node.name} ended with {code}:\n{node.log_tail()}")
            if time.monotonic() >= deadline:
                names = ", ".join(self.members[number].name for number in missing)
                tail = self.members[missing[0]].log_tail()
                raise ServerFailed(f"{names} not ready within {timeout:g} s:\n{tail}")
            time.sleep(_PAUSE_S)

    def _is_ready(self, number: int) -> bool:
        node = self.members[number]
        if not node.running or self._node_file(number) is None:
            return False
        if get_json(f"{node.url}/readyz") is None:
            return False
        cluster = get_json(f"{node.url}/v1/cluster") or {}
        seen = {each["node"] for each in cluster.get("nodes", ()) if each.get("alive", True)}
        return {member.name for member in self.members if member.running} <= seen

    def _node_file(self, number: int) -> dict[str, Any] | None:
        node = self.members[number]
        try:
            document = json.loads((node.data / "node.json").read_bytes())
        except FileNotFoundError:
            return None
        assert isinstance(document, dict), f"node.json holds {document!r}"
        # A node that was killed leaves its file behind; its successor's carries another pid.
        return document if node.process is not None and document["pid"] == node.process.pid else None


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to the whole group that a process leads; return when none of it is left."""
    # Not killpg: it would go on finding those that are dead, and that their new parent has not asked about.
    while members := processes_of_group(process.pid):
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(_PAUSE_S / 10)
    process.wait()


def get_json(url: str, *, headers: Mapping[str, str] | None = None, timeout: float = 2.0) -> Any:
    """Return what exactly this address answers, None if it does not answer 200. No retry, no other node."""
    # Imported here: pytest loads this package in every session where Laminar is installed.
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=dict(headers or {})), timeout=timeout
        ) as answer:
            return json.loads(answer.read())
    except (urllib.error.URLError, OSError, ValueError):
        return None


def _living() -> Iterator[tuple[Path, list[str]]]:
    """Yield each living process: its folder in /proc, and its `stat` after the name (state, parent, ...).

    One that ended and that its parent has not reaped (Z) counts as ended.
    """
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # gone meanwhile
        if stat[0] not in "ZX":
            yield entry, stat


def processes_of_group(group: int) -> list[int]:
    """Return the pids of the living processes of a process group."""
    return [int(entry.name) for entry, stat in _living() if int(stat[2]) == group]


def marked_processes(mark: str) -> list[int]:
    """Return the living processes, this one aside, that began with ``NAME=value`` in their environment."""
    found = []
    for entry, _ in _living():
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # gone meanwhile, or another user's
        if mark.encode() in environment and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return sorted(found)
