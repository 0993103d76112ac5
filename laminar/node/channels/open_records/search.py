"""List the records that a channel has aside in one partition, with their keys and tags.

The table knows when each record is due, and why it is aside; its key and tag are in the log. So a page is
read from the log, within a budget of records and bytes, which one request has for all partitions. The answer
says where the next request goes on.

A record that cannot be read is listed without key and tag, but not if the request asks for a key or a tag.
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
from laminar.node.channels.open_records.jobs import Source
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.channels import Aside, Channel, Why, key_hash

MOST_RECORDS: Final = 1_000
"""The most records that one request reads."""
MOST_BYTES: Final = 16 * 1024 * 1024
"""The approximate limit of bytes of batches that one request reads; it reads at least one record."""


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """The conditions of a list: this key, this tag, this text in the reason of the failure; None for any."""

    key: bytes | None = None
    tag: str | None = None
    reason: str | None = None


class Budget(msgspec.Struct, frozen=True, array_like=True):
    """The numbers of records that may still be listed and read, and of bytes of batches that may be read."""

    listed: int
    records: int = MOST_RECORDS
    size: int = MOST_BYTES

    @property
    def is_spent(self) -> bool:
        """Whether one of the numbers is used up."""
        return min(self.listed, self.records, self.size) <= 0


class Found(NamedTuple):
    """A found record that is aside: it failed, and waits for another attempt or is dead.

    With `is_read` False it could not be read, so its key and tag are unknown.
    """

    offset: int
    aside: Aside
    key: bytes | None = None
    tag: str | None = None
    is_read: bool = True


class Page(NamedTuple):
    """The records found, the offset where the next page begins (None: no more), the rest of the budget."""

    records: list[Found]
    next: int | None
    left: Budget | None


def offsets_of(channel: Channel, *, is_dead: bool, after: int, wanted: Wanted) -> list[int]:
    """Return the offsets, from `after` on, of dead records (`is_dead`) or of waiting ones that may match.

    The offsets are in no order. Only conditions that the table can answer are checked; others need the log.
    """
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
    """Return a page of those of these records that match, in order; yields to the event loop in between."""
    # One more than may be read shows that there are more. The states are those at the beginning.
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
