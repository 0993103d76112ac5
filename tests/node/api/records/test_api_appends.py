"""Appends: what a body of each type becomes, where it goes, and what a receipt promises."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pyarrow as pa
import pytest

from laminar.batch import Codec, build
from laminar.wire.key_route import LOGICAL_PARTITIONS, Route, logical_of_key
from tests.node.api.asking import (
    ARROW,
    BATCH,
    ENVELOPE_LINES,
    ENVELOPES,
    MAX_APPEND_BYTES,
    NDJSON,
    Partition,
    problem,
)


def stored(partition: Partition) -> list[dict[str, Any]]:
    """All records, without their append times where nobody gave one."""
    records = partition.records()
    for record in records:
        record.pop("timestamp")
    return records


# -- receipts ----------------------------------------------------------------------------------------------


def test_one_record_is_201_with_its_location(partition: Partition) -> None:
    """The receipt says where, how durable, and by whom."""
    answer = partition.post(b"hi")

    assert 201 == answer.status_code
    assert f"{partition.path}/records/0" == answer.headers["location"]
    assert {
        "appended": 1,
        "placed": [{"partition": 0, "offset": 0, "count": 1}],
        "durable": {"replicas": 1, "synced": True, "flush": "commit"},
    } == answer.json()
    assert {"laminar-node", "laminar-shard", "laminar-route"} <= set(answer.headers)
    assert b"hi" == partition.http.get(answer.headers["location"]).content


def test_several_records_are_200_and_lie_together(partition: Partition) -> None:
    """One request, one range of offsets, in the order of the body."""
    partition.append("first")

    answer = partition.post("1\n2\n3\n", NDJSON)

    assert (200, 3) == (answer.status_code, answer.json()["appended"])
    assert [{"partition": 0, "offset": 1, "count": 3}] == answer.json()["placed"]
    assert "location" not in answer.headers
    assert ["first", "1", "2", "3"] == partition.values()


def test_a_single_record_is_201_whatever_its_type(partition: Partition) -> None:
    """Also a list of one, a batch of one, a line of one."""
    bodies: list[tuple[str, bytes | str]] = [
        (NDJSON, "1\n"),
        (ENVELOPES, '[{"value":"x"}]'),
        (BATCH, bytes(build([b"x"]))),
    ]
    for kind, body in bodies:
        assert 201 == partition.post(body, kind).status_code, kind


# -- bodies that are values --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "image/png", "x"])
def test_types_that_are_not_laminars_are_values(partition: Partition, kind: str | None) -> None:
    """The bytes as they are, whatever curl says they be; an empty body is an empty record."""
    for body in (b"hi", b"", b'{"records": []}', bytes(range(256))):
        assert 201 == partition.post(body, kind).status_code

    got = [partition.http.get(f"{partition.path}/records/{offset}").content for offset in range(4)]
    assert [b"hi", b"", b'{"records": []}', bytes(range(256))] == got


def test_a_value_takes_key_tag_time_and_headers_from_the_request(partition: Partition) -> None:
    """Percent-encoded where a header or a query could not carry them."""
    answer = partition.post(
        b"v",
        headers={
            "Laminar-Tag": "caf%C3%A9 noir",
            "Laminar-Header-Trace-Id": "a%00b",
            "Laminar-Header-X": "1",
        },
        key="S&O ü",
        timestamp="2026-01-31T12:00:00+01:00",
    )
    assert 201 == answer.status_code, answer.text

    assert [
        {
            "offset": 0,
            "timestamp": "2026-01-31T11:00:00.000Z",
            "key": "S&O ü",
            "value": "v",
            "tag": "café noir",
            "headers": {"trace-id": "a\0b", "x": "1"},
        }
    ] == partition.records()


def test_json_is_one_record_the_text_as_sent(partition: Partition) -> None:
    """Not one space is changed, and it may have a key."""
    text = ' {"b": 1.0,\n "a": [1e3, "\\u00e9"]} '

    assert 201 == partition.post(text, "application/json; charset=utf-8", key="k").status_code

    assert [{"offset": 0, "key": "k", "value": text}] == stored(partition)


def test_ndjson_is_a_record_a_line_with_keys_and_tags_by_pointer(partition: Partition) -> None:
    """Empty lines don't count; what a pointer does not find leaves the record without."""
    lines = '{"o":"SFO","c":{"d/e":"AA"}}\n\r\n{"o":7,"c":null}\r\n{"o":null}'

    answer = partition.post(lines, NDJSON, key_from="/o", tag_from="/c/d~1e")

    assert 200 == answer.status_code, answer.text
    assert [
        {"offset": 0, "key": "SFO", "value": '{"o":"SFO","c":{"d/e":"AA"}}', "tag": "AA"},
        {"offset": 1, "key": "7", "value": '{"o":7,"c":null}'},
        {"offset": 2, "value": '{"o":null}'},
    ] == stored(partition)


# -- bodies that are envelopes -----------------------------------------------------------------------------

FULL = {
    "value": "v",
    "key": "k",
    "tag": "t",
    "headers": {"h": "1"},
    "headers_base64": {"raw": "/w=="},
    "timestamp": "2026-01-31T12:00:00.5Z",
}
READ = {
    "value": "v",
    "key": "k",
    "tag": "t",
    "headers": {"h": "1"},
    "headers_base64": {"raw": "/w=="},
    "timestamp": "2026-01-31T12:00:00.500Z",
}


@pytest.mark.parametrize("wrap", ["one", "list", "records", "lines"])
def test_an_envelope_spells_everything_out(partition: Partition, wrap: str) -> None:
    """Alone, in a list, under `records` as a fetch answers them, or one a line."""
    body = {"one": FULL, "list": [FULL], "records": {"records": [FULL]}, "lines": FULL}[wrap]

    answer = partition.post(json.dumps(body), ENVELOPE_LINES if wrap == "lines" else ENVELOPES)

    assert 201 == answer.status_code, answer.text
    assert [{"offset": 0, **READ}] == partition.records()


def test_values_and_keys_may_be_any_bytes(partition: Partition) -> None:
    """value_base64, key_base64; value_json is kept as it is written."""
    body = '{"value_base64":"/wA=","key_base64":"/w=="}\n{"value_json": {"a": 1.50} }\n'

    assert 200 == partition.post(body, ENVELOPE_LINES).status_code

    assert [
        {"offset": 0, "key_base64": "/w==", "value_base64": "/wA="},
        {"offset": 1, "value": '{"a": 1.50}'},
    ] == stored(partition)


def test_what_was_fetched_can_be_appended_as_it_is(
    http: httpx.Client, new_topic: Callable[..., str], partition: Partition
) -> None:
    """JSON and NDJSON answers are envelopes, less the offset, which the new partition gives."""
    partition.post(json.dumps([FULL, {"value": "x"}]), ENVELOPES)
    other = Partition(http, new_topic())
    records = partition.records()

    again = [{name: record[name] for name in record if name != "offset"} for record in records]
    answer = other.post(json.dumps({"records": again, "next_offset": 2}), ENVELOPES)

    assert 200 == answer.status_code, answer.text
    assert records == other.records()


def test_a_batch_goes_in_as_it_is(partition: Partition) -> None:
    """Several back to back, one of them compressed: one receipt each."""
    first = build([b"a", b"b"], keys=[b"k", None], tags=[None, "t"])
    second = build([b"c" * 1000], codec=Codec.ZSTD)

    answer = partition.post(bytes(first + second), BATCH)

    assert 200 == answer.status_code, answer.text
    assert [
        {"partition": 0, "offset": 0, "count": 2},
        {"partition": 0, "offset": 2, "count": 1},
    ] == answer.json()["placed"]
    assert [
        {"offset": 0, "key": "k", "value": "a"},
        {"offset": 1, "value": "b", "tag": "t"},
        {"offset": 2, "value": "c" * 1000},
    ] == stored(partition)


def test_a_producers_batch_is_recognised_when_it_comes_again(partition: Partition) -> None:
    """The first receipt, marked; a gap is refused with what is expected; an older epoch is fenced."""

    def batch(sequence: int, epoch: int = 1) -> bytes:
        return bytes(build([b"x"], producer_id=b"p" * 16, producer_epoch=epoch, sequence=sequence))

    first = partition.post(batch(0), BATCH)
    again = partition.post(batch(0), BATCH)
    gap = partition.post(batch(5), BATCH)
    old = partition.post(batch(1, epoch=0), BATCH)

    assert (201, first.json()) == (again.status_code, again.json())
    assert ("1", None) == (again.headers.get("laminar-replayed"), first.headers.get("laminar-replayed"))
    problem(gap, 409, "out_of_sequence", field="sequence", value=5, limit=1, outcome="not_applied")
    problem(old, 409, "fenced", field="producer_epoch", outcome="not_applied")
    assert ["x"] == partition.values()


def test_an_arrow_stream_goes_in_by_its_columns(partition: Partition) -> None:
    """Written by pyarrow; several record batches, nulls in key and tag."""
    table = pa.table(
        {
            "value": pa.array([b"a", b"b", b"c"], pa.binary()),
            "key": pa.array([b"k", None, b"l"], pa.binary()),
            "tag": pa.array(["t", None, None], pa.string()),
            "timestamp": pa.array([1_000, 2_000, 3_000], pa.timestamp("ms", "UTC")),
        }
    )
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)

    answer = partition.post(sink.getvalue(), ARROW)

    assert 200 == answer.status_code, answer.text
    assert [
        {"offset": 0, "timestamp": "1970-01-01T00:00:01.000Z", "key": "k", "value": "a", "tag": "t"},
        {"offset": 1, "timestamp": "1970-01-01T00:00:02.000Z", "value": "b"},
        {"offset": 2, "timestamp": "1970-01-01T00:00:03.000Z", "key": "l", "value": "c"},
    ] == partition.records()


# -- conditions --------------------------------------------------------------------------------------------


def test_if_match_appends_only_at_that_offset(partition: Partition) -> None:
    """412 says where the partition ends instead."""
    assert 201 == partition.post(b"a", headers={"If-Match": '"0"'}).status_code

    refused = partition.post(b"b", headers={"If-Match": '"0"'})

    problem(refused, 412, "precondition_failed", field="if-match", value=0, limit=1, outcome="not_applied")
    assert 200 == partition.post("1\n2\n", NDJSON, headers={"If-Match": '"1"'}).status_code
    assert ["a", "1", "2"] == partition.values()


def test_of_appends_that_race_for_an_offset_one_wins(partition: Partition, api_url: str) -> None:
    """A lock-free log: read the end, append there, else read again."""

    def claim(number: int) -> int:
        url = f"{api_url}{partition.path}/records"
        body = str(number).encode()
        return httpx.post(
            url, content=body, headers={"If-Match": '"0"'}, timeout=60, trust_env=False
        ).status_code

    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(claim, range(8)))

    assert [201] + [412] * 7 == sorted(statuses)
    assert [str(statuses.index(201))] == partition.values()


@pytest.mark.parametrize("condition", ["x", "-1", '"', "*", 'W/"0"', '"0", "1"', "\xb2", "9" * 5000, ""])
def test_a_condition_that_is_no_offset_is_422(partition: Partition, condition: str) -> None:
    """Named with what was sent; nothing is appended."""
    answer = partition.http.post(
        f"{partition.path}/records", content=b"x", headers=[(b"If-Match", condition.encode("latin-1"))]
    )

    problem(answer, 422, "invalid", field="if-match", outcome="not_applied")
    assert [] == partition.records()


# -- to a topic --------------------------------------------------------------------------------------------


def test_a_key_finds_its_partition_by_the_topics_route(
    http: httpx.Client, new_topic: Callable[..., str]
) -> None:
    """One receipt a partition; each key where /routes says, in order."""
    topic = new_topic(4)
    keys = [f"key-{number % 20}" for number in range(60)]
    lines = "".join(json.dumps({"value": str(n), "key": key}) + "\n" for n, key in enumerate(keys))

    answer = http.post(f"/v1/topics/{topic}/records", content=lines, headers={"Content-Type": ENVELOPE_LINES})

    assert (200, 60) == (answer.status_code, answer.json()["appended"])
    route = Route.even(4)
    expected: dict[int, list[str]] = {number: [] for number in range(4)}
    for n, key in enumerate(keys):
        expected[route.partition_of_key(key)].append(str(n))
    placed = {part["partition"]: part["count"] for part in answer.json()["placed"]}
    assert {number: len(values) for number, values in expected.items() if values} == placed
    assert expected == {number: Partition(http, topic, number).values() for number in range(4)}
    assert {"replicas": 1, "synced": True, "flush": "commit"} == answer.json()["durable"]


def test_a_logical_partition_finds_its_partition(http: httpx.Client, new_topic: Callable[..., str]) -> None:
    """`logical` goes before any key; beyond 65535 it is refused."""
    topic = new_topic(4)
    path = f"/v1/topics/{topic}/records"

    for logical in (0, 16_384, LOGICAL_PARTITIONS - 1, logical_of_key(b"SFO")):
        answer = http.post(f"{path}?logical={logical}&key=other", content=b"x")
        assert [Route.even(4).partition_of(logical)] == [p["partition"] for p in answer.json()["placed"]]
    for wrong in ("65536", "-1", "x", "1.5", ""):
        problem(
            http.post(f"{path}?logical={wrong}", content=b"x"), 422, "invalid", field="logical", limit=65_535
        )


def test_records_without_a_key_are_spread_by_request(
    http: httpx.Client, new_topic: Callable[..., str]
) -> None:
    """Round robin: no partition is left out, and the records of one request stay together."""
    topic = new_topic(3)

    placed = [
        http.post(f"/v1/topics/{topic}/records", content="1\n2\n", headers={"Content-Type": NDJSON}).json()[
            "placed"
        ]
        for _ in range(12)
    ]

    assert [1] * 12 == [len(parts) for parts in placed]
    assert {0, 1, 2} == {parts[0]["partition"] for parts in placed}


def test_a_producers_batch_belongs_to_one_partition(
    http: httpx.Client, new_topic: Callable[..., str]
) -> None:
    """Split over partitions it could not be recognised again; other batches are split."""
    path = f"/v1/topics/{new_topic(2)}/records"
    headers = {"Content-Type": BATCH}

    refused = http.post(path, content=bytes(build([b"x"], producer_id=b"p" * 16)), headers=headers)
    taken = http.post(path, content=bytes(build([b"x", b"y"], keys=[b"a", b"b"])), headers=headers)

    problem(refused, 422, "invalid", field="producer_id")
    assert (200, 2) == (taken.status_code, taken.json()["appended"])


def test_appends_to_nowhere_are_404(http: httpx.Client, new_topic: Callable[..., str]) -> None:
    """No topic, no such partition: nothing is made on the way."""
    topic = new_topic()
    nowhere = http.post("/v1/topics/nowhere/records", content=b"x")
    beyond = http.post(f"/v1/topics/{topic}/partitions/1/records", content=b"x")

    problem(nowhere, 404, "no_such_topic", field="topic", value="nowhere", outcome="not_applied")
    problem(beyond, 404, "no_such_partition", field="partition", value="1", limit=0)
    assert 404 == http.get("/v1/topics/nowhere").status_code


def test_a_part_for_another_shard_is_within_the_limits_that_the_whole_was_in(
    http: httpx.Client, new_topic: Callable[..., str]
) -> None:
    """Keys that are fields of the values are counted once in a body, and twice in a batch."""
    topic = new_topic(6)
    lines = "".join(f'{{"k":"{number:03}{"x" * 60_000}"}}\n' for number in range(30))
    assert MAX_APPEND_BYTES > len(lines) > MAX_APPEND_BYTES * 0.8

    for place in range(6):
        headers = {"Content-Type": NDJSON} | ({"Idempotency-Key": f"once-{place}"} if place % 2 else {})
        query: dict[str, str | int] = {"key_from": "/k", "logical": place * LOGICAL_PARTITIONS // 6}
        answer = http.post(f"/v1/topics/{topic}/records", content=lines, headers=headers, params=query)
        assert (200, 30) == (answer.status_code, answer.json().get("appended")), answer.text
