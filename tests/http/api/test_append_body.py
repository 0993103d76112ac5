"""Bodies of appends: what each content type means, and how each mistake is named."""

from __future__ import annotations

import base64
import json
from typing import Any, cast

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.batch import Batch, Codec, Kind, build, build_control
from laminar.http.api.append_body import Append, parse_append, parses_long
from laminar.http.api.limits import Limits
from laminar.http.api.problems import Problem
from laminar.http.api.records import Records
from laminar.http.protocol.messages import Connection, Request
from laminar.http.protocol.request_head import RequestHead

ENVELOPES = "application/vnd.laminar.records+json"
LINES = "application/vnd.laminar.records+ndjson"
NDJSON = "application/x-ndjson"
BATCH = "application/vnd.laminar.batch"
ARROW = "application/vnd.apache.arrow.stream"


def parse(
    body: bytes | str, kind: str = "", query: str = "", limits: Limits | None = None, **headers: str
) -> Append:
    if isinstance(body, str):
        body = body.encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if kind:
        named["content-type"] = kind
    head = RequestHead("POST", f"/?{query}", named)
    return parse_append(
        Request(head, body, cast(Connection, None)), limits=limits or Limits(), now_ms=lambda: 0
    )


def records(*arguments: Any, **more: Any) -> Records:
    found = parse(*arguments, **more).records
    assert found is not None
    return found


def refused(*arguments: Any, **more: Any) -> tuple[str, str | None]:
    with pytest.raises(Problem) as problem:
        parse(*arguments, **more)
    assert problem.value.detail or problem.value.title
    return problem.value.code, problem.value.field


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "image/png; a=b"])
def test_any_other_type_is_one_value(kind: str) -> None:
    """A bare ``curl -d hi`` works."""
    found = records(b"\xff hi\n", kind)

    assert [b"\xff hi\n"] == found.values
    assert (None, None, None, None) == (found.keys, found.tags, found.headers, found.timestamps)


def test_a_value_has_its_key_tag_time_and_headers_beside_it() -> None:
    """In the query and in the head; what isn't ASCII comes percent-encoded."""
    found = records(
        b"",
        query="key=S%C3%A9&timestamp=2026-01-01T00:00:00Z",
        laminar_tag="r%C3%A9d",
        laminar_header_trace="a%00b",
        laminar_header_b="1 2",
    )

    assert ([b""], ["Sé".encode()], ["réd"]) == (found.values, found.keys, found.tags)
    assert [{"trace": b"a\0b", "b": b"1 2"}] == found.headers
    assert [1767225600000] == found.timestamps


def test_json_is_kept_as_it_was_written() -> None:
    """Spaces, order and numbers too large for a float included."""
    text = b' {"b" : 1e999,\n "a":"\\u00e9"} '

    assert [text] == records(text, "application/json; charset=utf-8", query="key=k").values


@pytest.mark.parametrize("text", [b"", b"{", b"nope", b'{"a":1} x', b'"\xff"', b"[" * 100_000, b'{"a":01}'])
def test_what_is_not_json_is_malformed(text: bytes) -> None:
    """Also what only pretends: bad UTF-8, depth without end."""
    assert ("malformed", "body") == refused(text, "application/json")
    if text:
        assert ("malformed", "line 3") == refused(b"{}\n\n" + text.replace(b"\n", b""), NDJSON)
        assert ("malformed", "line 2") == refused(b"{}\n" + text, NDJSON, "key_from=/a")


def test_ndjson_is_a_record_a_line() -> None:
    """Pointers pick key and tag; empty lines and line ends are none of it."""
    body = b'{"a/b":{"o":"SFO"},"t":[7,"x"]}\r\n\n  {"a/b":{"o":9},"t":[]}\n"text"\n{"a/b":{"o":null}}'
    found = records(body, NDJSON, query="key_from=/a~1b/o&tag_from=/t/1")

    assert 4 == len(found)
    assert b'{"a/b":{"o":9},"t":[]}' == found.values[1]
    assert [b"SFO", b"9", None, None] == found.keys
    assert ["x", None, None, None] == found.tags
    assert records(body, NDJSON).keys is None


@pytest.mark.parametrize("pointer", ["a", "/a~2", "~"])
def test_what_is_no_json_pointer_is_named(pointer: str) -> None:
    """RFC 6901."""
    assert ("invalid", "key_from") == refused(b"{}", NDJSON, query=f"key_from={pointer}")


def test_envelopes_spell_out_a_record() -> None:
    """A list, a single one, a fetch's answer, or lines: the same records."""
    envelopes: list[dict[str, Any]] = [
        {"value": "é", "key": "k", "tag": "t", "headers": {"a": "b"}, "timestamp": 5},
        {"value_json": {"a": None}, "key_base64": "/w==", "timestamp": "1970-01-01T00:00:00.006Z"},
        {"value_base64": "AP8=", "headers_base64": {"c": "/w=="}},
        {"value_json": None},
    ]
    expected = Records(
        ["é".encode(), b'{"a": null}', b"\0\xff", b"null"],
        keys=[b"k", b"\xff", None, None],
        tags=["t", None, None, None],
        headers=[{"a": b"b"}, None, {"c": b"\xff"}, None],
        timestamps=[5, 6, None, None],
    )

    for found in (
        records(json.dumps(envelopes), ENVELOPES),
        records(json.dumps({"records": envelopes, "next_offset": 7}), ENVELOPES),
        records("\n".join(json.dumps(envelope) for envelope in envelopes) + "\n", LINES),
    ):
        assert expected.values == found.values
        assert expected.keys == found.keys
        assert expected.tags == found.tags
        assert expected.headers == found.headers
        assert expected.timestamps == found.timestamps
    assert [b"x"] == records('{"value": "x"}', ENVELOPES).values


@pytest.mark.parametrize(
    ("envelope", "code", "field"),
    [
        ("{}", "invalid", ""),
        ('{"value":"a","value_json":1}', "invalid", ""),
        ('{"value":1}', "invalid", "value"),
        ('{"value":"a","key":1}', "invalid", "key"),
        ('{"value":"a","key":"b","key_base64":""}', "invalid", "key"),
        ('{"value":"a","keys":"b"}', "invalid", ""),
        ('{"value_base64":"?"}', "invalid", "value_base64"),
        ('{"value":"a","headers":{"b":1}}', "invalid", "headers[...]"),
        ('{"value":"a","headers":{"b":""},"headers_base64":{"b":""}}', "invalid", "headers_base64.b"),
        ('{"value":"a","timestamp":"now"}', "invalid", "timestamp"),
        ('{"value":"a","timestamp":1e3}', "invalid", "timestamp"),
        ('{"value":"a"', "malformed", ""),
        ("1", "invalid", ""),
    ],
)
def test_a_broken_envelope_is_named(envelope: str, code: str, field: str | None) -> None:
    """By its place in the list, or its line, and the field in it."""
    dotted = "" if not field else f".{field}"

    assert (code, f"line 3{dotted}") == refused(f'{{"value":"first"}}\n\n{envelope}', LINES)
    expected = "body" if code == "malformed" else f"[1]{dotted}"
    assert (code, expected) == refused(f'[{{"value":"first"}},{envelope}]', ENVELOPES)


def test_an_append_has_at_least_one_record() -> None:
    """Nothing is not acknowledged as something."""
    empty_stream = _arrow_stream([pyarrow.record_batch({"value": pyarrow.array([], pyarrow.binary())})])

    assert ("invalid", "records") == refused(b"\n\n", NDJSON)
    assert ("invalid", "records") == refused(b"[]", ENVELOPES)
    assert ("invalid", "records") == refused(b"", LINES)
    assert ("invalid", "body") == refused(b"", BATCH)
    assert ("invalid", "records") == refused(empty_stream, ARROW)


@pytest.mark.parametrize(
    ("envelope", "field"),
    [
        ({"value": "x" * 101}, "records[1].value"),
        ({"value": "", "key": "k" * 11}, "records[1].key"),
        ({"value": "", "tag": "é" * 6}, "records[1].tag"),
        ({"value": "", "headers": {"a": "b" * 20}}, "records[1].headers"),
    ],
)
def test_a_record_over_a_limit_is_named(envelope: dict[str, Any], field: str) -> None:
    """With what it has and what it may have."""
    limits = Limits(
        max_record_bytes=100, max_key_bytes=10, max_tag_bytes=10, max_headers_bytes=20, max_records=2
    )

    with pytest.raises(Problem) as problem:
        parse(json.dumps([{"value": "a"}, envelope]), ENVELOPES, limits=limits)
    assert ("too_large", field) == (problem.value.code, problem.value.field)
    assert problem.value.value > problem.value.limit
    assert ("too_large", "records") == refused(b"1\n2\n3", NDJSON, limits=limits)


def test_batches_are_taken_as_they_are() -> None:
    """Back to back, verified; records of a batch for a topic come out of it."""
    frames = [build([b"a", b"b"], keys=[b"k", None]), build([b"c"], producer_id=b"p" * 16, sequence=3)]
    found = parse(b"".join(frames), BATCH)

    assert found.records is None
    assert frames == [bytes(frame) for frame in found.frames]
    taken = Records.of_batch(Batch(frames[0]))
    assert ([b"a", b"b"], [b"k", None]) == (taken.values, taken.keys)


def test_a_bad_batch_refuses_the_whole_body() -> None:
    """Damage, a control batch, a cut, too many records, too large a record."""
    good = bytes(build([b"a" * 50] * 3))
    damaged = bytearray(good)
    damaged[-1] ^= 1

    assert "bad_checksum" == refused(good + bytes(damaged), BATCH)[0]
    assert "malformed" == refused(good[:-1], BATCH)[0]
    assert "malformed" == refused(b"hello", BATCH)[0]
    assert ("invalid", "kind") == refused(bytes(build_control(Kind.NOOP, b"")), BATCH)
    assert "too_large" == refused(good, BATCH, limits=Limits(max_records=2))[0]
    assert "too_large" == refused(good, BATCH, limits=Limits(max_record_bytes=49))[0]


def _arrow_stream(batches: list[pyarrow.RecordBatch]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def test_an_arrow_stream_is_records() -> None:
    """All its batches, with the columns it has."""
    batch = pyarrow.record_batch({"value": [b"a", b"b"], "key": [b"k", None], "tag": ["t", None]})
    found = records(_arrow_stream([batch, batch]), ARROW)

    assert ([b"a", b"b"] * 2, [b"k", None] * 2, ["t", None] * 2) == (found.values, found.keys, found.tags)
    assert "malformed" == refused(b"ARROW1", ARROW)[0]
    assert "malformed" == refused(_arrow_stream([pyarrow.record_batch({"a": [1]})]), ARROW)[0]


def test_records_are_split_and_joined_by_row() -> None:
    """A topic's append goes to several partitions, each in the order given."""
    whole = Records([b"a", b"b", b"c"], keys=[b"1", None, b"3"], timestamps=[1, None, 3])
    joined = Records.concat([whole.take([2, 0]), Records([b"d"], tags=["t"])])

    assert ([b"c", b"a", b"d"], [b"3", b"1", None]) == (joined.values, joined.keys)
    assert ([None, None, "t"], [3, 1, None], None) == (joined.tags, joined.timestamps, joined.headers)
    assert 5 == joined.size_bytes


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(
    st.lists(
        st.tuples(
            st.binary(max_size=30),
            st.none() | st.binary(max_size=10),
            st.none() | text,
            st.dictionaries(text, st.binary(max_size=5), max_size=2),
            st.none() | st.integers(0, 2**40),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_any_records_pass_through_envelopes(rows: list[tuple[Any, ...]]) -> None:
    """Whatever the bytes, and both the list and the lines say the same."""
    envelopes = []
    for value, key, tag, headers, timestamp in rows:
        envelope: dict[str, Any] = {"value_base64": base64.b64encode(value).decode()}
        if key is not None:
            envelope["key_base64"] = base64.b64encode(key).decode()
        if tag is not None:
            envelope["tag"] = tag
        if headers:
            envelope["headers_base64"] = {
                name: base64.b64encode(cell).decode() for name, cell in headers.items()
            }
        if timestamp is not None:
            envelope["timestamp"] = timestamp
        envelopes.append(envelope)

    for found in (
        records(json.dumps(envelopes), ENVELOPES),
        records("\n".join(map(json.dumps, envelopes)), LINES),
    ):
        count = len(rows)
        assert [row[0] for row in rows] == found.values
        assert [row[1] for row in rows] == (found.keys or [None] * count)
        assert [row[2] for row in rows] == (found.tags or [None] * count)
        assert [row[3] or None for row in rows] == (found.headers or [None] * count)
        assert [row[4] for row in rows] == (found.timestamps or [None] * count)


@given(st.binary(max_size=100), st.sampled_from(["application/json", NDJSON, ENVELOPES, LINES, BATCH, ARROW]))
def test_no_body_raises_anything_but_a_problem(body: bytes, kind: str) -> None:
    """Whatever comes is answered."""
    try:
        parse(body, kind, query="key_from=/a/0&tag_from=")
    except Problem:
        pass


def test_what_parses_long_is_told_from_the_beginning_of_the_body() -> None:
    """Most bodies are one batch of plain values; one behind it, or a column beside it, counts."""

    def long(body: bytes | bytearray, kind: str = BATCH) -> bool:
        head = RequestHead("POST", "/", {"content-type": kind})
        return parses_long(Request(head, bytes(body), cast(Connection, None)))

    plain, small = build([b"x" * 1000]), build([bytes(1000)], codec=Codec.ZSTD)
    bomb, tagged = build([bytes(70_000)], codec=Codec.ZSTD), build([b""] * 3000, tags=["t"] * 3000)
    assert [False, False, True, True] == [long(body) for body in (plain, small, bomb, tagged)]
    assert [True, True, False] == [long(plain + bomb), long(bomb + plain), long(plain + small)]
    assert not long(plain[:-1] + bytes(1) + plain[:100]), "it is refused at once"
    assert not long(plain[:20])
    assert long(build([bytes(2 << 20)]))
    assert [False, True] == [long(build([b""] * count)) for count in (1 << 16, (1 << 16) + 1)]
    assert [False, True] == [long(build([b"x"]) * frames) for frames in (64, 65)]
    few = build([b""] * 60, tags=["t"] * 60)
    assert [False, True] == [long(few * frames) for frames in (34, 35)], "together they take long"
    big = build([bytes(1000)] * 300)
    assert [False, True, True] == [long(body) for body in (big, big + plain, plain * 3000)]
    assert long(build([b"x"] * 30_000, keys=[b"%d" % number for number in range(30_000)]))
    assert [False, True] == [long(build([bytes(size)])) for size in ((1 << 20) - 300, 1 << 20)]
