"""Bugs put into searches and histories on purpose: the properties of their tests notice each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.mutation import Mutant
from tests.node.find.test_history import test_events_are_the_same_in_steps_and_end_where_the_table_is as lives
from tests.node.find.test_scan import test_random_steps_find_what_a_loop_over_all_finds as random_steps

SCAN, EXAMINE, WHERE = "laminar.node.find.scan", "laminar.node.find.examine", "laminar.node.find.where"
HISTORY = "laminar.node.find.history"

SEARCHES = (
    Mutant(
        "bytes that are somewhere in the batch are taken for a match",
        f"{WHERE}:_with_key",
        "return [row for row in rows if keys[row] == key]",
        "return list(rows)",
    ),
    Mutant(
        "what did not fit into an answer counts as looked at",
        f"{EXAMINE}:examine",
        "result.is_full = (result.low, result.high) != (low, high)\n",
        "result.low, result.high = low, high\n",
    ),
    Mutant(
        "a window that was read in part counts as whole",
        f"{SCAN}:_Scan._newest",
        "_end_of(read) >= result.high or window == 1",
        "True",
    ),
    Mutant(
        "a slice ends at the end of the search",
        f"{SCAN}:_Scan._oldest",
        "min(end, _end_of(read))",
        "end",
    ),
    Mutant("one is true", f"{WHERE}:_equal", "isinstance(found, bool) == isinstance(wanted, bool)", "True"),
)
LIVES = (
    Mutant(
        "the state between two steps is forgotten",
        f"{HISTORY}:History.place",
        "self._channels.stored(),",
        "[],",
    ),
    Mutant("a dead record is only aside", f"{HISTORY}:_State.word", "Why.DEAD", "Why.BUSY"),
)


@pytest.fixture
def put_in() -> Iterator[Callable[[Mutant], None]]:
    """Puts a bug in; it is taken out after the test."""
    before = []

    def put(mutant: Mutant) -> None:
        function, _ = mutant._function()
        before.append((function, function.__code__))
        mutant.apply()

    yield put
    for function, code in before:
        function.__code__ = code


async def noticed(run: Callable[[int], Awaitable[None]]) -> bool:
    """Whether the property fails for one of a few seeds."""
    for seed in range(4):
        try:
            await run(seed)
        except (AssertionError, KeyError, ValueError):
            return True
    return False


@pytest.mark.parametrize("mutant", SEARCHES, ids=lambda mutant: mutant.name)
async def test_a_wrong_search_is_noticed(
    mutant: Mutant, put_in: Callable[[Mutant], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the comparison with a loop over all records."""
    put_in(mutant)
    assert await noticed(lambda seed: random_steps(tmp_path / str(seed), seed, monkeypatch))


@pytest.mark.parametrize("mutant", LIVES, ids=lambda mutant: mutant.name)
async def test_a_wrong_history_is_noticed(
    mutant: Mutant, put_in: Callable[[Mutant], None], tmp_path: Path
) -> None:
    """By the comparison of steps with the whole, and of its end with the table."""
    put_in(mutant)
    assert await noticed(lambda seed: lives(tmp_path / str(seed), seed))
