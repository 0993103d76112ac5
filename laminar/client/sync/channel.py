"""A channel without a loop: the twin of `laminar.client.consume.channel`.

Jobs are received in batches: one change of threads for each batch, and one for what is said of a job. `work`
calls its handler in threads of its own.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

from laminar.client.consume import channel as aio_channel
from laminar.client.consume import jobs as aio_jobs
from laminar.client.consume.channel import Dead
from laminar.client.consume.job_source import POLL_S
from laminar.client.consume.stop_signal import at_sigterm
from laminar.client.consume.worker import Worker
from laminar.client.descriptions import AsideInfo, ChannelInfo
from laminar.client.errors import ConfigError
from laminar.client.records import Record, Settled
from laminar.client.sync.large_values import Value
from laminar.client.sync.portal import Portal

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Job(Record[T_co]):
    """A record that a channel has given to this consumer, and to no other until its time is over.

    Report the outcome before that: `ack` (done), `nack` (failed) or `release` (not tried); `extend` gives
    more time. Each raises `Late` if the time was over: then nothing was changed, and another consumer has the
    job or will get it.
    """

    __slots__ = ("_portal", "_twin")

    def __init__(self, portal: Portal, job: aio_jobs.Job[T_co]) -> None:
        super().__init__(job._batch, job._position)
        self._portal = portal
        self._twin = job

    # generated from laminar.client.consume.jobs.Job

    def __repr__(self) -> str:
        return repr(self._twin)

    @property
    def attempt(self) -> int:
        """Number of this attempt, from 1; exact even if the leader changed."""
        return self._twin.attempt

    @property
    def token(self) -> str:
        """The text that names this delivery, for `Channel.settle` and the command line."""
        return self._twin.token

    @property
    def channel(self) -> str:
        """Name of the channel that gave the job."""
        return self._twin.channel

    @property
    def channel_id(self) -> int:
        """The number of the channel that gave the job; a channel that is created again gets a new number."""
        return self._twin.channel_id

    @property
    def fence(self) -> tuple[int, int]:
        """A fencing token (partition, delivery number), which is higher at each delivery of the same key.

        For a channel with ``order="key"``: store the token with the data that a job writes for its key, and
        refuse writes with a lower one. So a consumer whose time was over cannot overwrite newer data.
        """
        return self._twin.fence

    @property
    def floor(self) -> int:
        """Offset before which all records of this partition were acknowledged when the job was given out."""
        return self._twin.floor

    @property
    def half_over(self) -> bool:
        """Whether more than half of the time for this job has passed."""
        return self._twin.half_over

    def open(self, *, timeout: float | None = None) -> Value:
        """Return the value as a stream, the only way to read a large record's value. See `Topic.open`."""
        return Value(self._portal, self._twin.open(timeout=timeout))

    def ack(self) -> None:
        """Acknowledge the job; return when that is committed. The job is not given out again.

        Acknowledgements of 5 ms are sent in one request, which is repeated if its answer is lost.

        Raises:
            Late: the job's time was over.
            OutcomeUnknown: no answer came in time; the job may be given out again.
        """
        self._portal.run(lambda: self._twin.ack())

    def nack(self, *, delay: float | None = None, reason: str = "") -> None:
        """Report a failed attempt: the job is given out again after `delay` seconds.

        Without `delay`, after the pause of the channel's settings. Of `reason` 200 characters are kept, to be
        shown with the record. Raises `Late` also if an earlier attempt of this report succeeded, and its
        answer was lost.
        """
        self._portal.run(lambda: self._twin.nack(delay=delay, reason=reason))

    def release(self) -> None:
        """Return the job unprocessed: it is given out again at once, and the attempt does not count.

        Raises `Late` in the same cases as `nack`.
        """
        self._portal.run(lambda: self._twin.release())

    def extend(self, timeout: float | None = None) -> None:
        """Keep the job for `timeout` seconds from now; None means the time for which it was given out.

        Raises:
            Late: the job's time was over.
        """
        self._portal.run(lambda: self._twin.extend(timeout))


class Channel(Generic[T]):
    """A channel of a topic; made by ``topic.channel(name)``. ``T`` is the type of its values."""

    def __init__(self, portal: Portal, channel: aio_channel.Channel[T]) -> None:
        self._portal = portal
        self._twin = channel
        self.name = channel.name
        self.topic = channel.topic
        self.settings = channel.settings

    def receive_batch(
        self, max_jobs: int = 32, *, wait: float = POLL_S, timeout: float | None = None
    ) -> list[Job[T]]:
        """Return up to `max_jobs` jobs as soon as there is one; [] after `wait` seconds without one.

        Each is this consumer's for `timeout` seconds, or as the channel was set when this program opened it.
        """
        found = self._portal.run(lambda: self._twin.receive_batch(max_jobs, wait=wait, timeout=timeout))
        return [Job(self._portal, job) for job in found]

    def receive(self, max_jobs: int = 32, *, timeout: float | None = None) -> Iterator[Job[T]]:
        """Yield jobs as they come, until the channel or the client is closed; over any outage.

        Up to `max_jobs` are received at a time. One that has waited here for half of its `timeout` (seconds;
        the channel's if left out) is extended before it is yielded, or left out if another consumer has it.
        When the loop ends, those that were not yielded are released.
        """
        source = self._twin.source
        jobs: list[aio_jobs.Job[T]] = []
        try:
            while True:
                taken = self._portal.run(lambda: source.take(max_jobs, timeout_s=timeout))
                if taken is None:
                    return
                jobs = taken[::-1]
                while jobs and not source.closed:
                    if jobs[-1].half_over:
                        jobs = self._portal.run(partial(source.still_held, jobs))
                    else:
                        yield Job(self._portal, jobs.pop())
        finally:
            with contextlib.suppress(ConfigError):  # the client is closed
                self._portal.run(lambda: source.give_back(jobs))

    def work(
        self,
        handle: Callable[[Job[T]], object],
        *,
        concurrency: int = 16,
        drain: float = 30.0,
    ) -> None:
        """Call `handle` with each job, in `concurrency` threads, until the channel is closed or SIGTERM.

        A job is acknowledged when its handler returns. It failed when the handler raises: the exception is
        the reason, and after the channel's pause, or that of a `Retry`, the job comes again. While a handler
        runs its job is extended, so it may take any time.

        At SIGTERM, unless the program handles that itself, and at Ctrl-C no more jobs are taken. Handlers
        that run have `drain` seconds to return; then their jobs are released, though a thread cannot be
        ended.
        """
        portal = self._portal

        async def in_thread(job: aio_jobs.Job[T]) -> None:
            await portal.loop.run_in_executor(pool, handle, Job(portal, job))

        worker = Worker(self._twin.source, in_thread, concurrency=concurrency, drain_s=drain)
        pool = ThreadPoolExecutor(concurrency, thread_name_prefix="laminar-work")
        try:
            with at_sigterm(worker.stop):
                try:
                    portal.run(worker.run)
                except KeyboardInterrupt:
                    portal.run(worker.ended.wait)
                    raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    # generated from laminar.client.consume.channel.Channel

    def __repr__(self) -> str:
        return repr(self._twin)

    def settle(
        self,
        *,
        ack: Sequence[str] = (),
        nack: Sequence[str] = (),
        release: Sequence[str] = (),
        extend: Sequence[str] = (),
        delay: float | None = None,
        reason: str = "",
        timeout: float | None = None,
    ) -> Settled:
        """Report the outcomes of jobs by their tokens, also of jobs that another program received.

        Jobs whose time was over are not changed. That raises no error: `Settled.late` has their tokens.
        `delay` (seconds) and `reason` are for `nack`, `timeout` (seconds) is for `extend`; see `Job`.
        """
        return self._portal.run(
            lambda: self._twin.settle(
                ack=ack,
                nack=nack,
                release=release,
                extend=extend,
                delay=delay,
                reason=reason,
                timeout=timeout,
            )
        )

    def close(self) -> None:
        """End the loops of `receive` and `work` of this object; the channel itself stays. Idempotent."""
        self._twin.close()

    def describe(self) -> ChannelInfo:
        """Return the channel's settings and progress. Raises `NotFound` if it was deleted."""
        return self._portal.run(lambda: self._twin.describe())

    def seek(self, to: str | datetime.datetime | Mapping[int, int], *, drop: bool = False) -> dict[int, int]:
        """Move the channel to a position, from which records are given out (again); return its new offsets.

        `to` is ``"earliest"``, ``"latest"``, ``"-1h"``, a time, or offsets by partition. The result has the
        offset by partition. Records before it that are out or wait for another attempt are still given out
        again; with `drop` they are dropped. ``seek("latest", drop=True)`` empties the channel, but for dead
        records.
        """
        return self._portal.run(lambda: self._twin.seek(to, drop=drop))

    def aside(
        self,
        *,
        key: str | None = None,
        tag: str | None = None,
        reason: str | None = None,
        limit: int | None = None,
    ) -> list[AsideInfo]:
        """Return the records that wait for another attempt, in order of partition and offset, up to `limit`.

        With `key`, `tag` or `reason` only those that have this key, this tag, or this text in the reason of
        their last failure. For a key or a tag the server reads the records themselves, perhaps all of them.
        """
        return self._portal.run(lambda: self._twin.aside(key=key, tag=tag, reason=reason, limit=limit))

    def dead(
        self,
        *,
        key: str | None = None,
        tag: str | None = None,
        reason: str | None = None,
        limit: int | None = None,
    ) -> list[AsideInfo]:
        """Return the dead records (failed for good), up to `limit`; conditions and order as for `aside`."""
        return self._portal.run(lambda: self._twin.dead(key=key, tag=tag, reason=reason, limit=limit))

    def replay(self, dead: Dead) -> int:
        """Give dead records out again, with their attempts counted from 0; return how many were dead.

        `dead` are results of `Channel.dead`, tokens, or ``"all"``.
        """
        return self._portal.run(lambda: self._twin.replay(dead))

    def drop(self, dead: Dead) -> int:
        """Drop dead records: they are never given out again. Return how many were dropped; see `replay`."""
        return self._portal.run(lambda: self._twin.drop(dead))
