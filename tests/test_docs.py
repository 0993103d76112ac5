"""The documentation says what is: settings as in their table, links that lead somewhere, true evidence."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from laminar.node.host.settings import SETTINGS, Setting, as_written

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").glob("*.md")])
FOLDERS = ("laminar", "raft", "membership", "router", "ebpf", "tests", "benches", "examples", "deploy")
MODULES = [path.as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
MODULES += [path.as_posix() for path in ROOT.glob("*.py")]
# Names that stand for any page.
MADE_UP = ("NNNN-title.md", "page.md")
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))


def line(setting: Setting) -> str:
    """Return the item that operating.md has for a setting, before it is wrapped."""
    default = "" if setting.default in ("", ()) else f" (`{as_written(setting.default)}`)"
    return f"- `{setting.name}`{default}: {setting.help}"


def test_operating_lists_every_setting_as_the_table_has_it() -> None:
    """Name, default and meaning of each, in the table's order and no others."""
    page = (ROOT / "docs" / "operating.md").read_text()
    _, _, page = page.partition("\n## Settings\n")
    page, _, _ = page.partition("\n## ")
    listed = [" ".join(item.split()) for item in re.findall(r"^- `[a-z_]+`(?:.|\n  )*", page, re.MULTILINE)]

    assert [" ".join(line(setting).split()) for setting in SETTINGS] == listed


def of_pages(missing: Callable[[Path], Iterable[str]]) -> list[str]:
    """What is missing on any page, each with the page's name."""
    return [f"{page.relative_to(ROOT)}: {name}" for page in PAGES for name in missing(page)]


def test_links_between_files_lead_somewhere() -> None:
    """Each relative link names a file or folder of the project."""

    def missing(page: Path) -> list[str]:
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        return [link for link in links if not (page.parent / link).exists()]

    assert [] == of_pages(missing)


def headings(page: Path) -> set[str]:
    """What may stand behind `#` in a link to a page, by the rule of those who show Markdown."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def named_page(name: str, file: Path) -> Path | None:
    """The page that a file means: beside it, by its path from the top, or, of a bare name, one called so."""
    path = name.lstrip("/")
    called_so = [page for page in PAGES if page.name == path]
    return next((page for page in (file.parent / path, ROOT / path, *called_so) if page.exists()), None)


@pytest.mark.parametrize("folder", [*FOLDERS, "docs", "."])
def test_pages_that_are_named_and_their_sections_are_there(folder: str) -> None:
    """In code, tests and pages: `docs/storage.md`, and the heading of `docs/storage.md#recovery`."""
    files = (ROOT / folder).rglob("*") if folder != "." else ROOT.glob("*")
    missing = []
    for file in sorted(path for path in files if path.suffix in (".py", ".md", ".toml")):
        text = file.read_text()
        named = re.findall(r"(?<![\w>.*/-])([\w./-]+\.md)\b(?:#([\w-]+))?", text)
        own = re.findall(r"\]\(#([\w-]+)\)", text) if file.suffix == ".md" else []
        for name, section in [*named, *((file.name, section) for section in own)]:
            page = named_page(name, file)
            if name not in MADE_UP and (page is None or (section and section not in headings(page))):
                missing.append(f"{file.relative_to(ROOT)}: {name}, {section}")

    assert [] == missing


def test_modules_that_a_page_names_are_there() -> None:
    """By their path from the top, from `laminar/`, or by their name alone."""

    def missing(page: Path) -> list[str]:
        named = sorted(set(re.findall(r"[\w/]+\.py\b", page.read_text())))
        return [name for name in named if not any(path.endswith(f"/{name}") for path in MODULES)]

    assert [] == of_pages(missing)


def test_tests_that_a_page_names_are_there() -> None:
    """Each `tests/...py::test_name` is a function of that file."""

    def missing(page: Path) -> list[str]:
        return [
            f"{file}::{name}"
            for file, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text())
            if not (ROOT / file).exists()
            or not re.search(rf"^(?:async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
        ]

    assert [] == of_pages(missing)


def test_every_promise_and_defect_of_laminarmq_has_its_item() -> None:
    """P1 to P16, B1 to B14, each with a test."""
    page = (ROOT / "docs" / "laminarmq.md").read_text()
    items = re.findall(r"^- \*\*([PB]\d+)\*\* (.*?)(?=^- |^#|\Z)", page, re.MULTILINE | re.DOTALL)

    assert [*(f"P{each}" for each in range(1, 17)), *(f"B{each}" for each in range(1, 15))] == [
        name for name, _ in items
    ]
    assert all("::test_" in item for _, item in items)


def test_every_decision_is_listed_and_whole() -> None:
    """Numbered from 1 without a gap, in the index, and with the four parts that the first one asks for."""
    index = (ROOT / "docs" / "decisions" / "README.md").read_text()

    assert list(range(1, len(DECISIONS) + 1)) == [int(page.name[:4]) for page in DECISIONS]
    for page in DECISIONS:
        assert f"({page.name})" in index
        for part in ("**Context.**", "**Choice.**", "**What we gave up.**", "**How we would notice.**"):
            assert part in page.read_text(), f"{page.name} has no {part}"


def test_the_evidence_against_pysyncobjs_raft_still_holds() -> None:
    """Decision 0003 shows what a run printed; a run today prints the same."""
    command = [sys.executable, str(ROOT / "benches" / "consensus" / "evidence_pysyncobj.py")]
    run = subprocess.run(command, capture_output=True, text=True)

    assert 0 == run.returncode, run.stdout + run.stderr
    assert run.stdout in (ROOT / "docs" / "decisions" / "0003-own-raft-core.md").read_text()
