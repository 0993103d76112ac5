"""Appends that are refused: wrong bodies, each by name, and those beyond a limit."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator

import pytest
from backports import zstd

from laminar.batch import Codec, build, build_control
from laminar.batch.header import Kind
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

# -- wrong bodies -------------------------------------------------------------------------------------------

_BAD_BATCH = bytearray(build([b"x"]))
_BAD_BATCH[-1] ^= 1

WRONG_BODIES: list[tuple[str, bytes, int, str, str | None]] = [
    ("application/json", b"", 400, "malformed", "body"),
    ("application/json", b"{", 400, "malformed", "body"),
    ("application/json", b'"\xff"', 400, "malformed", "body"),
    ("application/json", b"1 2", 400, "malformed", "body"),
    ("application/json", b"[" * 100_000, 400, "malformed", "body"),
    (NDJSON, b"", 422, "invalid", "records"),
    (NDJSON, b"\n \n", 422, "invalid", "records"),
    (NDJSON, b"1\n2\n{\n", 400, "malformed", "line 3"),
    (NDJSON, b"1\n\xff\n", 400, "malformed", "line 2"),
    (NDJSON, b"[" * 100_000, 400, "malformed", "line 1"),
    (ENVELOPES, b"", 400, "malformed", "body"),
    (ENVELOPES, b"[]", 422, "invalid", "records"),
    (ENVELOPES, b'{"records":[]}', 422, "invalid", "records"),
    (ENVELOPES, b"{}", 422, "invalid", "record"),
    (ENVELOPES, b'{"value":"a","value_base64":"YQ=="}', 422, "invalid", "record"),
    (ENVELOPES, b'{"value":"a","colour":1}', 422, "invalid", None),
    (ENVELOPES, b'[{"value":"a"},{"value":1}]', 422, "invalid", "[1].value"),
    (ENVELOPES, b'{"records":[{"value_base64":"?"}]}', 422, "invalid", "records[0].value_base64"),
    (ENVELOPES, b'{"value":"a","key":"k","key_base64":"aw=="}', 422, "invalid", "record.key"),
    (ENVELOPES, b'{"value":"a","timestamp":"noon"}', 422, "invalid", "record.timestamp"),
    (ENVELOPES, b'{"value":"a","timestamp":9e99}', 422, "invalid", None),
    (ENVELOPES, b'{"value":"a","timestamp":99999999999999999999999}', 422, "invalid", None),
    (ENVELOPES, b'{"value":"a","timestamp":' + b"9" * 5000 + b"}", 422, "invalid", None),
    (ENVELOPES, b'{"value_json":' + b"[" * 100_000, 400, "malformed", "body"),
    (ENVELOPES, b'{"value":"\\ud800"}', 400, "malformed", "body"),
    (ENVELOPES, b'{"value":"a","tag":"' + b"t" * 256 + b'"}', 413, "too_large", "records[0].tag"),
    (ENVELOPES, b'{"value":"a","key":"' + b"k" * 65_537 + b'"}', 413, "too_large", "records[0].key"),
    (ENVELOPE_LINES, b'{"value":"a"}\n{"value":}\n', 400, "malformed", "line 2"),
    (BATCH, b"", 422, "invalid", "body"),
    (BATCH, b"no batch", 400, "malformed", None),
    (BATCH, bytes(build([b"x"]))[:-1], 400, "malformed", None),
    (BATCH, bytes(build([b"x"])) + b"tail", 400, "malformed", None),
    (BATCH, bytes(_BAD_BATCH), 400, "bad_checksum", None),
    (BATCH, bytes(build_control(Kind.NOOP, b"")), 422, "invalid", "kind"),
    (BATCH, bytes(build_control(Kind.CURSOR, b"x")), 422, "invalid", "kind"),
    (ARROW, b"", 400, "malformed", None),
    (ARROW, b"\xff\xff\xff\xff\x00\x00\x00\x00", 400, "malformed", "message"),
    (ARROW, b"\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(64), 400, "malformed", None),
]


@pytest.mark.parametrize(("kind", "body", "status", "code", "field"), WRONG_BODIES)
def test_a_wrong_body_is_named_and_appends_nothing(
    partition: Partition, kind: str, body: bytes, status: int, code: str, field: str | None
) -> None:
    """400 what can't be read, 422 what isn't allowed, 413 what is too large; to a topic likewise."""
    expected = {"outcome": "not_applied"} | ({} if field is None else {"field": field})

    problem(partition.post(body, kind), status, code, **expected)
    to_topic = partition.http.post(
        f"/v1/topics/{partition.topic}/records", content=body, headers={"Content-Type": kind}
    )
    problem(to_topic, status, code, **expected)

    assert [] == partition.records()


@pytest.mark.parametrize(
    ("query", "headers", "field"),
    [
        ({"key_from": "origin"}, {}, "key_from"),
        ({"tag_from": "/a~2"}, {}, "tag_from"),
    ],
)
def test_a_wrong_pointer_is_422(
    partition: Partition, query: dict[str, str], headers: dict[str, str], field: str
) -> None:
    """It is named with its value."""
    answer = partition.post("1\n", NDJSON, headers=headers, **query)

    problem(answer, 422, "invalid", field=field, value=query[field])


def test_wrong_particulars_of_a_value_are_named(partition: Partition) -> None:
    """Time, tag and headers that can't be ones."""
    problem(partition.post(b"x", timestamp="noon"), 422, "invalid", field="timestamp", value="noon")
    problem(partition.post(b"x", headers={"Laminar-Tag": "%zz"}), 400, "malformed", field="laminar-tag")
    problem(partition.post(b"x", headers={"Laminar-Tag": "%FF"}), 400, "malformed", field="laminar-tag")
    problem(partition.post(b"x", headers={"Laminar-Tag": "t" * 256}), 413, "too_large", limit=255)
    big = {"Laminar-Header-A": "a" * 33_000, "Laminar-Header-B": "b" * 33_000}
    assert partition.post(b"x", headers=big).status_code in (413, 431)
    assert [] == partition.records()


# -- limits ------------------------------------------------------------------------------------------------


def test_a_body_of_the_limit_goes_in_and_one_byte_more_does_not(partition: Partition) -> None:
    """What /v1/limits says is what holds, and the refused body is not read."""
    limits = partition.http.get("/v1/limits").json()
    assert MAX_APPEND_BYTES == limits["max_body_bytes"] == limits["max_record_bytes"]

    assert 201 == partition.post(bytes(MAX_APPEND_BYTES)).status_code
    refused = partition.post(bytes(MAX_APPEND_BYTES + 1))

    problem(
        refused,
        *(413, "too_large"),
        field="content-length",
        value=MAX_APPEND_BYTES + 1,
        limit=MAX_APPEND_BYTES,
        outcome="not_applied",
    )
    assert 1 == len(partition.records(fields="offset", max_bytes=32 << 20))


def test_a_chunked_body_has_the_same_limit(partition: Partition) -> None:
    """Its length shows only as it comes."""

    def parts(count: int) -> Iterator[bytes]:
        for _ in range(count):
            yield bytes(64 * 1024)

    url = f"{partition.path}/records"
    assert 201 == partition.http.post(url, content=parts(32)).status_code
    problem(partition.http.post(url, content=parts(33)), 413, "too_large", limit=MAX_APPEND_BYTES)


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_a_coding_is_taken_off_and_the_limit_is_for_what_comes_out(partition: Partition, coding: str) -> None:
    """A small body that unfolds into a large one is refused, before it takes the memory."""
    fold: Callable[[bytes], bytes] = gzip.compress if coding == "gzip" else zstd.compress
    headers = {"Content-Encoding": coding}

    assert 201 == partition.post(fold(b"hello"), headers=headers).status_code
    assert 200 == partition.post(fold(b"1\n2\n"), NDJSON, headers=headers).status_code
    assert 201 == partition.post(fold(bytes(MAX_APPEND_BYTES)), headers=headers).status_code
    bomb = fold(bytes(MAX_APPEND_BYTES * 50))
    assert len(bomb) < MAX_APPEND_BYTES // 4
    problem(partition.post(bomb, headers=headers), 413, "too_large", field="body", limit=MAX_APPEND_BYTES)
    problem(partition.post(fold(b"hello")[:-2], headers=headers), 400, "malformed", field="body")
    problem(partition.post(b"hello", headers=headers), 400, "malformed", field="body")
    assert ["hello", "1", "2"] == partition.values(to=3)


def test_an_unknown_coding_is_415(partition: Partition) -> None:
    """It says which ones are known, in the document and as a header."""
    answer = partition.post(b"x", headers={"Content-Encoding": "br"})

    problem(
        answer, 415, "unsupported_media_type", field="content-encoding", value="br", limit=["zstd", "gzip"]
    )
    assert "zstd, gzip" == answer.headers["accept-encoding"]


def test_a_batch_that_unfolds_too_far_is_refused(partition: Partition) -> None:
    """Its directory says how far, so nothing is unfolded to find out."""
    value = bytes(1024 * 1024)
    bomb = bytes(build([value] * 64, codec=Codec.ZSTD))
    assert len(bomb) < 64 * 1024

    problem(partition.post(bomb, BATCH), 413, "too_large", outcome="not_applied")
    record = bytes(build([bytes(MAX_APPEND_BYTES + 1)], codec=Codec.ZSTD))
    problem(partition.post(record, BATCH), 413, "too_large", limit=MAX_APPEND_BYTES)


def test_more_records_than_allowed_are_413(partition: Partition) -> None:
    """As lines, and as a batch."""
    limit = partition.http.get("/v1/limits").json()["max_records"]

    problem(
        partition.post(b"1\n" * (limit + 1), NDJSON),
        *(413, "too_large"),
        field="records",
        value=limit + 1,
        limit=limit,
    )
    problem(partition.post(bytes(build([b""] * (limit + 1))), BATCH), 413, "too_large", limit=limit)
