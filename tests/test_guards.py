"""The guards of `tests/conftest.py` bite: each is shown a small run with one fault, and a run without any."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import guards
from tests.nets import claim_net

ROOT = Path(__file__).parents[1]


def run_pytest(folder: Path, source: str, *options: str, name: str = "test_it.py") -> tuple[int, str]:
    """(exit status, output) of a run, under our conftest, of one test file."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(source)
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"), "-q"]
        + ["--rootdir", str(folder), "--basetemp", str(folder / "tmp"), "-p", "no:cacheprovider"]
        + [*options, str(folder / name)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        | {"LAMINAR_TEST_GRACE_S": "1"},
    )
    return answer.returncode, answer.stdout + answer.stderr


def lives(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


TIDY = """
import asyncio, subprocess
from tests.conftest import cluster_net, real_disk

async def test_a_task_and_a_process_that_end(tmp_path):
    await asyncio.create_task(asyncio.sleep(0))
    process = await asyncio.create_subprocess_exec("true")
    assert 0 == await process.wait()
    (tmp_path / "x").write_text("x")
"""

LEAVES_A_GRANDCHILD = """
import subprocess

def test_starts_what_it_does_not_end():
    subprocess.run(["sh", "-c", "setsid sleep 4321 & "], check=True)
"""

LEAVES_A_TASK = """
import asyncio

async def forgotten():
    await asyncio.Event().wait()

async def test_forgets_a_task():
    test_forgets_a_task.kept = asyncio.create_task(forgotten())
    await asyncio.sleep(0)
"""

LEAVES_A_FILE = """
kept = []

def test_forgets_a_file(tmp_path):
    kept.append(open(tmp_path / "data", "wb"))
"""

LEAVES_GARBAGE = """
import socket

class Holder:
    pass

def test_forgets_a_socket():
    holder = Holder()
    holder.itself, holder.socket = holder, socket.socket()
"""

WAITS_FOR_EVER = """
import asyncio, pytest

# Not of the setup, too, as it is meant to end in the loop.
@pytest.mark.timeout(2, func_only=True)
async def test_waits_for_what_never_comes():
    await asyncio.Event().wait()

async def test_comes_after_it():
    await asyncio.sleep(0)
"""

KEEPS_DATA = """
import pytest

@pytest.fixture
def breaks_before(tmp_path):
    (tmp_path / "x").write_text("x")
    raise OSError

@pytest.fixture
def breaks_behind(tmp_path):
    yield
    raise OSError

def test_passes(tmp_path):
    (tmp_path / "x").write_text("x")

def test_fails(tmp_path):
    (tmp_path / "x").write_text("x")
    assert False

def test_is_not_set_up(breaks_before):
    pass

def test_is_not_torn_down(breaks_behind, tmp_path):
    (tmp_path / "x").write_text("x")
"""

OPENS_A_SOCKET = """
import socket

def test_opens_a_socket():
    socket.socket().close()
"""


def test_a_tidy_run_passes(tmp_path: Path) -> None:
    """The guards let an ordinary test be."""
    status, output = run_pytest(tmp_path, TIDY)

    assert 0 == status, output
    assert "1 passed" in output


@pytest.mark.parametrize("options", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_a_process_left_over_is_named_ended_and_fails_the_run(tmp_path: Path, options: list[str]) -> None:
    """A grandchild in a session of its own is found by its environment."""
    status, output = run_pytest(tmp_path, LEAVES_A_GRANDCHILD, *options)

    assert status != 0, output
    assert "sleep 4321" in output
    pid = int(output.split("left over after the last test:")[1].split("process ")[1].split()[0])
    assert not lives(pid)


@pytest.mark.parametrize(
    ("source", "name", "said"),
    [
        (LEAVES_A_TASK, "test_it.py", "tasks left pending"),
        (LEAVES_A_FILE, "test_it.py", "open file"),
        (OPENS_A_SOCKET, "batch/test_it.py", "is a pure test, and may not open a socket"),
    ],
    ids=["task", "file", "socket"],
)
def test_other_faults_fail_the_run_and_are_named(tmp_path: Path, source: str, name: str, said: str) -> None:
    """A pending task, an open file below the run's data, a socket in a test of a pure module."""
    status, output = run_pytest(tmp_path, source, name=name)

    assert status != 0, output
    assert said in output


def test_garbage_that_warns_fails_the_module_that_left_it(tmp_path: Path) -> None:
    """And not a test that runs when the collector comes."""
    earlier = tmp_path / "test_earlier.py"
    earlier.write_text(LEAVES_GARBAGE)

    status, output = run_pytest(tmp_path, "def test_later():\n    pass\n", str(earlier), name="test_later.py")

    assert 1 == status, output
    (error,) = [line for line in output.splitlines() if line.startswith("ERROR")]
    assert "test_earlier.py::test_forgets_a_socket" in error
    assert "2 passed, 1 error" in output


def test_only_a_test_that_did_not_pass_keeps_its_data(tmp_path: Path) -> None:
    """Also one of which only a fixture failed, before it or behind it."""
    status, output = run_pytest(tmp_path, KEEPS_DATA)

    assert 1 == status, output
    assert "1 failed, 2 passed, 2 errors" in output
    kept = {path.parent.name for path in (tmp_path / "tmp").glob("*0/x")}
    assert {"test_fails0", "test_is_not_set_up0", "test_is_not_torn_down0"} == kept


def test_a_time_limit_ends_a_test_that_waits_in_the_loop(tmp_path: Path) -> None:
    """The limit is named, and where the test waited; the next test runs."""
    status, output = run_pytest(tmp_path, WAITS_FOR_EVER)

    assert 1 == status, output
    assert "Timeout (>2.0s)" in output
    assert "test_it.py:7" in output
    assert "1 failed, 1 passed" in output


def test_a_run_without_tests_is_not_a_pass(tmp_path: Path) -> None:
    """pytest's own status for it, 5, reaches whoever called."""
    status, _ = run_pytest(tmp_path, "")

    assert 5 == status


def test_examples_are_the_same_whatever_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a test with drawn examples passes or fails by what its worker has imported before."""

    def drawn() -> list[list[int]]:
        found = []

        @given(st.lists(st.integers()))
        def draw(numbers: list[int]) -> None:
            found.append(numbers)

        draw()
        return found

    (tmp_path / "constants.py").write_text("\n".join(f"A{each} = {each}" for each in range(70_000, 71_000)))
    before = drawn()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("constants")

    assert before == drawn()
    assert not any(70_000 <= number < 71_000 for numbers in before for number in numbers)


def test_two_clusters_never_share_a_net() -> None:
    """A net is held until it is closed, and each address in it is its own."""
    first, second = claim_net(), claim_net()

    assert first.number != second.number
    assert first.hosts(3) == [f"127.77.{first.number}.{host}" for host in (1, 2, 3)]
    first.close()
    second.close()


def test_tmpfs_is_told_from_a_disk() -> None:
    """The mount that a path lies on is the longest one above it, the latest of equals."""
    table = (
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        "2 1 0:5 / /mnt rw shared:1 - tmpfs tmpfs rw\n"
        "3 1 0:6 / /mnt/data rw - xfs /dev/sdb rw\n"
        "4 1 0:7 / /mnt/data rw - btrfs /dev/sdc rw\n"
    )

    assert "tmpfs" == guards.filesystem_of(Path("/mnt"), mounts=lambda: table)
    assert "btrfs" == guards.filesystem_of(Path("/mnt/data/x"), mounts=lambda: table)
    assert "tmpfs" == guards.filesystem_of(Path("/mnt/database"), mounts=lambda: table)
    assert "ext4" == guards.filesystem_of(Path("/var"), mounts=lambda: table)
