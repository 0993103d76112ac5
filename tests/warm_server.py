"""A process that has imported a node's modules, and forks a node for each request.

``warm_server.py FD MODULE``: `tests/warm_start.py` starts it and says why. MODULE is imported before any
fork, and what else a program is, after its own. FD is a socket of message boundaries. A request is a
`Request` with two or three descriptors: the node's channel, its log, and its lifeline if it has one. The
answer comes by the channel: the node's pid, and at its end its status. An ended node is reaped once its
starter has said so by the channel or closed it, so its pid is its own until then, as with a child of the
tests' process. The server ends with its starter, and its nodes with it. It has one thread and no event
loop, as it forks.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from laminar.node.host.fork import die_with_parent, threads
from laminar.testing import parent_death

MAX_REQUEST_BYTES = 60_000
# What a node's command line and environment may take: the server's own are at least as long.
ROOM_BYTES = 16_000
REAP = b"r"
_CLONE_NEWNET = 0x40000000  # linux/sched.h
# "p" and a pid, or "e" and how it ended, as a `Popen.returncode`.
MESSAGE = struct.Struct("=ci")


class Request(msgspec.Struct, frozen=True):
    """What `exec` would be given."""

    command: list[str]
    program: str
    """A module's name, as after `-m`."""
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    files: tuple[int, int]
    """The limits of open files, soft and hard."""
    network: str = ""
    """The name of a network namespace, if it is not that of the server."""


def main() -> None:
    """Fork nodes until the starter has closed the socket."""
    _, fd, module = sys.argv[:3]
    control = socket.socket(fileno=int(fd))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is meant for the tests, and for nodes
    loaded = importlib.import_module(module)
    getattr(loaded, "load_before_fork", _load_what_a_node_loads)()
    gc.collect()
    gc.freeze()
    Server(control).serve()


def _load_what_a_node_loads() -> None:
    """Load what the supervisor loads before its first fork."""
    from laminar.node.entry_points import default_entry_points
    from laminar.node.host.settings import Settings
    from laminar.node.runtime.environment import Environment

    default_entry_points(Settings(), Environment())


class Server:
    """The nodes that run, and those that have ended and are not reaped."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._poll = select.poll()  # which has no descriptor that a child would have to close
        self._poll.register(control, select.POLLIN)
        self._running: dict[int, tuple[int, int]] = {}  # by pidfd: pid, channel
        self._ended: dict[int, int] = {}  # by channel: pid

    def serve(self) -> None:
        """Answer requests until there is nobody who could send any."""
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._running:
                    self._tell_end(fd)
                elif fd in self._ended:
                    self._reap(fd)
                elif not self._take_request():
                    os._exit(0)  # its nodes die with it

    def _tell_end(self, pidfd: int) -> None:
        pid, channel = self._running.pop(pidfd)
        told = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        assert told is not None
        code = told.si_status if told.si_code == os.CLD_EXITED else -told.si_status
        with contextlib.suppress(BrokenPipeError):
            os.write(channel, MESSAGE.pack(b"e", code))
        self._poll.unregister(pidfd)
        os.close(pidfd)
        self._ended[channel] = pid
        self._poll.register(channel, select.POLLIN)

    def _reap(self, channel: int) -> None:
        os.read(channel, len(REAP))
        os.waitpid(self._ended.pop(channel), 0)
        self._poll.unregister(channel)
        os.close(channel)

    def _take_request(self) -> bool:
        message, fds, _, _ = socket.recv_fds(self._control, MAX_REQUEST_BYTES, 3)
        if not message:
            return False
        channel, log, *lifeline = fds
        request = msgspec.msgpack.decode(message, type=Request)
        assert threads() == 1, f"{threads()} threads before a fork"
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._control.detach()
            _run_and_end(lambda: _become(request, server, channel, log, *lifeline), end=False)
            _run_and_end(lambda: _run(request))
        for fd in (log, *lifeline):
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        self._running[pidfd] = pid, channel
        self._poll.register(pidfd, select.POLLIN)
        return True


def _run(request: Request) -> int | None:
    """Run the program; a package's is its `__main__`."""
    program = importlib.import_module(request.program)
    if hasattr(program, "__path__"):
        program = importlib.import_module(f"{request.program}.__main__")
    code: int | None = program.main(request.arguments)
    return code


def _become(request: Request, server: int, channel: int, log: int, lifeline: int | None = None) -> None:
    """Make this forked process what a newly executed one would be, and say that it is."""
    die_with_parent(server)
    if request.network:
        _enter_network(request.network)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, wanted in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(fd, wanted)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in (channel, lifeline):
            with contextlib.suppress(OSError):  # that of the listing
                os.close(fd)
    os.chdir(request.folder)
    resource.setrlimit(resource.RLIMIT_NOFILE, request.files)
    own, first = _first_of_path(os.environ), _first_of_path(request.environment)
    if own != first:
        sys.path[:] = [*first, *(each for each in sys.path if each not in (*own, *first))]
    os.environ.clear()
    _show(request.command, request.environment)
    os.environ.update(request.environment)
    sys.argv[:] = [request.command[0], *request.arguments]
    if lifeline is not None:
        os.setpgid(0, 0)
        os.set_inheritable(lifeline, True)
        parent_death.tie(lifeline)
    os.write(channel, MESSAGE.pack(b"p", os.getpid()))
    os.close(channel)


def _enter_network(name: str) -> None:
    """Do as `ip netns exec`, but for the mounts, which a node does not look at."""
    fd = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}", name)
    os.close(fd)


def _first_of_path(environment: Mapping[str, str]) -> list[str]:
    """Return the folders that come before all others on the path of an interpreter, which has each once."""
    return [os.path.abspath(each) for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]


def _show(command: list[str], environment: dict[str, str]) -> None:
    """Put command line and environment where /proc shows them: over the server's, of which no one has a copy.

    Tests find processes by both.
    """
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ends = [
        int(field) for field in stat[45:49]
    ]  # of `man proc_pid_stat`: arg_start, arg_end, env_start, env_end
    texts = (command, [f"{name}={value}" for name, value in environment.items()])
    for start, end, text in zip(ends[::2], ends[1::2], texts, strict=True):
        shown = b"".join(os.fsencode(each) + b"\0" for each in text)
        assert len(shown) <= end - start, f"{len(shown)} bytes for {end - start}"
        ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def _run_and_end(run: Callable[[], int | None], *, end: bool = True) -> None:
    """Run a function and end as an interpreter does; after a return without `end`, go on."""
    code: int | None = 1
    try:
        code = run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stdout.flush()
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001  # printed, as the interpreter does
        traceback.print_exc()
    else:
        if not end:
            return
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    main()
