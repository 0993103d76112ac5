"""The sinks of one coordinator: the leader reads them as of its log's end, and proposes their changes."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from laminar.batch import Kind, build_control
from laminar.http.api.problems import Problem
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.sinks import Sink, SinkChange

_log = logging.getLogger("laminar.transactions")


class SinkLog:
    """Reads and changes the sinks of one coordinator, by entries in its partition of `_transactions`."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition

    def get(self, sink_id: bytes) -> Sink:
        """Return a sink as of the log's end. Raises `Problem` if this replica does not lead."""
        self._partition.check_leads()
        sinks = self._partition.state.sinks
        return sinks.get(sink_id) or sinks.unknown

    def change(self, sink_id: bytes, sink: Sink, *, ends: bool = False) -> asyncio.Future[Receipt]:
        """Propose the entry that replaces a sink; return a future of its commit.

        With `ends` the change finishes or deletes something, so it is accepted even while the disk is full:
        pins and prepared stages of a driver that is gone prevent trimming, and may be why the disk is full.
        """
        payload = msgspec.msgpack.encode(SinkChange(sink_id, sink))
        return self._partition.appends.append_control(build_control(Kind.SINK, payload), even_if_full=ends)

    async def until_committed(self) -> None:
        """Wait until the log is committed up to its present end, or that has failed."""
        partition = self._partition
        index = partition.log.last_index
        try:
            await partition.appends.when_committed(index, Receipt(partition.number, 0, 0))
        except Problem as problem:
            _log.debug("a decision is not committed: %s", problem)
