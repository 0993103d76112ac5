"""The cluster that the documentation tells its reader to start, on the ports it names."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block

DEV = "laminar dev"
PORTS = (7070, 7270, 7470)
# It ends what hangs, and judges nothing.
RUN_LIMIT_S = 180

Run = Callable[[Block], str]


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a reader's terminal: `laminar` and `python` are found, nothing is configured."""
    home = tmp_path_factory.mktemp("reader")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("LAMINAR_") or name.startswith("LAMINAR_TEST_")
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return kept | {"PATH": path, "HOME": str(home), "XDG_CONFIG_HOME": str(home / "config")}


def _taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def dev(terminal: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`laminar dev` as README says it, until Ctrl-C, which must end it with 0 and no complaint."""
    taken = [port for port in PORTS if _taken(port)]
    if taken:
        why = f"the documentation's ports are taken: {taken}"
        pytest.fail(why, pytrace=False) if os.environ.get("REQUIRE") else pytest.skip(why)
    complaints = tmp_path_factory.mktemp("dev") / "stderr"
    with (
        open(complaints, "wb") as stderr,
        subprocess.Popen(
            DEV.split(), env=terminal, stdout=subprocess.PIPE, stderr=stderr, process_group=0
        ) as running,
    ):
        assert running.stdout is not None
        told = []
        for line in running.stdout:
            told.append(line)
            if b"Ctrl-C" in line:
                break
        assert running.poll() is None, b"".join(told).decode() + complaints.read_text()
        yield
        running.send_signal(signal.SIGINT)
        assert 0 == running.wait(120)
    assert "" == complaints.read_text()


def first_line(command: list[str], block: Block, *, env: dict[str, str], cwd: Path) -> str:
    """What a block that goes on until Ctrl-C prints first; that is its end, not a failure."""
    with subprocess.Popen(
        command, env=env, cwd=cwd, stdout=subprocess.PIPE, text=True, process_group=0
    ) as running:
        late = threading.Timer(RUN_LIMIT_S, os.killpg, (running.pid, signal.SIGKILL))
        late.start()
        try:
            assert running.stdout is not None
            line = running.stdout.readline()
            os.killpg(running.pid, signal.SIGINT)
            assert 0 == running.wait(), f"{block} ended with {running.returncode}"
        finally:
            late.cancel()
    return line


@pytest.fixture
def run(dev: None, terminal: dict[str, str], tmp_path: Path) -> Run:
    """Runs a block word for word in a fresh process, in a folder that has the checkout's examples; what it
    printed. Fails if it fails, or complains.
    """
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    def run_block(block: Block) -> str:
        if block.language == "python" and "\ndef test_" in "\n" + block.text:
            file = tmp_path / "test_block.py"
            file.write_text(block.text)
            command = [sys.executable, "-m", "pytest", "-q", str(file)]
        elif block.language == "python":
            command = [sys.executable, "-c", block.text]
        else:
            command = ["bash", "-eu", "-o", "pipefail", "-c", block.text]
        if block.text.endswith(" -f\n"):
            return first_line(command, block, env=terminal, cwd=tmp_path)
        ended = subprocess.run(
            command, env=terminal, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_LIMIT_S
        )
        assert 0 == ended.returncode, f"{block} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}"
        return ended.stdout

    return run_block
