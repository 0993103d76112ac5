"""Real nodes die one after another: the catalog's votes go to those that live."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from laminar.testing.cluster import LocalCluster

WAIT_S = 120.0


@pytest.fixture
def cluster(real_disk: Path) -> Iterator[LocalCluster]:
    """Five nodes that give up a dead one after one second."""
    with LocalCluster(real_disk / "cluster", nodes=5, shards=1, settings={"replace_after_ms": 1000}) as own:
        yield own


def votes(url: str) -> int:
    """How many vote on the catalog, as this node's controller has it."""
    for line in httpx.get(f"{url}/metrics", trust_env=False, timeout=10).text.splitlines():
        if line.startswith("laminar_catalog_voters{"):
            return int(float(line.rsplit(" ", 1)[1]))
    return 0


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def make_topic(url: str, name: str) -> bool:
    answer = httpx.put(f"{url}/v1/topics/{name}", json={"replicas": 2}, trust_env=False, timeout=30)
    return answer.status_code in (200, 201)


def test_three_of_five_nodes_die_one_after_another_and_topics_are_made(cluster: LocalCluster) -> None:
    """Of the first three voters, the founder among them, none is left: the last two have the catalog."""
    *_, url = cluster.urls
    until(lambda: votes(url) == 5, "five vote")
    for number, left in ((0, 4), (1, 3)):
        cluster.kill(number)
        until(lambda left=left: votes(url) == left, f"{left} vote")  # type: ignore[misc]
    cluster.kill(2)
    until(lambda: make_topic(url, "late"), "the last two make a topic")

    cluster.restart(0)
    until(lambda: votes(cluster.urls[0]) == 3, "the founder follows the others' catalog")
    assert make_topic(cluster.urls[0], "later")
