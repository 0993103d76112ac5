"""A stage of `make test`: what passes only when it runs again fails the stage, unless it is listed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stage import ROOT, UNSTEADY, BadList, listed, run

# Passes from its second run on.
UNSTEADY_TEST = """
from pathlib import Path

def test_steady():
    pass

def test_unsteady():
    seen = Path("seen")
    before = seen.exists()
    seen.touch()
    assert before
"""
NAME = "test_it.py::test_unsteady"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A place for a run of its own, with our settings of pytest and none of our fixtures."""
    (tmp_path / "test_it.py").write_text(UNSTEADY_TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:xdist -p no:asyncio -p no:laminar\n")
    return tmp_path


@pytest.mark.parametrize(
    ("list_", "code"), [("", 1), (f"2026-11-22 {NAME} a clock\n", 0)], ids=["not listed", "listed"]
)
def test_what_passes_only_again_must_be_listed(
    folder: Path, list_: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both runs are shown, the second has only what failed, and the last lines name it."""
    (folder / "unsteady.txt").write_text(list_)

    ended = run(["test_it.py"], root=folder, unsteady=folder / "unsteady.txt")
    said = capfd.readouterr().out

    assert code == ended
    assert ("1 failed, 1 passed" in said, "1 passed, 1 deselected" in said) == (True, True), said
    assert f"failed first and passed alone: 1, of which {code} are not in unsteady.txt" in said
    assert (code == 1) == said.rstrip().endswith(NAME)


def test_what_fails_twice_is_failed_even_if_it_is_listed(folder: Path) -> None:
    """The list excuses a second run that passed, and nothing else."""
    (folder / "test_it.py").write_text(UNSTEADY_TEST.replace("seen.touch()", ""))
    (folder / "unsteady.txt").write_text(f"2026-11-22 {NAME} a clock\n")

    assert 1 == run(["test_it.py"], root=folder, unsteady=folder / "unsteady.txt")


def test_no_test_is_not_a_pass(folder: Path) -> None:
    """pytest's own code for it, 5; nothing runs again, whatever failed here before."""
    (folder / "unsteady.txt").touch()
    run(["test_it.py"], root=folder, unsteady=folder / "unsteady.txt")

    assert 5 == run(["test_it.py", "-k", "nothing"], root=folder, unsteady=folder / "unsteady.txt")


@pytest.mark.parametrize("line", ["yesterday a::b why", "2026-11-22 a::b", "2026-11-22"])
def test_a_line_of_the_list_has_a_date_a_test_and_a_reason(line: str) -> None:
    """What lacks one is refused with its place."""
    with pytest.raises(BadList, match=r"unsteady.txt:2: "):
        listed(f"# why\n{line}\n", file="unsteady.txt")


def test_the_list_is_empty() -> None:
    """A test that is put there changes this line, too: nobody does it in passing."""
    assert set() == listed(UNSTEADY.read_text(), file=UNSTEADY.name)


def name_failures(folder: Path) -> None:
    """Let pytest in `folder` name what fails at once, as it does in this project."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:asyncio -p no:laminar -p tests.failures\n")


# Fails, and then ends the run before pytest lists what failed, when the name stands there or never will.
BROKEN_OFF = """
import os, pathlib, signal, time

def test_fails():
    assert 1 == 2, "a reason"

def test_ends_the_run():
    end = time.monotonic() + 60
    while "FAILED" not in pathlib.Path("said").read_text() and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(int(os.environ["RUN"]), signal.SIGKILL)
"""


@pytest.mark.parametrize("options", ["", "-n 1"], ids=["in one process", "in a worker"])
def test_a_test_that_failed_is_named_though_the_run_is_broken_off(folder: Path, options: str) -> None:
    """A shell writes its process, which the run takes over, into the environment."""
    (folder / "test_it.py").write_text(BROKEN_OFF)
    name_failures(folder)
    command = f"RUN=$$ exec {sys.executable} -m pytest -q {options} test_it.py >said"
    ran = subprocess.run(command, shell=True, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)})

    said = (folder / "said").read_text()
    assert ran.returncode == -signal.SIGKILL, said
    assert "FAILED test_it.py::test_fails: AssertionError: a reason" in said


@pytest.mark.parametrize(
    ("test", "options", "line"),
    [
        ("def test_it(absent): pass", "", "ERROR test_it.py::test_it: "),
        ("import absent", "", "ERROR test_it.py: "),
        ("import os\ndef test_it(): os._exit(3)", "-n 1", "FAILED test_it.py::test_it: worker 'gw0' crashed"),
    ],
    ids=["no fixture", "not collected", "a worker that ended"],
)
def test_what_no_test_could_say_is_named_too(folder: Path, test: str, options: str, line: str) -> None:
    """With a reason, though there is no assertion that failed."""
    (folder / "test_it.py").write_text(test)
    name_failures(folder)
    command = [sys.executable, "-m", "pytest", "-q", *options.split(), "test_it.py"]
    ran = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )

    said = next(each for each in ran.stdout.splitlines() if each.startswith(("FAILED", "ERROR")))
    assert said.startswith(line) and said != line, ran.stdout
