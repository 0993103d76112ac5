"""A short version of `make cluster-upgrade`: nodes of the older program become nodes of this one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cluster.life.run import Plan, run_life
from tests.cluster.upgrade.cluster import MixedCluster
from tests.cluster.upgrade.older import NoOlderProgram, older_program
from tests.cluster.upgrade.run import Upgrade, short


def test_a_cluster_is_upgraded_node_by_node_and_may_go_back_until_the_last(
    real_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then the older program is refused, by its folder and by the cluster."""
    try:
        older_program()
    except NoOlderProgram as error:
        pytest.skip(str(error))
    plan = Plan(
        nodes=4,
        topics=1,
        partitions=2,
        appends_per_s=20.0,
        ask_pause_s=0.2,
        calm_s=0.5,
        sinks=1,
        settle_ms=500,
        most_gap_s=60.0,
        most_uneven_s=180.0,
    )
    sound = asyncio.run(
        run_life(real_disk, plan, seed=1, script=short, kind=Upgrade, cluster_kind=MixedCluster)
    )

    assert sound, capsys.readouterr().out
