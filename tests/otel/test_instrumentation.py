"""`laminar.otel.instrument`: a trace goes on into records, and from jobs, with a loop and without."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Span, Tracer, format_span_id, format_trace_id, get_current_span

import laminar
from laminar.client.sync.client import Client
from laminar.testing import nodes


class Program:
    """A program that makes spans, and the spans that it has ended."""

    def __init__(self) -> None:
        self.provider = TracerProvider(shutdown_on_exit=False)
        self._ended = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._ended))
        self.tracer: Tracer = self.provider.get_tracer("tests")

    def ended(self, name: str) -> list[ReadableSpan]:
        return [each for each in self._ended.get_finished_spans() if each.name == name]


@pytest.fixture
def program() -> Iterator[Program]:
    program = Program()
    yield program
    program.provider.shutdown()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with nodes.serve(shards=1) as url:
        yield url


def parent_of(span: Span) -> dict[str, bytes]:
    context = span.get_span_context()
    parent = f"00-{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}"
    return {"traceparent": f"{parent}-{context.trace_flags:02x}".encode()}


def trace_of(span: Span) -> str:
    return format_trace_id(span.get_span_context().trace_id)


def carried(client: Client, topic: str) -> list[tuple[str | None, dict[str, bytes]]]:
    """Trace id and headers of each record of a topic of one partition, in order."""
    return [
        (
            each.trace_id,
            {name: cell for name, cell in each.headers.items() if not name.startswith("laminar-")},
        )
        for each in client.topic(topic).read()
    ]


def test_each_way_to_append_carries_the_current_span(url: str, program: Program) -> None:
    with laminar.connect(url) as plain, laminar.connect(url) as client:
        assert client is laminar.otel.instrument(client, tracer_provider=program.provider)
        laminar.otel.instrument(client)
        topic = client.create_topic("sync", partitions=1)
        topic.append(b"without")
        with program.tracer.start_as_current_span("request") as span:
            topic.append(b"0", headers={"h": b"x"})
            with topic.producer() as producer:
                producer.send(b"1")
            with client.transaction("sync-sink", 1) as transaction:
                transaction.append(topic, b"2", partition=0)
            with topic.datagrams(partitions=1) as datagrams:
                datagrams.append(b"3", partition=0)
            topic.append_stream([bytes(2 << 20)], part_bytes=1 << 20)
            plain.topic("sync").append(b"of another client")

        ways = [(trace_of(span), parent_of(span))] * 5
        ways[0] = (trace_of(span), {"h": b"x"} | parent_of(span))
        assert [(None, {}), *ways, (None, {})] == carried(plain, "sync")


async def test_each_way_to_append_with_a_loop(url: str, program: Program) -> None:
    """Tasks have spans of their own."""
    async with laminar.aio.connect(url) as client:
        laminar.otel.instrument(client, tracer_provider=program.provider)
        topic = await client.create_topic("loop", partitions=1)

        async def request(value: bytes) -> tuple[str, dict[str, bytes]]:
            with program.tracer.start_as_current_span("request") as span:
                await topic.append(value)
                return trace_of(span), parent_of(span)

        spans = await asyncio.gather(*(request(b"%d" % number) for number in range(5)))
        with program.tracer.start_as_current_span("request") as span:
            async with topic.producer() as producer:
                producer.send(b"5")
            async with client.transaction("loop-sink", 1) as transaction:
                transaction.append(topic, b"6", partition=0)

        found = {
            bytes(each.raw): (each.trace_id, dict(each.headers)) async for each in client.topic("loop").read()
        }
        wanted = {b"%d" % number: of for number, of in enumerate(spans)}
        assert wanted | dict.fromkeys((b"5", b"6"), (trace_of(span), parent_of(span))) == found


def test_what_a_record_says_itself_counts_more(url: str, program: Program) -> None:
    other = b"00-%s-00f067aa0ba902b7-01" % (b"ab" * 16)
    with laminar.connect(url) as client:
        topic = laminar.otel.instrument(client).create_topic("own", partitions=1)
        with program.tracer.start_as_current_span("request"):
            topic.append(b"0", trace_id="cd" * 16)
            topic.append(b"1", headers={"traceparent": other})

        assert [("cd" * 16, {}), (None, {"traceparent": other})] == carried(client, "own")


def test_a_handler_goes_on_in_the_trace_of_its_job(url: str, program: Program) -> None:
    """A span for each attempt, of which one failed; what is appended in it is below it."""
    with laminar.connect(url) as client:
        laminar.otel.instrument(client, tracer_provider=program.provider)
        topic = client.create_topic("jobs", partitions=1)
        following = client.create_topic("following", partitions=1)
        channel = topic.channel("work", exist_ok=True)
        with program.tracer.start_as_current_span("request") as span:
            topic.append(b"job")
        seen: list[Span] = []

        def handle(job: laminar.Job[bytes]) -> None:
            seen.append(get_current_span())
            if job.attempt == 1:
                raise laminar.Retry(delay=0)
            following.append(b"next")
            channel.close()

        channel.work(handle, concurrency=1)

        failed, done = program.ended("process jobs")
        assert [failed.context, done.context] == [each.get_span_context() for each in seen]
        for attempt, process in enumerate((failed, done), start=1):
            assert process.context is not None and process.parent is not None
            assert process.attributes is not None
            assert span.get_span_context().trace_id == process.context.trace_id
            assert span.get_span_context().span_id == process.parent.span_id
            assert ("jobs/0/0", "work", attempt) == tuple(
                process.attributes[name]
                for name in (
                    "messaging.message.id",
                    "messaging.destination.subscription.name",
                    "laminar.attempt",
                )
            )
        assert (False, True) == (failed.status.is_ok, done.status.is_ok or done.status.is_unset)
        assert [(trace_of(span), parent_of(seen[1]))] == carried(client, "following")


async def test_a_handler_on_a_loop_and_what_is_read_otherwise(url: str, program: Program) -> None:
    async with laminar.aio.connect(url) as client:
        laminar.otel.instrument(client, tracer_provider=program.provider)
        topic = await client.create_topic("jobs-loop", partitions=1)
        channel = await topic.channel("work", exist_ok=True)
        with program.tracer.start_as_current_span("request") as span:
            await topic.append(b"job")
        seen: list[Span] = []

        async def handle(job: laminar.aio.Job[bytes]) -> None:
            await asyncio.sleep(0)
            seen.append(get_current_span())
            channel.close()

        await channel.work(handle)
        assert [trace_of(span)] == list(map(trace_of, seen))

        await topic.append(b"without")
        first, second = [each async for each in topic.read()]
        with program.tracer.start_as_current_span("read", context=laminar.otel.context_of(first)) as read:
            assert trace_of(span) == trace_of(read)
        with program.tracer.start_as_current_span("read", context=laminar.otel.context_of(second)) as read:
            assert trace_of(span) != trace_of(read)


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

    with pytest.raises(laminar.ConfigError, match=r"pip install 'laminar-mq\[otel\]'"):
        laminar.otel.instrument(object())
