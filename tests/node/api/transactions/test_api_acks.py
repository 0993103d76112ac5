"""Batches of sinks that acknowledge jobs, as any HTTP client sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from laminar.wire.channels import MAX_ACKS
from tests.node.api.asking import Partition, problem
from tests.node.api.channels.test_api_changed_routes import split
from tests.node.api.channels.test_api_channels import create, path_of
from tests.node.api.channels.test_api_jobs import append, receive, settle
from tests.node.api.transactions.test_api_sinks import begin, stage

NewTopic = Callable[..., str]


def part(topic: str, partition: int, *tokens: str, **more: Any) -> dict[str, Any]:
    return {"topic": topic, "partition": partition, "acks": [{"channel": "c", "tokens": tokens}]} | more


def commit(http: httpx.Client, sink: str, number: int, epoch: int, *parts: dict[str, Any]) -> httpx.Response:
    return http.put(f"/v1/sinks/{sink}/batches/{number}", json={"epoch": epoch, "parts": list(parts)})


def jobs_of(http: httpx.Client, topic: str, count: int, **asked: Any) -> list[dict[str, Any]]:
    """So many jobs that are out, of all partitions."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        given = receive(http, topic, max=count - len(found), **asked)
        assert given, f"{len(found)} of {count}"
        found += given
    return found


def out(http: httpx.Client, topic: str) -> tuple[int, int]:
    shown = http.get(path_of(topic)).json()
    return shown["out"], shown["depth"]


def test_a_batch_writes_its_records_and_ends_its_jobs_at_once(
    http: httpx.Client, new_topic: NewTopic
) -> None:
    """In partitions with acknowledgements only, with records only, and with both; once."""
    topic, results = new_topic(2), new_topic(2)
    create(http, topic)
    create(http, results)
    append(http, topic, *({"value": f"{n}", "key": f"k{n}"} for n in range(8)))
    append(http, results, {"value": "own", "key": "z"})
    tokens: dict[int, list[str]] = {0: [], 1: []}
    for job in jobs_of(http, topic, 8):
        tokens[job["partition"]].append(job["token"])
    assert tokens[0] and tokens[1]
    own = receive(http, results, max=1)[0]
    epoch = begin(http, "acks-1")
    for number in (0, 1):
        assert 201 == stage(http, "acks-1", 0, results, number, "7", epoch=epoch).status_code
    parts = [
        part(topic, 0, *tokens[0]),
        part(topic, 1, *tokens[1][1:]),
        part(results, own["partition"], own["token"], stages=[0]),
        {"topic": results, "partition": 1 - own["partition"], "stages": [0]},
    ]
    before = [len(Partition(http, results, each).values()) for each in (0, 1)]

    assert "applied" == commit(http, "acks-1", 0, epoch, *parts).json()["result"]

    assert out(http, topic) == (1, 1)
    assert [len(Partition(http, results, each).values()) for each in (0, 1)] == [each + 1 for each in before]
    assert "already" == commit(http, "acks-1", 0, epoch, *parts).json()["result"]
    assert settle(http, topic, ack=tokens[0] + tokens[1]) == {"done": 8, "late": []}
    assert settle(http, results, nack=[{"token": own["token"]}])["late"] == [own["token"]]
    assert out(http, topic) == (0, 0)


def test_a_batch_with_a_late_job_is_not_committed(http: httpx.Client, new_topic: NewTopic) -> None:
    """Nothing of it: no record, and no other job; a newer epoch of the sink frees these at once."""
    topic, results = new_topic(2), new_topic(1)
    create(http, topic)
    append(http, topic, *({"value": f"{n}", "key": f"k{n}"} for n in range(8)))
    jobs = jobs_of(http, topic, 8)
    late = next(job for job in jobs if job["partition"] == 1)
    other = next(job for job in jobs if job["partition"] == 0)
    assert settle(http, topic, nack=[{"token": late["token"], "delay_ms": 60_000}])["done"] == 1
    epoch = begin(http, "acks-2")
    stage(http, "acks-2", 0, results, 0, "7", epoch=epoch)
    parts = [
        part(topic, 1, late["token"]),
        part(topic, 0, other["token"]),
        {"topic": results, "partition": 0, "stages": [0]},
    ]

    refused = commit(http, "acks-2", 0, epoch, *parts)
    problem(refused, 409, "late", field="acks", value=late["token"])
    assert refused.json()["outcome"] == "not_applied"
    assert [] == Partition(http, results, 0).values()
    assert http.get(path_of(topic)).json()["pinned"] == 1
    assert settle(http, topic, ack=[other["token"]])["late"] == [other["token"]]
    problem(commit(http, "acks-other", 0, begin(http, "acks-other"), parts[1]), 409, "in_progress")

    newer = begin(http, "acks-2")
    stage(http, "acks-2", 0, results, 0, "7", epoch=newer)
    assert "applied" == commit(http, "acks-2", 0, newer, *parts[1:]).json()["result"]
    assert settle(http, topic, ack=[other["token"]])["done"] == 1
    assert ["7"] == Partition(http, results, 0).values()


def test_a_newer_epoch_refuses_the_older_ones_acknowledgements(
    http: httpx.Client, new_topic: NewTopic
) -> None:
    """Its jobs are not done by it: they come again when their time is over."""
    topic = new_topic(1)
    create(http, topic)
    append(http, topic, {"value": "a"})
    job = receive(http, topic, max=1, timeout_ms=1_000)[0]
    epoch = begin(http, "acks-3")
    newer = begin(http, "acks-3")
    fenced = commit(http, "acks-3", 0, epoch, part(topic, 0, job["token"]))
    problem(fenced, 409, "fenced", limit=newer)
    again = receive(http, topic, max=1, wait_ms=20_000)[0]
    assert (again["value"], again["attempt"]) == ("a", 2)


@pytest.mark.parametrize(
    ("acks", "field", "value"),
    [
        ({"channel": "c", "tokens": ["x"]}, "parts.0.acks.0.tokens.0", "x"),
        ({"channel": "c", "tokens": ["0:0:1", "1:0:1"]}, "parts.0.acks.0.tokens.1", "1:0:1"),
        ({"channel": "c", "tokens": [f"0:0-{MAX_ACKS}:1"]}, "parts.acks", MAX_ACKS + 1),
        ({"channel": "c", "tokens": []}, "parts[0].acks[0].tokens", None),
    ],
)
def test_a_commit_that_cannot_be_names_its_field(
    http: httpx.Client, new_topic: NewTopic, acks: dict[str, Any], field: str, value: Any
) -> None:
    topic = new_topic(1)
    epoch = begin(http, "acks-4")
    answer = commit(http, "acks-4", 0, epoch, {"topic": topic, "partition": 0, "acks": [acks]})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid"), answer.text
    assert (answer.json().get("field"), answer.json().get("value")) == (field, value), answer.text


def test_a_channel_that_is_not_there_is_404(http: httpx.Client, new_topic: NewTopic) -> None:
    topic = new_topic(1)
    answer = commit(http, "acks-5", 0, begin(http, "acks-5"), part(topic, 0, "0:0:1"))
    problem(answer, 404, "no_such_channel")


def test_partitions_that_answer_before_the_sync_take_no_acknowledgements_of_transactions(
    http: httpx.Client, new_topic: NewTopic
) -> None:
    """A power loss could give out again what a decision counts as done."""
    topic = "acks-interval"
    assert (
        201
        == http.put(
            f"/v1/topics/{topic}", json={"partitions": 1, "settings": {"flush": "interval"}}
        ).status_code
    )
    create(http, topic)
    append(http, topic, {"value": "a"})
    job = receive(http, topic, max=1)[0]
    answer = commit(http, "acks-6", 0, begin(http, "acks-6"), part(topic, 0, job["token"]))
    problem(answer, 422, "invalid", field="flush")


def test_jobs_of_a_partition_that_was_split_are_acknowledged_with_what_the_next_one_gets(
    http: httpx.Client, new_topic: NewTopic
) -> None:
    """Pinned before the split, too; until they are done, what follows of their keys waits."""
    topic, results = new_topic(1), new_topic(1)
    create(http, topic, order="key")
    append(http, topic, {"value": "a", "key": "k"}, {"value": "b", "key": "l"})
    first, second = jobs_of(http, topic, 2)
    epoch = begin(http, "acks-7")
    missing = {"topic": results, "partition": 0, "stages": [9]}
    problem(commit(http, "acks-7", 0, epoch, part(topic, 0, first["token"]), missing), 409, "no_stage")
    assert http.get(path_of(topic)).json()["pinned"] == 1
    split(http, topic)
    append(http, topic, {"value": "c", "key": "k"})
    assert receive(http, topic, wait_ms=500) == []

    newer = begin(http, "acks-7")
    assert 201 == stage(http, "acks-7", 0, topic, 1, "7", epoch=newer).status_code
    parts = [part(topic, 0, first["token"], second["token"]), {"topic": topic, "partition": 1, "stages": [0]}]
    assert "applied" == commit(http, "acks-7", 0, newer, *parts).json()["result"]
    assert sorted(job["value"] for job in jobs_of(http, topic, 2)) == ["7", "c"]
