"""The mutation check itself: every mutant can still be made."""

from __future__ import annotations

import pytest

from tests.mutation import Mutant
from tests.sim.mutants import CASES


def test_the_text_that_a_mutant_changes_is_there() -> None:
    """A mutant that changed nothing would pass for a rule that no test needs."""
    void = []
    for case in CASES:
        try:
            case.mutant.check()
        except (AttributeError, ImportError, LookupError, SyntaxError) as error:
            void.append(f"{case.mutant.name}: {error!r}")

    assert CASES and [] == void


def test_a_mutant_without_its_text_is_an_error() -> None:
    """It must not count as caught, or as survived."""
    with pytest.raises(LookupError):
        Mutant("nothing", "raft.quorum:majority", "return size // 3", "pass").check()


def test_names_are_not_used_twice() -> None:
    """A report names a mutant by it alone."""
    names = [case.mutant.name for case in CASES]
    assert len(names) == len(set(names))
