"""A shard's part in channels: it opens and closes channels in its partitions' logs as the catalog says.

The catalog says which channels a topic has and their settings; the progress of a channel is in the log of
each partition. So for each group that is led here, by this node's view of the catalog:

1. *Open.* A channel that is not in the log is opened, and one with settings of an older version gets the new
   ones. The view may be outdated: a channel that was deleted meanwhile is closed again by the next view, and
   settings of an older version change nothing.
2. *Close.* A channel that is not in the view is closed, but only after the catalog has confirmed that the
   channel is deleted: a view from before its creation lacks the channel, too, and closing it would lose its
   state of each record.

In a partition that took no records yet when the channel was created, the channel begins with the first
record, because it would have got this record in the partitions before.

Work that fails stays due (`WorkLists`), and is tried again every `CHECK_S`, with each view and each election.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from laminar.http.api.problems import Problem
from laminar.log.disk.errors import StorageError
from laminar.node.channels.deliveries import Deliveries
from laminar.node.partition.partition import Partition
from laminar.node.shard.replicas.context import ShardContext
from laminar.node.shard.replicas.work_lists import WorkLists
from laminar.node.transport.transport import TransportError
from laminar.wire.channels import settings_of
from membership.records import ChannelRecord, PartitionRecord, TopicRecord

_log = logging.getLogger("laminar.channels")

CHECK_S = 0.2


class Differences(NamedTuple):
    """The channels to open in a partition's log (or to give new settings), and the ids of those to close."""

    to_open: Sequence[tuple[str, ChannelRecord]]
    to_close: Sequence[int]


def differences(topic: TopicRecord, partition: Partition) -> Differences:
    """Return how a partition's log differs from the catalog's record `topic` in its channels."""
    wanted, there = topic.channels or {}, partition.state.channels.by_id
    if not wanted and not there:
        return Differences((), ())
    known = {each.id for each in wanted.values()}
    return Differences(
        [
            (name, each)
            for name, each in sorted(wanted.items())
            if each.id not in there or there[each.id].version < each.version
        ],
        [channel for channel in there if channel not in known],
    )


class ShardChannels:
    """The channels of the partitions of one shard. The shard calls `check` when something may be due."""

    def __init__(self, shard: ShardContext, work: WorkLists, deliveries: Deliveries) -> None:
        self._shard = shard
        self._work = work
        self._deliveries = deliveries
        self._due = work.add("channels", self._is_due)
        self._opening: set[bytes] = set()
        self._closing = False
        # Ids and versions of channels whose settings this program does not know.
        self._unknown: set[tuple[int, int]] = set()
        self.opened = 0
        self.closed = 0

    def statistics(self) -> dict[str, int]:
        """Return how often this process opened a channel in a partition (or set it), and closed one."""
        return {"opened": self.opened, "closed": self.closed}

    def check(self) -> None:
        """Start to open and close the channels that are due, where that is not under way."""
        closing = False
        for record, partition in self._work.due(self._due):
            topic = self._shard.view.topics().get(record.topic)
            if partition is None or topic is None or partition.state.succession.status == "waiting":
                continue
            found = differences(topic, partition)
            closing |= bool(found.to_close)
            if found.to_open and record.group not in self._opening:
                self._opening.add(record.group)
                self._shard.spawn(self._open(record, partition, found.to_open))
        if closing and not self._closing:
            self._closing = True
            self._shard.spawn(self._close_all())

    def _is_due(self, record: PartitionRecord, partition: Partition | None) -> bool:
        topic = self._shard.view.topics().get(record.topic)
        if partition is None or topic is None or not partition.replica.leading:
            return False
        return any(differences(topic, partition))

    async def _open(
        self, record: PartitionRecord, partition: Partition, wanted: Sequence[tuple[str, ChannelRecord]]
    ) -> None:
        try:
            # Together: they need one entry, and one sync.
            await asyncio.gather(*(self._open_one(record, partition, name, each) for name, each in wanted))
        finally:
            self._opening.discard(record.group)
            # A view that came meanwhile may lack what is open only now.
            self._work.changed(partition)

    async def _open_one(
        self, record: PartitionRecord, partition: Partition, name: str, channel: ChannelRecord
    ) -> None:
        try:
            settings = settings_of(channel.settings)
        except msgspec.ValidationError as error:
            if (channel.id, channel.version) not in self._unknown:
                self._unknown.add((channel.id, channel.version))
                _log.error(
                    "channel %s of %s is not opened: this program does not know its settings: %s",
                    name,
                    record.topic,
                    error,
                )
            return
        delivery = self._deliveries.of(partition)
        try:
            await delivery.open(
                channel.id,
                name,
                channel.version,
                settings,
                from_start=record.number >= channel.whole_from,
            )
            self.opened += 1
        except (Problem, StorageError) as error:
            _log.debug(
                "%s/%d: channel %s was not opened, will retry: %s", record.topic, record.number, name, error
            )

    async def _close_all(self) -> None:
        """Close, in all partitions led here, the channels that the newest catalog does not have."""
        try:
            await self._shard.refresh_view()
            due = self._work.due(self._due)
            await asyncio.gather(*(self._close(partition) for _, partition in due if partition is not None))
        except (Problem, TransportError) as error:
            _log.debug("deleted channels were not closed, will retry: %s", error)
        finally:
            self._closing = False

    async def _close(self, partition: Partition) -> None:
        topic = self._shard.view.topics().get(partition.topic)
        if topic is None:
            return  # The topic is deleted.
        try:
            for channel in differences(topic, partition).to_close:
                await self._deliveries.of(partition).close(channel)
                self.closed += 1
        except (Problem, StorageError) as error:
            _log.debug(
                "%s/%d: a deleted channel was not closed, will retry: %s",
                partition.topic,
                partition.number,
                error,
            )
