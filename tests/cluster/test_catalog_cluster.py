"""Real nodes die one after another: the catalog's votes go to those that live."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from laminar.testing.cluster import LocalCluster
from tests.cluster.patience import PATIENCE_S, told, until

wait = partial(until, patience_s=120.0)


@pytest.fixture
def cluster(real_disk: Path) -> Iterator[LocalCluster]:
    """Five nodes that give up a dead one after one second."""
    with LocalCluster(real_disk / "cluster", nodes=5, shards=1, settings={"replace_after_ms": 1000}) as own:
        yield own


def voters(url: str) -> set[str]:
    """The nodes that vote on the catalog, as this node's view has it."""
    return {each["node"] for each in told(f"{url}/v1/admin/nodes")["nodes"] if each["catalog_voter"]}


def make_topic(url: str, name: str) -> bool:
    path = f"/v1/topics/{name}"
    return httpx.put(url + path, json={"replicas": 2}, trust_env=False, timeout=PATIENCE_S).is_success


def test_three_of_five_nodes_die_one_after_another_and_topics_are_made(cluster: LocalCluster) -> None:
    """Of the first three voters, the founder among them, none is left: the last two have the catalog."""
    *_, url = cluster.urls
    names = [member.name for member in cluster.members]
    # Which nodes vote, and not how many: one that was taken for dead for a moment is no voter for a while.
    wait(lambda: voters(url) == set(names), "all vote")
    for number in (0, 1):
        cluster.kill(number)
        wait(lambda left=set(names[number + 1 :]): voters(url) == left, "the living vote")  # type: ignore[misc]
    cluster.kill(2)
    wait(lambda: make_topic(url, "late"), "the last two make a topic")

    cluster.restart(0)
    left = {names[0], *names[3:]}
    wait(lambda: voters(cluster.urls[0]) == left, "the founder follows the others' catalog")
    wait(lambda: make_topic(cluster.urls[0], "later"), "and a topic is made through it")
