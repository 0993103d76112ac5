"""Searches over HTTP: a topic of several partitions, in steps, with their tokens; what is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from laminar.http.api.documents.find.search import MAX_TOKEN
from laminar.wire.key_route import Route
from tests.node.api.asking import ENVELOPES, problem, unless_overloaded, until

NewTopic = Callable[..., str]


def append(http: httpx.Client, topic: str, *records: dict[str, Any], partition: int | None = None) -> None:
    where = "" if partition is None else f"/partitions/{partition}"
    path, headers = f"/v1/topics/{topic}{where}/records", {"Content-Type": ENVELOPES}
    answer = unless_overloaded(lambda: http.post(path, json={"records": list(records)}, headers=headers))
    assert answer.status_code in (200, 201), answer.text


def step(http: httpx.Client, topic: str, **asked: Any) -> dict[str, Any]:
    answer = http.post(f"/v1/topics/{topic}/search", json=asked)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def step_with(http: httpx.Client, topic: str, count: int, **asked: Any) -> dict[str, Any]:
    """A step that finds `count` records: where a shard is slow it ends before, and is asked again."""
    found: dict[str, Any] = {}

    def is_done() -> bool:
        found.clear()
        found.update(step(http, topic, **asked))
        return len(found["records"]) >= count

    until(is_done, lambda: found)
    return found


def steps(http: httpx.Client, topic: str, **asked: Any) -> Iterator[dict[str, Any]]:
    """Each answer of a search up to its end."""
    while True:
        found = step(http, topic, **asked)
        yield found
        if found["after"] is None:
            return
        asked["after"] = found["after"]


def places(answers: Iterator[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(each["partition"], each["offset"]) for answer in answers for each in answer["records"]]


@pytest.fixture(scope="module")
def filled(http: httpx.Client) -> str:
    """A topic of six partitions, over both shards, with 20 records in each; one key is in all of them."""
    topic = "searched"
    assert http.put(f"/v1/topics/{topic}", json={"partitions": 6}).status_code == 201
    for n in range(20):
        for partition in range(6):
            key = "same" if n == 7 else f"k{n}"
            append(
                http, topic, {"value": f'{{"n": {n}}}', "key": key, "tag": f"t{n % 2}"}, partition=partition
            )
    return topic


def test_everything_is_found_once_in_steps_of_any_size(http: httpx.Client, filled: str) -> None:
    """In both orders; each answer says how far it looked and what is left."""
    everything = sorted((partition, n) for partition in range(6) for n in range(20))
    for order in ("oldest", "newest"):
        for limit in (7, 1000):
            answers = list(steps(http, filled, order=order, limit=limit))
            found = places(iter(answers))
            assert sorted(found) == everything
            for partition in range(6):
                own = [offset for number, offset in found if number == partition]
                assert own == sorted(own, reverse=order == "newest")
            looked = 0
            for answer in answers:
                assert len(answer["records"]) <= limit and not answer["not_searched"]
                looked += answer["searched"]["records"]
                assert looked + answer["left"]["records"] == 120
            assert answers[-1]["left"] == {"records": 0, "partitions": 0}


def test_the_newest_records_of_all_partitions_come_first(http: httpx.Client, filled: str) -> None:
    """By the times of their appends, over partitions."""
    answer = step_with(http, filled, 12, order="newest", limit=12)

    assert sorted(place for place in places(iter([answer]))) == sorted(
        (partition, offset) for partition in range(6) for offset in (18, 19)
    )
    times = [each["timestamp"] for each in answer["records"]]
    assert times == sorted(times, reverse=True)


def test_records_are_found_by_what_they_hold(http: httpx.Client, filled: str) -> None:
    """All parts of `where` must hold."""

    def found(**where: Any) -> list[tuple[int, int]]:
        return sorted(places(steps(http, filled, where=where)))

    assert found(key="same") == [(partition, 7) for partition in range(6)]
    assert found(key_base64="c2FtZQ==", tag="t1") == found(key="same")
    assert found(key="same", tag="t0") == []
    assert found(json={"path": "n", "equals": 3}) == [(partition, 3) for partition in range(6)]
    assert found(contains='"n": 1') == [(partition, n) for partition in range(6) for n in (1, *range(10, 20))]
    own = Route.even(6).partition_of_key("same")
    first = step_with(http, filled, 1, where={"key": "same"}, limit=1)
    assert sorted(places(iter([first]))) and own in range(6)


def test_bounds_are_offsets_times_and_ends(http: httpx.Client, filled: str) -> None:
    """`latest` is the end when the search began; what is appended then is not of it."""

    def found(**asked: Any) -> list[tuple[int, int]]:
        return sorted(places(steps(http, filled, **asked)))

    assert found(partitions=[1], **{"from": {"1": 5}}, to={"1": 8}) == [(1, 5), (1, 6), (1, 7)]
    assert found(**{"from": "latest"}) == []
    assert found(to="earliest") == []
    (tenth,) = step_with(http, filled, 1, partitions=[2], **{"from": {"2": 10}}, limit=1)["records"]
    moment = tenth["timestamp"]
    assert (2, 9) not in found(partitions=[2], **{"from": moment})
    assert (2, 10) in found(partitions=[2], **{"from": moment})
    assert (2, 10) not in found(partitions=[2], to=moment)
    assert found(partitions=[0], to={"0": 99}) == [(0, offset) for offset in range(20)]


def test_the_end_does_not_move(http: httpx.Client, new_topic: NewTopic) -> None:
    """A search of a topic that grows ends."""
    topic = new_topic(1)
    append(http, topic, *({"value": str(n)} for n in range(5)))
    found = []
    asked: dict[str, Any] = {"limit": 1}
    while True:
        answer = step(http, topic, **asked)
        found += [each["value"] for each in answer["records"]]
        append(http, topic, {"value": "later"})
        if answer["after"] is None:
            break
        asked["after"] = answer["after"]
    assert found == ["0", "1", "2", "3", "4"]


def test_a_search_that_follows_hears_of_all_partitions(http: httpx.Client, new_topic: NewTopic) -> None:
    """It waits for the first record; each is found once, also those of partitions made meanwhile."""
    topic = new_topic(4)
    begun = step(http, topic, follow=True, **{"from": "latest"})
    assert begun["records"] == [] and begun["after"] is not None
    sender = threading.Timer(0.3, append, (http, topic, {"value": "new"}), {"partition": 3})
    sender.start()
    answer = step(http, topic, follow=True, wait_ms=20_000, after=begun["after"], **{"from": "latest"})
    sender.join()
    assert [each["value"] for each in answer["records"]] == ["new"]

    change = {"after": 0, "inputs": [0], "cuts": [8192]}
    changed = http.post(f"/v1/topics/{topic}/routes", json=change)
    assert changed.status_code in (200, 202), changed.text
    deadline = time.monotonic() + 90
    while not http.get(f"/v1/topics/{topic}/routes").json()["changes"]:
        assert time.monotonic() < deadline, "the change is not done"
        time.sleep(0.02)
    append(http, topic, *({"value": str(n), "key": f"k{n}"} for n in range(40)))
    found: list[str] = []
    while len(found) < 40:
        asked = {"follow": True, "wait_ms": 1000, "after": answer["after"], "from": "latest"}
        answer = step(http, topic, **asked)
        found += [each["value"] for each in answer["records"]]
        assert time.monotonic() < deadline, found
    assert sorted(found) == sorted(map(str, range(40)))


def test_a_value_is_shown_in_part(http: httpx.Client, new_topic: NewTopic) -> None:
    """And an answer has 4 MiB at most."""
    topic = new_topic(1)
    for _ in range(3):
        append(http, topic, *({"value": "x" * 60_000} for _ in range(30)))

    (short,) = step_with(http, topic, 1, value_bytes=3, limit=1)["records"]
    assert (short["value"], short["size"], short["truncated"]) == ("xxx", 60_000, True)
    answers = list(steps(http, topic, value_bytes=65_536, limit=1000))
    assert len(answers) > 1 and sum(len(each["records"]) for each in answers) == 90
    assert all(sum(each["size"] for each in answer["records"]) <= 4 << 20 for answer in answers)


def test_a_token_is_of_its_search_and_its_topic(http: httpx.Client, new_topic: NewTopic) -> None:
    """Another one is refused, as is a token of a topic that was made anew."""
    topic = new_topic(2)
    append(http, topic, *({"value": str(n)} for n in range(9)), partition=0)
    after = step_with(http, topic, 2, limit=2)["after"]
    path = f"/v1/topics/{topic}/search"

    assert len(step_with(http, topic, 5, limit=5, after=after)["records"]) == 5
    for other in (
        {"where": {"key": "k"}},
        {"order": "newest"},
        {"partitions": [0]},
        {"to": "earliest"},
        {"follow": True},
    ):
        problem(http.post(path, json={"after": after, **other}), 422, "invalid", field="after")
    for text in ("", "x", "!", after[:-3], "gaGh", after + "AA"):
        problem(http.post(path, json={"after": text}), 422, "invalid", field="after")
    problem(http.post(path, json={"after": "x" * (MAX_TOKEN + 1)}), 422, "invalid", field="after")

    etag = http.get(f"/v1/topics/{topic}").headers["etag"]
    assert http.delete(f"/v1/topics/{topic}", headers={"If-Match": etag}).status_code in (202, 204)
    assert http.put(f"/v1/topics/{topic}", json={"partitions": 2}).status_code == 201
    problem(http.post(path, json={"after": after}), 422, "invalid", field="after")


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 1001}, "limit"),
        ({"value_bytes": 65_537}, "value_bytes"),
        ({"wait_ms": 30_001}, "wait_ms"),
        ({"wait_ms": 1}, "wait_ms"),
        ({"order": "random"}, "order"),
        ({"partitions": []}, "partitions"),
        ({"from": "yesterday"}, "from"),
        ({"from": {"9": 1}}, "from.9"),
        ({"to": {"x": 1}}, "to.x"),
        ({"from": {"0": -1}}, "from[...]"),
        ({"from": {"0": 2**60}}, "from[...]"),
        ({"where": {"key": "k", "key_base64": "aw=="}}, "where.key"),
        ({"where": {"key_base64": "!"}}, "where.key_base64"),
        ({"where": {"trace_id": "1"}}, "where.trace_id"),
        ({"where": {"tag": "t" * 256}}, "where.tag"),
        ({"where": {"headers": {str(n): "" for n in range(17)}}}, "where.headers"),
        ({"where": {"contains": ""}}, "where.contains"),
        ({"where": {"json": {"path": "", "equals": 1}}}, "where.json.path"),
        ({"where": {"json": {"path": "a", "equals": [1]}}}, "where.json.equals"),
        ({"where": {"json": {"path": "a", "equals": 2**70}}}, "where.json.equals"),
        ({"where": {"regex": "a"}}, "where.regex"),
        ({"follow": True, "to": "earliest"}, "to"),
        ({"follow": True, "order": "newest"}, "order"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, filled: str, asked: Any, field: str) -> None:
    """With its place in the request."""
    problem(http.post(f"/v1/topics/{filled}/search", json=asked), 422, "invalid", field=field)


def test_what_does_not_exist_is_not_found(http: httpx.Client, filled: str) -> None:
    """A topic, and a partition of one."""
    problem(http.post("/v1/topics/nowhere/search", json={}), 404, "no_such_topic")
    problem(http.post(f"/v1/topics/{filled}/search", json={"partitions": [6]}), 404, "no_such_partition")
