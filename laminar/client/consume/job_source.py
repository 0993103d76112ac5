"""The source of a channel's jobs: it requests jobs by long polls, until it is closed.

While no node can answer, the source asks again after a pause, so that an outage ends no consumer. If an
answer is lost, its jobs are given out again when their time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from laminar.client.consume.acks import Acks
from laminar.client.consume.jobs import Job, jobs_of
from laminar.client.errors import Error, OutcomeUnknown, Overloaded, Unavailable
from laminar.client.net.session import Session
from laminar.client.policy.retry import Backoff
from laminar.http.api.deadlines import CLIENT_ATTEMPT_S
from laminar.wire.channels import CHANNEL_HEADER, JOBS_TYPE

T = TypeVar("T")

_log = logging.getLogger("laminar.client")

MAX_WAIT_S = 30.0
"""The longest wait of one request."""
POLL_S = 20.0
"""The wait of a request of a loop."""
RELEASE_S = 5.0
"""How long an ending consumer tries to give back what it has not begun; else the jobs' time ends it."""
LONGEST_PAUSE_MS = 2_000


class JobSource(Generic[T]):
    """The source of one channel's jobs; `timeout_s` is how long a job is given to a consumer by default."""

    def __init__(
        self,
        session: Session,
        topic: str,
        path: str,
        *,
        decode: Callable[[bytes], T],
        timeout_s: float,
        channel_id: int,
    ) -> None:
        self.session = session
        self.topic = topic
        self.path = path
        self.timeout_s = timeout_s
        self.channel_id = channel_id
        self.closed = False
        self.acks = Acks(session, topic, path)
        self._decode = decode
        self._polls: set[asyncio.Task[list[Job[T]]]] = set()

    async def batch(self, max_jobs: int, *, wait_s: float, timeout_s: float | None = None) -> list[Job[T]]:
        """Return up to `max_jobs` jobs; [] after `wait_s` without one. Raises `Error` if no node answers."""
        end_s = self.session.loop.time() + wait_s
        while True:
            left_s = max(0.0, end_s - self.session.loop.time())
            jobs = await self._ask(max_jobs, min(left_s, MAX_WAIT_S), timeout_s)
            if jobs or self.session.loop.time() >= end_s:
                return jobs

    async def take(self, max_jobs: int, *, timeout_s: float | None = None) -> list[Job[T]] | None:
        """Wait for jobs, also over an outage; return up to `max_jobs`, or None once the source is closed.

        Raises:
            Error: the channel was deleted, or the request is refused for good.
        """
        backoff = Backoff(rng=self.session.rng, ceiling_ms=LONGEST_PAUSE_MS)
        while not self._is_over():
            poll = self.session.loop.create_task(self._ask(max_jobs, POLL_S, timeout_s))
            self._polls.add(poll)
            try:
                await asyncio.wait({poll})
            finally:
                self._polls.discard(poll)
                poll.cancel()
            if poll.cancelled():
                continue
            error = poll.exception()
            if error is None:
                if jobs := poll.result():
                    return jobs
                continue
            if self._is_over():
                break
            if not _may_pass(error):
                raise error
            if not backoff.attempts:
                _log.warning("receiving from %s: %s; it is tried again", self.path, error)
            await asyncio.sleep(backoff.next_ms() / 1000)
        return None

    async def _ask(self, max_jobs: int, wait_s: float, timeout_s: float | None) -> list[Job[T]]:
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        places = await self.session.topic_map(self.topic)
        leaders = {url for number in places.numbers if (url := places.leader(number)) is not None}
        # The time is named, also where it is the channel's: it holds as this consumer counts it.
        asked = {"max": max_jobs, "wait_ms": round(wait_s * 1000), "timeout_ms": round(timeout_s * 1000)}
        answer = await self.session.call(
            "POST",
            f"{self.path}/receive",
            body=msgspec.json.encode(asked),
            headers={"Content-Type": "application/json", "Accept": JOBS_TYPE},
            among=sorted(leaders),
            timeout_s=self.session.timeout_s + wait_s,
            attempt_timeout_s=wait_s + CLIENT_ATTEMPT_S,
        )
        return jobs_of(
            answer.body,
            topic=self.topic,
            node=answer.headers.get("laminar-node", ""),
            # It may have been deleted and created again since this program opened it.
            channel_id=int(answer.headers.get(CHANNEL_HEADER.lower(), self.channel_id)),
            decode=self._decode,
            acks=self.acks,
            timeout_s=timeout_s,
        )

    async def still_held(self, jobs: Sequence[Job[T]]) -> list[Job[T]]:
        """Extend jobs that wait here; return those that this consumer still has."""
        said = await asyncio.gather(*(job.extend() for job in jobs), return_exceptions=True)
        return [job for job, failure in zip(jobs, said, strict=True) if failure is None]

    async def give_back(self, jobs: Sequence[Job[Any]]) -> None:
        """Release jobs that were not done. If that fails, they are given out again after their time."""
        if jobs and not self.session.closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELEASE_S):
                    await asyncio.gather(*(job.release() for job in jobs), return_exceptions=True)

    def _is_over(self) -> bool:
        return self.closed or self.session.closed

    def close(self) -> None:
        """End all waits: `take` returns None from now on. Idempotent."""
        self.closed = True
        for poll in self._polls:
            poll.cancel()


def _may_pass(error: BaseException) -> bool:
    """Return whether the same request may succeed later."""
    if isinstance(error, Overloaded):
        return error.retriable
    return isinstance(error, Unavailable | OutcomeUnknown) or (isinstance(error, Error) and error.retriable)
