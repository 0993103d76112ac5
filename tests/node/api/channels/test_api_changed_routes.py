"""Channels over a change of the topic's route: the order of keys, and what keeps a partition."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx

from tests.node.api.asking import problem
from tests.node.api.channels.test_api_channels import create, path_of
from tests.node.api.channels.test_api_jobs import append, receive, settle

NewTopic = Callable[..., str]


def split(http: httpx.Client, topic: str) -> None:
    """Split partition 0 in two, and wait until that is done."""
    path = f"/v1/topics/{topic}/routes"
    answer = http.post(path, json={"after": 0, "inputs": [0], "cuts": [32768]})
    assert answer.status_code == 202, answer.text
    deadline = time.monotonic() + 120
    while http.get(f"{path}/1").json()["state"] != "done":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_split_says_which_partition_it_can_not_split(http: httpx.Client, new_topic: NewTopic) -> None:
    """One that has ended, one that never was, and one that is named twice are three mistakes."""
    topic = new_topic(1)
    split(http, topic)
    for inputs, detail in (
        ([0], "the partition has ended: others take its records"),
        ([9], "the topic has no partition 9"),
        ([1, 1], "the partition is named twice"),
    ):
        refused = http.post(f"/v1/topics/{topic}/routes", json={"after": 1, "inputs": inputs, "into": 2})
        said = problem(refused, 422, "invalid", field="inputs", value=inputs[0])
        assert said["detail"] == detail and said["limit"] == "2 partitions of route 1, each once"


def records(values: str) -> list[dict[str, Any]]:
    return [{"value": value, "key": f"k{number % 4}"} for number, value in enumerate(values)]


def test_an_ordered_channel_gives_out_what_follows_when_the_partition_before_is_done(
    http: httpx.Client, new_topic: NewTopic
) -> None:
    """Also what was out in the moment of the split, and failed after it. Without order nothing waits."""
    topic = new_topic(1)
    create(http, topic, order="key")
    create(http, topic, "free")
    append(http, topic, *records("abcd"))
    old = receive(http, topic)
    assert sorted(job["value"] for job in old) == list("abcd")
    split(http, topic)
    append(http, topic, *records("efgh"))

    free = http.post(f"{path_of(topic, 'free')}/receive", json={"wait_ms": 5_000, "max": 100}).json()["jobs"]
    while len(free) < 8:
        asked = {"wait_ms": 5_000, "max": 100}
        free += http.post(f"{path_of(topic, 'free')}/receive", json=asked).json()["jobs"]
    assert receive(http, topic, wait_ms=1_000) == [], "a key of an open record is in the partitions after it"
    settle(
        http, topic, ack=[job["token"] for job in old[1:]], nack=[{"token": old[0]["token"], "delay_ms": 0}]
    )
    (again,) = receive(http, topic)
    assert (again["value"], again["attempt"], again["partition"]) == (old[0]["value"], 2, 0)
    assert receive(http, topic, wait_ms=1_000) == []
    settle(http, topic, ack=[again["token"]])

    new = receive(http, topic)
    while len(new) < 4:
        new += receive(http, topic)
    assert sorted(job["value"] for job in new) == list("efgh")
    assert {job["partition"] for job in new} == {1, 2}


def test_a_partition_is_reclaimed_when_all_channels_are_done_with_it(
    http: httpx.Client, new_topic: NewTopic
) -> None:
    """A dead record keeps it, too; afterwards the channel goes on in those that follow."""
    topic = new_topic(1)
    create(http, topic, max_attempts=1)
    append(http, topic, *records("ab"))
    split(http, topic)
    partition = f"/v1/topics/{topic}/partitions/0"

    refused = problem(http.delete(partition), 409, "not_drained")
    assert refused["limit"] == {"c": 0}
    a, b = receive(http, topic)
    settle(http, topic, ack=[a["token"]], nack=[{"token": b["token"]}])
    assert problem(http.delete(partition), 409, "not_drained")["limit"] == {"c": 1}
    assert http.post(f"{path_of(topic)}/dead", json={"drop": "all"}).json() == {"count": 1}

    assert http.delete(partition).status_code == 200

    append(http, topic, *records("cd"))
    jobs = receive(http, topic)
    while len(jobs) < 2:
        jobs += receive(http, topic)
    assert sorted(job["value"] for job in jobs) == ["c", "d"]
