"""A real node's data folder is put back from a copy: the node is told, and nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from laminar.testing.cluster import LocalCluster
from tests.cluster.load import Load, converged, violations
from tests.cluster.patience import asked, told

TOPIC = "t"


@pytest.fixture
def cluster(real_disk: Path) -> Iterator[LocalCluster]:
    """Three nodes."""
    with LocalCluster(real_disk / "cluster", nodes=3, shards=1) as own:
        yield own


def nodes(cluster: LocalCluster) -> list[dict[str, Any]]:
    """As node 1 shows them."""
    found: list[dict[str, Any]] = told(f"{cluster.urls[0]}/v1/cluster")["nodes"]
    return found


def make_topic(cluster: LocalCluster) -> None:
    with httpx.Client(base_url=cluster.urls[0], timeout=30, trust_env=False) as http:
        wish = {"partitions": 1, "replicas": 3}
        assert asked(http, "PUT", f"/v1/topics/{TOPIC}", json=wish).is_success


def start_of(cluster: LocalCluster, node: str) -> int:
    """Which start of a node's folder the catalog knows of."""
    (shown,) = [each for each in nodes(cluster) if each["node"] == node]
    return int(shown["start"])


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.1)


async def test_a_folder_that_was_put_back_votes_for_nobody_and_says_so(cluster: LocalCluster) -> None:
    """A copy of a stopped node's folder; the node goes on; then the copy stands where the folder was."""
    await asyncio.to_thread(make_topic, cluster)
    victim = cluster.members[2]
    backup, newest = victim.folder / "backup", victim.folder / "newest"
    load = Load(cluster.urls[:2], TOPIC)
    load.start()
    await load.more(500)
    cluster.kill(victim.number)
    await asyncio.to_thread(shutil.copytree, victim.data, backup)
    await asyncio.to_thread(cluster.restart, victim.number)
    # Before that it has promised nothing to anybody, perhaps, and the copy lacks nothing.
    await until(lambda: start_of(cluster, victim.name) == 2, "its second start is known")
    await load.more(500)
    cluster.kill(victim.number)
    victim.data.rename(newest)
    backup.rename(victim.data)

    cluster.spawn(victim.number)
    await until(lambda: not victim.running, f"{victim.name} goes on with a copy")
    assert "is an older copy: it begins start" in victim.log_tail()
    await load.more(500)
    text = f"the data folder of node {victim.name} is an older copy: it takes part in nothing"

    def is_known() -> bool:
        (shown,) = [each for each in nodes(cluster) if each["node"] == victim.name]
        problems = told(f"{cluster.urls[0]}/v1/health")["problems"]
        found = [each["text"] for each in problems if each["code"] == "folder_rolled_back"]
        return shown["rolled_back"] and found == [text]

    await until(is_known, "node 1 knows of it, and says so")

    cluster.kill(victim.number)
    shutil.rmtree(victim.data)
    newest.rename(victim.data)
    await asyncio.to_thread(cluster.restart, victim.number)
    await load.finish()
    await until(lambda: not any(each["rolled_back"] for each in nodes(cluster)), "its newest folder is back")
    assert [] == await violations(cluster.urls, TOPIC, load)
    assert [] == await converged(cluster, TOPIC, 1, replicas=3)
