"""A search on three nodes while the leaders of partitions die: its token goes on at another node."""

from __future__ import annotations

import time
from typing import Any

import httpx

from laminar.testing.cluster import LocalCluster
from tests.cluster.test_channels_cluster import PATIENCE_S, call, leaders

PARTITIONS = 6
RECORDS = 600


def step(cluster: LocalCluster, node: int, asked: dict[str, Any]) -> dict[str, Any]:
    """One step at a node, again while it cannot serve yet."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        answer = call(cluster, node, "POST", "/v1/topics/t/search", json=asked)
        if answer.status_code == 200 or time.monotonic() > deadline:
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found
        time.sleep(0.05)


def test_every_record_is_found_once_while_leaders_die(cluster: LocalCluster) -> None:
    """Between two steps a node that leads is killed; the next step is asked of another."""
    wish = {"partitions": PARTITIONS, "replicas": 3}
    assert call(cluster, 0, "PUT", "/v1/topics/t", json=wish).status_code in (200, 201)
    for number in range(0, RECORDS, 30):
        lines = "".join(f'{{"n": {n}}}\n' for n in range(number, number + 30))
        kind = {"Content-Type": "application/x-ndjson"}
        made = call(cluster, 0, "POST", "/v1/topics/t/records", content=lines, headers=kind)
        assert made.status_code == 200, made.text

    for order, victim in (("oldest", 1), ("newest", 2)):
        found: list[tuple[int, int]] = []
        values: list[str] = []
        asked: dict[str, Any] = {"order": order, "limit": 70, "where": {"contains": '"n"'}}
        node, steps = victim, 0
        while True:
            answer = step(cluster, node, asked)
            found += [(each["partition"], each["offset"]) for each in answer["records"]]
            values += [each["value"] for each in answer["records"]]
            assert not answer["not_searched"]
            if answer["after"] is None:
                break
            asked["after"] = answer["after"]
            steps += 1
            if steps == 2:
                name = cluster.members[victim].name
                assert name in leaders(cluster, 0).values()
                cluster.kill(victim)
                node = 0
        assert steps > 5
        assert len(found) == len(set(found)) == RECORDS
        assert sorted(values) == sorted(f'{{"n": {n}}}' for n in range(RECORDS))
        for partition in range(PARTITIONS):
            own = [offset for number, offset in found if number == partition]
            assert own == sorted(own, reverse=order == "newest")
        cluster.restart(victim)


def test_without_a_replica_partitions_stay_in_the_token(cluster: LocalCluster) -> None:
    """The answer is not taken for the end; when the replica is back, its records are found."""
    wish = {"partitions": PARTITIONS, "replicas": 1}
    assert call(cluster, 0, "PUT", "/v1/topics/t", json=wish).status_code in (200, 201)
    kind = {"Content-Type": "application/x-ndjson"}
    lines = "".join(f"{n}\n" for n in range(60))
    for partition in range(PARTITIONS):
        path = f"/v1/topics/t/partitions/{partition}/records"
        assert call(cluster, 0, "POST", path, content=lines, headers=kind).status_code == 200
    gone = [number for number, name in leaders(cluster, 0).items() if name == cluster.members[1].name]
    assert gone

    cluster.kill(1)
    began_s = time.monotonic()
    answer = step(cluster, 0, {"limit": 1000})
    assert time.monotonic() - began_s < 10
    assert {each["partition"] for each in answer["records"]} == set(range(PARTITIONS)) - set(gone)
    assert answer["after"] is not None and answer["left"]["partitions"] == len(gone)
    assert answer["not_searched"] == []
    cluster.restart(1)
    records = answer["records"]
    while answer["after"] is not None:
        answer = step(cluster, 0, {"limit": 1000, "after": answer["after"]})
        records += answer["records"]
    assert len({(each["partition"], each["offset"]) for each in records}) == len(records) == 60 * PARTITIONS
    with httpx.Client(trust_env=False) as client:
        assert client.get(f"{cluster.urls[1]}/readyz").status_code == 200
