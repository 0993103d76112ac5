"""What becomes of problems that were found: told once, since when, the worst first, at most so many."""

from __future__ import annotations

import re
from pathlib import Path

from laminar.cli.app import COMMANDS
from laminar.node.api.health.problems import (
    CATALOG,
    MOST_LISTED,
    REMEDIES,
    Found,
    Since,
    document,
    limited,
    merged,
)

OPERATING = Path(__file__).parents[4] / "docs" / "operating.md"


def test_every_code_is_on_the_page_for_operators() -> None:
    """A row each in the table of codes, and none that does not exist."""
    rows = set(re.findall(r"^\| `([a-z_]+)` \| (?:warning|critical)", OPERATING.read_text(), re.MULTILINE))

    assert rows == REMEDIES.keys()


def test_every_command_that_is_named_exists() -> None:
    known = {each.path for each in COMMANDS}
    for code in REMEDIES:
        for subject in ("t/0", CATALOG):
            for remedy in document(Found(code, subject, "", "t")).do:
                words = remedy.command.split()
                assert not words or " ".join(words[1:3]) in known or words[1] in known, remedy.command


def test_a_problem_is_as_old_as_the_first_look_that_found_it() -> None:
    """And new again when it comes back after it was gone."""
    now_ms = 1000
    since = Since(lambda: now_ms)
    dead, full = Found("node_dead", "n1", ""), Found("disk_low", "n1", "")

    assert [1000] == [each.since_ms for each in since.noted([dead])]
    now_ms = 2000
    assert [1000, 2000] == [each.since_ms for each in since.noted([dead, full])]
    now_ms = 3000
    assert [2000] == [each.since_ms for each in since.noted([full])]
    assert [3000] == [each.since_ms for each in since.noted([dead])]


def test_one_problem_that_several_nodes_see_is_told_once() -> None:
    """As early and as bad as any of them has it; what is critical comes first."""
    found = [
        Found("disk_low", "n1", "nearly", since_ms=5),
        Found("damaged", "t/0", "on n1", "t", since_ms=4),
        Found("disk_low", "n1", "refused", is_critical=True, since_ms=9),
    ]

    [first, second] = merged(found)

    assert ("disk_low", "refused", True, 5) == (first.code, first.text, first.is_critical, first.since_ms)
    assert "damaged" == second.code


def test_beyond_so_many_of_a_code_they_are_counted() -> None:
    many = [Found("under_replicated", f"t/{number}", "") for number in range(MOST_LISTED + 7)]

    kept, left = limited([*many, Found("node_dead", "n1", "")])

    assert (MOST_LISTED + 1, {"under_replicated": 7}) == (len(kept), dict(left))
