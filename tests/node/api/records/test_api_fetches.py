"""Fetches: from where, how far, in which format, how long to wait; and single records."""

from __future__ import annotations

import io
import json
import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import httpx
import pyarrow as pa
import pytest

from laminar.batch import Batch, split, verify
from tests.node.api.asking import ARROW, BATCH, ENVELOPES, NDJSON, Partition, problem

PLACE = {
    "laminar-node",
    "laminar-shard",
    "laminar-route",
    "laminar-start-offset",
    "laminar-end-offset",
    "laminar-next-offset",
}


@pytest.fixture
def ten(partition: Partition) -> Partition:
    """Records 0 to 9 in batches of 4, 1 and 5; those with an even offset are tagged."""
    for offsets in (range(4), range(4, 5), range(5, 10)):
        records = [
            {"value": f"v{offset}", "key": f"k{offset}"} | ({} if offset % 2 else {"tag": "even"})
            for offset in offsets
        ]
        assert partition.post(json.dumps(records), ENVELOPES).is_success
    return partition


def offsets(answer: httpx.Response) -> list[int]:
    assert 200 == answer.status_code, answer.text
    return [record["offset"] for record in answer.json()["records"]]


# -- from where, and how far -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, range(10)),
        ({"offset": "earliest"}, range(10)),
        ({"offset": "0"}, range(10)),
        ({"offset": "3"}, range(3, 10)),
        ({"offset": "latest"}, ()),
        ({"offset": "10"}, ()),
        ({"offset": "2", "limit": "3"}, range(2, 5)),
        ({"offset": "3", "to": "6"}, range(3, 6)),
        ({"offset": "3", "to": "3"}, ()),
        ({"offset": "5", "to": "2"}, ()),
        ({"to": "999"}, range(10)),
        ({"max_bytes": "1"}, range(4)),
        ({"tag": "even"}, range(0, 10, 2)),
        ({"tag": "even", "offset": "1", "limit": "2"}, (2, 4)),
        ({"tag": "none"}, ()),
        ({"since": "0"}, range(10)),
        ({"since": "2020-01-01T00:00:00Z"}, range(10)),
        ({"since": "2999-01-01T00:00:00Z"}, ()),
        ({"read": "leader"}, range(10)),
        ({"read": "replica", "min_offset": "10"}, range(10)),
    ],
)
def test_a_fetch_gives_what_was_asked_for(ten: Partition, query: dict[str, str], expected: Any) -> None:
    """Records from there to there, at least one batch's however few bytes are wanted; 200 also when empty."""
    assert list(expected) == offsets(ten.fetch(**query))


def test_every_answer_says_where_it_is_from_and_where_to_go_on(ten: Partition) -> None:
    """Fetches in every format, one record, offsets."""
    for accept in (None, NDJSON, ARROW, BATCH):
        answer = ten.fetch(accept, offset=4, to=5)
        assert set(answer.headers) >= PLACE
        assert ("0", "10", "5") == tuple(
            answer.headers[f"laminar-{name}-offset"] for name in ("start", "end", "next")
        )
    for path, next_offset in (("records/3", "4"), ("offsets?at=earliest", "0"), ("offsets", "10")):
        answer = ten.http.get(f"{ten.path}/{path}")
        assert set(answer.headers) >= PLACE, path
        assert next_offset == answer.headers["laminar-next-offset"]


@pytest.mark.parametrize(
    "query", [{"limit": 3}, {"max_bytes": 1}, {"tag": "even", "limit": 1}, {"tag": "no"}]
)
def test_next_offset_leads_through_all_of_it(ten: Partition, query: dict[str, Any]) -> None:
    """In the header and in the body; also where a filter lets nothing pass, so that its reader gets on."""
    found: list[int] = []
    offset = 0
    while offset < 10:
        answer = ten.fetch(offset=offset, **query)
        found += offsets(answer)
        assert int(answer.headers["laminar-next-offset"]) == answer.json()["next_offset"] > offset
        offset = answer.json()["next_offset"]

    tag = query.get("tag")
    assert [number for number in range(10) if tag is None or (tag == "even" and number % 2 == 0)] == found


def test_fields_picks_columns(ten: Partition) -> None:
    """In the order asked for; a record without one has none."""
    assert [{"offset": 0, "tag": "even"}, {"offset": 1}] == ten.records(fields="offset,tag", limit=2)
    assert ["value", "offset"] == list(ten.records(fields="value,offset", limit=1)[0])
    assert ["value", "offset"] == pa.ipc.open_stream(
        ten.fetch(ARROW, fields="value,offset").content
    ).schema.names


WRONG_QUERIES: list[tuple[str, str]] = [
    *((f"offset={text}", "offset") for text in ("-1", "+1", "1_0", "x", "", "%D9%A1", "9" * 5000, "1.0")),
    (f"offset={2**53}", "offset"),
    *(
        (f"limit={text}", "limit")
        for text in ("0", "-1", "1000001", "x", "1_0", "%201", "%D9%A1", "9" * 5000)
    ),
    *((f"max_bytes={text}", "max_bytes") for text in ("0", "33554433", "1e3")),
    *((f"wait_ms={text}", "wait_ms") for text in ("-1", "30001", "x")),
    *((f"to={text}", "to") for text in ("-1", "x", str(2**54))),
    *((f"min_offset={text}", "min_offset") for text in ("-1", "x")),
    *((f"since={text}", "since") for text in ("", "x", "2020-01-01", "2020-01-01T00:00:00", "9" * 400)),
    ("since=0&offset=1", "since"),
    ("read=everything", "read"),
    ("fields=", "fields"),
    ("fields=offset,colour", "fields"),
    ("fields=offset,,value", "fields"),
]


@pytest.mark.parametrize(("query", "field"), WRONG_QUERIES)
def test_a_wrong_query_is_422_at_once(partition: Partition, query: str, field: str) -> None:
    """Named with its value, and not after a wait for records."""
    begun = time.monotonic()

    wait = "" if field == "wait_ms" else "&wait_ms=30000"
    answer = partition.http.get(f"{partition.path}/records?{query}{wait}")

    document = problem(answer, 422, "invalid", field=field, outcome="not_applied")
    assert "value" in document
    assert time.monotonic() - begun < 28


def test_an_unknown_or_doubled_parameter_is_refused(partition: Partition) -> None:
    """A misspelt name would else be silently without effect."""
    unknown = partition.fetch(ofset=3)
    doubled = partition.http.get(f"{partition.path}/records?offset=1&offset=2")

    assert unknown.status_code in (400, 422) and "ofset" in unknown.text
    problem(doubled, 400, "malformed", field="offset")


def test_beyond_the_end_is_416(ten: Partition) -> None:
    """It says where the end is; the end itself is no error."""
    problem(ten.fetch(offset=11), 416, "offset_beyond_end", field="offset", value=11, limit=10)
    problem(ten.fetch(offset=11, read="leader"), 416, "offset_beyond_end", limit=10)


@pytest.mark.parametrize("read", ["replica", "leader"])
def test_older_data_than_the_client_has_seen_is_never_given(ten: Partition, read: str) -> None:
    """`min_offset` beyond the end is waited for, then 503 `replica_lagging`."""
    begun = time.monotonic()

    answer = ten.fetch(min_offset=12, wait_ms=200, read=read)

    problem(answer, 503, "replica_lagging", field="min_offset", value=12, limit=10, outcome="not_applied")
    assert 0.15 < time.monotonic() - begun < 60


@pytest.mark.parametrize(
    ("query", "begins"),
    [({}, "0"), ({"offset": "earliest"}, "0"), ({"offset": "latest"}, "10"), ({"since": "0"}, "0")],
    ids=str,
)
def test_an_answer_says_where_it_begins_unless_the_request_did(
    ten: Partition, query: dict[str, str], begins: str
) -> None:
    """As `Laminar-Offset`, beside the confirmed end."""
    answer = ten.fetch(**query, read="leader")

    assert (begins, "10") == (answer.headers["laminar-offset"], answer.headers["laminar-end-offset"])
    assert "laminar-offset" not in ten.fetch(offset=3).headers


# -- waiting -----------------------------------------------------------------------------------------------


def test_a_fetch_at_the_end_waits_and_then_answers_empty(ten: Partition) -> None:
    """200 in time, with the offset to ask for next."""
    begun = time.monotonic()

    answer = ten.fetch(offset=10, wait_ms=300)

    assert [] == offsets(answer)
    assert "10" == answer.headers["laminar-next-offset"]
    assert 0.25 < time.monotonic() - begun < 60


@pytest.mark.parametrize(
    "query", ["offset=latest", "offset=10", "offset=10&read=leader", "min_offset=11&offset=10"]
)
def test_an_append_wakes_those_who_wait(ten: Partition, api_url: str, query: str) -> None:
    """They get the record, not their time-out; the shared port leads to every shard, and both pass it on."""
    url = f"{api_url}{ten.path}/records?{query}&wait_ms=30000"
    begun = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(httpx.get, url, timeout=60, trust_env=False) for _ in range(4)]
        # Time for them to arrive. One that is late finds the record there or, wanting the latest, the next.
        ten.fetch(offset=10, wait_ms=250)
        missing = set(waiting)
        while missing:
            ten.append("new")
            missing = wait(missing, timeout=2).not_done
        answers = [each.result() for each in waiting]

    for answer in answers:
        assert {"new"} == {record["value"] for record in answer.json()["records"]}
    assert time.monotonic() - begun < 28


def test_who_has_something_to_read_does_not_wait(ten: Partition) -> None:
    """`wait_ms` is how long at most."""
    begun = time.monotonic()

    assert [9] == offsets(ten.fetch(offset=9, wait_ms=30_000))

    assert time.monotonic() - begun < 28


# -- formats -----------------------------------------------------------------------------------------------


def test_json_shows_bytes_that_are_no_text_as_base64(partition: Partition) -> None:
    """Value, key and headers; `null` nowhere: what a record lacks is not there."""
    record = {
        "value_base64": "/w==",
        "key_base64": "/g==",
        "headers": {"a": "1"},
        "headers_base64": {"b": "/Q=="},
    }
    partition.post(json.dumps([record, {"value": ""}]), ENVELOPES)

    first, second = partition.records()

    assert {"offset", "timestamp", *record} == set(first)
    assert record == {name: first[name] for name in record}
    assert {"offset", "timestamp", "value"} == set(second)


def test_ndjson_is_the_same_a_line_each(ten: Partition) -> None:
    """Empty if there is nothing."""
    answer = ten.fetch(NDJSON, limit=3)

    assert NDJSON == answer.headers["content-type"]
    assert answer.content.endswith(b"\n")
    assert ten.records(limit=3) == [json.loads(line) for line in answer.content.splitlines()]
    assert b"" == ten.fetch(NDJSON, offset=10).content


def test_arrow_is_read_by_pyarrow(ten: Partition) -> None:
    """A stream of record batches with offset, timestamp, key, value, tag; cut to what was asked for."""
    answer = ten.fetch(ARROW, offset=2, to=7)

    assert ARROW == answer.headers["content-type"]
    table = pa.ipc.open_stream(io.BytesIO(answer.content)).read_all()
    assert ["offset", "timestamp", "key", "value", "tag"] == table.schema.names
    table.validate(full=True)
    assert [2, 3, 4, 5, 6] == table["offset"].to_pylist()
    assert [b"v2", b"v3", b"v4", b"v5", b"v6"] == table["value"].to_pylist()
    assert [b"k2", b"k3", b"k4", b"k5", b"k6"] == table["key"].to_pylist()
    assert ["even", None, "even", None, "even"] == table["tag"].to_pylist()
    assert 0 == pa.ipc.open_stream(ten.fetch(ARROW, offset=10).content).read_all().num_rows


def test_batches_come_whole_and_verify(ten: Partition) -> None:
    """Stamped frames back to back, which may begin before the offset."""
    answer = ten.fetch(BATCH, offset=2)

    frames = split(answer.content)
    headers = [verify(frame) for frame in frames]
    assert [(0, 4), (4, 1), (5, 5)] == [(header.base_offset, header.count) for header in headers]
    assert [header.term for header in headers] == sorted(header.term for header in headers)
    assert [f"v{n}".encode() for n in range(10)] == [v for frame in frames for v in Batch(frame).values]
    assert "10" == answer.headers["laminar-next-offset"]


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("*/*", "application/json"),
        ("application/*", "application/json"),
        ("text/html, */*;q=0.1", "application/json"),
        (f"{NDJSON};q=0.5, {ARROW};q=0.9", ARROW),
        (f"{BATCH}, application/json", BATCH),
        ("Application/JSON", "application/json"),
        (None, "application/json"),
    ],
)
def test_the_most_wanted_format_is_given(ten: Partition, accept: str | None, kind: str) -> None:
    """By quality, then by order; JSON if anything will do."""
    assert kind == ten.fetch(accept).headers["content-type"]


@pytest.mark.parametrize("accept", ["text/html", "text/event-stream", "application/json;q=0", "", "x"])
def test_a_format_that_is_not_there_is_406(ten: Partition, accept: str) -> None:
    """It lists those there are."""
    document = problem(ten.fetch(accept), 406, "not_acceptable", field="accept", value=accept)

    assert all(kind in document["limit"] for kind in ("application/json", NDJSON, ARROW, BATCH))


# -- one record --------------------------------------------------------------------------------------------


def test_one_record_is_its_bytes_with_the_rest_in_headers(partition: Partition) -> None:
    """Percent-encoded where a header could not carry them; its state never changes."""
    envelope = {
        "value_base64": "/wD+",
        "key": "a b%ü",
        "tag": "t\n",
        "headers": {"H\u00e9": "x\r\nEvil: 1"},
        "timestamp": 1_000,
    }
    partition.post(json.dumps(envelope), ENVELOPES)

    answer = partition.http.get(f"{partition.path}/records/0")

    assert (200, b"\xff\x00\xfe") == (answer.status_code, answer.content)
    assert "application/octet-stream" == answer.headers["content-type"]
    assert "immutable" in answer.headers["cache-control"]
    assert "a%20b%25%C3%BC" == answer.headers["laminar-key"]
    assert "t%0A" == answer.headers["laminar-tag"]
    assert "x%0D%0AEvil:%201" == answer.headers["laminar-header-H%C3%A9"]
    assert "1970-01-01T00:00:01.000Z" == answer.headers["laminar-timestamp"]
    assert "evil" not in answer.headers


def test_who_has_the_record_already_gets_304(ten: Partition) -> None:
    """If-None-Match; each record has its own ETag, and two topics of one name have different ones."""
    path = f"{ten.path}/records"
    first, second = (ten.http.get(f"{path}/{offset}").headers["etag"] for offset in (0, 1))

    assert first != second
    assert 304 == ten.http.get(f"{path}/0", headers={"If-None-Match": first}).status_code
    assert 200 == ten.http.get(f"{path}/1", headers={"If-None-Match": first}).status_code


@pytest.mark.parametrize("offset", ["x", "-1", "00", "1.5", str(2**53), "9" * 5000])
def test_an_offset_that_is_none_is_422(partition: Partition, offset: str) -> None:
    """Whatever the number of its digits."""
    problem(partition.http.get(f"{partition.path}/records/{offset}"), 422, "invalid", field="offset")


def test_a_record_that_is_not_there_yet_is_404(ten: Partition) -> None:
    """It says where the partition ends."""
    problem(ten.http.get(f"{ten.path}/records/10"), 404, "no_such_record", field="offset", value=10, limit=10)


# -- offsets -----------------------------------------------------------------------------------------------


def test_offsets_are_found_by_name_and_by_time(partition: Partition) -> None:
    """The first batch appended at or after a time, with that batch's time; the end, if there is none."""

    def at(when: str, **query: str) -> tuple[int, str | None]:
        answer = partition.http.get(f"{partition.path}/offsets", params={"at": when, **query})
        assert 200 == answer.status_code, answer.text
        assert (0, 3) == (answer.json()["start_offset"], answer.json()["end_offset"])
        return answer.json()["offset"], answer.json()["timestamp"]

    for value in "abc":
        partition.append(value)
        partition.fetch(offset="latest", wait_ms=20)
    times = [record["timestamp"] for record in partition.records()]
    assert 3 == len(set(times))

    assert (0, times[0]) == at("earliest") == at("0") == at(times[0])
    assert (1, times[1]) == at(times[1])
    assert (2, times[2]) == at(times[2], read="replica")
    assert (3, None) == at("latest") == at("2999-01-01T00:00:00Z")
    assert ["b", "c"] == partition.values(since=times[1])


@pytest.mark.parametrize(("query", "field"), [("at=noon", "at"), ("at=", "at"), ("read=all", "read")])
def test_wrong_questions_for_offsets_are_422(partition: Partition, query: str, field: str) -> None:
    """Named with their value."""
    problem(partition.http.get(f"{partition.path}/offsets?{query}"), 422, "invalid", field=field)


def test_a_digest_is_of_the_log_up_to_an_index(ten: Partition) -> None:
    """Equal for equal logs, changed by an append, and asked for any committed index."""
    path = f"{ten.path}/digest"
    before = ten.http.get(path).json()
    ten.append("more")
    after = ten.http.get(path).json()

    assert before["digest"] != after["digest"]
    assert after["committed_index"] > before["committed_index"]
    again = ten.http.get(f"{path}?to_index={before['committed_index']}").json()
    assert before["digest"] == again["digest"]
    problem(
        ten.http.get(f"{path}?to_index={after['last_index'] + 1}"),
        *(422, "invalid"),
        field="to_index",
        limit=after["committed_index"],
    )
    problem(ten.http.get(f"{path}?to_index=x"), 422, "invalid", field="to_index")
