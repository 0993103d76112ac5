"""Copies of delayed records that are left in old entries, so that these need not be kept. The leader's part.

The entry of a pending record is not trimmed. Retention asks for copies when it would begin the log after such
entries (`laminar.node.partition.retention`): then what is pending in them is written again at the log's end,
sorted by time. So a record with a delay of two years costs its bytes once in each retention period, and keeps
nothing else on the disk. Copies are also made when there are many small batches, of those due last: each
batch takes memory, and a place in the stored table.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Final

from laminar.http.api.problems import Problem
from laminar.log.disk.errors import StorageError
from laminar.node.delay.contents import PUBLISH_BYTES, Due, joined
from laminar.node.delay.publisher import PUBLISH_RECORDS, Publisher
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.delayed_records import Copied, DelayedBatch, delayed_entry

_log = logging.getLogger("laminar.delay")

MAX_BATCHES: Final = 10_000
"""Most batches of one partition; when there are more, small ones are joined."""
JOINED: Final = 2_000
"""How many batches are joined at a time."""
SMALL: Final = 1_000
SMALL_BYTES: Final = PUBLISH_BYTES // 4
"""A batch with fewer pending records, and of fewer bytes, is small: several of them make one."""
SORTED_BYTES: Final = 8 << 20
SORTED_RECORDS: Final = 50_000
"""About how many bytes of entries, and pending records, are sorted by time together."""


class Carrier:
    """The copies in one partition. One task makes them."""

    def __init__(self, partition: Partition, publisher: Publisher) -> None:
        """Make the carrier of a partition; it is idle until it is asked."""
        self._partition = partition
        self._publisher = publisher
        self._task: asyncio.Task[None] | None = None
        # The entry after which the log may begin by the copies that were made last for that.
        self._before = 0
        self.copied = 0

    def keep(self, before: int) -> None:
        """Begin to copy what is pending in entries up to `before`, unless copies are being made.

        Until the log begins where the last copies were to let it begin, no later ones are made: something
        else may keep it, and what was copied would be copied again and again.
        """
        if self._task is not None:
            return
        if self._partition.log.start.index < self._before:
            before = min(before, self._before)
        self._before = before
        self._begin([entry for entry in self._partition.state.delayed.batches if entry <= before])

    def check(self) -> None:
        """Begin to join batches, if there are too many."""
        batches = self._partition.state.delayed.batches
        if len(batches) <= MAX_BATCHES or self._task is not None:
            return
        small = [
            batch
            for batch in batches.values()
            if batch.left < SMALL and batch.size_bytes * batch.left < SMALL_BYTES * batch.count
        ]
        small.sort(key=lambda batch: batch.first_due_ms, reverse=True)
        if len(small) > 1:  # one alone would be copied at each check
            self._begin([batch.index for batch in small[:JOINED]])

    async def finished(self) -> None:
        """Wait until no copies are being made."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def stop(self) -> None:
        """End the task: this replica leads no more, or the process ends."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _begin(self, entries: Sequence[int]) -> None:
        if self._task is None and entries and self._publisher.publishes:
            self._task = asyncio.get_running_loop().create_task(self._run(entries))

    async def _run(self, entries: Sequence[int]) -> None:
        try:
            for batches in self._portions(entries):
                await self._copy(batches)
        except (Problem, StorageError) as error:
            _log.info("%s: delayed records are not copied now: %s", self._partition.replica.name, error)
        except Exception as error:  # noqa: BLE001  # stops this partition's replica
            self._partition.stop(error)
        finally:
            self._task = None

    def _portions(self, entries: Iterable[int]) -> Iterable[list[DelayedBatch]]:
        portion: list[DelayedBatch] = []
        size = left = 0
        for entry in entries:
            batch = self._partition.state.delayed.batches.get(entry)
            if batch is None:
                continue
            if portion and (size + batch.size_bytes > SORTED_BYTES or left + batch.left > SORTED_RECORDS):
                yield portion
                portion, size, left = [], 0, 0
            portion.append(batch)
            size += batch.size_bytes
            left += batch.left
        if portion:
            yield portion

    async def _copy(self, batches: Sequence[DelayedBatch]) -> None:
        """Copy the pending records of some batches; return when that is committed."""
        contents = self._publisher.contents
        due: list[Due] = []
        for batch in batches:
            due += await contents.due(batch)
        due.sort()
        while due:
            records = await contents.records(due[:PUBLISH_RECORDS])
            count = len(records)
            frame = joined(records, as_written=True)
            chosen, due = due[:count], due[count:]
            change = Copied(
                [value for each in chosen for value in each.place],
                chosen[0].due_ms,
                chosen[-1].due_ms,
                bytes(frame),
            )
            # What ended since it was read stays ended: the table looks when it applies the copy. It frees
            # room, so it is made on a full disk, too.
            future = self._partition.appends.append_control(delayed_entry(change), even_if_full=True)
            self.copied += count
            await future
            self._publisher.wake()
