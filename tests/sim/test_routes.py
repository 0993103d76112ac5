"""Worlds of routes: `make sim-many` runs more of them (`routes.py`)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.routes import busy, options_of, simulate


@pytest.mark.parametrize("seed", [1, 3, 12])
def test_no_record_is_lost_doubled_or_out_of_order_over_changes(seed: int) -> None:
    """Partitions split, merge and move, and nodes die, lose power and are cut off at every step."""
    outcome = simulate(busy(seed))

    assert outcome.exercised["changes done"] and outcome.exercised["batches that went to an output"]
    assert outcome.exercised["records compared along lineages"] > outcome.acknowledged / 2


def test_the_same_seed_gives_the_same_history() -> None:
    options = replace(options_of(5), trouble_s=30.0)

    assert simulate(options).digest == simulate(options).digest
