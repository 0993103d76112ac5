"""How many elections a process begins at the same time.

After the loss of a process, or at a start, thousands of groups want a leader at once. If all stood together,
the loops of those who take part would come back so late that ballots are repeated, leaders taken for silent,
and everything begins anew. So only so many elections of ours are under way; the next in line stands when one
is over, when its winner has committed in its term, or after a heartbeat, as a group that can't elect must not
hold up others. So the pace is that of the machine, however busy. Nothing is decided here that a vote depends
on: to stand later is always safe. Elections that others began, and hand-overs, don't wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from laminar.node.consensus.replica import Replica
from laminar.node.host.clock import Clock

MOST_AT_ONCE = 128


class Elections:
    """`stand(replica, now_ms)` lets a replica stand if it still is to; `on_error(error)` when that raised."""

    def __init__(
        self,
        clock: Clock,
        *,
        hold_ms: int,
        drives: Callable[[Replica], bool],
        stand: Callable[[Replica, int], None],
        on_error: Callable[[BaseException], None],
        most_at_once: int = MOST_AT_ONCE,
    ) -> None:
        """`hold_ms`: for so long an election that is not over keeps others waiting."""
        self._clock = clock
        self._hold_ms = hold_ms
        self._drives = drives
        self._stand = stand
        self._on_error = on_error
        self._most_at_once = most_at_once
        self._loop = asyncio.get_running_loop()
        # Under way, and until when each counts; those that began first come first.
        self._under_way: dict[Replica, int] = {}
        # In line: those that somebody waits for, and the others.
        self._first: dict[Replica, None] = {}
        self._waiting: dict[Replica, None] = {}
        self._handle: asyncio.TimerHandle | None = None
        self._turn_is_next = False
        self._closed = False

    def __len__(self) -> int:
        """How many wait."""
        return len(self._first) + len(self._waiting)

    def close(self) -> None:
        """Nobody stands any more."""
        self._closed = True
        self._first.clear()
        self._waiting.clear()
        if self._handle is not None:
            self._handle.cancel()

    def due(self, replica: Replica, now_ms: int) -> None:
        """It is time for this replica to stand, as soon as it is in turn; one that waits keeps its place."""
        if replica not in self._first and replica not in self._waiting:
            # Its own last try is over.
            self._under_way.pop(replica, None)
            (self._first if replica.core.is_hastened else self._waiting)[replica] = None
        self._begin(now_ms)

    def hasten(self, replica: Replica) -> None:
        """Somebody waits for this group: it goes before those that nobody waits for."""
        if replica in self._waiting:
            del self._waiting[replica]
            self._first[replica] = None

    def settled(self, replica: Replica) -> None:
        """Its core has dealt with an input: an election of its may be over."""
        if self._under_way and replica in self._under_way and not replica.core.is_electing:
            del self._under_way[replica]
            if self and not self._turn_is_next:
                self._turn_is_next = True
                self._arm(0)

    def removed(self, replica: Replica) -> None:
        """It is driven no more."""
        self._first.pop(replica, None)
        self._waiting.pop(replica, None)
        self._under_way.pop(replica, None)

    def _begin(self, now_ms: int) -> None:
        while self._under_way:
            replica, until_ms = next(iter(self._under_way.items()))
            if now_ms < until_ms:
                break
            del self._under_way[replica]
        while self and len(self._under_way) < self._most_at_once:
            line = self._first or self._waiting
            replica = next(iter(line))
            del line[replica]
            if self._drives(replica):
                self._under_way[replica] = now_ms + self._hold_ms
                self._stand(replica, now_ms)
                self.settled(replica)
        if self and self._under_way and self._handle is None:
            self._arm(next(iter(self._under_way.values())) - now_ms)

    def _arm(self, delay_ms: int) -> None:
        if not self._closed:
            if self._handle is not None:
                self._handle.cancel()
            self._handle = self._loop.call_later(delay_ms / 1000, self._next)

    def _next(self) -> None:
        self._handle = None
        self._turn_is_next = False
        try:
            self._begin(self._clock.monotonic_ms())
        except Exception as error:  # noqa: BLE001  # the owner ends the process
            self._on_error(error)
