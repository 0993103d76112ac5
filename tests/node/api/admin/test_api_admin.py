"""Operators' requests to one node: what is refused and why, and what the catalog then wants."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.node.api.asking import problem


@pytest.fixture
def name(http: httpx.Client) -> str:
    """The node's name, once the catalog takes commands about it."""
    (node,) = http.get("/v1/admin/nodes").json()["nodes"]
    deadline = time.monotonic() + 120
    while 503 == http.post(f"/v1/admin/nodes/{node['node']}/undrain").status_code:
        assert time.monotonic() < deadline
    return str(node["node"])


@pytest.fixture
def drained(http: httpx.Client, name: str) -> Iterator[str]:
    """The node while it drains; it does not afterwards."""
    assert 202 == http.post(f"/v1/admin/nodes/{name}/drain").status_code
    yield name
    assert 200 == http.post(f"/v1/admin/nodes/{name}/undrain").status_code


def described(http: httpx.Client, name: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"/v1/admin/nodes/{name}").json()
    return found


def test_a_weight_and_a_zone_hold_in_place_of_the_announced_ones_until_null(
    http: httpx.Client, name: str
) -> None:
    path = f"/v1/admin/nodes/{name}"
    before = http.get(path)

    set_ = http.patch(
        path, json={"weight": 2.5, "zone": "west"}, headers={"If-Match": before.headers["etag"]}
    )
    late = http.patch(path, json={"weight": 3}, headers={"If-Match": before.headers["etag"]})
    unset = http.patch(path, json={"weight": None, "zone": None}, headers={"If-Match": set_.headers["etag"]})

    of = ("weight", "announced_weight", "set_weight", "zone", "announced_zone", "set_zone")
    assert [1.0, 1.0, None, "", "", None] == [before.json()[key] for key in of]
    assert (200, [2.5, 1.0, 2.5, "west", "", "west"]) == (set_.status_code, [set_.json()[key] for key in of])
    problem(late, 412, "precondition_failed", field="if-match", limit=set_.headers["etag"])
    assert [before.json()[key] for key in of] == [unset.json()[key] for key in of]


def test_a_change_of_a_node_needs_if_match_and_values_within_the_limits(
    http: httpx.Client, name: str
) -> None:
    path = f"/v1/admin/nodes/{name}"

    problem(http.patch(path, json={"weight": 1}), 428, "if_match_required", field="if-match")
    for wrong, field in (
        ({"weight": -1}, "weight"),
        ({"weight": 1001}, "weight"),
        ({"weight": "1"}, "weight"),
        ({"zone": "x" * 201}, "zone"),
        ({"draining": True}, "draining"),
    ):
        problem(http.patch(path, json=wrong, headers={"If-Match": "*"}), 422, "invalid", field=field)
    for method, more in (("GET", ""), ("POST", "/drain"), ("POST", "/undrain"), ("DELETE", "")):
        problem(http.request(method, f"/v1/admin/nodes/nobody{more}"), 404, "no_such_node", value="nobody")


def test_a_drain_says_what_it_waits_for_and_what_blocks_it(
    http: httpx.Client, drained: str, new_topic: Callable[..., str]
) -> None:
    """One node: its replicas have nowhere to go."""
    found = described(http, drained)

    assert (True, False) == (found["draining"], found["safe_to_stop"])
    assert "it votes in the catalog" in found["drain_waits_for"]
    operation = http.get(f"/v1/admin/operations/drain:{drained}").json()
    assert ("drain", drained, found["drain_blocked_by"]) == (
        operation["kind"],
        operation["what"],
        operation["blocked_by"],
    )


def test_a_drain_is_cancelled_as_an_operation(http: httpx.Client, drained: str) -> None:
    """And begins and ends as often as it is asked to: a repetition changes nothing."""
    path = f"/v1/admin/operations/drain:{drained}"
    first = described(http, drained)["version"]
    http.post(f"/v1/admin/nodes/{drained}/drain")

    assert first == described(http, drained)["version"]
    assert 200 == http.delete(path).status_code
    assert not described(http, drained)["draining"]
    problem(http.get(path), 404, "no_such_operation")
    problem(http.delete(path), 404, "no_such_operation", value=f"drain:{drained}")


def test_a_node_that_runs_is_not_removed(http: httpx.Client, drained: str) -> None:
    refused = problem(http.delete(f"/v1/admin/nodes/{drained}"), 409, "node_in_use", outcome="not_applied")

    assert "still holds" in refused["detail"] or "stop it first" in refused["detail"]
    http.post(f"/v1/admin/nodes/{drained}/undrain")
    refused = problem(http.delete(f"/v1/admin/nodes/{drained}"), 409, "node_in_use")
    assert "drain it first" in refused["detail"]


def test_the_number_of_replicas_changes_with_the_settings_and_by_etag(
    http: httpx.Client, name: str, new_topic: Callable[..., str]
) -> None:
    """More than there are nodes is refused unless that is allowed, fewer than `min_replicas` always."""
    topic = new_topic()
    path = f"/v1/topics/{topic}"
    etag = http.get(path).headers["etag"]
    more = {"replicas": 3, "settings": {"retention_ms": 10**9}}

    few = http.patch(path, json=more, headers={"If-Match": etag})
    allowed = http.patch(path, json=more | {"allow_fewer_replicas": True}, headers={"If-Match": etag})
    late = http.patch(path, json={"replicas": 1}, headers={"If-Match": etag})

    problem(few, 503, "too_few_nodes", field="replicas", value=3, limit=1, outcome="not_applied")
    assert (200, 3, 1, {"retention_ms": 10**9}) == (
        allowed.status_code,
        allowed.json()["replicas"],
        allowed.json()["replicas_placed"],
        allowed.json()["settings"],
    )
    problem(late, 412, "precondition_failed", field="if-match")
    operation = http.get(f"/v1/admin/operations/replicas:{topic}").json()
    assert ["3 replicas are asked for, 1 node may hold replicas"] == operation["blocked_by"]
    cannot = problem(http.delete(f"/v1/admin/operations/replicas:{topic}"), 409, "not_cancellable")
    assert f"PATCH {path}" in cannot["detail"]

    etag = allowed.headers["etag"]
    etag = http.patch(path, json={"settings": {"min_replicas": 1}}, headers={"If-Match": etag}).headers[
        "etag"
    ]
    less = {"replicas": 1, "settings": {"min_replicas": None}}
    assert 1 == http.patch(path, json=less, headers={"If-Match": etag}).json()["replicas"]
    problem(http.get(f"/v1/admin/operations/replicas:{topic}"), 404, "no_such_operation")


def test_a_topic_keeps_as_many_replicas_as_min_replicas(
    http: httpx.Client, name: str, new_topic: Callable[..., str]
) -> None:
    """Else nothing could be appended."""
    path = f"/v1/topics/{new_topic()}"
    wrong = {"replicas": 1, "settings": {"min_replicas": 2}}
    problem(http.patch(path, json=wrong, headers={"If-Match": "*"}), 422, "invalid", value=2, limit=1)
    for number in (0, 8):
        wrong = {"replicas": number}
        problem(http.patch(path, json=wrong, headers={"If-Match": "*"}), 422, "invalid", field="replicas")


def test_of_transactions_only_the_number_of_replicas_changes(http: httpx.Client, name: str) -> None:
    http.post("/v1/producers", json={"name": "copier"})
    path = "/v1/topics/_transactions"

    more = http.patch(path, json={"replicas": 2, "allow_fewer_replicas": True}, headers={"If-Match": "*"})
    back = http.patch(path, json={"replicas": 1}, headers={"If-Match": "*"})

    assert [(200, 2), (200, 1)] == [(each.status_code, each.json()["replicas"]) for each in (more, back)]
    wrong = {"settings": {"retention_ms": 1}}
    problem(http.patch(path, json=wrong, headers={"If-Match": "*"}), 422, "invalid", field="topic")
    problem(http.delete(path, headers={"If-Match": "*"}), 422, "invalid", field="topic")


def test_a_pin_has_its_owner_and_reason_until_it_is_taken_back(
    http: httpx.Client, name: str, new_topic: Callable[..., str]
) -> None:
    topic = new_topic()
    path = f"/v1/admin/topics/{topic}/partitions/0"

    pinned = http.put(f"{path}/pin", json={"nodes": [name], "reason": "its disk is the fastest"})

    pin = {"nodes": [name], "owner": "operator", "reason": "its disk is the fastest"}
    assert (200, pin) == (pinned.status_code, pinned.json()["pin"])
    # The planner may choose a preferred leader in between.
    assert pinned.json() | {"preferred_leader": name} == http.get(path).json() | {"preferred_leader": name}
    assert ([name], [name]) == (pinned.json()["wanted"], [each["node"] for each in pinned.json()["replicas"]])
    assert None is http.delete(f"{path}/pin").json()["pin"]
    assert 200 == http.delete(f"{path}/pin").status_code, "it is as wanted already"


def test_a_pin_that_cannot_hold_is_refused(
    http: httpx.Client, name: str, new_topic: Callable[..., str]
) -> None:
    """Unknown nodes, a node twice, another number than the topic's, no reason."""
    topic = new_topic()
    path = f"/v1/admin/topics/{topic}/partitions/0/pin"

    for wrong, field in (
        ({"nodes": ["nobody"], "reason": "r"}, "nodes"),
        ({"nodes": [name, name], "reason": "r"}, "nodes"),
        ({"nodes": [], "reason": "r"}, "nodes"),
        ({"nodes": [name], "reason": ""}, "reason"),
        ({"nodes": [name]}, "body"),
    ):
        problem(http.put(path, json=wrong), 422, "invalid", field=field)
    two = {"replicas": 2, "allow_fewer_replicas": True}
    assert 200 == http.patch(f"/v1/topics/{topic}", json=two, headers={"If-Match": "*"}).status_code
    wish = {"nodes": [name], "reason": "r"}
    problem(http.put(path, json=wish), 422, "invalid", field="nodes", value=1, limit=2)
    assert 200 == http.put(path, json=wish | {"allow_other_number": True}).status_code
    problem(http.put(f"/v1/admin/topics/{topic}/partitions/1/pin", json=wish), 404, "no_such_partition")
    problem(http.put("/v1/admin/topics/nowhere/partitions/0/pin", json=wish), 404, "no_such_topic")


def test_only_a_node_with_a_replica_becomes_the_preferred_leader(
    http: httpx.Client, name: str, new_topic: Callable[..., str]
) -> None:
    path = f"/v1/admin/topics/{new_topic()}/partitions/0"

    chosen = http.post(f"{path}/leader", json={"node": name})

    assert (202, name) == (chosen.status_code, chosen.json()["preferred_leader"])
    problem(http.post(f"{path}/leader", json={"node": "nobody"}), 422, "invalid", field="node", limit=name)


def test_operations_come_in_pages(http: httpx.Client, name: str, new_topic: Callable[..., str]) -> None:
    topics = [new_topic() for _ in range(3)]
    for topic in topics:
        body = {"replicas": 3, "allow_fewer_replicas": True}
        assert 200 == http.patch(f"/v1/topics/{topic}", json=body, headers={"If-Match": "*"}).status_code
    found, totals, target = [], set(), "/v1/admin/operations?prefix=replicas:&limit=2"
    while target:
        answer = http.get(target)
        found += [each["id"] for each in answer.json()["operations"]]
        assert len(answer.json()["operations"]) <= 2
        totals.add(answer.json()["total"])
        target = answer.links.get("next", {}).get("url", "")

    assert found == sorted(found)
    assert {len(found)} == totals
    assert {f"replicas:{topic}" for topic in topics} <= set(found)
