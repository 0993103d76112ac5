"""The flush policy of a topic, as the API shows it: settings, receipts, and a change in place."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx

from tests.node.api.asking import Partition


def _eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"not within 120 s: {what}"
        time.sleep(0.02)


def test_the_receipt_of_an_interval_topic_says_that_nothing_is_synced_yet(
    http: httpx.Client,
) -> None:
    """Acknowledged there means written: the receipt names the policy and promises no more."""
    topic = "receipts-of-interval"
    settings = {"flush": "interval", "flush_interval_ms": 100}
    assert 201 == http.put(f"/v1/topics/{topic}", json={"settings": settings}).status_code

    answer = http.post(f"/v1/topics/{topic}/partitions/0/records", content=b"one")
    routed = http.post(f"/v1/topics/{topic}/records", content=b"two")

    assert {"replicas": 1, "synced": False, "flush": "interval"} == answer.json()["durable"]
    assert {"replicas": 1, "synced": False, "flush": "interval"} == routed.json()["durable"]
    assert ["one", "two"] == Partition(http, topic, 0).values()


def test_the_policy_of_a_topic_changes_in_place(http: httpx.Client, new_topic: Callable[..., str]) -> None:
    """Back and forth under appends: each receipt says what held for it, and no record is lost or doubled."""
    topic = new_topic()
    path = f"/v1/topics/{topic}"
    sent: list[str] = []

    def flush() -> str:
        sent.append(str(len(sent)))
        answer = http.post(f"{path}/partitions/0/records", content=sent[-1].encode())
        assert 201 == answer.status_code, answer.text
        durable = answer.json()["durable"]
        assert durable["synced"] == (durable["flush"] == "commit")
        return str(durable["flush"])

    for wanted in ("interval", "commit", "interval"):
        changed = http.patch(path, json={"settings": {"flush": wanted}}, headers={"If-Match": "*"})
        assert 200 == changed.status_code, changed.text
        _eventually(lambda wanted=wanted: flush() == wanted, f"flush={wanted}")  # type: ignore[misc]

    assert sent == Partition(http, topic, 0).values()
