"""The `Delivery` objects of one shard: one for each partition with channels that it leads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from laminar.node.channels.counts import ChannelCounts
from laminar.node.channels.delivery import Delivery
from laminar.node.channels.open_records.carrier import Carrier
from laminar.node.partition.partition import Partition

CHECK_S = 5.0
"""How often `check` is called."""


class _Counted(NamedTuple):
    """Sums of the counters of deliveries."""

    given: int = 0
    repeated: int = 0
    acknowledged: int = 0
    late: int = 0
    died: int = 0
    copied: int = 0

    def with_those_of(self, held: _Held) -> _Counted:
        """Return the sums with the counters of one more partition added."""
        delivery = held.delivery
        return _Counted(
            self.given + delivery.given,
            self.repeated + delivery.repeated,
            self.acknowledged + delivery.acknowledged,
            self.late + delivery.late,
            self.died + delivery.died,
            self.copied + held.carrier.copied,
        )


class _Held(NamedTuple):
    partition: Partition
    delivery: Delivery
    carrier: Carrier


async def _not_known(partition: Partition, channel: int) -> bool:
    return False


class Deliveries:
    """The deliveries (and carriers) of a shard's partitions. They are created when first needed."""

    def __init__(self) -> None:
        """Begin without deliveries."""
        # Returns whether a channel has drained the ancestors of a partition (`Delivery`). Until the
        # application
        # has set it, no ordered channel gives out records of a partition that has ancestors.
        self.precedes: Callable[[Partition, int], Awaitable[bool]] = _not_known
        self.counts = ChannelCounts()
        self._held: dict[bytes, _Held] = {}
        # The sums of deliveries that have ended.
        self._before = _Counted()

    def of(self, partition: Partition) -> Delivery:
        """Return the delivery of a partition, which is created if needed."""
        return self._of(partition).delivery

    def carry(self, partition: Partition, ends: Sequence[int]) -> None:
        """Copy the open records of old segments to the log's end, so that the segments may be trimmed.

        `ends` are the last indexes of the segments.
        """
        self._of(partition).carrier.carry(ends)

    def _of(self, partition: Partition) -> _Held:
        group = partition.replica.group
        held = self._held.get(group)
        if held is not None and held.partition is partition:
            return held
        if held is not None:
            self._end(group)  # the replica was opened again
        delivery = Delivery(partition, precedes=self._ask, counts=self.counts)
        held = self._held[group] = _Held(partition, delivery, Carrier(partition))
        return held

    def check(self, partitions: Iterable[Partition]) -> None:
        """Handle time-outs and dead records of all partitions; end deliveries that are no longer led here.

        It also drops the counters of channels that are in no partition here any more. Call it regularly.
        """
        here = [each for each in partitions if each.state.channels]
        self.counts.keep({channel for each in here for channel in each.state.channels.by_id})
        led = {each.replica.group: each for each in here if each.leads}
        for group in [group for group in self._held if group not in led]:
            self._end(group)
        for partition in led.values():
            self.of(partition).check()

    def stop(self) -> None:
        """End all deliveries, because the process ends."""
        for group in list(self._held):
            self._end(group)

    def statistics(self) -> dict[str, int]:
        """Return this process's counters: records given out, repeated, acknowledged, late, dead, copied."""
        found = _Counted(*self._before)
        for held in self._held.values():
            found = found.with_those_of(held)
        return found._asdict()

    async def _ask(self, partition: Partition, channel: int) -> bool:
        return await self.precedes(partition, channel)

    def _end(self, group: bytes) -> None:
        held = self._held.pop(group)
        held.delivery.stop()
        held.carrier.stop()
        self._before = self._before.with_those_of(held)
