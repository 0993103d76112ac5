"""The records that wait to be sent by datagram, in a queue for each partition of the topic's route.

When the route changes, the records of ended partitions move to the queues of those that replaced them, ahead
of newer records; but only once no batch is in flight in any of the ended ones, so that the order of keys is
kept (docs/routes.md, rule `resolve`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from laminar.client.errors import no_partition
from laminar.client.policy.lanes import overlaps
from laminar.client.policy.record_accumulator import sealed_error
from laminar.client.produce.datagram_sockets import Address
from laminar.client.records import Receipt
from laminar.wire.key_route import Route


class DatagramRecord:
    """One record that has no receipt yet; `named` is true if the caller named the partition."""

    __slots__ = (
        "deadline",
        "future",
        "headers",
        "key",
        "named",
        "sent",
        "tag",
        "timestamp_ms",
        "trace_id",
        "value",
    )

    def __init__(
        self,
        value: bytes,
        key: bytes | None,
        tag: str | None,
        headers: Mapping[str, bytes] | None,
        timestamp_ms: int | None,
        trace_id: bytes | None,
        *,
        deadline: float,
        future: asyncio.Future[Receipt],
        named: bool,
    ) -> None:
        self.value = value
        self.named = named
        self.key = key
        self.tag = tag
        self.headers = headers
        self.timestamp_ms = timestamp_ms
        self.trace_id = trace_id
        self.deadline = deadline
        self.future = future
        self.sent = False  # true if a datagram with it may have been sent


class DatagramQueue:
    """One partition's records and the `address` of its leader (None while unknown).

    Records in `waiting` are not sent, those in `flying` are in the batch in flight. `last` describes the
    outcome of the last copy, for errors. A queue that has `ended` begins no other batch. `after` are ended
    queues which this one replaces and whose last batch is in flight: until they are done this one sends
    nothing, and collects their remaining records in `earlier`.
    """

    __slots__ = (
        "address",
        "after",
        "earlier",
        "ended",
        "epoch",
        "flying",
        "last",
        "partition",
        "sequence",
        "task",
        "waiting",
    )

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.ended = False
        self.after: set[DatagramQueue] = set()
        self.earlier: list[DatagramRecord] = []
        self.waiting: deque[DatagramRecord] = deque()
        self.flying: list[DatagramRecord] = []
        self.last = "nothing was sent"
        self.task: asyncio.Task[None] | None = None
        self.epoch = 0
        self.sequence = 0
        self.address: Address | None = None


class DatagramQueues:
    """The queues of records to be sent by datagram, one for each partition of a topic.

    `route` is the topic's; it is None, and there are no queues, before `begin`. `on_records` is called with a
    queue that has records to send, or may send them now.
    """

    def __init__(self, on_records: Callable[[DatagramQueue], None]) -> None:
        self.route: Route | None = None
        self._on_records = on_records
        self._queues: dict[int, DatagramQueue] = {}
        self._gone: set[int] = set()  # partitions that have ended
        self._resolving: set[DatagramQueue] = set()  # their queues that have something left
        self._spread = 0

    def begin(self, route: Route) -> None:
        """Make the queues of the first route."""
        self.route = route
        self._queues = {number: DatagramQueue(number) for number in route.numbers}

    def all(self) -> list[DatagramQueue]:
        """Return the queues of the route's partitions, and those of ended ones that have something left."""
        return [*self._queues.values(), *self._resolving]

    def queue_of(self, key: bytes | None, partition: int | None) -> DatagramQueue:
        """Return the queue of a new record: that of the partition, if one is named, or that of the key.

        Raises:
            Error: (``sealed``) the named partition has ended.
            ConfigError: (``no_partition``) the topic has no such partition.
        """
        assert self.route is not None, "a record is queued before the route is known"
        if partition is None:
            return self._place_of(self.route, key)
        if partition in self._gone:
            raise sealed_error(partition, self.route.version)
        if partition not in self._queues:
            raise no_partition(partition, self._queues)
        return self._queues[partition]

    def _place_of(self, route: Route, key: bytes | None) -> DatagramQueue:
        if key is not None:
            return self._queues[route.partition_of_key(key)]
        self._spread = (self._spread + 1) % len(route)
        return self._queues[route.numbers[self._spread]]

    def adopt(self, route: Route) -> None:
        """Adopt a newer route: unsent records of ended partitions move to those that replaced them."""
        before = self.route
        if before is None or route.version <= before.version:
            return
        old, self.route = self._queues, route
        self._queues = {number: old.get(number) or DatagramQueue(number) for number in route.numbers}
        idle: list[DatagramQueue] = []
        for inputs, outputs in overlaps(before, route):
            self._gone.update(inputs)
            for queue in (old[number] for number in inputs):
                queue.ended = True
                if queue.task is None and not queue.after:
                    idle.append(queue)
                self._resolving.add(queue)
                for number in outputs:
                    self._queues[number].after.add(queue)
        for queue in idle:
            self.resolved(queue)

    def resolved(self, ended: DatagramQueue) -> None:
        """Move the remaining records of an ended queue to its successors. No batch of it is in flight."""
        assert self.route is not None, "a queue has ended before the route was known"
        self._resolving.discard(ended)
        for record in ended.waiting:
            if record.named and not record.future.done():
                record.future.set_exception(sealed_error(ended.partition, self.route.version))
            elif not record.future.done():
                queue = self._place_of(self.route, record.key)
                (queue.earlier if queue.after else queue.waiting).append(record)
                self._on_records(queue)
        ended.waiting.clear()
        for queue in self.all():
            if ended not in queue.after:
                continue
            queue.after.discard(ended)
            if queue.after:
                continue
            queue.waiting.extendleft(reversed(queue.earlier))
            queue.earlier = []
            if queue.ended:
                self.resolved(queue)
            else:
                self._on_records(queue)
