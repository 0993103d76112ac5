"""The deadlines of all groups of a process, in one heap with one timer of the loop.

A group without a deadline costs nothing. A deadline only ever moves later while nothing happens, so a replica
has one entry in the heap, which is put back where it belongs when it comes up too early. When the loop stood
still the silence was ours: whoever owns the deadlines hears of it before any of them counts (pitfall 44).
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

from laminar.node.consensus.replica import Replica
from laminar.node.host.clock import Clock

# So many are dealt with in one turn; then the sockets come first. After a kill thousands may be due at once.
MOST_DUE = 256


class Timers:
    """`on_due(replica, now_ms)` for each whose deadline has come; `on_stall(late_ms)` when the loop's turn
    was longer than half a heartbeat; `on_failed(replica, error)` when what is due for one raised, and
    `on_error(error)` when what all share did.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        heartbeat_ms: int,
        drives: Callable[[Replica], bool],
        on_due: Callable[[Replica, int], None],
        on_stall: Callable[[int], None],
        on_failed: Callable[[Replica, Exception], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._clock = clock
        self._heartbeat_ms = heartbeat_ms
        self._drives = drives
        self._on_due = on_due
        self._on_stall = on_stall
        self._on_failed = on_failed
        self._on_error = on_error
        self._loop = asyncio.get_running_loop()
        self._heap: list[tuple[int, int, Replica]] = []
        self._number = 0
        self._handle: asyncio.Handle | None = None
        # When the handle is due; None while it only goes on with what was due before.
        self._at_ms: int | None = None
        self._closed = False

    def schedule(self, replica: Replica) -> None:
        """Its deadline may have changed."""
        deadline_ms = replica.core.deadline_ms()
        if deadline_ms is None or (replica.scheduled_ms is not None and replica.scheduled_ms <= deadline_ms):
            return
        replica.scheduled_ms = deadline_ms
        self._number += 1
        heapq.heappush(self._heap, (deadline_ms, self._number, replica))
        self._arm()

    def close(self) -> None:
        """Nothing is due any more."""
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()

    def _arm(self) -> None:
        if not self._heap or self._closed:
            return
        at_ms = self._heap[0][0]
        if self._handle is not None:
            if self._at_ms is None or self._at_ms <= at_ms:
                return
            self._handle.cancel()
        delay_s = max(0, at_ms - self._clock.monotonic_ms()) / 1000
        self._at_ms = at_ms
        self._handle = self._loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        due_ms, self._at_ms, self._handle = self._at_ms, None, None
        try:
            now_ms = self._clock.monotonic_ms()
            if due_ms is not None and now_ms - due_ms > self._heartbeat_ms // 2:
                self._on_stall(now_ms - due_ms)
            self._expire(now_ms)
        except Exception as error:  # noqa: BLE001  # the owner ends the process
            self._on_error(error)

    def _expire(self, now_ms: int) -> None:
        heap = self._heap
        dealt_with = 0
        while heap and heap[0][0] <= now_ms and not self._closed:
            if dealt_with == MOST_DUE:
                if self._handle is not None:
                    self._handle.cancel()  # armed by one of these: two would go on side by side for ever
                self._handle, self._at_ms = self._loop.call_soon(self._tick), None
                return
            scheduled_ms, _, replica = heapq.heappop(heap)
            if replica.scheduled_ms != scheduled_ms or not self._drives(replica):
                continue  # an older entry of a replica whose deadline came nearer, or a removed one
            replica.scheduled_ms = None
            try:
                deadline_ms = replica.core.deadline_ms()
                if deadline_ms is not None and deadline_ms <= now_ms:
                    dealt_with += 1
                    self._on_due(replica, now_ms)
                else:
                    self.schedule(replica)
            except Exception as error:  # noqa: BLE001  # stops this replica
                self._on_failed(replica, error)
        self._arm()
