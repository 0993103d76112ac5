"""Two of three real nodes lose their disks for good; the operator goes on with what is left."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from laminar.testing.cluster import LocalCluster
from tests.cluster.appends import append
from tests.cluster.conftest import until_all_vote
from tests.cluster.patience import asked
from tests.node.api.asking import Partition

TOPIC = "t"
OCTETS = "application/octet-stream"


@pytest.fixture
def cluster(real_disk: Path) -> Iterator[LocalCluster]:
    """Three nodes of one shard, which all vote on the catalog; what is gone is replaced soon."""
    settings = {"replace_after_ms": 3000}
    with LocalCluster(real_disk / "cluster", nodes=3, shards=1, settings=settings) as own:
        until_all_vote(own)
        yield own


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def laminar(cluster: LocalCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command as the operator types it."""
    command = [sys.executable, "-P", "-m", "laminar.cli", *arguments]
    return subprocess.run(command, env=cluster.environment(), capture_output=True, text=True, timeout=120)


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """What a command that lists printed as JSON; it must have done what it was told."""
    assert 0 == done.returncode, done.stdout + done.stderr
    listed: list[dict[str, Any]] = json.loads(done.stdout)
    return listed


def holders(partition: Partition) -> set[str]:
    """The nodes whose replicas keep up with the leader, itself among them."""
    described = partition.http.get(partition.path).json()
    return {each["node"] for each in described.get("replicas", ()) if each["in_sync"]}


def test_two_of_three_disks_are_lost_and_the_cluster_comes_back_to_appends(cluster: LocalCluster) -> None:
    """What is committed stays readable throughout; first the catalog goes on, then the partition."""
    left, *others = cluster.members
    with httpx.Client(base_url=left.url, timeout=60, trust_env=False) as http:
        wish = {"partitions": 1, "replicas": 3}
        assert asked(http, "PUT", f"/v1/topics/{TOPIC}", json=wish).is_success
        partition = Partition(http, TOPIC)
        values = [f"value {number}" for number in range(51)]
        receipts = [append(http, f"{partition.path}/records", value) for value in values]
        assert list(range(51)) == [each["placed"][0]["offset"] for each in receipts]
        # All of it is on the one that is left, which knows it to be committed; of the last record only until
        # it is killed, unless it leads: its disk says of an entry that those before it are committed.
        until(lambda: partition.values(offset=0, read="replica") == values, "it holds everything")

        for lost in others:
            cluster.kill(lost.number)
            cluster.wipe(lost.number)
        assert values[10:12] == partition.values(offset=10, limit=2)
        assert partition.post("nobody", OCTETS).status_code in (503, 504)

        cluster.kill(left.number)
        planned = laminar(cluster, "catalog", "recover", str(left.data), "--json")
        assert (1, left.name, "none") == (
            planned.returncode,
            json.loads(planned.stdout)[0]["node"],
            json.loads(planned.stdout)[0]["epoch"],
        )
        [recovered] = rows(laminar(cluster, "catalog", "recover", str(left.data), "--accept-loss", "--json"))
        assert 32 == len(recovered["epoch"])
        cluster.restart(left.number)
        assert values[49:50] == partition.values(offset=49, limit=1)

        place = f"{TOPIC}/0"
        [row] = rows(
            laminar(cluster, "group", "recover", place, "--accept-loss", "--json", "--url", left.url)
        )
        assert (sorted(lost.name for lost in others), left.name, [left.name]) == (
            row["abandoned"],
            row["goes_on_from"],
            row["accepted"],
        )
        # The append that nobody answered for may be in its log.
        assert row["kept_offset"] in (51, 52)
        until(lambda: partition.post("afterwards", OCTETS).status_code == 201, "appends are taken again")
        assert values == partition.values(offset=0)[:51]
        assert "goes on without its majority" in left.log.read_text()

        for lost in others:
            cluster.rename(lost.number)
            cluster.spawn(lost.number)
        cluster.wait_ready()
        until(lambda: holders(partition) == {each.name for each in cluster.members}, "copies on new nodes")
        assert values == partition.values(offset=0)[:51]
