"""Prepare the pages for `make site`: the Markdown of this checkout, as the site's program wants it.

    python docs/site.py build/site/pages

The pages are written for GitHub, whose Markdown nests a list by two spaces and needs few empty lines. That
of the site wants four spaces, and an empty line wherever a list begins or ends. The folder keeps the paths of
the checkout, so relative links stay right.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "raft",
    "membership",
    "router",
    "ebpf",
    "laminar/log",
    "laminar/http/protocol",
    "tests",
    "changelog.d",
)
TOP = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "NOTICE")
FOLDERS = ("docs", "deploy")
LEFT_OUT = ("docs/site.py",)

_MARK = re.compile(r"( *)([-*]|\d+\.)( +)")


def for_the_site(text: str) -> str:
    """Return a page's text with lists as Python-Markdown reads them."""
    lines: list[str] = []
    columns: list[int] = []  # where the content of each list that is open here begins
    in_code = in_paragraph = has_paragraphs = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif in_code:
            pass
        elif not line.strip():
            in_paragraph, has_paragraphs = False, True
        else:
            column = len(line) - len(line.lstrip())
            outer = [each for each in columns if each <= column]
            mark = _MARK.match(line)
            if mark and in_paragraph and not columns and mark[2] not in ("-", "*", "1."):
                mark = None  # text: no other number begins a list within a paragraph
            if mark is None and in_paragraph:
                outer = columns
            if mark and in_paragraph and (has_paragraphs or len(outer) != len(columns) - 1):
                lines.append("")
            line = 4 * len(outer) * " " + line.lstrip()
            columns, in_paragraph = outer, True
            if mark:
                columns, has_paragraphs = [*outer, mark.end()], False
        lines.append(line)
    return "\n".join(lines) + "\n"


def files() -> list[Path]:
    """Return all files of the site, relative to the checkout."""
    found = [Path(name) for name in TOP] + [Path(name) / "README.md" for name in PACKAGES]
    for folder in FOLDERS:
        found += [file.relative_to(ROOT) for file in (ROOT / folder).rglob("*") if file.is_file()]
    return [file for file in found if str(file) not in LEFT_OUT and "__pycache__" not in file.parts]


def main(target: Path) -> None:
    """Write the pages into a folder, which is emptied before."""
    shutil.rmtree(target, ignore_errors=True)
    for file in files():
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            text = for_the_site((ROOT / file).read_text(encoding="utf-8"))
            (target / file).write_text(text, encoding="utf-8")
        else:
            shutil.copy(ROOT / file, target / file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
