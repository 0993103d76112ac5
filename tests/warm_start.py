"""Nodes of tests come from a fork of a process that has imported a node's modules.

Four fifths of a node's start are imports, and a run of all tests starts some 400 nodes. `laminar.testing`
starts its nodes by `nodes.start_process`; a run of pytest puts `Servers.start_process` there. What a node
does after its imports is the same: a process with the command line, environment, descriptors, group and
limits that it was given, and a parent that sees how it ended (`tests/test_warm_start.py` compares both ways).
What is started by `ip netns exec` is forked into that network. What cannot be the same is executed by a new
interpreter: another program, a variable that interpreter or C library read at their start, a process that
has left this one's namespaces or processors. The modules in `EXECUTED` start their nodes in the ordinary way,
so that this is tested, too.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from laminar.testing import nodes
from tests import warm_server

# Tests of the start itself.
EXECUTED = ("cluster/test_local_cluster", "testing/")
# What may be forked: a module's name on the command line, and what its server has loaded; the rest of it is
# imported after the fork, so a node with something of a test needs no server of its own. A server whose
# programs are no nodes has `load_before_fork` in that module.
NODE = "laminar.node.__main__"
PROGRAMS = {
    "laminar.node": NODE,
    "tests.disks.serve": NODE,
    "tests.cluster.faults.launch": NODE,
    "tests.cluster.held_start": NODE,
    "tests.outbox.relaying": "tests.outbox.relaying",
    # Clients, which have much in common with a node, and too few for a server of their own.
    "tests.client.member_program": NODE,
    "tests.cluster.faults.consumer": NODE,
}
ROOT = Path(__file__).parents[1]

# As it is before a run of pytest puts another in its place.
execute = nodes.start_process
# Read when an interpreter starts, before any code of ours.
READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_")
# Nodes come from servers in turn: the order of a set differs by interpreter, and a cluster may not care.
SERVERS = 2


class ForkedProcess(subprocess.Popen[bytes]):
    """A child of a server that is used as a child of this process: no stream is open to it."""

    def __init__(self, command: Sequence[str], pid: int, channel: int) -> None:
        # Not super's, which would start a process.
        self.args = list(command)
        self.stdin = self.stdout = self.stderr = None
        self.pid = pid
        self.returncode: int | None = None
        self._channel = channel
        self._waiting = threading.Lock()

    def poll(self) -> int | None:
        with self._waiting:
            return self._await_end(0)

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._waiting:
            code = self._await_end(None if deadline is None else max(0, deadline - time.monotonic()))
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def _await_end(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            ended = select.poll()
            ended.register(self._channel, select.POLLIN)
            if ended.poll(None if timeout_s is None else timeout_s * 1000):
                self.returncode = _read(self._channel, b"e")
                os.write(self._channel, warm_server.REAP)
                os.read(self._channel, 1)  # nothing, when it is done
                os.close(self._channel)
        return self.returncode

    def __del__(self, _close=os.close) -> None:  # type: ignore[no-untyped-def]
        if self.returncode is None:
            _close(self._channel)


def _read(channel: int, kind: bytes) -> int:
    told = os.read(channel, warm_server.MESSAGE.size)
    if not told:
        raise ChildProcessError("the server of warm starts has ended; its error is above")
    got, value = warm_server.MESSAGE.unpack(told)
    if got != kind:
        raise ChildProcessError(f"the forked process ended with {value} before its start; its log says why")
    return int(value)


class Server:
    """A process that has loaded one module and forks programs (`warm_server.py`), and ends with this one."""

    def __init__(self, module: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.inherited = inherited()
        with theirs:
            theirs.set_inheritable(True)
            room = "x" * warm_server.ROOM_BYTES
            self._process = subprocess.Popen(
                [sys.executable, "-P", warm_server.__file__, str(theirs.fileno()), module, room],
                env={**os.environ, "ROOM": room},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def fork(
        self,
        command: Sequence[str],
        program: str,
        env: Mapping[str, str],
        log: int,
        lifeline: int | None,
        *,
        network: str = "",
    ) -> ForkedProcess:
        """Start a process of a program, in a network namespace with that name if there is one."""
        ours, theirs = socket.socketpair()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)
        arguments = list(command[command.index(program) + 1 :])
        folder = os.getcwd()
        request = warm_server.Request(list(command), program, arguments, dict(env), folder, files, network)
        with theirs:
            fds = [theirs.fileno(), log, *([] if lifeline is None else [lifeline])]
            socket.send_fds(self._control, [msgspec.msgpack.encode(request)], fds)
        channel = ours.detach()
        try:
            return ForkedProcess(command, _read(channel, b"p"), channel)
        except BaseException:
            os.close(channel)
            raise

    def close(self) -> None:
        """End it. Nodes that still run are killed."""
        self._control.close()
        self._process.wait()


class Servers:
    """Servers of each kind, started when they are first needed."""

    def __init__(self, programs: Mapping[str, str] = PROGRAMS) -> None:
        self._programs = programs
        self._lock = threading.Lock()
        self._servers: dict[str, list[Server]] = {}
        self._turn = 0
        self.executes = False
        """Whether nodes are executed now, and not forked."""

    def start_process(
        self, command: Sequence[str], *, env: Mapping[str, str], log: IO[bytes], lifeline: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Do as `laminar.testing.nodes.start_process`."""
        network, plain = network_of(command)
        program = None if self.executes else program_of(plain, self._programs)
        fits = max(_size(command), _size(env)) <= warm_server.ROOM_BYTES
        if program is None or not fits or not _starts_alike(env):
            return execute(command, env=env, log=log, lifeline=lifeline)
        with self._lock:
            server = self._next(self._programs[program])
            if server.inherited != inherited():
                return execute(command, env=env, log=log, lifeline=lifeline)
            return server.fork(plain, program, env, log.fileno(), lifeline, network=network)

    def _next(self, module: str) -> Server:
        of_kind = self._servers.setdefault(module, [])
        if len(of_kind) < SERVERS:
            of_kind.append(Server(module))
            return of_kind[-1]
        self._turn += 1
        return of_kind[self._turn % SERVERS]

    def close(self) -> None:
        """End all servers."""
        while self._servers:
            for server in self._servers.popitem()[1]:
                server.close()


def network_of(command: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the network that `ip netns exec` enters, and the command line behind it; "" without it."""
    if os.path.basename(command[0]) == "ip" and list(command[1:3]) == ["netns", "exec"]:
        return command[3], command[4:]
    return "", command


def program_of(command: Sequence[str], programs: Mapping[str, str]) -> str | None:
    """Return the program that a command line starts, if it may be forked."""
    rest = list(command[1:])
    if rest[:1] == ["-P"]:
        rest.pop(0)
    if command[0] != sys.executable or rest[:1] != ["-m"] or rest[1] not in programs:
        return None
    return rest[1]


def _starts_alike(env: Mapping[str, str]) -> bool:
    """Whether an interpreter would start as this one, with this folder on the path or without it."""
    wanted, own = (
        {name: value for name, value in each.items() if name.startswith(READ_AT_START)}
        for each in (env, os.environ)
    )
    return wanted in (own, own | {"PYTHONPATH": str(ROOT)})


def inherited() -> object:
    """Return what this process hands on to its children and may have changed since it started a server."""
    own = Path("/proc/thread-self")
    status = (own / "status").read_text().splitlines()
    limits = [
        line for line in (own / "limits").read_text().splitlines() if not line.startswith("Max open files")
    ]
    named = ("Umask", "Uid", "Gid", "Groups", "SigBlk", "CapEff", "Cpus_allowed:", "NoNewPrivs")
    kept = [line for line in status if line.startswith(named)]
    spaces = [os.readlink(own / "ns" / name) for name in ("net", "mnt", "user", "pid", "cgroup")]
    return kept, limits, spaces, os.getpgrp()


def _size(texts: Sequence[str] | Mapping[str, str]) -> int:
    pairs = texts.items() if isinstance(texts, Mapping) else ((text, "") for text in texts)
    return sum(len(os.fsencode(name)) + len(os.fsencode(value)) + 2 for name, value in pairs)
