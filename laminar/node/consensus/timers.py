"""The deadlines of all groups of a process: one heap, and one timer of the loop.

`Deadlines` returns the replicas whose deadline has come; `Alarm` is the timer that calls `timekeeper` then. A
group without a deadline takes no time. Usually a deadline moves later, and then the heap is not changed: when
the replica's old entry comes up, `timekeeper` schedules it again with its new deadline. Neither class knows
what is done at a deadline.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

from laminar.node.consensus.replica import Replica
from laminar.node.host.clock import Clock


class Alarm:
    """One timer of the loop, which calls `ring(at_ms)` at the earliest time that was set.

    `at_ms` is the time that was set, so that the callee can tell how late the loop is; None if the alarm was
    set to the loop's next turn.
    """

    def __init__(self, clock: Clock, ring: Callable[[int | None], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.Handle | None = None
        self._at_ms: int | None = None
        self._closed = False

    def set(self, at_ms: int) -> None:
        """Ring at `at_ms` (monotonic), unless the alarm is set to an earlier time."""
        if self._closed:
            return
        if self._handle is not None:
            if self._at_ms is None or self._at_ms <= at_ms:
                return
            self._handle.cancel()
        self._at_ms = at_ms
        self._handle = self._loop.call_later(max(0, at_ms - self._clock.monotonic_ms()) / 1000, self._fire)

    def set_next_turn(self) -> None:
        """Ring in the loop's next turn; this replaces any time that was set before."""
        if self._closed:
            return
        if self._handle is not None:
            self._handle.cancel()
        self._at_ms = None
        self._handle = self._loop.call_soon(self._fire)

    def close(self) -> None:
        """Never ring again."""
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()

    def _fire(self) -> None:
        at_ms, self._at_ms, self._handle = self._at_ms, None, None
        self._ring(at_ms)


class Deadlines:
    """The replicas of a process, ordered by the time of their next deadline."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Replica]] = []
        # The entry of each replica that counts; other entries in the heap are out of date.
        self._scheduled: dict[Replica, int] = {}
        self._number = 0

    def schedule(self, replica: Replica, at_ms: int) -> bool:
        """Schedule a replica for `at_ms`; return False if it is scheduled for that time or an earlier one."""
        known_ms = self._scheduled.get(replica)
        if known_ms is not None and known_ms <= at_ms:
            return False
        self._scheduled[replica] = at_ms
        self._number += 1
        heapq.heappush(self._heap, (at_ms, self._number, replica))
        return True

    def next_ms(self) -> int | None:
        """Return the time (ms) before which `pop` returns None for sure; None if there is no deadline."""
        return self._heap[0][0] if self._heap else None

    def pop(self, now_ms: int) -> Replica | None:
        """Remove and return the replica with the earliest deadline at or before `now_ms`; None if none."""
        heap = self._heap
        while heap and heap[0][0] <= now_ms:
            at_ms, _, replica = heapq.heappop(heap)
            if self._scheduled.get(replica) == at_ms:
                del self._scheduled[replica]
                return replica
        return None

    def remove(self, replica: Replica) -> None:
        """Remove a replica's deadline."""
        self._scheduled.pop(replica, None)
