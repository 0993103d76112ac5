"""The window, as any HTTP client sees it: 202 is no receipt, and an answer tells what is durable."""

from __future__ import annotations

from typing import Any

import httpx

from laminar.batch import build
from tests.node.api.asking import BATCH, Partition, problem

PRODUCER = b"w" * 16


def batch(sequence: int, *values: bytes, epoch: int = 0, **more: Any) -> bytes:
    return bytes(build(list(values), producer_id=PRODUCER, producer_epoch=epoch, sequence=sequence, **more))


def told(partition: Partition, **query: Any) -> httpx.Response:
    return partition.http.get(f"{partition.path}/producers/{PRODUCER.hex()}", params=query)


def test_an_accepted_batch_is_said_not_to_be_durable(partition: Partition) -> None:
    """202 without any member of a receipt; what is durable is told by term and committed end."""
    answer = partition.post(batch(0, b"a", b"b", checkpoint=9, floor=4), BATCH, ack="accepted")

    assert 202 == answer.status_code, answer.text
    body = answer.json()
    term = int(answer.headers["laminar-term"])
    assert (False, 0, 0, 2, term, 0) == tuple(
        body[name] for name in ("durable", "partition", "offset", "count", "term", "route")
    )
    assert not {"placed", "appended"} & body.keys()
    assert str(body["committed"]) == answer.headers["laminar-committed"]

    later = told(partition, epoch=0, sequence=0, wait_ms=10_000)
    assert 200 == later.status_code, later.text
    assert {
        "topic": partition.topic,
        "partition": 0,
        "producer": PRODUCER.hex(),
        "epoch": 0,
        "sequence": 0,
        "committed_sequence": 0,
        "checkpoint": 9,
        "floor": 4,
        "sealed": False,
    } == later.json()
    assert (str(term), "2") == (later.headers["laminar-term"], later.headers["laminar-committed"])
    assert ["a", "b"] == partition.values()


def test_every_receipt_carries_the_window(partition: Partition) -> None:
    """Of one record and of several; what it acknowledges lies before the committed end it names."""
    one = partition.post(b"x")
    two = partition.post(batch(0, b"a", b"b"), BATCH)

    assert [201, 200] == [one.status_code, two.status_code]
    assert ["1", "3"] == [each.headers["laminar-committed"] for each in (one, two)]
    assert one.headers["laminar-term"] == two.headers["laminar-term"]
    assert ["0", "0"] == [each.headers["laminar-route"] for each in (one, two)]


def test_an_answer_to_several_batches_carries_the_last_window(partition: Partition) -> None:
    """Also where the last of them was appended before, and so was acknowledged before the others."""
    partition.post(batch(0, b"a"), BATCH)
    new = bytes(build([b"b", b"c"], producer_id=b"v" * 16, sequence=0))

    both = partition.post(new + batch(0, b"a"), BATCH)

    assert [1, 0] == [each["offset"] for each in both.json()["placed"]], both.text
    assert "3" == both.headers["laminar-committed"]


def test_only_what_may_be_sent_again_is_accepted(partition: Partition) -> None:
    """Records without a producer, or several batches, would be lost or doubled without a word."""
    for body, kind in ((b"x", None), (bytes(build([b"x"])), BATCH), (batch(0, b"a") + batch(1, b"b"), BATCH)):
        answer = partition.post(body, kind, ack="accepted")
        problem(answer, 422, "invalid", field="ack", value="accepted", limit="committed")
    wrong = partition.post(b"x", ack="perhaps")
    problem(wrong, 422, "invalid", field="ack", value="perhaps", limit="committed, accepted")
    assert [] == partition.values()


def test_an_epoch_that_begins_shuts_the_older_out(partition: Partition) -> None:
    """It is told how far they got; a gap and an older epoch are refused as for a receipt."""
    path = f"{partition.path}/producers/{PRODUCER.hex()}"
    problem(told(partition), 404, "no_such_producer", field="producer", value=PRODUCER.hex())
    assert 202 == partition.post(batch(0, b"a", checkpoint=7), BATCH, ack="accepted").status_code
    gap = partition.post(batch(2, b"c"), BATCH, ack="accepted")
    problem(gap, 409, "out_of_sequence", field="sequence", value=2, limit=1, outcome="not_applied")

    begun = partition.http.put(path, params={"epoch": 3})

    assert 200 == begun.status_code, begun.text
    document = begun.json()
    assert (3, -1, -1, 7) == tuple(
        document[name] for name in ("epoch", "sequence", "committed_sequence", "checkpoint")
    )
    late = partition.post(batch(1, b"b"), BATCH, ack="accepted")
    problem(late, 409, "fenced", field="producer_epoch", value=0, limit=3, outcome="not_applied")
    problem(partition.http.put(path, params={"epoch": 2}), 409, "fenced", field="epoch", value=2, limit=3)
    assert 422 == partition.http.put(path).status_code
    assert 422 == partition.http.get(f"{partition.path}/producers/{'0' * 32}").status_code
    assert ["a"] == partition.values()
