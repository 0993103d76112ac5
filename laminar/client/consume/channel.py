"""A channel (a named queue over a topic) as its consumers see it: receive jobs, report their outcomes.

``channel = await topic.channel("billing")``. Any number of consumers may use a channel at the same time; each
job goes to one of them. `docs/channels.md` has the rules.
"""

from __future__ import annotations

import datetime
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import urlencode

import msgspec

from laminar.client.consume.job_source import POLL_S, JobSource
from laminar.client.consume.jobs import Job, reason_of
from laminar.client.consume.reader import start_parameter
from laminar.client.consume.worker import Worker
from laminar.client.descriptions import AsideInfo, ChannelInfo
from laminar.client.errors import ConfigError
from laminar.client.net.session import Session
from laminar.client.records import Settled
from laminar.wire.channels import MAX_NAMED, ChannelSettings

T = TypeVar("T")

Dead = Iterable[AsideInfo | str] | Literal["all"]

_PAGE = 1000
_CONTENT = {"Content-Type": "application/json"}


class Channel(Generic[T]):
    """A channel of a topic; made by ``await topic.channel(name)``. ``T`` is the type of the values.

    A *job* is a record that the channel has given to one consumer, for a limited time.
    """

    def __init__(
        self, session: Session, topic: str, path: str, info: ChannelInfo, *, decode: Callable[[bytes], T]
    ) -> None:
        self.name = info.channel
        self.topic = topic
        self.settings = dict(info.settings)
        timeout_ms = int(info.settings.get("timeout_ms", ChannelSettings().timeout_ms))
        self.source = JobSource(
            session, topic, path, decode=decode, timeout_s=timeout_ms / 1000, channel_id=info.id
        )
        self._session = session
        self._path = path

    def __repr__(self) -> str:
        return f"<Channel {self.name} of {self.topic}>"

    # -- jobs ----------------------------------------------------------------------------------

    async def receive_batch(
        self, max_jobs: int = 32, *, wait: float = POLL_S, timeout: float | None = None
    ) -> list[Job[T]]:
        """Return up to `max_jobs` jobs as soon as there is one; [] after `wait` seconds without one.

        No other consumer gets these jobs for `timeout` seconds; None means the channel's `timeout_ms`, as it
        was when this object was made.
        """
        return await self.source.batch(max_jobs, wait_s=wait, timeout_s=timeout)

    async def receive(
        self, max_jobs: int = 32, *, timeout: float | None = None
    ) -> AsyncGenerator[Job[T], None]:
        """Yield jobs as they come, until this object or the client is closed; an outage does not end it.

        Up to `max_jobs` jobs are received at a time, each for `timeout` seconds (None: the channel's time). A
        job that has waited here for half of its time is extended before it is yielded, and is left out if
        another consumer has it by then. When the loop ends, jobs that were not yielded are released.
        """
        jobs: deque[Job[T]] = deque()
        try:
            while (taken := await self.source.take(max_jobs, timeout_s=timeout)) is not None:
                jobs.extend(taken)
                while jobs and not self.source.closed:
                    if jobs[0].half_over:
                        jobs = deque(await self.source.still_held(jobs))
                    else:
                        yield jobs.popleft()
        finally:
            await self.source.give_back(jobs)

    async def work(
        self,
        handle: Callable[[Job[T]], Awaitable[object]],
        *,
        concurrency: int = 16,
        drain: float = 30.0,
    ) -> None:
        """Call `handle` with each job, up to `concurrency` at a time, until the channel is closed or SIGTERM.

        A job is acknowledged when its handler returns. If the handler raises, the job has failed for that
        reason, and is given out again after the channel's pause, or after the delay of a `Retry`. While a
        handler runs, its job is extended, so a handler may take any time.

        After SIGTERM (unless the program handles that itself) or a cancellation no more jobs are taken.
        Running handlers have `drain` seconds to return; then they are cancelled, and their jobs released.
        """
        await Worker(self.source, handle, concurrency=concurrency, drain_s=drain).run()

    async def settle(
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
        delay_ms = None if delay is None else round(delay * 1000)
        timeout_ms = None if timeout is None else round(timeout * 1000)
        lists: dict[str, list[Any]] = {
            "ack": list(ack),
            "nack": [{"token": each, "delay_ms": delay_ms, "reason": reason_of(reason)} for each in nack],
            "release": list(release),
            "extend": [{"token": each, "timeout_ms": timeout_ms} for each in extend],
        }
        done, late = 0, []
        for verb, items in lists.items():
            ended, missed = await self.source.acks.settle(items, verb)
            done += ended
            late += missed
        return Settled(done, tuple(late))

    def close(self) -> None:
        """End the loops of `receive` and `work` of this object; the channel itself stays. Idempotent."""
        self.source.close()

    # -- for people ----------------------------------------------------------------------------

    async def describe(self) -> ChannelInfo:
        """Return the channel's settings and progress. Raises `NotFound` if it was deleted."""
        return ChannelInfo.from_answer(await self._session.get_json(self._path))

    async def seek(
        self, to: str | datetime.datetime | Mapping[int, int], *, drop: bool = False
    ) -> dict[int, int]:
        """Move the channel to a position, from which records are given out (again); return its new offsets.

        `to` is ``"earliest"``, ``"latest"``, ``"-1h"``, a time, or offsets by partition. The result has the
        offset by partition. Records before it that are out or wait for another attempt are still given out
        again; with `drop` they are dropped. ``seek("latest", drop=True)`` empties the channel, but for dead
        records.
        """
        place: dict[str, Any]
        if isinstance(to, Mapping):
            place = {"positions": {str(partition): offset for partition, offset in to.items()}}
        else:
            place = {"at": start_parameter(to, now_ms=time.time_ns() // 1_000_000)}
        body = msgspec.json.encode({**place, "drop": drop})
        answer = await self._session.call("PUT", f"{self._path}/position", body=body, headers=_CONTENT)
        return {int(partition): int(offset) for partition, offset in answer.json()["positions"].items()}

    async def aside(
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
        return await self._listed("aside", limit, {"key": key, "tag": tag, "reason": reason})

    async def dead(
        self,
        *,
        key: str | None = None,
        tag: str | None = None,
        reason: str | None = None,
        limit: int | None = None,
    ) -> list[AsideInfo]:
        """Return the dead records (failed for good), up to `limit`; conditions and order as for `aside`."""
        return await self._listed("dead", limit, {"key": key, "tag": tag, "reason": reason})

    async def _listed(
        self, what: str, limit: int | None, wanted: Mapping[str, str | None]
    ) -> list[AsideInfo]:
        asked = {name: value for name, value in wanted.items() if value is not None}
        found: list[AsideInfo] = []
        after: str | None = ""
        while after is not None and (limit is None or len(found) < limit):
            size = _PAGE if limit is None else min(_PAGE, limit - len(found))
            query = urlencode({"limit": size, "after": after} | asked)
            page = await self._session.get_json(f"{self._path}/{what}?{query}")
            found += [AsideInfo.from_answer(each) for each in page["jobs"]]
            after = page.get("next")
        return found

    async def replay(self, dead: Dead) -> int:
        """Give dead records out again, with their attempts counted from 0; return how many were dead.

        `dead` are results of `Channel.dead`, tokens, or ``"all"``.
        """
        return await self._change_dead("replay", dead)

    async def drop(self, dead: Dead) -> int:
        """Drop dead records: they are never given out again. Return how many were dropped; see `replay`."""
        return await self._change_dead("drop", dead)

    async def _change_dead(self, what: str, dead: Dead) -> int:
        if dead == "all":
            return await self._post_dead({what: "all"})
        if isinstance(dead, str):
            raise ConfigError(
                f"{dead!r} is neither dead records nor 'all'", code="bad_dead", field="dead", value=dead
            )
        tokens = [each if isinstance(each, str) else each.token for each in dead]
        count = 0
        for start in range(0, len(tokens), MAX_NAMED):
            count += await self._post_dead({what: tokens[start : start + MAX_NAMED]})
        return count

    async def _post_dead(self, change: Mapping[str, Any]) -> int:
        body = msgspec.json.encode(change)
        answer = await self._session.call("POST", f"{self._path}/dead", body=body, headers=_CONTENT)
        return int(answer.json()["count"])
