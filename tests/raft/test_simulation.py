"""Hundreds of seeds of everything at once. A failure names its seed: `Simulation(seed).run(STEPS)` replays it."""

from __future__ import annotations

import pytest

from tests.raft.simulation import Simulation

STEPS = 500
SEEDS = 300
BUNCH = 30


@pytest.mark.parametrize("first", range(0, SEEDS, BUNCH))
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
    assert led >= BUNCH
    assert committed >= 20 * BUNCH


def test_a_seed_replays_exactly() -> None:
    """Same seed, same history, byte for byte."""
    histories = []
    for _ in range(2):
        simulation = Simulation(7)
        simulation.run(STEPS)
        histories.append([replica.readies for replica in simulation.world.replicas.values()])

    assert histories[0] == histories[1]
