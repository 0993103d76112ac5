"""Trace ids by the client: each way to append a record takes one, and readers and consumers see it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import laminar
from laminar.batch import Batch
from laminar.client.topic import Topic
from laminar.client.trace_id import trace_id_bytes
from laminar.testing.nodes import serve
from laminar.wire.datagram import Question
from tests.client.produce import test_datagrams
from tests.client.produce.test_datagrams import Reply, peer, placed

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
OTHER = "00" * 16


@pytest.fixture
async def topic(tmp_path: Path) -> AsyncIterator[Topic[bytes]]:
    async with laminar.embed(tmp_path / "data", journal_file_bytes=4 << 20) as node:
        yield await node.client.create_topic("t", partitions=2)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve() as found:
        yield found


patient = test_datagrams.patient


async def traces(topic: Topic[bytes]) -> dict[bytes, str | None]:
    return {record.raw: record.trace_id async for record in topic.read()}


async def test_an_append_and_a_producer_take_one(topic: Topic[bytes]) -> None:
    """In hexadecimal digits or as bytes; in one batch with records that have none, and are delayed."""
    await topic.append(b"append", trace_id=TRACE)
    await topic.append(b"none")
    async with topic.producer() as producer:
        producer.send(b"first", "k")
        producer.send(b"text", "k", trace_id=TRACE.upper())
        producer.send(b"bytes", "k", tag="t", trace_id=bytes(16))
        producer.send(b"due", "k", trace_id=TRACE, deliver_at=1)
    async with topic.producer(name="n") as producer:
        producer.send(b"number", "k", number=1, trace_id=TRACE)

    assert {
        b"append": TRACE,
        b"none": None,
        b"first": None,
        b"text": TRACE,
        b"bytes": OTHER,
        b"due": TRACE,
        b"number": TRACE,
    } == await traces(topic)


async def test_a_job_and_a_record_that_was_delayed_have_it(topic: Topic[bytes]) -> None:
    receipt = await topic.append(b"later", trace_id=TRACE, delay=3600)
    assert receipt.scheduled is not None
    await topic.move_delayed(receipt.scheduled, deliver_at="now")
    channel = await topic.channel("c", exist_ok=True)

    (job,) = await channel.receive_batch(wait=60)

    assert (b"later", TRACE) == (job.raw, job.trace_id)


async def test_a_transaction_and_a_stream_take_one(tmp_path: Path) -> None:
    async def chunks(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b"." * 1_000

    async with laminar.embed(tmp_path / "data", journal_file_bytes=4 << 20) as node:
        topic = await node.client.create_topic("t")
        async with node.client.transaction("whole", 0) as tx:
            tx.append("t", b"tx", trace_id=TRACE)
            tx.append(topic, b"plain")
        await topic.append_stream(chunks(1), trace_id=TRACE)
        large = await topic.append_stream(chunks(3), trace_id=TRACE, part_bytes=1_000)

        assert {b"tx": TRACE, b"plain": None, b"." * 1_000: TRACE, b"": TRACE} == await traces(topic)
        async with topic.open(large.partition, large.offset) as value:
            assert b"." * 3_000 == await value.read()


@pytest.mark.usefixtures("patient")
async def test_a_datagram_takes_one() -> None:
    asked: list[list[bytes | None] | None] = []

    def say(question: Question, times: int) -> Reply:
        asked.append(Batch(memoryview(bytes(question.frame))).trace_ids)
        return placed(question, 1)

    async with peer(say) as node:
        async with laminar.aio.connect(node.url) as client:
            async with client.topic("t").datagrams(partitions=1) as datagrams:
                await datagrams.append(b"v", trace_id=TRACE)
                await datagrams.append(b"v")

    assert [[bytes.fromhex(TRACE)], None] == asked


def test_the_sync_face_takes_one(url: str) -> None:
    with laminar.connect(url) as client:
        topic = client.create_topic("sync")
        topic.append(b"append", trace_id=TRACE)
        with topic.producer() as producer:
            producer.send(b"send", trace_id=TRACE)
            producer.send(b"plain")
        with client.transaction("sync", 0) as tx:
            tx.append(topic, b"tx", trace_id=TRACE)
        topic.append_stream([b"stream"], trace_id=TRACE)

        assert [TRACE, TRACE, None, TRACE, TRACE] == [record.trace_id for record in topic.read()]


@pytest.mark.parametrize(
    ("wrong", "limit"),
    [(TRACE[:-1], 32), (TRACE[:-1] + "g", 32), (f"{TRACE[:-2]} 7", 32), ("", 32), (b"x" * 15, 16), (7, 16)],
)
async def test_what_is_no_trace_id_is_refused_by_name(topic: Topic[bytes], wrong: Any, limit: int) -> None:
    """Before anything is sent; the producer goes on."""
    with pytest.raises(laminar.ConfigError, match=r"trace_id: .* 32 hexadecimal digits") as refused:
        await topic.append(b"x", trace_id=wrong)
    assert ("trace_id", wrong, limit) == (refused.value.field, refused.value.value, refused.value.limit)
    async with topic.producer() as producer:
        with pytest.raises(laminar.ConfigError):
            producer.send(b"x", trace_id=wrong)
        producer.send(b"y")

    assert {b"y": None} == await traces(topic)


def test_digits_and_bytes_are_the_same() -> None:
    assert trace_id_bytes(TRACE) == trace_id_bytes(bytes.fromhex(TRACE)) == bytes.fromhex(TRACE)
    assert trace_id_bytes(None) is None
