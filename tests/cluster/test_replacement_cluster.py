"""A real node dies for good: what it held lives elsewhere soon, and nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from laminar.testing.cluster import LocalCluster, get_json
from tests.cluster.appends import append
from tests.cluster.load import Load, converged, violations
from tests.cluster.patience import asked, told

MIB = 1 << 20
LOADED, KEPT = "loaded", "kept"


def partition(url: str, topic: str) -> dict[str, Any]:
    described: dict[str, Any] = told(f"{url}/v1/topics/{topic}/partitions")["partitions"][0]
    return described


def holders(url: str, topic: str) -> set[str]:
    """The nodes of the replicas that keep up with the leader, itself among them."""
    return {each["node"] for each in partition(url, topic)["replicas"] if each["in_sync"]}


async def until_moved(url: str, topic: str, *, gone: str) -> None:
    deadline = time.monotonic() + 180
    while True:
        found = await asyncio.to_thread(holders, url, topic)
        if len(found) == 3 and gone not in found:
            return
        assert time.monotonic() < deadline, partition(url, topic)
        await asyncio.sleep(0.2)


def metric(url: str, name: str) -> float:
    """A number of a node, of all its processes together."""
    lines = httpx.get(f"{url}/metrics", trust_env=False, timeout=60).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def received_bytes(cluster: LocalCluster, numbers: list[int]) -> float:
    """What these nodes got as whole segments."""
    return sum(metric(cluster.urls[number], "laminar_catch_up_received_bytes_total") for number in numbers)


def until_three_vote(url: str) -> None:
    """In the catalog, as a node knows of it: right after its founding one or two do."""
    deadline = time.monotonic() + 120
    while metric(url, "laminar_catalog_voters") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def until_only_these_vote(cluster: LocalCluster) -> None:
    """In the catalog: while the dead one votes too, the next death leaves no majority.

    A topic may have moved before that, as its replicas and the catalog's are replaced by steps of their own.
    """
    deadline = time.monotonic() + 120
    names = {member.name for member in cluster.members}
    voting: set[str] = set()
    while voting != names:
        assert time.monotonic() < deadline, f"{voting} vote, {names} run"
        time.sleep(0.05)
        listed = get_json(f"{cluster.urls[-1]}/v1/admin/nodes")
        voting = {each["node"] for each in listed["nodes"] if each["catalog_voter"]} if listed else set()


def create(url: str, topic: str) -> None:
    """One partition on three nodes."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        wish = {"partitions": 1, "replicas": 3}
        assert asked(http, "PUT", f"/v1/topics/{topic}", json=wish).is_success


def fill(cluster: LocalCluster) -> None:
    """Two topics, of which one has given up its first records."""
    with httpx.Client(base_url=cluster.urls[0], timeout=60, trust_env=False) as http:
        wish: dict[str, Any] = {"partitions": 1, "replicas": 3}
        assert asked(http, "PUT", f"/v1/topics/{LOADED}", json=wish).is_success
        kept = wish | {"settings": {"retention_bytes": 2 * MIB}}
        assert asked(http, "PUT", f"/v1/topics/{KEPT}", json=kept).is_success
        for _ in range(8):
            append(http, f"/v1/topics/{KEPT}/partitions/0/records", b"x" * MIB)
        deadline = time.monotonic() + 120
        while partition(cluster.urls[0], KEPT)["start_offset"] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.05)


async def test_replicas_of_a_node_that_dies_for_good_live_elsewhere_soon(
    replacing_cluster: LocalCluster,
) -> None:
    """Three replicas each on four nodes, kill -9 of one under load, and it never comes back."""
    await asyncio.to_thread(fill, replacing_cluster)
    for topic in (LOADED, KEPT):
        await until_moved(replacing_cluster.urls[0], topic, gone="nobody")
    in_both = holders(replacing_cluster.urls[0], LOADED) & holders(replacing_cluster.urls[0], KEPT)
    nodes = [member.name for member in replacing_cluster.members]
    number = next(n for n in (3, 2, 1) if nodes[n] in in_both)
    load = Load(replacing_cluster.urls, LOADED)
    load.start()
    await load.more(1000)
    replacing_cluster.kill(number)

    await until_moved(replacing_cluster.urls[0], LOADED, gone=nodes[number])
    await until_moved(replacing_cluster.urls[0], KEPT, gone=nodes[number])

    await load.more(1000)
    await load.finish()
    rest = [n for n in range(4) if n != number]
    assert received_bytes(replacing_cluster, rest) > MIB
    urls = [replacing_cluster.urls[n] for n in rest]
    assert [] == await violations(urls, LOADED, load)
    assert [] == await converged(replacing_cluster, LOADED, 1, replicas=3)
    assert [] == await converged(replacing_cluster, KEPT, 1, replicas=3)


@pytest.fixture
def three(real_disk: Path) -> Iterator[LocalCluster]:
    """No node to spare."""
    with LocalCluster(real_disk / "cluster", shards=1, settings={"replace_after_ms": 3000}) as own:
        yield own


async def test_machines_that_lose_their_folders_one_after_the_other_are_replaced(three: LocalCluster) -> None:
    """The founder, then another; each comes back under a new name. The catalog too lives on."""
    await asyncio.to_thread(create, three.urls[0], LOADED)
    load = Load(three.urls, LOADED)
    load.start()
    for number in (0, 1):
        await load.more(500)
        await asyncio.to_thread(until_only_these_vote, three)
        gone = three.members[number].name
        three.kill(number)
        three.wipe(number)
        three.rename(number)
        await asyncio.to_thread(three.restart, number)
        await until_moved(three.urls[2], LOADED, gone=gone)

    # Of the three that founded the catalog one is left.
    await asyncio.to_thread(create, three.urls[2], KEPT)
    await load.more(500)
    await load.finish()
    assert [] == await violations(three.urls, LOADED, load)
    assert [] == await converged(three, LOADED, 1, replicas=3)


def test_a_topic_made_right_after_a_nodes_death_is_placed_elsewhere(replacing_cluster: LocalCluster) -> None:
    """Gossip needs a second or two to notice; the catalog's leader sees its connections break."""
    until_three_vote(replacing_cluster.urls[0])
    url = replacing_cluster.urls[0]
    dead = replacing_cluster.members[3]
    replacing_cluster.kill(dead.number)
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        made = asked(http, "PUT", "/v1/topics/new", json={"partitions": 8, "replicas": 3})
        assert made.is_success, made.text
        partitions = http.get("/v1/topics/new/partitions").json()["partitions"]

    assert {"live"} == {each["state"] for each in partitions}
    assert dead.name not in {replica["node"] for each in partitions for replica in each["replicas"]}
