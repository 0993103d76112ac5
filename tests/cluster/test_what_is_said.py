"""A cluster that loses one node, then two: what every answer about its health says, and what still works."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

import laminar
from laminar.cli import run
from laminar.cli.exit_codes import EXIT_DONE, EXIT_FAILED
from laminar.testing.cluster import LocalCluster
from tests.cluster.test_api_cluster import until

UNDER_REPLICATED = 'laminar_partitions{state="under_replicated"}'
REFUSING = 'laminar_partitions{state="refusing"}'
LEADERLESS = 'laminar_partitions{state="leaderless"}'
Shown = Callable[[], tuple[int, str]]


@pytest.fixture
def status(cluster: LocalCluster, capfd: pytest.CaptureFixture[str]) -> Shown:
    """`laminar cluster status`: its exit code and what it prints."""

    def shown() -> tuple[int, str]:
        code = run(["cluster", "status", "--url", cluster.urls[0], "--timeout", "5"])
        return code, capfd.readouterr().out

    return shown


def metric(http: httpx.Client, url: str, name: str) -> float:
    """The sum over a node's processes."""
    lines = http.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def in_sync(http: httpx.Client, url: str, topic: str) -> set[str]:
    """Nodes that are in sync of any partition of the topic."""
    told = http.get(f"{url}/v1/topics/{topic}/partitions").json()["partitions"]
    return {each["node"] for partition in told for each in partition["replicas"] if each["in_sync"]}


def test_what_is_not_well_is_said_everywhere_and_nothing_is_acknowledged_thinly(
    cluster: LocalCluster, status: Shown, capfd: pytest.CaptureFixture[str]
) -> None:
    """Status, health, metrics and replicas agree; creations and appends that want more nodes are refused."""
    first, *others = cluster.members
    names = {member.name for member in cluster.members}
    strict: dict[str, Any] = {"partitions": 2, "settings": {"min_replicas": 3}}
    with httpx.Client(timeout=30, trust_env=False) as http:
        ready = f"{first.url}/readyz"
        for topic, wanted in (("idle", {"partitions": 4}), ("strict", strict)):
            assert 201 == http.put(f"{first.url}/v1/topics/{topic}", json=wanted).status_code
        for number in range(4):
            assert 201 == append(http, first.url, "idle", number).status_code
        assert 201 == append(http, first.url, "strict", 0).status_code
        until(lambda: names == in_sync(http, first.url, "idle"))
        until(lambda: [] == http.get(ready).json()["warnings"])
        until(lambda: status() == (EXIT_DONE, status()[1]))
        assert "all well" in status()[1]
        current = f"{first.url}/readyz?replicas=current"
        until(lambda: 200 == http.get(current).status_code)

        cluster.kill(2)
        gone = others[1].name
        until(lambda: gone not in in_sync(http, first.url, "idle"))
        led = until(lambda: leaders(http, first.url, "strict"))
        refused = until(lambda: thin(append(http, led[0], "strict", 0)))
        assert ("too_few_replicas", "not_applied", 2, 3) == (
            refused["code"],
            refused["outcome"],
            refused["value"],
            refused["limit"],
        )
        for fewer, followed in (
            (2, lambda: 201 == append(http, led[0], "strict", 0).status_code),
            (3, lambda: thin(append(http, led[0], "strict", 0))),
        ):
            path = f"{first.url}/v1/topics/strict"
            present = {"If-Match": http.get(path).headers["etag"]}
            changed = http.patch(path, json={"settings": {"min_replicas": fewer}}, headers=present)
            assert 200 == changed.status_code, changed.text
            until(followed)  # a partition that is open follows its topic
        assert 201 == append(http, first.url, "idle", 0).status_code, "a majority is enough here"
        until(lambda: not http.get(f"{first.url}/v1/nodes/{gone}").json()["alive"])
        few = http.put(f"{first.url}/v1/topics/more").json()
        assert ("too_few_nodes", 3, 2) == (few["code"], few["value"], few["limit"])
        made = http.put(f"{first.url}/v1/topics/more", json={"allow_fewer_replicas": True})
        assert (201, 3, 2) == (made.status_code, made.json()["replicas"], made.json()["replicas_placed"])
        sentences = [f"idle/{number} is not in sync on {gone}" for number in range(4)]
        sentences += [
            f"strict/{number} refuses appends: 2 replica(s) in sync, min_replicas is 3" for number in range(2)
        ]
        sentences += [f"node {gone} does not answer", "more has 2 of the 3 replicas asked for"]
        assert EXIT_FAILED == until(lambda: said(status(), *sentences))
        for each in cluster.members[:2]:  # any node tells it of the whole cluster
            told = health(http, each.url)
            assert ("critical", [gone]) == (told["status"], told["silent"])
            problems = {(each["code"], each["subject"]) for each in told["problems"]}
            assert {("node_dead", gone), ("appends_refused", "strict/0")} <= problems
            assert {("under_replicated", place) for place in ("more", "idle/0", "strict/1")} <= problems
        warnings = "; ".join(http.get(ready).json()["warnings"])
        assert "topics have fewer replicas than asked for: more (2 of 3)" in warnings
        alive = cluster.members[:2]
        until(lambda: 7 == sum(metric(http, each.url, UNDER_REPLICATED) for each in alive))
        until(lambda: 2 == sum(metric(http, each.url, REFUSING) for each in alive))
        assert 1 <= metric(http, first.url, "laminar_node_topics_with_fewer_replicas")

        assert 200 == until(lambda: http.get(current)).status_code, "its own replicas have caught up"
        hung = others[0].name
        for pid in cluster.pids(1):
            os.kill(pid, signal.SIGSTOP)
        told = until(lambda: newer(health(http, first.url), than=[gone]))
        assert [hung, gone] == told["silent"], "it is not counted as well, though all hear it yet"
        assert {hung} == {each["subject"] for each in told["problems"] if each["code"] == "node_silent"}
        cluster.kill(1)
        until(lambda: any("the catalog has no leader" in each for each in http.get(ready).json()["warnings"]))
        until(lambda: any("have no leader: idle/0" in each for each in http.get(ready).json()["warnings"]))
        assert 0 == metric(http, first.url, "laminar_catalog_is_led")
        until(lambda: 503 == http.get(current).status_code)
        assert "replicas of this node have not caught up" in http.get(current).json()["reasons"][0]
        until(lambda: 7 == metric(http, first.url, LEADERLESS))
        assert EXIT_FAILED == until(
            lambda: said(status(), "the catalog has no leader", "idle/3 has no leader")
        )

        with laminar.connect(first.url, timeout=20) as client:
            assert 5 == sum(1 for _ in client.topic("idle").read())
        assert EXIT_DONE == run(["consume", "idle", "--url", first.url])
        assert b"x\n" * 5 == capfd.readouterr().out.encode()


def health(http: httpx.Client, url: str) -> dict[str, Any]:
    """What a node says of the whole cluster."""
    found: dict[str, Any] = http.get(f"{url}/v1/health").json()
    return found


def newer(told: dict[str, Any], *, than: list[str]) -> dict[str, Any] | None:
    """The answer, unless other nodes are silent: an answer may be some tenths of a second old."""
    return None if than == told["silent"] else told


def append(http: httpx.Client, url: str, topic: str, number: int) -> httpx.Response:
    """One record."""
    return http.post(f"{url}/v1/topics/{topic}/partitions/{number}/records", content=b"x")


def leaders(http: httpx.Client, url: str, topic: str) -> list[str]:
    """URLs of all partitions' leaders, once each has one that is alive; else empty."""
    told = http.get(f"{url}/v1/topics/{topic}/partitions").json()["partitions"]
    found = [each["leader"]["url"] for each in told if each["leader"] is not None]
    return found if len(found) == len(told) else []


def thin(answer: httpx.Response) -> dict[str, Any] | None:
    """The problem, if it is that too few are in sync."""
    problem: dict[str, Any] = answer.json()
    return problem if problem.get("code") == "too_few_replicas" else None


def said(shown: tuple[int, str], *texts: str) -> int | None:
    """The exit code, once all of this is shown."""
    code, text = shown
    return code if all(each in text for each in texts) else None
