"""What a stage says about its CPU time: all that a module starts counts, by folder and by module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import cpu

BURN = "import time; end = time.process_time() + 0.2\nwhile time.process_time() < end: pass\n"
# A child that burns and lives on, below one that does the same.
BELOW = f"""
import subprocess, sys
{BURN}
child = subprocess.Popen([sys.executable, "-S", "-c", sys.argv[1]], stdin=subprocess.PIPE)
child.wait() if sys.argv[2] == "ends" else print(flush=True)
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


def test_what_a_process_starts_counts_while_it_runs_and_when_it_has_ended() -> None:
    """Nodes end within a test, Spark's Java lives on; both have children."""
    before = cpu.family_s()
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", BELOW, f"{BURN}\nprint('burnt', flush=True)\ninput()", "runs"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None and child.stdin is not None
    while child.stdout.readline() != b"burnt\n":
        pass
    running = cpu.family_s()
    child.stdin.close()
    child.stdout.close()
    child.wait()
    ended = cpu.family_s()

    assert 0.35 <= running - before < 60
    assert running <= ended


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
