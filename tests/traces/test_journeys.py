"""Two journeys stay as short as they are: a change that makes one longer says so here.

The election is only printed: how often candidates must try depends on how fast the machine is.
"""

from __future__ import annotations

import pytest

from tests.traces.journeys import trace_of

# Moves between files: those of November 2026, with room for a node's timers that fire meanwhile.
MOST_MOVES = {"append": 86, "read": 190}


@pytest.mark.parametrize("journey", MOST_MOVES)
def test_a_journey_goes_back_and_forth_no_more_than_it_did(journey: str) -> None:
    """`python -m tests.traces --path NAME` shows where it goes."""
    # On a busy machine timers fire in one run, and in the next: in one of so many there is room for them.
    figures = trace_of(journey, runs=20, enough=MOST_MOVES[journey]).figures()

    assert 0 < figures.moves <= MOST_MOVES[journey], figures
