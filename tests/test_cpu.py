"""What a stage says about its CPU time: all that a module starts counts, by folder and by module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import cpu

BURN = "import time; end = time.process_time() + 0.2\nwhile time.process_time() < end: pass\n"
# A child that burns and lives on or ends, below one that has burnt, too.
BELOW = f"""
import subprocess, sys
{BURN}
child = subprocess.Popen(
    [sys.executable, "-S", "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE
)
child.stdout.readline()
if sys.argv[2] == "ends":
    child.wait()
print(flush=True)
sys.stdin.read()
child.communicate()
"""

BUSY = """
import time

def test_it():
    end = time.process_time() + 1.2
    while time.process_time() < end:
        pass
"""


@pytest.mark.parametrize("end", ["runs", "ends"])
def test_what_a_process_starts_counts_while_it_runs_and_when_it_has_ended(end: str) -> None:
    """Nodes end within a test, Spark's Java lives on; both have children."""
    below = f"{BURN}\nprint(flush=True)" + ("\ninput()" if end == "runs" else "")
    with subprocess.Popen(
        [sys.executable, "-S", "-c", BELOW, below, end], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        # Of all that this process has, what an earlier test left may end, and so take its time away.
        used = cpu.family_s(child.pid)

    assert 0.35 <= used < 60
    assert cpu.family_s() >= used


def test_the_report_has_each_folder_and_the_modules_above_their_share() -> None:
    used = {"node/api/test_a.py": 8.0, "node/api/x/test_b.py": 4.0, "sim/test_c.py": 12.5, "test_d.py": 0.4}

    assert [
        "   24.9 s of CPU",
        "   12.5   sim/",
        "   12.0   node/api/",
        "modules of more than 10 s:",
        "   12.5   sim/test_c.py",
    ] == list(cpu.lines(used))


def test_a_run_with_durations_ends_with_the_report(tmp_path: Path) -> None:
    """Also where workers did the work; each module is there."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p tests.cpu -p no:asyncio -p no:laminar\n")
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).write_text(BUSY)
    command = [sys.executable, "-m", "pytest", "-q", "--durations=1", "-n", "2", "--dist", "loadfile"]
    root = Path(__file__).parents[1]

    ran = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "-c", str(tmp_path / "pytest.ini"), str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
    )

    assert 0 == ran.returncode, ran.stdout + ran.stderr
    said = ran.stdout.splitlines()
    for name in ("test_a.py", "test_b.py"):
        (seconds,) = [line.split()[0] for line in said if line.endswith(f"   {name}")]
        assert 0 < float(seconds) < 60
