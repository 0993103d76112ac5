"""A producer without a loop: the twin of `laminar.client.produce.producer`.

`send` fills the outbox in the caller's thread, under a lock: a hop to the loop's thread for each record would
cost more than the record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from laminar.client.codecs import not_bytes
from laminar.client.errors import ConfigError, Error
from laminar.client.policy.lane import Pending
from laminar.client.policy.window import Outbox
from laminar.client.produce import producer as aio_producer
from laminar.client.produce.producer import Key, produce_error, put_record
from laminar.client.produce.sender import Sender
from laminar.client.records import Receipt
from laminar.client.sync.portal import Portal, wait_until

T_in = TypeVar("T_in", contravariant=True)


class Delivery:
    """One record on its way. May be ignored: the producer's end reports what failed."""

    __slots__ = ("_pending", "_position")

    def __init__(self, pending: Pending, position: int) -> None:
        self._pending = pending
        self._position = position

    def done(self) -> bool:
        return self._pending.settled

    def result(self, timeout: float | None = None) -> Receipt:
        """Wait for the receipt, or raise why there is none; TimeoutError after `timeout` seconds."""
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
    """A stream of records into a topic, in order per partition and never doubled.

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
        self._outbox: Outbox | None = None

    def __enter__(self) -> Self:
        sender = self._portal.run(lambda: self._twin.open_sender(self._lock))
        sender.on_progress = self._on_progress
        self._outbox = sender.outbox
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
        partition: int | None = None,
        number: int | None = None,
    ) -> Delivery:
        """Put a record on its way; waits only for room. Raises what stopped its partition.

        `number` is the user's, of a producer with a name: from 1, higher than that of the record before. A
        record that an earlier run of the same name made durable is not sent: its receipt has the offset -1.
        """
        outbox = self._outbox
        sender = self._sender
        if outbox is None or sender is None or sender.closed:
            raise ConfigError("send outside of `with topic.producer()`", code="not_open")
        raw: Any = value if self._encode is None else self._encode(value)
        if type(raw) is not bytes and (wrong := not_bytes(raw)) is not None:
            raise wrong
        if isinstance(key, str):
            key = key.encode()
        with self._lock:
            if outbox.buffered_bytes >= self._buffer_bytes:
                self._until(lambda: outbox.buffered_bytes < self._buffer_bytes or sender.closed)
            plain = partition is None and tag is None and headers is None and timestamp_ms is None
            if plain and number is None and outbox.numbers is None:
                pending = outbox.put(raw, key, outbox.sticky if key is None else outbox.lane_of(key))
            else:
                pending = put_record(
                    outbox,
                    raw,
                    key,
                    tag=tag,
                    headers=headers,
                    timestamp_ms=timestamp_ms,
                    partition=partition,
                    number=number,
                )
            position = len(pending.values) - 1
        sender.wake_from_thread()
        return Delivery(pending, position)

    def send_all(self, records: Iterable[tuple[Key, T_in]]) -> int:
        """Send every (key, value); returns how many."""
        count = 0
        for key, value in records:
            self.send(value, key)
            count += 1
        return count

    def has_room(self) -> bool:
        """Whether `send` would not wait."""
        return self._outbox is not None and self._outbox.buffered_bytes < self._buffer_bytes

    def room(self) -> None:
        """Wait until the buffer has room for more; `send` does so by itself."""
        with self._lock:
            self._until(self.has_room)

    def wait(self) -> None:
        """Wait for the receipts of all that was sent so far; `ProduceError` if some will not come."""
        outbox, sender = self._outbox, self._sender
        assert outbox is not None and sender is not None, "wait outside of the producer's block"
        with self._lock, sender.hurry():
            self._until(lambda: outbox.buffered_bytes == 0)
            failure = produce_error(outbox, self._topic)
        if failure is not None:
            raise failure

    def durable(self) -> None:
        """`wait`, by the name of what is waited for: nothing that was sent can be lost any more."""
        self.wait()

    def accepted(self) -> None:
        """Wait until a leader has all that was sent so far; `ProduceError` if some will not get there.

        This is no receipt: a leader that dies may lose it. Then this producer, which keeps it until it is
        durable, sends it again. Without a name the two are one: see `wait`.
        """
        outbox = self._outbox
        assert outbox is not None, "accepted outside of the producer's block"
        with self._lock:
            self._until(outbox.all_accepted)
            failure = produce_error(outbox, self._topic)
        if failure is not None:
            raise failure

    @property
    def checkpoint(self) -> int:
        """The highest number that everything up to it is durable, in all partitions; 0: none."""
        with self._lock:
            return 0 if self._outbox is None else self._outbox.checkpoint()

    @property
    def resumed_at(self) -> int:
        """The checkpoint as this producer found it: its source may go on behind it. 0: from the start."""
        return 0 if self._outbox is None or self._outbox.numbers is None else self._outbox.numbers.resumed_at

    def statistics(self) -> dict[str, int]:
        """Bytes waiting; batches taken and taken again since the producer began."""
        return aio_producer.outbox_statistics(self._outbox)

    def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for progress until this holds; the lock is held."""
        wait_until(lambda seconds: self._progress.wait_for(condition, seconds))

    def _on_progress(self) -> None:
        with self._lock:
            self._progress.notify_all()
