"""A cluster of real node processes on this machine: started, killed, restarted and ended by a program.

Each node is `python -m laminar.node` in a process group of its own. Its data folder and log file are kept
when it ends. By default every cluster has a loopback net of its own (127.77.N.1, 127.77.N.2, ...): so ports
are fixed, a restarted node has the same address, and clusters do not disturb each other. No node outlives the
program: the kernel kills each process group when the program ends (`laminar.testing.parent_death`). All
processes have a mark in their environment, by which `leftovers` finds those that still run. This module knows
processes and addresses. It asks nodes only whether they are ready.
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

from laminar.testing import nodes as processes
from laminar.testing.nodes import ServerFailed

MARK = "LAMINAR_TEST_CLUSTER"
PORT = 7070
# A node uses ports from its own up to its own + 101 + shards; the next node on the same address begins this
# much higher.
PORT_STEP = 200
START_TIMEOUT_S = 60.0
# Longer than a node takes until it kills its own processes: the default of `drain_ms`, and a grace.
STOP_TIMEOUT_S = 30.0
_NETS = range(1, 255)
_PAUSE_S = 0.02
# The pause between two questions to a node, as a share of the time for which it was waited.
_PAUSE_SHARE = 0.05
_LONGEST_PAUSE_S = 0.5


class LoopbackNet:
    """Addresses 127.77.N.1 to .254 that no other cluster on this machine uses while this is open.

    A net is claimed by binding the name of an abstract Unix socket: that is atomic, and the kernel releases
    the name if this process dies.
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
    """One node of a cluster: its address, its folder of files, and its process if it runs."""

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
        """URL of the node's HTTP interface."""
        return f"http://{self.host}:{self.port}"

    @property
    def data(self) -> Path:
        """The node's data folder."""
        return self.folder / "data"

    @property
    def log(self) -> Path:
        """The node's log file."""
        return self.folder / "log"

    @property
    def running(self) -> bool:
        """Whether the node's process runs."""
        return self.process is not None and self.process.poll() is None

    def log_tail(self, *, size_bytes: int = 4_000) -> str:
        """Return the end of the node's log, for a message."""
        try:
            return self.log.read_bytes()[-size_bytes:].decode("utf-8", "replace")
        except FileNotFoundError:
            return "(no log)"


@dataclass
class LocalCluster:
    """A cluster on loopback; a context manager that starts its nodes and always ends them.

    Nodes are numbered from 0; the first founds the cluster, the others join it. `hosts` and `ports` have an
    element for each node; without `hosts` the cluster gets a `LoopbackNet` of its own. `settings` are further
    settings of all nodes. Nodes require no tokens, unless `settings` say otherwise.
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
        # The write end of each process's pipe. Only this process holds it: see `parent_death`.
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

    @property
    def admin_token(self) -> str:
        """The first token, as a node wrote it to a file; "" if there is none (`access=open`, or not yet)."""
        for node in self.members:
            with contextlib.suppress(FileNotFoundError):
                return (node.data / "admin-token").read_text().strip()
        return ""

    def start(self, *, timeout: float = START_TIMEOUT_S) -> None:
        """Start all nodes, and wait until each serves and they see each other. Raises ServerFailed."""
        # Joining nodes repeat their request until the founder answers, so all may start at once.
        for node in self.members:
            self.spawn(node.number)
        self.wait_ready(timeout=timeout)

    def stop(self) -> None:
        """End every node, by SIGTERM and then by SIGKILL, and release pipes and addresses. Idempotent.

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
        """Send SIGTERM to every node, wait up to `STOP_TIMEOUT_S`, and note exit codes (None: still runs)."""
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
        """Return the pids of all living processes that were started with this cluster's `environment`."""
        return marked_processes(f"{MARK}={self.mark}")

    # -- life of a node ------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        """Return this process's environment without its LAMINAR_ variables, and with the cluster's mark."""
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
            "access": "open",
            **self.settings,
        }
        if node.joins:
            asked = [self.members[number] for number in node.joins]
            given["join"] = ",".join(f"{other.host}:{other.port}" for other in asked)
        flags: list[str] = []
        for name, value in given.items():
            flags += [f"--{name.replace('_', '-')}", str(value)]
        return [sys.executable, "-P", "-m", "laminar.node", *flags]

    def spawn(self, number: int) -> None:
        """Start a node without waiting for it."""
        node = self.members[number]
        assert not node.running, f"{node.name} runs already"
        node.folder.mkdir(parents=True, exist_ok=True)
        node.process = self.open_process(self.command(number), log=node.log)

    def open_process(self, command: Sequence[str], *, log: Path) -> subprocess.Popen[bytes]:
        """Start a process with the cluster's mark, in its own group; it is killed if this process ends."""
        assert not self._stopped, "the cluster was stopped"
        lifeline, end = os.pipe()
        self._lifelines.append(end)
        try:
            with open(log, "ab") as opened:
                return processes.start_process(command, env=self.environment(), log=opened, lifeline=lifeline)
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
        """Remove the data folder of a node that does not run. Its next start joins the other nodes."""
        node = self.members[number]
        assert not node.running, f"{node.name} runs on the folder"
        shutil.rmtree(node.data)
        # Also node 0: started without --join, it would found a new cluster on its empty folder.
        node.joins = tuple(other for other in range(self.nodes) if other != number)

    def rename(self, number: int) -> None:
        """Give a node a new name, so that its next start is that of a new node at the same address."""
        self._names += 1
        self.members[number].name = f"node-{self._names}"

    def restart(self, number: int, *, timeout: float = START_TIMEOUT_S) -> None:
        """Start a node that was killed, with its data and address; return when it is ready."""
        self.spawn(number)
        self.wait_ready([number], timeout=timeout)

    def pids(self, number: int) -> list[int]:
        """Return the pids of a node: the supervisor's, then its children's; [] if it is not ready."""
        process = self.members[number].process
        document = self._node_file(number)
        if process is None or document is None:
            return []
        return [process.pid, *(int(pid) for pid in document["pids"].values())]

    # -- readiness -----------------------------------------------------------------------------

    def wait_ready(self, numbers: Iterable[int] | None = None, *, timeout: float = START_TIMEOUT_S) -> None:
        """Wait until these nodes (None: all) serve and see every running node alive.

        Raises:
            ServerFailed: a process ended, or `timeout` has passed; the message has the end of the node's log.
        """
        missing = list(range(self.nodes) if numbers is None else numbers)
        began = time.monotonic()
        while missing:
            # One at a time: all are to be ready, and asking takes the CPUs from those that start.
            if self._is_ready(missing[0]):
                del missing[0]
                continue
            for number in missing:
                node = self.members[number]
                if not node.running:
                    code = node.process.returncode if node.process is not None else None
                    raise ServerFailed(f"{node.name} ended with {code}:\n{node.log_tail()}")
            waited = time.monotonic() - began
            if waited >= timeout:
                missing = [number for number in missing if not self._is_ready(number)]
                if not missing:
                    return
                names = ", ".join(self.members[number].name for number in missing)
                tail = self.members[missing[0]].log_tail()
                raise ServerFailed(f"{names} not ready within {timeout:g} s:\n{tail}")
            time.sleep(min(max(_PAUSE_S, waited * _PAUSE_SHARE), _LONGEST_PAUSE_S))

    def _is_ready(self, number: int) -> bool:
        node = self.members[number]
        if not node.running or self._node_file(number) is None:
            return False
        if get_json(f"{node.url}/readyz") is None:
            return False
        token = self.admin_token
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        cluster = get_json(f"{node.url}/v1/cluster", headers=headers) or {}
        seen = {each["node"] for each in cluster.get("nodes", ()) if each.get("alive", True)}
        return {member.name for member in self.members if member.running} <= seen

    def _node_file(self, number: int) -> dict[str, Any] | None:
        node = self.members[number]
        try:
            document = json.loads((node.data / "node.json").read_bytes())
        except FileNotFoundError:
            return None
        assert isinstance(document, dict), f"node.json holds {document!r}"
        # A killed node's file remains in its data folder; the file of its next process has another pid.
        return document if node.process is not None and document["pid"] == node.process.pid else None


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to the whole group that a process leads; return when none of it is left."""
    # Not killpg: it also counts dead processes that their new parent has not reaped yet, so it would not show
    # when the group is gone.
    while members := processes_of_group(process.pid):
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(_PAUSE_S / 10)
    process.wait()


def get_json(url: str, *, headers: Mapping[str, str] | None = None, timeout: float = 10.0) -> Any:
    """Send one GET request; return the decoded JSON of the answer, None unless its status is 200."""
    # Imported here: pytest loads this package in every session where Laminar is installed.
    import http.client
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=dict(headers or {})), timeout=timeout
        ) as answer:
            return json.loads(answer.read())
    except (urllib.error.URLError, OSError, ValueError, http.client.HTTPException):
        return None  # HTTPException: the node was killed while it answered


def _living() -> Iterator[tuple[Path, list[str]]]:
    """Yield each living process: its folder in /proc, and its `stat` after the name (state, parent, ...).

    A process that has ended and was not reaped by its parent (state Z) does not count as living.
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
    """Return the pids of the other living processes that were started with `mark`, a ``NAME=value``."""
    found = []
    for entry, _ in _living():
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # gone meanwhile, or another user's
        if mark.encode() in environment and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return sorted(found)
