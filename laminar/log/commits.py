"""Group commit: what a turn of the loop recorded goes to the journal, and its waiters are told.

What is recorded is cut at the end of the turn and handed to the journal's thread. There everything that was
handed over during the last sync becomes one frame, so no timer decides how much a sync covers, and the
thread never waits for the loop between two of them. The loop is told of each synced frame at once; behind
its back the frames are gathered for the segments' writer.

It knows neither logs nor segments: what a frame's actions mean is its caller's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from laminar.log.disk import Buffer
from laminar.log.errors import StorageClosed
from laminar.log.journal import Journal, Written
from laminar.log.pending import Pending, Recorder, Vote
from laminar.log.settings import StorageSettings
from laminar.log.worker import Worker

if TYPE_CHECKING:
    from laminar.log.intervals import Intervals
    from laminar.log.log import Log


@dataclass(slots=True)
class _Cut:
    """What was recorded up to the running `number`: its changes, the logs among them, bytes in the queue."""

    taken: list[Pending]
    touched: list[Log]
    size: int
    number: int


@dataclass(slots=True)
class Synced:
    """What a frame held, where it lies, its bytes in the queue and the running number of its last change."""

    taken: list[Pending]
    place: Written
    size: int
    number: int


# After its last frame a journal counts as busy for so long: between two commits of one client nothing waits.
BUSY_S = 0.1


class GroupCommit:
    """See the module. Its methods are the loop's, unless they say another thread."""

    def __init__(
        self,
        recorder: Recorder,
        journal: Journal,
        worker: Worker,
        settings: StorageSettings,
        *,
        hand_over: Callable[[list[Synced]], None],
    ) -> None:
        """`hand_over` is called in the journal's thread with synced frames, in their order."""
        self._recorder = recorder
        recorder.on_record = self._schedule
        self._journal = journal
        self._worker = worker
        self._settings = settings
        self._hand_over = hand_over
        self.failure: BaseException | None = None
        # Told once, when nothing recorded from now on can become durable.
        self.on_failure: Callable[[BaseException], None] | None = None
        self.closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False
        # Whether the journal's thread will look at `_handed` again. It only takes from the left.
        self._in_flight = False
        self._handed: deque[_Cut] = deque()
        self._blocked = False
        # Running numbers (see `Recorder`) of what was cut and of what is durable.
        self._cut_number = recorder.recorded
        self._durable_number = recorder.recorded
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        # Synced frames that wait to be applied together; the journal's thread only.
        self._gathered: list[Synced] = []
        self._gathered_bytes = 0
        self._gather_bytes = min(
            settings.gather_bytes, settings.max_unwritten_bytes // 2, settings.checkpoint_bytes // 4
        )
        # Bytes cut, and bytes that are in their segments; each counted by one thread only.
        self._cut_bytes = 0
        self._written_bytes = 0
        # What goes past the journal, and must know how far it is.
        self._intervals: Intervals | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._quiet_since = -BUSY_S
        self._frames = 0
        self._markers = 0

    @property
    def busy(self) -> bool:
        """Whether somebody waits for a sync, or has until a moment ago: what reads beside it should mind."""
        return self._in_flight or self.loop().time() - self._quiet_since < BUSY_S

    def follow(self, intervals: Intervals) -> None:
        """Let the logs that go past the journal know what is durable in it. Before anything is recorded."""
        self._intervals = intervals
        intervals.durable_number = self._durable_number

    # Waiting

    def sync(self) -> asyncio.Future[None]:
        """Done when everything recorded before this call is durable. Each call has a future of its own."""
        future = self.loop().create_future()
        if self.failure is not None or self.closed:
            future.set_exception(StorageClosed(f"the journal is closed: {self.failure}"))
        elif self._durable_number >= self._recorder.recorded:
            future.set_result(None)
        else:
            self._waiters.append((self._recorder.recorded, future))
            self._schedule()
        return future

    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop it belongs to: that of the first call."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def tell(self, callback: Callable[[], None]) -> None:
        """From any thread: call it on the loop."""
        if self._loop is None:
            return  # still alone in its thread: nobody waits for anything
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            pass  # the loop is closed: nobody is left who could be told

    def bug(self, error: BaseException) -> None:
        """From any thread: the journal, or our own code behind it, failed."""
        self.tell(partial(self._fail, error))

    def _fail(self, error: BaseException) -> None:
        """Nothing recorded from now on can become durable."""
        if self.failure is not None:
            return
        self.failure = error
        waiters, self._waiters = self._waiters, deque()
        for _, future in waiters:
            if not future.done():
                future.set_exception(StorageClosed(f"the journal failed: {error!r}"))
        if self.on_failure is not None:
            self.on_failure(error)

    # Cutting

    def _schedule(self) -> None:
        """Cut at the end of this turn."""
        if self._scheduled:
            return
        if self._loop is None:
            try:
                self._loop = asyncio.get_running_loop()
            except RuntimeError:
                return  # recorded before there is a loop: the first `sync` schedules it
        self._scheduled = True
        self._loop.call_soon(self._cut_scheduled)

    def _cut_scheduled(self) -> None:
        self._scheduled = False
        self._cut()

    def _cut(self) -> None:
        """Hand what is recorded to the journal's thread."""
        recorder = self._recorder
        if self.failure is not None or not recorder.pending:
            return
        if self._behind():
            self._blocked = True
            # It may have caught up between the two lines; it looks at `_blocked` after it has counted.
            if self._behind():
                return
            self._blocked = False
        if self._intervals is not None:
            self._intervals.say_synced()
        before = recorder.pending_bytes
        taken = recorder.take(self._settings.max_frame_bytes)
        size = before - recorder.pending_bytes
        touched = list(recorder.touched)
        if not recorder.pending:
            recorder.touched.clear()
        self._cut_number += len(taken)
        self._cut_bytes += size
        self._hand(_Cut(taken, touched, size, self._cut_number))
        if recorder.pending:
            self._schedule()

    def _behind(self) -> bool:
        return self._cut_bytes - self._written_bytes > self._settings.max_unwritten_bytes

    def _hand(self, cut: _Cut) -> None:
        self._handed.append(cut)
        if not self._in_flight:
            self._in_flight = True
            self._worker.submit(self._write_frame)

    # In the journal's thread

    def _write_frame(self) -> None:
        """One frame of what was handed over by now: write, sync, tell the loop, gather for the segments."""
        try:
            cuts = self._take()
            parts: list[Buffer] = []
            hard_states: list[Buffer] = []
            taken = cuts[0].taken if len(cuts) == 1 else [change for cut in cuts for change in cut.taken]
            for head, payload, action in taken:
                parts.append(head)
                parts.append(payload)
                if type(action) is Vote:
                    hard_states += (head, payload)
            place = self._journal.write(parts, records=len(taken), hard_states=hard_states)
            self._frames += 1
            self._markers += not taken
        except BaseException as error:
            self.bug(error)
            if not isinstance(error, Exception):
                raise
            return
        # If there is more, the loop goes on handing over without a word; else it will ask for this again.
        more = bool(self._handed)
        self.tell(partial(self._durable, cuts, not taken, more))
        size = sum(cut.size for cut in cuts)
        self._gathered.append(Synced(taken, place, size, cuts[-1].number))
        self._gathered_bytes += size
        holding = self._intervals is not None and bool(self._intervals.holding)
        if self._gathered_bytes >= self._gather_bytes or not taken or holding:
            self.flush()
        if self._intervals is not None and holding:
            # Only now: what they let go must come behind this frame's changes in the writer's queue.
            self.tell(partial(self._intervals.handed, cuts[-1].number))
        if more:
            self._worker.submit(self._write_frame)

    def _take(self) -> list[_Cut]:
        """What was handed over, up to the size of a frame, and at least one cut."""
        handed = self._handed
        cuts = [handed.popleft()]
        room = self._settings.max_frame_bytes - cuts[0].size
        while handed and handed[0].size <= room:
            room -= handed[0].size
            cuts.append(handed.popleft())
        return cuts

    def flush(self) -> None:
        """In the journal's thread: let the segments follow now."""
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            self._gathered_bytes = 0
            self._hand_over(gathered)

    # In the writer's thread

    def written(self, gathered: list[Synced]) -> None:
        """These frames are in their segments."""
        self._recorder.written = gathered[-1].number
        self._written_bytes += sum(frame.size for frame in gathered)
        if self._blocked:
            self.tell(self._unblock)

    # On the loop again

    def _unblock(self) -> None:
        if self._blocked:
            self._blocked = False
            self._cut()

    def _durable(self, cuts: list[_Cut], marker: bool, more: bool) -> None:
        """A frame is synced."""
        number = cuts[-1].number
        self._durable_number = number
        if self._intervals is not None:
            self._intervals.durable_number = number
        if not more:
            self._in_flight = False
            if self._handed:
                self._in_flight = True
                self._worker.submit(self._write_frame)
        for cut in cuts:
            for log in cut.touched:
                log.durable_up_to(number)
        waiters = self._waiters
        while waiters and waiters[0][0] <= number:
            _, future = waiters.popleft()
            if not future.done():
                future.set_result(None)
        if not marker and not self._in_flight and not self._recorder.pending:
            self._await_quiet()

    def _await_quiet(self) -> None:
        loop = self.loop()
        self._quiet_since = loop.time()
        if self._idle_timer is None and not self.closed:
            self._idle_timer = loop.call_later(self._settings.idle_marker_ms / 1000, self._mark_quiet)

    def _mark_quiet(self) -> None:
        """Nothing has come since the last sync: end the journal in a frame that does not matter."""
        self._idle_timer = None
        if self._in_flight or self._recorder.pending or self.failure is not None or self.closed:
            return
        loop = self.loop()
        due = self._quiet_since + self._settings.idle_marker_ms / 1000
        if loop.time() < due:
            self._idle_timer = loop.call_at(due, self._mark_quiet)
            return
        self._hand(_Cut([], [], 0, self._cut_number))

    def close(self) -> None:
        """No sync is begun any more."""
        self.closed = True
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    def statistics(self) -> dict[str, int]:
        return {
            "frames": self._frames,
            "markers": self._markers,
            "pending_bytes": self._recorder.pending_bytes,
            "recent_bytes": self._recorder.recent_bytes,
            "unwritten_bytes": self._cut_bytes - self._written_bytes,
        }
