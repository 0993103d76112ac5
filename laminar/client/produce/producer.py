"""Producers on an event loop: a stream of records, and their receipts.

`Producer.send` is not a coroutine: it puts the record into the accumulator and returns. So the order of the
calls is the order of the records. Waiting for room in the buffer is a separate call (`room`), or done by
`send_all`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Generic, TypeVar

from laminar.client.codecs import not_bytes
from laminar.client.delivery_time import Delay, DeliverAt, delivery_time_ms
from laminar.client.errors import ConfigError, Error, Overloaded, ProduceError, Undelivered, no_partition
from laminar.client.policy.partition_queue import PartitionQueue, Pending
from laminar.client.policy.record_accumulator import RecordAccumulator, sealed_error
from laminar.client.policy.resume_numbers import BLOCK, Numbers
from laminar.client.produce.sender import Sender
from laminar.client.records import Receipt
from laminar.client.trace_id import TraceId, trace_id_bytes
from laminar.wire.key_route import logical_of_block, logical_of_key

T = TypeVar("T")
T_in = TypeVar("T_in", contravariant=True)
Key = str | bytes | None
Guard = AbstractContextManager[Any]

# Each batch is a Raft entry on three nodes; with this size some 500 records of 1 KiB share that cost.
DEFAULT_BATCH_BYTES = 512 << 10
DEFAULT_BUFFER_BYTES = 32 << 20
# A producer that never awaits `room` gets an error when this many times the buffer's size is waiting.
OVERFLOW = 4


class Delivery:
    """One record that was sent, and later its receipt or error.

    ``await delivery`` returns the `Receipt` once the record is durable, or raises its error. A delivery may
    be ignored: the end of the producer's block reports all failed records.
    """

    __slots__ = ("_pending", "_position")

    def __init__(self, pending: Pending, position: int) -> None:
        self._pending = pending
        self._position = position

    def done(self) -> bool:
        """Return whether the record has its receipt or has failed."""
        return self._pending.settled

    def result(self) -> Receipt:
        """Return the record's receipt, or raise its error.

        Raises:
            asyncio.InvalidStateError: the record has neither yet (`done` is false).
        """
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


def queue_for(accumulator: RecordAccumulator, key: bytes | None, partition: int | None) -> PartitionQueue:
    """Return the queue of a record: by `partition`, else by `key`, else the one that is being filled.

    Raises:
        Sealed: `partition` takes no records any more.
        ConfigError: the topic has no such partition.
    """
    if partition is not None:
        if partition in accumulator.gone:
            raise sealed_error(partition, accumulator.route.version)
        if partition not in accumulator.queues:
            raise no_partition(partition, accumulator.queues)
        return accumulator.queues[partition]
    return accumulator.sticky if key is None else accumulator.queue_of(key)


def put_record(
    accumulator: RecordAccumulator,
    value: bytes,
    key: bytes | None,
    *,
    tag: str | None,
    headers: Mapping[str, bytes] | None,
    timestamp_ms: int | None,
    partition: int | None,
    number: int | None,
    trace_id: bytes | None = None,
    deliver_at_ms: int | None = None,
) -> Pending:
    """Put a record into the queue of its partition; return its batch, in which it is the last record.

    A record whose `number` an earlier run of the named producer made durable is not put again: a settled
    batch of this one record is returned, whose receipt has offset -1.

    Raises:
        ConfigError: the topic has no such `partition`, or `number` may not be used here.
        Error: as `RecordAccumulator.put` does.
    """
    numbers = accumulator.numbers
    if number is None:
        if numbers is not None:
            numbers.check_none()
    elif numbers is None:
        raise ConfigError(
            "only a producer with a name remembers numbers", code="number", field="number", value=number
        )
    else:
        numbers.check(number)
    if numbers is not None and number is not None and _is_there(numbers, number, key, partition):
        numbers.sent(number)
        pending = Pending(-1 if partition is None else partition)
        pending.values.append(value)
        pending.settle()
        return pending
    if number is None or key is not None or partition is not None:
        queue = queue_for(accumulator, key, partition)
    else:
        queue = accumulator.queue_of_block(number // BLOCK)
    plain = tag is None and headers is None and timestamp_ms is None
    if plain and trace_id is None and deliver_at_ms is None:
        pending = accumulator.put(value, key, queue)
    else:
        pending = accumulator.put_with(
            value,
            key,
            queue,
            tag=tag,
            headers=headers,
            timestamp_ms=timestamp_ms,
            trace_id=trace_id,
            deliver_at_ms=deliver_at_ms,
        )
    if numbers is not None and number is not None:
        numbers.sent(number)
        pending.number(number)
    if partition is not None:
        if pending.named is None:
            pending.named = set()
        pending.named.add(len(pending.values) - 1)
    return pending


def _is_there(numbers: Numbers, number: int, key: bytes | None, partition: int | None) -> bool:
    """Return whether an earlier run of the named producer appended the record with this number."""
    if partition is not None:
        return numbers.is_there_in(number, partition)
    if key is not None:
        return numbers.is_there(number, logical_of_key(key))
    return numbers.is_there(number, logical_of_block(number // BLOCK, numbers.created_with))


def produce_error(accumulator: RecordAccumulator, topic: str) -> ProduceError | None:
    """Return the error that reports all failed records of a producer; None if there are none."""
    undelivered: list[Undelivered] = []
    for pending in accumulator.failures:
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


def accumulator_statistics(accumulator: RecordAccumulator | None) -> dict[str, int]:
    """Return the counts that a producer's `statistics` returns; {} before it began."""
    if accumulator is None:
        return {}
    return {
        "buffered_bytes": accumulator.buffered_bytes,
        "batches": accumulator.taken,
        "resent": accumulator.resent,
        "failed": len(accumulator.failures),
    }


class Producer(Generic[T_in]):
    """A stream of records into a topic: in order within each partition, and no record appended twice.

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
        self._accumulator: RecordAccumulator | None = None
        self._sender: Sender | None = None
        self._progress: asyncio.Future[None] | None = None

    async def open_sender(self, guard: Guard | None = None) -> Sender:
        """Start the producer and return its sender.

        `guard` is the lock that other threads hold while they add records; None without other threads.
        """
        return await self._begin(guard)

    async def __aenter__(self) -> Producer[T_in]:
        sender = await self.open_sender()
        sender.on_progress = self._on_progress
        self._sender = sender
        self._accumulator = sender.accumulator
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
        trace_id: TraceId | None = None,
        delay: Delay | None = None,
        deliver_at: DeliverAt | None = None,
        partition: int | None = None,
        number: int | None = None,
    ) -> Delivery:
        """Send a record and return at once, without waiting.

        With `delay` or `deliver_at` readers get the record later, and `trace_id` is stored with it: see
        `Topic.append`.

        `number` is the program's own number, for a producer with a name: from 1, and higher than that of the
        record before. A record that an earlier run of the same name made durable is not sent: its receipt has
        offset -1.

        Raises:
            Overloaded: (``buffer_full``) far more was sent than the buffer holds, without awaiting `room`.
            Error: an earlier record of this partition has failed for good; this is its error.
        """
        timed = delay is not None or deliver_at is not None
        plain = partition is None and tag is None and headers is None and timestamp_ms is None
        if plain and number is None and trace_id is None and not timed:
            pending = self._put(value, key)
        else:
            deliver_at_ms = delivery_time_ms(delay, deliver_at) if timed else None
            trace = trace_id_bytes(trace_id)
            accumulator, sender, raw = self._ready(value)
            pending = put_record(
                accumulator,
                raw,
                key.encode() if isinstance(key, str) else key,
                tag=tag,
                headers=headers,
                timestamp_ms=timestamp_ms,
                partition=partition,
                number=number,
                trace_id=trace,
                deliver_at_ms=deliver_at_ms,
            )
            sender.wake()
        return Delivery(pending, len(pending.values) - 1)

    def _put(self, value: T_in, key: str | bytes | None) -> Pending:
        """Send a record like `send`, but without making a `Delivery`, for speed."""
        accumulator, sender, raw = self._ready(value)
        if accumulator.numbers is not None:
            accumulator.numbers.check_none()
        if key is None:
            pending = accumulator.put(raw, None, accumulator.sticky)
        else:
            key = key.encode() if isinstance(key, str) else key
            pending = accumulator.put(raw, key, accumulator.queue_of(key))
        sender.wake()
        return pending

    def _ready(self, value: T_in) -> tuple[RecordAccumulator, Sender, bytes]:
        accumulator = self._accumulator
        sender = self._sender
        if accumulator is None or sender is None or sender.closed:
            raise ConfigError("send outside of `async with topic.producer()`", code="not_open")
        if accumulator.buffered_bytes > self._overflow_bytes:
            raise self._overflow(accumulator)
        raw: Any = value if self.encode is None else self.encode(value)
        if type(raw) is not bytes and (wrong := not_bytes(raw)) is not None:
            raise wrong
        return accumulator, sender, raw

    async def send_all(self, records: Iterable[tuple[Key, T_in]] | AsyncIterable[tuple[Key, T_in]]) -> int:
        """Send every (key, value), waiting for room as needed; return the number of records."""
        count = 0
        accumulator = self._accumulator
        assert accumulator is not None, "send_all outside of the producer's block"
        if isinstance(records, AsyncIterable):
            async for key, value in records:
                self._put(value, key)
                count += 1
                if accumulator.buffered_bytes >= self.buffer_bytes:
                    await self.room()
            return count
        put = self._put
        limit_bytes = self.buffer_bytes
        for key, value in records:
            put(value, key)
            count += 1
            if accumulator.buffered_bytes >= limit_bytes:
                await self.room()
        return count

    def has_room(self) -> bool:
        """Return whether `room` would return at once."""
        return self._accumulator is not None and self._accumulator.buffered_bytes < self.buffer_bytes

    async def room(self) -> None:
        """Wait until the buffer has room for more."""
        while self._accumulator is not None and self._accumulator.buffered_bytes >= self.buffer_bytes:
            await self._progressed()

    async def wait(self) -> None:
        """Wait for the receipts of everything sent so far.

        Raises:
            ProduceError: some records failed for good, and get no receipt.
        """
        accumulator, sender = self._accumulator, self._sender
        assert accumulator is not None and sender is not None, "wait outside of the producer's block"
        with sender.hurry():
            while accumulator.buffered_bytes > 0:
                await self._progressed()
        failure = produce_error(accumulator, self.topic)
        if failure is not None:
            raise failure

    async def durable(self) -> None:
        """Wait until all records sent so far are durable; the same as `wait`."""
        await self.wait()

    async def accepted(self) -> None:
        """Wait until the partitions' leaders have all records sent so far.

        The records are not durable yet. If a leader is lost with them, this producer sends them again,
        because it keeps records until they are durable. For a producer without a name this is the same as
        `wait`.

        Raises:
            ProduceError: some records failed for good.
        """
        accumulator = self._accumulator
        assert accumulator is not None, "accepted outside of the producer's block"
        while not accumulator.all_accepted():
            await self._progressed()
        failure = produce_error(accumulator, self.topic)
        if failure is not None:
            raise failure

    @property
    def checkpoint(self) -> int:
        """The number (see `send`) up to which all of this program's records are durable; 0 if none."""
        return 0 if self._accumulator is None else self._accumulator.checkpoint()

    @property
    def resumed_at(self) -> int:
        """The checkpoint when this producer began: continue with the record of the next number. 0 if none."""
        return (
            0
            if self._accumulator is None or self._accumulator.numbers is None
            else self._accumulator.numbers.resumed_at
        )

    @property
    def reached(self) -> int:
        """The highest number that an earlier run made durable in any partition; 0 if none.

        Between `resumed_at` and this number some records may be durable: `send` leaves these out. No record
        with a higher number is durable, unless the cluster has forgotten this producer.
        """
        return (
            0
            if self._accumulator is None or self._accumulator.numbers is None
            else self._accumulator.numbers.reached
        )

    def statistics(self) -> dict[str, int]:
        """Return counts since the producer began, such as bytes waiting and batches sent or sent again."""
        return accumulator_statistics(self._accumulator)

    async def _progressed(self) -> None:
        if self._progress is None or self._progress.done():
            self._progress = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._progress)

    def _on_progress(self) -> None:
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(None)

    def _overflow(self, accumulator: RecordAccumulator) -> Error:
        return Overloaded(
            f"{accumulator.buffered_bytes} bytes wait to be sent",
            code="buffer_full",
            field="buffer_bytes",
            value=accumulator.buffered_bytes,
            limit=self._overflow_bytes,
            hint="`await producer.room()` between sends, or use `await producer.send_all(records)`",
            outcome="not_applied",
        )


def _ended() -> Error:
    return Error("the producer's block ended before the record was sent", code="producer_closed")
