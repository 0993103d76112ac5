"""Operators' commands on real nodes: a node is emptied and removed, a topic grows, a partition moves."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from laminar.cli import run
from laminar.cli.exit_codes import EXIT_DONE, EXIT_FAILED
from laminar.testing.cluster import LocalCluster
from tests.cluster.patience import PATIENCE_S, asked, told, until


@pytest.fixture
def cluster(real_disk: Path) -> Iterator[LocalCluster]:
    """Four nodes, which get replicas as soon as they have been seen for a moment."""
    settings = {"settle_ms": 500, "default_replicas": 2}
    with LocalCluster(real_disk / "cluster", nodes=4, shards=1, settings=settings) as own:
        until(lambda: told(f"{own.urls[0]}/v1/admin/nodes")["nodes"][3:])
        until(lambda: voters(own) >= 3)
        yield own


def voters(cluster: LocalCluster) -> int:
    """How many nodes vote in the catalog."""
    nodes = told(f"{cluster.urls[0]}/v1/admin/nodes")["nodes"]
    return sum(bool(each["catalog_voter"]) for each in nodes)


def placement(url: str, partition: str) -> dict[str, Any]:
    topic, _, number = partition.rpartition("/")
    found: dict[str, Any] = told(f"{url}/v1/admin/topics/{topic}/partitions/{number}")
    return found


def holders(url: str, partition: str) -> set[str]:
    """The nodes whose replicas are in sync, if no other is on its way in or out."""
    topic, _, number = partition.rpartition("/")
    found = told(f"{url}/v1/topics/{topic}/partitions/{number}")
    in_sync = {each["node"] for each in found["replicas"] if each["in_sync"]}
    return in_sync if not found["leaving"] and len(in_sync) == len(found["replicas"]) else set()


def if_all_is_known(http: httpx.Client, node: str) -> dict[str, Any] | None:
    """The description of a node; None if its shard, or the catalog's leader, did not answer in time."""
    found: dict[str, Any] = http.get(f"/v1/admin/nodes/{node}").json()
    return found if None not in (found["leads"], found["catalog_voter"]) else None


def command(url: str, *words: str) -> int:
    return run([*words, "--url", url, "--timeout", str(PATIENCE_S)])


@contextlib.contextmanager
def shards_stopped(cluster: LocalCluster, *numbers: int) -> Iterator[None]:
    """The shards of these nodes stand still meanwhile, so no replica there is created or catches up."""
    files = [msgspec.json.decode((cluster.members[each].data / "node.json").read_bytes()) for each in numbers]
    pids = [pid for file in files for role, pid in file["pids"].items() if "shard" in role]
    assert len(numbers) == len(pids)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_a_node_is_drained_stopped_and_removed(
    cluster: LocalCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is on it when the command says that it may be stopped; then its name is free."""
    url = cluster.urls[0]
    with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:
        assert asked(http, "PUT", "/v1/topics/t", json={"partitions": 6, "replicas": 2}).is_success
        for number in range(6):
            assert (
                201
                == asked(http, "POST", f"/v1/topics/t/partitions/{number}/records", content=b"x").status_code
            )
        node = cluster.members[3].name

        assert EXIT_DONE == command(url, "node", "drain", node)

        assert f"node {node} is drained: safe to stop" in capfd.readouterr().out
        found = until(lambda: if_all_is_known(http, node))
        assert (0, 0, False, True) == (
            found["replicas"],
            found["leads"],
            found["catalog_voter"],
            found["safe_to_stop"],
        )
        assert all(node not in holders(url, f"t/{number}") for number in range(6))
        running = http.delete(f"/v1/admin/nodes/{node}")
        assert (409, "node_in_use") == (running.status_code, running.json()["code"])
        assert "stop it first" in running.json()["detail"]

        cluster.kill(3)
        until(lambda: not http.get(f"/v1/nodes/{node}").json()["alive"])
        assert EXIT_DONE == command(url, "node", "remove", node, "--yes")

        assert node not in [each["node"] for each in http.get("/v1/nodes").json()["nodes"]]
        until(lambda: [] == http.get("/v1/admin/operations").json()["operations"])
        for number in range(6):
            records = asked(http, "GET", f"/v1/topics/t/partitions/{number}/records").json()["records"]
            assert ["x"] == [each["value"] for each in records]


def test_a_topic_grows_and_a_pinned_partition_moves(
    cluster: LocalCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    """`cluster status` names both until they are done, and is well again then."""
    url = cluster.urls[0]
    with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:
        assert asked(http, "PUT", "/v1/topics/t", json={"partitions": 2, "replicas": 1}).is_success
        assert 201 == asked(http, "POST", "/v1/topics/t/partitions/0/records", content=b"x").status_code

        with shards_stopped(cluster, 2, 3):  # so two of four nodes can have a replica
            assert EXIT_DONE == command(url, "topic", "alter", "t", "--replicas", "3")
            listed = http.get("/v1/admin/operations").json()["operations"]
            assert EXIT_FAILED == command(url, "cluster", "status", "--strict")
            said = capfd.readouterr().out
        until(lambda: 3 == len(holders(url, "t/0")) == len(holders(url, "t/1")))

        assert "replicas:t" in [each["id"] for each in listed]
        assert "topic t asks for 3 replicas" in said and "all well" not in said
        until(lambda: EXIT_DONE == command(url, "cluster", "status", "--strict"))
        assert "all well" in capfd.readouterr().out

        nodes = sorted(member.name for member in cluster.members)
        elsewhere = sorted(set(nodes) - holders(url, "t/0"))
        wanted = list(dict.fromkeys([*elsewhere, *nodes]))[:3]
        to = ",".join(wanted)
        assert EXIT_DONE == command(url, "partition", "move", "t/0", "--to", to, "--reason", "a test")
        until(lambda: set(wanted) == holders(url, "t/0"))
        # A node that is to lead both would hand one of them over again.
        to = next(name for name in wanted if name != placement(url, "t/1")["preferred_leader"])
        assert EXIT_DONE == command(url, "leader", "transfer", "t/0", "--to", to)
        until(lambda: (http.get("/v1/topics/t/partitions/0").json()["leader"] or {}).get("node") == to)
        until(lambda: not http.get("/v1/admin/operations").json()["operations"])

        about = placement(url, "t/0")
        assert ("operator", "a test", wanted) == (
            about["pin"]["owner"],
            about["pin"]["reason"],
            about["pin"]["nodes"],
        )
        records = asked(http, "GET", "/v1/topics/t/partitions/0/records").json()["records"]
        assert ["x"] == [each["value"] for each in records]
        until(lambda: EXIT_DONE == command(url, "cluster", "doctor"))
        assert "4 nodes, 2 partitions: nothing found" in capfd.readouterr().out
