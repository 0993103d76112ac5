"""The command as a function: run with arguments and input, on a node that all of these tests share."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from laminar.cli import run
from laminar.testing import nodes


@dataclass(frozen=True)
class Ran:
    """How a command ended, and what it wrote."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()


Command = Callable[..., Ran]


@contextmanager
def started(command: Sequence[str], *, stderr: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a process of its own, with its output to read; it does not outlive the block."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def _no_word_of_a_slow_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command says that no node answers shortly before it gives up, and not after 2 s of a busy machine."""
    monkeypatch.setattr("laminar.cli.options.PATIENCE_S", 9.5)


@pytest.fixture(autouse=True)
def _no_settings_of_the_person(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither variables nor contexts of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith("LAMINAR_") and not name.startswith("LAMINAR_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("LAMINAR_CONFIG", str(tmp_path / "contexts.toml"))
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def any_disk_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor does not mind how long syncs, names and answers take where the tests run."""
    for name, limit in (("SLOW_SYNC_MS", 1e9), ("LONGEST_SYNC_MS", 1e9), ("ASK_TIMEOUT_S", 60.0)):
        monkeypatch.setattr(f"laminar.cli.commands.admin.doctor.{name}", limit)
    for name in ("SLOW_SYNC_S", "SLOW_NAME_S"):
        monkeypatch.setattr(f"laminar.cli.commands.doctor.machine.{name}", 1e6)


@pytest.fixture
def laminar(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Command:
    """``laminar("topic", "list", stdin=b"...")``, in this process."""

    def command(*arguments: str, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capfdbinary.readouterr()
        code = run(arguments)
        sys.stdout.flush()
        written = capfdbinary.readouterr()
        return Ran(code, written.out, written.err.decode())

    return command


@pytest.fixture(scope="module")
def node_url() -> Iterator[str]:
    """A node of two shards, for a module's tests."""
    with nodes.serve(shards=2) as url:
        yield url


@pytest.fixture
def on_node(node_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The node is where commands lead."""
    monkeypatch.setenv("LAMINAR_URL", node_url)
    return node_url
