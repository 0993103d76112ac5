"""Every program in examples/ runs, is short, and is shown in the documentation with what it prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks_of, matches

# `worker.py` needs a cluster, and goes on for ever: test_worker.py.
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.name != "worker.py"]
PAGE = "docs/library.md"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_is_shown_word_for_word_and_prints_what_the_page_shows(
    example: Path, tmp_path: Path
) -> None:
    """Twenty lines at most; run as a reader would, in an empty folder, twice: the second finds the data."""
    text = example.read_text()
    (block,) = [block for block in blocks_of(PAGE) if block.text == text]

    runs = [
        subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        for _ in range(2)
    ]

    assert [(0, ""), (0, "")] == [(run.returncode, run.stderr) for run in runs]
    assert len(text.splitlines()) <= 20
    assert block.shown is not None
    assert matches(block.shown, runs[0].stdout), runs[0].stdout
    assert runs[0].stdout != runs[1].stdout


def test_there_are_examples() -> None:
    assert ["embedded_node.py", "log_library.py"] == [example.name for example in EXAMPLES]
