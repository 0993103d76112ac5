"""What `make test` runs: pytest, and once more, alone, what failed in it.

``python -m tests.stage OPTION...`` runs pytest with these options. When tests failed, and only tests, they
are run again in one process with nothing beside them, so that both runs can be read. The stage has passed
when all passed at once, or when each test that failed only the first time is in `tests/unsteady.txt`, with a
date and a reason. Why: docs/decisions/0011.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNSTEADY = Path(__file__).with_name("unsteady.txt")
EXIT_TESTS_FAILED = 1
# Where the stage's time goes, at its end.
SLOWEST = ("--durations=40", "--durations-min=3")


class BadList(Exception):
    """A line of the list that lacks something; the text names the line."""


def listed(text: str, *, file: str) -> set[str]:
    """The tests named in `text`, a line each: date, test, reason. A line may be empty, or begin with #."""
    tests = set()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            day, test, _reason = line.split(maxsplit=2)
            date.fromisoformat(day)
        except ValueError:
            raise BadList(
                f"{file}:{number}: {line!r} is not `YYYY-MM-DD tests/file.py::test reason`"
            ) from None
        tests.add(test)
    return tests


def run(options: Sequence[str], *, root: Path = ROOT, unsteady: Path = UNSTEADY) -> int:
    """Run the stage; its exit code."""
    known = listed(unsteady.read_text(), file=unsteady.name)
    noted = root / ".pytest_cache" / "v" / "cache" / "lastfailed"
    noted.unlink(missing_ok=True)  # pytest would keep what another stage left there
    pytest = [sys.executable, "-m", "pytest", *options]
    code = subprocess.run([*pytest, "-q", *SLOWEST], cwd=root).returncode
    if code != EXIT_TESTS_FAILED or not noted.exists():
        return code
    failed = json.loads(noted.read_text())
    alone = ["-n", "0"] if "-n" in options else []
    code = subprocess.run([*pytest, *alone, "--last-failed", "--maxfail", "1"], cwd=root).returncode
    if code != 0:
        return code
    new = sorted(set(failed) - known)
    print(f"\nfailed first and passed alone: {len(failed)}, of which {len(new)} are not in {unsteady.name}")
    print("\n".join(f"  {test}" for test in new), flush=True)
    return EXIT_TESTS_FAILED if new else 0


if __name__ == "__main__":
    try:
        sys.exit(run(sys.argv[1:]))
    except BadList as error:
        sys.exit(f"tests: {error}")
