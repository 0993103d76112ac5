"""`/readyz?replicas=current`: whether a node's replicas have what is committed, as their leaders see it."""

from __future__ import annotations

import time
from pathlib import Path

import httpx

from laminar.testing.cluster import LocalCluster
from tests.node.api.asking import problem


def test_a_node_that_comes_back_is_not_current_before_its_leader_has_seen_it_catch_up(tmp_path: Path) -> None:
    """What was appended while it was away is on it by then, whatever moment it says so."""
    with (
        LocalCluster(tmp_path / "three", nodes=3, shards=1) as cluster,
        httpx.Client(timeout=60, trust_env=False) as http,
    ):
        first, last = cluster.members[0].url, cluster.members[2].url
        assert 201 == http.put(f"{first}/v1/topics/t", json={"partitions": 4}).status_code
        until_current(http, last)
        cluster.kill(2)
        deadline = time.monotonic() + 60
        for number in range(4):
            path = f"{first}/v1/topics/t/partitions/{number}/records"
            # Named, as it is asked again where it is not known whether it was taken.
            named = {"idempotency-key": "one"}
            while http.post(path, content=bytes(100_000), headers=named).status_code != 201:
                assert time.monotonic() < deadline

        cluster.restart(2)
        until_current(http, last)

        for number in range(4):
            path = f"{last}/v1/topics/t/partitions/{number}/records"
            found = http.get(path, headers={"laminar-local": "true"}).json()
            assert 1 == len(found["records"]), found


def test_other_values_are_refused(http: httpx.Client) -> None:
    problem(http.get("/readyz?replicas=some"), 422, "invalid", field="replicas")


def until_current(http: httpx.Client, url: str) -> None:
    deadline = time.monotonic() + 60
    while (answer := http.get(f"{url}/readyz?replicas=current")).status_code != 200:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.05)
