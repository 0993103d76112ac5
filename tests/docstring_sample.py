"""Print public docstrings of the product, drawn by a seed: `python -m tests.docstring_sample [SEED] [COUNT]`.

Read each as somebody who sees nothing else. What is not clear then is rewritten.
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("laminar", "raft", "membership", "router", "ebpf")


def documented(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (place, docstring) of a module and of every class and function in it that has one."""
    waiting: list[tuple[str, ast.AST]] = [(str(path.relative_to(ROOT)), ast.parse(path.read_text()))]
    while waiting:
        place, node = waiting.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield place, text
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                waiting.append((f"{place}::{child.name}", child))
            else:
                waiting.append((place, child))


def product() -> Iterator[tuple[str, str]]:
    """Yield (place, docstring) for the whole product, private names too."""
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield from documented(path)


def main(seed: int = 1, count: int = 60) -> None:
    """Print `count` docstrings of public names."""
    public = sorted(
        each for each in product() if not any(name.startswith("_") for name in each[0].split("::")[1:])
    )
    print(f"seed {seed}: {count} of {len(public)}")
    for number, (place, text) in enumerate(random.Random(seed).sample(public, count), 1):
        print(f"\n{number}. {place}\n{text}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
