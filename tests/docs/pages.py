"""Code blocks of a page, with what the page shows as their output.

A block in a fence ```text directly behind one that runs is what it prints; `…` in it stands for anything
on the same line, or for nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
ANYTHING = "…"


@dataclass(frozen=True)
class Block:
    """A fence of a page: `line` is its first line, `shown` what is said to be printed, if anything is."""

    page: str
    line: int
    language: str
    text: str
    shown: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    """All fences of a page of the project, but those that show another's output."""
    text = (ROOT / page).read_text()
    found = list(_FENCE.finditer(text))
    blocks = []
    for fence, behind in zip_longest(found, found[1:]):
        if fence["language"] == "text":
            continue
        shown = None
        if (
            behind is not None
            and behind["language"] == "text"
            and not text[fence.end() : behind.start()].strip()
        ):
            shown = behind["text"]
        line = text.count("\n", 0, fence.start()) + 2
        blocks.append(Block(page, line, fence["language"], fence["text"], shown))
    return blocks


def matches(shown: str, printed: str) -> bool:
    """Whether `printed` is what the page shows, line for line."""
    pattern = re.escape(shown.strip()).replace(re.escape(ANYTHING), "[^\n]*")
    return re.fullmatch(pattern, printed.strip()) is not None
