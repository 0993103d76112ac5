"""Channels on three nodes: made, changed and deleted while the leaders of partitions die and come back."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from laminar.node.api.channels.states import ANSWER_S
from laminar.testing.cluster import LocalCluster
from tests.cluster import load
from tests.cluster.patience import PATIENCE_S as PATIENCE_S
from tests.node.api.channels.test_streams import stream

PARTITIONS = 6


def call(cluster: LocalCluster, node: int, method: str, path: str, **more: Any) -> httpx.Response:
    """Ask one node, again while its answer may be another one a little later."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        answer = httpx.request(method, cluster.urls[node] + path, timeout=PATIENCE_S, trust_env=False, **more)
        if answer.status_code != 503 or time.monotonic() > deadline:
            return answer
        time.sleep(0.05)


def leaders(cluster: LocalCluster, node: int) -> dict[int, str]:
    """Who leads each partition, as one node tells it, once all are led."""
    return load.leaders(cluster.urls[node], "t")


def whole(cluster: LocalCluster, node: int, path: str, version: int) -> dict[str, Any]:
    """The channel, once the leaders of all partitions have this version of it, and each has answered."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        shown: dict[str, Any] = call(cluster, node, "GET", path).json()
        versions = [each["version"] for each in shown["partitions"].values()]
        if versions == [version] * PARTITIONS and not shown["opening"] and not shown["unanswered"]:
            return shown
        assert time.monotonic() < deadline, shown
        time.sleep(0.05)


def test_channels_are_opened_set_and_closed_over_the_death_of_leaders(cluster: LocalCluster) -> None:
    """Each node in turn is killed in the moment of a change; another one is asked for it."""
    wish = {"partitions": PARTITIONS, "replicas": 3}
    assert call(cluster, 0, "PUT", "/v1/topics/t", json=wish).status_code in (200, 201)
    for number in range(30):
        # With a key, so that one that is sent again is there once.
        key = {"Idempotency-Key": f"record-{number}"}
        sent = call(cluster, 0, "POST", "/v1/topics/t/records", content=f"{number}".encode(), headers=key)
        assert sent.is_success, sent.text
    path = "/v1/topics/t/channels/c"
    names = [member.name for member in cluster.members]
    before = leaders(cluster, 0)
    first = names.index(max(set(before.values()) - {names[0]}))
    second = 3 - first

    cluster.kill(first)
    made = call(cluster, 0, "PUT", path, json={"settings": {"order": "key"}})
    assert made.status_code in (200, 201), made.text
    channel = made.json()
    # What led there is led elsewhere by now: the answer waited for it, but not for longer than it may.
    if made.elapsed.total_seconds() < ANSWER_S:
        assert ([], []) == (channel["opening"], channel["unanswered"]), channel
    assert channel["opening"] or channel["unanswered"] or 30 == channel["depth"], channel
    load.leaders(cluster.urls[0], "t", among=set(names) - {names[first]})
    channel = whole(cluster, 0, path, channel["version"])
    assert 30 == channel["depth"]
    cluster.restart(first)

    cluster.kill(second)
    etag = {"If-Match": f'"{channel["version"]}"'}
    changed = call(cluster, first, "PATCH", path, json={"settings": {"paused": True}}, headers=etag)
    # 412: an attempt whose answer was lost has changed it.
    assert changed.status_code in (200, 412), changed.text
    now = call(cluster, first, "GET", path).json()
    assert {"order": "key", "paused": True} == now["settings"] and channel["id"] == now["id"]
    cluster.restart(second)
    assert 30 == whole(cluster, second, path, now["version"])["depth"]

    cluster.kill(0)
    deleted = call(cluster, second, "DELETE", path)
    assert deleted.status_code in (204, 404), deleted.text
    again = call(cluster, first, "PUT", path, json={"settings": {"start": "latest"}})
    assert again.status_code in (200, 201), again.text
    cluster.restart(0)
    shown = whole(cluster, 0, path, again.json()["version"])
    assert channel["id"] < shown["id"] and 0 == shown["depth"], "another one, which begins as it is set"


@pytest.mark.long
def test_a_stream_of_jobs_goes_on_over_the_death_of_leaders(cluster: LocalCluster) -> None:
    """Each job is done, and never more are out of it than it has credit for."""
    credit, records = 10, 300
    wish = {"partitions": PARTITIONS, "replicas": 3}
    assert call(cluster, 0, "PUT", "/v1/topics/streams", json=wish).status_code in (200, 201)
    path = "/v1/topics/streams/channels/c"
    # What a leader gave out in an answer that was lost comes again after this time.
    settings = {"settings": {"timeout_ms": 20_000}}
    assert call(cluster, 0, "PUT", path, json=settings).status_code in (200, 201)
    values = {f"{number}" for number in range(records)}
    for number in range(0, records, 50):
        batch = [{"value": f"{each}", "key": f"k{each}"} for each in range(number, number + 50)]
        kind = {"Content-Type": "application/vnd.laminar.records+json"}
        sent = call(cluster, 0, "POST", "/v1/topics/streams/records", json={"records": batch}, headers=kind)
        assert 200 == sent.status_code, sent.text

    def done(tokens: list[str]) -> None:
        said = call(cluster, 0, "POST", f"{path}/acks", json={"ack": tokens})
        assert {"done": len(tokens), "late": []} == said.json()

    held: list[str] = []
    seen: dict[str, int] = {}
    kills = [(60, 1), (160, 2)]
    restarts: list[Future[None]] = []
    with stream(cluster.urls[0], "streams", credit=credit) as jobs, ThreadPoolExecutor(1) as beside:
        while values - seen.keys():
            job = jobs.job()
            held.append(job["token"])
            assert len(held) <= credit
            seen[job["value"]] = seen.get(job["value"], 0) + 1
            if len(held) == credit - 4:
                done([held.pop(0)])
            # One at a time: without a majority nothing is acknowledged, and what is held would be late.
            if kills and len(seen) >= kills[0][0] and all(each.done() for each in restarts):
                _, node = kills.pop(0)
                cluster.kill(node)
                restarts.append(beside.submit(cluster.restart, node))
        done(held)
    for each in restarts:
        each.result()

    assert {1} == set(seen.values()), "none was late"
    assert 0 == call(cluster, 0, "GET", path).json()["depth"]
