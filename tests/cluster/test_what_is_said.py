"""A cluster that loses one node, then two: what every answer about its health says, and what still works."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest

import laminar
from laminar.cli import run
from laminar.cli.exit_codes import EXIT_DONE, EXIT_FAILED
from laminar.testing.cluster import LocalCluster
from tests.cluster.appends import append as appended
from tests.cluster.patience import asked
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
    with httpx.Client(timeout=60, trust_env=False) as http:
        ready = f"{first.url}/readyz"
        for topic, wanted in (("idle", {"partitions": 4}), ("strict", strict)):
            assert asked(http, "PUT", f"{first.url}/v1/topics/{topic}", json=wanted).is_success
        for number in range(4):
            appended(http, f"{first.url}/v1/topics/idle/partitions/{number}/records", b"x")
        until(lambda: 201 == append(http, first.url, "strict", 0).status_code)
        until(lambda: names == in_sync(http, first.url, "idle"))
        until(lambda: [] == http.get(ready).json()["warnings"])
        until(lambda: said(status(), "all well") == EXIT_DONE)
        current = f"{first.url}/readyz?replicas=current"
        until(lambda: 200 == http.get(current).status_code)

        cluster.kill(2)
        gone = others[1].name
        until(lambda: gone not in in_sync(http, first.url, "idle"))
        led = until(lambda: leaders(http, first.url, "strict"))
        # 1 of 3 for as long as the other one is silent.
        refused = until(lambda: thin(append(http, led[0], "strict", 0), value=2))
        assert ("too_few_replicas", "not_applied", 3) == (
            refused["code"],
            refused["outcome"],
            refused["limit"],
        )
        for fewer, followed in (
            (2, lambda: 201 == append(http, led[0], "strict", 0).status_code),
            (3, lambda: thin(append(http, led[0], "strict", 0))),
        ):
            until(partial(is_set, http, f"{first.url}/v1/topics/strict", min_replicas=fewer))
            until(followed)  # a partition that is open follows its topic
        # A majority is enough here.
        appended(http, f"{first.url}/v1/topics/idle/partitions/0/records", b"x")
        until(lambda: not http.get(f"{first.url}/v1/nodes/{gone}").json()["alive"])
        few = until(lambda: coded(http.put(f"{first.url}/v1/topics/more"), "too_few_nodes"))
        assert (3, 2) == (few["value"], few["limit"])
        made = asked(http, "PUT", f"{first.url}/v1/topics/more", json={"allow_fewer_replicas": True})
        assert (3, 2) == (made.json()["replicas"], made.json()["replicas_placed"])
        sentences = [f"idle/{number} is not in sync on {gone}" for number in range(4)]
        sentences += [
            f"strict/{number} refuses appends: 2 replica(s) in sync, min_replicas is 3" for number in range(2)
        ]
        sentences += [f"node {gone} does not answer", "more has 2 of the 3 replicas asked for"]
        assert EXIT_FAILED == until(lambda: said(status(), *sentences))
        for each in cluster.members[:2]:  # any node tells it of the whole cluster
            wrong = {("under_replicated", place) for place in ("more", "idle/0", "strict/1")}
            wrong |= {("node_dead", gone), ("appends_refused", "strict/0")}
            told = until(partial(known, http, each.url, wrong, silent=[gone]))
            assert "critical" == told["status"]
        fewer_replicas = "topics have fewer replicas than asked for: more (2 of 3)"
        until(lambda: fewer_replicas in "; ".join(http.get(ready).json()["warnings"]))
        alive = cluster.members[:2]
        until(lambda: 7 == sum(metric(http, each.url, UNDER_REPLICATED) for each in alive))
        until(lambda: 2 == sum(metric(http, each.url, REFUSING) for each in alive))
        until(lambda: 1 <= metric(http, first.url, "laminar_node_topics_with_fewer_replicas"))

        until(lambda: 200 == http.get(current).status_code)  # its own replicas have caught up
        until(lambda: is_silent(cluster, http, 1, besides=gone))
        cluster.kill(1)
        until(lambda: any("the catalog has no leader" in each for each in http.get(ready).json()["warnings"]))
        until(lambda: any("have no leader: idle/0" in each for each in http.get(ready).json()["warnings"]))
        until(lambda: 0 == metric(http, first.url, "laminar_catalog_is_led"))
        behind = "replicas of this node have not caught up"
        until(lambda: any(behind in each for each in http.get(current).json().get("reasons", ())))
        assert 503 == http.get(current).status_code
        until(lambda: 7 == metric(http, first.url, LEADERLESS))
        assert EXIT_FAILED == until(
            lambda: said(status(), "the catalog has no leader", "idle/3 has no leader")
        )

        with laminar.connect(first.url, timeout=60) as client:
            assert 5 == sum(1 for _ in client.topic("idle").read())
        assert EXIT_DONE == run(["consume", "idle", "--url", first.url])
        assert b"x\n" * 5 == capfd.readouterr().out.encode()


def health(http: httpx.Client, url: str) -> dict[str, Any]:
    """What a node says of the whole cluster."""
    found: dict[str, Any] = http.get(f"{url}/v1/health").json()
    return found


def known(
    http: httpx.Client, url: str, wrong: set[tuple[str, str]], *, silent: list[str]
) -> dict[str, Any] | None:
    """What a node says, once it has these problems by code and subject, and these nodes are silent.

    An answer may be some tenths of a second old.
    """
    told = health(http, url)
    problems = {(each["code"], each["subject"]) for each in told["problems"]}
    return told if wrong <= problems and told["silent"] == silent else None


def is_silent(cluster: LocalCluster, http: httpx.Client, number: int, *, besides: str) -> bool:
    """Whether a node that stands still is not counted as well, though all hear it yet. It stands still then.

    False if it was taken for dead before health was asked for; then it goes on.
    """
    name, url = cluster.members[number].name, cluster.urls[0]
    until(lambda: http.get(f"{url}/v1/nodes/{name}").json()["alive"])
    until(lambda: known(http, url, {("node_dead", besides)}, silent=[besides]))
    pids = cluster.pids(number)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    told = until(lambda: name in (found := health(http, url))["silent"] and found)
    if {name} == {each["subject"] for each in told["problems"] if each["code"] == "node_silent"}:
        assert [name, besides] == told["silent"]
        return True
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    return False


def is_set(http: httpx.Client, path: str, **settings: int) -> bool:
    """Change settings of a topic; return whether they are changed."""
    present = {"If-Match": http.get(path).headers["etag"]}
    changed = http.patch(path, json={"settings": settings}, headers=present)
    assert changed.status_code in (200, 412, 503), changed.text
    return changed.status_code == 200


def append(http: httpx.Client, url: str, topic: str, number: int) -> httpx.Response:
    """One record."""
    return http.post(f"{url}/v1/topics/{topic}/partitions/{number}/records", content=b"x")


def leaders(http: httpx.Client, url: str, topic: str) -> list[str]:
    """URLs of all partitions' leaders, once each has one that is alive; else empty."""
    told = http.get(f"{url}/v1/topics/{topic}/partitions").json()["partitions"]
    found = [each["leader"]["url"] for each in told if each["leader"] is not None]
    return found if len(found) == len(told) else []


def coded(answer: httpx.Response, code: str) -> dict[str, Any] | None:
    """The problem, if it is this one."""
    problem: dict[str, Any] = answer.json()
    return problem if problem.get("code") == code else None


def thin(answer: httpx.Response, *, value: int | None = None) -> dict[str, Any] | None:
    """The problem, if it is that too few are in sync; so many, if that is given."""
    problem = coded(answer, "too_few_replicas")
    return problem if problem and value in (None, problem["value"]) else None


def said(shown: tuple[int, str], *texts: str) -> int | None:
    """The exit code, once all of this is shown."""
    code, text = shown
    return code if all(each in text for each in texts) else None
