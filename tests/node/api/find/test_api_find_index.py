"""The key index of a topic over HTTP: its setting, what answers say of it, and how far it lags."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from laminar.node.find.indexing import IDLE_S
from laminar.testing.nodes import serve
from tests.node.api.asking import problem
from tests.node.api.find.test_api_search import append, step

MIB = 1 << 20
SETTINGS: dict[str, str | int] = {"segment_size_bytes": MIB, "journal_file_bytes": 4 * MIB}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """A client of a node whose segments have 1 MiB."""
    with serve(settings=SETTINGS) as url, httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        yield client


def metric(http: httpx.Client, name: str) -> float:
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(f"{name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_a_key_is_found_by_the_index_once_it_is_built(http: httpx.Client) -> None:
    """Sealed segments are counted as not indexed until they are; answers say how many were used."""
    assert http.put("/v1/topics/t", json={"settings": {"index": "key,header:n"}}).status_code == 201
    for n in range(5):
        record = {"value": "x" * MIB, "key": f"k{n}", "headers": {"n": f"h{n}"}}
        append(http, "t", record)
    assert step(http, "t", where={"key": "k1"})["searched"]["segments_by_index"] == 0
    deadline = time.monotonic() + 2 * IDLE_S + 60
    while metric(http, "laminar_find_indexed_segments_total") < 4:
        assert time.monotonic() < deadline, http.get("/metrics").text
        time.sleep(0.1)
    assert metric(http, "laminar_find_unindexed_bytes") == 0

    for where in ({"key": "k1"}, {"headers": {"n": "h1"}}):
        found = step(http, "t", where=where)
        assert [each["offset"] for each in found["records"]] == [1]
        assert found["searched"]["segments_by_index"] == 4
        assert found["searched"]["records"] == 5 and found["after"] is None


def test_the_setting_is_checked(http: httpx.Client) -> None:
    """Up to four terms that are known; empty, for none; null takes it away."""
    assert http.put("/v1/topics/s", json={}).status_code == 201
    for index in ("value", "key,", "key;trace_id", "header:", "key,key,key,key,key", "header:" + "x" * 101):
        wrong = http.patch("/v1/topics/s", headers={"If-Match": "*"}, json={"settings": {"index": index}})
        problem(wrong, 422, "invalid", field="settings.index")
    for value in ("header:a b,header:é,key,trace_id", "", None):
        right = http.patch("/v1/topics/s", headers={"If-Match": "*"}, json={"settings": {"index": value}})
        assert right.status_code == 200 and right.json()["settings"].get("index") == value
