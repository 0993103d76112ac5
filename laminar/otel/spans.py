"""Spans of OpenTelemetry for events of the trace, after its conventions for messaging.

An event makes the same spans whenever it is read: ids of spans and traces are hashes of the record's place.
So a receiver that keeps spans by their ids stores a span once, even if it is sent twice.

An event is one point in time, and so is its span. Only `process` has a duration: from a delivery to its end.
The trace of a record::

    (span of the record's traceparent)
      send
        receive
          process
          ack
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple, TypeVar

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from laminar import __version__
from laminar.wire.trace import TraceRecord

MOST_KNOWN: Final = 65_536
"""Records whose trace is remembered, and deliveries whose begin is; the oldest are forgotten."""

_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND: Final = datetime.timedelta(microseconds=1)
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_SCOPE: Final = InstrumentationScope("laminar", __version__)


class _What(NamedTuple):
    """The span of a kind of event: its operation's name and type, its kind, and whether it is an error."""

    name: str
    type: str | None
    kind: SpanKind
    is_error: bool = False


_SEND: Final = _What("send", "send", SpanKind.PRODUCER)
_PROCESS: Final = _What("process", "process", SpanKind.CONSUMER)
_SHOWN: Final = {
    "appended": _SEND,
    "scheduled": _What("schedule", "send", SpanKind.PRODUCER),
    "published": _What("publish", None, SpanKind.INTERNAL),
    "cancelled": _What("cancel", None, SpanKind.INTERNAL),
    "delivered": _What("receive", "receive", SpanKind.CLIENT),
    "extended": _What("extend", None, SpanKind.CLIENT),
    "acked": _What("ack", "settle", SpanKind.CLIENT),
    "nacked": _What("nack", "settle", SpanKind.CLIENT, is_error=True),
    "released": _What("release", "settle", SpanKind.CLIENT),
    "timed_out": _What("time out", "settle", SpanKind.INTERNAL, is_error=True),
    "dropped": _What("drop", "settle", SpanKind.CLIENT),
    "dead": _What("dead", None, SpanKind.INTERNAL, is_error=True),
    "replayed": _What("replay", None, SpanKind.INTERNAL),
}
_ENDS: Final = frozenset(("acked", "nacked", "released", "timed_out", "dropped"))
"""After these a consumer has the record no more."""

K = TypeVar("K")
V = TypeVar("V")


def resource() -> Resource:
    """Return the resource of the spans: service `laminar`, unless OTEL_SERVICE_NAME or the like differs."""
    return Resource({"service.name": "laminar"}).merge(OTELResourceDetector().detect())


class Spans:
    """A converter from events, given in the order of `_trace`, to spans.

    It remembers the trace of each record, because an event after an election may lack it, and the starts of
    deliveries.
    """

    def __init__(self, of: Resource) -> None:
        self._resource = of
        # By record: its trace id and the span of its traceparent; 0: none.
        self._traces: dict[str, tuple[int, int]] = {}
        # By record, channel and delivery: when it began, in ns.
        self._begun: dict[tuple[str, str | None, int | None], int] = {}

    def of(self, event: TraceRecord) -> list[ReadableSpan]:
        """Return the spans of an event: first that of the delivery that it ended, if any, then its own.

        Raises:
            ValueError: its time or one of its ids is malformed.
        """
        record = _record_of(event)
        trace_id = 0 if event.trace_id is None else _number(event.trace_id, size=16)
        if trace_id:
            parent_id = 0 if event.parent_id is None else _number(event.parent_id, size=8)
            self._traces[record] = trace_id, parent_id
            _forget(self._traces)
        what = _SHOWN.get(event.event) or _What(event.event, None, SpanKind.INTERNAL)
        if event.event == "published" and event.delayed is None:
            what = _SEND  # of a transaction: no event is before it
        at_ns = _ns(event.at)
        own = self._point(event, record, what, at_ns)
        delivery = record, event.channel, event.delivery
        if event.event == "delivered":
            self._begun[delivery] = at_ns
            _forget(self._begun)
        elif event.event in _ENDS:
            begun_ns = self._begun.pop(delivery, None)
            if begun_ns is not None:
                return [self._process(event, record, begun_ns, at_ns, is_error=what.is_error), own]
        return [own]

    def _point(self, event: TraceRecord, record: str, what: _What, at_ns: int) -> ReadableSpan:
        trace_id, parent, links = self._trace_of(record), None, list[Link]()
        if event.event in ("appended", "scheduled", "published"):
            span_id = _send_id(record)
            known = self._traces.get(record)
            if known is not None and known[1]:
                parent = _context(trace_id, known[1], is_remote=True)
            if event.delayed is not None and event.offset is not None:
                before = _delayed(event)
                before_id = _send_id(before)
                if known is None:  # it was another trace, as that follows from what the record was called
                    links.append(Link(_context(self._trace_of(before), before_id)))
                else:
                    parent = _context(trace_id, before_id)
        elif event.event == "delivered":
            span_id = _receive_id(record, event)
            parent = _context(trace_id, _send_id(record))
        else:
            span_id = _id("event", record, event.event, event.channel, event.delivery, event.entry, event.at)
            before_id = _send_id(record) if event.delivery is None else _receive_id(record, event)
            parent = _context(trace_id, before_id)
        return self._span(
            event,
            record,
            what,
            _context(trace_id, span_id),
            parent,
            begin_ns=at_ns,
            end_ns=at_ns,
            links=links,
        )

    def _process(
        self, event: TraceRecord, record: str, begun_ns: int, at_ns: int, *, is_error: bool
    ) -> ReadableSpan:
        trace_id = self._trace_of(record)
        span_id = _id("process", record, event.channel, event.delivery)
        return self._span(
            event,
            record,
            _PROCESS._replace(is_error=is_error),
            _context(trace_id, span_id),
            _context(trace_id, _receive_id(record, event)),
            begin_ns=begun_ns,
            end_ns=max(begun_ns, at_ns),
        )

    def _span(
        self,
        event: TraceRecord,
        record: str,
        what: _What,
        context: SpanContext,
        parent: SpanContext | None,
        *,
        begin_ns: int,
        end_ns: int,
        links: list[Link] | None = None,
    ) -> ReadableSpan:
        attributes = dict(_attributes(event, what))
        if what.is_error:
            attributes["error.type"] = event.event
        return ReadableSpan(
            f"{what.name} {event.topic}",
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            links=links or (),
            kind=what.kind,
            status=Status(StatusCode.ERROR, event.reason or event.event) if what.is_error else Status(),
            start_time=begin_ns,
            end_time=end_ns,
            instrumentation_scope=_SCOPE,
        )

    def _trace_of(self, record: str) -> int:
        """Return the trace id of a record: its own, or one made from its place."""
        known = self._traces.get(record)
        return _id("trace", record, size=16) if known is None else known[0]


def _attributes(event: TraceRecord, what: _What) -> Iterator[tuple[str, str | int]]:
    yield "messaging.system", "laminar"
    yield "messaging.operation.name", what.name
    if what.type is not None:
        yield "messaging.operation.type", what.type
    yield "messaging.destination.name", event.topic
    yield "messaging.destination.partition.id", str(event.partition)
    found = {
        "messaging.message.id": event.offset is not None
        and f"{event.topic}/{event.partition}/{event.offset}",
        "messaging.destination.subscription.name": event.channel,
        "messaging.client.id": event.member,
        "client.address": event.address,
        "user.name": event.principal,
        "laminar.node": event.node,
        "laminar.message.key": event.key,
        "laminar.message.delayed": event.delayed,
        "laminar.due": event.due,
        "laminar.reason": event.reason,
    }
    for name, text in found.items():
        if text:
            yield name, text
    numbers = {
        "laminar.message.offset": event.offset,
        "laminar.delivery": event.delivery,
        "laminar.attempt": event.attempt,
        "laminar.entry": event.entry,
    }
    for name, number in numbers.items():
        if number is not None:
            yield name, number


def _record_of(event: TraceRecord) -> str:
    """Return the name of a record in hashes: its place, or the id of a delayed record that has none yet."""
    return _delayed(event) if event.offset is None else f"{event.group}/{event.offset}"


def _delayed(event: TraceRecord) -> str:
    return f"{event.group}/delayed/{event.delayed}"


def _send_id(record: str) -> int:
    return _id("send", record)


def _receive_id(record: str, event: TraceRecord) -> int:
    return _id("receive", record, event.channel, event.delivery)


def _id(*parts: object, size: int = 8) -> int:
    """Return an id of `size` bytes made from these parts; never 0, which is no valid id."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=size, person=b"laminar.otel").digest()
    return int.from_bytes(digest) or 1


def _context(trace_id: int, span_id: int, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote, _SAMPLED)


def _number(text: str, *, size: int) -> int:
    """Return an id of `size` bytes in hexadecimal as a number. Raises `ValueError` if it is malformed."""
    raw = bytes.fromhex(text)
    if len(raw) != size:
        raise ValueError(text)
    return int.from_bytes(raw)


def _ns(text: str) -> int:
    """Return a time in RFC 3339 as ns since the epoch; 0 for a time before it."""
    return max(0, (datetime.datetime.fromisoformat(text) - _EPOCH) // _MICROSECOND * 1_000)


def _forget(known: dict[K, V]) -> None:
    """Remove the oldest entries if there are too many."""
    if len(known) > MOST_KNOWN:
        for oldest in list(islice(known, MOST_KNOWN // 8)):
            del known[oldest]
