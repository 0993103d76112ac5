"""Operators' commands on one node: what they change, what they say, and with which code they end."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

import laminar as library
from laminar.cli.commands.admin import doctor
from laminar.cli.commands.admin.doctor import Answers
from laminar.cli.commands.cluster import changes_of
from tests.cli.conftest import Command

_numbers = itertools.count()


@pytest.fixture
def node(on_node: str, laminar: Command) -> str:
    """The node's name, once the catalog takes commands about it."""
    (row,) = json.loads(laminar("node", "list", "--json").out)
    deadline = time.monotonic() + 120
    while laminar("node", "undrain", row["node"]).code:
        assert time.monotonic() < deadline
    return str(row["node"])


@pytest.fixture
def topic(node: str, laminar: Command) -> Iterator[str]:
    """A topic of two partitions."""
    name = f"admin-{next(_numbers)}"
    assert 0 == laminar("topic", "create", name, "--partitions", "2").code
    yield name
    assert 0 == laminar("topic", "delete", name, "--yes").code


def shown(laminar: Command, node: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(laminar("node", "describe", node, "--json").out)
    return found


def test_weight_and_zone_are_set_and_taken_back(node: str, laminar: Command) -> None:
    for name, value, announced in (("weight", "2.5", 1.0), ("zone", "west", "")):
        assert 0 == laminar("node", name, node, value).code
        assert value == str(shown(laminar, node)[name])
        back = json.loads(laminar("node", name, node, "announced", "--json").out)
        assert (announced, None) == (back[name], back[f"set_{name}"])

    assert f"{node}\n" == laminar("node", "describe", node, "-o", "names").text
    assert "weight: 1.0" in laminar("node", "describe", node).text
    wrong = laminar("node", "weight", node, "heavy")
    assert (2, True) == (wrong.code, "`announced`" in wrong.err)
    assert (1, True) == ((ran := laminar("node", "weight", "nobody", "1")).code, "no_such_node" in ran.err)


def test_a_drain_that_is_blocked_says_so_and_ends_with_3(
    node: str, topic: str, laminar: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only node: its replicas have nowhere to go. Without waiting it is begun, and that is all."""
    monkeypatch.setattr("laminar.cli.commands.admin.node.BLOCKED_S", 0.0)

    waited = laminar("node", "drain", node)
    begun = laminar("node", "drain", node, "--no-wait")
    status = laminar("cluster", "status", "--strict")
    listed = laminar("node", "list")
    refused = laminar("node", "remove", node, "--yes")
    cancelled = laminar("operations", "cancel", f"drain:{node}")

    assert (3, b"") == (waited.code, waited.out)
    assert "would be left" in waited.err and f"laminar node undrain {node}" in waited.err
    assert 0 == begun.code
    assert f"node {node} drains: " in begun.text and "it holds" in begun.text
    assert (1, True) == (status.code, f"node {node} drains: " in status.text)
    assert "all well" not in status.text
    assert "draining" in listed.text
    assert (1, True) == (refused.code, "node_in_use" in refused.err)
    assert 0 == cancelled.code
    assert not shown(laminar, node)["draining"]
    assert (1, True) == ((ran := laminar("operations", "cancel", "drain:x")).code, "no_such_op" in ran.err)


def test_a_topic_is_altered_and_what_is_left_to_do_is_named(topic: str, laminar: Command) -> None:
    refused = laminar("topic", "alter", topic, "--replicas", "3")
    allowed = laminar("topic", "alter", topic, "--replicas", "3", "--allow-fewer-replicas")
    listed = json.loads(laminar("operations", "list", "replicas:", "--json").out)
    status = laminar("cluster", "status", "--strict")
    cannot = laminar("operations", "cancel", f"replicas:{topic}")

    assert (4, True) == (refused.code, "too_few_nodes" in refused.err)
    assert (0, True) == (allowed.code, f"{topic} has 1 of 3 replicas" in allowed.err)
    (operation,) = [each for each in listed if each["what"] == topic]
    assert ("0/2", ["3 replicas are asked for, 1 node may hold replicas"]) == (
        operation["progress"],
        operation["blocked_by"],
    )
    assert (1, True) == (status.code, f"topic {topic} asks for 3 replicas: 0 of 2" in status.text)
    assert (1, True) == (cannot.code, "not_cancellable" in cannot.err)

    words = ("--setting", "retention_ms=86400000")
    altered = json.loads(laminar("topic", "alter", topic, "--replicas", "1", *words, "--json").out)
    assert (1, {"retention_ms": 86400000}) == (altered["replicas"], altered["settings"])
    removed = json.loads(laminar("topic", "alter", topic, "--setting", "retention_ms=null", "--json").out)
    assert {} == removed["settings"]
    assert 2 == laminar("topic", "alter", topic).code


def test_a_system_topic_with_too_few_replicas_is_named_too(node: str, on_node: str, laminar: Command) -> None:
    """`_transactions`: the loss of its only node would end every transaction."""
    with library.connect() as client:
        client.request_json("POST", "/v1/producers", {"name": "copier"})
    words = ("topic", "alter", "_transactions", "--replicas")

    assert 0 == laminar(*words, "3", "--allow-fewer-replicas").code
    status = laminar("cluster", "status", "--strict")
    assert 0 == laminar(*words, "1").code

    assert (1, True) == (status.code, "_transactions has 1 of the 3 replicas asked for" in status.text)
    assert "all well" not in status.text


def test_a_partition_is_pinned_and_unpinned_and_led(node: str, topic: str, laminar: Command) -> None:
    words = ("--to", node, "--reason", "a test", "--json")
    pinned = json.loads(laminar("partition", "move", f"{topic}/1", *words).out)
    led = json.loads(laminar("leader", "transfer", f"{topic}/1", "--to", node, "--json").out)
    unpinned = laminar("partition", "unpin", f"{topic}/1")
    refused = laminar("leader", "transfer", f"{topic}/1", "--to", "nobody")

    assert {"nodes": [node], "owner": "operator", "reason": "a test"} == pinned["pin"]
    assert (node, node) == (led["preferred_leader"], led["leader"])
    assert f"{topic}/1: on {node}; wanted on {node}\n" == unpinned.text
    assert (1, True) == (refused.code, "field=node" in refused.err)
    for wrong in ("flights", f"{topic}/x", "/1"):
        assert 2 == laminar("partition", "unpin", wrong).code


def test_a_balance_says_why_nothing_moves(node: str, laminar: Command) -> None:
    for words in (("balance",), ("balance", "--dry-run")):
        found = json.loads(laminar(*words, "--json").out)
        assert ("none", False, node) == (found["move"], found["done"], found["nodes"][0]["node"])
        assert "balance_threshold is 0" in laminar(*words).text
        assert f"{node}\n" == laminar(*words, "-o", "names").text


@pytest.mark.usefixtures("any_disk_will_do")
def test_a_doctor_without_a_finding_says_what_it_checked(topic: str, laminar: Command) -> None:
    healthy = laminar("cluster", "doctor")

    assert (0, True) == (healthy.code, healthy.text.endswith("partitions: nothing found\n")), healthy.text
    assert [] == json.loads(laminar("cluster", "doctor", "--json").out)["findings"]


def test_a_doctor_says_what_to_do_about_each_finding(topic: str, laminar: Command) -> None:
    laminar("topic", "alter", topic, "--replicas", "3", "--allow-fewer-replicas")

    ran = laminar("cluster", "doctor", "--json")

    found = json.loads(ran.out)["findings"]
    assert 1 == ran.code
    assert {"under-replicated", "placement"} <= {each["check"] for each in found}
    assert {f"{topic}/0", f"{topic}/1", topic} <= {each["where"] for each in found}
    assert all(each["do"] for each in found)
    assert "1 node may hold replicas" in laminar("cluster", "doctor").text
    laminar("topic", "alter", topic, "--replicas", "1")


def machine(**numbers: float) -> Answers:
    """A node's answers with these metrics."""
    disk = {"free_bytes": 100, "low_water_bytes": 10, "appends_refused": False}
    metrics = {f"laminar_{name}": [value] for name, value in numbers.items()}
    return Answers(ready={"disk": disk}, ahead_s=0.0, version="1", metrics=metrics)


def test_clocks_are_compared_with_each_other() -> None:
    """Not with that of the machine on which the doctor runs."""
    answers = {name: machine() for name in "abc"}
    for found in answers.values():
        found.ahead_s = -100.0
    assert [] == list(doctor.of_clocks(answers))

    answers["b"].ahead_s = -88.0
    (skewed,) = doctor.of_clocks(answers)

    assert ("clocks", "b", "its clock is 12 s ahead") == (skewed.check, skewed.where, skewed.finding)


def test_the_doctor_names_certificates_that_end_and_records_that_are_missing() -> None:
    day = 86_400.0
    fine = Answers(
        metrics={
            "laminar_tls_certificate_left_seconds": [15 * day],
            "laminar_tls_ca_left_seconds": [61 * day],
        }
    )
    soon = Answers(metrics={"laminar_tls_certificate_left_seconds": [20 * day, 3 * day]})
    late = Answers(
        metrics={"laminar_tls_ca_left_seconds": [-1.0], "laminar_audit_dropped_total": [2.0, 0.0, 3.0]}
    )

    assert [] == list(doctor.of_certificates({"a": fine, "b": Answers()}))
    found = list(doctor.of_certificates({"a": soon, "b": late}))
    assert [("a", "its certificate ends in 3 days"), ("b", "its CA has ended")] == [
        (each.where, each.finding) for each in found
    ]
    assert [] == list(doctor.of_audit({"a": fine}))
    assert ["5 records"] == [each.finding[:9] for each in doctor.of_audit({"b": late})]


def test_slow_or_full_disks_and_low_limits_are_found() -> None:
    quick = machine(disk_sync_seconds_count=1000, disk_sync_seconds_sum=1, node_open_files_limit=20_000)
    slow = machine(
        disk_sync_seconds_count=1000,
        disk_sync_seconds_sum=200,
        disk_longest_sync_seconds=9,
        node_open_files_limit=1024,
    )
    full, refusing = machine(), machine()
    full.ready = {"disk": {"free_bytes": 15, "low_water_bytes": 10, "appends_refused": False}}
    refusing.ready = {"disk": {"free_bytes": 5, "low_water_bytes": 10, "appends_refused": True}}

    assert [] == list(doctor.of_disks({"a": quick}))
    assert ["takes 200 ms", "took 9 s", "1024 files"] == [
        " ".join(each.finding.split()[-len(words.split()) :])
        for each, words in zip(
            doctor.of_disks({"a": slow}), ("takes 200 ms", "took 9 s", "1024 files"), strict=True
        )
    ]
    fuller = machine()
    fuller.ready = {"disk": refusing.ready["disk"] | {"consumers_refused": True}}
    wanted = ("15 bytes are free", "appends are refused: 5", "appends and consumers are refused: 5")
    found = doctor.of_disks({"a": full, "b": refusing, "c": fuller})
    assert list(wanted) == [each.finding[: len(words)] for each, words in zip(found, wanted, strict=True)]


def admin_node(name: str, **fields: Any) -> dict[str, Any]:
    """A node as `/v1/admin/nodes` describes it."""
    usual = {"alive": True, "draining": False, "leads": 10, "weight": 1.0, "catalog_voter": True}
    return {"node": name, "code_version": 1} | usual | fields


def test_programs_ports_catalog_and_leaders_are_checked() -> None:
    nodes = [admin_node(name) for name in "abc"]
    healthy = {name: machine() for name in "abc"}
    about = {"catalog_leader": "a"}
    assert [] == [
        *doctor.of_programs({"nodes": nodes}, healthy),
        *doctor.of_nodes(nodes, healthy),
        *doctor.of_catalog(about, nodes),
        *doctor.of_leaders(nodes),
    ]

    healthy["c"].version = "2"
    healthy["b"].closed.append("b:7170")
    healthy["a"].ready = None
    old = [admin_node("a", leads=20), admin_node("b", code_version=0), admin_node("c", catalog_voter=False)]
    dead = [*old, admin_node("d", alive=False)]

    assert ["c", "b"] == [each.where for each in doctor.of_programs({"nodes": old}, healthy)]
    assert [("nodes", "a"), ("ports", "b"), ("nodes", "d")] == [
        (each.check, each.where) for each in doctor.of_nodes(dead, healthy)
    ]
    last = list(doctor.of_nodes(dead, healthy))[-1]
    assert "laminar node drain d" in last.do and "balanced" in last.do
    assert ["a, b"] == [each.where for each in doctor.of_catalog(about, old)]
    assert ["d"] == [each.where for each in doctor.of_catalog(about, dead)]
    assert ["no leader"] == [each.finding[7:16] for each in doctor.of_catalog({"catalog_leader": ""}, old)]
    assert ["a"] == [each.where for each in doctor.of_leaders(old)]
    assert [] == list(doctor.of_leaders([admin_node("a", leads=20, weight=2.0), *nodes[1:]]))


def test_each_partition_is_checked() -> None:
    def partition(number: int, leader: str | None, *in_sync: bool, **more: Any) -> dict[str, Any]:
        named = zip("abc", in_sync, strict=False)
        replicas = [{"node": name, "in_sync": each, "reachable": each} for name, each in named]
        return {"partition": number, "leader": leader and {"node": leader}, "replicas": replicas} | more

    topics = {"t": {"replicas": 3, "settings": {"min_replicas": 2}}}
    lost = {"node": "c", "in_sync": True, "reachable": True, "state": "lost"}
    found = doctor.of_partitions(
        topics,
        {
            "t": [
                partition(0, "a", True, True, True),
                partition(1, None, False, False, False),
                partition(2, "a", True, True, False),
                partition(3, "a", True, False, False),
                partition(4, "a", True, True, replicas=[lost] * 3, damaged=[{"node": "a"}]),
                partition(5, "a", True, True, True, status="sealing"),
            ]
        },
    )

    assert [
        ("leaderless", "t/1"),
        ("under-replicated", "t/2"),
        ("appends refused", "t/3"),
        ("under-replicated", "t/3"),
        *[("replicas", "t/4")] * 3,
        ("damage", "t/4"),
        ("route", "t/5"),
    ] == [(each.check, each.where) for each in found]


def test_many_moves_are_counted_and_what_blocks_one_is_said() -> None:
    def operation(kind: str, what: str, **more: Any) -> dict[str, Any]:
        return {"kind": kind, "what": what, "done": 1, "total": 3, "why": "w", "blocked_by": []} | more

    moves = [operation("move", f"t/{number}") for number in range(30)]
    steps = [operation("join", "t/0 on a"), operation("leave", "t/0 on b")]
    blocked = operation("pin", "t/99", blocked_by=["node x is not alive"])

    found = changes_of([blocked, *moves, *steps])

    assert "t/99 is not where it should be: 1 of 3 replicas are, w; blocked: node x is not alive" == found[0]
    assert "11 more partitions are not where they should be" in found
    assert found[-1].startswith("2 replicas join or leave")
    assert 22 == len(found)
