"""A record that is due in two years: over retention, restarts, a node that dies for good, and a split."""

from __future__ import annotations

import time
from typing import Any

import httpx

from laminar.testing.cluster import LocalCluster
from tests.cluster.test_replacement_cluster import holders

MIB = 1 << 20
TWO_YEARS_MS = 2 * 365 * 24 * 3_600_000
PATIENCE_S = 180.0
TOPIC = "later"


def asked(urls: list[str], method: str, path: str, **more: Any) -> httpx.Response:
    """Ask the first node that answers; a leader may be elected meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for url in urls:
            try:
                answer = httpx.request(method, url + path, timeout=30, trust_env=False, **more)
            except httpx.TransportError:
                continue
            if answer.status_code < 500:
                return answer
        assert time.monotonic() < deadline, f"{method} {path} is not answered"
        time.sleep(0.1)


def fill(urls: list[str], mebibytes: int, partition: int = 0) -> None:
    """Append records of 1 MiB, each of which seals a segment."""
    for _ in range(mebibytes):
        path = f"/v1/topics/{TOPIC}/partitions/{partition}/records"
        assert asked(urls, "POST", path, content=b"x" * MIB).status_code == 201


def start_offset(urls: list[str]) -> int:
    found = asked(urls, "GET", f"/v1/topics/{TOPIC}/partitions/0").json()["start_offset"]
    assert isinstance(found, int)
    return found


def until(what: str, holds: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_a_record_that_is_due_in_two_years_is_kept_and_published_once(
    replacing_cluster: LocalCluster,
) -> None:
    """The log before it goes, every process is killed, a node is replaced, its partition ends."""
    urls = list(replacing_cluster.urls)
    settings = {"partitions": 1, "replicas": 3, "settings": {"retention_bytes": 2 * MIB}}
    assert asked(urls, "PUT", f"/v1/topics/{TOPIC}", json=settings).status_code == 201
    path = f"/v1/topics/{TOPIC}/partitions/0/records"
    answer = asked(urls, "POST", path, params={"delay_ms": TWO_YEARS_MS, "key": "k"}, content=b"in two years")
    assert answer.is_success, answer.text
    (named,) = answer.json()["scheduled"]
    delayed = f"/v1/topics/{TOPIC}/delayed/{named}"

    # Retention: what lies beside the record in the log goes, again and again.
    for most in (4, 8):
        fill(urls, 6)
        until("the log does not begin later", lambda most=most: start_offset(urls) >= most)
    assert asked(urls, "GET", delayed).json()["state"] == "pending"

    # Every node is killed and starts again.
    for number in range(4):
        replacing_cluster.kill(number)
    for number in range(4):
        replacing_cluster.spawn(number)
    replacing_cluster.wait_ready()
    assert asked(urls, "GET", delayed).json()["state"] == "pending"

    # One dies for good, and another takes its place.
    nodes = [member.name for member in replacing_cluster.members]
    gone = next(number for number in (3, 2, 1) if nodes[number] in holders(urls[0], TOPIC))
    replacing_cluster.kill(gone)
    rest = [url for number, url in enumerate(urls) if number != gone]
    until(
        "no other node takes its place",
        lambda: len(found := holders(rest[0], TOPIC)) == 3 and nodes[gone] not in found,
    )
    fill(rest, 4)
    assert asked(rest, "GET", delayed).json()["state"] == "pending"

    # Its partition ends, and those that follow have it.
    change = {"after": 0, "inputs": [0], "cuts": [32768]}
    assert asked(rest, "POST", f"/v1/topics/{TOPIC}/routes", json=change).status_code == 202
    until(
        "the partitions that follow have no record",
        lambda: (
            {
                each["partition"]
                for each in asked(rest, "GET", f"/v1/topics/{TOPIC}/delayed").json()["records"]
            }
            in ({1}, {2})
        ),
    )
    (listed,) = asked(rest, "GET", f"/v1/topics/{TOPIC}/delayed").json()["records"]
    assert (listed["id"], listed["key"]) == (named, "k")

    moved = asked(rest, "PATCH", delayed, json={"deliver_at": "now"})
    assert moved.json()["state"] == "pending", moved.text
    where = f"/v1/topics/{TOPIC}/partitions/{listed['partition']}/records"
    records = asked(rest, "GET", where, params={"offset": 0, "wait_ms": 20_000}).json()["records"]
    assert [record["value"] for record in records] == ["in two years"]
    assert asked(rest, "GET", delayed).json()["state"] == "published"
