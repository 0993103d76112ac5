"""The list of what a channel has aside in one partition, with the keys and tags of its records.

The table knows of each record when it is due, and why; its key and tag are in the log. So a page is read from
there: no more records and bytes than a budget, which one request has for all partitions. What is left over is
for the next request, and the answer says where that goes on.

A record that cannot be read is listed without its key and tag, and has none that is looked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from heapq import nsmallest
from typing import Final, NamedTuple

import msgspec

from laminar.batch import Batch, BatchError
from laminar.http.api.problems import Problem
from laminar.log.disk.errors import DamagedRange
from laminar.node.channels.jobs import Source
from laminar.node.channels.scanner import key_hash
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.channels import Aside, Channel, Why

MOST_RECORDS: Final = 1_000
"""Most records that one request reads."""
MOST_BYTES: Final = 16 * 1024 * 1024
"""About how many bytes of batches one request reads; one record at least."""


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """What records are listed: with this key, with this tag, with this text in their reason; None: any."""

    key: bytes | None = None
    tag: str | None = None
    reason: str | None = None


class Budget(msgspec.Struct, frozen=True, array_like=True):
    """How many records may be listed and read, and how many bytes of batches."""

    listed: int
    records: int = MOST_RECORDS
    size: int = MOST_BYTES

    @property
    def is_spent(self) -> bool:
        """Whether nothing more is to be read."""
        return min(self.listed, self.records, self.size) <= 0


class Found(NamedTuple):
    """A record that is aside; `is_read` False: its key and tag are not known."""

    offset: int
    aside: Aside
    key: bytes | None = None
    tag: str | None = None
    is_read: bool = True


class Page(NamedTuple):
    """What was found, where the search goes on (None: all was looked at), and what is left to read."""

    records: list[Found]
    next: int | None
    left: Budget | None


def offsets_of(channel: Channel, *, is_dead: bool, after: int, wanted: Wanted) -> list[int]:
    """Return the offsets, from `after` on, of what may be wanted as far as the table knows; in no order."""
    looks_at_hash = wanted.key is not None and channel.settings.order == "key"
    hashed = key_hash(wanted.key)
    return [
        offset
        for offset, aside in channel.aside.items()
        if offset >= after
        and (aside.why is Why.DEAD) == is_dead
        and (wanted.reason is None or wanted.reason in aside.reason)
        and (not looks_at_hash or aside.key == hashed)
    ]


async def page_of(
    partition: Partition, channel: Channel, offsets: Sequence[int], *, wanted: Wanted, budget: Budget
) -> Page:
    """Return what is wanted of these records, in order; other requests get their turn meanwhile."""
    # One more than may be read shows that there are more; each is as it was when this began.
    asides = {offset: channel.aside[offset] for offset in nsmallest(budget.records + 1, offsets)}
    source = Source(partition)
    found: list[Found] = []
    last: Batch | None = None
    for offset, aside in asides.items():
        if budget.is_spent:
            return Page(found, offset, budget)
        size = 0
        try:
            stretch = await source.read(offset, offset + 1)
            if stretch is None:
                record = Found(offset, aside, is_read=False)
            else:
                batch, row = stretch.batch, stretch.row
                if batch is not last:
                    last, size = batch, len(batch.frame)
                    await asyncio.sleep(0)
                keys, tags = batch.keys, batch.tags
                record = Found(offset, aside, keys[row] if keys else None, tags[row] if tags else None)
        except (BatchError, DamagedRange, Problem):
            record = Found(offset, aside, is_read=False)
        listed = int(_is_wanted(record, wanted))
        if listed:
            found.append(record)
        budget = Budget(budget.listed - listed, budget.records - 1, budget.size - size)
    return Page(found, None, budget)


def _is_wanted(record: Found, wanted: Wanted) -> bool:
    return wanted.key in (None, record.key) and wanted.tag in (None, record.tag)
