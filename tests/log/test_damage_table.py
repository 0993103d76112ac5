"""A part of the table of damage (`damage_table`); `make log-damage` runs all of it."""

from __future__ import annotations

import pytest

from tests.log.damage_table import HOW, Folder, cases, folders, outcome

# For each kind of file, by turns.
_EVERY = 2


@pytest.fixture(scope="module")
def made() -> dict[str, Folder]:
    return folders()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("folder", ["clean", "killed"])
def test_damage_of_any_file_is_healed_refused_or_said(made: dict[str, Folder], folder: str, how: str) -> None:
    """And no start removes what was whole."""
    found = [case for case in cases(made) if (case.folder, case.how) == (folder, how)]
    part = found[list(HOW).index(how) % _EVERY :: _EVERY]
    assert len(part) > 5
    for case in part:
        assert outcome(made, case) in ("healed", "refused", "said")


def test_every_kind_of_file_is_in_the_table(made: dict[str, Folder]) -> None:
    kinds = {case.kind for case in cases(made)}
    documents = {"checkpoint", "manifest", "layout", "notes", "derived"}
    segments = {"first segment", "middle segment", "last segment", "index", "journal", "spare", "end mark"}
    segments |= {"key index"}
    assert documents | segments | {f"{name}, both copies" for name in documents} == kinds


def test_a_manifest_that_is_lost_stops_no_start_and_is_said(made: dict[str, Folder]) -> None:
    """In each way: its home comes up empty and says that it does not know what it held."""
    found = [case for case in cases(made) if case.kind == "manifest, both copies"]
    assert 2 * len(HOW) == len(found)
    assert {"said"} == {outcome(made, case) for case in found}
