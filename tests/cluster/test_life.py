"""A short version of `make cluster-life`: the life of a cluster, from one node on, under load."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cluster.life.run import Plan, run_life


def test_a_cluster_grows_is_drained_and_restarted_and_serves_all_the_time(
    real_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One node becomes four; the first is drained and removed; the others are restarted one by one.

    Names that come back, and a node that dies, are left to `make cluster-life`.
    """
    plan = Plan(
        nodes=4,
        topics=1,
        partitions=2,
        drains=1,
        rejoin=False,
        appends_per_s=20.0,
        ask_pause_s=0.2,
        calm_s=1.0,
        sinks=1,
        settle_ms=500,
        most_gap_s=60.0,
        most_uneven_s=180.0,
    )
    sound = asyncio.run(run_life(real_disk, plan, seed=1))

    assert sound, capsys.readouterr().out
