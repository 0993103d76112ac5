"""Groups of consumers: who is a member, said by whoever is asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.node.api.asking import problem


@pytest.fixture
def topic(new_topic: Callable[..., str]) -> str:
    """Three partitions."""
    return new_topic(3)


@pytest.fixture
def path(topic: str) -> str:
    """A group that nobody has joined."""
    return f"/v1/topics/{topic}/groups/billing"


def renew(http: httpx.Client, path: str, member: str, **more: Any) -> httpx.Response:
    return http.put(f"{path}/members/{member}", json=more)


def test_members_hear_of_each_other(http: httpx.Client, api_url: str, topic: str, path: str) -> None:
    """Sorted by name, with their settings; over any connection, so by either shard."""
    first = renew(http, path, "b")

    assert 200 == first.status_code, first.text
    assert {
        "topic": topic,
        "group": "billing",
        "member": "b",
        "mode": "clustering",
        "session_ms": 6000,
    }.items() <= first.json().items()
    for name in "acd":
        answer = httpx.put(
            f"{api_url}{path}/members/{name}", json={"session_ms": 9000}, timeout=60, trust_env=False
        )
        assert 200 == answer.status_code, answer.text
    members = answer.json()["members"]
    assert [("a", 9000), ("b", 6000), ("c", 9000), ("d", 9000)] == [
        (each["member"], each["session_ms"]) for each in members
    ]
    assert all(0 <= each["seen_ms_ago"] < 6000 for each in members)
    assert [204, 204] == [http.delete(f"{path}/members/c").status_code for _ in range(2)]
    assert ["a", "b", "d"] == [each["member"] for each in http.get(path).json()["members"]]


def test_a_member_that_is_silent_for_a_session_is_gone(http: httpx.Client, path: str) -> None:
    """And a group of nobody, without a cursor, is none."""
    since = time.monotonic()  # not after the answer, which may have been long on its way
    renew(http, path, "a", session_ms=2000)

    while http.get(path).status_code == 200:
        assert time.monotonic() - since < 60
        time.sleep(0.05)

    assert time.monotonic() - since > 1.9
    problem(http.get(path), 404, "no_such_group", field="group", value="billing")


def test_a_group_shows_what_its_members_own(http: httpx.Client, topic: str, path: str) -> None:
    """Its cursor, and those of its members, each as its own route shows it."""
    cursors = f"/v1/topics/{topic}/cursors"
    renew(http, path, "a")
    for name in ("billing", "billing.a", "billings"):
        body = {"positions": {"0": 0}, "owner": "a", "expected_owner": ""}
        assert 200 == http.put(f"{cursors}/{name}", json=body).status_code

    document = http.get(path).json()

    assert ("clustering", "billing", topic) == (document["mode"], document["group"], document["topic"])
    assert [http.get(f"{cursors}/{name}").json() for name in ("billing", "billing.a")] == document["cursors"]
    http.delete(f"{path}/members/a")
    assert (200, None) == (http.get(path).status_code, http.get(path).json()["mode"])


WRONG: list[tuple[str, str, dict[str, Any], str]] = [
    ("billing", "a", {"mode": "both"}, "mode"),
    ("billing", "a", {"session_ms": 1999}, "session_ms"),
    ("billing", "a", {"session_ms": 60_001}, "session_ms"),
    ("billing", "a", {"session": 1}, "session"),
    ("x" * 91, "a", {}, "group"),
    ("billing", "x" * 91, {}, "member"),
    ("a%20b", "a", {}, "group"),
    ("billing", "a%2Fb", {}, "member"),
]


@pytest.mark.parametrize(("group", "member", "body", "field"), WRONG)
def test_a_wrong_membership_is_named(
    http: httpx.Client, topic: str, group: str, member: str, body: dict[str, Any], field: str
) -> None:
    """422, and nobody became a member."""
    path = f"/v1/topics/{topic}/groups/{group}"

    problem(renew(http, path, member, **body), 422, "invalid", field=field, outcome="not_applied")
    assert http.get(path).status_code in (404, 422)


def test_a_member_of_another_mode_is_refused(http: httpx.Client, path: str) -> None:
    """A group divides the partitions, or each reads all."""
    renew(http, path, "a")

    answer = renew(http, path, "b", mode="broadcast")

    problem(answer, 409, "already_exists", field="mode", value="broadcast", limit="clustering")
