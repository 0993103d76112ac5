"""Group commit: all changes that one turn of the loop recorded are written to the journal together.

A change *counts* when it may be acknowledged. A frame that holds only batches of `interval` logs counts when
it is written. Every other frame counts when it is durable, and all frames before it are durable then too.
Frames of the first kind are synced when the first of their logs is due, when a log has too many unsynced
records, or when the journal has too many unsynced bytes.

At the end of the turn `on_turn_end` is called, with which a node's driver sends what that turn gathered. Then
what the turn recorded is collected (*cut*) and handed to the journal's thread: last, because that thread and
the loop take turns with the interpreter lock, and followers should not wait for that. Who gathers requests
for one change records it by `before_turn_end`, at the very end of the turn. In the thread
everything that was handed over during the last sync becomes one frame: so no timer decides how much a sync
covers, and between two syncs the thread never waits for the loop. The loop is notified of each frame at once;
the frames are gathered for the segment writer without the loop.

This module knows neither logs nor segments: its caller knows what a frame's actions mean.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from laminar.log.commit.journal import Journal, Written
from laminar.log.disk.disk import Buffer
from laminar.log.disk.errors import StorageClosed
from laminar.log.disk.threads import SerialExecutor
from laminar.log.format.settings import StorageSettings
from laminar.log.partition_log.changes import ChangeQueue, Pending, Vote


@dataclass(slots=True)
class _PendingGroup:
    """The changes that were taken from the queue together, at the end of a turn, and wait for the journal.

    `taken` are the changes, `size` is their bytes, and `number` is the running number of the last change.
    With `must_sync` the changes count (may be acknowledged) only when they are durable. With `then_sync` they
    count when they are written, and a sync follows. With `marks_end` the end mark is written afterwards. A
    group with `then_sync` or `marks_end` may have no changes.
    """

    taken: list[Pending]
    size: int
    number: int
    must_sync: bool = False
    then_sync: bool = False
    marks_end: bool = False


@dataclass(slots=True)
class Frame:
    """A journal frame that was written.

    `taken` are the changes in it, `place` is where it lies in the journal, `size` is the number of bytes that
    the changes had in the queue, and `number` is the running number of the last change.
    """

    taken: list[Pending]
    place: Written
    size: int
    number: int


# Called on the loop when what it waits for counts (None), or never will (the error). It raises nothing.
Stored = Callable[[BaseException | None], None]

# For this long after its last frame a journal counts as busy, so that no other disk access begins between two
# commits of one client.
BUSY_S = 0.1
_NEVER_S = float("inf")


class GroupCommit:
    """The group commit of one storage: it writes recorded changes to the journal, and wakes their waiters.

    Methods are for the loop's thread, unless their docstring names another thread.
    """

    def __init__(
        self,
        changes: ChangeQueue,
        journal: Journal,
        worker: SerialExecutor,
        settings: StorageSettings,
        *,
        hand_over: Callable[[list[Frame]], None],
    ) -> None:
        """Write the changes in `changes` to `journal`, in the thread of `worker` (the journal's thread).

        `hand_over` is called in that thread with durable frames, in order: it passes them to the segment
        writer.
        """
        self._changes = changes
        changes.on_record = self.schedule_turn_end
        self._journal = journal
        self._worker = worker
        self._settings = settings
        self._hand_over = hand_over
        self.failure: BaseException | None = None
        # Called at the end of each turn, before what it recorded is handed over.
        self.on_turn_end: Callable[[], None] = lambda: None
        # Called once, when nothing recorded from now on can become durable.
        self.on_failure: Callable[[BaseException], None] | None = None
        self.closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False
        # What `before_turn_end` got, and whether the next end of a turn calls it.
        self._before_end: list[Callable[[], None]] = []
        self._gathers = False
        # Whether `on_turn_end` runs, after which all that is recorded is handed over.
        self._ending = False
        # Whether the journal's thread will look at `_handed` again. That thread only takes from its left.
        self._in_flight = False
        self._handed: deque[_PendingGroup] = deque()
        self._blocked = False
        # Running numbers (see `ChangeQueue`) of what was collected and of what is durable.
        self._cut_number = changes.recorded
        changes.counted = changes.recorded
        self._durable_number = changes.recorded
        self._waiters: deque[tuple[int, Stored]] = deque()
        self._durable_waiters: deque[tuple[int, Stored]] = deque()
        # When the unsynced frames are due, by the loop's clock, and whether the next group is to be
        # synced.
        self._due_s = _NEVER_S
        self._sync_timer: asyncio.TimerHandle | None = None
        self._timer_s = _NEVER_S
        self._sync_next = False
        # Frames that are not durable yet, and durable ones that wait to be applied together; the journal's
        # thread only.
        self._unsynced: deque[Frame] = deque()
        self._unsynced_limit = min(settings.unsynced_bytes, settings.max_unwritten_bytes // 4)
        self._gathered: list[Frame] = []
        self._gathered_bytes = 0
        self._gather_bytes = min(
            settings.gather_bytes, settings.max_unwritten_bytes // 2, settings.checkpoint_bytes // 4
        )
        # Bytes collected, and bytes in their segments; each counted by one thread only.
        self._cut_bytes = 0
        self._written_bytes = 0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._quiet_since = -BUSY_S
        self._frames = 0
        self._syncs = 0
        self._markers = 0

    @property
    def busy(self) -> bool:
        """Whether a sync is in progress, or ended less than `BUSY_S` ago, so that reads should yield."""
        return self._in_flight or self.loop().time() - self._quiet_since < BUSY_S

    # Waiting

    def sync(self, *, durable: bool = False) -> asyncio.Future[None]:
        """Return a future that is done when every change recorded before this call may be acknowledged.

        With `durable` the future is done when all of them are durable. Each call returns a new future. The
        future fails with `StorageClosed` if the journal fails, or has failed before.
        """
        future = self.loop().create_future()
        if self.failure is not None or self.closed:
            future.set_exception(self._closed_error())
        elif (self._durable_number if durable else self._changes.counted) >= self._changes.recorded:
            future.set_result(None)
        else:
            self._add_waiter(partial(_resolve, future), durable=durable)
        return future

    def when_stored(self, stored: Stored) -> None:
        """Call `stored` when every change recorded before this call may be acknowledged.

        This is `sync` with a callback, which is called one turn of the loop earlier than a future would wake
        its waiter. `stored` gets None, or `StorageClosed` if the journal fails.
        """
        if self.failure is not None or self.closed:
            self.loop().call_soon(stored, self._closed_error())
        elif self._changes.counted >= self._changes.recorded:
            self.loop().call_soon(stored, None)
        else:
            self._add_waiter(stored, durable=False)

    def _add_waiter(self, stored: Stored, *, durable: bool) -> None:
        number = self._changes.recorded
        (self._durable_waiters if durable else self._waiters).append((number, stored))
        self._sync_next |= durable
        if (durable or number > self._cut_number) and not self._ending:
            self.schedule_turn_end()

    def _closed_error(self) -> StorageClosed:
        return StorageClosed(f"the journal is closed: {self.failure}")

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of this storage: the loop that was running when this was first called."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def call_on_loop(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the loop, from any thread."""
        if self._loop is None:
            return  # no loop has used this yet, so nothing waits
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            pass  # the loop is closed: nothing is left to notify

    def fail_process(self, error: BaseException) -> None:
        """Report an error of the journal, or a mistake in the program; from any thread.

        Nothing recorded from now on can become durable: `on_failure` is called, and the process must end.
        """
        self.call_on_loop(partial(self._fail, error))

    def _fail(self, error: BaseException) -> None:
        """Fail all waiters: nothing recorded from now on can become durable."""
        if self.failure is not None:
            return
        self.failure = error
        waiters = [*self._waiters, *self._durable_waiters]
        self._waiters.clear()
        self._durable_waiters.clear()
        # First: the error itself ends the process, and not what those who wait make of it.
        if self.on_failure is not None:
            self.on_failure(error)
        for _, stored in waiters:
            stored(StorageClosed(f"the journal failed: {error!r}"))

    # Cutting

    def schedule_turn_end(self) -> None:
        """Schedule the end of this turn: `on_turn_end`, then the handing over of the changes to the journal.

        Both happen in the next pass of the loop, once for all calls in a turn.
        """
        if self._scheduled:
            return
        if self._loop is None:
            try:
                self._loop = asyncio.get_running_loop()
            except RuntimeError:
                return  # recorded before there is a loop: the first `sync` schedules it
        self._scheduled = True
        self._loop.call_soon(self._end_turn)

    def before_turn_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, at the first end of a turn after the next pass of the loop has begun.

        A change that it records leaves as early as one that is recorded in the next pass, and with what else
        leaves then. Until then `callback` can take what comes. An exception of it, which is a mistake in the
        program, fails everything.
        """
        self._before_end.append(callback)
        if len(self._before_end) == 1:
            self.loop().call_soon(self._gather_until_turn_end)

    def _gather_until_turn_end(self) -> None:
        self._gathers = True
        self.schedule_turn_end()

    def _end_gathering(self) -> None:
        self._gathers = False
        callbacks, self._before_end = self._before_end, []
        for callback in callbacks:
            try:
                callback()
            except Exception as error:  # noqa: BLE001  # ends the process
                self._fail(error)

    def _end_turn(self) -> None:
        if self._gathers:
            self._end_gathering()  # what it records needs no other end of a turn
        self._scheduled = False
        self._ending = True
        try:
            self.on_turn_end()
        finally:
            self._ending = False
            self._cut()

    def _cut(self) -> None:
        """Hand the recorded changes to the journal's thread.

        An exception, which is a mistake in the program, fails everything: changes that were taken from the
        queue would be in no frame, and their waiters would wait for ever.
        """
        try:
            self._cut_now()
        except Exception as error:  # noqa: BLE001  # ends the process
            self._fail(error)

    def _cut_now(self) -> None:
        changes = self._changes
        if self.failure is not None or not (changes.pending or self._sync_next):
            return
        if self._behind():
            self._blocked = True
            # The writer may have caught up after the first check: it reads `_blocked` only after
            # updating its counter, so check again.
            if self._behind():
                return
            self._blocked = False
        before = changes.pending_bytes
        taken = changes.take(self._settings.max_frame_bytes)
        size = before - changes.pending_bytes
        if changes.unsynced:
            self._note_due()
        must_sync, then_sync = changes.must_sync, self._sync_next
        if not changes.pending:
            changes.touched.clear()
            changes.must_sync = self._sync_next = False
            if must_sync or then_sync:
                self._due_s = _NEVER_S
        self._cut_number += len(taken)
        self._cut_bytes += size
        self._hand(_PendingGroup(taken, size, self._cut_number, must_sync, then_sync))
        if changes.pending:
            self.schedule_turn_end()

    def _behind(self) -> bool:
        return self._cut_bytes - self._written_bytes > self._settings.max_unwritten_bytes

    def _note_due(self) -> None:
        """Compute by when the changes of `interval` logs must be synced, and set the timer for it."""
        now_s = self.loop().time()
        for log in self._changes.touched:
            policy = log.policy
            if not policy.is_interval or log not in self._changes.unsynced:
                continue
            if policy.interval_records and log.unsynced_records >= policy.interval_records:
                self._sync_next = True
            self._due_s = min(self._due_s, now_s + policy.interval_ms / 1000)
        if self._due_s < self._timer_s:
            self._arm()

    def _arm(self) -> None:
        if self._sync_timer is not None:
            self._sync_timer.cancel()
        # Kept here, because the handle that uvloop returns for a near time does not have it.
        self._timer_s = self._due_s
        self._sync_timer = self.loop().call_at(self._due_s, self._sync_due)

    def _sync_due(self) -> None:
        self._sync_timer, self._timer_s = None, _NEVER_S
        if self.closed or self._due_s == _NEVER_S:
            return
        if self.loop().time() < self._due_s:
            # What was due first has been synced already.
            self._arm()
            return
        self._sync_next = True
        self._cut()

    def _hand(self, cut: _PendingGroup) -> None:
        self._handed.append(cut)
        if not self._in_flight:
            self._in_flight = True
            self._worker.submit(self._write_frame)

    # In the journal's thread

    def _write_frame(self) -> None:
        """Write the groups that were handed over as one frame, sync it if needed, and notify the loop."""
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
            must_sync = any(cut.must_sync for cut in cuts)
            number = cuts[-1].number
            if taken:
                records = len(taken)
                place = self._journal.write(parts, records=records, hard_states=hard_states, sync=must_sync)
                self._unsynced.append(Frame(taken, place, sum(cut.size for cut in cuts), number))
                self._frames += 1
            # If there is more, this thread runs `_write_frame` again by itself; else the loop
            # submits it with the next group.
            more = bool(self._handed)
            self.call_on_loop(partial(self._done, cuts, must_sync, more))
            if not must_sync and (
                any(cut.then_sync for cut in cuts) or self._journal.unsynced_bytes > self._unsynced_limit
            ):
                self._journal.sync()
                self._syncs += 1
                self.call_on_loop(partial(self._synced, number))
            marks_end = any(cut.marks_end for cut in cuts)
            if marks_end:
                self._journal.mark_end()
                self._markers += 1
        except BaseException as error:
            self.fail_process(error)
            if not isinstance(error, Exception):
                raise
            return
        self._gather()
        if self._gathered_bytes >= self._gather_bytes or marks_end:
            self.flush()
        if more:
            self._worker.submit(self._write_frame)

    def _gather(self) -> None:
        """Move the frames that are durable now to `_gathered`, from which the segment writer takes them."""
        unsynced, durable_lsn = self._unsynced, self._journal.durable_lsn
        while unsynced and unsynced[0].place.lsn <= durable_lsn:
            self._gathered.append(unsynced.popleft())
            self._gathered_bytes += self._gathered[-1].size

    def _take(self) -> list[_PendingGroup]:
        """Remove and return groups that were handed over: at least one, more up to the size of a frame."""
        handed = self._handed
        cuts = [handed.popleft()]
        room = self._settings.max_frame_bytes - cuts[0].size
        while handed and handed[0].size <= room:
            room -= handed[0].size
            cuts.append(handed.popleft())
        return cuts

    def flush(self) -> None:
        """Hand all durable frames to the segment writer now. The journal's thread."""
        self._gather()
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            self._gathered_bytes = 0
            self._hand_over(gathered)

    # In the writer's thread

    def written(self, gathered: list[Frame]) -> None:
        """Note that the changes of these frames are in segments, so need no memory.

        The segment writer's thread.
        """
        self._changes.written = gathered[-1].number
        self._written_bytes += sum(frame.size for frame in gathered)
        if self._blocked:
            self.call_on_loop(self._unblock)

    # On the loop again

    def _unblock(self) -> None:
        if self._blocked:
            self._blocked = False
            self._cut()

    def _done(self, cuts: list[_PendingGroup], durable: bool, more: bool) -> None:
        """Note that the frame of the groups `cuts` is written, and perhaps `durable`; wake its waiters.

        With `more` the journal's thread has begun, or will begin, another frame by itself.
        """
        number = cuts[-1].number
        self._changes.counted = number
        if not more:
            self._in_flight = False
            if self._handed:
                self._in_flight = True
                self._worker.submit(self._write_frame)
        if durable:
            self._note_durable(number)
        if any(cut.taken for cut in cuts) and not self._in_flight and not self._changes.pending:
            self._await_quiet()
        _answer(self._waiters, number)

    def _synced(self, number: int) -> None:
        """Note that the changes up to `number`, which were written before, are durable now."""
        self._note_durable(number)
        if not self._in_flight and not self._changes.pending:
            self._await_quiet()

    def _note_durable(self, number: int) -> None:
        self._durable_number = number
        unsynced = self._changes.unsynced
        for log in [log for log in unsynced if log.synced_up_to(number)]:
            del unsynced[log]
        _answer(self._durable_waiters, number)

    def _await_quiet(self) -> None:
        loop = self.loop()
        self._quiet_since = loop.time()
        if self._idle_timer is None and not self.closed:
            self._idle_timer = loop.call_later(self._settings.idle_marker_ms / 1000, self._write_idle_marker)

    def _write_idle_marker(self) -> None:
        """Write the end mark if the journal was idle long enough, and hand gathered frames to the writer."""
        self._idle_timer = None
        if self._in_flight or self._changes.pending or self.failure is not None or self.closed:
            return
        loop = self.loop()
        due = self._quiet_since + self._settings.idle_marker_ms / 1000
        if loop.time() < due:
            self._idle_timer = loop.call_at(due, self._write_idle_marker)
            return
        self._hand(_PendingGroup([], 0, self._cut_number, marks_end=True))

    def close(self) -> None:
        """Stop: no further sync begins."""
        self.closed = True
        for timer in (self._idle_timer, self._sync_timer):
            if timer is not None:
                timer.cancel()

    def statistics(self) -> dict[str, int]:
        """Return counters of frames, syncs and end marks, and gauges of the bytes that wait."""
        return {
            "frames": self._frames,
            "interval_syncs": self._syncs,
            "markers": self._markers,
            "pending_bytes": self._changes.pending_bytes,
            "recent_bytes": self._changes.recent_bytes,
            "unwritten_bytes": self._cut_bytes - self._written_bytes,
        }


def _answer(waiters: deque[tuple[int, Stored]], number: int) -> None:
    """Call the waiters of all running numbers up to this one."""
    while waiters and waiters[0][0] <= number:
        _, stored = waiters.popleft()
        stored(None)


def _resolve(future: asyncio.Future[None], failure: BaseException | None) -> None:
    if future.done():
        return
    if failure is None:
        future.set_result(None)
    else:
        future.set_exception(failure)
