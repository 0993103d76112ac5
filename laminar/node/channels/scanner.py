"""Read ahead the keys, tags and headers of the next records, for channels with order or a filter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from laminar.batch import Batch, BatchError
from laminar.http.api.problems import Problem
from laminar.log.disk.errors import DamagedRange
from laminar.node.channels.queue import Queue, Scanned
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.channels import NO_KEY, key_hash

SCAN_BYTES: Final = 1024 * 1024
AHEAD: Final = 4096
"""A channel reads on when fewer records than this are known."""
DAMAGE_S: Final = 1.0
"""A damaged entry is read again after this time; after ten times it counts as lost."""


class Scanner:
    """Reads ahead for one channel; calls `wake` when more records are known."""

    def __init__(self, partition: Partition, wake: Callable[[], None]) -> None:
        self._partition = partition
        self._wake = wake
        self._task: asyncio.Task[None] | None = None
        self._damaged_s: float | None = None

    @property
    def is_reading(self) -> bool:
        """Whether records are being read ahead now, so that more will be known soon."""
        return self._task is not None

    def read_ahead(self, queue: Queue, end: int) -> None:
        """Begin to read if too few records are known; `end` is the offset after the last committed record."""
        if not queue.is_scanned or self._task is not None or len(queue.scanned) >= AHEAD:
            return
        queue.scanned_to = max(queue.scanned_to, queue.channel.next)
        if queue.scanned_to < queue.channel.last(end):
            self._task = asyncio.get_running_loop().create_task(self._read(queue))

    def stop(self) -> None:
        """Stop reading, because the queue is replaced or the replica stops."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _read(self, queue: Queue) -> None:
        try:
            pause_s = await self._scan(queue)
            if pause_s:
                await asyncio.sleep(pause_s)
        except Exception as error:  # noqa: BLE001  # stops this partition's replica
            self._partition.stop(error)
            return
        self._task = None
        self._wake()

    async def _scan(self, queue: Queue) -> float:
        """Read the next records into the queue; return the pause in seconds before reading may go on."""
        first = queue.scanned_to
        try:
            for frame in await self._partition.reader.frames(first, max_bytes=SCAN_BYTES):
                _add(queue, Batch(frame, verified=True))
                await asyncio.sleep(0)
        except DamagedRange as damage:
            now_s = asyncio.get_running_loop().time()
            self._damaged_s = self._damaged_s or now_s
            if now_s - self._damaged_s > 10 * DAMAGE_S:
                self._add_unknown(queue, damage.next_offset)
            return DAMAGE_S
        except BatchError as error:
            self._add_unknown(queue, error.offsets[1] if error.offsets else 0)
        except Problem:  # it is trimmed
            queue.scanned_to = max(first, self._partition.start_offset)
            return 0.0 if queue.scanned_to > first else DAMAGE_S
        self._damaged_s = None
        return 0.0

    def _add_unknown(self, queue: Queue, end: int) -> None:
        """Add unreadable records to the queue: they are given out, fail as unreadable, and become dead."""
        end = queue.channel.last(max(end, queue.scanned_to + 1))
        queue.scanned += [Scanned(offset, NO_KEY, True) for offset in range(queue.scanned_to, end)]
        queue.scanned_to = end
        self._damaged_s = None


def _add(queue: Queue, batch: Batch) -> None:
    """Add the records of a batch to the queue, without those that it knows already."""
    first, end = max(queue.scanned_to, batch.base_offset), queue.channel.last(batch.next_offset)
    a, b = first - batch.base_offset, end - batch.base_offset
    if b <= a:
        return
    keys = batch.keys if queue.is_ordered else None
    hashes = [key_hash(key) for key in keys[a:b]] if keys else [NO_KEY] * (b - a)
    wanted = queue.channel.settings.filter
    passes = [True] * (b - a)
    if wanted is not None:
        tags, headers = batch.tags, batch.headers if wanted.headers else None
        passes = [
            wanted.takes(tags[at] if tags else None, headers[at] if headers else {}) for at in range(a, b)
        ]
    queue.scanned.extend(map(Scanned, range(first, end), hashes, passes))
    queue.scanned_to = end
