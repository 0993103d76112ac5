"""A retired word of the glossary comes back into no name and no sentence."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
PRODUCT = ("laminar", "raft", "membership", "router", "ebpf")
# A decision is never rewritten, and the glossary names the words.
EXEMPT = re.compile(r"docs/decisions/|docs/glossary\.md|docs/models/")
# How often a word may still occur; no word may be added.
STILL: dict[str, int] = {}


def retired_words() -> list[str]:
    """Return the words of the glossary's last table."""
    table = GLOSSARY.read_text().partition("## Retired words")[2]
    return [row.strip("`") for row in re.findall(r"^\| ([^|]+?) \| [^|]+ \|$", table, re.M)[2:]]


def lines_with(word: str) -> list[str]:
    """Return the lines of product and pages that hold `word`, as file:line: text."""
    listed = subprocess.run(
        ["git", "grep", "-n", "-i", "-w", "-e", word, "--", *PRODUCT, "docs", "README.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert listed.returncode in (0, 1), listed.stderr
    return [line for line in listed.stdout.splitlines() if not EXEMPT.match(line)]


def test_the_table_is_read() -> None:
    """An empty list would pass for a clean tree."""
    assert "passage" in retired_words()
    assert STILL.keys() <= set(retired_words())
    assert lines_with("Raft")


@pytest.mark.parametrize("word", retired_words())
def test_a_retired_word_does_not_come_back(word: str) -> None:
    """Use the word beside it in docs/glossary.md."""
    found = lines_with(word)
    assert len(found) <= STILL.get(word, 0), "\n".join(found)
