"""Records that are dead, out, or wait for two years: over retention, kills, and a node that dies for good."""

from __future__ import annotations

import uuid
from typing import Any

from laminar.testing.cluster import LocalCluster
from tests.cluster.test_delayed_records import MIB, TWO_YEARS_MS, asked, until
from tests.cluster.test_replacement_cluster import holders

TOPIC = "jobs"
CHANNEL = f"/v1/topics/{TOPIC}/channels/billing"
RECORDS = f"/v1/topics/{TOPIC}/partitions/0/records"


def received(urls: list[str], most: int = 32, *, timeout_ms: int = 60_000) -> list[dict[str, Any]]:
    body = {"max": most, "wait_ms": 20_000, "timeout_ms": timeout_ms}
    found: list[dict[str, Any]] = asked(urls, "POST", f"{CHANNEL}/receive", json=body).json()["jobs"]
    return found


def settled(urls: list[str], **what: Any) -> None:
    answer = asked(urls, "POST", f"{CHANNEL}/acks", json=what).json()
    assert not answer["late"], answer


def start_offset(urls: list[str]) -> int:
    found = asked(urls, "GET", f"/v1/topics/{TOPIC}/partitions/0").json()["start_offset"]
    assert isinstance(found, int)
    return found


def appended(urls: list[str], value: bytes, **query: str) -> None:
    """Append a record, however often it is sent."""
    once = {"Idempotency-Key": uuid.uuid4().hex}
    assert asked(urls, "POST", RECORDS, params=query, content=value, headers=once).status_code == 201


def work_off(urls: list[str], mebibytes: int) -> None:
    """Append records of 1 MiB, each of which seals a segment, and acknowledge them."""
    for _ in range(mebibytes):
        appended(urls, b"x" * MIB)
    done: set[int] = set()
    while len(done) < mebibytes:
        jobs = received(urls)
        settled(urls, ack=[job["token"] for job in jobs])
        done.update(job["offset"] for job in jobs)
    assert mebibytes == len(done)


def test_what_is_open_is_kept_beyond_the_retention_and_given_out_once(
    replacing_cluster: LocalCluster,
) -> None:
    """The log after it goes, every process is killed, a node is replaced: then each comes, as it was."""
    urls = list(replacing_cluster.urls)
    wish = {"partitions": 1, "replicas": 3, "settings": {"retention_bytes": 2 * MIB}}
    assert asked(urls, "PUT", f"/v1/topics/{TOPIC}", json=wish).is_success
    made = asked(urls, "PUT", CHANNEL, json={"settings": {"max_attempts": 2, "retry_ms": 0}})
    assert made.status_code in (200, 201), made.text
    for name in ("dead", "waits", "out"):
        appended(urls, name.encode(), key=name)
    for _ in range(2):
        (job,) = received(urls, 1)
        assert job["value"] == "dead"
        settled(urls, nack=[{"token": job["token"], "reason": "no paper"}])
    (job,) = received(urls, 1)
    settled(urls, nack=[{"token": job["token"], "delay_ms": TWO_YEARS_MS}])
    assert (job["value"], job["offset"]) == ("waits", 1)
    (out,) = received(urls, 1, timeout_ms=3_600_000)
    assert (out["value"], out["attempt"]) == ("out", 1)

    # Retention: what follows goes, again and again.
    for most in (4, 8):
        work_off(urls, 6)
        until("the log does not begin later", lambda most=most: start_offset(urls) >= most)

    # Every node is killed and starts again.
    for number in range(4):
        replacing_cluster.kill(number)
    for number in range(4):
        replacing_cluster.spawn(number)
    replacing_cluster.wait_ready()

    until("not all replicas keep up", lambda: len(holders(urls[0], TOPIC)) == 3)

    # One dies for good, and another takes its place: it gets a log that begins after both records.
    nodes = [member.name for member in replacing_cluster.members]
    gone = next(number for number in (3, 2, 1) if nodes[number] in holders(urls[0], TOPIC))
    replacing_cluster.kill(gone)
    rest = [url for number, url in enumerate(urls) if number != gone]
    until(
        "no other node takes its place",
        lambda: len(found := holders(rest[0], TOPIC)) == 3 and nodes[gone] not in found,
    )
    work_off(rest, 4)

    (dead,) = asked(rest, "GET", f"{CHANNEL}/dead").json()["jobs"]
    assert (dead["offset"], dead["attempts"], dead["reason"]) == (0, 2, "no paper")
    (waits,) = asked(rest, "GET", f"{CHANNEL}/aside").json()["jobs"]
    assert waits["offset"] == 1
    assert asked(rest, "POST", f"{CHANNEL}/dead", json={"replay": "all"}).status_code == 200
    (job,) = received(rest)
    assert (job["value"], job["key"], job["offset"], job["attempt"]) == ("dead", "dead", 0, 1)
    settled(rest, ack=[job["token"]])

    # A move makes what is out due at once, from its copy; then what waits is dropped.
    asked(rest, "PUT", f"{CHANNEL}/position", json={"at": "latest"})
    (job,) = received(rest)
    assert (job["value"], job["key"], job["offset"], job["attempt"]) == ("out", "out", 2, 1)
    late = asked(rest, "POST", f"{CHANNEL}/acks", json={"ack": [out["token"]]}).json()["late"]
    assert late == [out["token"]]
    settled(rest, ack=[job["token"]])
    asked(rest, "PUT", f"{CHANNEL}/position", json={"at": "latest", "drop": True})
    shown = asked(rest, "GET", CHANNEL).json()
    assert (shown["out"], shown["aside"], shown["dead"], shown["lost"]) == (0, 0, 0, 0)
