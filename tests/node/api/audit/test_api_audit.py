"""The audit of a real node with tokens: what is in `_audit`, who reads it, and that no client writes it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from laminar.cli import run
from laminar.testing.cluster import LocalCluster
from laminar.wire.audit import AuditRecord
from tests.node.api.asking import until
from tests.node.api.token_node import TokenNode

AUDIT = "/v1/topics/_audit"
SHARDS = 2


class Watched(TokenNode):
    """The node, and its audit."""

    def records(self) -> list[AuditRecord]:
        answer = self.ask("admin", "GET", f"{AUDIT}/partitions/0/records?limit=10000")
        if answer.status_code in (404, 503):  # not made yet
            return []
        assert 200 == answer.status_code, answer.text
        return [msgspec.json.decode(each["value"], type=AuditRecord) for each in answer.json()["records"]]

    def until(self, *wanted: dict[str, Any]) -> list[AuditRecord]:
        """The first record with each set of members, once all are there."""
        until = time.monotonic() + 60
        while True:
            known = [msgspec.structs.asdict(record) for record in self.records()]
            found = [next((each for each in known if w.items() <= each.items()), None) for w in wanted]
            if None not in found:
                return [msgspec.convert(each, AuditRecord) for each in found]
            assert time.monotonic() < until, (wanted, known)
            time.sleep(0.05)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    settings: dict[str, str | int] = {"access": "tokens", "default_replicas": 1}
    with (
        LocalCluster(tmp_path_factory.mktemp("audit"), nodes=1, shards=SHARDS, settings=settings) as cluster,
        httpx.Client(timeout=60, trust_env=False) as http,
    ):
        found = Watched(cluster, http, {"admin": cluster.admin_token})
        found.make("reader", ("read", "orders"))
        assert 201 == found.ask("admin", "PUT", "/v1/topics/orders?", json={}).status_code
        yield found


def test_a_call_of_an_admin_is_there_with_its_outcome_whichever_shard_was_asked(node: Watched) -> None:
    """Shards that lead the partition, and those that do not."""
    names = []
    for shard in range(SHARDS):
        names.append(f"shard-{shard}")
        assert 201 == node.ask("admin", "PUT", f"/v1/topics/shard-{shard}", json={}, shard=shard).status_code
    taken = node.ask("admin", "PUT", "/v1/topics/shard-0", json={"partitions": 2})
    assert 409 == taken.status_code
    made = node.ask("admin", "POST", "/v1/admin/tokens", json={"name": "x", "grants": [{"role": "read"}]})

    created = [{"operation": "create_topic", "path": f"/v1/topics/{name}", "status": 201} for name in names]
    *calls, conflict, token = node.until(
        *created,
        {"status": 409, "code": "already_exists"},
        {"operation": "create_token", "shard": 0, "subject": {"location": made.headers["location"]}},
    )

    for shard, call in enumerate(calls):
        assert ("call", "admin", "127.", shard, {"topic": names[shard]}) == (
            call.kind,
            call.principal,
            call.address[:4],
            call.shard,
            {"topic": call.subject["topic"]},
        )
        assert f"lam_{call.credential}" == node.tokens["admin"].rpartition("_")[0][:20]
    assert "PUT" == conflict.method
    assert ("call", 201) == (token.kind, token.status)


def test_limits_of_each_principal_do_not_hold_for_the_audit(node: Watched) -> None:
    """Each of its batches brings a new idempotency key; the limits of `*` are for those who ask."""
    limits = "/v1/admin/limits/*"
    version = node.ask("admin", "GET", limits).headers["etag"]
    answer = node.ask("admin", "PUT", limits, json={"producers": 1}, headers={"if-match": version})
    assert 200 == answer.status_code, answer.text
    for number in range(3):
        path = f"/v1/topics/batch-{number}"
        assert 201 == node.ask("admin", "PUT", path, json={}).status_code
        node.until({"path": path, "status": 201})
    assert (
        200
        == node.ask("admin", "PUT", limits, json={}, headers={"if-match": answer.headers["etag"]}).status_code
    )


def test_refusals_are_there_with_who_was_refused(node: Watched) -> None:
    """Also one that a handler finds, whose topic is in the body; and what a reader may do is not there."""
    assert 401 == node.ask("", "GET", "/v1/topics").status_code
    assert 403 == node.ask("reader", "DELETE", "/v1/topics/orders", headers={"if-match": "*"}).status_code
    node.make("driver", ("write", "mine"))
    part = {"topic": "orders", "partition": 0, "stages": [1]}
    commit = {"epoch": 1, "parts": [part]}
    assert 403 == node.ask("driver", "PUT", "/v1/sinks/mine/batches/0", json=commit).status_code
    site = node.ask("", "GET", "/livez", headers={"origin": "https://evil.example"})
    assert (403, "cross_site") == (site.status_code, site.json()["code"])
    assert 200 == node.ask("reader", "GET", "/v1/topics/orders").status_code

    nobody, reader, *_ = node.until(
        {"kind": "refused", "principal": "anonymous", "status": 401, "code": "unauthorized"},
        {"kind": "refused", "principal": "reader", "status": 403, "operation": "delete_topic"},
        {"kind": "refused", "principal": "driver", "status": 403, "operation": "commit_batch"},
        {"kind": "refused", "principal": "anonymous", "status": 403, "code": "cross_site"},
    )

    assert "127." == nobody.address[:4]  # the first of the minute: perhaps one with a token that was too new
    assert {"topic": "orders"} == reader.subject
    assert "describe_topic" not in {record.operation for record in node.records()}


def test_a_flood_of_refusals_does_not_fill_the_topic(node: Watched) -> None:
    """And is counted."""
    before = len(node.records())
    for _ in range(300):
        assert 401 == node.http.get(f"{node.cluster.urls[0]}/v1/topics?prefix=secret").status_code
    node.make("after", ("read", "x"))
    node.until({"kind": "call", "operation": "create_token"})

    assert len(node.records()) - before < 20
    metrics = ""

    def are_counted() -> bool:
        nonlocal metrics
        metrics = node.ask("admin", "GET", "/metrics", shard=0).text
        counts = [line for line in metrics.splitlines() if line.startswith("laminar_audit_refused_total{")]
        return 300 <= sum(float(line.split()[-1]) for line in counts)

    until(are_counted, lambda: metrics)
    assert 'laminar_audit_dropped_total{process="shard-0"} 0' in metrics


def test_no_secret_is_in_the_topic_or_the_log(node: Watched) -> None:
    node.until({"kind": "refused", "status": 401})
    text = msgspec.json.encode(node.records()).decode()
    log = node.cluster.members[0].log.read_text()
    assert "create_topic" in text and "refused: anonymous" in log
    for token in node.tokens.values():
        assert token not in text + log and token.split("_", 2)[2] not in text + log
    assert "prefix=secret" not in text + log


CHANGES = [
    ("PUT", AUDIT, {}),
    ("DELETE", AUDIT, None),
    ("POST", f"{AUDIT}/records", b"x"),
    ("POST", f"{AUDIT}/partitions/0/records", b"x"),
    ("DELETE", f"{AUDIT}/partitions/0/records?before=1", None),
    ("PUT", f"{AUDIT}/channels/c", {}),
    ("PUT", f"{AUDIT}/cursors/c", {"positions": {"0": 0}}),
    ("POST", f"{AUDIT}/routes", {"after": 0, "inputs": [0]}),
    ("PUT", f"{AUDIT}/partitions/0/uploads/u/parts/0", b"x"),
    ("POST", "/v1/sinks/s/batches/0/stages?topic=_audit&partition=0&stage=1&epoch=1", b"x"),
    (
        "PUT",
        "/v1/sinks/s/batches/0",
        {"epoch": 1, "parts": [{"topic": "_audit", "partition": 0, "stages": [1]}]},
    ),
    ("PATCH", AUDIT, {"settings": {"flush": "interval"}}),
    ("PATCH", AUDIT, {"settings": {"retention_ms": 1000}}),
    ("PATCH", AUDIT, {"settings": {"retention_bytes": 0}}),
]


@pytest.mark.parametrize(("method", "target", "body"), CHANGES, ids=lambda value: str(value)[:50])
def test_no_client_writes_or_harms_the_topic(node: Watched, method: str, target: str, body: Any) -> None:
    """Not even an admin of everything."""
    node.until({"kind": "call"})
    node.ask("admin", "POST", "/v1/sinks/s?epoch=1")
    more = {"content": body} if isinstance(body, bytes) else {"json": body} if body is not None else {}
    answer = node.ask("admin", method, target, headers={"if-match": "*"}, **more)
    assert (422, "invalid") == (answer.status_code, answer.json()["code"]), answer.text
    assert 401 == node.ask("", method, target, headers={"if-match": "*"}, **more).status_code
    if target.startswith(AUDIT):  # who tries is noted
        node.until({"kind": "call", "status": 422, "path": target.partition("?")[0], "method": method})


def test_only_an_admin_of_everything_reads_it_and_may_say_how_long_it_is_kept(node: Watched) -> None:
    node.until({"kind": "call"})
    node.make("all-reader", ("read", ""))
    node.make("topics-admin", ("admin", "_audit"))
    for who in ("all-reader", "topics-admin"):
        assert 403 == node.ask(who, "GET", f"{AUDIT}/partitions/0/records").status_code

    kept = {"retention_ms": 86_400_000, "retention_bytes": None}
    changed = node.ask("admin", "PATCH", AUDIT, json={"settings": kept}, headers={"if-match": "*"})
    assert (200, {"retention_ms": 86_400_000}) == (changed.status_code, changed.json()["settings"])


def test_the_command_shows_it(
    node: Watched, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node.until({"kind": "refused", "principal": "reader"})
    for name in ("LAMINAR_URL", "LAMINAR_TOKEN", "LAMINAR_CA"):
        monkeypatch.delenv(name, raising=False)
    cluster = ["--url", node.cluster.urls[0], "--token", node.tokens["admin"]]

    assert 0 == run(["audit", "--refused", "--principal", "reader", *cluster])
    shown = capsys.readouterr().out
    assert " refused reader from 127." in shown and " DELETE /v1/topics/orders: 403 forbidden" in shown
    assert 0 == run(["audit", "--json", "-n", "1", *cluster])
    first = json.loads(capsys.readouterr().out)
    assert first["kind"] in ("call", "refused") and first["node"] == node.records()[0].node
    reader = ["--url", node.cluster.urls[0], "--token", node.tokens["reader"]]
    assert 0 != run(["audit", *reader])


def test_an_admin_is_answered_while_no_record_can_be_written(tmp_path: Path) -> None:
    """Here there is no room for the topic `_audit`; who makes room is not locked out, and nothing is lost."""
    settings: dict[str, str | int] = {"access": "open", "default_replicas": 1, "max_partitions": 1}
    with (
        LocalCluster(tmp_path, nodes=1, shards=1, settings=settings) as cluster,
        httpx.Client(timeout=60, trust_env=False) as http,
    ):
        # With tokens from the start `_audit` could come first: by a refusal while no one had a token.
        assert 201 == http.put(f"{cluster.urls[0]}/v1/topics/made", json={}).status_code
        settings["access"] = "tokens"
        cluster.kill(0)
        cluster.restart(0)
        found = Watched(cluster, http, {"admin": cluster.admin_token})
        assert 429 == found.ask("admin", "PUT", "/v1/topics/more", json={}).status_code
        until = time.monotonic() + 60
        while "_audit accepts no records" not in cluster.members[0].log.read_text():
            assert time.monotonic() < until
            time.sleep(0.05)
        metrics = found.ask("admin", "GET", "/metrics").text
        assert 0 < int(re.findall(r'laminar_audit_waiting\{process="shard-0"\} (\d+)', metrics)[0])
        deleted = found.ask("admin", "DELETE", "/v1/topics/made", headers={"if-match": "*"})
        assert 202 == deleted.status_code
        assert "call: admin DELETE /v1/topics/made" in cluster.members[0].log.read_text()

        found.until({"operation": "create_topic", "status": 429}, {"operation": "delete_topic"})
        calls = [each for each in found.records() if each.operation in ("create_topic", "delete_topic")]
        assert 2 == len(calls)
