"""A real server for a test: its own process, data folder and loopback address.

The server is started by its command line, so nothing of it is imported here. It is ended with the block, also
if the block or the start fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from laminar.testing import parent_death

if TYPE_CHECKING:
    from laminar.client import client as aio_client
    from laminar.client.sync import client as sync

# A node, with this interpreter, whether or not `laminar` is on the path.
SERVER = (sys.executable, "-m", "laminar.node")
START_TIMEOUT_S = 60.0
# Longer than a node takes until it kills its own processes: the default of `drain_ms`, and a grace. Those of
# a node that is killed end a little later than it, and might still write into the folder that is removed.
STOP_TIMEOUT_S = 30.0


class ServerFailed(Exception):
    """The server did not start, or ended by itself; the message has the end of its log."""


def free_host() -> str:
    """Return a random loopback address (127.77.x.y), on which most likely no other program uses a port."""
    return f"127.77.{secrets.randbelow(250) + 1}.{secrets.randbelow(250) + 1}"


@contextlib.contextmanager
def serve(
    *, shards: int = 1, settings: Mapping[str, str | int] | None = None, timeout: float = START_TIMEOUT_S
) -> Iterator[str]:
    """Run a node in a process of its own; yield its URL once it is ready to serve.

    `settings` are further settings of the node by their names. The node requires no token unless they say so.

    Raises:
        ServerFailed: the node did not start.
    """
    with tempfile.TemporaryDirectory(prefix="laminar-node-") as folder:
        data = Path(folder) / "data"
        environment = dict(os.environ)
        for name in ("LAMINAR_URL", "LAMINAR_TOKEN", "LAMINAR_TOKEN_FILE", "LAMINAR_CA"):
            environment.pop(name, None)
        given: dict[str, str | int] = {"host": free_host(), "port": 0, "shards": shards, "access": "open"}
        given |= {"default_replicas": 1, **(settings or {})}
        environment |= {f"LAMINAR_{name.upper()}": str(value) for name, value in given.items()}
        command = [*SERVER, "--data", str(data)]
        with open(Path(folder) / "log", "w+b") as log:
            process = start_process(command, env=environment, log=log)
            try:
                yield _wait_until_ready(process, data / "node.json", log, timeout)
            finally:
                _stop(process)


def start_process(
    command: Sequence[str], *, env: Mapping[str, str], log: IO[bytes], lifeline: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a process without input that writes to `log`.

    With `lifeline`, the read end of a pipe, it leads a group of its own, which is killed when the pipe has no
    writer any more (`parent_death`).
    """
    if lifeline is None:
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    # Without site packages, which `parent_death` does not need, it starts in a fifth of the time.
    tied = [sys.executable, "-I", "-S", parent_death.__file__, str(lifeline)]
    return subprocess.Popen(
        [*tied, *command],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[lifeline],
        process_group=0,
    )


def _wait_until_ready(
    process: subprocess.Popen[bytes], node_file: Path, log: IO[bytes], timeout: float
) -> str:
    deadline = time.monotonic() + timeout
    url: str | None = None
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerFailed(f"the server ended with {process.returncode}:\n{_tail(log)}")
        if url is None:
            url = _url_of(node_file)
        if url is not None and _is_ready(url):
            return url
        time.sleep(0.01)
    raise ServerFailed(f"the server was not ready within {timeout:g} s:\n{_tail(log)}")


def _url_of(node_file: Path) -> str | None:
    try:
        return str(json.loads(node_file.read_bytes())["url"])
    except FileNotFoundError:
        return None


def _is_ready(url: str) -> bool:
    # Imported here: pytest loads this module in every session where Laminar is installed.
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=1.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read()[-4_000:].decode("utf-8", "replace")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its children: by SIGTERM, after `STOP_TIMEOUT_S` by SIGKILL."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with contextlib.ExitStack() as opened:
            children: list[int] = []
            try:
                children = _open_children(process.pid)
                for child in children:
                    opened.callback(os.close, child)
            finally:
                process.kill()
                process.wait()
            # They end a moment later, and write to the folder until then.
            for child in children:
                ended = select.poll()
                ended.register(child, select.POLLIN)
                ended.poll(STOP_TIMEOUT_S * 1000)


def _open_children(pid: int) -> list[int]:
    """Return descriptors (pidfd) of the children of a process, which it started in its main thread."""
    found = []
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []  # it has ended, or the kernel does not tell
    for child in children:
        with contextlib.suppress(OSError):  # it has ended, or may not be looked at
            found.append(os.pidfd_open(int(child)))
    return found


@contextlib.contextmanager
def node(
    *, shards: int = 1, settings: Mapping[str, str | int] | None = None, timeout: float = START_TIMEOUT_S
) -> Iterator[sync.Client]:
    """Run a server and yield a client of it: ``with laminar.testing.node() as client``."""
    from laminar.client.sync.client import connect

    with serve(shards=shards, settings=settings, timeout=timeout) as url, connect(url) as client:
        yield client


@contextlib.asynccontextmanager
async def aio_node(
    *, shards: int = 1, settings: Mapping[str, str | int] | None = None, timeout: float = START_TIMEOUT_S
) -> AsyncIterator[aio_client.Client]:
    """Run a server and yield a client of it, for a program with an event loop.

    Starting and stopping run in a thread.
    """
    import asyncio

    from laminar.client.client import connect

    stack = contextlib.ExitStack()
    server = serve(shards=shards, settings=settings, timeout=timeout)
    url = await asyncio.to_thread(stack.enter_context, server)
    try:
        async with connect(url) as client:
            yield client
    finally:
        await asyncio.to_thread(stack.close)
