"""The `interval` logs of a storage: batches past the journal into the segments, and the syncs that follow.

Batches of one turn are handed to the segments' writer in one piece; what comes while that is written makes
the next. Each log has a place of its own within the interval, drawn from its id, so that a thousand logs with
one interval spread their syncs over it; one thread does them, one at a time, so what a slow disk makes late
is the sync and never an append. The order of batches and journal records is `Passage`'s.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from laminar.log.codec import PAIR, RecordKind, record_head
from laminar.log.errors import LogGone, StorageClosed
from laminar.log.passage import Place
from laminar.log.pending import Recorder, Synced, Write
from laminar.log.policy import FlushPolicy
from laminar.log.settings import StorageSettings
from laminar.log.worker import Worker
from laminar.log.writer import SegmentSync, Writer

if TYPE_CHECKING:
    from laminar.log.log import Log

Tell = Callable[[Callable[[], None]], None]

# So much is handed over before the turn ends: else a turn that appends much builds batches while the writer
# has nothing to do, and then waits for it. Not when so many pieces are on their way already: larger ones cost
# less apiece.
_EARLY_BYTES = 256 * 1024
_MOST_EARLY = 4


@dataclass(slots=True)
class _Waiting:
    """When a log is to be synced; `running` while it is. An entry of the heap counts if it has `due_s`."""

    due_s: float = 0.0
    running: bool = False


class Intervals:
    """See the module. `tell` runs something on the loop, from any thread."""

    def __init__(
        self,
        *,
        recorder: Recorder,
        writer: Writer,
        writer_worker: Worker,
        sync_worker: Worker,
        settings: StorageSettings,
        boot_id: bytes,
        tell: Tell,
        sync: Callable[[], asyncio.Future[None]],
        behind_frames: Callable[[Callable[[], None]], None],
        on_bug: Callable[[BaseException], None],
    ) -> None:
        """`sync` is of the journal; `behind_frames` runs something in the writer's thread behind all frames
        cut so far; `on_bug` is told, in any thread, of what no storage survives.
        """
        self.boot_id = boot_id
        self._recorder = recorder
        self._writer = writer
        self._writer_worker = writer_worker
        self._sync_worker = sync_worker
        self._settings = settings
        self._tell = tell
        self._journal_sync = sync
        self._behind_frames = behind_frames
        self._on_bug = on_bug
        # Running numbers of batches: recorded, and written (set by the writer's thread).
        self.recorded = 0
        self.written = 0
        self._done = 0
        self._pending: list[Write] = []
        self._pending_bytes = 0
        self._touched: dict[Log, None] = {}
        self._scheduled = False
        self._in_flight = 0
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        # Logs whose changes wait for the journal, and who waits for each of them.
        self.holding: dict[Log, None] = {}
        # What of the journal is durable: set by the storage.
        self.durable_number = 0
        self._let_go: dict[Log, list[asyncio.Future[None]]] = {}
        # Syncs: by log; a heap of (due, number, log); and what the journal is still to say.
        self._waiting: dict[Log, _Waiting] = {}
        self._heap: list[tuple[float, int, Log]] = []
        self._heap_number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._unsaid: dict[Log, Place] = {}
        self._say_timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.syncs = 0

    # Batches

    def put(self, log: Log, action: Write) -> int:
        """Queue one batch; returns its running number."""
        self._pending.append(action)
        self._pending_bytes += len(action.frame)
        self._touched[log] = None
        self.recorded += 1
        if self._pending_bytes >= _EARLY_BYTES and self._in_flight < _MOST_EARLY:
            self.flush()
        elif not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)
        return self.recorded

    def _turn(self) -> None:
        self._scheduled = False
        if not self._in_flight:
            self.flush()

    def flush(self) -> None:
        """Hand everything queued to the writer now."""
        if self._pending and not self._closed:
            taken, self._pending = self._pending, []
            self._pending_bytes = 0
            touched, self._touched = self._touched, {}
            self._in_flight += 1
            self._writer_worker.submit(partial(self._write, taken, touched, self.recorded))

    def _write(self, taken: list[Write], touched: Iterable[Log], number: int) -> None:
        """In the writer's thread."""
        try:
            self._writer.apply_direct(taken)
            self.written = number
            self._tell(partial(self._on_written, touched, number))
        except BaseException as error:
            self._on_bug(error)
            if not isinstance(error, Exception):
                raise

    def _on_written(self, touched: Iterable[Log], number: int) -> None:
        if self._closed:
            return  # the storage failed: nothing is acknowledged any more
        self._in_flight -= 1
        self._done = number
        for log in touched:
            if log.files.failure is None:
                log.written_up_to(number)
                self._note_unsynced(log)
        waiters = self._waiters
        ready = 0
        while ready < len(waiters) and waiters[ready][0] <= number:
            _answer(waiters[ready][1], None)
            ready += 1
        del waiters[:ready]
        if not self._in_flight:
            self.flush()

    def wait_written(self, future: asyncio.Future[None]) -> None:
        """Answer `future` when every batch queued so far is in its segment (or its log has failed)."""
        if self._done >= self.recorded:
            _answer(future, None)
        else:
            self._waiters.append((self.recorded, future))

    # Holding

    def handed(self, number: int) -> None:
        """The journal is durable up to `number`, and the writer has been given all of it."""
        for log in list(self.holding):
            log.passage.released(number)

    def let_go(self, log: Log) -> None:
        """Nothing of this log is held any more."""
        self.holding.pop(log, None)
        for future in self._let_go.pop(log, ()):
            _answer(future, None)

    def wait_let_go(self, log: Log, future: asyncio.Future[None]) -> None:
        """Answer `future` when nothing of this log is held any more."""
        self._let_go.setdefault(log, []).append(future)

    def forget(self, log: Log) -> None:
        """The log is deleted or replaced. Who waits for what it holds gets `LogGone`."""
        self._waiting.pop(log, None)
        self._unsaid.pop(log, None)
        self.holding.pop(log, None)
        for future in self._let_go.pop(log, ()):
            _answer(future, LogGone(f"{log!r} is deleted or replaced"))

    # Syncs at the interval

    def _note_unsynced(self, log: Log) -> None:
        """Batches were written: when is the log to be synced?"""
        policy = log.passage.policy
        if not policy.is_interval or self._closed or log.durable_index <= log.passage.synced_index:
            return
        waiting = self._waiting.setdefault(log, _Waiting())
        if waiting.running:
            return
        loop = asyncio.get_running_loop()
        if policy.interval_records and log.unsynced_records >= policy.interval_records:
            self._start_sync(log)
        elif not waiting.due_s:
            waiting.due_s = next_slot_s(loop.time(), policy.interval_ms, log.log_id)
            self._heap_number += 1
            heapq.heappush(self._heap, (waiting.due_s, self._heap_number, log))
            self._arm()

    def _arm(self) -> None:
        if not self._heap or self._closed:
            return
        due_s = self._heap[0][0]
        if self._timer is not None:
            if self._timer.when() <= due_s:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        while self._heap and self._heap[0][0] <= now_s:
            due_s, _, log = heapq.heappop(self._heap)
            waiting = self._waiting.get(log)
            if waiting is not None and waiting.due_s == due_s and not waiting.running:
                self._start_sync(log)
        self._arm()

    def _start_sync(self, log: Log) -> None:
        waiting = self._waiting[log]
        waiting.due_s = 0.0
        if log.passage.holding or not log.passage.interval:
            # Its truncation may not have reached the files yet; what is released comes by here again.
            return
        waiting.running = True
        self._sync(log, partial(self._writer_worker.submit), partial(self._on_synced, log))

    def _sync(
        self,
        log: Log,
        in_writer: Callable[[Callable[[], None]], None],
        done: Callable[[Place], None],
        *,
        everything: bool = False,
    ) -> None:
        """Sync what the writer has written of a log; `done` is called on the loop, unless the log fails."""
        cuts = log.passage.cuts

        def begin() -> None:
            job = self._writer.begin_sync(log.files, everything=everything)
            self._sync_worker.submit(partial(run, job))

        def run(job: SegmentSync) -> None:
            try:
                self._writer.run_sync(job)
            except BaseException as error:
                self._on_bug(error)
                if not isinstance(error, Exception):
                    raise
            else:
                self._tell(partial(done, Place(job.index, job.term, job.offset, cuts)))

        in_writer(begin)

    def _on_synced(self, log: Log, place: Place) -> None:
        self.syncs += 1
        waiting = self._waiting.get(log)
        if waiting is None or log.files.failure is not None or self._closed:
            return
        waiting.running = False
        if log.passage.synced(place):
            self._unsaid[log] = place
            if self._say_timer is None and not self._closed:
                # Nobody waits for it: it goes with the next frame, or by itself when none comes.
                delay_s = self._settings.synced_record_ms / 1000
                self._say_timer = asyncio.get_running_loop().call_later(delay_s, self._say)
        self._note_unsynced(log)

    def _say(self) -> None:
        self._say_timer = None
        self.say_synced()

    def say_synced(self) -> None:
        """Record up to where logs are synced: then rot below is known as damage, and a start reads less."""
        unsaid, self._unsaid = self._unsaid, {}
        for log, place in unsaid.items():
            if not log.passage.holding and place.cuts == log.passage.cuts:
                log.passage.record_synced(place)

    def record_synced(self, log: Log, place: Place) -> None:
        """Put a `synced` record into the journal's queue."""
        self._recorder.record(
            record_head(RecordKind.SYNCED, log.log_id, PAIR.size),
            PAIR.pack(place.index, place.term),
            Synced(log.files),
        )

    def settle_segments(self, log: Log, policy: FlushPolicy | None) -> None:
        """Sync all segments of a log that holds until then, and go on under `policy` (None: as before)."""

        def done(place: Place) -> None:
            if log in self.holding and log.files.failure is None and not self._closed:
                log.passage.go_on(place, policy)

        def begin(synced: asyncio.Future[None]) -> None:
            if not synced.cancelled() and synced.exception() is None:
                self._sync(log, self._behind_frames, done, everything=True)

        # What the journal has of it must be in the files before those are synced.
        self._journal_sync().add_done_callback(begin)

    # Ends

    def failed(self, log: Log) -> None:
        """A segment of this log failed: it takes nothing more, and says so after a restart."""
        error = log.files.failure
        assert error is not None, f"{log!r} has not failed"
        log.passage.failed()
        self._waiting.pop(log, None)
        self._unsaid.pop(log, None)
        self.holding.pop(log, None)
        for future in self._let_go.pop(log, ()):
            _answer(future, error)

    def stop_clean(self, logs: Iterable[Log]) -> None:
        """A last checkpoint follows. What is appended nevertheless says so before."""
        for log in logs:
            log.passage.boot_id = b""

    def close(self, error: BaseException | None = None) -> None:
        """No more syncs; who still waits is told."""
        self._closed = True
        for timer in (self._timer, self._say_timer):
            if timer is not None:
                timer.cancel()
        closed = StorageClosed(f"the storage is closed: {error!r}" if error else "the storage is closed")
        waiters, self._waiters = self._waiters, []
        for _, future in waiters:
            _answer(future, closed)
        let_go, self._let_go = self._let_go, {}
        for futures in let_go.values():
            for future in futures:
                _answer(future, closed)


def next_slot_s(now_s: float, interval_ms: int, log_id: int) -> float:
    """The next instant that is this log's: one in each interval, by its id, and never more than one away."""
    interval_s = interval_ms / 1000
    # The golden ratio spreads also ids that follow each other evenly.
    phase_s = (log_id * 0.6180339887498949) % 1.0 * interval_s
    return now_s + interval_s - (now_s - phase_s) % interval_s


def _answer(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
