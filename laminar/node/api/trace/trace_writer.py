"""Write the events in a shard's ring to the topic `_trace`.

Invariants:

1. *No request waits for the trace.* A task appends the waiting events each half second, in one append.
2. *Each event is sent once.* Events that cannot be appended (no leader, no room on the disk, no topic
   `_trace`) are dropped and counted (`laminar_trace_dropped_total`). So are events whose append has an
   unknown outcome: so no event is in `_trace` twice.
3. *It gives way.* While the disk is nearly low, nothing is written, so the trace never takes the room of
   records.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import msgspec

from laminar.http.api.append_body import Append
from laminar.http.api.names import TRACE_TOPIC
from laminar.http.api.problems import Problem
from laminar.http.api.records import Records
from laminar.http.api.timestamps import format_time
from laminar.node.api.common.services import MakeTopic, ShardServices
from laminar.node.host.periodic import Work
from laminar.node.trace.ring import Event, Known, TraceRing
from laminar.wire.delayed import NUMBERS
from laminar.wire.key_route import logical_of_key
from laminar.wire.trace import KEY_HEADER, TraceRecord, delayed_key, event_key

_log = logging.getLogger("laminar.trace")

TICK_S: Final = 0.5
PAUSE_MS: Final = 5_000
"""The pause after the topic could not be created."""
PARTITIONS: Final = 8
SETTINGS: Final[Mapping[str, int | str]] = {
    "flush": "interval",
    "index": "key,trace_id,header:" + KEY_HEADER,
    "retention_ms": 3 * 24 * 3_600_000,
    "retention_bytes": 1 << 30,
}
"""Settings of a new `_trace`; an admin may change its retention."""

AppendAll = Callable[[Append], Awaitable[None]]
"""Appends records to `_trace`, once. Raises `Problem`."""


class TraceWriter:
    """Writes the trace events that wait in a shard's `TraceRing` to `_trace`, each half second."""

    def __init__(
        self, services: ShardServices, ring: TraceRing, append: AppendAll, make_topic: MakeTopic
    ) -> None:
        self._services = services
        self._ring = ring
        self._append = append
        self._make_topic = make_topic
        self._not_before_ms = 0
        self._is_failing = False
        services.every(TICK_S, self._tick, to_the_end=True)

    def _tick(self) -> Work | None:
        """Return a coroutine that writes the waiting events; None if there are none.

        It is not called again before the coroutine has ended.
        """
        return self._write() if len(self._ring) else None

    async def _write(self) -> None:
        events = self._ring.take()
        if not events:
            return
        try:
            await self._send(events)
        except Problem as problem:
            self._drop(len(events), str(problem))
        except Exception as error:  # noqa: BLE001  # counted: it must not end the process
            self._drop(len(events), repr(error))
        else:
            self._ring.written += len(events)
            if self._is_failing:
                self._is_failing = False
                _log.warning("%s accepts events again", TRACE_TOPIC)

    async def _send(self, events: Sequence[tuple[Event, Known | None]]) -> None:
        services = self._services
        refusal = services.space.trace_refusal()
        if refusal is not None:
            raise refusal
        if TRACE_TOPIC not in services.view.topics():
            if services.clock.monotonic_ms() < self._not_before_ms:
                raise Problem("being_created", "the topic is not there", outcome="not_applied")
            # Set before the attempt: after a success it does not matter.
            self._not_before_ms = services.clock.monotonic_ms() + PAUSE_MS
            await self._make_topic(TRACE_TOPIC, partitions=PARTITIONS, settings=SETTINGS)
        await self._append(await services.off_loop(append_of, events, services.node))

    def _drop(self, count: int, why: str) -> None:
        self._ring.dropped += count
        if not self._is_failing:
            self._is_failing = True
            _log.warning("%s accepts no events, %d are dropped: %s", TRACE_TOPIC, count, why)


def append_of(events: Sequence[tuple[Event, Known | None]], node: str) -> Append:
    """Return an append with events of this shard of `node`. It takes a few µs for each event."""
    keys = [_key(event) for event, _ in events]
    has_traces = any(known is not None and known.trace_id is not None for _, known in events)
    has_keys = any(known is not None and known.key is not None for _, known in events)
    texts = _Texts()
    append = Append(
        Records(
            [msgspec.json.encode(_record(event, known, node, texts)) for event, known in events],
            keys=list(keys),
            trace_ids=[known and known.trace_id for _, known in events] if has_traces else None,
            headers=[_headers(known) for _, known in events] if has_keys else None,
        ),
        [],
    )
    append.places = [logical_of_key(key) for key in keys]
    return append


class _Texts:
    """A cache of texts that events of an append have in common: to format them takes most of the time."""

    def __init__(self) -> None:
        self._times: dict[int, str] = {}
        self._groups: dict[bytes, str] = {}

    def time(self, at_ms: int) -> str:
        """Return a time as RFC 3339 text."""
        found = self._times.get(at_ms)
        if found is None:
            found = self._times[at_ms] = format_time(at_ms)
        return found

    def group(self, group: bytes) -> str:
        """Return the id of a partition in hexadecimal."""
        found = self._groups.get(group)
        if found is None:
            found = self._groups[group] = group.hex()
        return found


def _key(event: Event) -> bytes:
    group = event.place.group
    if event.offset is not None:
        return event_key(group, event.offset).encode()
    return delayed_key(group, event.number or 0).encode()


def _headers(known: Known | None) -> Mapping[str, bytes] | None:
    return None if known is None or known.key is None else {KEY_HEADER: known.key}


def _record(event: Event, known: Known | None, node: str, texts: _Texts) -> TraceRecord:
    who, place = event.who, event.place
    record = TraceRecord(
        event=event.name,
        at=texts.time(event.at_ms),
        topic=place.topic,
        partition=place.partition,
        group=texts.group(place.group),
        entry=event.entry,
        offset=event.offset,
        node=node if who is None else who.node,
    )
    if who is not None:
        record.principal, record.address = who.principal, who.address
    if event.channel is not None:
        record.channel, record.delivery = event.channel, event.delivery
        record.attempt, record.reason = event.attempt, event.reason
    if event.due_ms is not None:
        record.due = texts.time(event.due_ms)
    if event.number is not None:
        record.delayed = "{}.{}".format(*divmod(event.number, NUMBERS))
    if event.member:
        record.member = event.member
    if known is not None:
        _describe(record, known)
    return record


def _describe(record: TraceRecord, known: Known) -> None:
    """Add the trace id and the key of an event's record to the event."""
    if known.trace_id is not None:
        record.trace_id = known.trace_id.hex()
    if known.parent_id is not None:
        record.parent_id = known.parent_id.hex()
    if known.key is not None:
        try:
            record.key = known.key.decode()
        except UnicodeDecodeError:
            record.key_base64 = base64.b64encode(known.key).decode()
