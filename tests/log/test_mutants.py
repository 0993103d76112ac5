"""The mutation check itself: every mutant can still be made, and a sample is noticed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.log.mutants import MUTANTS, Change, Mutant, changed_source, check, source_path
from tests.long_examples import long

# Those that are noticed within a second or two; `make log-mutants` runs all.
_SAMPLE = (
    "acknowledged before the sync",
    "recovery ends without syncing what it wrote",
    "a checkpoint is overwritten in place",
    *long(
        "a truncation is not in the journal",
        "a vote's frame without its twin",
        "bytes of a segment that look right are not written again",
    ),
)


def test_the_text_that_a_mutant_changes_is_there() -> None:
    """A mutant that changed nothing would pass for a rule that no test needs."""
    void = [f"{mutant.name}: {why}" for mutant in MUTANTS for why in why_void(mutant)]

    assert [] == void


def why_void(mutant: Mutant) -> Iterator[str]:
    """Yield what is wrong with a mutant, for each module that it changes."""
    for module in sorted({change.module for change in mutant.changes}):
        source = source_path(module).read_text("utf-8")
        changes = [change for change in mutant.changes if change.module == module]
        try:
            changed = changed_source(changes, source)
            compile(changed, module, "exec")
        except (LookupError, SyntaxError) as error:
            yield f"{module}: {error!r}"
        else:
            if changed == source:
                yield f"{module} stays as it is"


def test_a_mutant_without_its_text_is_an_error() -> None:
    """In a function that is not there, or does not hold it."""
    source = "def f():\n    return 1\n"
    for function, old in (("g", "return 1"), ("f", "return 2")):
        with pytest.raises(LookupError):
            changed_source([Change("m", function, old, "pass")], source)


@pytest.mark.parametrize("name", _SAMPLE)
def test_a_rule_switched_off_is_noticed(name: str) -> None:
    """By one of the tests that are named for it."""
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    outcome = check(mutant)
    assert outcome.caught, f"no test noticed: {name}"
