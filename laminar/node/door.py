"""Where records without a producer id wait to become a batch.

What arrives while the last batches from here are being committed is joined into the next one, each request
with its own offsets: no timer, and the busier the partition, the larger its batches. It knows how batches
are made of requests; how they are proposed, and what becomes of them, is its partition's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from laminar.batch import build
from laminar.http.errors import Problem
from laminar.http.records import Records
from laminar.node.receipts import Askers, Receipt, fail

BATCH_BYTES = 1024 * 1024
BATCHES_IN_FLIGHT = 2


class Propose(Protocol):
    """Propose a batch for those who asked for it; returns its index, None if it is committed already. Raises
    `Problem`.
    """

    def __call__(self, frame: bytearray, askers: Askers, /) -> int | None: ...


@dataclass(slots=True)
class _Knock:
    """A request at the door."""

    records: Records
    future: asyncio.Future[Receipt]


class Door:
    """The door of one partition."""

    def __init__(self, propose: Propose, *, closed: Callable[[], Problem | None]) -> None:
        """`closed`: why nothing can be proposed now, as when this replica does not lead; None if it can."""
        self._propose = propose
        self._closed = closed
        self._loop = asyncio.get_running_loop()
        self._knocks: list[_Knock] = []
        self.size_bytes = 0
        self._scheduled = False
        self._in_flight: set[int] = set()

    def __bool__(self) -> bool:
        """Whether somebody waits."""
        return bool(self._knocks)

    def knock(self, records: Records) -> asyncio.Future[Receipt]:
        """These records go with what else arrives this turn."""
        future: asyncio.Future[Receipt] = self._loop.create_future()
        self._knocks.append(_Knock(records, future))
        self.size_bytes += records.size_bytes
        self._schedule()
        return future

    def done(self, index: int) -> None:
        """The fate of a proposed entry is known."""
        self._in_flight.discard(index)

    def committed(self) -> None:
        """Some batch was committed: the next may go."""
        if self._knocks:
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._open)

    def _open(self) -> None:
        self._scheduled = False
        self._empty(in_flight=BATCHES_IN_FLIGHT)

    def empty(self) -> None:
        """Propose all that waits, however much is under way: what comes next must not overtake it."""
        self._empty(in_flight=None)

    def _empty(self, *, in_flight: int | None) -> None:
        while self._knocks and (in_flight is None or len(self._in_flight) < in_flight):
            closed = self._closed()
            if closed is not None:
                self.refuse(closed)
                return
            knocks: list[_Knock] = []
            size = 0
            for knock in self._knocks:
                if knocks and size + knock.records.size_bytes > BATCH_BYTES:
                    break
                knocks.append(knock)
                size += knock.records.size_bytes
            del self._knocks[: len(knocks)]
            self.size_bytes -= size
            try:
                frame = join([knock.records for knock in knocks])
            except ValueError:
                self._one_by_one(knocks)
                continue
            except Exception as error:
                for knock in knocks:
                    fail(knock.future, Problem("bug", f"{error!r}", outcome="not_applied"))
                raise
            try:
                index = self._propose(frame, [(knock.future, len(knock.records.values)) for knock in knocks])
            except Problem as problem:
                for knock in knocks:
                    fail(knock.future, problem)
                continue
            if index is not None:
                self._in_flight.add(index)

    def _one_by_one(self, knocks: Sequence[_Knock]) -> None:
        """One member makes no batch: it alone fails."""
        for knock in knocks:
            try:
                frame = join([knock.records])
            except ValueError as error:
                fail(knock.future, Problem("invalid", str(error), outcome="not_applied"))
                continue
            try:
                self._propose(frame, [(knock.future, len(knock.records.values))])
            except Problem as problem:
                fail(knock.future, problem)

    def refuse(self, problem: Problem) -> None:
        """Nobody who waits gets in: nothing of theirs was proposed."""
        knocks, self._knocks, self.size_bytes = self._knocks, [], 0
        for knock in knocks:
            fail(knock.future, problem)


def join(many: Sequence[Records]) -> bytearray:
    """One batch of several requests' records, in order. Raises `ValueError`."""
    records = Records.concat(many)
    return build(
        records.values,
        keys=records.keys,
        timestamps=records.timestamps,
        tags=records.tags,
        headers=records.headers,
    )
