"""What is left out of `make test` is run by `make test-long`: by folder, and as pytest sees the marker."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# A bench: it runs no line of the product that others do not run.
LONG_ALONE = ("spark/test_bench.py",)


def pytest_options(target: str) -> Iterator[list[str]]:
    """The options of each run of pytest that a target makes."""
    made = subprocess.run(
        ["make", "--dry-run", "--always-make", target], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for command in re.split(r"&&|\n", made.stdout.replace("\\\n", " ")):
        _, found, options = command.partition(" -m pytest ")
        if not found:
            _, found, options = command.partition(" -m tests.stage ")
        if found and "--collect-only" not in options:
            yield shlex.split(options)


def test_what_make_test_leaves_out_is_run_by_test_long() -> None:
    """One of its runs has all folders but some, whatever is marked; the other, of these, what is marked."""
    for options in pytest_options("test"):
        assert "not long" == options[options.index("-m") + 1], options

    everything, marked = pytest_options("test-long")

    assert "-m" not in everything and "tests" in everything
    left = {each.removeprefix("--ignore=") for each in everything if each.startswith("--ignore=")}
    assert "long" == marked[marked.index("-m") + 1]
    assert left == {each for each in marked if each.startswith("tests")}
    assert not any(each.startswith(("--ignore", "--deselect", "-k")) for each in marked)


def test_no_module_has_long_tests_alone() -> None:
    """Of each module something is in `make test`. The marks are read in the source: collecting takes long."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text()
        tests = re.findall(r"^((?:@.*\n(?:[ )\]].*\n)*)*)(?:async )?def (test_\w+)", source, re.MULTILINE)
        marked = [name for above, name in tests if "@pytest.mark.long\n" in above]
        assert not re.search(r"^pytestmark.*mark\.long", source, re.MULTILINE), path
        if path.relative_to(ROOT / "tests").as_posix() not in LONG_ALONE:
            assert not marked or len(marked) < len(tests), path
