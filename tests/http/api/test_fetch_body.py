"""Bodies of fetches: the same records as JSON, lines, Arrow, and as they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.batch import HEADER_SIZE, Batch, Codec, SplitFrame, build, split, stamp
from laminar.http.api.append_body import ENVELOPES_TYPE, parse_append
from laminar.http.api.fetch_body import FetchFormat, encode_fetch, fetch_format, shows_long
from laminar.http.api.limits import Limits
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Connection, Request
from laminar.http.protocol.request_head import RequestHead

NOON = 1_767_268_800_000


def frame(base_offset: int, values: Sequence[bytes], **columns: Any) -> bytes:
    built = build(list(values), **columns)
    stamp(
        built,
        index=1,
        term=1,
        prev_term=1,
        base_offset=base_offset,
        append_time_ms=NOON,
        committed_index=0,
    )
    return bytes(built)


FRAMES = [
    frame(10, [b"a", b"b"], keys=[b"k", None], tags=["red", "blue"]),
    frame(12, [b"\xff"], headers=[{"x": b"1", "y": b"\xfe"}], timestamps=[5]),
    frame(13, [b"d", b"e"], tags=[None, "red"]),
]


def fetch(format_: FetchFormat, **asked: Any) -> tuple[bytes, int]:
    given_ = {"offset": 10, "to": 15, "limit": 100, "tag": None, "wanted": None} | asked
    found = encode_fetch(format_, FRAMES, **given_)
    assert found.content_type == format_.value
    return b"".join(bytes(part) for part in found.body), found.next_offset


def test_json_shows_text_as_text_and_bytes_as_base64() -> None:
    """And leaves out what a record hasn't."""
    body, next_offset = fetch(FetchFormat.JSON)
    document = json.loads(body)

    assert 15 == next_offset == document["next_offset"]
    assert {
        "offset": 10,
        "timestamp": "2026-01-01T12:00:00.000Z",
        "key": "k",
        "value": "a",
        "tag": "red",
    } == document["records"][0]
    assert {
        "offset": 12,
        "timestamp": "1970-01-01T00:00:00.005Z",
        "value_base64": "/w==",
        "headers": {"x": "1"},
        "headers_base64": {"y": "/g=="},
    } == document["records"][2]


def test_lines_are_the_same_documents() -> None:
    """One a record, each ended."""
    lines = fetch(FetchFormat.NDJSON)[0]

    assert json.loads(fetch(FetchFormat.JSON)[0])["records"] == [
        json.loads(line) for line in lines.splitlines()
    ]
    assert lines.endswith(b"\n")
    assert b"" == fetch(FetchFormat.NDJSON, offset=15)[0]


@pytest.mark.parametrize(
    ("asked", "offsets", "next_offset"),
    [
        ({}, [10, 11, 12, 13, 14], 15),
        ({"offset": 11}, [11, 12, 13, 14], 15),
        ({"offset": 11, "to": 14}, [11, 12, 13], 14),
        ({"limit": 3}, [10, 11, 12], 13),
        ({"limit": 1}, [10], 11),
        ({"tag": "red"}, [10, 14], 15),
        ({"tag": "red", "limit": 1}, [10], 12),
        ({"tag": "none"}, [], 15),
        ({"tag": "red", "to": 13}, [10], 13),
        ({"offset": 15}, [], 15),
    ],
)
def test_a_fetch_is_bounded_and_filtered_by_record(
    asked: dict[str, Any], offsets: list[int], next_offset: int
) -> None:
    """`next_offset` is behind all that was looked at, so that a filter gets on."""
    body, reached = fetch(FetchFormat.JSON, **asked)
    table = pyarrow.ipc.open_stream(fetch(FetchFormat.ARROW, **asked)[0]).read_all()

    assert offsets == [record["offset"] for record in json.loads(body)["records"]]
    assert offsets == table["offset"].to_pylist()
    assert next_offset == reached


def test_arrow_has_the_columns_asked_for() -> None:
    """By default all but headers."""
    table = pyarrow.ipc.open_stream(fetch(FetchFormat.ARROW)[0]).read_all()
    narrow = pyarrow.ipc.open_stream(fetch(FetchFormat.ARROW, wanted="value,offset")[0]).read_all()

    assert ["offset", "timestamp", "key", "value", "tag"] == table.column_names
    assert [b"a", b"b", b"\xff", b"d", b"e"] == table["value"].to_pylist()
    assert ["value", "offset"] == narrow.column_names


def test_batches_come_without_columns_that_were_not_asked_for() -> None:
    """They are batches still, each with its records at their offsets; a value that is left out is empty."""
    whole = fetch(FetchFormat.BATCH)[0]
    body, next_offset = fetch(FetchFormat.BATCH, wanted="offset, tag", tag="red")

    found = [Batch(each) for each in split(body)]

    assert FRAMES == [bytes(each) for each in split(whole)]
    assert 15 == next_offset
    assert [[(10, "red", None), (11, "blue", None)], [(13, None, None), (14, "red", None)]] == [
        [(record.offset, record.tag, record.key) for record in batch] for batch in found
    ]
    assert {b""} == {record.value for batch in found for record in batch}


def test_fields_choose_and_unknown_ones_are_named() -> None:
    """In JSON as in Arrow."""
    records = json.loads(fetch(FetchFormat.JSON, wanted="value, key")[0])["records"]

    assert {"value": "a", "key": "k"} == records[0]
    with pytest.raises(Problem) as refused:
        fetch(FetchFormat.BATCH, wanted="valeu")
    assert ("invalid", "fields", "valeu") == (refused.value.code, refused.value.field, refused.value.value)


@pytest.mark.parametrize(
    ("asked", "chosen", "next_offset"),
    [
        ({}, [0, 1, 2], 15),
        ({"offset": 11}, [0, 1, 2], 15),
        ({"to": 12}, [0], 12),
        ({"limit": 1}, [0], 12),
        ({"limit": 3}, [0, 1], 13),
        ({"tag": "blue"}, [0], 15),
    ],
)
def test_batches_are_whole_and_unchanged(asked: dict[str, Any], chosen: list[int], next_offset: int) -> None:
    """They may begin before the offset and hold more than the limit; no frame is taken apart."""
    body, reached = fetch(FetchFormat.BATCH, **asked)

    assert [FRAMES[number] for number in chosen] == [bytes(found) for found in split(body)]
    assert next_offset == reached


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, FetchFormat.JSON),
        ("*/*", FetchFormat.JSON),
        ("application/vnd.laminar.batch", FetchFormat.BATCH),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", FetchFormat.JSON),
        ("application/json;q=0.5, application/x-ndjson", FetchFormat.NDJSON),
        ("application/json;q=0, Application/VND.apache.arrow.stream ; q=0.1", FetchFormat.ARROW),
    ],
)
def test_the_most_wanted_type_is_answered(accept: str | None, expected: FetchFormat) -> None:
    """RFC 9110, 12.5.1."""
    assert expected is fetch_format(_request(accept))


@pytest.mark.parametrize("accept", ["text/html", "application/json;q=0", "application/json;q=x", ""])
def test_a_type_that_cannot_be_had_is_not_acceptable(accept: str) -> None:
    """And the answer lists those that can."""
    with pytest.raises(Problem) as refused:
        fetch_format(_request(accept))

    assert "not_acceptable" == refused.value.code
    assert "application/x-ndjson" in refused.value.limit


def _request(accept: str | None) -> Request:
    headers = {} if accept is None else {"accept": accept}
    return Request(RequestHead("GET", "/", headers), b"", cast(Connection, None))


cells = st.one_of(st.none(), st.binary(max_size=8))


@given(
    st.lists(
        st.tuples(st.binary(max_size=20), cells, st.none() | st.text(max_size=5)), min_size=1, max_size=6
    )
)
def test_what_was_fetched_can_be_appended(rows: list[tuple[bytes, bytes | None, str | None]]) -> None:
    """The answer is made of the words that the envelopes read."""
    try:
        source = frame(
            3, [row[0] for row in rows], keys=[row[1] for row in rows], tags=[row[2] for row in rows]
        )
    except UnicodeEncodeError:
        return  # a lone surrogate is no tag
    fetched = encode_fetch(
        FetchFormat.JSON, [source], offset=3, to=99, limit=99, tag=None, wanted="key,value,tag,timestamp"
    )
    head = RequestHead("POST", "/", {"content-type": ENVELOPES_TYPE})
    body = b"".join(bytes(part) for part in fetched.body)
    found = parse_append(
        Request(head, body, cast(Connection, None)), limits=Limits(), now_ms=lambda: 0
    ).records

    assert found is not None
    batch = Batch(source)
    assert batch.values == found.values
    assert batch.keys == found.keys
    assert batch.tags == found.tags


@pytest.mark.parametrize("format_", FetchFormat)
@pytest.mark.parametrize("wanted", [None, "offset,value"])
def test_frames_with_a_new_header_are_shown_as_any_others(format_: FetchFormat, wanted: str | None) -> None:
    """Whole batches are sent as header and view of the body, without a copy."""
    asked: dict[str, Any] = {"offset": 10, "to": 15, "limit": 100, "tag": "red", "wanted": wanted}
    in_two = [
        SplitFrame(bytearray(each[:HEADER_SIZE]), memoryview(each)[HEADER_SIZE:]) for each in FRAMES[:2]
    ]

    made = encode_fetch(format_, [*in_two, FRAMES[2]], **asked)
    plain = encode_fetch(format_, FRAMES, **asked)

    assert b"".join(made.body) == b"".join(plain.body)
    assert (made.content_type, made.next_offset) == (plain.content_type, plain.next_offset)
    if format_ is FetchFormat.BATCH and wanted is None:
        assert made.body[:2] == [in_two[0].head, in_two[0].body]
        assert made.body[1] is in_two[0].body


def test_what_is_shown_in_a_thread_is_known_by_all_frames_together() -> None:
    """Each unfolds to less than what the loop shows at once."""
    folded = frame(0, [bytes(30_000)], codec=Codec.ZSTD)

    assert [False, True] == [shows_long(FetchFormat.JSON, [folded] * count, None) for count in (2, 3)]
