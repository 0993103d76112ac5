"""DELETE .../records?before=n, as a client sees it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

import laminar
from tests.node.api.asking import Partition, problem, until


def trim(partition: Partition, **query: Any) -> httpx.Response:
    return partition.http.delete(f"{partition.path}/records", params=query)


def test_records_before_an_offset_are_given_up(partition: Partition) -> None:
    """Whole batches only; what is left keeps its offsets, and reading begins there."""
    partition.append("0", "1")
    partition.append("2", "3", "4")
    partition.append("5")

    answer = trim(partition, before=4)

    assert 200 == answer.status_code, answer.text
    assert {
        "topic": partition.topic,
        "partition": 0,
        "before": 4,
        "dry_run": False,
        "deleted": 2,
        "from_offset": 0,
        "start_offset": 2,
        "rounded_down": True,
        "held_back_by": [],
    } == answer.json()
    assert "2" == answer.headers["laminar-start-offset"]
    assert ["2", "3", "4", "5"] == partition.values()
    problem(partition.fetch(offset=1), 410, "offset_expired", field="offset", value=1, limit=2)
    problem(partition.http.get(f"{partition.path}/records/0"), 410, "offset_expired", value=0, limit=2)
    found = partition.http.get(f"{partition.path}/offsets", params={"at": "earliest"}).json()
    assert (2, 2, 6) == (found["offset"], found["start_offset"], found["end_offset"])
    described = partition.http.get(partition.path).json()
    assert (2, 6) == (described["start_offset"], described["end_offset"])
    assert 6 == partition.append("6")


def test_a_dry_run_says_what_would_go_and_does_nothing(partition: Partition) -> None:
    """The same answer, but for `dry_run`; afterwards all is there."""
    partition.append("0", "1")
    partition.append("2")

    dry = trim(partition, before=2, dry_run="true").json()

    assert (True, 2, 0, 2, False) == (
        dry["dry_run"],
        dry["deleted"],
        dry["from_offset"],
        dry["start_offset"],
        dry["rounded_down"],
    )
    assert ["0", "1", "2"] == partition.values()
    assert dry | {"dry_run": False} == trim(partition, before=2).json()
    assert ["2"] == partition.values()


def test_a_repetition_has_nothing_left_to_do(partition: Partition) -> None:
    """So a retry after a lost answer is harmless, and an older request undoes nothing."""
    partition.append("0")
    partition.append("1")
    trim(partition, before=1)

    for before in (1, 0):
        again = trim(partition, before=before).json()
        assert (0, 1, 1) == (again["deleted"], again["from_offset"], again["start_offset"])
    assert ["1"] == partition.values()


def test_everything_may_be_given_up_but_not_what_is_not_there(partition: Partition) -> None:
    """Up to the end: then the partition is empty, and its offsets go on."""
    partition.append("0", "1")

    problem(trim(partition, before=3), 416, "offset_beyond_end", field="before", value=3, limit=2)
    assert 2 == trim(partition, before=2).json()["deleted"]

    assert [] == partition.values()
    found = partition.http.get(f"{partition.path}/offsets", params={"at": "earliest"}).json()
    assert (2, 2, 2) == (found["offset"], found["start_offset"], found["end_offset"])
    assert 2 == partition.append("2")
    assert ["2"] == partition.values()


@pytest.mark.parametrize(
    ("query", "field", "value"),
    [
        ({}, "before", None),
        ({"before": "-1"}, "before", -1),
        ({"before": "all"}, "before", "all"),
        ({"before": str(2**53 + 1)}, "before", 2**53 + 1),
        ({"before": "0", "dry_run": "maybe"}, "dry_run", "maybe"),
        ({"before": "0", "until": "1"}, "until", "1"),
    ],
)
def test_what_cannot_be_understood_changes_nothing(
    partition: Partition, query: dict[str, str], field: str, value: object
) -> None:
    """422 naming the field and the value; nothing is given up by a typing error."""
    partition.append("0")

    document = problem(trim(partition, **query), 422, "invalid", field=field)

    assert value == document.get("value")
    assert ["0"] == partition.values()


def test_a_cursor_that_was_overtaken_says_so_and_by_how_much(
    http: httpx.Client, partition: Partition
) -> None:
    """In its description, in the list and in the metrics."""
    partition.append("0")
    partition.append("1")
    partition.append("2")
    base = f"/v1/topics/{partition.topic}/cursors"
    assert 200 == http.put(f"{base}/slow", json={"positions": {"0": 0}}).status_code
    assert 200 == http.put(f"{base}/fast", json={"positions": {"0": 3}}).status_code

    trim(partition, before=2)

    told = {each["cursor"]: each for each in http.get(base).json()["cursors"]}
    assert [(True, {"0": 2}), (False, {})] == [
        (told[name]["overtaken"], told[name]["overtaken_by"]) for name in ("slow", "fast")
    ]
    assert told["slow"] == http.get(f"{base}/slow").json()
    where = f'topic="{partition.topic}",consumer="slow"'
    wanted = f"laminar_consumer_overtaken_records_total{{{where}}} 2"
    until(lambda: wanted in http.get("/metrics").text.splitlines())


def test_cursors_outlive_the_records_they_stood_at(http: httpx.Client, partition: Partition) -> None:
    """A cursor is a function of the log, also of the part that is given up."""
    partition.append("0")
    path = f"/v1/topics/{partition.topic}/cursors/billing"
    assert 200 == http.put(path, json={"positions": {"0": 1}}).status_code
    partition.append("1")

    trim(partition, before=2)

    assert {"0": 1} == {
        number: at["position"] if isinstance(at, dict) else at
        for number, at in http.get(path).json()["positions"].items()
    }


@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        ({"retention_ms": 0}, "settings.retention_ms", 0),
        ({"retention_ms": -1}, "settings.retention_ms", -1),
        ({"retention_ms": "1d"}, "settings.retention_ms", "1d"),
        ({"retention_bytes": -1}, "settings.retention_bytes", -1),
        ({"retention_bytes": 2**53}, "settings.retention_bytes", 2**53),
        ({"retention": 1}, "settings.retention", 1),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(
    http: httpx.Client, partition: Partition, settings: dict[str, object], field: str, value: object
) -> None:
    """With its name, what was sent and what may be; the topic keeps the settings it had."""
    path = f"/v1/topics/{partition.topic}"
    etag = http.get(path).headers["etag"]

    answer = http.patch(path, json={"settings": settings}, headers={"If-Match": etag})

    document = problem(answer, 422, "invalid", field=field, value=value)
    assert document.get("limit") is not None or "type" in document["detail"]
    assert {} == http.get(path).json()["settings"]


def test_both_clients_give_up_records(api_url: str, partition: Partition) -> None:
    """`Topic.delete_before` says what went; reading from the earliest goes on behind it."""
    for value in ("0", "1", "2"):
        partition.append(value)

    async def later() -> laminar.Trimmed:
        async with laminar.aio.connect(api_url) as client:
            return await client.topic(partition.topic).delete_before(2)

    with laminar.connect(api_url) as client:
        topic = client.topic(partition.topic)
        dry = topic.delete_before(2, dry_run=True)
        first = topic.delete_before(1)
        second = asyncio.run(later())
        left = [record.value for record in topic.read(start="earliest")]
        with pytest.raises(laminar.Error) as beyond:
            topic.delete_before(4)

    assert (2, 0, 2, True) == (dry.deleted, dry.from_offset, dry.start_offset, dry.dry_run)
    assert (1, 0, 1, False) == (first.deleted, first.from_offset, first.start_offset, first.dry_run)
    assert (1, 1, 2, ()) == (second.deleted, second.from_offset, second.start_offset, second.held_back_by)
    assert [b"2"] == left
    assert ("offset_beyond_end", "before", 4, 3) == (
        beyond.value.code,
        beyond.value.field,
        beyond.value.value,
        beyond.value.limit,
    )
