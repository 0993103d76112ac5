"""Pin (reserve) records for a batch of a sink: those that are out under the deliveries that it names.

The reasons are explained with the table (`laminar.node.partition.state.pins`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from laminar.http.api.problems import Problem
from laminar.node.channels.counts import ChannelCounts
from laminar.node.channels.lines import Lines
from laminar.node.channels.proposing import propose, seen
from laminar.node.channels.queue import Queue
from laminar.node.channels.watchers import Watchers
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.channel_changes import runs_of, spaced_runs
from laminar.node.partition.state.channels import Channels, Out
from laminar.node.partition.state.pins import PINS_SINCE, PartAcks, Pinned, PinsEnded
from laminar.node.partition.state.staged_batches import BatchKey
from laminar.wire.channels import Named, token


class Pins:
    """The pins of one partition's channels: proposes their entries, and updates the queues."""

    def __init__(
        self,
        partition: Partition,
        lines: Lines,
        watchers: Watchers,
        *,
        counts: ChannelCounts,
        wake: Callable[[], None],
    ) -> None:
        self._partition = partition
        self._lines = lines
        self._watchers = watchers
        self._counts = counts
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        # The loop's time at which a batch last asked for its pins; pins made by earlier leaders are not in
        # it.
        self.asked_s: dict[BatchKey, float] = {}
        self.acknowledged = 0

    async def pin(self, batch: BatchKey, acks: Sequence[PartAcks]) -> int:
        """Pin (reserve) records for a batch of a sink, which will acknowledge them.

        Returns the index of the entry when that is committed. From then on they are out until `end`: they do
        not expire, and no consumer may end their delivery. To repeat the same request changes nothing.

        Raises:
            Problem: as `wanted_of`; 422 `invalid` when the flush policy is `interval`; 503 `not_enabled`; 503
                `not_leader`, or the log takes no entry.
        """
        partition = self._partition
        partition.check_leads()
        partition.context.check_knows(PINS_SINCE, "acknowledgements in transactions")
        if partition.log.policy.is_interval:
            # Without a sync a power failure could lose the entry, and jobs of a decided batch be given out
            # again.
            raise Problem(
                "invalid",
                "transactions require partitions with the flush policy `commit`",
                field="flush",
                value="interval",
                limit="commit",
                outcome="not_applied",
            )
        try:
            changes = wanted_of(partition.state.channels, batch, acks)
        except Problem:
            # A deposed leader may not know of the delivery, nor that another batch has ended.
            await partition.reader.confirmed_bounds()
            await seen(self._partition)
            changes = wanted_of(partition.state.channels, batch, acks)
        for change in changes:
            self._lines.of(change.channel)
        # Synced, as replicas change to the policy `interval` one by one.
        future = propose(self._partition, [*changes], synced=True) if changes else seen(self._partition)
        held = partition.state.channels.pins.get(batch)
        self.asked_s[batch] = self._loop.time()
        await future
        return 0 if held is None else held.entry

    async def end(self, batch: BatchKey, *, done: bool, index: int | None = None) -> None:
        """End the pins (reservations of records) of a batch here; return when that is committed.

        To repeat the call changes nothing.

        With `done` the records are acknowledged: the caller knows that the batch is decided. Without, the
        time of their deliveries begins again: the caller knows that the batch is not decided, and cannot be
        any more. `index`, if given, limits this to records that were pinned by the entry with this index.

        Raises:
            Problem: 503 `not_leader`, or the log takes no entry.
        """
        partition = self._partition
        partition.check_leads()
        held = partition.state.channels.pins.get(batch)
        if held is None or index not in (None, held.entry):
            # A deposed leader may lack the pins that are to be ended, and must not answer that they were.
            await partition.reader.confirmed_bounds()
            held = partition.state.channels.pins.get(batch)
            if held is None or index not in (None, held.entry):
                await seen(self._partition)
                return
        ended: list[tuple[Queue, dict[int, Out]]] = []
        for number, offsets in partition.state.channels.pinned(batch).items():
            queue, outs = self._lines.of(number).queue, self._lines.channel(number).out
            ended.append((queue, {offset: outs[offset] for offset in offsets}))
        future = propose(self._partition, [PinsEnded(*batch, done=done)], synced=True)
        self.asked_s.pop(batch, None)
        now_s = self._lines.now_s()
        for queue, before in ended:
            for offset, out in before.items():
                if done:
                    queue.ended(offset, out, None)
                else:
                    queue.extend(offset, out.delivery, now_s + out.timeout_ms / 1000)
            if done:
                self.acknowledged += len(before)
                channel = queue.channel
                self._counts.of(partition.topic, channel.id, channel.name).acknowledged += len(before)
                self._watchers.ended(channel.id, before)
        self._wake()
        await future

    def check(self) -> None:
        """Forget when batches asked for pins that have ended. Call it regularly."""
        pins = self._partition.state.channels.pins
        self.asked_s = {batch: at_s for batch, at_s in self.asked_s.items() if batch in pins}


def wanted_of(table: Channels, batch: BatchKey, acks: Iterable[PartAcks]) -> list[Pinned]:
    """Return the changes that pin (reserve) these records for a batch; none if it has pinned them already.

    Raises:
        Problem: 409 `late` when one of them is not out under its delivery, as of the log's end; 404
            `no_such_channel`; 409 `in_progress` when another batch has pinned one, or the batch has pinned
            others under this epoch.
    """
    found: dict[int, set[int]] = {}
    pinned = again = 0
    for each in acks:
        if each.channel == 0:
            raise Problem("no_such_channel", "there is no such channel", field="acks", outcome="not_applied")
        channel = table.by_id.get(each.channel)
        offsets = found.setdefault(each.channel, set())
        for named in each.named:
            for offset in range(named.first, named.end):
                out = None if channel is None else channel.out.get(offset)
                if channel is None or out is None or out.delivery != named.delivery:
                    raise _late(named, offset)
                held = channel.pins.get(offset)
                if held is not None and held != batch:
                    raise _pinned(named, offset)
                if offset not in offsets:
                    offsets.add(offset)
                    pinned += 1
                    again += held is not None
    before = sum(map(len, table.pinned(batch).values()))
    if batch in table.pins and not pinned == again == before:
        # The coordinator may have decided with these pins: only a newer epoch may pin other records.
        raise Problem(
            "in_progress",
            "other acknowledgements of this batch are being committed in this epoch",
            field="acks",
            value=pinned,
            limit=before,
            outcome="not_applied",
        )
    if batch in table.pins:
        return []
    return [
        Pinned(channel, *batch, runs=spaced_runs(runs_of(sorted(offsets))))
        for channel, offsets in sorted(found.items())
        if offsets
    ]


def others_of(table: Channels, batch: BatchKey, acks: Iterable[PartAcks]) -> set[BatchKey]:
    """Return the other batches of the same sink that have pinned any of these records."""
    found: set[BatchKey] = set()
    for each in acks:
        channel = table.by_id.get(each.channel)
        pins = {} if channel is None else channel.pins
        for named in each.named:
            found.update(pins[offset] for offset in range(named.first, named.end) if offset in pins)
    return {other for other in found if other[0] == batch[0] and other != batch}


def _late(named: Named, offset: int) -> Problem:
    return Problem(
        "late",
        "a job that this batch acknowledges is not out under its delivery any more",
        field="acks",
        value=token(named.partition, offset, named.delivery),
        outcome="not_applied",
    )


def _pinned(named: Named, offset: int) -> Problem:
    return Problem(
        "in_progress",
        "another batch is acknowledging this job",
        field="acks",
        value=token(named.partition, offset, named.delivery),
        outcome="not_applied",
    )
