"""Appends of all kinds at a real node while partitions split, merge and move: HTTP and datagrams."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from laminar.batch import build
from laminar.http.api.append_body import ENVELOPE_LINES_TYPE
from laminar.wire.datagram import NextRoute, Question
from laminar.wire.key_route import LOGICAL_PARTITIONS, Route, logical_of_key
from tests.node.api.asking import BATCH, Partition
from tests.node.api.records.test_api_datagrams import Asker, receipt

NewTopic = Callable[..., str]
KEYS = [f"key-{number}" for number in range(48)]
HALF = LOGICAL_PARTITIONS // 2


@pytest.fixture
def asker(api_url: str) -> Iterator[Asker]:
    made = Asker(api_url)
    yield made
    made.sock.close()


def key_in(first: int, end: int) -> str:
    """Return a key of the logical partitions from `first` to before `end`."""
    return next(f"k{each}" for each in range(100_000) if first <= logical_of_key(f"k{each}") < end)


LOW, HIGH = key_in(0, 10_000), key_in(HALF, LOGICAL_PARTITIONS)


def begin(http: httpx.Client, topic: str, *inputs: int, **more: Any) -> int:
    """Begin a change of the topic's present route; return the version that it makes."""
    after = route_of(http, topic).version
    body = {"after": after, "inputs": list(inputs), "wait_ms": 10_000} | more
    begun = http.post(f"/v1/topics/{topic}/routes", json=body)
    assert begun.status_code in (200, 202), begun.text
    return after + 1


def change(http: httpx.Client, topic: str, *inputs: int, **more: Any) -> Route:
    """Carry a change out; return the new route."""
    version = begin(http, topic, *inputs, **more)
    ended = http.get(f"/v1/topics/{topic}/routes/{version}", params={"wait_ms": 20_000})
    assert (200, "done") == (ended.status_code, ended.json()["state"]), ended.text
    return route_of(http, topic)


def route_of(http: httpx.Client, topic: str) -> Route:
    routes = http.get(f"/v1/topics/{topic}/routes").json()["routes"]
    return Route.from_answer(max(routes, key=lambda each: int(each["version"])))


def lines(*records: tuple[str, str]) -> str:
    return "".join(json.dumps({"value": value, "key": key}) + "\n" for value, key in records)


def post(http: httpx.Client, topic: str, body: str, **headers: str) -> httpx.Response:
    """An append to the topic."""
    return http.post(
        f"/v1/topics/{topic}/records",
        content=body,
        headers={"Content-Type": ENVELOPE_LINES_TYPE} | headers,
    )


def values(http: httpx.Client, topic: str, *numbers: int) -> list[str]:
    return [
        record["value"]
        for number in numbers
        for record in Partition(http, topic, number).records(limit=100_000, max_bytes=1 << 25)
    ]


def refusal(answer: httpx.Response) -> tuple[int, str, str, object]:
    document = answer.json()
    return (answer.status_code, document["code"], document["outcome"], document.get("limit"))


def test_a_client_that_knows_no_routes_sees_no_change(
    http: httpx.Client, api_url: str, new_topic: NewTopic
) -> None:
    """Each of its records is there once, and those of a key in the order in which it sent them."""
    topic = new_topic(2)
    going = threading.Event()
    going.set()
    answers: list[list[httpx.Response]] = [[] for _ in range(3)]
    sent: list[list[tuple[str, str]]] = [[] for _ in range(3)]

    def client(name: int) -> None:
        with httpx.Client(base_url=api_url, timeout=60, trust_env=False) as own:
            number = 0
            while going.is_set():
                records = [(f"{name}-{number}-{row}", KEYS[(number + row) % 48]) for row in range(20)]
                answers[name].append(post(own, topic, lines(*records)))
                sent[name] += records
                number += 1

    clients = [threading.Thread(target=client, args=(name,)) for name in range(3)]
    for each in clients:
        each.start()
    try:
        change(http, topic, 0, cuts=[10_000, 20_000])
        change(http, topic, 3, 4)
        change(http, topic, 5)
        last = change(http, topic, 6, 1)
    finally:
        going.clear()
        for each in clients:
            each.join()

    assert {200} == {each.status_code for mine in answers for each in mine}
    versions = [int(each.headers["laminar-route"]) for each in answers[0]]
    assert sorted(versions) == versions and 4 == last.version
    # An output has a higher number than its inputs: a key's records are read in this order.
    found = values(http, topic, *range(8))
    assert sorted(value for mine in sent for value, _ in mine) == sorted(found)
    places = {value: place for place, value in enumerate(found)}
    for mine in sent:
        for key in KEYS:
            order = [places[value] for value, of in mine if of == key]
            assert sorted(order) == order


def test_a_named_request_is_found_over_changes(http: httpx.Client, new_topic: NewTopic) -> None:
    topic = new_topic(2)
    body = lines(("low", LOW), ("high", HIGH))
    first = post(http, topic, body, **{"Idempotency-Key": "one"})
    change(http, topic, 0, cuts=[10_000])
    change(http, topic, 3, 1)

    again = post(http, topic, body, **{"Idempotency-Key": "one"})
    other = post(http, topic, lines(("other", LOW)), **{"Idempotency-Key": "one"})

    def places(answer: httpx.Response) -> list[tuple[int, int]]:
        return sorted((each["partition"], each["offset"]) for each in answer.json()["placed"])

    assert [(0, 0), (1, 0)] == places(first) == places(again)
    assert "1" == again.headers["laminar-replayed"] and "2" == again.headers["laminar-route"]
    assert (422, "idempotency_key_reused", "not_applied", None) == refusal(other)
    assert ["low", "high"] == values(http, topic, *range(5))


def test_a_partition_that_has_ended_answers_by_number(http: httpx.Client, new_topic: NewTopic) -> None:
    """What it has by its receipt, what it has not by the route that goes on; its producers by their last."""
    topic = new_topic()
    ended = Partition(http, topic)
    producer = {"Laminar-Producer": "7" * 32, "Laminar-Sequence": "0"}
    first = [
        ended.post("a", headers={"Idempotency-Key": "one"}),
        ended.post("b", headers=producer | {"Laminar-Epoch": "2"}),
        ended.post("c", headers={"Idempotency-Key": "two"}, key=LOW),
    ]
    change(http, topic, 0, cuts=[10_000])

    again = [
        ended.post("a", headers={"Idempotency-Key": "one"}),
        ended.post("b", headers=producer | {"Laminar-Epoch": "2"}),
        ended.post("c", headers={"Idempotency-Key": "two"}, key=LOW),
    ]
    assert [each.json()["placed"] for each in first] == [each.json()["placed"] for each in again]
    for new in (
        ended.post("d"),
        ended.post("d", headers={"Idempotency-Key": "three"}),
        ended.post("d", headers=producer | {"Laminar-Epoch": "2", "Laminar-Sequence": "1"}),
        ended.post("d", headers=producer | {"Laminar-Epoch": "3"}),
        ended.post("d", headers={"Laminar-Route": "0"}, key=LOW),
        ended.post("d", key=LOW),
    ):
        assert (409, "sealed", "not_applied", 1) == refusal(new)
    assert (409, "fenced", "not_applied", 2) == refusal(ended.post("d", headers=producer))

    path = f"{ended.path}/producers/{'7' * 32}"
    for answer in (http.put(path, params={"epoch": 5}), http.get(path)):
        assert (True, "1") == (answer.json()["sealed"], answer.headers["laminar-route"])
    assert 5 == http.put(path, params={"epoch": 5}).json()["epoch"]
    assert 404 == http.put(f"{ended.path}/producers/{'8' * 32}", params={"epoch": 1}).status_code
    open_one = http.put(f"/v1/topics/{topic}/partitions/1/producers/{'7' * 32}", params={"epoch": 5})
    assert not open_one.json()["sealed"]


def test_keys_placed_by_an_old_route_are_refused(http: httpx.Client, new_topic: NewTopic) -> None:
    """Appends, stages and uploads; not what the route of before placed in a partition that it still names."""
    topic = new_topic(2)
    change(http, topic, 0, cuts=[10_000])
    split, old = Partition(http, topic, 2), Partition(http, topic, 1)
    stages = f"/v1/sinks/{topic}/batches/1/stages"
    http.post(f"/v1/sinks/{topic}")

    def stage(number: int, stage: int, **headers: str) -> httpx.Response:
        query: dict[str, Any] = {"topic": topic, "partition": number, "stage": stage, "epoch": 1, "key": LOW}
        return http.post(stages, content=b"v", params=query, headers=headers)

    def upload(number: int, **headers: str) -> httpx.Response:
        path = f"/v1/topics/{topic}/partitions/{number}/uploads/{os.urandom(4).hex()}"
        assert 201 == http.put(f"{path}/parts/0", content=b"123456789").status_code
        query: dict[str, Any] = {"parts": 1, "size_bytes": 9, "crc32c": "e3069283", "key": LOW}
        answer = http.post(path, params=query, headers=headers)
        http.delete(path)
        return answer

    for refused in (
        split.post("x", key=LOW),
        split.post("x", key=LOW, headers={"Laminar-Route": "0"}),
        old.post("x", key=HIGH),
        stage(2, 0),
        stage(2, 0, **{"Laminar-Route": "0"}),
        upload(2),
        upload(2, **{"Laminar-Route": "0"}),
    ):
        assert (409, "stale_route", "not_applied", 1) == refusal(refused)
    for taken in (
        split.post("x", key=LOW, headers={"Laminar-Route": "1"}),
        old.post("x", key=HIGH, headers={"Laminar-Route": "0"}),
        split.post("no key"),
        stage(2, 0, **{"Laminar-Route": "1"}),
        stage(1, 1, **{"Laminar-Route": "0"}),
        upload(2, **{"Laminar-Route": "1"}),
    ):
        assert 201 == taken.status_code, taken.text
    assert 422 == split.post("x", headers={"Laminar-Route": "one"}).status_code


def test_a_commit_that_names_an_ended_partition_publishes_nothing(
    http: httpx.Client, new_topic: NewTopic
) -> None:
    """Neither there nor elsewhere; the batch is staged again for the partitions that follow."""
    topic = new_topic(2)
    sink = f"/v1/sinks/{topic}"
    epoch = http.post(sink).json()["epoch"]

    def stage(number: int, stage: int) -> httpx.Response:
        query: dict[str, Any] = {"topic": topic, "partition": number, "stage": stage, "epoch": epoch}
        return http.post(f"{sink}/batches/1/stages", content=b"staged", params=query)

    def commit(*parts: tuple[int, int]) -> httpx.Response:
        named = [{"topic": topic, "partition": number, "stages": [stage]} for number, stage in parts]
        return http.put(f"{sink}/batches/1", json={"epoch": epoch, "parts": named})

    assert 201 == stage(1, 0).status_code
    change(http, topic, 0, cuts=[10_000])

    assert (409, "sealed", "not_applied", 1) == refusal(stage(0, 1))
    assert (409, "sealed", "not_applied", 1) == refusal(commit((0, 1), (1, 0)))
    assert [] == values(http, topic, 0, 1, 2, 3)
    part = http.put(f"/v1/topics/{topic}/partitions/0/uploads/u/parts/0", content=b"x")
    assert (409, "sealed", "not_applied", 1) == refusal(part)

    epoch = http.post(sink).json()["epoch"]
    assert [201, 201] == [stage(1, 0).status_code, stage(2, 1).status_code]
    assert "applied" == commit((1, 0), (2, 1)).json()["result"]
    assert ["staged", "staged"] == values(http, topic, 0, 1, 2, 3)


def test_what_is_in_the_way_of_a_change_is_held_and_dropped(http: httpx.Client, new_topic: NewTopic) -> None:
    """What was begun goes on until the change's time is over; what would begin is told to come again."""
    topic = new_topic()
    sink, later = f"/v1/sinks/{topic}", f"/v1/sinks/{topic}-later"
    epochs = {path: http.post(path).json()["epoch"] for path in (sink, later)}
    query: dict[str, Any] = {"topic": topic, "partition": 0, "stage": 0}

    def stage(path: str) -> httpx.Response:
        return http.post(
            f"{path}/batches/1/stages", content=b"staged", params=query | {"epoch": epochs[path]}
        )

    assert 201 == stage(sink).status_code
    version = begin(http, topic, 0, wait_ms=3_000, abandon=True)

    held: list[tuple[int, str, str, object]] = []
    while not held:
        answer = stage(later)
        if answer.status_code != 201:
            held.append(refusal(answer))
        else:
            http.delete(later)
            epochs[later] = http.post(later).json()["epoch"]
    assert held == [(503, "changing", "not_applied", None)]
    ended = http.get(f"/v1/topics/{topic}/routes/{version}", params={"wait_ms": 20_000})

    assert "done" == ended.json()["state"]
    parts = [{"topic": topic, "partition": 0, "stages": [0]}]
    late = http.put(f"{sink}/batches/1", json={"epoch": epochs[sink], "parts": parts})
    assert (409, "sealed", "not_applied", 1) == refusal(late)
    assert [] == values(http, topic, 0, 1)


def test_datagrams_name_their_route_and_are_given_the_next_one(
    asker: Asker, http: httpx.Client, new_topic: NewTopic
) -> None:
    """A retry has its receipt; of a sealed partition the answer is the route that goes on."""
    topic = new_topic()

    def question(partition: int, sequence: int, route: int | None, key: str | None = LOW) -> bytes:
        keys = None if key is None else [key.encode()]
        frame = build([b"v"], keys=keys, producer_id=asker.producer_id, sequence=sequence)
        return asker.codec.encode_question(Question(topic, partition, os.urandom(8), bytes(frame), route))

    assert 0 == receipt(asker.ask(question(0, 0, None))).offset
    route = change(http, topic, 0, cuts=[10_000])

    again = asker.ask(question(0, 0, None))
    ended = [asker.ask(question(0, 1, said, key)) for said, key in ((1, LOW), (None, LOW), (None, None))]
    stale = asker.ask(question(1, 0, None))
    taken = [asker.ask(question(1, 0, 1)), asker.ask(question(2, 0, None, None))]

    assert (0, True) == (receipt(again).offset, receipt(again).duplicate)
    following = NextRoute(1, ((1, 0, 10_000), (2, 10_000, LOGICAL_PARTITIONS - 10_000)))
    assert [following] * 3 == [each.body for each in ended]
    assert (1, (1, 2)) == (route.version, route.numbers)
    assert isinstance(stale.body, dict)
    assert ("stale_route", 409, 1) == (stale.body["code"], stale.body["status"], stale.body["limit"])
    assert [0, 0] == [receipt(each).offset for each in taken]
    assert 3 == len(values(http, topic, 0, 1, 2))


def test_every_answer_names_the_route(http: httpx.Client, new_topic: NewTopic) -> None:
    topic = new_topic()
    change(http, topic, 0)
    moved = Partition(http, topic, 1)
    accepted = bytes(build([b"v"], producer_id=b"p" * 16))

    answers = [
        moved.post("x"),
        moved.post(accepted, BATCH, ack="accepted"),
        post(http, topic, lines(("y", LOW))),
        moved.fetch(),
        http.get(f"{moved.path}/records/0"),
        http.get(f"{moved.path}/offsets"),
        http.delete(f"{moved.path}/records", params={"before": 1}),
        http.get(f"{moved.path}/producers/{b'p'.hex() * 16}"),
    ]

    assert [201, 202, 200, 200, 200, 200, 200, 200] == [each.status_code for each in answers]
    assert ["1"] * len(answers) == [each.headers["laminar-route"] for each in answers]
    assert 1 == answers[1].json()["route"]
