"""Streams of jobs: a bound of those that are out; what ends one makes room, who is gone gives all back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from laminar.testing.nodes import serve
from tests.node.api.asking import problem
from tests.node.api.channels.test_api_channels import create, path_of
from tests.node.api.channels.test_api_jobs import append, receive, settle

NewTopic = Callable[..., str]


class Stream:
    """A stream as a consumer reads it. An event that does not come in time fails the test."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.iter_lines()

    def event(self) -> tuple[str, dict[str, Any]]:
        """The next event: its name and document. Raises `StopIteration` at the end of the stream."""
        name = ""
        for line in self._lines:
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                return name, json.loads(line.removeprefix("data: "))
        raise StopIteration

    def job(self) -> dict[str, Any]:
        name, document = self.event()
        assert name == "job", (name, document)
        return document

    def jobs(self, count: int) -> list[dict[str, Any]]:
        return [self.job() for _ in range(count)]


@contextmanager
def stream(url: str, topic: str, name: str = "c", **asked: Any) -> Iterator[Stream]:
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        path = f"{path_of(topic, name)}/receive"
        with client.stream("POST", path, json=asked, headers={"Accept": "text/event-stream"}) as response:
            if response.status_code != 200:
                response.read()
            yield Stream(response)


def out(http: httpx.Client, topic: str) -> int:
    return int(http.get(path_of(topic)).json()["out"])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.02)


def test_as_many_are_out_as_there_is_credit_for_and_acks_make_room(
    api_url: str, http: httpx.Client, new_topic: NewTopic
) -> None:
    """Over several partitions, led by several processes; each record once, in its first attempt."""
    topic = new_topic(3)
    create(http, topic)
    append(http, topic, *({"value": f"{n}", "key": f"k{n}"} for n in range(30)))

    with stream(api_url, topic, credit=5) as jobs:
        assert "text/event-stream" == jobs.response.headers["content-type"]
        assert "no-store" == jobs.response.headers["cache-control"]
        held = jobs.jobs(5)
        seen = list(held)
        while len(seen) < 30:
            assert 5 == out(http, topic)
            assert {"done": 1, "late": []} == settle(http, topic, ack=[held.pop(0)["token"]])
            held.append(jobs.job())
            seen.append(held[-1])
        assert {"done": 5, "late": []} == settle(http, topic, ack=[each["token"] for each in held])

    assert sorted(str(n) for n in range(30)) == sorted(job["value"] for job in seen)
    assert {1} == {job["attempt"] for job in seen}
    assert (0, 0) == (out(http, topic), http.get(path_of(topic)).json()["depth"])


def test_records_come_when_they_are_appended(api_url: str, http: httpx.Client, new_topic: NewTopic) -> None:
    topic = new_topic(2)
    create(http, topic)
    with stream(api_url, topic) as jobs:
        for number in range(3):
            append(http, topic, {"value": f"{number}"})
            assert f"{number}" == jobs.job()["value"]


@pytest.mark.parametrize("verb", ["nack", "release"])
def test_what_is_given_back_makes_room(
    api_url: str, http: httpx.Client, new_topic: NewTopic, verb: str
) -> None:
    """A released one comes again at once, a refused one after its pause."""
    topic = new_topic(1)
    create(http, topic, retry_ms=3_600_000, retry_max_ms=3_600_000)
    append(http, topic, {"value": "a"}, {"value": "b"})
    with stream(api_url, topic, credit=1) as jobs:
        first = jobs.job()
        token = first["token"]
        settle(http, topic, **{verb: [token if verb == "release" else {"token": token}]})
        second = jobs.job()

    assert ("a", "a" if verb == "release" else "b") == (first["value"], second["value"])
    assert (1, 1) == (first["attempt"], second["attempt"])


def test_a_time_out_makes_room_and_more_time_does_not(
    api_url: str, http: httpx.Client, new_topic: NewTopic
) -> None:
    topic = new_topic(1)
    create(http, topic, retry_ms=3_600_000, retry_max_ms=3_600_000)
    append(http, topic, *({"value": value} for value in "abcd"))
    # So much that what is said of a job mostly comes within its time, also on a slow machine.
    with stream(api_url, topic, credit=1, timeout_ms=3_000) as jobs:
        assert "a" == jobs.job()["value"]
        values = iter("bcd")
        while True:
            job = jobs.job()
            assert next(values) == job["value"]
            extended = time.monotonic()
            if not settle(http, topic, extend=[{"token": job["token"], "timeout_ms": 5_000}])["late"]:
                break
        following = jobs.job()

        assert next(values) == following["value"]
        assert time.monotonic() - extended > 4.9


def test_a_consumer_that_is_gone_gives_all_back_at_once(
    api_url: str, http: httpx.Client, new_topic: NewTopic
) -> None:
    """It costs no attempt; what it has acknowledged stays done."""
    topic = new_topic(2)
    create(http, topic, timeout_ms=3_600_000)
    append(http, topic, *({"value": f"{n}", "key": f"k{n}"} for n in range(8)))
    with stream(api_url, topic, credit=6) as jobs:
        held = jobs.jobs(6)
        settle(http, topic, ack=[held[0]["token"]])
        jobs.job()

    until(lambda: out(http, topic) == 0)
    left: list[dict[str, Any]] = []
    while len(left) < 7:
        left += receive(http, topic, max=10)
    assert {str(n) for n in range(8)} - {held[0]["value"]} == {job["value"] for job in left}
    assert [1] * 7 == [job["attempt"] for job in left]


def test_streams_share_a_channel(api_url: str, http: httpx.Client, new_topic: NewTopic) -> None:
    """Each has its own credit, and no job is given to two; what one leaves the other gets."""
    topic = new_topic(2)
    create(http, topic)
    append(http, topic, *({"value": f"{n}", "key": f"k{n}"} for n in range(10)))
    with stream(api_url, topic, credit=3) as one:
        with stream(api_url, topic, credit=4) as other:
            first, second = one.jobs(3), other.jobs(4)
            assert 7 == out(http, topic)
            settle(http, topic, ack=[job["token"] for job in second])
            left = other.jobs(3)
            assert 10 == len({job["value"] for job in first + second + left})
        settle(http, topic, ack=[job["token"] for job in first])
        again = one.jobs(3)

    assert {job["value"] for job in left} == {job["value"] for job in again}
    assert [1] * 3 == [job["attempt"] for job in again]


def test_a_consumer_that_lets_all_be_late_is_given_no_more(
    api_url: str, http: httpx.Client, new_topic: NewTopic
) -> None:
    """It would use up the attempts of each job. Its stream ends with a problem."""
    topic = new_topic(1)
    create(http, topic, retry_ms=0, max_attempts=100)
    append(http, topic, {"value": "a"}, {"value": "b"})
    attempts = []
    with stream(api_url, topic, credit=100, timeout_ms=1_000) as jobs:
        while (said := jobs.event())[0] == "job":
            attempts.append(said[1]["attempt"])
        with pytest.raises(StopIteration):
            jobs.event()

    assert ("problem", "request_timeout", "credit") == (said[0], said[1]["code"], said[1]["field"])
    assert [1, 1, 2, 2, 3, 3] == sorted(attempts)
    assert [4, 4] == [job["attempt"] for job in receive(http, topic, max=10)], "the last were given back"


def test_one_that_fails_often_is_not_taken_for_one_that_stands_still(
    api_url: str, http: httpx.Client, new_topic: NewTopic
) -> None:
    topic = new_topic(1)
    create(http, topic, retry_ms=0, max_attempts=0)
    append(http, topic, {"value": "a"})
    with stream(api_url, topic, credit=10, timeout_ms=1_000) as jobs:
        for attempt in range(1, 8):
            job = jobs.job()
            assert attempt == job["attempt"]
            settle(http, topic, nack=[{"token": job["token"]}])


def test_a_stream_of_a_channel_that_is_deleted_ends(
    api_url: str, http: httpx.Client, new_topic: NewTopic
) -> None:
    """Whether it waits for records or for its consumer."""
    for records in (0, 2):
        topic = new_topic(1)
        create(http, topic)
        if records:
            append(http, topic, *({"value": "x"} for _ in range(records)))
        with stream(api_url, topic, credit=1) as jobs:
            jobs.jobs(min(records, 1))
            assert 204 == http.delete(path_of(topic)).status_code
            name, document = jobs.event()
            assert ("problem", "no_such_channel") == (name, document["code"])


def test_there_is_a_limit_of_streams() -> None:
    """It is named, and who ends one makes room for another."""
    with serve(settings={"max_job_streams": 2}) as url:
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
            assert 201 == http.put("/v1/topics/t", json={}).status_code
            create(http, "t")
            append(http, "t", {"value": "a"})
            with stream(url, "t", credit=1) as one:
                one.job()
                with stream(url, "t") as two, stream(url, "t") as three:
                    assert 200 == two.response.status_code
                    said = problem(three.response, 429, "quota", field="max_job_streams", value=3, limit=2)
                    assert said["outcome"] == "not_applied"

            def accepted() -> bool:
                with stream(url, "t") as four:
                    return four.response.status_code == 200

            until(accepted)


@pytest.mark.parametrize("credit", [0, 1_001, "many"])
def test_a_credit_is_a_number_within_bounds(http: httpx.Client, new_topic: NewTopic, credit: object) -> None:
    topic = new_topic()
    create(http, topic)
    headers = {"Accept": "text/event-stream"}
    refused = http.post(f"{path_of(topic)}/receive", json={"credit": credit}, headers=headers)
    problem(refused, 422, "invalid", field="credit")


def test_credit_is_of_a_stream(http: httpx.Client, new_topic: NewTopic) -> None:
    topic = new_topic()
    create(http, topic)
    refused = http.post(f"{path_of(topic)}/receive", json={"credit": 5})
    assert "text/event-stream" in problem(refused, 422, "invalid", field="credit", value=5)["detail"]
    missing = http.post(
        f"{path_of(topic, 'absent')}/receive", json={}, headers={"Accept": "text/event-stream"}
    )
    problem(missing, 404, "no_such_channel")
