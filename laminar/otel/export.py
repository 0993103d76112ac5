"""The export of the trace: it reads events from `_trace` with a cursor, and sends them as spans.

The cursor is committed after the receiver has accepted all spans before it. So an export that was killed
continues at the cursor, and sends some spans again: at least once, with the same ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from opentelemetry.sdk.trace import ReadableSpan

from laminar.client.client import Client
from laminar.client.errors import Error, NotFound, Unavailable
from laminar.client.policy.retry import Backoff
from laminar.client.records import ReadBatch
from laminar.client.topic import Topic
from laminar.otel.receiver import Receiver
from laminar.otel.spans import Spans, resource
from laminar.wire.trace import TraceRecord

TRACE_TOPIC: Final = "_trace"
MOST_SENT: Final = 512
"""Most spans of a request."""
LOOK_BACK: Final = 4_096
"""Events of a partition before the cursor that are read again, for when deliveries began."""

_record = msgspec.json.Decoder(TraceRecord)


@dataclass(slots=True)
class Sent:
    """Counts of an export so far; `unreadable` are records of `_trace` that are no events."""

    events: int = 0
    spans: int = 0
    unreadable: int = 0
    skipped: int = 0
    """Records of `_trace` that were trimmed before they were read, or that no replica can read."""


async def export_trace(
    client: Client,
    receiver: Receiver,
    *,
    cursor: str,
    follow: bool,
    patience_s: float,
    progress: Callable[[Sent], None] = lambda sent: None,
    waits: Callable[[Error], None] = lambda error: None,
) -> Sent:
    """Send the events of `_trace` after a cursor, up to the present end, or for ever; return the counts.

    Spans that the receiver does not accept are sent again for `patience_s` seconds; `waits` is called with
    each such error.

    Raises:
        Unavailable: the receiver accepted nothing for so long. The cursor is after the last accepted event.
        Error: (`receiver_refused`) it will never accept spans; (`no_trace`) there is no `_trace` yet.
        PreconditionFailed: another export uses the cursor.
    """
    return await _Export(client, receiver, cursor, follow, patience_s, progress, waits).run()


class _Export:
    """One run."""

    def __init__(
        self,
        client: Client,
        receiver: Receiver,
        cursor: str,
        follow: bool,
        patience_s: float,
        progress: Callable[[Sent], None],
        waits: Callable[[Error], None],
    ) -> None:
        self._client = client
        self._receiver = receiver
        self._cursor = cursor
        self._follow = follow
        self._patience_s = patience_s
        self._progress = progress
        self._waits = waits
        self._spans = Spans(resource())
        self._sent = Sent()

    async def run(self) -> Sent:
        topic = self._client.topic(TRACE_TOPIC)
        try:
            await self._look_back(topic, await topic.cursor(self._cursor))
        except NotFound:
            raise Error(
                f"there is no {TRACE_TOPIC} yet: no event was ever traced",
                code="no_trace",
                field="topic",
                value=TRACE_TOPIC,
                hint="`laminar topic alter TOPIC --setting trace=all`",
            ) from None
        reader = topic.read(cursor=self._cursor, follow=self._follow, on_expired="earliest", on_damage="skip")
        try:
            while taken := await reader.take_ready():
                found: list[ReadableSpan] = []
                past: dict[int, int] = {}
                for batch in taken:
                    found += self._of(batch)
                    reader.positions[batch.partition] = past[batch.partition] = batch.next_offset
                    if len(found) >= MOST_SENT:
                        await self._send(found)
                        await reader.commit_at(past)
                        found, past = [], {}
                await self._send(found)
                await reader.commit_at(past)
                self._sent.skipped = sum(end - begin for _, begin, end in reader.skipped)
                self._progress(self._sent)
        finally:
            await reader.close()
        return self._sent

    async def _look_back(self, topic: Topic[bytes], positions: Mapping[int, int]) -> None:
        """Read the last events before the cursor again, unsent, to know the deliveries under way."""
        for partition in await topic.partitions():
            number, at = partition.partition, positions.get(partition.partition, 0)
            begin = max(partition.start_offset, at - LOOK_BACK)
            if begin >= at:
                continue
            reader = topic.read({number: begin}, partitions=[number], on_expired="earliest", on_damage="skip")
            try:
                async for batch in reader.batches():
                    for record in batch.records():
                        if record.offset < at:
                            self._spans_of(record.value)
                    if batch.next_offset >= at:
                        break
            finally:
                await reader.close()

    def _of(self, batch: ReadBatch[Any]) -> list[ReadableSpan]:
        found: list[ReadableSpan] = []
        for record in batch.records():
            spans = self._spans_of(record.value)
            self._sent.events += bool(spans)
            self._sent.unreadable += not spans
            found += spans
        return found

    def _spans_of(self, value: bytes) -> list[ReadableSpan]:
        """Return the spans of a record of `_trace`; none for a record that is no event."""
        try:
            return self._spans.of(_record.decode(value))
        except (msgspec.MsgspecError, ValueError):
            return []

    async def _send(self, spans: list[ReadableSpan]) -> None:
        """Send spans, and repeat it until the receiver has accepted all. Raises as `export_trace`."""
        loop = asyncio.get_running_loop()
        for first in range(0, len(spans), MOST_SENT):
            part = spans[first : first + MOST_SENT]
            backoff = Backoff(rng=self._client.session.rng, first_ms=500, ceiling_ms=30_000)
            until_s = loop.time() + self._patience_s
            while True:
                try:
                    await asyncio.to_thread(self._receiver.send, part)
                    break
                except Unavailable as error:
                    left_s = until_s - loop.time()
                    if left_s <= 0:
                        raise
                    self._waits(error)
                    await asyncio.sleep(min(left_s, backoff.next_ms() / 1000))
            self._sent.spans += len(part)
