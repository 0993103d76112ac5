"""Where records without a producer id wait to become a batch.

What arrives while the last batches from here are being committed is joined into the next one, each request
with its own offsets: no timer, and the busier the partition, the larger its batches. It knows how batches
are made of requests; how they are proposed, and what becomes of them, is its partition's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from laminar.batch import build
from laminar.http.api.problems import Outcome, Problem
from laminar.http.api.records import Records
from laminar.node.partition.receipts import Askers, Receipt, fail

_log = logging.getLogger("laminar.door")

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
            closed = self._why_closed()
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
            self._propose_together(knocks)

    def _why_closed(self) -> Problem | None:
        try:
            return self._closed()
        except Exception as error:  # noqa: BLE001  # answers those who wait
            _log.critical(
                "whether batches can be proposed is not known, by a mistake of ours", exc_info=error
            )
            return Problem("internal_error", f"{error!r}", outcome="not_applied")

    def _propose_together(self, knocks: Sequence[_Knock]) -> None:
        """One batch of these. Whatever goes wrong, each of them is answered, and the next have their turn."""
        try:
            frame = join([knock.records for knock in knocks])
        except ValueError as error:
            if len(knocks) == 1:
                fail(knocks[0].future, Problem("invalid", str(error), outcome="not_applied"))
                return
            # One member makes no batch: it alone fails.
            for knock in knocks:
                self._propose_together([knock])
            return
        except Exception as error:  # noqa: BLE001  # answers those who asked
            _tell_bug(knocks, error, outcome="not_applied")
            return
        try:
            index = self._propose(frame, [(knock.future, len(knock.records.values)) for knock in knocks])
        except Problem as problem:
            for knock in knocks:
                fail(knock.future, problem)
        except Exception as error:  # noqa: BLE001  # answers those who asked
            # How far it came is not known.
            _tell_bug(knocks, error, outcome="unknown")
        else:
            if index is not None:
                self._in_flight.add(index)

    def refuse(self, problem: Problem) -> None:
        """Nobody who waits gets in: nothing of theirs was proposed."""
        knocks, self._knocks, self.size_bytes = self._knocks, [], 0
        for knock in knocks:
            fail(knock.future, problem)


def _tell_bug(knocks: Sequence[_Knock], error: Exception, *, outcome: Outcome) -> None:
    _log.critical("a batch of %d requests fails by a mistake of ours", len(knocks), exc_info=error)
    for knock in knocks:
        fail(knock.future, Problem("internal_error", f"{error!r}", outcome=outcome))


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
