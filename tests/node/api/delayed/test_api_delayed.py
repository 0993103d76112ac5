"""Delayed records over HTTP: appended, listed, cancelled, moved, published."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from laminar.batch import BATCH_TYPE, build
from laminar.http.api.problems import Problem
from laminar.node.api.delayed.records import buckets_of
from laminar.node.api.delayed.steps import DelayedListing
from laminar.wire.key_route import logical_of_key
from tests.node.api.asking import problem
from tests.node.api.channels.test_api_changed_routes import split

NewTopic = Callable[..., str]

ENVELOPES = {"Content-Type": "application/vnd.laminar.records+json"}
HOUR_MS = 3_600_000
# What a test does before a record is due takes some requests. Where a delay was too short for that, on a slow
# disk, a test begins anew with the next one.
DELAYS_MS = (2_000, 8_000, 25_000)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def append(http: httpx.Client, topic: str, *records: dict[str, Any], **headers: str) -> httpx.Response:
    path = f"/v1/topics/{topic}/records"
    return http.post(path, json={"records": list(records)}, headers=ENVELOPES | headers)


def appended(http: httpx.Client, topic: str, *records: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = append(http, topic, *records, **headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def fetch(http: httpx.Client, topic: str, offset: int, partition: int = 0) -> list[dict[str, Any]]:
    asked = {"offset": offset, "wait_ms": 30_000}
    answer = http.get(f"/v1/topics/{topic}/partitions/{partition}/records", params=asked)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["records"]
    return found


def listed_in(http: httpx.Client, topic: str, partitions: set[int]) -> list[dict[str, Any]]:
    """The records that are pending, as soon as these partitions, and no others, have them."""
    deadline = time.monotonic() + 60
    while True:
        listed: list[dict[str, Any]] = http.get(f"/v1/topics/{topic}/delayed", params={"limit": 100}).json()[
            "records"
        ]
        if {each["partition"] for each in listed} == partitions:
            return listed
        assert time.monotonic() < deadline, listed
        time.sleep(0.02)


def test_a_delayed_record_is_published_when_it_is_due(http: httpx.Client, new_topic: NewTopic) -> None:
    """It has no offset before that, and says then when it was due; a delay counts from the append."""
    for delay_ms in DELAYS_MS:
        topic = new_topic(1)
        before = now_ms()
        receipt = appended(
            http,
            topic,
            {"value": "late", "key": "k", "tag": "t", "delay_ms": delay_ms, "trace_id": "ab" * 16},
        )

        assert (receipt["appended"], receipt["placed"], len(receipt["scheduled"])) == (1, [], 1)
        partition, due_ms, count = map(int, receipt["scheduled"][0].split("."))
        assert (partition, count) == (0, 0) and before + delay_ms <= due_ms <= now_ms() + delay_ms
        at_once = appended(http, topic, {"value": "now"})["placed"]
        if now_ms() < due_ms:
            break
    assert at_once == [{"partition": 0, "offset": 0, "count": 1}]

    (record,) = fetch(http, topic, 1)

    assert now_ms() >= due_ms
    assert (record["value"], record["key"], record["tag"]) == ("late", "k", "t")
    assert record["trace_id"] == "ab" * 16 and "deliver_at" in record
    shown = http.get(f"/v1/topics/{topic}/delayed/{receipt['scheduled'][0]}").json()
    assert shown == {"id": receipt["scheduled"][0], "state": "published"}


def test_one_value_is_delayed_by_its_query(http: httpx.Client, new_topic: NewTopic) -> None:
    """The answer names where it can be asked for, cancelled, and given another time."""
    topic = new_topic(1)
    path = f"/v1/topics/{topic}/partitions/0/records"
    answer = http.post(path, params={"delay_ms": HOUR_MS}, content=b"hi")

    assert answer.status_code == 201
    (named,) = answer.json()["scheduled"]
    where = f"/v1/topics/{topic}/delayed/{named}"
    assert answer.headers["location"] == where
    assert http.get(where).json()["state"] == "pending"
    moved = http.patch(where, json={"deliver_at": "2099-01-01T00:00:00Z"})
    assert moved.json() == {"id": named, "state": "pending", "deliver_at": "2099-01-01T00:00:00.000Z"}
    assert http.get(where).json() == moved.json()
    assert http.patch(where, json={"deliver_at": "now"}).json()["state"] == "pending"
    assert [record["value"] for record in fetch(http, topic, 0)] == ["hi"]
    assert http.delete(where).json() == {"id": named, "state": "published"}


def test_a_cancelled_record_is_never_published(http: httpx.Client, new_topic: NewTopic) -> None:
    """To cancel it again says the same; an id that nobody was given is not found."""
    for delay_ms in DELAYS_MS:
        topic = new_topic(1)
        delayed = [{"value": value, "delay_ms": delay_ms} for value in "ab"]
        first, second = appended(http, topic, *delayed)["scheduled"]
        cancelled = http.delete(f"/v1/topics/{topic}/delayed/{first}")
        if now_ms() < int(first.split(".")[1]):
            break
    assert (cancelled.status_code, cancelled.json()) == (200, {"id": first, "state": "cancelled"})
    assert http.delete(f"/v1/topics/{topic}/delayed/{first}").json()["state"] == "cancelled"
    assert [record["value"] for record in fetch(http, topic, 0)] == ["b"]
    assert http.get(f"/v1/topics/{topic}/delayed/{second}").json()["state"] == "published"

    _, due_ms, _ = second.split(".")
    for unknown in (f"0.{due_ms}.9", f"7.{due_ms}.0"):
        problem(http.delete(f"/v1/topics/{topic}/delayed/{unknown}"), 404, "no_such_delayed_record")
    assert http.get(f"/v1/topics/{topic}/delayed/nonsense").status_code in (404, 422)


def test_pending_records_are_listed_and_counted(http: httpx.Client, new_topic: NewTopic) -> None:
    """Over all partitions in order of their times, in pages, by key, by span of time."""
    topic = new_topic(3)
    start = (now_ms() // HOUR_MS + 2) * HOUR_MS
    sent = [
        {"value": "x" * (n + 1), "key": f"k{n % 5}", "deliver_at": start + (n * 37 % 20) * 60_000}
        for n in range(20)
    ]
    receipt = appended(http, topic, *sent)
    assert len(set(receipt["scheduled"])) == 20 and receipt["placed"] == []
    path = f"/v1/topics/{topic}/delayed"

    seen: list[dict[str, Any]] = []
    asked: dict[str, Any] = {"limit": 6}
    while True:
        page = http.get(path, params=asked).json()
        seen += page["records"]
        if "next" not in page:
            break
        asked["after"] = page["next"]

    assert len(seen) == 20 and {each["id"] for each in seen} == set(receipt["scheduled"])
    times = [each["deliver_at"] for each in seen]
    assert times == sorted(times)
    of_key = http.get(path, params={"key": "k3"}).json()["records"]
    assert len(of_key) == 4 and {each["key"] for each in of_key} == {"k3"}
    some = http.get(path, params={"from": start + 60_000, "to": start + 180_000}).json()["records"]
    assert len(some) == 2
    span = {"from": start, "to": start + HOUR_MS, "bucket_ms": 600_000}
    buckets = http.get(path, params=span).json()["buckets"]
    assert [each["records"] for each in buckets] == [10, 10]
    assert sum(each["bytes"] for each in buckets) == sum(range(1, 21))
    unbounded = http.get(path, params={"bucket_ms": 600_000}).json()["buckets"]
    assert unbounded == buckets, "spans without records count for no limit"


def test_a_repeated_request_schedules_once(http: httpx.Client, new_topic: NewTopic) -> None:
    """It gets the ids of the first one, of each partition."""
    topic = new_topic(3)
    due_ms = now_ms() + HOUR_MS
    records = [{"value": f"{n}", "key": f"k{n}", "deliver_at": due_ms} for n in range(9)]
    first = appended(http, topic, *records, **{"Idempotency-Key": "k"})
    again = append(http, topic, *records, **{"Idempotency-Key": "k"})

    assert again.headers["laminar-replayed"] == "1"
    assert sorted(again.json()["scheduled"]) == sorted(first["scheduled"])
    assert len(http.get(f"/v1/topics/{topic}/delayed").json()["records"]) == 9


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"delay_ms": -1}, "record.delay_ms"),
        ({"delay_ms": 10**15}, "record.delay_ms"),
        ({"delay_ms": 5, "deliver_at": 5}, "record.delay_ms"),
        ({"deliver_at": "tomorrow"}, "record.deliver_at"),
        ({"trace_id": "abc"}, "record.trace_id"),
    ],
)
def test_a_wrong_time_is_named(
    http: httpx.Client, new_topic: NewTopic, record: dict[str, Any], field: str
) -> None:
    """With the field, and nothing is appended."""
    topic = new_topic(1)
    path = f"/v1/topics/{topic}/partitions/0/records"
    refused = problem(http.post(path, json={"value": "a"} | record, headers=ENVELOPES), 422, "invalid")
    assert refused["field"] == field


def test_what_cannot_be_delayed_is_refused(http: httpx.Client, new_topic: NewTopic) -> None:
    """A batch with and without times, an append that does not wait for its commit, one at an offset."""
    topic = new_topic(1)
    path = f"/v1/topics/{topic}/partitions/0/records"
    due_ms = now_ms() + HOUR_MS
    mixed = append(http, topic, {"value": "a", "deliver_at": due_ms}, {"value": "b"})
    assert problem(mixed, 422, "invalid")["field"] == "records[1].deliver_at"

    frame = build([b"a"], delivery_times=[due_ms], producer_id=b"p" * 16)
    head = {"Content-Type": BATCH_TYPE}
    refused = http.post(path, params={"ack": "accepted"}, content=bytes(frame), headers=head)
    assert problem(refused, 422, "invalid")["field"] == "ack"
    at = http.post(path, params={"deliver_at": due_ms}, content=b"a", headers={"If-Match": '"0"'})
    assert problem(at, 422, "invalid")["field"] == "if-match"
    assert http.get(f"/v1/topics/{topic}/delayed").json() == {"records": []}


@pytest.mark.parametrize("due_ms", [253_402_300_800_000, 9_000_000_000_000_000])
def test_a_batch_of_a_client_has_no_time_that_no_id_can_name(
    http: httpx.Client, new_topic: NewTopic, due_ms: int
) -> None:
    """Batches may have later times than texts: such a record could not be cancelled."""
    topic = new_topic(1)
    frame = build([b"a", b"b"], delivery_times=[now_ms() + HOUR_MS, due_ms])
    path = f"/v1/topics/{topic}/partitions/0/records"
    refused = http.post(path, content=bytes(frame), headers={"Content-Type": BATCH_TYPE})
    assert problem(refused, 422, "invalid")["field"] == "records[1].deliver_at"


def test_delayed_records_go_to_the_partitions_that_follow(http: httpx.Client, new_topic: NewTopic) -> None:
    """Each to that of its key, once, with its id, its changed time, and what was cancelled before."""
    topic = new_topic(1)
    due_ms = now_ms() + HOUR_MS
    records = [{"value": f"{n}", "key": f"k{n}", "deliver_at": due_ms + n} for n in range(40)]
    keyless = [{"value": f"free{n}", "deliver_at": due_ms} for n in range(10)]
    ids = [*appended(http, topic, *records)["scheduled"], *appended(http, topic, *keyless)["scheduled"]]
    path = f"/v1/topics/{topic}/delayed"
    assert http.delete(f"{path}/{ids[0]}").json()["state"] == "cancelled"
    assert http.patch(f"{path}/{ids[1]}", json={"deliver_at": due_ms + HOUR_MS}).status_code == 200

    split(http, topic)
    listed = listed_in(http, topic, {1, 2})
    assert sorted(each["id"] for each in listed) == sorted(ids[1:])
    assert listed[-1]["id"] == ids[1]
    assert http.get(f"{path}/{ids[0]}").json()["state"] == "cancelled"
    assert http.delete(f"{path}/{ids[2]}").json()["state"] == "cancelled"
    assert http.delete(f"{path}/{ids[2]}").json()["state"] == "cancelled"
    for named in [ids[1], *ids[3:]]:
        moved = http.patch(f"{path}/{named}", json={"deliver_at": "now"})
        assert moved.json()["state"] == "pending"

    ends = [len([each for each in listed if each["partition"] == number]) for number in (1, 2)]
    ends[next(each["partition"] for each in listed if each["id"] == ids[2]) - 1] -= 1
    found: list[dict[str, Any]] = []
    for partition, end in enumerate(ends, start=1):
        offset = 0
        while offset < end:
            more = fetch(http, topic, offset, partition)
            offset += len(more)
            found += [each | {"at": partition} for each in more]
    keys = {each["key"]: each["at"] for each in found if "key" in each}
    assert sorted(each["value"] for each in found) == sorted(
        [str(n) for n in range(40) if n not in (0, 2)] + [f"free{n}" for n in range(10)]
    )
    assert all(at == (1 if logical_of_key(key) < 32768 else 2) for key, at in keys.items())
    assert http.get(f"{path}/{ids[1]}").json()["state"] == "published"
    assert http.delete(f"/v1/topics/{topic}/partitions/0").status_code == 200
    # The partition that took and cancelled them is gone: it is not known any more what became of them.
    for named in (ids[0], ids[5]):
        assert problem(http.get(f"{path}/{named}"), 410, "delayed_record_ended")["field"] == "id"
    assert http.get(f"{path}/{ids[2]}").json()["state"] == "cancelled"


def test_records_with_keys_of_other_partitions_are_sent_on_too(
    http: httpx.Client, new_topic: NewTopic
) -> None:
    """An append that names a partition may have any key: no partition that follows holds it."""
    topic = new_topic(2)
    due_ms = now_ms() + HOUR_MS
    keys = [f"k{n}" for n in range(30)]
    assert {logical_of_key(key.encode()) < 32768 for key in keys} == {True, False}
    lines = [{"value": key, "key": key, "deliver_at": due_ms} for key in keys]
    path = f"/v1/topics/{topic}/partitions/0/records"
    ids = [http.post(path, json=line, headers=ENVELOPES).json()["scheduled"][0] for line in lines]

    body = {"after": 0, "inputs": [0], "cuts": [16384]}
    changed = http.post(f"/v1/topics/{topic}/routes", json=body)
    assert changed.status_code == 202, changed.text
    listed = listed_in(http, topic, {2, 3})
    assert sorted(each["id"] for each in listed) == sorted(ids)


def test_only_so_many_spans_may_have_records() -> None:
    """Of all partitions together; the length that is needed is named."""
    answers = [
        DelayedListing(buckets={at * 10: (1, 1) for at in range(first, 12_000, 2)}) for first in (0, 1)
    ]

    with pytest.raises(Problem) as refused:
        buckets_of(answers, 10)

    assert ("bucket_ms", 10, 12) == (refused.value.field, refused.value.value, refused.value.limit)
    found = buckets_of(answers[:1], 10).buckets
    assert isinstance(found, list) and len(found) == 6_000
