"""Records larger than a batch by the client and over HTTP, on a real node: streamed in, streamed out."""

from __future__ import annotations

import asyncio
import io
import random
import shutil
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec
import pyarrow
import pytest
from crc32c import crc32c

import laminar
from laminar.aio import Client
from laminar.batch import Batch, split
from laminar.client.consume import large_values as values_module
from laminar.client.produce import uploads as uploads_module
from laminar.client.produce.uploads import part_bytes
from laminar.testing.nodes import serve

PART = 1 << 16
DATA = random.Random(1).randbytes(10 * PART + 123)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """One node of two shards; each test has topics of its own."""
    with serve(shards=2) as found:
        yield found


@pytest.fixture
async def client(url: str) -> AsyncIterator[Client]:
    async with laminar.aio.connect(url) as opened:
        yield opened


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as opened:
        yield opened


async def chunks(data: bytes, size: int = 10_000) -> AsyncIterator[bytes]:
    for position in range(0, len(data), size):
        yield data[position : position + size]


async def test_a_stream_becomes_one_record_and_comes_back_as_it_was(client: Client, monkeypatch: Any) -> None:
    """With key, tag, headers and time; between other records; in pieces smaller and larger than its parts."""
    topic = await client.create_topic("a", partitions=4)
    expected = await topic.append(b"before", key="k")
    receipt = await topic.append_stream(
        chunks(DATA), "k", tag="t", headers={"h": b"x"}, timestamp_ms=1_000, part_bytes=PART
    )
    await topic.append(b"after", key="k")
    assert (expected.partition, 1, 1, True) == receipt[:4]

    async with topic.read(partitions=[receipt.partition]) as records:
        found = [record async for record in records]
    assert [0, 1, 2] == [record.offset for record in found]
    assert [None, len(DATA), None] == [record.large_bytes for record in found]
    large = found[1]
    assert (b"", b"", b"k", "t", 1_000) == (
        large.raw,
        large.value,
        large.key,
        large.tag,
        large.timestamp,
    )
    assert b"x" == large.headers["h"]
    for piece in (PART // 3, 3 * PART, 100 * PART):
        monkeypatch.setattr(values_module, "PIECE_BYTES", piece)
        async with topic.open(receipt.partition, 1) as value:
            assert len(DATA) == value.size_bytes
            assert DATA == b"".join([chunk async for chunk in value])
            assert b"" == await value.read()
    async with topic.open(receipt.partition, 1) as value:
        assert DATA[:1000] == await value.read(1000)
        assert DATA[1000:] == await value.read()


async def test_what_ends_within_a_part_is_an_ordinary_record(client: Client) -> None:
    """Also a stream of nothing; `open` reads it all the same."""
    topic = await client.create_topic("b")
    for size in (0, 1, PART):
        await topic.append_stream(chunks(DATA[:size]), tag="t", part_bytes=PART)
    await topic.append_stream(chunks(DATA[: PART + 1]), part_bytes=PART)

    async with topic.read() as records:
        found = [record async for record in records]
    assert [b"", DATA[:1], DATA[:PART], b""] == [record.raw for record in found]
    assert [None, None, None, PART + 1] == [record.large_bytes for record in found]
    for offset, size in enumerate((0, 1, PART, PART + 1)):
        async with topic.open(0, offset) as value:
            assert (size, DATA[:size]) == (value.size_bytes, await value.read())


async def test_a_stream_that_breaks_off_leaves_no_trace(client: Client, http: httpx.Client) -> None:
    """By an exception of the source or a cancellation: no offset is taken, and the next one is whole."""
    topic = await client.create_topic("c")

    async def breaking() -> AsyncIterator[bytes]:
        yield DATA
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await topic.append_stream(breaking(), part_bytes=PART)
    begun = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield DATA
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(topic.append_stream(endless(), part_bytes=PART))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(TypeError):
        await topic.append_stream(chunks("text"))  # type: ignore[arg-type]

    receipt = await topic.append_stream(chunks(DATA), part_bytes=PART)
    assert 0 == receipt.offset
    assert {0: 1} == await topic.offsets()


async def test_a_codec_is_never_given_the_value_of_a_large_record(client: Client) -> None:
    """Its reader is told how to read it; the others of the topic are decoded."""
    await client.create_topic("d")
    topic = client.topic("d", laminar.json())
    await topic.append({"n": 1})
    await topic.append_stream(chunks(DATA), part_bytes=PART)

    async with topic.read() as records:
        first, second = [record async for record in records]
    assert {"n": 1} == first.value
    with pytest.raises(laminar.Error) as caught:
        _ = second.value
    assert ("large_record", 1) == (caught.value.code, caught.value.value)


async def test_an_interval_topic_takes_them_as_well(client: Client) -> None:
    """As durable as its other records."""
    topic = await client.create_topic("e", settings={"flush": "interval"})
    receipt = await topic.append_stream(chunks(DATA), part_bytes=PART)

    assert (0, False) == (receipt.offset, receipt.synced)
    async with topic.open(0, 0) as value:
        assert DATA == await value.read()


def test_the_sync_face_takes_files_and_chunks_and_gives_a_file(url: str) -> None:
    """Small chunks are joined before they cross over; an exception of the source leaves nothing."""
    with laminar.connect(url) as client:
        topic = client.create_topic("f")
        first = topic.append_stream(io.BytesIO(DATA), part_bytes=PART)
        second = topic.append_stream((DATA[at : at + 7] for at in range(0, len(DATA), 7)), part_bytes=PART)

        def breaking() -> Iterator[bytes]:
            yield DATA
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            topic.append_stream(breaking(), part_bytes=PART)
        for wrong in (b"bytes", 7):
            with pytest.raises(TypeError):
                topic.append_stream(wrong)  # type: ignore[arg-type]
        assert [0, 1] == [first.offset, second.offset]
        for offset in (0, 1):
            copied = io.BytesIO()
            with topic.open(0, offset) as value:
                shutil.copyfileobj(value, copied)
            assert DATA == copied.getvalue()
        with topic.open(0, 0) as value:
            assert DATA == b"".join(value)
        assert {0: 2} == topic.offsets()
        table = topic.read().to_arrow()
        assert [None, None] == table.column("value").to_pylist()
        with pytest.raises(laminar.NotFound), topic.open(0, 2):
            pass
        with pytest.raises(laminar.ConfigError):
            value.read()


async def test_a_value_that_is_not_what_was_appended_is_an_error_at_its_end(
    client: Client, monkeypatch: Any
) -> None:
    """The reader computes the checksum over what it was given, and compares."""
    topic = await client.create_topic("g")
    await topic.append_stream(chunks(DATA), part_bytes=PART)
    monkeypatch.setattr(values_module, "crc32c", lambda data, before: 1)

    with pytest.raises(laminar.Error) as caught:
        async with topic.open(0, 0) as value:
            await value.read()
    assert ("bad_checksum", f"{crc32c(DATA):08x}") == (caught.value.code, caught.value.limit)


async def test_what_was_damaged_on_its_way_is_not_appended(client: Client, monkeypatch: Any) -> None:
    """The leader compares what it has with the checksum of what was written; the upload is dropped."""
    topic = await client.create_topic("h")
    monkeypatch.setattr(uploads_module, "crc32c", lambda data, before: crc32c(data, before) ^ 1)

    with pytest.raises(laminar.Error) as caught:
        await topic.append_stream(chunks(DATA), part_bytes=PART)
    assert ("bad_checksum", "crc32c") == (caught.value.code, caught.value.field)
    assert {0: 0} == await topic.offsets()


def test_parts_grow_so_that_fifty_thousand_hold_any_stream() -> None:
    """Late, and never beyond what the server takes; the first size holds if that is larger already."""
    sizes = [part_bytes(number, 1 << 18, 16 << 20) for number in range(50_000)]

    places = (19_999, 20_000, 24_999, 25_000, 44_999, 49_999)
    assert [1, 2, 2, 4, 32, 64] == [sizes[place] >> 18 for place in places]
    assert sum(sizes) > 150 << 30
    assert 5 << 20 == part_bytes(49_999, 1 << 20, 5 << 20)
    assert 9 << 20 == part_bytes(49_999, 9 << 20, 5 << 20)


# -- over HTTP ----------------------------------------------------------------------------------------------


def upload(http: httpx.Client, topic: str, name: str, *parts: bytes, more: str = "") -> httpx.Response:
    base = f"/v1/topics/{topic}/partitions/0/uploads/{name}"
    for number, part in enumerate(parts):
        assert 201 == http.put(f"{base}/parts/{number}", content=part).status_code
    whole = b"".join(parts)
    return http.post(f"{base}?parts={len(parts)}&size_bytes={len(whole)}&crc32c={crc32c(whole):08x}{more}")


def test_every_shard_takes_an_upload_and_gives_its_record(http: httpx.Client) -> None:
    """Whoever is asked passes it on in pieces, by ranges too; HEAD tells the length."""
    http.put("/v1/topics/i", json={"partitions": 2})
    data = random.Random(2).randbytes(9_000_000)
    for partition in (0, 1):  # one of them is another shard's than that of the connection
        base = f"/v1/topics/i/partitions/{partition}"
        parts = [data[:4_000_000], data[4_000_000:4_000_001], data[4_000_001:]]
        for number in (2, 0, 1):
            assert 201 == http.put(f"{base}/uploads/u/parts/{number}", content=parts[number]).status_code
        query = f"parts=3&size_bytes={len(data)}&crc32c={crc32c(data):08x}&key=S%25&tag=big"
        answer = http.post(f"{base}/uploads/u?{query}", headers={"Laminar-Header-From": "here"})
        assert (201, f"{base}/records/0") == (answer.status_code, answer.headers["location"])
        assert "laminar-replayed" not in answer.headers
        again = http.post(f"{base}/uploads/u?{query}")
        assert (answer.json(), "1") == (again.json(), again.headers["laminar-replayed"])

        answer = http.get(f"{base}/records/0")
        assert data == answer.content
        told = ("content-length", "laminar-large", "laminar-crc32c", "laminar-key", "laminar-tag")
        assert ["9000000", "9000000", f"{crc32c(data):08x}", "S%25", "big"] == [
            answer.headers[name] for name in told
        ]
        assert "here" == answer.headers["laminar-header-from"]
        assert not [name for name in answer.headers if name.startswith("laminar-header-laminar")]
        etag = answer.headers["etag"]
        head = http.head(f"{base}/records/0")
        assert (200, "9000000", b"") == (head.status_code, head.headers["content-length"], head.content)
        for first, stop in ((0, 1), (3_999_999, 4_000_002), (10, 8_999_999), (8_999_999, 9_000_000)):
            answer = http.get(f"{base}/records/0", headers={"Range": f"bytes={first}-{stop - 1}"})
            assert (206, f"bytes {first}-{stop - 1}/9000000") == (
                answer.status_code,
                answer.headers["content-range"],
            )
            assert data[first:stop] == answer.content
        for given, expected in (("bytes=-7", data[-7:]), ("bytes=8999990-", data[-10:])):
            assert expected == http.get(f"{base}/records/0", headers={"Range": given}).content
        for headers in ({"Range": "lines=1-2"}, {"Range": "bytes=5-4"}, {"Range": "bytes=0-1,4-5"}):
            assert (200, len(data)) == _status_and_length(http.get(f"{base}/records/0", headers=headers))
        older = http.get(f"{base}/records/0", headers={"Range": "bytes=0-1", "If-Range": '"other"'})
        assert (200, len(data)) == _status_and_length(older)
        answer = http.get(f"{base}/records/0", headers={"Range": "bytes=9000000-"})
        assert (416, "range_not_satisfiable", 9_000_000) == (
            answer.status_code,
            answer.json()["code"],
            answer.json()["limit"],
        )
        assert 304 == http.get(f"{base}/records/0", headers={"If-None-Match": etag}).status_code


def _status_and_length(answer: httpx.Response) -> tuple[int, int]:
    return answer.status_code, len(answer.content)


def test_ordinary_fetches_tell_a_large_record_from_an_empty_one(http: httpx.Client) -> None:
    """JSON has its length in place of a value, Arrow null, batches a flag; none has bytes of it."""
    http.put("/v1/topics/j", json={"partitions": 1})
    http.post("/v1/topics/j/partitions/0/records", content=b"")
    upload(http, "j", "u", b"ab", b"c", more="&key=SFO")
    path = "/v1/topics/j/partitions/0/records?offset="

    first = http.get(f"{path}0&limit=1").json()["records"][0]
    large = http.get(f"{path}1").json()["records"][0]
    line = msgspec.json.decode(http.get(f"{path}1", headers={"Accept": "application/x-ndjson"}).content)
    assert "" == first["value"]
    assert ("SFO", 3, {"laminar-large": "3", "laminar-crc32c": f"{crc32c(b'abc'):08x}"}) == (
        large["key"],
        large["value_bytes"],
        large["headers"],
    )
    assert "value" not in large
    assert large == line
    assert {"value_bytes": 3} == http.get(f"{path}1&fields=value").json()["records"][0]
    batch_type = "application/vnd.laminar.batch"
    (frame,) = split(http.get(f"{path}1", headers={"Accept": batch_type}).content)
    assert Batch(frame).is_large
    (narrow,) = split(http.get(f"{path}1&fields=offset", headers={"Accept": batch_type}).content)
    assert frame == narrow
    arrow_type = "application/vnd.apache.arrow.stream"
    stream = http.get(f"{path}0", headers={"Accept": arrow_type}).content
    assert [b"", None] == pyarrow.ipc.open_stream(stream).read_all().column("value").to_pylist()
    answer = http.post(path.partition("?")[0], content=bytes(frame), headers={"Content-Type": batch_type})
    assert (422, "flags") == (answer.status_code, answer.json()["field"])


def test_an_upload_that_makes_no_sense_is_refused_by_name(http: httpx.Client) -> None:
    """Field, value and limit; nothing of it is appended."""
    http.put("/v1/topics/k", json={"partitions": 1})
    base = "/v1/topics/k/partitions/0/uploads/u"
    assert 201 == http.put(f"{base}/parts/0", content=b"x").status_code
    right = f"parts=1&size_bytes=1&crc32c={crc32c(b'x'):08x}"

    def refused(answer: httpx.Response, status: int, code: str, field: str) -> None:
        told = answer.json()
        assert (status, code, field) == (answer.status_code, told["code"], told["field"]), told

    refused(http.put(f"{base}/parts/0", content=b""), 422, "invalid", "body")
    refused(http.put(f"{base}/parts/0", content=b"y"), 422, "invalid", "part")
    refused(http.put(f"{base}/parts/50000", content=b"y"), 422, "invalid", "part")
    refused(http.put(f"{base}/parts/x", content=b"y"), 422, "invalid", "part")
    refused(http.put(f"{base}/parts/1", content=bytes(16 * 2**20 + 1)), 413, "too_large", "content-length")
    refused(http.put("/v1/topics/k/partitions/0/uploads/a b/parts/0", content=b"y"), 422, "invalid", "upload")
    refused(
        http.put("/v1/topics/k/partitions/1/uploads/u/parts/0", content=b"y"),
        404,
        "no_such_partition",
        "partition",
    )
    refused(
        http.put("/v1/topics/_transactions/partitions/0/uploads/u/parts/0", content=b"y"),
        422,
        "invalid",
        "topic",
    )
    for missing in ("parts", "size_bytes", "crc32c"):
        query = "&".join(each for each in right.split("&") if not each.startswith(missing))
        refused(http.post(f"{base}?{query}"), 422, "invalid", missing)
    refused(http.post(f"{base}?parts=0&size_bytes=1&crc32c=00000000"), 422, "invalid", "parts")
    refused(http.post(f"{base}?parts=1&size_bytes=1&crc32c=12"), 422, "invalid", "crc32c")
    refused(http.post(f"{base}?parts=1&size_bytes=1&crc32c=00000000"), 400, "bad_checksum", "crc32c")
    refused(http.post(f"{base}?parts=2&size_bytes=1&crc32c=00000000"), 409, "no_stage", "parts")
    refused(http.post(f"{base}?{right}", content=b"x"), 422, "invalid", "value")
    two = {"Content-Type": "application/vnd.laminar.records+ndjson"}
    refused(
        http.post(f"{base}?{right}", content=b'{"value":""}\n{"value":""}\n', headers=two),
        422,
        "invalid",
        "records",
    )
    own = {"Laminar-Header-laminar-large": "1"}
    refused(http.post(f"{base}?{right}", headers=own), 422, "invalid", "headers")
    refused(
        http.post(f"{base}?{right}", headers={"Idempotency-Key": "k"}),
        422,
        "invalid",
        "idempotency-key",
    )
    assert [] == http.get("/v1/topics/k/partitions/0/records").json()["records"]

    assert 204 == http.delete(base).status_code
    refused(http.post(f"{base}?{right}"), 409, "no_stage", "parts")
    assert 204 == http.delete(base).status_code
