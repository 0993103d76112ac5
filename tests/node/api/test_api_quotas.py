"""Limits of principals, at a real node: what is refused, what is said, and that others don't notice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from laminar.testing.cluster import LocalCluster


@dataclass
class Limited:
    """A node, an admin, and principals whose limits a test sets."""

    cluster: LocalCluster
    http: httpx.Client
    tokens: dict[str, str | None] = field(default_factory=dict)

    def ask(self, who: str, method: str, target: str, **more: Any) -> httpx.Response:
        """Ask as a principal; one that is new gets a token with all roles on its names."""
        if who not in self.tokens:
            grants = [{"role": "admin", "prefix": who}]
            made = self.ask("all", "POST", "/v1/admin/tokens", json={"name": who, "grants": grants})
            self.tokens[who] = made.json()["token"]
        headers = {"authorization": f"Bearer {self.tokens[who]}"} | more.pop("headers", {})
        return self.http.request(method, target, headers=headers, **more)

    def limit(self, who: str, **limits: int) -> httpx.Response:
        """Set the limits of a principal, whatever they were."""
        headers = {"if-match": "*"}
        answer = self.ask("all", "PUT", f"/v1/admin/limits/{who}", json=limits, headers=headers)
        assert 200 == answer.status_code, answer.text
        return answer

    def create(self, who: str, name: str, **more: Any) -> httpx.Response:
        """Create a topic."""
        return self.ask(who, "PUT", f"/v1/topics/{name}", json=more)


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    """One node of one shard, so that each answer is by the view that the test has changed."""
    settings = {"access": "tokens"}
    with (
        LocalCluster(tmp_path_factory.mktemp("quotas"), nodes=1, shards=1, settings=settings) as cluster,
        httpx.Client(base_url=cluster.urls[0], timeout=20, trust_env=False) as http,
    ):
        yield Limited(cluster, http, {"all": cluster.admin_token})


def refused(answer: httpx.Response, what: str, value: int, limit: int) -> dict[str, Any]:
    """Return the document of a refusal of this limit."""
    said: dict[str, Any] = answer.json()
    got = (answer.status_code, said["code"], said["field"], said["value"], said["limit"], said["outcome"])
    assert (429, "quota", what, value, limit, "not_applied") == got
    return said


def test_limits_are_compared_and_set(limited: Limited) -> None:
    """Each change names the version before it."""
    path = "/v1/admin/limits/cas"
    first = limited.ask("all", "GET", path)
    assert ({"principal": "cas", "limits": {}, "version": 0}, '"0"') == (first.json(), first.headers["etag"])
    blind = limited.ask("all", "PUT", path, json={"topics": 1})
    made = limited.ask("all", "PUT", path, json={"topics": 1}, headers={"if-match": '"0"'})
    late = limited.ask("all", "PUT", path, json={"topics": 2}, headers={"if-match": '"0"'})
    changed = limited.ask("all", "PUT", path, json={"sinks": 2}, headers={"if-match": made.headers["etag"]})

    assert [428, 200, 412, 200] == [each.status_code for each in (blind, made, late, changed)]
    assert {"sinks": 2} == changed.json()["limits"]
    listed = limited.ask("all", "GET", "/v1/admin/limits").json()["principals"]
    assert changed.json() in listed
    assert {} == limited.limit("cas").json()["limits"]
    for wrong in ({"topics": 0}, {"topics": "1"}, {"topics": 2**53}, {"topic": 1}):
        answer = limited.ask("all", "PUT", path, json=wrong, headers={"if-match": "*"})
        assert 422 == answer.status_code and answer.json()["field"] == next(iter(wrong)), answer.text
    assert 422 == limited.ask("all", "GET", "/v1/admin/limits/a b").status_code


def test_topics_partitions_and_channels_are_counted(limited: Limited) -> None:
    """For who created the topic; the refusal has no Retry-After, as no time helps. Whoami says how many."""
    limited.limit("maker", topics=2, partitions=3, channels=1)
    assert 201 == limited.create("maker", "maker-1").status_code
    said = refused(limited.create("maker", "maker-2", partitions=3), "partitions", 4, 3)
    assert "retry_after_ms" not in said and "whoami" in said["hint"]
    assert 201 == limited.create("maker", "maker-2", partitions=2).status_code
    assert "retry-after" not in limited.create("maker", "maker-3").headers
    refused(limited.create("maker", "maker-3"), "topics", 3, 2)
    assert 200 == limited.create("maker", "maker-2", partitions=2).status_code
    assert 201 == limited.create("all", "maker-3").status_code
    assert 201 == limited.ask("maker", "PUT", "/v1/topics/maker-1/channels/c", json={}).status_code
    refused(limited.ask("all", "PUT", "/v1/topics/maker-2/channels/c", json={}), "channels", 2, 1)
    wanted = {"after": 0, "inputs": [0], "cuts": [32768]}
    split = limited.ask("maker", "POST", "/v1/topics/maker-1/routes", json=wanted)
    refused(split, "partitions", 5, 3)
    who = limited.ask("maker", "GET", "/v1/whoami").json()
    assert {"topics": 2, "partitions": 3, "channels": 1} == who["limits"] == who["usage"]
    assert None is limited.ask("all", "GET", "/v1/whoami").json()["usage"]

    etag = limited.ask("maker", "GET", "/v1/topics/maker-1").headers["etag"]
    deleted = limited.ask("maker", "DELETE", "/v1/topics/maker-1", headers={"if-match": etag})
    assert 202 == deleted.status_code
    assert 201 == limited.create("maker", "maker-4").status_code
