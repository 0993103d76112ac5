"""The demo in the small: some flights, a kill, no Spark; every line it prints is earned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from examples.demo.flights import DEFAULT_FILE


def test_a_small_demo_proves_all_but_spark(tmp_path: Path) -> None:
    """Without Java it ends 0, its last line says what was skipped, the picture is there, the data is gone."""
    file = tmp_path / "flights.jsonl"
    # A fifth is sent slowly while nodes die and come back: some to be under way also at the fourth kill.
    file.write_bytes(b"".join(DEFAULT_FILE.read_bytes().splitlines(keepends=True)[:6_000]))
    out = tmp_path / "out"
    environment = {name: value for name, value in os.environ.items() if name != "REQUIRE"}
    environment["JAVA_HOME"] = "/nowhere"

    ran = subprocess.run(
        [sys.executable, "-m", "examples.demo", "--file", str(file), "--out", str(out)],
        cwd=DEFAULT_FILE.parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )

    lines = ran.stdout.splitlines()
    assert 0 == ran.returncode, ran.stdout + ran.stderr
    assert 7 == sum(line.startswith("ok ") for line in lines)
    assert not any(line.startswith("BROKEN") for line in lines)
    assert any("kill -9 of node-" in line for line in lines)
    assert lines[-1].startswith("demo: all 7 checks held")
    assert "skipped Spark: /nowhere/bin/java does not run" in lines[-1]
    assert ["delays.png"] == [path.name for path in out.iterdir()]
