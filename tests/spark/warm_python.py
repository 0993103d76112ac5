"""A Python for Spark's processes that is forked from one that has imported what they import.

Spark starts a Python for each streaming query, and each worker of its daemons imports PySpark, PyArrow and
the source again after its fork: half a second of CPU each, and a third of all that Spark's tests took. So
`warm_python` gives Spark a small program, which asks a server (`serve`) for a process with its arguments,
environment, folder and standard streams. What such a process does after its imports is the same. The program
waits for its end and ends alike; when the program is killed, so is the process with its group.

Another module than PySpark's, or another hash seed than Spark's, is executed. So are the processes of tests
that start a Spark of their own: commands, drivers that are killed, executors.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from laminar.node.host.fork import threads
from laminar.testing.parent_death import tie

# What the processes import sooner or later, PySpark's and ours.
LOADED = (
    "pyspark.daemon",
    "pyspark.worker",
    "pyspark.sql.worker.commit_data_source_write",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.data_source_pushdown_filters",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.python_streaming_sink_runner",
    "pyspark.sql.worker.write_into_data_source",
    "pyspark.sql.streaming.python_streaming_source_runner",
    "laminar.spark.read.batch_reader",
    "laminar.spark.read.stream_reader",
    "laminar.spark.write.writers",
    "laminar.client.sync.client",
)
# PyArrow's allocator would start a thread, which no fork would have.
HASH_SEED = "0"  # Spark's
SINGLE_THREADED = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OPENBLAS_NUM_THREADS": "1"}
MAX_REQUEST_BYTES = 200_000
ROOT = Path(__file__).parents[2]

PROGRAM = """#!/bin/sh
export PYTHONPATH="${{PYTHONPATH##*/pyspark.zip:}}"
case "$PYTHONHASHSEED $1 $2" in
  "{seed} -m pyspark."*) exec {python} -I -S {launcher} {socket} "$@" ;;
esac
exec {python} "$@"
"""


@contextlib.contextmanager
def warm_python(folder: Path) -> Iterator[Path]:
    """Yield the path of the program, as long as its server runs."""
    path = folder / "python"
    address = folder / "python.sock"
    named = {
        "python": sys.executable,
        "launcher": Path(__file__).with_name("warm_launcher.py"),
        "socket": address,
        "seed": HASH_SEED,
    }
    path.write_text(PROGRAM.format(**{name: shlex.quote(str(value)) for name, value in named.items()}))
    path.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(address))
        listener.listen(128)
        server = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", "tests.spark.warm_python", str(listener.fileno())],
            cwd=ROOT,
            env={**os.environ, **SINGLE_THREADED, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": HASH_SEED},
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
    assert server.stdin is not None
    try:
        yield path
    finally:
        server.stdin.close()
        server.wait()


def serve(listener: socket.socket) -> None:
    """Fork a process for each connection, until standard input ends."""
    running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: pid, and who waits for it
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(listener, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == 0:
                return
            if fd == listener.fileno():
                started = fork(listener.accept()[0])
                if started is not None:
                    pidfd = os.pidfd_open(started[0])
                    running[pidfd] = started
                    poll.register(pidfd, select.POLLIN)
                continue
            pid, waiting = running.pop(fd)
            poll.unregister(fd)
            os.close(fd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with waiting, contextlib.suppress(OSError):
                waiting.sendall(str(code).encode())


def fork(waiting: socket.socket) -> tuple[int, socket.socket] | None:
    """Fork what a program asks for; return its pid, and where to tell its end; None if it is gone."""
    message, fds, _, _ = socket.recv_fds(waiting, MAX_REQUEST_BYTES, 4)
    if not message:
        waiting.close()
        return None
    assert threads() == 1, f"{threads()} threads before a fork"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            become(json.loads(message), fds)
            code = run(json.loads(message)["arguments"])
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    for fd in fds:
        os.close(fd)
    return pid, waiting


def become(request: dict[str, object], fds: list[int]) -> None:
    """Make this forked process what an executed one would be."""
    *streams, lifeline = fds
    os.setpgid(0, 0)
    for wanted, fd in enumerate(streams):
        os.dup2(fd, wanted)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd != lifeline:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(fd)
    tie(lifeline)
    os.chdir(str(request["folder"]))
    environment = request["environment"]
    assert isinstance(environment, dict)
    os.environ.clear()
    os.environ.update(environment)
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run(arguments: list[str]) -> int:
    """Run ``-m MODULE ARGUMENT...`` and return the exit code."""
    _, module, *rest = arguments
    sys.argv = [module, *rest]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that the module is loaded
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # shown, as the interpreter does
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def main() -> None:
    """Load everything, and serve on the socket whose descriptor is given."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    for module in LOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    serve(listener)


if __name__ == "__main__":
    main()
