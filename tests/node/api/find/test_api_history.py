"""What became of a record, over HTTP: deliveries, failures, death, replay, cursors, transactions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.node.api.asking import problem, until
from tests.node.api.channels.test_api_channels import create, path_of
from tests.node.api.channels.test_api_jobs import append, receive, settle
from tests.node.api.delayed.test_api_delayed import fetch

NewTopic = Callable[..., str]


def history(http: httpx.Client, topic: str, offset: int = 0, **query: Any) -> dict[str, Any]:
    """The whole history: one answer, unless the machine is so slow that it ends after its 2 s."""
    found: dict[str, Any] = {}

    def is_whole() -> bool:
        answer = http.get(f"/v1/topics/{topic}/partitions/0/records/{offset}/history", params=query)
        assert answer.status_code == 200, answer.text
        found.update(answer.json())
        return found["after"] is None

    until(is_whole, lambda: found)
    assert found["complete"] and found["left"] == 0
    return found


def words(found: dict[str, Any]) -> list[str]:
    return [each["event"] for each in found["events"]]


def test_a_record_is_followed_from_its_append_to_its_end(http: httpx.Client, new_topic: NewTopic) -> None:
    """Every attempt with its number, its consumer's reason, and when it was due."""
    topic = new_topic(1)
    create(http, topic, max_attempts=3, retry_ms=0)
    create(http, topic, "other")
    append(http, topic, {"value": "a", "key": "k"}, {"value": "b"})
    first = history(http, topic)
    assert words(first) == ["appended"] and first["now"] == {"c": "waiting", "other": "waiting"}
    assert (first["record"]["value"], first["record"]["key"]) == ("a", "k")

    job = receive(http, topic, max=1)[0]
    assert history(http, topic)["now"] == {"c": "out", "other": "waiting"}
    settle(http, topic, release=[job["token"]])
    job = receive(http, topic, max=1)[0]
    settle(http, topic, nack=[{"token": job["token"], "delay_ms": 0, "reason": "no luck"}])
    for _ in range(2):
        job = receive(http, topic, max=1)[0]
        assert job["offset"] == 0
        settle(http, topic, nack=[{"token": job["token"], "delay_ms": 0, "reason": "again"}])
    found = history(http, topic)
    assert words(found) == [
        *("appended", "delivered", "released", "delivered", "nacked"),
        *("delivered", "nacked", "delivered", "dead"),
    ]
    assert [each.get("attempt") for each in found["events"]] == [None, 1, 1, 1, 1, 2, 2, 3, 3]
    assert [each.get("reason") for each in found["events"]][4] == "no luck"
    assert {each.get("channel") for each in found["events"][1:]} == {"c"}
    assert found["now"] == {"c": "dead", "other": "waiting"}
    assert found["events"] == sorted(found["events"], key=lambda each: each["entry"])

    dead = http.get(f"{path_of(topic)}/dead").json()["jobs"]
    assert http.post(f"{path_of(topic)}/dead", json={"replay": [dead[0]["token"]]}).json() == {"count": 1}
    job = receive(http, topic, max=1)[0]
    settle(http, topic, ack=[job["token"]])
    found = history(http, topic)
    assert words(found)[9:] == ["replayed", "delivered", "acked"] and found["now"]["c"] == "done"
    delivered = [each["delivery"] for each in found["events"] if each["event"] == "delivered"]
    assert len(set(delivered)) == len(delivered) and int(job["token"].split(":")[2]) == delivered[-1]

    assert words(history(http, topic, 1)) == ["appended"]


def test_time_outs_filters_order_and_seeks_are_told(http: httpx.Client, new_topic: NewTopic) -> None:
    """What a consumer did not say, and what a person did."""
    topic = new_topic(1)
    create(http, topic, timeout_ms=1000, retry_ms=0)
    create(http, topic, "keyed", order="key")
    create(http, topic, "filtered", filter={"tags": ["t"]})
    append(http, topic, {"value": "a", "key": "k"}, {"value": "b", "key": "k", "tag": "t"})
    given: list[tuple[int, int]] = []
    tokens: dict[int, str] = {}
    while not {(0, 2), (1, 2)} <= set(given):
        (job,) = receive(http, topic, max=1, wait_ms=30_000)
        given.append((job["offset"], job["attempt"]))
        tokens[job["offset"]] = job["token"]
    settle(http, topic, ack=list(tokens.values()))  # or it is late by now: no time runs any more
    http.post(f"{path_of(topic, 'keyed')}/receive", json={"max": 2, "wait_ms": 30_000})
    http.post(f"{path_of(topic, 'filtered')}/receive", json={"max": 2, "wait_ms": 30_000})
    first, second = history(http, topic, 0), history(http, topic, 1)
    assert ("timed_out", "c") in [(each["event"], each.get("channel")) for each in first["events"]]
    assert ("passed", "filtered") in [(each["event"], each.get("channel")) for each in first["events"]]
    assert ("waiting", "keyed") in [(each["event"], each.get("channel")) for each in second["events"]]
    assert first["now"]["keyed"] == "out" and second["now"]["keyed"] == "aside"

    path = f"{path_of(topic, 'keyed')}/position"
    assert http.put(path, json={"at": "latest", "drop": True}).status_code == 200
    assert http.put(path, json={"positions": {"0": 0}}).status_code == 200
    last = [each["event"] for each in history(http, topic)["events"] if each.get("channel") == "keyed"]
    assert last == ["delivered", "sought", "sought"]
    etag = http.get(path_of(topic, "keyed")).headers["etag"]
    assert http.delete(path_of(topic, "keyed"), headers={"If-Match": etag}).status_code == 204
    create(http, topic, "late", start="latest")
    found = history(http, topic)
    assert words(found)[-1] == "closed" and set(found["now"]) == {"c", "filtered"}


def test_cursors_and_delayed_records_are_told(http: httpx.Client, new_topic: NewTopic) -> None:
    """A cursor that passes the record, and goes back; a record that was published when it was due."""
    topic = new_topic(1)
    append(http, topic, {"value": "late", "delay_ms": 1000})  # one that is due on arrival is not delayed
    assert [each["value"] for each in fetch(http, topic, 0)] == ["late"]
    for position in (0, 1, 1, 0):
        body = {"positions": {"0": position}}
        assert http.put(f"/v1/topics/{topic}/cursors/c", json=body).status_code == 200
    found = history(http, topic)
    assert [(each["event"], each.get("cursor")) for each in found["events"]] == [
        ("published", None),
        ("read", "c"),
        ("rewound", "c"),
    ]


def test_what_was_deleted_is_not_complete(http: httpx.Client, new_topic: NewTopic) -> None:
    """What is left of the log is told all the same."""
    topic = new_topic(1)
    create(http, topic)
    path = f"/v1/topics/{topic}/partitions/0/records"
    for n in range(3):
        assert http.post(path, content=str(n)).status_code == 201
    receive(http, topic, max=1)
    answer = http.delete(path, params={"before": 2})
    assert answer.status_code == 200, answer.text
    deadline = time.monotonic() + 60
    while http.get(f"/v1/topics/{topic}/partitions/0").json()["start_offset"] < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    told = http.get(f"{path}/0/history").json()
    assert told["record"] is None and not told["complete"] and told["after"] is None
    assert history(http, topic, 2)["record"]["value"] == "2"


@pytest.mark.parametrize("after", ["x", "!", "gaGh", "A" * 70_000])
def test_what_is_wrong_is_named(http: httpx.Client, new_topic: NewTopic, after: str) -> None:
    """A record that is not there yet; a token that is none; a place that is none."""
    topic = new_topic(1)
    append(http, topic, {"value": "a"})
    path = f"/v1/topics/{topic}/partitions/0/records"
    if len(after) < 10_000:
        problem(http.get(f"{path}/0/history", params={"after": after}), 422, "invalid", field="after")
    problem(http.get(f"{path}/1/history"), 404, "no_such_record")
    problem(http.get(f"{path}/0/history", params={"read": "any"}), 422, "invalid", field="read")
    problem(http.get(f"/v1/topics/{topic}/partitions/9/records/0/history"), 404, "no_such_partition")
