"""A worker of a channel: it passes jobs to a handler, and reports the outcome of each.

It takes as many jobs as it has free handlers, so that no other consumer waits for jobs that lie here. If
handlers are quick, it takes in addition as many as they finish during one request, so that no handler waits
for the network. A job whose handler runs longer than half of its time is extended.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from laminar.client.consume.job_source import JobSource
from laminar.client.consume.jobs import Job
from laminar.client.consume.stop_signal import at_sigterm
from laminar.client.errors import ConfigError, Error, Late, Retry

T = TypeVar("T")

_log = logging.getLogger("laminar.client")

AHEAD_S = 1.0
"""No job is taken ahead for handlers that take longer, on average, and none is kept that waits longer."""
SMOOTHING = 0.1
"""The weight of the last measurement in an average."""
LOOKS = 8
"""How often within a job's time it is looked whether half of that has passed."""


class Worker(Generic[T]):
    """One call of `Channel.work`: it takes jobs and runs handlers. `ended` is set when it has ended."""

    def __init__(
        self,
        source: JobSource[T],
        handle: Callable[[Job[T]], Awaitable[object]],
        *,
        concurrency: int,
        drain_s: float,
    ) -> None:
        if concurrency < 1:
            raise ConfigError(
                "concurrency must be 1 or more", code="bad_concurrency", field="concurrency", limit=1
            )
        self.ended = asyncio.Event()
        self._source = source
        self._handle = handle
        self._concurrency = concurrency
        self._drain_s = drain_s
        self._loop = source.session.loop
        self._stopping = asyncio.Event()
        self._room = asyncio.Event()
        self._handled: set[Job[T]] = set()  # with a handler that runs
        self._tasks: set[asyncio.Task[None]] = set()  # a job each, until it is known what became of it
        self._left: list[Job[T]] = []
        # Jobs that were taken ahead, each with the loop's time.
        self._ready: deque[tuple[Job[T], float]] = deque()
        # How long a handler takes, and a request that finds jobs there, in seconds: averages; 0: not known.
        self._handle_s = 0.0
        self._take_s = 0.0
        self._is_ending = False

    def stop(self) -> None:
        """Let `run` take no more jobs, and end once the jobs taken are done. From any thread."""
        self._loop.call_soon_threadsafe(self._stopping.set)

    async def run(self) -> None:
        """Work until `stop`, SIGTERM, a cancellation, or the end of the source.

        Raises:
            Error: the channel was deleted, or the client may not read it.
        """
        receiving = self._loop.create_task(self._receive())
        extending = self._loop.create_task(self._extend())
        stopping = self._loop.create_task(self._stopping.wait())
        try:
            with at_sigterm(self.stop):
                try:
                    await asyncio.wait({receiving, extending, stopping}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    receiving.cancel()
                    await asyncio.wait({receiving})
                    await self._drain()
        finally:
            for task in (receiving, extending, stopping, *self._tasks):
                task.cancel()
            await asyncio.gather(extending, stopping, *self._tasks, return_exceptions=True)
            await self._source.give_back([*self._left, *self._handled])
            self.ended.set()
        for task in (receiving, extending):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _receive(self) -> None:
        while True:
            # Acknowledgements under way are counted, too, but each handler may be ahead of them by some.
            while self._wanted <= 0 or len(self._tasks) >= self._concurrency * 4:
                self._room.clear()
                await self._room.wait()
            began_s = self._loop.time()
            jobs = await self._source.take(self._wanted)
            if jobs is None:
                return
            now_s = self._loop.time()
            # A request that waited for a record says nothing of the network.
            if now_s - began_s < AHEAD_S:
                self._take_s = _average(self._take_s, now_s - began_s)
            self._ready.extend((job, now_s) for job in jobs)
            self._begin()

    @property
    def _wanted(self) -> int:
        """Number of jobs to take now: for free handlers, and some ahead if handlers are quick."""
        ahead = 0
        if 0 < self._handle_s < AHEAD_S:
            ahead = min(self._concurrency, math.ceil(self._concurrency * self._take_s / self._handle_s))
        return self._concurrency + ahead - len(self._handled) - len(self._ready)

    def _begin(self) -> None:
        """Start a handler for each waiting job, as long as handlers are free."""
        while self._ready and len(self._handled) < self._concurrency:
            job, _ = self._ready.popleft()
            self._handled.add(job)
            task = self._loop.create_task(self._work(job))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._room.set()

    async def _work(self, job: Job[T]) -> None:
        began_s = self._loop.time()
        try:
            say = await self._outcome(job)
        finally:
            self._handle_s = _average(self._handle_s, self._loop.time() - began_s)
            self._handled.discard(job)
            if not self._is_ending:
                self._begin()
            self._room.set()
        try:
            await say
        except Late as late:
            _log.warning("%s: it is worked again", late)
        except Error as error:
            _log.warning("%r may come again: %s", job, error)

    async def _outcome(self, job: Job[T]) -> Awaitable[None]:
        """Run the handler of a job; return the call that reports its outcome, not begun yet."""
        try:
            await self._handle(job)
        except asyncio.CancelledError:
            self._left.append(job)
            raise
        except Retry as again:
            return job.nack(delay=again.delay, reason=again.reason)
        except Exception as error:  # noqa: BLE001  # whatever a handler raises is its job's failure
            _log.warning("%r failed", job, exc_info=error)
            return job.nack(reason=f"{type(error).__name__}: {error}")
        return job.ack()

    async def _extend(self) -> None:
        late: set[Job[T]] = set()
        while True:
            await asyncio.sleep(min(self._source.timeout_s / LOOKS, AHEAD_S))
            await self._give_back_old()
            late &= self._handled
            due = [job for job in self._handled if job.half_over and job not in late]
            for job, error in zip(due, await self._extended(due), strict=True):
                if isinstance(error, Late):
                    late.add(job)
                if error is not None:
                    _log.warning("%r has no more time: %s", job, error)

    async def _give_back_old(self) -> None:
        """Release jobs that have waited for a handler too long: other consumers may be free."""
        old = []
        while self._ready and self._loop.time() - self._ready[0][1] > AHEAD_S:
            old.append(self._ready.popleft()[0])
        if old:
            await self._source.give_back(old)

    async def _extended(self, jobs: list[Job[T]]) -> list[BaseException | None]:
        """Extend jobs; return the error of each, None if it succeeded. The next look repeats a slow one."""
        soon_s = self._source.timeout_s / LOOKS
        return await asyncio.gather(
            *(asyncio.wait_for(job.extend(), soon_s) for job in jobs), return_exceptions=True
        )

    async def _drain(self) -> None:
        self._is_ending = True
        ready, self._ready = [job for job, _ in self._ready], deque()
        await self._source.give_back(ready)
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=self._drain_s)


def _average(before: float, measured: float) -> float:
    """Return the moving average `before` with one more measurement; 0 means that there is none yet."""
    return measured if not before else before + SMOOTHING * (measured - before)
