"""Batching of appends that carry no producer id: what arrives in one loop turn becomes one Raft entry.

The entry is proposed at the very end of the turn, directly before it leaves for the followers. It leaves no
later than if it were proposed at once, and has what came meanwhile. At most `BATCHES_IN_FLIGHT` batches of a
partition wait for their commit at a time. Appends that arrive meanwhile are joined into the next batch; each
append keeps its own offsets and its own receipt. So no timer is needed, and the busier the partition, the
larger its batches. The batcher decides which appends share a batch; the function that proposes the batch is
passed in (`Propose`). Every future that `add` returns is resolved.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from laminar.http.api.problems import Outcome, Problem
from laminar.http.api.records import Records
from laminar.node.partition.receipts import Appends, Receipt, fail

_log = logging.getLogger("laminar.append")

# Appends are joined up to this size; a larger append makes a batch by itself.
BATCH_BYTES = 1024 * 1024
BATCHES_IN_FLIGHT = 2


class Propose(Protocol):
    """The function that proposes a batch, made of several appends, to the partition's Raft group."""

    def __call__(self, frame: bytearray, appends: Appends, /) -> int:
        """Propose the batch `frame`; return the index of its entry, not committed yet. Raises `Problem`."""
        ...


@dataclass(slots=True)
class _PendingAppend:
    """The records of one append and the future of its receipt."""

    records: Records
    future: asyncio.Future[Receipt]


class AppendBatcher:
    """The queue of one partition's appends that are not proposed yet, and its batches in flight."""

    def __init__(self, propose: Propose, *, before_turn_end: Callable[[Callable[[], None]], None]) -> None:
        """Propose batches by `propose`, in callbacks of `before_turn_end` (`Driver.before_turn_end`)."""
        self._propose = propose
        self._before_turn_end = before_turn_end
        self._loop = asyncio.get_running_loop()
        self._pending: list[_PendingAppend] = []
        self.size_bytes = 0
        self._scheduled = False
        # Indexes of the batches that wait for their commit, in order.
        self._in_flight: deque[int] = deque()

    def __bool__(self) -> bool:
        """Return whether any append is waiting to be proposed."""
        return bool(self._pending)

    def add(self, records: Records) -> asyncio.Future[Receipt]:
        """Queue `records` for this turn's batch; the future resolves with their receipt once committed."""
        future: asyncio.Future[Receipt] = self._loop.create_future()
        self._pending.append(_PendingAppend(records, future))
        self.size_bytes += records.size_bytes
        self._schedule()
        return future

    def committed(self, index: int) -> None:
        """Note that batches up to entry `index` are committed, not in flight; schedule the next batch."""
        in_flight = self._in_flight
        while in_flight and in_flight[0] <= index:
            in_flight.popleft()
        if self._pending:
            self._schedule()

    def truncated(self, index: int) -> None:
        """Note that batches from entry `index` on were truncated, so they are not in flight."""
        while self._in_flight and self._in_flight[-1] >= index:
            self._in_flight.pop()

    def residue(self) -> tuple[object, ...]:
        """Return all state that an append could leave behind here, for tests that compare it."""
        return tuple(self._pending), self.size_bytes, tuple(self._in_flight)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._before_turn_end(self._run)

    def _run(self) -> None:
        self._scheduled = False
        self._flush(in_flight=BATCHES_IN_FLIGHT)

    def flush(self) -> None:
        """Propose all pending appends now, however many batches are in flight.

        Call it before another entry is proposed, so that this entry comes after them in the log.
        """
        self._flush(in_flight=None)

    def _flush(self, *, in_flight: int | None) -> None:
        while self._pending and (in_flight is None or len(self._in_flight) < in_flight):
            appends: list[_PendingAppend] = []
            size = 0
            for append in self._pending:
                if appends and size + append.records.size_bytes > BATCH_BYTES:
                    break
                appends.append(append)
                size += append.records.size_bytes
            del self._pending[: len(appends)]
            self.size_bytes -= size
            self._propose_together(appends)

    def _propose_together(self, appends: Sequence[_PendingAppend]) -> None:
        """Propose these appends as one batch; if that fails, fail the future of each of them."""
        waiting = [(append.future, len(append.records.values)) for append in appends]
        try:
            frame = join([append.records for append in appends])
        except ValueError as error:
            if len(appends) == 1:
                fail(appends[0].future, Problem("invalid", str(error), outcome="not_applied"))
                return
            # At least one of the appends makes no valid batch. Propose each alone, so that only these fail.
            for append in appends:
                self._propose_together([append])
            return
        except Exception as error:  # noqa: BLE001  # answers the appends
            _fail_by_bug(appends, error, outcome="not_applied")
            return
        try:
            index = self._propose(frame, waiting)
        except Problem as problem:
            for append in appends:
                fail(append.future, problem)
        except Exception as error:  # noqa: BLE001  # answers the appends
            # It is not known how far the proposal got.
            _fail_by_bug(appends, error, outcome="unknown")
        else:
            self._in_flight.append(index)

    def reject_all(self, problem: Problem) -> None:
        """Fail all pending appends with `problem`; none of their records was proposed."""
        appends, self._pending, self.size_bytes = self._pending, [], 0
        for append in appends:
            fail(append.future, problem)


def _fail_by_bug(appends: Sequence[_PendingAppend], error: Exception, *, outcome: Outcome) -> None:
    _log.critical("a batch of %d appends failed by a bug", len(appends), exc_info=error)
    for append in appends:
        fail(append.future, Problem("internal_error", f"{error!r}", outcome=outcome))


def join(many: Sequence[Records]) -> bytearray:
    """Return one batch with the records of several appends, in order.

    Raises:
        ValueError: if the records cannot be encoded as a batch.
    """
    return Records.concat(many).build()
