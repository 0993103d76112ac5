"""Power loss at all nodes at once: real processes over the fault disk, whose unsynced bytes die with them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import laminar
from tests.cluster.load import Load, converged, placement, violations
from tests.cluster.patience import told
from tests.disks.serve import FaultCluster
from tests.long_examples import long

TOPIC = "power"
PARTITIONS = 6


@pytest.mark.parametrize("rounds", [2, *long(4)])
async def test_power_loss_of_all_nodes_under_load_loses_nothing_acknowledged(
    tmp_path: Path, rounds: int
) -> None:
    """Some rounds: all are killed with every unsynced byte (or some of them kept), and come back.

    What was acknowledged is there, in order and once; topics and placement are what they were.
    """
    with FaultCluster(tmp_path / "cluster", nodes=3, shards=2) as cluster:
        async with laminar.aio.connect(cluster.urls, timeout=60) as client:
            await client.create_topic(TOPIC, partitions=PARTITIONS, replicas=3)
        before = await asyncio.to_thread(told, f"{cluster.urls[0]}/v1/topics/{TOPIC}/partitions")
        load = Load(cluster.urls, TOPIC)
        load.start()
        for number in range(rounds):
            await load.more(1_000)
            await asyncio.gather(*(asyncio.to_thread(cluster.kill, node) for node in range(3)))
            cluster.writeback_chance = 0.3 * (number % 2)
            for node in range(3):
                cluster.spawn(node)
            await asyncio.to_thread(cluster.wait_ready)
        await load.more(1_000)
        await load.finish()

        assert [] == await violations(cluster.urls, TOPIC, load)
        assert [] == await converged(cluster, TOPIC, PARTITIONS)
        after = await asyncio.to_thread(told, f"{cluster.urls[0]}/v1/topics/{TOPIC}/partitions")
        assert placement(before) == placement(after)
        unsynced = list((tmp_path / "cluster").glob("node-*/data.unsynced"))
        assert 3 == len(unsynced), f"the nodes ran on another disk: {unsynced}"
