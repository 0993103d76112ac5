"""The list of pitfalls in docs/pitfalls.md: all of them, each with tests that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def rows() -> dict[int, str]:
    """Return, by number, the lines below a pitfall."""
    page = (ROOT / "docs/pitfalls.md").read_text()
    found = re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", page, re.MULTILINE | re.DOTALL)
    return {int(number): item for number, item in found}


def functions(path: Path) -> set[str]:
    """The names of a file's functions, also of methods."""
    tree = ast.parse(path.read_text())
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_pitfall_has_its_line_and_its_tests_are_there() -> None:
    """1 to 53 without a gap; a test that was renamed is renamed in the list too."""
    items = rows()
    assert list(range(1, 54)) == sorted(items)
    for number, tests in items.items():
        named = re.findall(r"`([^`:]+)::([^`]+)`", tests)
        assert named, f"pitfall {number} has no test"
        for path, name in named:
            assert name.startswith(f"test_pitfall_{number:02}_"), f"{name} stands with pitfall {number}"
            assert name in functions(ROOT / path), f"{path} has no {name}"
