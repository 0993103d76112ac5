"""Instrumentation of a client: appends carry the program's trace, and handlers continue the records' traces.

The methods are replaced on one client, and on the topics and channels that it opens; other clients stay as
they are. The trace is that of the calling thread.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from laminar.otel.installed import check_installed
from laminar.wire.trace import TRACEPARENT

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer, TracerProvider

_APPENDS: Final = ("append", "append_stream", "send")
"""Methods that take `headers` and `trace_id` of one record."""
_OPENS: Final = ("topic", "create_topic", "producer", "datagrams", "channel", "transaction", "sink", "stage")
"""Methods that return what has methods of these."""
_MARK: Final = "_is_instrumented"

C = TypeVar("C")


class HasHeaders(Protocol):
    """A record, a job, or any other object with headers."""

    @property
    def headers(self) -> Mapping[str, bytes]:
        """The record's headers by name; empty if it has none."""


def instrument(client: C, *, tracer_provider: TracerProvider | None = None) -> C:
    """Make a client, blocking or async, carry the program's trace; return the client. Idempotent.

    A record that is appended while a span is current gets the span's trace id and the header ``traceparent``,
    unless it already has a trace id or that header. The handler of `Channel.work` runs in a span ``process``,
    whose parent is the record's. For records that are read in other ways, use `context_of`.

    Raises:
        ConfigError: the libraries of the extra `otel` are not installed.
    """
    check_installed()
    from opentelemetry.trace import get_tracer

    from laminar import __version__

    return _instrumented(client, get_tracer("laminar", __version__, tracer_provider))


def context_of(record: HasHeaders) -> Context:
    """Return the context in which a record was appended, to start spans in; an empty one if it has none.

    ``with tracer.start_as_current_span("work", context=context_of(record)):``

    Raises:
        ConfigError: the libraries of the extra `otel` are not there.
    """
    check_installed()
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    value = record.headers.get(TRACEPARENT)
    carrier = {} if value is None else {TRACEPARENT: bytes(value).decode("ascii", "replace")}
    return TraceContextTextMapPropagator().extract(carrier, Context())


def _instrumented(of: C, tracer: Tracer) -> C:
    if getattr(of, _MARK, False):
        return of
    # Of the class: a property is left alone, and is not asked for.
    kind = type(of)
    for name in _APPENDS:
        if inspect.isfunction(getattr(kind, name, None)):
            setattr(of, name, _carrying(getattr(of, name)))
    for name in _OPENS:
        if inspect.isfunction(getattr(kind, name, None)):
            setattr(of, name, _opening(getattr(of, name), tracer))
    if inspect.isfunction(getattr(kind, "work", None)):
        of.work = _working(of.work, tracer)  # type: ignore[attr-defined]  # so it is a channel
    setattr(of, _MARK, True)
    return of


def _carrying(append: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(append)
    def carry(*arguments: Any, **more: Any) -> Any:
        return append(*arguments, **_carried(more))

    return carry


def _carried(more: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of an append with the trace of the current span, unless they have one."""
    from opentelemetry.trace import format_span_id, format_trace_id, get_current_span

    current = get_current_span().get_span_context()
    headers = more.get("headers") or {}
    if not current.is_valid or more.get("trace_id") is not None or TRACEPARENT in headers:
        return more
    trace_id, span_id = format_trace_id(current.trace_id), format_span_id(current.span_id)
    parent = f"00-{trace_id}-{span_id}-{current.trace_flags:02x}".encode()
    return {**more, "trace_id": trace_id, "headers": {**headers, TRACEPARENT: parent}}


def _opening(opens: Callable[..., Any], tracer: Tracer) -> Callable[..., Any]:
    async def awaited(opened: Any) -> Any:
        return _instrumented(await opened, tracer)

    @wraps(opens)
    def open_(*arguments: Any, **more: Any) -> Any:
        opened = opens(*arguments, **more)
        return awaited(opened) if inspect.iscoroutine(opened) else _instrumented(opened, tracer)

    return open_


def _working(work: Callable[..., Any], tracer: Tracer) -> Callable[..., Any]:
    @wraps(work)
    def work_(handle: Callable[[Any], Any], **more: Any) -> Any:
        def in_thread(job: Any) -> Any:
            with _processing(job, tracer):
                return handle(job)

        async def on_loop(job: Any) -> Any:
            with _processing(job, tracer):
                return await handle(job)

        return work(on_loop if inspect.iscoroutinefunction(work) else in_thread, **more)

    return work_


@contextmanager
def _processing(job: Any, tracer: Tracer) -> Iterator[None]:
    """Run the block in the span of a job; an exception marks the span as failed."""
    from opentelemetry.trace import SpanKind

    attributes = {
        "messaging.system": "laminar",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": job.topic,
        "messaging.destination.partition.id": str(job.partition),
        "messaging.destination.subscription.name": job.channel,
        "messaging.message.id": f"{job.topic}/{job.partition}/{job.offset}",
        "laminar.attempt": job.attempt,
    }
    with tracer.start_as_current_span(
        f"process {job.topic}", context=context_of(job), kind=SpanKind.CONSUMER, attributes=attributes
    ):
        yield
