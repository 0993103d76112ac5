"""Copy pending delayed records to the log's end, so that old entries can be trimmed. The leader does this.

Retention never trims the log beyond the entry of a pending record. When it would trim such entries
(`laminar.node.partition.retention`), it asks for copies: the records that are pending in them are written
again at the log's end, sorted by time. So a record with a delay of two years costs its bytes once in each
retention period, and retains no other data on the disk. When there are many small batches, those that are due
last are copied, too, and joined: each batch takes memory, and a row in the stored table.
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
"""When a partition has more batches than this, small ones are joined."""
JOINED: Final = 2_000
"""The most batches that are joined at a time."""
SMALL: Final = 1_000
SMALL_BYTES: Final = PUBLISH_BYTES // 4
"""A batch with fewer pending records than `SMALL`, in fewer bytes than this, is small, and may be joined."""
SORTED_BYTES: Final = 8 << 20
SORTED_RECORDS: Final = 50_000
"""The approximate limits of bytes of entries, and of pending records, that are sorted by time together."""


class Carrier:
    """Copies pending delayed records of one partition to its log's end, in one task."""

    def __init__(self, partition: Partition, publisher: Publisher) -> None:
        """Create the carrier of a partition; it is idle until it is called."""
        self._partition = partition
        self._publisher = publisher
        self._task: asyncio.Task[None] | None = None
        # The entry up to which the latest copies permit trimming.
        self._before = 0
        self.copied = 0

    def keep(self, before: int) -> None:
        """Begin to copy the pending records in entries up to `before`, unless copies are being made.

        While the log is not trimmed yet as far as the latest copies permit, no later entries are copied:
        something else may prevent trimming, and the same records would be copied again and again.
        """
        if self._task is not None:
            return
        if self._partition.log.start.index < self._before:
            before = min(before, self._before)
        self._before = before
        self._begin([entry for entry in self._partition.state.delayed.batches if entry <= before])

    def check(self) -> None:
        """Begin to join small batches, if there are too many batches."""
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
        """Stop copying. Call it when this replica no longer leads or the process ends."""
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
        """Copy the pending records of some batches; return when the copies are committed."""
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
            # The table ignores copies of records that ended since they were read. The entry frees space, so
            # it
            # is allowed on a full disk.
            future = self._partition.appends.append_control(delayed_entry(change), even_if_full=True)
            self.copied += count
            await future
            self._publisher.wake()
