"""Hundreds of seeds of everything at once. `Simulation(seed).run(STEPS)` replays the seed of a failure."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.long_examples import long
from tests.raft.simulation import Simulation

STEPS = 3_000
SEEDS = 400
BUNCH = 50
CHURNED = 1_000
CHURN_STEPS = 1_000


@pytest.mark.parametrize("first", [0, BUNCH, 2 * BUNCH, *long(*range(3 * BUNCH, SEEDS, BUNCH))])
def test_safety_under_everything_then_convergence(first: int) -> None:
    """One leader per term, logs match, committed is for ever and on a majority, reads are never stale."""
    led = committed = 0
    for seed in range(first, first + BUNCH):
        simulation = Simulation(seed)
        try:
            simulation.run(STEPS)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        led += simulation.led
        committed += len(simulation.checkers.committed)

    # The world must not be so hostile that nothing happens in it.
    assert led >= 3 * BUNCH
    assert committed >= 20 * BUNCH


@pytest.mark.parametrize("first", [0, *long(*range(CHURNED // 4, CHURNED, CHURNED // 4))])
def test_configurations_change_under_everything(first: int) -> None:
    """Learners, promotions, removals and hand-overs, with crashes and cuts between them: majorities of
    consecutive configurations meet, votes are counted anew by a slow twin, nothing committed is lost.
    """
    changes = promotions = led = 0
    for seed in range(first, first + CHURNED // 4):
        simulation = Simulation(seed, churn=True)
        try:
            simulation.run(CHURN_STEPS)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, churn: {error}") from error
        steps = simulation.checkers.configurations
        changes += len(steps) - 1
        promotions += sum(len(new.voters) > len(old.voters) for old, new in pairwise(steps))
        led += simulation.led

    assert changes >= CHURNED // 4
    assert promotions >= CHURNED // 20
    assert led >= CHURNED // 4


def test_a_seed_replays_exactly() -> None:
    """Same seed, same history, byte for byte."""
    histories = []
    for _ in range(2):
        simulation = Simulation(7)
        simulation.run(STEPS)
        histories.append([replica.readies for replica in simulation.world.replicas.values()])

    assert histories[0] == histories[1]
