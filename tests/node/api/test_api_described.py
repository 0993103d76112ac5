"""The OpenAPI document says what the API does: a client that knows nothing else can use it."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from crc32c import crc32c
from openapi_spec_validator import validate

from laminar.http.api.parameters import Parameter
from laminar.http.api.routes import ROUTES, Route
from tests.node.api.asking import ARROW, BATCH, ENVELOPES, NDJSON, PROBLEM_TYPE
from tests.node.api.described import Described

_names = itertools.count()


@pytest.fixture
def api(http: httpx.Client) -> Described:
    """The API as its document describes it."""
    return Described(http)


def new_name() -> str:
    """A name that no other test uses."""
    return f"described-{next(_names)}"


def test_the_document_is_openapi(api: Described) -> None:
    """By the standard's own schema: references, parameters of paths, unique ids."""
    document: Any = api.document
    validate(document)


def test_a_client_made_of_the_document_creates_appends_and_fetches(api: Described) -> None:
    """Paths, parameters, bodies and answers are taken from the document alone."""
    topic = new_name()
    created = api.call("create_topic", topic=topic, document={"partitions": 2})
    value = {"flight": 812}
    appended = api.call(
        "append_to_partition", topic=topic, partition=1, document=value, media_type="application/json"
    )
    fetched = api.call("fetch", topic=topic, partition=1, offset=0)

    assert (201, 2) == (created.status_code, created.json()["partitions"])
    assert [{"partition": 1, "offset": 0, "count": 1}] == appended.json()["placed"]
    (record,) = fetched.json()["records"]
    assert value == json.loads(record["value"])


def test_every_operation_answers_as_described(api: Described) -> None:
    """Each is called, and what it answers has a described status, media type and document."""
    topic, sink, call = new_name(), new_name(), api.call
    call("create_topic", topic=topic, document={"settings": {"retention_ms": 10**9}})
    call("create_topic", topic=topic, document={"settings": {"retention_ms": 10**9}})
    etag = call("describe_topic", topic=topic).headers["etag"]
    call("describe_topic", topic=topic, If_None_Match=etag)
    patch = {"settings": {"retention_bytes": 1 << 40, "retention_ms": None}}
    call("update_topic", topic=topic, document=patch, If_Match=etag)
    assert "next" in call("list_topics", limit=1, prefix="", sort="bytes", stats="true", contains="").json()
    place: dict[str, Any] = {"topic": topic, "partition": 0}
    call("list_partitions", topic=topic, wait_ms=2000, read="leader")
    call("describe_partition", **place)
    change_route(call, new_name())
    call("list_routes", topic=topic)
    for operation in (
        "livez",
        "readyz",
        "version",
        "limits",
        "metrics",
        "openapi",
        "docs",
        "cluster",
        "health",
    ):
        call(operation)
    call("readyz", replicas="any")
    call("metrics", detail="partitions", topic=topic)
    etag = call("console").headers["etag"]
    call("console", If_None_Match=etag)
    call("console_file", file="main.js")
    call("console_moved")
    (node, *_) = call("list_nodes").json()["nodes"]
    call("describe_node", node=node["node"])
    administer(call, node["node"], topic)
    call("cluster", after=2**53, wait_ms=1)

    call("append_to_topic", topic=topic, content=b'{"a":1}\n{"a":2}\n', media_type=NDJSON, key_from="/a")
    call("append_to_partition", **place, content=b"bytes", media_type="application/octet-stream")
    envelopes = {"records": [{"value": "v", "headers": {"h": "x"}, "tag": "t"}, {"value_base64": "/w=="}]}
    call("append_to_partition", **place, document=envelopes, media_type=ENVELOPES)
    batch = call("fetch", **place, accept=BATCH, offset=0).content
    for accept in ("application/json", NDJSON, ARROW):
        call("fetch", **place, accept=accept, offset="earliest", limit=10)
    producer = call("begin_producer", document={"name": new_name()}).json()
    call("begin_producer")
    identity = {"Laminar_Producer": producer["producer"], "Laminar_Epoch": 1, "Laminar_Sequence": 0}
    call("append_to_partition", **place, **identity, content=batch, media_type="application/json-seq")
    call("describe_producer", **place, producer=producer["producer"], epoch=1, sequence=0, wait_ms=1)
    call("fence_producer", **place, producer=producer["producer"], epoch=2)
    call("fetch_one", **place, offset=0)
    call("offsets", **place, at="earliest")
    call("digest", **place, to_index="committed")

    call("search", topic=topic, document={"where": {"contains": "e"}, "limit": 1})
    call("search", topic=topic, document={"from": {"0": 0}, "to": "latest", "order": "newest"})
    call("record_history", **place, offset=0, read="leader")
    delay(call, place)
    large = b"part" * 1000
    call("upload_part", **place, upload="u", part=0, content=large, media_type="application/octet-stream")
    size: dict[str, Any] = {"parts": 1, "size_bytes": len(large), "crc32c": f"{crc32c(large):08x}"}
    published = call("publish_upload", **place, upload="u", **size).json()["placed"][0]["offset"]
    whole = call("fetch_one", **place, offset=published)
    call("fetch_one", **place, offset=published, Range="bytes=2-5")
    call("fetch_one", **place, offset=published, If_None_Match=whole.headers["etag"])
    assert zlib.crc32(large) == zlib.crc32(whole.content)
    call("fetch", **place, offset=published)
    call("drop_upload", **place, upload="u")

    call("set_cursor", topic=topic, cursor="c", document={"positions": {"0": 1}, "expected": {"0": None}})
    call("describe_cursor", topic=topic, cursor="c")
    call("list_cursors", topic=topic)
    call("renew_member", topic=topic, group="g", member="m", document={"session_ms": 2000})
    call("describe_group", topic=topic, group="g")
    call("leave_group", topic=topic, group="g", member="m")
    call("delete_cursor", topic=topic, cursor="c")
    channel: dict[str, Any] = {"topic": topic, "channel": "c"}
    call("create_channel", **channel, document={"settings": {"filter": {"tags": ["t"]}}})
    etag = call("create_channel", **channel, document={"settings": {"filter": {"tags": ["t"]}}}).headers[
        "etag"
    ]
    call("describe_channel", **channel)
    call("update_channel", **channel, document={"settings": {"paused": True, "filter": None}}, If_Match=etag)
    call("list_channels", topic=topic)
    call("update_channel", **channel, document={"settings": {"paused": None}}, If_Match="*")
    work_off(call, channel)
    call("delete_channel", **channel)

    epoch = call("begin_sink", sink=sink, once="false").json()["epoch"]
    of_batch: dict[str, Any] = {"sink": sink, "number": 0}
    for stage in (0, 1):
        call("stage", **of_batch, **place, stage=stage, epoch=epoch, content=b"s", media_type="a/b")
    call(
        "prepare_stages",
        **of_batch,
        document={"epoch": epoch, "topic": topic, "partition": 0, "stages": [0, 1]},
    )
    commit = {"epoch": epoch, "parts": [{"topic": topic, "partition": 0, "prepared": 2}], "fingerprint": "f"}
    assert "applied" == call("commit_batch", **of_batch, document=commit).json()["result"]
    assert "already" == call("commit_batch", **of_batch, document=commit).json()["result"]
    call("describe_sink", sink=sink)
    call("list_sinks")
    call("delete_sink", sink=sink)

    grants = [{"role": "read", "prefix": topic}]
    token = call("create_token", document={"name": "n", "grants": grants, "expires": "2100-01-01T00:00:00Z"})
    call("describe_token", token=token.json()["id"])
    call("list_tokens")
    call("whoami")
    limits = call("describe_principal_limits", principal="*")
    call("set_principal_limits", principal="n", document={"topics": 3}, If_Match=limits.headers["etag"])
    call("list_principal_limits")
    call("set_principal_limits", principal="n", document={}, If_Match="*")
    call("datagram_key")
    call("revoke_token", token=token.json()["id"])

    call("delete_records", **place, before=1, dry_run="true")
    assert 412 == call("recover_partition", **place, accept_loss="false").status_code
    call("delete_topic", topic=topic, If_Match="*")
    assert 404 == call("describe_topic", topic=topic).status_code

    # A loss is reported only where a partition waits for absent nodes (cluster/test_accept_loss.py); a node
    # is removed only where others are left (cluster/test_admin_cluster.py).
    elsewhere = {"recover_partition", "remove_node"}
    done = {operation for operation, status in api.called if status < 400} | elsewhere
    assert api.operations.keys() == done


def work_off(call: Callable[..., httpx.Response], channel: dict[str, Any]) -> None:
    """Call every operation of a channel's consumers."""
    job, *_ = call("receive_jobs", **channel, document={"max": 1}).json()["jobs"]
    call("settle_jobs", **channel, document={"nack": [{"token": job["token"], "delay_ms": 3_600_000}]})
    assert call("list_aside", **channel).json()["jobs"]
    call("list_dead", **channel, limit=1)
    call("settle_dead", **channel, document={"drop": "all"})
    call("seek_channel", **channel, document={"at": "latest", "drop": True})


def delay(call: Callable[..., httpx.Response], place: dict[str, Any]) -> None:
    """Call every operation of delayed records."""
    topic = place["topic"]
    later = {"content": b"later", "media_type": "application/octet-stream", "delay_ms": 3_600_000}
    (one,) = call("append_to_partition", **place, **later).json()["scheduled"]
    assert [one] == [each["id"] for each in call("list_delayed", topic=topic, limit=5).json()["records"]]
    counted = call("list_delayed", topic=topic, **{"from": "0", "to": "4102444800000", "bucket_ms": 10**12})
    assert [1] == [each["records"] for each in counted.json()["buckets"]]
    call("describe_delayed", topic=topic, delayed=one)
    call("change_delayed", topic=topic, delayed=one, document={"deliver_at": "2099-01-01T00:00:00Z"})
    assert "cancelled" == call("cancel_delayed", topic=topic, delayed=one).json()["state"]


def change_route(call: Callable[..., httpx.Response], topic: str) -> None:
    """Call every operation of a change of a route, which an upload keeps from going on."""
    call("create_topic", topic=topic, document={})
    place: dict[str, Any] = {"topic": topic, "partition": 0, "upload": "u", "part": 0}
    call("upload_part", **place, content=b"part", media_type="application/octet-stream")
    change = {"after": 0, "inputs": [0], "cuts": [30_000], "wait_ms": 3_600_000}
    assert 202 == call("begin_route", topic=topic, document=change).status_code
    call("begin_route", topic=topic, document=change)
    assert "preparing" == call("describe_route", topic=topic, version=1).json()["state"]
    assert "preparing" == call("list_routes", topic=topic).json()["change"]["state"]
    call("cancel_route", topic=topic, version=1)
    assert 404 == call("describe_route", topic=topic, version=1, wait_ms=1).status_code
    call("drop_upload", topic=topic, partition=0, upload="u")
    call("begin_route", topic=topic, document=change)
    while "done" != call("describe_route", topic=topic, version=1, wait_ms=2000).json()["state"]:
        pass
    assert 200 == call("reclaim_partition", topic=topic, partition=0).status_code


def administer(call: Callable[..., httpx.Response], node: str, topic: str) -> None:
    """Call every operation for operators; the node and the topic are as before afterwards."""
    place: dict[str, Any] = {"topic": topic, "partition": 0}
    (only,) = call("admin_nodes").json()["nodes"]
    assert only["node"] == node
    call("node_bundle", node=node)
    etag = call("admin_node", node=node).headers["etag"]
    etag = call("update_node", node=node, document={"zone": "west", "weight": 2.5}, If_Match=etag).headers[
        "etag"
    ]
    call("update_node", node=node, document={"zone": None, "weight": None}, If_Match=etag)
    assert 202 == call("drain_node", node=node).status_code
    assert call("list_operations", prefix="drain").json()["operations"]
    call("describe_operation", operation=f"drain:{node}")
    call("cancel_operation", operation=f"drain:{node}")
    call("undrain_node", node=node)
    assert 409 == call("remove_node", node=node).status_code
    call("pin_partition", **place, document={"nodes": [node], "reason": "a test"})
    call("describe_placement", **place)
    call("unpin_partition", **place)
    call("prefer_leader", **place, document={"node": node})
    call("describe_balance")
    assert not call("balance").json()["done"]


def test_an_answer_before_it_is_durable_is_as_described(api: Described, http: httpx.Client) -> None:
    """202 has a document of its own: it is no receipt."""
    topic = new_name()
    api.call("create_topic", topic=topic, document={})
    place: dict[str, Any] = {"topic": topic, "partition": 0}
    producer = api.call("begin_producer").json()["producer"]
    identity = {"Laminar_Producer": producer, "Laminar_Sequence": 0}
    accepted = api.call(
        "append_to_partition", **place, **identity, ack="accepted", content=b"v", media_type="a/b"
    )

    assert 202 == accepted.status_code


BOUNDED = [
    (route, row)
    for route in ROUTES
    for row in route.parameters
    if row.place == "query" and row.schema.get("type") == "integer"
]


@pytest.mark.parametrize(
    ("route", "row"), BOUNDED, ids=[f"{route.operation}-{row.name}" for route, row in BOUNDED]
)
def test_the_bounds_of_numbers_are_the_described_ones(
    http: httpx.Client, route: Route, row: Parameter
) -> None:
    """One beyond either bound is refused by name; the bounds themselves are not."""
    topic = "described-bounds"
    http.put(f"/v1/topics/{topic}", json={})
    http.post(f"/v1/sinks/{topic}")
    filled = dict.fromkeys(("partition", "offset", "number", "part", "version"), "0")
    names = dict.fromkeys(("topic", "cursor", "channel", "group", "member", "sink", "upload"), topic)
    path = route.template.format(**filled, **names, producer="1" * 32, node="n")
    others = {"topic": topic, "partition": "0", "stage": "0", "epoch": "1", "parts": "1", "size_bytes": "1"}
    others |= {"crc32c": "0" * 8, "before": "0", "at": "latest"}
    query = {
        each.name: others[each.name] for each in route.parameters if each.required and each.place == "query"
    }

    if route.operation == "list_delayed":
        query |= {"from": "5", "to": "6"}  # else a short span makes too many

    def refused(value: int) -> bool:
        answer = http.request(route.method, path, params=query | {row.name: str(value)})
        if answer.headers.get("content-type") != PROBLEM_TYPE:
            return False
        document = answer.json()
        return document["code"] in ("invalid", "no_such_partition") and document.get("field") == row.name

    assert refused(row.schema["minimum"] - 1)
    assert refused(row.schema["maximum"] + 1)
    if row.name not in ("wait_ms", "partition", "after"):  # which would wait, or is not there
        assert not refused(row.schema["minimum"])
        # Which epoch of a sink may begin depends on the last one.
        assert route.operation == "begin_sink" or not refused(row.schema["maximum"])
