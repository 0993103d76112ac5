"""The README of a package is one screen, and the example in it runs as it is written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture import PACKAGES

ROOT = Path(__file__).parents[1]
READMES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("README.md"))
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ONE_SCREEN = 80


def name(path: Path) -> str:
    """Its path from the top."""
    return path.relative_to(ROOT).as_posix()


def test_the_cores_have_one() -> None:
    """An empty list would pass below."""
    assert {"membership/README.md", "router/README.md", "ebpf/README.md", "laminar/log/README.md"} <= {
        name(path) for path in READMES
    }


@pytest.mark.parametrize("readme", READMES, ids=name)
def test_the_example_of_a_readme_runs(readme: Path) -> None:
    """In a process of its own; what a comment behind the last `print` shows is printed."""
    text = readme.read_text()
    assert len(text.splitlines()) <= ONE_SCREEN
    (example,) = EXAMPLE.findall(text)

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], cwd=ROOT, capture_output=True, text=True, timeout=300
    )

    assert done.returncode == 0, done.stderr
    *_, last = example.rstrip().splitlines()
    if "  # " in last:
        assert last.partition("  # ")[2] in done.stdout
