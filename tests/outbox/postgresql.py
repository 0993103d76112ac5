"""A PostgreSQL server for tests: of its own, in a temporary folder, on a Unix socket.

It refuses to run as root, so there it runs as the user `postgres`, whom Debian's package makes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

WANTED = "PostgreSQL is not installed (Debian: apt-get install postgresql, or make postgresql)"
START_S = 60.0


def programs() -> Path | None:
    """The folder of the newest server's programs; Debian keeps them off the path."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3].split(".")[0])
    )
    if found:
        return found[-1].parent
    initdb = shutil.which("initdb")
    return None if initdb is None else Path(initdb).resolve().parent


def as_server(command: list[str]) -> list[str]:
    """The command, not as root, and killed when the test's process is gone."""
    user = ["--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.getuid() == 0 else []
    return ["setpriv", *user, "--pdeathsig=KILL", *command]


@contextmanager
def server() -> Iterator[Path]:
    """Run a server; yield the path of its socket. Skips the test where there is none, or by REQUIRE fails."""
    folder = programs()
    if folder is None:
        if "postgresql" in os.environ.get("REQUIRE", "").split(","):
            pytest.fail(WANTED, pytrace=False)
        pytest.skip(WANTED)
    with tempfile.TemporaryDirectory(prefix="laminar-pg-") as base:
        if os.getuid() == 0:
            shutil.chown(base, "postgres")
        data = Path(base) / "data"
        options = ["-A", "trust", "-U", "laminar", "-E", "UTF8", "--locale=C", "--no-sync"]
        subprocess.run(
            as_server([str(folder / "initdb"), "-D", str(data), *options]),
            check=True,
            capture_output=True,
            cwd=base,
        )
        # What these tests break is the relay, not the disk.
        settings = ["-c", "listen_addresses=", "-c", "fsync=off", "-c", f"unix_socket_directories={base}"]
        with open(Path(base) / "log", "wb") as log:
            running = subprocess.Popen(
                as_server([str(folder / "postgres"), "-D", str(data), *settings]),
                cwd=base,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            try:
                _wait_until_ready(running, data)
                yield Path(base) / ".s.PGSQL.5432"
            finally:
                running.send_signal(signal.SIGINT)  # ends sessions, too
                running.wait(120)


def _wait_until_ready(running: subprocess.Popen[bytes], data: Path) -> None:
    """The last line of this file is the server's status."""
    file = data / "postmaster.pid"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert running.poll() is None, f"it ended with {running.returncode}"
        if file.exists() and file.read_text().rstrip().endswith("ready"):
            return
        time.sleep(0.02)
    raise AssertionError(f"it was not ready within {START_S:g} s")
