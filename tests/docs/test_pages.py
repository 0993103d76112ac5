"""README and the pages that say so are run, block by block, word for word, as a reader would."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from laminar.cli.app import app
from tests.docs.conftest import DEV, Run
from tests.docs.pages import ROOT, Block, blocks_of, matches

# What a reader does once: install, start the cluster. `make` runs us, and the cluster is a fixture.
PREPARATION = {
    "make demo\n",
    "make test\n",
    "make .venv/.core\n",
    f". .venv/bin/activate\n{DEV}\n",
}

PAGES = (
    *("README.md", "docs/clients.md", "docs/channels.md", "docs/first-steps.md", "docs/splitting.md"),
    "docs/backup.md",
    *(
        "docs/outbox.md",
        "docs/search.md",
        "docs/trace.md",
        "docs/coming-from-nsq.md",
        "docs/coming-from-sqs.md",
        "docs/coming-from-celery.md",
    ),
)
# It goes on for ever: tests/examples/test_worker.py runs it.
ENDLESS = {(ROOT / "examples" / "worker.py").read_text()}
RUNNABLE = [
    block
    for page in PAGES
    for block in blocks_of(page)
    if block.text not in PREPARATION | ENDLESS | {f"{DEV}\n"}
]
# What an operator types on the cluster that these pages have filled; the rest starts nodes of its own.
RUNNABLE += [block for block in blocks_of("docs/operating.md") if "localhost:7070" in block.text]

ALL_PAGES = sorted(
    path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
)


@pytest.mark.parametrize("block", RUNNABLE, ids=str)
def test_a_block_runs_and_prints_what_the_page_shows(block: Block, run: Run) -> None:
    """In the page's order: later blocks build on earlier ones."""
    printed = run(block)

    if block.shown is not None:
        assert matches(block.shown, printed), f"{block} shows\n{block.shown}\nbut prints\n{printed}"
    else:
        assert '"type":"/docs/errors#' not in printed, f"{block} is refused: {printed}"


def test_readme_has_curl_and_python_and_shows_what_they_print() -> None:
    """About ten lines of each; none of the preparation has changed without being looked at here."""
    blocks = blocks_of("README.md")
    curl = [block for block in blocks if block.text.startswith("curl")]
    python = [block for block in blocks if block.language == "python"]

    assert PREPARATION <= {block.text for block in blocks}
    assert 1 == len(curl) == len(python)
    assert all(block.shown is not None for block in [*curl, *python])
    assert all(len(block.text.splitlines()) <= 12 for block in [*curl, *python])


def commands() -> list[tuple[str, str]]:
    """Every line that begins with `laminar` in a shell block of any page, with the page."""
    return [
        (page, line)
        for page in ALL_PAGES
        for block in blocks_of(page)
        if block.language in ("sh", "console")
        for line in block.text.replace("\\\n", "").splitlines()
        if line.removeprefix("$ ").startswith("laminar ")
    ]


@pytest.mark.parametrize(("page", "line"), commands())
def test_every_command_shown_is_one_that_is_understood(page: str, line: str) -> None:
    """Its flags and arguments are parsed, whether or not it is run."""
    words = shlex.split(line.removeprefix("$ "), comments=True)

    app.parse_args(words[1 : words.index("&") if "&" in words else None], exit_on_error=False)


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a\n", "a", True),
        ('{"t":"…","n":1}', '{"t":"2026","n":1}', True),
        ("…b", "b", True),
        ("a\n…\nb", "a\nx\nb", True),
        ("a…b", "a\nb", False),
        ("a.c", "abc", False),
        ("a\n", "a\nb\n", False),
        ("a", "", False),
    ],
)
def test_what_is_shown_is_compared_line_by_line(shown: str, printed: str, same: bool) -> None:
    assert same == matches(shown, printed)


def test_blocks_are_found_with_what_they_show(tmp_path: Path) -> None:
    """Only a fence directly behind shows the output."""
    page = tmp_path / "page.md"
    page.write_text("```sh\na\n```\n\n```text\nA\n```\n\n```sh\nb\n```\nwords\n```text\nB\n```\n")

    found = [(block.line, block.text, block.shown) for block in blocks_of(str(page))]

    assert [(2, "a\n", "A\n"), (10, "b\n", None)] == found
