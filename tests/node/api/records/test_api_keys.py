"""Appends that say by what they are recognised: done once, however often they are sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from laminar.batch import Header, build
from laminar.batch.header import Flag, set_producer
from laminar.wire.key_route import Route, logical_of_key
from tests.node.api.asking import BATCH, ENVELOPE_LINES, NDJSON, Partition, problem

KEY = "Idempotency-Key"


def one_by_one(http: httpx.Client, topic: str, partitions: int) -> list[list[str]]:
    return [Partition(http, topic, number).values() for number in range(partitions)]


def test_a_request_that_comes_again_gets_the_first_receipt(partition: Partition) -> None:
    """Nothing is appended, also after others were; a request without a key is new each time."""
    first = partition.post("1\n2\n", NDJSON, headers={KEY: "one"})
    partition.append("between")
    again = partition.post("1\n2\n", NDJSON, headers={KEY: "one"})

    assert (200, 200) == (first.status_code, again.status_code)
    assert first.json() == again.json()
    assert "laminar-replayed" not in first.headers
    assert "1" == again.headers["laminar-replayed"]
    assert 201 == partition.post(b"x", headers={KEY: "two"}).status_code
    repeated = partition.post(b"x", headers={KEY: "two"})
    assert (201, f"{partition.path}/records/3") == (repeated.status_code, repeated.headers["location"])
    assert ["1", "2", "between", "x"] == partition.values()


@pytest.mark.parametrize(
    "other",
    [
        {"body": b"y"},
        {"kind": "text/x"},
        {"key": "k"},
        {"headers": {"Laminar-Tag": "t"}},
        {"headers": {"Laminar-Header-A": "a"}},
    ],
    ids=["body", "type", "query", "tag", "header"],
)
def test_another_request_with_the_same_key_is_refused(partition: Partition, other: dict[str, Any]) -> None:
    """All that decides what is appended counts, not the body alone."""
    sent: dict[str, Any] = {"body": b"x", "kind": "application/octet-stream"}
    assert 201 == partition.post(**sent, headers={KEY: "one"}).status_code

    headers = {KEY: "one"} | other.pop("headers", {})
    answer = partition.post(**(sent | other), headers=headers)

    problem(
        answer, 422, "idempotency_key_reused", field="idempotency-key", value="one", outcome="not_applied"
    )
    assert ["x"] == partition.values()


def test_a_retry_is_not_asked_where_the_partition_ends_by_now(partition: Partition) -> None:
    """`If-Match` was true when it was done; for what is new it holds."""
    for headers in ({KEY: "one"}, {"Laminar-Producer": "0f" * 16, "Laminar-Sequence": "0"}):
        end = len(partition.values())
        headers |= {"If-Match": f'"{end}"'}
        assert 201 == partition.post(b"x", headers=headers).status_code
        partition.append("y")
        again = partition.post(b"x", headers=headers)
        assert (201, "1") == (again.status_code, again.headers["laminar-replayed"])
    late = partition.post(b"z", headers={KEY: "two", "If-Match": '"0"'})
    problem(late, 412, "precondition_failed", field="if-match", value=0, limit=4)
    assert ["x", "y", "x", "y"] == partition.values()


def test_batches_take_a_key_together_and_each_by_its_place(partition: Partition) -> None:
    """Also two equal ones; a batch with numbers of its own is recognised by these."""
    body = bytes(build([b"a"])) * 2 + bytes(build([b"b", b"c"]))
    first = partition.post(body, BATCH, headers={KEY: "one"})
    again = partition.post(body, BATCH, headers={KEY: "one"})

    assert first.json() == again.json()
    assert [1, 1, 2] == [each["count"] for each in again.json()["placed"]]
    assert ["a", "a", "b", "c"] == partition.values()
    numbered = bytes(build([b"d"], producer_id=b"p" * 16))
    problem(partition.post(numbered, BATCH, headers={KEY: "two"}), 422, "invalid", field="idempotency-key")


def test_a_batch_that_was_fetched_carries_nobodys_key(partition: Partition, http: httpx.Client) -> None:
    """Appended again it is a new batch, also passed on by another shard; nor does a client give it one."""
    partition.post(b"x", headers={KEY: "one"})
    fetched = partition.fetch(BATCH).content
    assert Header.unpack(fetched).flags & Flag.KEYED

    for _ in range(8):
        answer = partition.post(fetched, BATCH, headers={"Laminar-Keyed-Part": "1"})
        assert (201, None) == (answer.status_code, answer.headers.get("laminar-replayed"))
    forged = build([b"forged"])
    set_producer(forged, producer_id=b"k" * 16, epoch=0, sequence=1, keyed=True)
    for _ in range(2):
        partition.post(bytes(forged), BATCH)
    answer = http.post(
        f"/v1/topics/{partition.topic}/records", content=fetched, headers={"Content-Type": BATCH}
    )
    assert 200 == answer.status_code
    assert ["x"] * 9 + ["forged"] * 2 + ["x"] == partition.values()
    flags = [Header.unpack(partition.fetch(BATCH, offset=offset).content).flags for offset in (1, 9, 11)]
    assert not any(each & Flag.KEYED for each in flags)


@pytest.mark.parametrize("key", [b"", b"two words", b"x" * 256, b"caf\xe9"])
def test_a_key_is_visible_ascii(partition: Partition, key: bytes) -> None:
    """What is not is refused, with what a key may be."""
    answer = partition.http.post(f"{partition.path}/records", content=b"x", headers=[(KEY.encode(), key)])
    problem(answer, 422, "invalid", field="idempotency-key", limit="1 to 255 characters")
    assert 201 == partition.post(b"x", headers={KEY: "!" * 255}).status_code


def test_a_topic_finds_what_a_key_appended_wherever_it_lies(
    http: httpx.Client, new_topic: Callable[..., str]
) -> None:
    """Without keys of records the request's own chooses the partition; with them each part is recognised."""
    topic = new_topic(4)
    path = f"/v1/topics/{topic}/records"
    places = []
    for number in range(6):
        answers = [http.post(path, content=b"x", headers={KEY: f"k{number}"}) for _ in range(3)]
        assert 1 == len({answer.content for answer in answers}), "one receipt"
        assert [None, "1", "1"] == [answer.headers.get("laminar-replayed") for answer in answers]
        places.append(answers[0].json()["placed"][0]["partition"])
    assert 1 < len(set(places)), "keys are spread"
    assert 6 == sum(map(len, one_by_one(http, topic, 4)))

    lines = (
        "".join(f'{{"key":"k{number}","value":"v{number}"}}\n' for number in range(20)) + '{"value":"none"}\n'
    )
    headers = {KEY: "many", "Content-Type": ENVELOPE_LINES}
    first = http.post(path, content=lines, headers=headers)
    again = http.post(path, content=lines, headers=headers)
    assert (200, first.json()) == (again.status_code, again.json())
    assert 4 == len(again.json()["placed"]) and "1" == again.headers["laminar-replayed"]
    problem(
        http.post(path, content=lines + '{"value":"more"}\n', headers=headers), 422, "idempotency_key_reused"
    )
    assert 27 == sum(map(len, one_by_one(http, topic, 4)))


def test_a_request_of_which_a_part_is_missing_is_completed(
    http: httpx.Client, new_topic: Callable[..., str]
) -> None:
    """What one partition has is not appended again, what another lacks is."""
    topic = new_topic(2)
    path = f"/v1/topics/{topic}/records"
    route = Route.even(2)
    keys = {route.partition_of(logical_of_key(b"%d" % number)): str(number) for number in range(20)}
    lines = "".join(f'{{"key":"{keys[number]}","value":"v{number}"}}\n' for number in (0, 1))
    headers = {KEY: "one", "Content-Type": ENVELOPE_LINES}
    # Partition 1 knows the key from another request: so that part alone is refused.
    other = Partition(http, topic, 1).post(b"other", headers={KEY: "one"})
    assert 201 == other.status_code
    refused = http.post(path, content=lines, headers=headers)
    problem(refused, 422, "idempotency_key_reused", outcome="unknown")
    assert "durable in" in refused.json()["detail"]
    assert [["v0"], ["other"]] == one_by_one(http, topic, 2)
    http.post(path, content=lines, headers=headers)
    assert [["v0"], ["other"]] == one_by_one(http, topic, 2)


def test_the_headers_of_a_producer_number_a_body_of_any_type(partition: Partition) -> None:
    """They are what a batch of our client has in its head: in order, once, and fenced by a newer epoch."""

    def sent(body: bytes | str, kind: str | None, sequence: int, epoch: int | None = None) -> httpx.Response:
        headers = {"Laminar-Producer": "AB" * 16, "Laminar-Sequence": str(sequence)}
        if epoch is not None:
            headers["Laminar-Epoch"] = str(epoch)
        return partition.post(body, kind, headers=headers)

    problem(sent(b"x", None, 3), 409, "unknown_producer", value=3, limit=0, outcome="unknown")
    assert 201 == sent(b"a", None, 0).status_code
    assert 200 == sent("1\n2\n", NDJSON, 1).status_code
    again = sent("1\n2\n", NDJSON, 1)
    assert ("1", 1) == (again.headers["laminar-replayed"], again.json()["placed"][0]["offset"])
    assert 201 == sent(bytes(build([b"b"])), BATCH, 2).status_code
    assert (
        201 == partition.post(bytes(build([b"c"], producer_id=b"\xab" * 16, sequence=3)), BATCH).status_code
    )
    problem(sent(b"gap", None, 9), 409, "out_of_sequence", value=9, limit=4, outcome="not_applied")
    assert 201 == sent(b"d", None, 0, 1).status_code
    problem(sent(b"old", None, 4), 409, "fenced", value=0, limit=1, outcome="not_applied")
    assert ["a", "1", "2", "b", "c", "d"] == partition.values()


def test_a_producers_number_may_be_accepted_and_a_key_may_not(partition: Partition) -> None:
    """Who is answered before it is durable must send it again by number; `If-Match` holds for the first."""
    numbered = {"Laminar-Producer": "ab" * 16, "Laminar-Sequence": "0", "If-Match": '"0"'}
    answers = [partition.post(b"x", headers=numbered, ack="accepted") for _ in range(2)]
    assert [(202, None), (202, "1")] == [
        (answer.status_code, answer.headers.get("laminar-replayed")) for answer in answers
    ]
    assert "1" == partition.post(b"x", headers=numbered).headers["laminar-replayed"]
    late = numbered | {"Laminar-Sequence": "1"}
    problem(partition.post(b"y", headers=late, ack="accepted"), 412, "precondition_failed", limit=1)
    problem(partition.post(b"x", headers={KEY: "one"}, ack="accepted"), 422, "invalid", field="ack")
    assert ["x"] == partition.values()


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"Laminar-Sequence": "0"}, "laminar-sequence"),
        ({"Laminar-Epoch": "0"}, "laminar-epoch"),
        ({"Laminar-Producer": "ab" * 16}, "laminar-sequence"),
        ({"Laminar-Producer": "ab" * 15, "Laminar-Sequence": "0"}, "laminar-producer"),
        ({"Laminar-Producer": "00" * 16, "Laminar-Sequence": "0"}, "laminar-producer"),
        ({"Laminar-Producer": "ab" * 16, "Laminar-Sequence": str(2**63)}, "laminar-sequence"),
        ({"Laminar-Producer": "ab" * 16, "Laminar-Sequence": "-1"}, "laminar-sequence"),
        (
            {"Laminar-Producer": "ab" * 16, "Laminar-Sequence": "0", "Laminar-Epoch": str(2**32)},
            "laminar-epoch",
        ),
        ({"Laminar-Producer": "ab" * 16, "Laminar-Sequence": "0", KEY: "one"}, "idempotency-key"),
    ],
)
def test_half_a_producer_is_none(partition: Partition, headers: dict[str, str], field: str) -> None:
    """A promise that can't be read is refused, not ignored."""
    problem(partition.post(b"x", headers=headers), 422, "invalid", field=field)
    assert [] == partition.values()


def test_promises_that_are_not_kept_are_refused(
    partition: Partition, http: httpx.Client, new_topic: Callable[..., str]
) -> None:
    """A producer's numbers are of one partition; nobody may think that any other request is remembered."""
    answer = http.post(
        f"/v1/topics/{new_topic(2)}/records",
        content=b"x",
        headers={"Laminar-Producer": "ab" * 16, "Laminar-Sequence": "0"},
    )
    problem(answer, 422, "invalid", field="laminar-producer")
    answer = http.put("/v1/sinks/nobody/batches/0", headers={KEY: "once"}, content=b"{}")
    problem(answer, 422, "invalid", field="idempotency-key")


def test_a_name_belongs_to_one_id_and_its_next_epoch_fences_the_last(
    partition: Partition, http: httpx.Client
) -> None:
    """Of two processes that take the same name the first is refused from the second's first batch on."""

    def sent(who: dict[str, Any], sequence: int) -> httpx.Response:
        return partition.post(
            b"x",
            headers={
                "Laminar-Producer": who["producer"],
                "Laminar-Epoch": str(who["epoch"]),
                "Laminar-Sequence": str(sequence),
            },
        )

    name = partition.topic
    first, second = (http.post("/v1/producers", json={"name": name}).json() for _ in range(2))
    assert {"producer": first["producer"], "epoch": first["epoch"] + 1, "name": name} == second
    assert 201 == sent(first, 0).status_code
    assert 201 == sent(second, 0).status_code
    problem(sent(first, 1), 409, "fenced", field="producer_epoch", limit=second["epoch"])
    assert 201 == sent(second, 1).status_code
    other = http.post("/v1/producers", json={"name": f"{name}.b"}).json()
    assert other["producer"] != first["producer"]


def test_without_a_name_an_id_is_new(http: httpx.Client) -> None:
    """Nothing is kept of it; what is no name is refused."""
    answers = [http.post("/v1/producers", content=body) for body in (b"", b"{}")]
    assert [201, 201] == [answer.status_code for answer in answers]
    assert [(0, None)] * 2 == [(answer.json()["epoch"], answer.json()["name"]) for answer in answers]
    assert 2 == len({answer.json()["producer"] for answer in answers})
    problem(http.post("/v1/producers", json={"name": "a b"}), 422, "invalid", field="name", value="a b")
    problem(http.post("/v1/producers", json={"nam": "a"}), 422, "invalid", field="nam")


@pytest.mark.parametrize("partitions", [1, 6])
def test_a_key_that_says_its_age_is_never_appended_anew(
    http: httpx.Client, new_topic: Callable[..., str], partitions: int
) -> None:
    """To a partition and to a topic, whose parts go to other shards with it."""
    topic = new_topic(partitions)
    lines = "".join(f'{{"k":"{number}"}}\n' for number in range(20))

    def post(path: str, key: str, made: object) -> httpx.Response:
        headers = {"Idempotency-Key": key, "Laminar-Key-Time": str(made), "Content-Type": NDJSON}
        return http.post(
            f"/v1/topics/{topic}/{path}", content=lines, headers=headers, params={"key_from": "/k"}
        )

    for path in ("records", "partitions/0/records"):
        now_ms = int(time.time() * 1000)
        document = problem(
            post(path, f"old {path}".replace(" ", "-"), now_ms - 25 * 3_600_000), 409, "key_expired"
        )
        assert "unknown" == document["outcome"]
        assert 200 == post(path, f"new-{path}", now_ms).status_code
        again = post(path, f"new-{path}", now_ms - 25 * 3_600_000)
        assert (200, "1") == (again.status_code, again.headers["laminar-replayed"])
        problem(post(path, f"junk-{path}", "soon"), 422, "invalid", field="laminar-key-time")
    answer = http.post(f"/v1/topics/{topic}/records", content="x", headers={"Laminar-Key-Time": "0"})
    problem(answer, 422, "invalid", field="laminar-key-time")
