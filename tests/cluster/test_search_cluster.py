"""A search on three nodes while the leaders of partitions die: its token goes on at another node."""

from __future__ import annotations

import time
from typing import Any

import httpx

from laminar.testing.cluster import LocalCluster
from tests.cluster.appends import append
from tests.cluster.patience import told, until
from tests.cluster.test_channels_cluster import PATIENCE_S, call, leaders

PARTITIONS = 6
RECORDS = 600
# As long as a busy machine may take; the request itself is given up after twice that.
STEP_S = 30
LINES = {"Content-Type": "application/x-ndjson"}


def step(cluster: LocalCluster, node: int, asked: dict[str, Any]) -> dict[str, Any]:
    """One step at a node, again while it cannot serve yet."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        answer = call(cluster, node, "POST", "/v1/topics/t/search", json=asked)
        # A step takes what comes within two seconds, and waits for no node that is gone.
        assert answer.elapsed.total_seconds() < STEP_S
        if answer.status_code == 200 or time.monotonic() > deadline:
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found
        time.sleep(0.05)


def test_every_record_is_found_once_while_leaders_die(cluster: LocalCluster) -> None:
    """Between two steps a node that leads is killed; the next step is asked of another."""
    wish = {"partitions": PARTITIONS, "replicas": 3}
    assert call(cluster, 0, "PUT", "/v1/topics/t", json=wish).status_code in (200, 201)
    with httpx.Client(base_url=cluster.urls[0], timeout=60, trust_env=False) as http:
        for number in range(0, RECORDS, 30):
            lines = "".join(f'{{"n": {n}}}\n' for n in range(number, number + 30))
            path = f"/v1/topics/t/partitions/{number // 30 % PARTITIONS}/records"
            append(http, path, lines, headers=LINES)

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
                until(lambda name=name: name in leaders(cluster, 0).values(), f"{name} leads")  # type: ignore[misc]
                cluster.kill(victim)
                node = 0
        assert steps > 5
        assert len(found) == len(set(found)) == RECORDS
        assert sorted(values) == sorted(f'{{"n": {n}}}' for n in range(RECORDS))
        for partition in range(PARTITIONS):
            own = [offset for number, offset in found if number == partition]
            assert own == sorted(own, reverse=order == "newest")
        cluster.restart(victim)
    for node in range(3):
        for read in ("leader", "replica"):
            path = f"/v1/topics/t/partitions/0/records/0/history?read={read}"
            told = call(cluster, node, "GET", path)
            assert told.status_code == 200, told.text
            assert [each["event"] for each in told.json()["events"]] == ["appended"]


def test_without_a_replica_partitions_stay_in_the_token(cluster: LocalCluster) -> None:
    """The answer is not taken for the end; when the replica is back, its records are found."""
    wish = {"partitions": PARTITIONS, "replicas": 1}
    assert call(cluster, 0, "PUT", "/v1/topics/t", json=wish).status_code in (200, 201)
    lines = "".join(f"{n}\n" for n in range(60))
    with httpx.Client(base_url=cluster.urls[0], timeout=60, trust_env=False) as http:
        for partition in range(PARTITIONS):
            append(http, f"/v1/topics/t/partitions/{partition}/records", lines, headers=LINES)
    led = until(lambda: len(found := leaders(cluster, 0)) == PARTITIONS and found, "all are led") or {}
    gone = [number for number, name in led.items() if name == cluster.members[1].name]
    assert gone

    cluster.kill(1)
    records: list[dict[str, Any]] = []
    answer: dict[str, Any] = {"after": None}

    def go_on() -> None:
        nonlocal answer
        after = {} if answer["after"] is None else {"after": answer["after"]}
        answer = step(cluster, 0, {"limit": 1000, **after})
        records.extend(answer["records"])

    def all_others_are_searched() -> bool:
        """In the first step, unless a replica is slow: a step takes what comes within its time."""
        go_on()
        assert answer["after"] is not None and answer["not_searched"] == []
        return bool(answer["left"]["partitions"] == len(gone))

    until(all_others_are_searched, "the other partitions are searched")
    assert {each["partition"] for each in records} == set(range(PARTITIONS)) - set(gone)
    cluster.restart(1)
    while answer["after"] is not None:
        go_on()
    assert len({(each["partition"], each["offset"]) for each in records}) == len(records) == 60 * PARTITIONS
    told(f"{cluster.urls[1]}/readyz")
