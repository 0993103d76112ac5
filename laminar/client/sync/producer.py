"""A producer without a loop: the twin of `laminar.client.produce.producer`.

`send` fills the accumulator in the caller's thread, under a lock: a change to the loop's thread for each
record would cost more than the record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from laminar.client.codecs import not_bytes
from laminar.client.delivery_time import Delay, DeliverAt, delivery_time_ms
from laminar.client.errors import ConfigError, Error
from laminar.client.policy.partition_queue import Pending
from laminar.client.policy.record_accumulator import RecordAccumulator
from laminar.client.produce import producer as aio_producer
from laminar.client.produce.producer import Key, produce_error, put_record
from laminar.client.produce.sender import Sender
from laminar.client.records import Receipt
from laminar.client.sync.portal import Portal, wait_until
from laminar.client.trace_id import TraceId, trace_id_bytes

T_in = TypeVar("T_in", contravariant=True)


class Delivery:
    """One record that was sent, and later its receipt or error.

    A delivery may be ignored: the end of the producer's block reports all failed records.
    """

    __slots__ = ("_pending", "_position")

    def __init__(self, pending: Pending, position: int) -> None:
        self._pending = pending
        self._position = position

    def done(self) -> bool:
        """Return whether the record has its receipt or has failed."""
        return self._pending.settled

    def result(self, timeout: float | None = None) -> Receipt:
        """Wait for the record's receipt and return it, or raise the record's error.

        Raises:
            TimeoutError: the record has neither after `timeout` seconds.
        """
        pending = self._pending
        if not pending.settled:
            settled = threading.Event()
            pending.when_settled(settled.set)
            if timeout is None:
                wait_until(settled.wait)
            elif not settled.wait(timeout):
                raise TimeoutError(f"no receipt of a record for partition {pending.partition} yet")
        return pending.receipt(self._position)


class Producer(Generic[T_in]):
    """A stream of records into a topic: in order within each partition, and no record appended twice.

    Leaving its block waits for every receipt, or raises `ProduceError`. `send` may be called from
    several threads; each thread's records keep their order.
    """

    def __init__(self, portal: Portal, producer: aio_producer.Producer[T_in]) -> None:
        self._portal = portal
        self._twin = producer
        self._topic = producer.topic
        self._buffer_bytes = producer.buffer_bytes
        self._encode = producer.encode
        self._lock = threading.RLock()
        self._progress = threading.Condition(self._lock)
        self._sender: Sender | None = None
        self._accumulator: RecordAccumulator | None = None

    def __enter__(self) -> Self:
        sender = self._portal.run(lambda: self._twin.open_sender(self._lock))
        sender.on_progress = self._on_progress
        self._accumulator = sender.accumulator
        self._sender = sender
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self._portal.run(lambda: self._close())

    async def _close(self) -> None:
        assert self._sender is not None
        self._sender.close(Error("the producer's block ended before the record was sent", code="closed"))

    def send(
        self,
        value: T_in,
        key: Key = None,
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
        """Send a record; wait only for room in the buffer.

        With `delay` or `deliver_at` readers get the record later, and `trace_id` is stored with it: see
        `Topic.append`.

        `number` is the program's own number, for a producer with a name: from 1, and higher than that of the
        record before. A record that an earlier run of the same name made durable is not sent: its receipt has
        offset -1.

        Raises:
            Error: what stopped the record's partition, if anything did.
        """
        accumulator = self._accumulator
        sender = self._sender
        if accumulator is None or sender is None or sender.closed:
            raise ConfigError("send outside of `with topic.producer()`", code="not_open")
        raw: Any = value if self._encode is None else self._encode(value)
        if type(raw) is not bytes and (wrong := not_bytes(raw)) is not None:
            raise wrong
        if isinstance(key, str):
            key = key.encode()
        timed = delay is not None or deliver_at is not None
        deliver_at_ms = delivery_time_ms(delay, deliver_at) if timed else None
        trace = None if trace_id is None else trace_id_bytes(trace_id)
        with self._lock:
            if accumulator.buffered_bytes >= self._buffer_bytes:
                self._until(lambda: accumulator.buffered_bytes < self._buffer_bytes or sender.closed)
            plain = partition is None and tag is None and headers is None and timestamp_ms is None
            if plain and number is None and trace is None and accumulator.numbers is None and not timed:
                pending = accumulator.put(
                    raw, key, accumulator.sticky if key is None else accumulator.queue_of(key)
                )
            else:
                pending = put_record(
                    accumulator,
                    raw,
                    key,
                    tag=tag,
                    headers=headers,
                    timestamp_ms=timestamp_ms,
                    partition=partition,
                    number=number,
                    trace_id=trace,
                    deliver_at_ms=deliver_at_ms,
                )
            position = len(pending.values) - 1
        sender.wake_from_thread()
        return Delivery(pending, position)

    def send_all(self, records: Iterable[tuple[Key, T_in]]) -> int:
        """Send every (key, value), waiting for room as needed; return the number of records."""
        count = 0
        for key, value in records:
            self.send(value, key)
            count += 1
        return count

    def has_room(self) -> bool:
        """Return whether `send` would return without waiting."""
        return self._accumulator is not None and self._accumulator.buffered_bytes < self._buffer_bytes

    def room(self) -> None:
        """Wait until the buffer has room for more; `send` does so by itself."""
        with self._lock:
            self._until(self.has_room)

    def wait(self) -> None:
        """Wait for the receipts of everything sent so far.

        Raises:
            ProduceError: some records failed for good, and get no receipt.
        """
        accumulator, sender = self._accumulator, self._sender
        assert accumulator is not None and sender is not None, "wait outside of the producer's block"
        with self._lock, sender.hurry():
            self._until(lambda: accumulator.buffered_bytes == 0)
            failure = produce_error(accumulator, self._topic)
        if failure is not None:
            raise failure

    def durable(self) -> None:
        """Wait until all records sent so far are durable; the same as `wait`."""
        self.wait()

    def accepted(self) -> None:
        """Wait until the partitions' leaders have all records sent so far.

        The records are not durable yet. If a leader is lost with them, this producer sends them again,
        because it keeps records until they are durable. For a producer without a name this is the same as
        `wait`.

        Raises:
            ProduceError: some records failed for good.
        """
        accumulator = self._accumulator
        assert accumulator is not None, "accepted outside of the producer's block"
        with self._lock:
            self._until(accumulator.all_accepted)
            failure = produce_error(accumulator, self._topic)
        if failure is not None:
            raise failure

    @property
    def checkpoint(self) -> int:
        """The program's highest number up to which all records are durable, in all partitions; 0 if none."""
        with self._lock:
            return 0 if self._accumulator is None else self._accumulator.checkpoint()

    @property
    def resumed_at(self) -> int:
        """The checkpoint when this producer began: the program continues with the next number; 0 if none."""
        return (
            0
            if self._accumulator is None or self._accumulator.numbers is None
            else self._accumulator.numbers.resumed_at
        )

    @property
    def reached(self) -> int:
        """The highest number that earlier runs made durable in any partition; 0 if none.

        Above it no number was ever used under this name, or the cluster has forgotten that.
        """
        return (
            0
            if self._accumulator is None or self._accumulator.numbers is None
            else self._accumulator.numbers.reached
        )

    def statistics(self) -> dict[str, int]:
        """Return counts since the producer began: among them bytes waiting, batches sent and resent."""
        return aio_producer.accumulator_statistics(self._accumulator)

    def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds. The caller holds the lock; `condition` is called with it held."""
        wait_until(lambda seconds: self._progress.wait_for(condition, seconds))

    def _on_progress(self) -> None:
        with self._lock:
            self._progress.notify_all()
