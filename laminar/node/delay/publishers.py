"""The publishers of one shard, one for each partition with delayed records that it leads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from laminar.http.api.problems import Problem
from laminar.node.delay.carrier import Carrier
from laminar.node.delay.publisher import Publisher
from laminar.node.delay.sender import DelayedBatchAnswer, DelayedBatchRequest, Send, Sender
from laminar.node.partition.partition import Partition

CHECK_S: Final = 1.0
"""How often `check` is called."""


class _Held(NamedTuple):
    partition: Partition
    publisher: Publisher
    carrier: Carrier
    sender: Sender


async def _nobody(partition: Partition, request: DelayedBatchRequest) -> DelayedBatchAnswer:
    raise Problem("changing", "this process cannot send yet", outcome="not_applied")


class Publishers:
    """The objects that a shard keeps for each partition with delayed records, created when first needed.

    They are the publisher (which appends records when their time has come), the carrier (which copies pending
    records, so that the log can be trimmed) and the sender (which hands records to another partition).
    """

    def __init__(self) -> None:
        """Begin without publishers."""
        # Asks another partition to take delayed records; the application sets it.
        self.send: Send = _nobody
        self._held: dict[bytes, _Held] = {}
        # The sums of publishers that have ended.
        self._published = 0
        self._copied = 0
        self._sent = 0
        # The lateness of the last record that one of them published, in seconds.
        self._late_s = 0.0

    def of(self, partition: Partition) -> Publisher:
        """Return the publisher of a partition, which is created if needed."""
        return self._of(partition).publisher

    def _of(self, partition: Partition) -> _Held:
        group = partition.replica.group
        held = self._held.get(group)
        if held is not None and held.partition is partition:
            return held
        if held is not None:
            self._end(group)  # the replica was opened again
        publisher = Publisher(partition)
        held = self._held[group] = _Held(
            partition,
            publisher,
            Carrier(partition, publisher),
            Sender(partition, publisher.contents, self._ask),
        )
        return held

    async def _ask(self, partition: Partition, request: DelayedBatchRequest) -> DelayedBatchAnswer:
        return await self.send(partition, request)

    def keep(self, partition: Partition, before: int) -> None:
        """Copy the pending records in entries up to `before`, so that these entries may be trimmed."""
        self._of(partition).carrier.keep(before)

    def added(self, partition: Partition) -> None:
        """Wake the publisher of a partition, led here, that got delayed records."""
        self.of(partition).wake()

    def check(self, partitions: Iterable[Partition]) -> None:
        """Start publishers of partitions that are led here and have delayed records; end all others."""
        led = {each.replica.group: each for each in partitions if each.leads and len(each.state.delayed)}
        for group in [group for group in self._held if group not in led]:
            self._end(group)
        for partition in led.values():
            held = self._of(partition)
            held.publisher.wake()
            held.carrier.check()
            held.sender.check()

    def stop(self) -> None:
        """End all publishers, because the process ends."""
        for group in list(self._held):
            self._end(group)

    def statistics(self) -> dict[str, float]:
        """Return the numbers of records that this process published, copied and sent on, and of pending ones.

        `late_seconds` is the lateness of the last published record: the highest of all partitions with
        pending records, or, without any, that of the last one that had some.
        """
        held = self._held.values()
        return {
            "published": self._published + sum(each.publisher.published for each in held),
            "copied": self._copied + sum(each.carrier.copied for each in held),
            "sent": self._sent + sum(each.sender.sent for each in held),
            "pending": sum(len(each.partition.state.delayed) for each in held),
            "late_seconds": max((each.publisher.late_s for each in held), default=self._late_s),
        }

    def _end(self, group: bytes) -> None:
        held = self._held.pop(group)
        held.publisher.stop()
        held.carrier.stop()
        held.sender.stop()
        self._sent += held.sender.sent
        self._late_s = held.publisher.late_s
        self._published += held.publisher.published
        self._copied += held.carrier.copied
