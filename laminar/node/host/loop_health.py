"""The health of a process's event loop: its lag, the stacks of long turns, and garbage collection when idle.

A turn that takes long delays every group of the process, so it is measured, and a thread of its own records
the loop's stack (docs/pitfalls.md, 27 and 44). Python's own garbage collector would run in the middle of a
burst, over everything that a shard holds. So it is switched off, and called here when the loop is idle or has
made `MOST_GARBAGE` objects. A full collection stops a process of many partitions for tenths of a second, so
an idle process, which makes little, has few of them. Nothing here touches protocols: the driver sees a late
turn by its own timers.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
import traceback

from laminar.histogram import Histogram

_log = logging.getLogger("laminar.loop")

# The time between two ticks, by which a turn's length is noticed: too short by up to a tick.
TICK_S = 0.05
# The same in an idle process, which would spend half of its CPU time on ticks otherwise.
IDLE_TICK_S = 0.25
# The process was idle if the loop's thread used less than this share of a CPU since the last tick, and called
# that tick in time: a loop that waits for a disk uses no CPU, either.
IDLE_TICK_SHARE = 0.03
LONG_TURN_S = 0.1
# The shortest time between two logged stacks; all long turns are counted.
REPORT_EVERY_S = 10.0
LOOK_AT_GARBAGE_S = 1.0
# The loop was idle if its thread used less than this share of a CPU since the last look.
IDLE_SHARE = 0.3
# Fewer objects made and not freed than this are left alone.
LEAST_GARBAGE = 500
# The shortest time between two full collections.
FULL_COLLECTION_S = 60.0
# The largest share of all time that full collections may take.
FULL_SHARE = 1 / 200
# A full collection looks at all that a process holds: 60 ms with 600 partitions. So there is one only if this
# many blocks of memory more are in use than after the last one, and this share more, or after an hour.
FULL_BLOCKS = 50_000
FULL_GROWTH = 1 / 10
FULL_AT_LEAST_S = 3600.0
# Objects made and not freed since the last collection, beyond which the next does not wait for an idle loop.
MOST_GARBAGE = 200_000


class LoopHealth:
    """Watches the event loop of one process. It may be made anywhere; call `start` within the loop."""

    def __init__(self) -> None:
        self.long_turns = 0
        self.lag_max_s = 0.0
        self.lag_total_s = 0.0
        self.ticks = 0
        self.collections = 0
        self.delays = Histogram()
        self.last_stack = ""
        self.last_frames: list[str] = []
        """The same as file, line and function, the innermost first, without lines of the source."""
        self._tick_s = TICK_S
        self._tick_cpu_s = 0.0
        self._due_s = 0.0  # of the next tick, by the loop's clock
        self._due_by_s = 0.0  # the same by time.monotonic(), for the watchdog's thread
        self._thread_id = 0
        self._garbage_s = 0.0
        self._cpu_s = 0.0
        self._full_s = 0.0
        self._full_took_s = 0.0
        self._full_blocks = 0
        self._reported_s = float("-inf")
        self._ended = threading.Event()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start watching the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._garbage_s = self._full_s = time.monotonic()
        self._tick_cpu_s = time.thread_time()
        self._full_blocks = sys.getallocatedblocks()
        gc.disable()
        self._arm()
        threading.Thread(target=self._watch, name="loop watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()
        gc.enable()

    def statistics(self) -> dict[str, float]:
        """Return the counters. Lag is how late (in s) the loop called a timer: the longest, and the sum.

        A turn may be longer than its lag by the time between two ticks.
        """
        return {
            "long_turns": self.long_turns,
            "lag_max_seconds": self.lag_max_s,
            "lag_seconds": self.lag_total_s,
            "ticks": self.ticks,
            "collections": self.collections,
        }

    def _arm(self) -> None:
        self._due_by_s = time.monotonic() + self._tick_s
        self._due_s = self._loop.time() + self._tick_s
        self._timer = self._loop.call_at(self._due_s, self._tick)

    def _tick(self) -> None:
        lag_s = max(0.0, self._loop.time() - self._due_s)
        self.ticks += 1
        self.lag_total_s += lag_s
        self.lag_max_s = max(self.lag_max_s, lag_s)
        self.delays.observe(lag_s)
        now_s = time.monotonic()
        if now_s - self._garbage_s >= LOOK_AT_GARBAGE_S or gc.get_count()[0] > MOST_GARBAGE:
            self._collect(now_s)
        cpu_s = time.thread_time()
        is_idle = lag_s < TICK_S and cpu_s - self._tick_cpu_s < IDLE_TICK_SHARE * self._tick_s
        self._tick_cpu_s, self._tick_s = cpu_s, IDLE_TICK_S if is_idle else TICK_S
        self._arm()

    def _collect(self, now_s: float) -> None:
        cpu_s = time.thread_time()
        idle = cpu_s - self._cpu_s < IDLE_SHARE * (now_s - self._garbage_s)
        self._garbage_s, self._cpu_s = now_s, cpu_s
        made = gc.get_count()[0]
        if idle and self._is_full_due(now_s):
            gc.collect()
            self._full_s = time.monotonic()
            self._full_took_s = self._full_s - now_s
            self._full_blocks = sys.getallocatedblocks()
        elif made > MOST_GARBAGE or (idle and made >= LEAST_GARBAGE):
            gc.collect(1)
        else:
            return
        self.collections += 1

    def _is_full_due(self, now_s: float) -> bool:
        """Return whether a full garbage collection is due: there may be enough garbage to be worth it."""
        since_s = now_s - self._full_s
        if since_s < max(FULL_COLLECTION_S, self._full_took_s / FULL_SHARE):
            return False
        most = self._full_blocks + max(FULL_BLOCKS, int(self._full_blocks * FULL_GROWTH))
        return since_s >= FULL_AT_LEAST_S or sys.getallocatedblocks() > most

    def _watch(self) -> None:
        """Look for long turns of the loop. Runs in its own thread."""
        noted_s, wait_s = 0.0, TICK_S
        while not self._ended.wait(wait_s):
            due_s, now_s = self._due_by_s, time.monotonic()
            # No sooner can this turn, or the next if this one was noted, be a long one.
            wait_s = max(TICK_S, due_s + LONG_TURN_S - now_s)
            if now_s - due_s < LONG_TURN_S or due_s == noted_s:
                continue
            noted_s = due_s
            self.long_turns += 1
            frame = sys._current_frames().get(self._thread_id)
            stack = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
            self.last_stack = "".join(stack.format())
            self.last_frames = [
                f"{'/'.join(each.filename.split('/')[-3:])}:{each.lineno} {each.name}"
                for each in reversed(stack)
            ]
            if now_s - self._reported_s >= REPORT_EVERY_S:
                self._reported_s = now_s
                _log.warning("a turn of the loop takes over %g s:\n%s", LONG_TURN_S, self.last_stack)
