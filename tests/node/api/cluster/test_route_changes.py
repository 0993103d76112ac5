"""POST, GET and DELETE of the changes of a topic's route: what is refused, and what an answer says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.node.api.asking import problem
from tests.node.api.cluster.test_api_topics import fresh


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"inputs": [9]}, "inputs"),
        ({"inputs": [0, 0]}, "inputs"),
        ({"inputs": [0, 2]}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": [0, 1], "cuts": [100]}, "inputs"),
        ({"inputs": [0, 1], "into": 2}, "inputs"),
        ({"inputs": [0], "cuts": [30_000]}, "cuts"),
        ({"inputs": [0], "cuts": [200, 100]}, "cuts"),
        ({"inputs": [0], "cuts": [100], "into": 2}, "into"),
        ({"inputs": [0], "into": 65}, "into"),
        ({"inputs": [0], "force": True}, "force"),
        ({"inputs": [0], "avoid": ["nowhere"]}, "avoid"),
        ({"inputs": [0], "wait_ms": 86_400_001}, "wait_ms"),
        ({"inputs": [0], "wait": 1}, "wait"),
    ],
)
def test_what_cannot_be_is_422(
    http: httpx.Client, new_topic: Callable[..., str], wanted: dict[str, Any], field: str
) -> None:
    path = f"/v1/topics/{new_topic(3)}/routes"
    answer = http.post(path, json={"after": 0} | wanted)
    assert 422 == answer.status_code, answer.text
    assert field in answer.json()["field"]
    assert http.get(path).json()["change"] is None


def test_another_version_of_the_route_is_412_with_the_present_one(
    http: httpx.Client, new_topic: Callable[..., str]
) -> None:
    path = f"/v1/topics/{new_topic(2)}/routes"
    problem(http.post(path, json={"after": 3, "inputs": [0]}), 412, "precondition_failed", limit=0)


def test_the_systems_topics_keep_their_partitions(http: httpx.Client) -> None:
    assert 200 == http.post(f"/v1/sinks/{fresh()}").status_code
    answer = http.post("/v1/topics/_transactions/routes", json={"after": 0, "inputs": [0]})
    problem(answer, 422, "invalid")


def test_what_no_change_makes_is_404(http: httpx.Client, new_topic: Callable[..., str]) -> None:
    path = f"/v1/topics/{new_topic(2)}/routes"
    problem(http.get(f"{path}/1"), 404, "no_such_route", limit=0)
    problem(http.delete(f"{path}/1"), 404, "no_such_route", limit=0)
    problem(http.get("/v1/topics/nowhere/routes/1"), 404, "no_such_topic")
    problem(http.get(f"{path}/x"), 422, "invalid", field="version")
