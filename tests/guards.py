"""What a test run may not leave behind, and what a pure test may not do.

Every child of a run carries LAMINAR_TEST_RUN=<run> in its environment, handed on to its own children, so
that what outlives the run is found by looking, however it was started. Knows Linux's /proc, not pytest.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

RUN_VARIABLE = "LAMINAR_TEST_RUN"
PROC = Path("/proc")

# How long processes and tasks that were told to end may take before they count as left over. Only what hangs
# takes so long: a busy machine may run none of them for seconds, and a sync of its disk may take as long.
GRACE_S = float(os.environ.get("LAMINAR_TEST_GRACE_S", 60))
# A killed process ends when the kernel next runs it: on a busy machine that takes a while.
DEATH_S = 60

# The standard library's own helper, and that of warm starts, which end when their parent does.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "tests/warm_server.py")


@dataclass(frozen=True)
class Leftover:
    """A process that outlived its run."""

    pid: int
    command: str
    state: str
    stack: str

    def __str__(self) -> str:
        stack = f"\n    {self.stack}" if self.stack else ""
        return f"process {self.pid} ({self.state}): {self.command}{stack}"


def processes_of(run: str) -> list[Leftover]:
    """The live processes, this one aside, that carry `run` in their environment or are our own children."""
    mark = f"{RUN_VARIABLE}={run}".encode()
    found = []
    for entry in PROC.iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # gone meanwhile, or another user's
        ours = mark in environment or int(parent) == os.getpid()
        if ours and state not in "ZX" and not any(helper in command for helper in _HELPERS):
            found.append(Leftover(int(entry.name), command[:400], state, _stack(entry)))
    return found


def _stack(entry: Path) -> str:
    """Where the kernel says the process is: its call and, where we may read it, its kernel stack."""
    lines = []
    for name in ("wchan", "syscall", "stack"):
        try:
            text = (entry / name).read_text().strip()
        except OSError:
            continue
        if text and text != "0":
            lines.append(f"{name}: " + " < ".join(line.split("]")[-1].strip() for line in text.splitlines()))
    return "\n    ".join(lines)


def end(leftovers: list[Leftover]) -> None:
    """Kill exactly these, and return when they are dead."""
    for leftover in leftovers:
        try:
            process = os.pidfd_open(leftover.pid)
        except ProcessLookupError:
            continue
        try:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            ended = select.poll()
            ended.register(process, select.POLLIN)
            ended.poll(DEATH_S * 1000)
        except ProcessLookupError:
            continue
        finally:
            os.close(process)


def await_processes_of(run: str, *, grace_s: float = GRACE_S) -> list[Leftover]:
    """What still lives when `grace_s` is over; returns soon when there is nothing."""
    deadline = time.monotonic() + grace_s
    found = processes_of(run)
    looks = 0
    while looks < 2 and time.monotonic() < deadline:
        found = processes_of(run)
        # One that is just about to become another program shows no environment: so nothing is seen twice.
        looks = 0 if found else looks + 1
        time.sleep(0.25 if found else 0.02)
    return found


def own_open_things(data: Path | None) -> list[str]:
    """This process's open files below `data`, and its abstract sockets that are named laminar's."""
    names = _abstract_sockets()
    found = []
    for entry in (PROC / "self" / "fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue  # the descriptor of this very listing
        if target.startswith("socket:["):
            name = names.get(target[len("socket:[") : -1], "")
            if "laminar" in name:
                found.append(f"abstract socket {name}")
        elif data is not None and target.startswith(f"{data}/"):
            found.append(f"open file {target}")
    return sorted(found)


def _abstract_sockets() -> dict[str, str]:
    """Inode to name of every abstract Unix socket of this network namespace."""
    rows = (line.split() for line in (PROC / "net" / "unix").read_text().splitlines()[1:])
    return {row[6]: row[7] for row in rows if len(row) > 7 and row[7].startswith("@")}


def stop_spark() -> None:
    """End the JVM that a Spark session leaves behind: it waits for its parent's end, too late for us."""
    if "pyspark.core.context" not in sys.modules:
        return
    context = sys.modules["pyspark.core.context"].SparkContext
    if (gateway := context._gateway) is None:
        return
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=120)
    context._gateway = context._jvm = None


# An audit hook cannot be taken away again, so there is one, installed at first use, and this switch.
_refusing: list[str] = []
_hooked = False

_REFUSED = {
    "socket.__new__": "a socket",
    "socket.bind": "a socket",
    "subprocess.Popen": "a process",
    "os.fork": "a process",
    "os.forkpty": "a process",
    "os.posix_spawn": "a process",
    "os.system": "a process",
    "os.exec": "a process",
}


class Impure(AssertionError):
    """A test in a pure folder opened a socket or a process."""


def _audit(event: str, _arguments: tuple[object, ...]) -> None:
    if _refusing and event in _REFUSED:
        raise Impure(f"{_refusing[-1]} is a pure test, and may not open {_REFUSED[event]} ({event})")


@contextmanager
def refuse_sockets_and_processes(test: str) -> Iterator[None]:
    """While this lasts, opening a socket or a process raises `Impure`."""
    global _hooked
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked = True
    _refusing.append(test)
    try:
        yield
    finally:
        _refusing.pop()


def filesystem_of(path: Path, *, mounts: Callable[[], str] | None = None) -> str:
    """The type of the file system `path` lies on ("ext4", "tmpfs", "overlay")."""
    text = mounts() if mounts else (PROC / "self" / "mountinfo").read_text()
    best, kind = "", "unknown"
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4].replace("\\040", " ")
        below = str(path.resolve()) + "/"
        if below.startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind
