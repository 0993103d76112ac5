"""Records of a channel over HTTP: received, acknowledged, tried again, dead; in the words of a fetch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from laminar.batch import Batch
from laminar.node.api.channels.jobs import FIRST_S
from laminar.wire.channels import JOBS_TYPE
from tests.node.api.asking import problem
from tests.node.api.channels.test_api_channels import create, path_of

NewTopic = Callable[..., str]


def append(http: httpx.Client, topic: str, *records: dict[str, Any]) -> None:
    answer = http.post(f"/v1/topics/{topic}/records", json={"records": list(records)}, headers=ENVELOPES)
    assert answer.status_code == 200, answer.text


ENVELOPES = {"Content-Type": "application/vnd.laminar.records+json"}


def receive(http: httpx.Client, topic: str, **asked: Any) -> list[dict[str, Any]]:
    answer = http.post(f"{path_of(topic)}/receive", json={"wait_ms": 5_000} | asked)
    assert answer.status_code == 200, answer.text
    jobs: list[dict[str, Any]] = answer.json()["jobs"]
    return jobs


def settle(http: httpx.Client, topic: str, **said: Any) -> dict[str, Any]:
    answer = http.post(f"{path_of(topic)}/acks", json=said)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_record_is_received_once_and_is_done_when_acknowledged(
    http: httpx.Client, new_topic: NewTopic
) -> None:
    """It has the words of a fetch, its token and its attempt; nothing is left of it afterwards."""
    topic = new_topic(3)
    create(http, topic)
    append(
        http, topic, *({"value": f"{n}", "key": f"k{n}", "tag": "t", "headers": {"h": "v"}} for n in range(9))
    )

    jobs = [job for _ in range(9) for job in receive(http, topic, max=1)]

    assert sorted(job["value"] for job in jobs) == [f"{n}" for n in range(9)]
    (one,) = (job for job in jobs if job["value"] == "0")
    assert (one["key"], one["tag"], one["headers"], one["attempt"]) == ("k0", "t", {"h": "v"}, 1)
    assert one["token"].startswith(f"{one['partition']}:{one['offset']}:")
    assert receive(http, topic, wait_ms=0) == []
    assert settle(http, topic, ack=[job["token"] for job in jobs]) == {"done": 9, "late": []}
    shown = http.get(path_of(topic)).json()
    assert (shown["depth"], shown["out"], shown["oldest_age_ms"]) == (0, 0, None)


def test_one_request_receives_and_settles(http: httpx.Client, new_topic: NewTopic) -> None:
    """What is said of the last records is carried out first."""
    topic = new_topic(1)
    create(http, topic)
    append(http, topic, *({"value": f"{n}"} for n in range(4)))
    first = receive(http, topic, max=2)

    asked = {"max": 5, "settle": {"ack": [first[0]["token"]], "release": [first[1]["token"]]}}
    answer = http.post(f"{path_of(topic)}/receive", json=asked).json()

    assert answer["settled"] == {"done": 2, "late": []}
    assert [(job["value"], job["attempt"]) for job in answer["jobs"]] == [("1", 1), ("2", 1), ("3", 1)]


def test_a_failed_record_is_listed_dead_replayed_and_dropped(http: httpx.Client, new_topic: NewTopic) -> None:
    """With the reason that its consumer gave."""
    topic = new_topic(1)
    create(http, topic, max_attempts=1, retry_ms=60_000)
    append(http, topic, {"value": "a"}, {"value": "b"}, {"value": "c"})
    a, b, c = receive(http, topic)
    settle(http, topic, nack=[{"token": a["token"], "reason": "no luck"}, {"token": b["token"]}])
    (again,) = http.get(f"{path_of(topic)}/dead", params={"limit": 1}).json()["jobs"]
    assert (again["offset"], again["attempts"], again["reason"]) == (0, 1, "no luck")
    page = http.get(f"{path_of(topic)}/dead", params={"limit": 1}).json()
    rest = http.get(f"{path_of(topic)}/dead", params={"limit": 5, "after": page["next"]}).json()
    assert [job["offset"] for job in rest["jobs"]] == [1] and "next" not in rest

    replayed = http.post(f"{path_of(topic)}/dead", json={"replay": [again["token"]]})
    assert replayed.json() == {"count": 1}
    assert http.post(f"{path_of(topic)}/dead", json={"drop": "all"}).json() == {"count": 1}

    (job,) = receive(http, topic)
    assert (job["value"], job["attempt"]) == ("a", 1)
    assert http.get(f"{path_of(topic)}/dead").json() == {"jobs": []}
    settle(http, topic, ack=[c["token"]])


def test_a_dead_record_of_a_partition_that_is_not_there_is_422(
    http: httpx.Client, new_topic: NewTopic
) -> None:
    """As for `acks`: the token is wrong, and nothing is changed."""
    topic = new_topic(1)
    create(http, topic)
    for what in ("replay", "drop"):
        refused = http.post(f"{path_of(topic)}/dead", json={what: ["0:1:0", "7:1:0"]})
        problem(refused, 422, "invalid", field=what, value=7)


def test_a_record_that_waits_is_listed_with_its_time(http: httpx.Client, new_topic: NewTopic) -> None:
    """What waits for its key says so."""
    topic = new_topic(1)
    create(http, topic, order="key")
    append(http, topic, {"value": "a", "key": "k"}, {"value": "b", "key": "k"})
    (a,) = receive(http, topic)
    settle(http, topic, nack=[{"token": a["token"], "delay_ms": 3_600_000}])

    first, second = http.get(f"{path_of(topic)}/aside").json()["jobs"]

    assert (first["waits_for_key"], second["waits_for_key"]) == (False, True)
    assert first["at"] is not None and second["at"] is None
    assert first["attempts"] == 1
    assert receive(http, topic, wait_ms=50) == []


def test_the_dead_are_looked_for_by_key_tag_and_reason(http: httpx.Client, new_topic: NewTopic) -> None:
    """Each row says its key and tag; a page goes on where the one before it ended, over all partitions."""
    topic = new_topic(3)
    create(http, topic, max_attempts=1)
    rows = [{"value": f"{n}", "key": f"k{n % 4}", "tag": "even" if n % 2 == 0 else "odd"} for n in range(12)]
    append(http, topic, *rows, {"value": "x", "key_base64": "/w=="})
    jobs: list[dict[str, Any]] = []
    while len(jobs) < 13:
        jobs += receive(http, topic, max=20)
    settle(http, topic, nack=[{"token": job["token"], "reason": f"no luck: {job['value']}"} for job in jobs])

    def found(**asked: Any) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = []
        after: str | None = ""
        while after is not None:
            page = http.get(f"{path_of(topic)}/dead", params=asked | {"after": after}).json()
            listed += page["jobs"]
            after = page.get("next")
        return listed

    by_place = {(job["partition"], job["offset"]): job for job in jobs}
    for limit in (1, 5, 100):
        every = found(limit=limit)
        assert [(each["partition"], each["offset"]) for each in every] == sorted(by_place)
        for each in every:
            job = by_place[each["partition"], each["offset"]]
            for name in ("key", "key_base64", "tag"):
                assert each.get(name) == job.get(name), name
            assert "unreadable" not in each
        assert {each["reason"] for each in found(limit=limit, key="k1")} == {
            f"no luck: {n}" for n in (1, 5, 9)
        }
        assert len(found(limit=limit, tag="odd")) == 6
        assert found(limit=limit, key="k1", tag="even") == []
        (one,) = found(limit=limit, reason="luck: 7")
        assert (one["key"], one["tag"]) == ("k3", "odd")
    assert http.get(f"{path_of(topic)}/aside", params={"key": "k1"}).json() == {"jobs": []}


def test_a_channel_is_moved_back_and_forward(http: httpx.Client, new_topic: NewTopic) -> None:
    """By place, by time and by offset; a place that is none is refused by name."""
    topic = new_topic(1)
    create(http, topic)
    append(http, topic, {"value": "a"}, {"value": "b"})
    receive(http, topic)
    path = f"{path_of(topic)}/position"

    assert http.put(path, json={"positions": {"0": 1}}).json() == {"positions": {"0": 1}}
    jobs = receive(http, topic)
    assert [(job["value"], job["attempt"]) for job in jobs] == [("a", 1), ("b", 1)], "a seek costs no attempt"
    assert http.put(path, json={"at": "latest", "drop": True}).json() == {"positions": {"0": 2}}
    assert http.get(path_of(topic)).json()["depth"] == 0
    assert http.put(path, json={"at": "1970-01-01T00:00:00Z"}).json() == {"positions": {"0": 0}}
    for wrong, field in (
        ({"at": "yesterday"}, "at"),
        ({}, "at"),
        ({"positions": {"0": 99}}, "positions.0"),
        ({"positions": {"7": 0}}, "positions"),
    ):
        assert problem(http.put(path, json=wrong), 422, "invalid")["field"] == field, wrong


def test_batches_of_records_are_received_as_they_are(http: httpx.Client, new_topic: NewTopic) -> None:
    """For clients that read batches: runs of offsets with delivery and attempt, and the frames."""
    topic = new_topic(1)
    create(http, topic)
    append(http, topic, *({"value": f"{n}"} for n in range(3)))

    answer = http.post(f"{path_of(topic)}/receive", json={"max": 2}, headers={"Accept": JOBS_TYPE})

    assert answer.headers["content-type"] == JOBS_TYPE
    ((partition, floor, ((first, length, delivery, attempt),), (frame,)),), settled = msgspec.msgpack.decode(
        answer.content
    )
    assert (partition, floor, first, length, attempt, settled) == (0, 0, 0, 2, 1, None)
    assert list(Batch(frame).values)[:2] == [b"0", b"1"]
    assert settle(http, topic, ack=[f"0:0-1:{delivery}"]) == {"done": 2, "late": []}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("receive", {"max": 0}, "max"),
        ("receive", {"timeout_ms": 999}, "timeout_ms"),
        ("acks", {"ack": ["0:1"]}, "ack[0]"),
        ("acks", {"ack": ["0:5-4:1"]}, "ack[0]"),
        ("acks", {"ack": ["0: 0:1"]}, "ack[0]"),
        ("acks", {"ack": ["0:1_0:1"]}, "ack[0]"),
        ("acks", {"ack": ["+0:0:1"]}, "ack[0]"),
        ("acks", {"ack": ["0:1-:1"]}, "ack[0]"),
        ("acks", {"nack": [{"token": "x"}]}, "nack[0]"),
        ("acks", {"ack": ["9:0:1"]}, "tokens"),
        ("acks", {"ack": ["0:0-200000:1"]}, "tokens"),
        ("acks", {"ack": ["0:0:1"] * 1025}, "ack"),
        ("dead", {}, "replay"),
        ("dead", {"replay": "some"}, "replay"),
        ("dead", {"drop": "some"}, "drop"),
        ("dead", {"replay": ["0:1:0", "x"]}, "replay[1]"),
        ("dead", {"drop": ["x"]}, "drop[0]"),
    ],
)
def test_a_request_that_cannot_be_names_its_field(
    http: httpx.Client, new_topic: NewTopic, path: str, body: dict[str, Any], field: str
) -> None:
    topic = new_topic(1)
    create(http, topic)

    answer = http.post(f"{path_of(topic)}/{path}", json=body)

    assert problem(answer, 422, "invalid")["field"] == field


def test_a_channel_that_is_not_there_is_404(http: httpx.Client, new_topic: NewTopic) -> None:
    topic = new_topic(1)
    for path in ("receive", "acks", "dead"):
        answer = http.post(
            f"{path_of(topic, 'absent')}/{path}", json={"drop": "all"} if path == "dead" else {}
        )
        problem(answer, 404, "no_such_channel")


def test_a_consumer_that_is_gone_is_given_nothing(
    api_url: str, http: httpx.Client, new_topic: NewTopic
) -> None:
    """Its request ends with its connection: what comes then is the next consumer's, in its first attempt."""
    for partitions in (1, 3):
        topic = new_topic(partitions)
        create(http, topic)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{api_url}{path_of(topic)}/receive",
                json={"wait_ms": 20_000},
                timeout=httpx.Timeout(5, read=0.5),
                trust_env=False,
            )
        append(http, topic, *({"value": f"{n}", "key": f"k{n}"} for n in range(9)))

        jobs = [job for _ in range(9) for job in receive(http, topic, max=1)]

        assert [1] * 9 == [job["attempt"] for job in jobs]
        assert sorted(job["value"] for job in jobs) == [f"{n}" for n in range(9)]


def test_the_metrics_say_where_a_channel_stands(http: httpx.Client, new_topic: NewTopic) -> None:
    """Summed over the partitions that this node leads, and what it counted of them."""
    while True:
        topic = new_topic(2)
        create(http, topic, max_attempts=1)
        append(http, topic, *({"value": f"{n}", "key": f"k{n}"} for n in range(9)))
        began_s = time.monotonic()
        jobs = [job for _ in range(3) for job in receive(http, topic, max=1)]
        if time.monotonic() - began_s < FIRST_S:
            break  # else two partitions may have been asked at once, and what one gave too much came back
    settle(http, topic, ack=[jobs[0]["token"]], nack=[{"token": jobs[1]["token"]}])
    settle(http, topic, release=[jobs[1]["token"]])

    where = f'{{topic="{topic}",channel="c"}}'
    numbers = (("depth", 7), ("out", 1), ("aside", 0), ("dead", 1), ("lost", 0), ("kept_bytes", 0))
    counts = (("acknowledged", 1), ("redelivered", 0), ("late", 1), ("died", 1), ("overdue", 0))
    every = [*numbers, *((f"{name}_total", number) for name, number in counts)]
    wanted = [f"laminar_channel_{name}{where} {number}" for name, number in every]
    pages = (Path(__file__).parents[4] / "docs" / "operating.md").read_text()
    assert [name for name, _ in every if f"`laminar_channel_{name}`" not in pages] == []
    deadline = time.monotonic() + 120
    while True:  # each shard says what it leads at its own moment
        metrics = http.get("/metrics").text
        found = [line for line in metrics.splitlines() if where in line]
        if found == wanted or time.monotonic() > deadline:
            break
    assert wanted == found
    assert "laminar_channels_acknowledged" in metrics
