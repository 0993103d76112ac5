"""Worlds of channels: `make sim-many` runs more of them (`channels.py`)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.long_examples import long
from tests.sim.channels import busy, options_of, simulate


@pytest.mark.parametrize("seed", [2, *long(3)])
def test_each_record_is_given_out_until_it_is_done_or_dead(seed: int) -> None:
    """Consumers crash, stall and repeat themselves, channels change, and nodes die (`channel_rules.py`)."""
    outcome = simulate(replace(busy(seed), trouble_s=30.0))

    happened = outcome.exercised
    assert happened["channels: acknowledged"] and happened["channels: time-outs"]
    assert happened["channels: waited for their key"] and happened["channels: late"]
    assert happened["channels: tables compared"] and happened["channels: channels set"]


def test_the_same_seed_gives_the_same_history() -> None:
    options = replace(options_of(5), trouble_s=10.0)

    assert simulate(options).digest == simulate(options).digest
