"""Records larger than a batch in troubled clusters: each whole, once, at the offset that was told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.long_examples import long
from tests.sim.simulation import options_of, simulate


@pytest.mark.parametrize("seed", [1, 2, *long(3, 4, 5, 6)])
def test_large_records_are_whole_and_once_whatever_happens(seed: int) -> None:
    """Beside batches and transactions, through crashes, cuts, rot and moves; what breaks off is dropped."""
    options = options_of(seed)
    settings = {name: value for name, value in options.topic_settings.items() if "flush" not in name}
    outcome = simulate(replace(options, uploaders=2, trouble_s=60.0, topic_settings=settings))

    assert outcome.exercised["large records"] >= 3, outcome.exercised
    assert outcome.exercised["parts"] > outcome.exercised["large records"]
