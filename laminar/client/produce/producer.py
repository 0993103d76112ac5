"""Producers on an event loop: a stream of records, and the receipts for it.

`Producer.send` is a plain function: it puts the record into the outbox and returns. So the
order of the calls is the order of the records, whatever is awaited when. Room is awaited
apart (`room`), or by `send_all`, which paces itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Generic, TypeVar

from laminar.client.codecs import not_bytes
from laminar.client.errors import ConfigError, Error, Overloaded, ProduceError, Undelivered
from laminar.client.policy.lane import Lane, Pending
from laminar.client.policy.resume_numbers import BLOCK
from laminar.client.policy.window import Outbox
from laminar.client.produce.sender import Sender
from laminar.client.records import Receipt

T = TypeVar("T")
T_in = TypeVar("T_in", contravariant=True)
Key = str | bytes | None
Guard = AbstractContextManager[Any]

# What a batch costs beside its bytes (a Raft entry on three nodes) is shared by some 500 records of 1 KiB.
DEFAULT_BATCH_BYTES = 512 << 10
DEFAULT_BUFFER_BYTES = 32 << 20
# Beyond the buffer a producer that never awaits is told so, rather than left to fill the memory.
OVERFLOW = 4


class Delivery:
    """One record on its way. May be ignored: the producer's end reports what failed.

    ``await delivery`` is the `Receipt`, once durable, or raises why there is none.
    """

    __slots__ = ("_pending", "_position")

    def __init__(self, pending: Pending, position: int) -> None:
        self._pending = pending
        self._position = position

    def done(self) -> bool:
        return self._pending.settled

    def result(self) -> Receipt:
        """The receipt; asyncio.InvalidStateError before `done`."""
        if not self._pending.settled:
            raise asyncio.InvalidStateError("the record has no receipt yet: await the delivery")
        return self._pending.receipt(self._position)

    def __await__(self) -> Generator[Any, None, Receipt]:
        pending = self._pending
        if not pending.settled:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def wake() -> None:
                if not waiter.done():
                    waiter.set_result(None)

            pending.when_settled(wake)
            yield from waiter
        return pending.receipt(self._position)


def lane_for(outbox: Outbox, key: bytes | None, partition: int | None) -> Lane:
    """The lane of a record: the partition it names, its key's, or the one being filled."""
    if partition is not None:
        if not 0 <= partition < len(outbox.lanes):
            raise ConfigError(
                f"partition {partition} of {len(outbox.lanes)}",
                code="no_partition",
                field="partition",
                value=partition,
                limit=len(outbox.lanes) - 1,
            )
        return outbox.lanes[partition]
    return outbox.sticky if key is None else outbox.lane_of(key)


def put_record(
    outbox: Outbox,
    value: bytes,
    key: bytes | None,
    *,
    tag: str | None,
    headers: Mapping[str, bytes] | None,
    timestamp_ms: int | None,
    partition: int | None,
    number: int | None,
) -> Pending:
    """A record into its lane, with all that may come with it; what an earlier run did is not done again."""
    numbers = outbox.numbers
    if number is None:
        if numbers is not None:
            numbers.check_none()
    elif numbers is None:
        raise ConfigError(
            "only a producer with a name remembers numbers", code="number", field="number", value=number
        )
    else:
        numbers.check(number)
    if number is None or key is not None or partition is not None:
        lane = lane_for(outbox, key, partition)
    else:
        lane = outbox.lanes[number // BLOCK % len(outbox.lanes)]
    if numbers is not None and number is not None and numbers.is_there(number, lane.partition):
        numbers.sent(number)
        pending = Pending(lane.partition)
        pending.values.append(value)
        pending.settle()
        return pending
    if tag is None and headers is None and timestamp_ms is None:
        pending = outbox.put(value, key, lane)
    else:
        pending = outbox.put_with(value, key, lane, tag=tag, headers=headers, timestamp_ms=timestamp_ms)
    if numbers is not None and number is not None:
        numbers.sent(number)
        pending.first_number = pending.first_number or number
        pending.last_number = number
    return pending


def produce_error(outbox: Outbox, topic: str) -> ProduceError | None:
    """The report of everything that failed, None if nothing did."""
    undelivered: list[Undelivered] = []
    for pending in outbox.failures:
        undelivered += pending.undelivered()
    if not undelivered:
        return None
    first = undelivered[0].error
    unknown = any(each.outcome == "unknown" for each in undelivered)
    return ProduceError(
        f"{topic}: {len(undelivered)} records have no receipt; first: {first}",
        undelivered=undelivered,
        code=first.code,
        status=first.status,
        outcome="unknown" if unknown else "not_applied",
    )


def outbox_statistics(outbox: Outbox | None) -> dict[str, int]:
    """What a producer's `statistics` answers; {} before it began."""
    if outbox is None:
        return {}
    return {
        "buffered_bytes": outbox.buffered_bytes,
        "batches": outbox.taken,
        "resent": outbox.resent,
        "failed": len(outbox.failures),
    }


class Producer(Generic[T_in]):
    """A stream of records into a topic, in order per partition and never doubled.

    Use it as ``async with topic.producer() as producer``: leaving the block waits for every
    receipt, or raises `ProduceError`; leaving it by an exception drops what was not sent yet.
    """

    def __init__(
        self,
        begin: Callable[[Guard | None], Awaitable[Sender]],
        *,
        topic: str,
        encode: Callable[[T_in], bytes] | None,
        buffer_bytes: int,
    ) -> None:
        self._begin = begin
        self.topic = topic
        self.encode = encode
        self.buffer_bytes = buffer_bytes
        self._overflow_bytes = buffer_bytes * OVERFLOW
        self._outbox: Outbox | None = None
        self._sender: Sender | None = None
        self._progress: asyncio.Future[None] | None = None

    async def open_sender(self, guard: Guard | None = None) -> Sender:
        """Begin, and return what sends. `guard` is the lock under which other threads fill its outbox."""
        return await self._begin(guard)

    async def __aenter__(self) -> Producer[T_in]:
        sender = await self.open_sender()
        sender.on_progress = self._on_progress
        self._sender = sender
        self._outbox = sender.outbox
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sender = self._sender
        if sender is None:
            return
        if kind is None:
            try:
                await self.wait()
            finally:
                sender.close(_ended())
        else:
            sender.close(_ended())

    def send(
        self,
        value: T_in,
        key: str | bytes | None = None,
        *,
        tag: str | None = None,
        headers: Mapping[str, bytes] | None = None,
        timestamp_ms: int | None = None,
        partition: int | None = None,
        number: int | None = None,
    ) -> Delivery:
        """Put a record on its way; returns at once. Raises what stopped its partition, if anything did.

        `number` is the user's, of a producer with a name: from 1, higher than that of the record before. A
        record that an earlier run of the same name made durable is not sent: its receipt has the offset -1.

        `Overloaded` (``buffer_full``) when far more was sent than the buffer holds without awaiting
        `room` in between.
        """
        if partition is None and tag is None and headers is None and timestamp_ms is None and number is None:
            pending = self._put(value, key)
        else:
            outbox, sender, raw = self._ready(value)
            pending = put_record(
                outbox,
                raw,
                key.encode() if isinstance(key, str) else key,
                tag=tag,
                headers=headers,
                timestamp_ms=timestamp_ms,
                partition=partition,
                number=number,
            )
            sender.wake()
        return Delivery(pending, len(pending.values) - 1)

    def _put(self, value: T_in, key: str | bytes | None) -> Pending:
        """`send` without the object that is awaited: what a stream of records costs is here."""
        outbox, sender, raw = self._ready(value)
        if outbox.numbers is not None:
            outbox.numbers.check_none()
        if key is None:
            pending = outbox.put(raw, None, outbox.sticky)
        else:
            key = key.encode() if isinstance(key, str) else key
            pending = outbox.put(raw, key, outbox.lane_of(key))
        sender.wake()
        return pending

    def _ready(self, value: T_in) -> tuple[Outbox, Sender, bytes]:
        outbox = self._outbox
        sender = self._sender
        if outbox is None or sender is None or sender.closed:
            raise ConfigError("send outside of `async with topic.producer()`", code="not_open")
        if outbox.buffered_bytes > self._overflow_bytes:
            raise self._overflow(outbox)
        raw: Any = value if self.encode is None else self.encode(value)
        if type(raw) is not bytes and (wrong := not_bytes(raw)) is not None:
            raise wrong
        return outbox, sender, raw

    async def send_all(self, records: Iterable[tuple[Key, T_in]] | AsyncIterable[tuple[Key, T_in]]) -> int:
        """Send every (key, value), waiting for room as needed; returns how many."""
        count = 0
        outbox = self._outbox
        assert outbox is not None, "send_all outside of the producer's block"
        if isinstance(records, AsyncIterable):
            async for key, value in records:
                self._put(value, key)
                count += 1
                if outbox.buffered_bytes >= self.buffer_bytes:
                    await self.room()
            return count
        put = self._put
        limit_bytes = self.buffer_bytes
        for key, value in records:
            put(value, key)
            count += 1
            if outbox.buffered_bytes >= limit_bytes:
                await self.room()
        return count

    def has_room(self) -> bool:
        """Whether `room` would return at once."""
        return self._outbox is not None and self._outbox.buffered_bytes < self.buffer_bytes

    async def room(self) -> None:
        """Wait until the buffer has room for more."""
        while self._outbox is not None and self._outbox.buffered_bytes >= self.buffer_bytes:
            await self._progressed()

    async def wait(self) -> None:
        """Wait for the receipts of all that was sent so far; `ProduceError` if some will not come."""
        outbox, sender = self._outbox, self._sender
        assert outbox is not None and sender is not None, "wait outside of the producer's block"
        with sender.hurry():
            while outbox.buffered_bytes > 0:
                await self._progressed()
        failure = produce_error(outbox, self.topic)
        if failure is not None:
            raise failure

    async def durable(self) -> None:
        """`wait`, by the name of what is waited for: nothing that was sent can be lost any more."""
        await self.wait()

    async def accepted(self) -> None:
        """Wait until a leader has all that was sent so far; `ProduceError` if some will not get there.

        This is no receipt: a leader that dies may lose it. Then this producer, which keeps it until it is
        durable, sends it again. Without a name the two are one: see `wait`.
        """
        outbox = self._outbox
        assert outbox is not None, "accepted outside of the producer's block"
        while not outbox.all_accepted():
            await self._progressed()
        failure = produce_error(outbox, self.topic)
        if failure is not None:
            raise failure

    @property
    def checkpoint(self) -> int:
        """The highest number that everything up to it is durable, in all partitions; 0: none."""
        return 0 if self._outbox is None else self._outbox.checkpoint()

    @property
    def resumed_at(self) -> int:
        """The checkpoint as this producer found it: its source may go on behind it. 0: from the start."""
        return 0 if self._outbox is None or self._outbox.numbers is None else self._outbox.numbers.resumed_at

    def statistics(self) -> dict[str, int]:
        """Bytes waiting; batches taken and taken again since the producer began."""
        return outbox_statistics(self._outbox)

    async def _progressed(self) -> None:
        if self._progress is None or self._progress.done():
            self._progress = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._progress)

    def _on_progress(self) -> None:
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(None)

    def _overflow(self, outbox: Outbox) -> Error:
        return Overloaded(
            f"{outbox.buffered_bytes} bytes wait to be sent",
            code="buffer_full",
            field="buffer_bytes",
            value=outbox.buffered_bytes,
            limit=self._overflow_bytes,
            hint="`await producer.room()` between sends, or use `await producer.send_all(records)`",
            outcome="not_applied",
        )


def _ended() -> Error:
    return Error("the producer's block ended before the record was sent", code="producer_closed")
