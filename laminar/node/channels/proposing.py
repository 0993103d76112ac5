"""Propose entries of channels, wait for their commit, and end the futures of those who asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.channel_changes import Change, channel_entry
from laminar.node.trace.ring import Who

Requesters = Mapping[tuple[int, int], Who]
"""By channel and offset: the requester of the change of a record, for the trace."""


def propose(
    partition: Partition,
    changes: list[Change],
    *,
    synced: bool = False,
    who: Who | None = None,
    requesters: Callable[[], Requesters] | None = None,
) -> asyncio.Future[Receipt]:
    """Propose one entry with these changes; return a future that resolves when it is committed.

    With `synced` the entry counts only when it is synced, whatever the flush policy. `who` is the requester
    for the trace; or `requesters` returns one for each record, and is called only if the topic is traced.
    Raises `Problem` if nothing was proposed.
    """
    partition.appends.flush()
    trace = partition.context.trace
    if trace is not None:
        trace.requester = who
        trace.requesters = {} if requesters is None else requesters()
    try:
        return _propose(partition, changes, synced=synced)
    finally:
        if trace is not None:
            trace.requester, trace.requesters = None, {}


def _propose(partition: Partition, changes: list[Change], *, synced: bool) -> asyncio.Future[Receipt]:
    succession = partition.state.succession
    # The partitions that follow may rely on entries after a seal.
    synced = synced or succession.successor_of > 0 or succession.sealed is not None
    future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
    partition.appends.propose(channel_entry(changes, synced=synced), [(future, 0)])
    return future


def seen(partition: Partition) -> asyncio.Future[Receipt]:
    """Return a future that resolves when all entries that are in the log now are committed."""
    return partition.appends.when_committed(
        partition.log.last_index, Receipt(partition.number, 0, 0), copied=False
    )


async def confirmed(partition: Partition) -> None:
    """Wait until the table, as it was read, is committed, and a majority confirms this leader.

    It is needed before an answer for which no entry was proposed: a deposed leader may lack entries that the
    next one has committed. The commit of an entry proves as much. Raises 503 `not_leader`.
    """
    await partition.reader.confirmed_bounds()
    await seen(partition)


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """Fail a future, unless it is done."""
    if not future.done():
        future.set_exception(error)


def ignore(done: asyncio.Future[Any]) -> None:
    """Take the error of a future that is not awaited."""
    if not done.cancelled():
        done.exception()
