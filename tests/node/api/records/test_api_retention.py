"""A topic's retention, changed while the node runs: real files, small segments, quick checks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from laminar.testing.nodes import serve
from tests.node.api.asking import Partition, unless_overloaded
from tests.node.api.channels.test_api_channels import create, path_of
from tests.node.api.channels.test_api_jobs import receive, settle

MIB = 1 << 20
SETTINGS: dict[str, str | int] = {
    "segment_size_bytes": MIB,
    "journal_file_bytes": 4 * MIB,
    "retention_check_ms": 20,
}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """A client of a node that looks for old records fifty times a second."""
    with serve(settings=SETTINGS) as url, httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture
def partition(http: httpx.Client, request: pytest.FixtureRequest) -> Partition:
    """The only partition of a topic named after the test."""
    topic = request.node.name[:100]
    assert 201 == http.put(f"/v1/topics/{topic}", json={}).status_code
    return Partition(http, topic)


def patch(partition: Partition, **settings: Any) -> None:
    path = f"/v1/topics/{partition.topic}"
    etag = partition.http.get(path).headers["etag"]
    answer = partition.http.patch(path, json={"settings": settings}, headers={"If-Match": etag})
    assert 200 == answer.status_code, answer.text


def start_offset(partition: Partition) -> int:
    return int(partition.http.get(partition.path).json()["start_offset"])


def fill(partition: Partition, mebibytes: int) -> None:
    """So many records of 1 MiB: each seals a segment."""
    for _ in range(mebibytes):
        assert 201 == unless_overloaded(lambda: partition.post(b"x" * MIB)).status_code


def until_start(partition: Partition, wanted: int) -> None:
    deadline = time.monotonic() + 120
    while start_offset(partition) < wanted:
        assert time.monotonic() < deadline, f"the start stays at {start_offset(partition)}"
        time.sleep(0.01)


def until_all_were_looked_at(partition: Partition) -> None:
    """Wait until the node has looked at every partition since now: twice it trims one of another topic."""
    topic = f"{partition.topic[:90]}-beside"
    assert 201 == partition.http.put(f"/v1/topics/{topic}", json={}).status_code
    beside = Partition(partition.http, topic)
    patch(beside, retention_ms=1)
    for start in (2, 4):
        fill(beside, 2)  # the active segment is not trimmed, so one would stay
        until_start(beside, start)
    assert 202 == partition.http.delete(f"/v1/topics/{topic}", headers={"If-Match": "*"}).status_code


def test_a_bound_on_size_is_kept_as_soon_as_it_is_set_and_as_long(partition: Partition) -> None:
    """Sealed segments count; the active one stays; null lifts the bound."""
    fill(partition, 6)
    assert 0 == start_offset(partition)

    patch(partition, retention_bytes=2 * MIB + 100_000)
    # The entry that moves the start opens a segment too: so the last record's is sealed by then.
    until_start(partition, 4)
    assert 4 == start_offset(partition), "two sealed segments fit"
    described = partition.http.get(partition.path).json()
    assert described["bytes"] < 4 * MIB

    patch(partition, retention_bytes=None)
    fill(partition, 4)
    until_all_were_looked_at(partition)
    assert 4 == start_offset(partition)
    values = partition.http.get(f"{partition.path}/records/4")
    assert MIB == len(values.content)


def test_a_bound_on_age_counts_from_append_times_never_from_the_producers(partition: Partition) -> None:
    """Records that call themselves old are not given up; those appended long ago are."""
    unless_overloaded(lambda: partition.post(b"x" * MIB, timestamp="0"))
    fill(partition, 2)
    patch(partition, retention_ms=3_600_000)
    until_all_were_looked_at(partition)
    assert 0 == start_offset(partition)

    patch(partition, retention_ms=1)

    # The entry that moves the start opens a segment, which seals the one of the last record.
    until_start(partition, 3)
    assert 3 == partition.append("new")
    until_all_were_looked_at(partition)
    assert ["new"] == partition.values(), "the segment that is written to never expires"


def test_a_person_deletes_copies_of_records_that_the_log_has_no_more(partition: Partition) -> None:
    """What a channel has open is kept as a copy; it is deleted by the same command, by its own offset."""
    http, channel = partition.http, path_of(partition.topic)
    create(http, partition.topic, max_attempts=1)
    partition.append("private", "other")
    settle(http, partition.topic, nack=[{"token": job["token"]} for job in receive(http, partition.topic)])
    fill(partition, 4)
    done = 0
    while done < 4:
        jobs = receive(http, partition.topic)
        done += len(jobs)
        settle(http, partition.topic, ack=[job["token"] for job in jobs])
    patch(partition, retention_bytes=MIB)
    until_start(partition, 2)

    def dead() -> list[int]:
        return [job["offset"] for job in http.get(f"{channel}/dead").json()["jobs"]]

    def delete(before: int, **query: str) -> dict[str, Any]:
        answer = http.delete(f"{partition.path}/records", params={"before": before, **query})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    assert dead() == [0, 1]
    delete(1, dry_run="true")
    assert dead() == [0, 1]
    assert delete(1)["deleted"] == 0, "the log itself begins later"
    assert dead() == [1]
    delete(2)
    assert dead() == [] and http.get(channel).json()["partitions"]["0"]["lost"] == 2
