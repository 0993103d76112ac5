"""The trace of a real node with tokens: each event of a record's life, who did it, and who may read it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from laminar.testing import nodes
from laminar.testing.cluster import LocalCluster
from tests.node.api.asking import fresh_metrics
from tests.node.api.token_node import TokenNode

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
UNSAMPLED = "00-" + "ab" * 16 + "-00f067aa0ba902b7-00"
TRACE_ID = PARENT[3:35]
ENVELOPES = {"content-type": "application/vnd.laminar.records+json"}


class Traced(TokenNode):
    """The node, and its trace."""

    def done(self, who: str, method: str, target: str, **more: Any) -> Any:
        answer = self.ask(who, method, target, **more)
        assert answer.is_success, answer.text
        return answer.json()

    def topic(self, name: str, **settings: Any) -> str:
        self.done("admin", "PUT", f"/v1/topics/{name}", json={"settings": settings})
        return name

    def append(self, topic: str, *records: dict[str, Any], who: str = "app", **headers: str) -> Any:
        return self.done(
            who,
            "POST",
            f"/v1/topics/{topic}/partitions/0/records",
            json=list(records),
            headers=ENVELOPES | headers,
        )

    def receive(self, topic: str, *, shard: int = 0) -> dict[str, Any]:
        path = f"/v1/topics/{topic}/channels/c/receive"
        jobs = self.done("app", "POST", path, json={"max": 1, "wait_ms": 30_000}, shard=shard)["jobs"]
        assert jobs, "nothing was given"
        found: dict[str, Any] = jobs[0]
        return found

    def settle(self, topic: str, **said: Any) -> None:
        answer = self.done("app", "POST", f"/v1/topics/{topic}/channels/c/acks", json=said)
        assert not answer["late"], answer

    def events(self, who: str = "admin", **by: Any) -> list[dict[str, Any]]:
        """All events that a principal finds, in as many steps as it takes."""
        found, after = [], None
        while True:
            query = by if after is None else by | {"after": after}
            answer = self.done(who, "GET", "/v1/trace", params=query)
            found += answer["events"]
            after = answer["after"]
            if after is None:
                return found

    def until(self, count: int, who: str = "admin", **by: Any) -> list[dict[str, Any]]:
        """So many events, as soon as they are there."""
        until = time.monotonic() + 60
        while len(found := self.events(who, **by)) < count:
            assert time.monotonic() < until, found
            time.sleep(0.1)
        assert len(found) == count, found
        return found

    def written(self) -> None:
        """Wait until all events that were made are in `_trace`."""
        until = time.monotonic() + 60
        while (found := self.metrics())["laminar_trace_events_total"] != found["laminar_trace_written_total"]:
            assert time.monotonic() < until, found
            time.sleep(0.1)

    def metrics(self) -> dict[str, float]:
        headers = {"authorization": f"Bearer {self.tokens['admin']}"}
        url = self.cluster.urls[0]
        with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
            lines = fresh_metrics(http).splitlines()
        found: dict[str, float] = {}
        for line in lines:
            if line.startswith("laminar_trace_"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                found[name] = found.get(name, 0) + float(value)
        return found


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    settings: dict[str, str | int] = {"access": "tokens", "default_replicas": 1}
    with (
        LocalCluster(tmp_path_factory.mktemp("trace"), nodes=1, shards=2, settings=settings) as cluster,
        httpx.Client(timeout=60, trust_env=False) as http,
    ):
        found = Traced(cluster, http, {"admin": cluster.admin_token})
        found.make("app", ("write", "orders"), ("read", "orders"))
        found.make("other", ("read", "others"))
        yield found


def words(events: list[dict[str, Any]]) -> list[str]:
    return [each["event"] for each in events]


def test_a_record_is_followed_with_who_did_what(node: Traced) -> None:
    """Append, deliveries, refusals, death, replay, acknowledgement: each by whom, and from where."""
    topic = node.topic("orders-life", trace="all")
    node.done("admin", "PUT", f"/v1/topics/{topic}/channels/c", json={"settings": {"max_attempts": 2}})
    node.append(topic, {"value": "a", "key": "order-1"}, traceparent=PARENT)
    job = node.receive(topic, shard=1)
    node.settle(topic, nack=[{"token": job["token"], "delay_ms": 300, "reason": "no luck"}])
    job = node.receive(topic)
    node.settle(topic, extend=[{"token": job["token"], "timeout_ms": 60_000}])
    node.settle(topic, nack=[{"token": job["token"], "reason": "never"}])
    dead = node.done("admin", "POST", f"/v1/topics/{topic}/channels/c/dead", json={"replay": "all"})
    job = node.receive(topic)
    node.settle(topic, ack=[job["token"]])

    found = node.until(10, record=f"{topic}/0/0")

    assert words(found) == [
        *("appended", "delivered", "nacked", "delivered", "extended"),
        *("nacked", "dead", "replayed", "delivered", "acked"),
    ]
    assert dead == {"count": 1}
    assert [each.get("principal") for each in found] == [*["app"] * 7, "admin", "app", "app"]
    assert {each["address"].split(".")[0] for each in found} == {"127"}
    assert {each["node"] for each in found} == {node.cluster.members[0].name}
    assert [each.get("attempt") for each in found] == [None, 1, 1, 2, None, 2, 2, None, 1, 1]
    assert (found[2]["reason"], found[5]["reason"], found[6]["reason"]) == ("no luck", "never", "never")
    assert {(each["trace_id"], each["key"], each["channel"]) for each in found[1:]} == {
        (TRACE_ID, "order-1", "c")
    }
    assert {PARENT[36:52]} == {each["parent_id"] for each in found}
    assert found == node.events(trace_id=TRACE_ID) == node.events(key="order-1")
    assert found == node.events(trace_id=TRACE_ID, limit=3)
    history = node.done("app", "GET", f"/v1/topics/{topic}/partitions/0/records/0/history")["events"]
    told = [(each["event"], each["entry"]) for each in found if each["event"] not in ("extended",)]
    assert [(each["event"], each["entry"]) for each in history] == [
        each for each in told if each != ("nacked", found[6]["entry"])
    ]


def test_a_delayed_record_is_followed_by_its_id(node: Traced) -> None:
    topic = node.topic("orders-delayed", trace="all")
    kept, gone = node.append(
        topic, {"value": "a", "delay_ms": 400, "key": "kept"}, {"value": "b", "delay_ms": 600_000}
    )["scheduled"]
    node.done("app", "DELETE", f"/v1/topics/{topic}/delayed/{gone}")

    cancelled = node.until(2, record=f"{topic}/{gone}")
    published = node.until(1, record=f"{topic}/0/0")

    assert words(cancelled) == ["scheduled", "cancelled"]
    assert [each["principal"] for each in cancelled] == ["app", "app"]
    assert words(node.events(record=f"{topic}/{kept}")) == ["scheduled"]
    assert (published[0]["event"], published[0]["key"]) == ("published", "kept")
    assert published[0]["delayed"].split(".")[1] == kept.split(".")[2]
    assert "principal" not in published[0]


def test_who_asked_is_the_same_by_each_shard_and_route(node: Traced) -> None:
    """Also where the request is passed on, and where records of several are one batch."""
    topic = node.topic("orders-ways", trace="all")
    trace_id = "dd" * 16
    records = [{"value": "a", "key": "k", "trace_id": trace_id}]
    for path in ("/records", "/partitions/0/records"):
        for shard in range(2):
            for key in ({}, {"idempotency-key": f"{path}{shard}"}):
                node.done(
                    "app",
                    "POST",
                    f"/v1/topics/{topic}{path}",
                    json=records,
                    headers=ENVELOPES | key,
                    shard=shard,
                )

    found = node.until(8, trace_id=trace_id)

    assert {("appended", "app", node.cluster.members[0].name)} == {
        (each["event"], each["principal"], each["node"]) for each in found
    }
    assert ["127"] * 8 == [each["address"].split(".")[0] for each in found]


def test_an_admin_says_how_long_the_trace_is_kept(node: Traced) -> None:
    node.append(node.topic("orders-kept", trace="all"), {"value": "a"})
    node.written()
    change: dict[str, Any] = {"headers": {"if-match": "*"}}

    node.done("admin", "PATCH", "/v1/topics/_trace", json={"settings": {"retention_ms": 3_600_000}}, **change)

    for settings in ({"retention_ms": 1}, {"flush": "commit"}, {"trace": "all"}):
        answer = node.ask("admin", "PATCH", "/v1/topics/_trace", json={"settings": settings}, **change)
        assert 422 == answer.status_code
    assert 422 == node.ask("admin", "DELETE", "/v1/topics/_trace", **change).status_code


def test_what_was_refused_makes_no_event(node: Traced) -> None:
    topic = node.topic("orders-refused", trace="all")
    path = f"/v1/topics/{topic}/partitions/0/records"
    before = node.metrics()["laminar_trace_events_total"]

    assert 412 == node.ask("app", "POST", path, content=b"x", headers={"if-match": '"7"'}).status_code
    assert 403 == node.ask("other", "POST", path, content=b"x").status_code
    wrong = {"value": "x", "trace_id": "00" * 16, "headers": {"traceparent": PARENT}}
    refused = node.ask("app", "POST", path, json=[wrong], headers=ENVELOPES)
    assert (422, "records[0].trace_id") == (refused.status_code, refused.json()["field"])
    assert 422 == node.ask("app", "POST", path + "?trace_id=xyz", content=b"x").status_code

    assert before == node.metrics()["laminar_trace_events_total"]


def test_a_traceparent_gives_way_to_what_a_record_says(node: Traced) -> None:
    topic = node.topic("orders-parents")
    own = {"value": "a", "trace_id": "cd" * 16}
    node.append(
        topic, own, {"value": "b", "headers": {"traceparent": UNSAMPLED}}, {"value": "c"}, traceparent=PARENT
    )
    node.append(topic, {"value": "d"}, traceparent="00-zz")

    path = f"/v1/topics/{topic}/partitions/0/records"
    records = node.done("app", "GET", path)["records"]

    assert [each.get("trace_id") for each in records] == ["cd" * 16, "ab" * 16, TRACE_ID, None]
    assert [each.get("headers", {}).get("traceparent") for each in records] == [None, UNSAMPLED, PARENT, None]
    searched = {"where": {"trace_id": TRACE_ID}}
    assert [2] == [
        each["offset"]
        for each in node.done("app", "POST", f"/v1/topics/{topic}/search", json=searched)["records"]
    ]


def test_sampled_is_what_its_traceparent_says_from_its_append_to_its_end(node: Traced) -> None:
    topic = node.topic("orders-sampled", trace="sampled")
    node.done("admin", "PUT", f"/v1/topics/{topic}/channels/c", json={})
    for parent in (UNSAMPLED, PARENT.replace("4bf92f", "aaaaaa")):
        node.append(topic, {"value": "a"}, traceparent=parent)
    node.append(topic, {"value": "a"})
    for _ in range(3):
        node.settle(topic, ack=[node.receive(topic)["token"]])

    assert ["appended", "delivered", "acked"] == words(node.until(3, record=f"{topic}/0/1"))
    assert [] == node.events(record=f"{topic}/0/0") + node.events(record=f"{topic}/0/2")


def test_a_share_has_all_events_of_a_record_or_none(node: Traced) -> None:
    topic = node.topic("orders-share", trace="0.25")
    node.done("admin", "PUT", f"/v1/topics/{topic}/channels/c", json={})
    node.append(topic, *({"value": "a"} for _ in range(40)), traceparent=PARENT.replace("4bf92f", "bbbbbb"))
    for _ in range(40):
        node.settle(topic, ack=[node.receive(topic)["token"]])

    node.written()
    found = node.events(trace_id="bbbbbb" + TRACE_ID[6:])
    by_offset: dict[int, list[str]] = {}
    for each in found:
        by_offset.setdefault(each["offset"], []).append(each["event"])
    assert {("appended", "delivered", "acked")} == set(map(tuple, by_offset.values()))
    assert 5 <= len(by_offset) <= 15


def test_a_channel_says_otherwise_than_its_topic(node: Traced) -> None:
    """In both directions; and by the flag, of which the leader learns as the record is given out."""
    found: dict[str, list[str]] = {}
    for topic, of_topic, of_channel in (
        ("orders-only", "off", "all"),
        ("orders-but", "all", "off"),
        ("orders-flag", "off", "sampled"),
    ):
        node.topic(topic, trace=of_topic)
        settings = {"settings": {"trace": of_channel}}
        node.done("admin", "PUT", f"/v1/topics/{topic}/channels/c", json=settings)
        node.append(topic, {"value": "a"}, traceparent=PARENT.replace("4bf92f", "cccccc"))
        node.append(topic, {"value": "a"}, traceparent=UNSAMPLED.replace("abab", "0cab"))
        for _ in range(2):
            node.settle(topic, ack=[node.receive(topic)["token"]])
    node.written()

    for topic in ("orders-only", "orders-but", "orders-flag"):
        found[topic] = [
            f"{each['event']} {each['offset']}"
            for at in range(2)
            for each in node.events(record=f"{topic}/0/{at}")
        ]
    assert {
        "orders-only": ["delivered 0", "acked 0", "delivered 1", "acked 1"],
        "orders-but": ["appended 0", "appended 1"],
        "orders-flag": ["delivered 0", "acked 0"],
    } == found
    wrong = {"settings": {"trace": "some"}}
    assert 422 == node.ask("admin", "PUT", "/v1/topics/orders-only/channels/d", json=wrong).status_code


def test_events_are_for_those_who_may_read_the_topic_and_of_deleted_ones_for_admins(node: Traced) -> None:
    trace_id = "ee" * 16
    mine, theirs = node.topic("orders-seen", trace="all"), node.topic("others-seen", trace="all")
    for topic in (mine, theirs):
        node.append(topic, {"value": "a", "trace_id": trace_id}, who="admin")
    node.until(2, trace_id=trace_id)

    assert [mine] == [each["topic"] for each in node.events("app", trace_id=trace_id)]
    assert [theirs] == [each["topic"] for each in node.events("other", trace_id=trace_id)]
    assert 403 == node.ask("other", "GET", "/v1/trace", params={"record": f"{mine}/0/0"}).status_code
    assert 403 == node.ask("app", "GET", "/v1/topics/_trace/partitions/0/records").status_code
    assert 422 == node.ask("admin", "POST", "/v1/topics/_trace/records", content=b"x").status_code

    # Its export has a cursor, which is for admins; those of `_audit` are nobody's.
    cursor = {"positions": {"0": 0}}
    assert 403 == node.ask("app", "PUT", "/v1/topics/_trace/cursors/otlp", json=cursor).status_code
    node.done("admin", "PUT", "/v1/topics/_trace/cursors/otlp", json=cursor)
    assert node.ask("admin", "DELETE", "/v1/topics/_trace/cursors/otlp").is_success
    assert 422 == node.ask("admin", "PUT", "/v1/topics/_audit/cursors/otlp", json=cursor).status_code

    node.done("admin", "DELETE", f"/v1/topics/{mine}", headers={"if-match": "*"})
    node.topic(mine)
    assert [] == node.events("app", trace_id=trace_id)
    assert 2 == len(node.events("admin", trace_id=trace_id))


@pytest.mark.parametrize(
    "query",
    [{}, {"key": "a", "record": "a/0/0"}, {"record": "a/0"}, {"record": "a/0/x"}, {"trace_id": "12"}],
    ids=str,
)
def test_a_question_that_is_none_is_refused(node: Traced, query: dict[str, str]) -> None:
    assert 422 == node.ask("admin", "GET", "/v1/trace", params=query).status_code


def test_a_topic_that_is_not_traced_makes_no_event_and_one_that_ceases_none_more(node: Traced) -> None:
    topic = node.topic("orders-off", trace="all")
    node.append(topic, {"value": "a"})
    node.until(1, record=f"{topic}/0/0")
    node.done(
        "admin", "PATCH", f"/v1/topics/{topic}", json={"settings": {"trace": None}}, headers={"if-match": "*"}
    )
    until = time.monotonic() + 60
    while True:
        before = node.metrics()["laminar_trace_events_total"]
        node.append(topic, {"value": "b"})
        if node.metrics()["laminar_trace_events_total"] == before:
            break
        assert time.monotonic() < until
    assert (
        422
        == node.ask("admin", "PUT", "/v1/topics/orders-x", json={"settings": {"trace": "1.5"}}).status_code
    )


def test_a_node_that_has_no_room_for_the_topic_goes_on_and_counts() -> None:
    """`_trace` needs eight partitions; an append is answered as if there were no trace."""
    with (
        nodes.serve(shards=1, settings={"max_partitions": 4}) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as http,
    ):
        assert 201 == http.put("/v1/topics/t", json={"settings": {"trace": "all"}}).status_code
        for _ in range(3):
            assert http.post("/v1/topics/t/records?key=k", content=b"a").is_success
        until = time.monotonic() + 60
        while 'laminar_trace_dropped_total{process="shard-0"} 3' not in (text := http.get("/metrics").text):
            assert time.monotonic() < until, [line for line in text.splitlines() if "laminar_trace" in line]
            time.sleep(0.1)

        assert ["t"] == [each["topic"] for each in http.get("/v1/topics").json()["topics"]]
        empty = http.get("/v1/trace", params={"record": "t/0/0"}).json()
        assert ([], None) == (empty["events"], empty["after"])
