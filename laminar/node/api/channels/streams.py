"""Streams of jobs: an endless answer that gives records to a consumer, a bounded number of them at a time.

A stream sends jobs (records that are given out) as server-sent events while its connection is open. Its
*credit* is the most jobs that may be out (given out, not over). A job that is acknowledged, failed, released
or expired, as the partition's leader says, makes room for another. The node that serves the stream remembers
the jobs it sent, and asks the leaders which are over, so a job may be acknowledged through any node. The
leaders' answers are committed: no change of leaders undoes the end of a delivery, so no credit is given
twice.

1. *No job is taken without credit for it*, and none while the consumer does not read: the writer of the
   connection asks for the next event when the previous one is sent.
2. *A stream ends with its connection*, and its jobs that are out are released at once.
3. *A stream ends when the credential of its principal expires or is revoked*: a stream may last for days.
4. *A consumer that lets all its jobs expire counts as stuck*, and its stream ends: else it would use up the
   attempts of job after job. A consumer that lets a few jobs expire keeps its stream.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Final, Protocol

from laminar.http.api.documents import jobs as documents
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Response
from laminar.node.access.principals import ANONYMOUS, Principal, unauthorized
from laminar.node.api.channels.job_documents import HEARTBEAT, events_of, problem_event
from laminar.node.api.channels.lookup import ChannelLookup, no_such_channel
from laminar.node.api.channels.steps import ASK_S, ChannelSteps, EndedAnswer, EndedRequest, Given
from laminar.node.api.common.forwarding import ask_for
from laminar.node.api.common.services import ShardServices, check_enabled
from laminar.node.partition.state.channel_changes import runs_of
from laminar.node.trace.ring import Who
from laminar.wire.channels import CHANNEL_HEADER, STREAM_TYPE, Named
from membership.records import TopicRecord

HEARTBEAT_S: Final = 10.0
"""The longest silence of a stream: then it sends a comment, so that TCP finds a peer that is gone."""
PAUSE_S: Final = 0.5
"""The pause after a leader could not be asked."""
LATE_ROUNDS: Final = 3
"""A stream ends when this many times its most jobs at a time have expired and none ended otherwise."""
SHARE: Final = 4
"""The most streams that a principal may have, as a multiple of the free room: 4 means four fifths of all."""
DEFAULT_CREDIT: Final = 100
STREAMS_SINCE: Final = 5
"""The code version at which all leaders can be asked which deliveries are over."""


class Jobs(Protocol):
    """The functions of `JobRoutes` that a stream uses: receive and release jobs."""

    async def receive_from(self, topic: TopicRecord, channel: int, asked: documents.Receive) -> list[Given]:
        """Return records that the partitions' leaders give out; an empty list if none has any in time.

        If the call is cancelled, records that it has taken are released.
        """
        raise NotImplementedError

    def release(self, topic: str, channel: int, named: Sequence[Named]) -> None:
        """Release, in the background, records of one partition: they go to other consumers."""


class Held:
    """The jobs of a stream that are out, by partition and offset, with the numbers of their deliveries."""

    def __init__(self, credit: int) -> None:
        self._credit = credit
        self._out: dict[int, dict[int, int]] = {}
        # The number of jobs that expired since one ended otherwise, and the most jobs out at a time since
        # then.
        self._late = 0
        self._most = 0

    def __len__(self) -> int:
        return sum(map(len, self._out.values()))

    @property
    def free(self) -> int:
        """The number of further jobs that the consumer may have."""
        return self._credit - len(self)

    @property
    def stands_still(self) -> bool:
        """Whether the consumer seems stuck: it has let job after job expire."""
        return self._late > 0 and self._late >= LATE_ROUNDS * self._most

    def give(self, given: Given) -> None:
        """Add jobs that were given out to the consumer, so that they count against its credit."""
        out = self._out.setdefault(given.partition, {})
        late = set(given.late)
        for run in given.runs:
            for offset in range(run.first, run.end):
                # A job that comes again: its previous delivery had ended before this stream learnt of it.
                if offset in out and offset in late:
                    self._late += 1
                elif offset in out:
                    self._late = self._most = 0
                out[offset] = run.delivery
        self._most = max(self._most, len(self))

    def end(self, partition: int, answer: EndedAnswer) -> int:
        """Remove the deliveries that a leader's answer names as over; return the number of jobs removed."""
        out = self._out.get(partition, {})
        found = 0
        for named in answer.ended:
            for offset in range(named.first, named.end):
                if out.get(offset) == named.delivery:
                    del out[offset]
                    found += 1
        self._late += answer.late
        if found > answer.late:
            self._late, self._most = 0, len(self)
        return found

    def keep(self, partitions: Sequence[int]) -> None:
        """Forget the jobs of partitions that are not in `partitions`.

        Those were reclaimed with their records.
        """
        for number in self._out.keys() - set(partitions):
            del self._out[number]

    def named(self) -> dict[int, list[Named]]:
        """Return the jobs that are out, by partition, as ranges of offsets of one delivery each."""
        found: dict[int, list[Named]] = {}
        for number, out in self._out.items():
            by_delivery: dict[int, list[int]] = {}
            for offset, delivery in out.items():
                by_delivery.setdefault(delivery, []).append(offset)
            ranges = [
                Named(number, first, first + count, delivery)
                for delivery, offsets in by_delivery.items()
                for first, count in runs_of(sorted(offsets))
            ]
            if ranges:
                found[number] = ranges
        return found


class JobStreams:
    """The streams of jobs that one shard serves, and the limits on their number."""

    def __init__(
        self, services: ShardServices, channels: ChannelLookup, steps: ChannelSteps, jobs: Jobs
    ) -> None:
        self._services = services
        self._channels = channels
        self._steps = steps
        self._jobs = jobs
        self.open = 0
        self._open_of: Counter[str] = Counter()

    async def check(self, principal: str) -> None:
        """Refuse a stream beyond the limits, or while not all nodes support streams.

        One principal may have four fifths of all streams, so that there is room for others.

        Raises:
            Problem: 429 `quota`; 503 `not_enabled`.
        """
        limit = self._services.settings.max_job_streams
        own = self._open_of[principal] if principal != ANONYMOUS else 0
        if self.open >= limit or own >= SHARE * (limit - self.open):
            of_these = f", {own} of them of {principal!r}" if own else ""
            raise Problem(
                "quota",
                f"this process of the node serves {self.open} streams of jobs{of_these}",
                field="max_job_streams",
                value=self.open + 1,
                limit=limit,
                hint="Ask another node, or end a stream that is not used any more.",
                outcome="not_applied",
            )
        await check_enabled(self._services, STREAMS_SINCE, "a stream of jobs")

    def response(
        self,
        topic: str,
        channel: str,
        channel_id: int,
        asked: documents.Receive,
        principal: Principal,
        who: Who,
    ) -> Response:
        """Return the answer of a stream for requester `who`.

        Nothing is received before the answer is sent.
        """
        headers = [
            ("Content-Type", STREAM_TYPE),
            ("Cache-Control", "no-store"),
            (CHANNEL_HEADER, f"{channel_id}"),
        ]
        return Response(
            200, headers, self._events(topic, channel, channel_id, asked, principal, who), endless=True
        )

    async def _events(
        self,
        topic: str,
        channel: str,
        channel_id: int,
        asked: documents.Receive,
        principal: Principal,
        who: Who,
    ) -> AsyncIterator[bytes]:
        """Yield the events of a stream until its connection is closed; the last event may be a problem."""
        ask_for(who)  # the task that sends the answer is not the one of the request
        try:
            await self.check(principal.name)  # again: others may have begun since
        except Problem as problem:
            yield problem_event(problem)
            return
        self.open += 1
        self._open_of[principal.name] += 1
        held = Held(asked.credit or DEFAULT_CREDIT)
        # A number by which every leader knows this stream.
        number = self._services.rng.getrandbits(63)
        loop = asyncio.get_running_loop()
        said_s = loop.time()
        try:
            while True:
                credentials, now_ms = self._services.view.credentials, self._services.clock.wall_ms()
                if not principal.stands(credentials, now_ms=now_ms):
                    yield problem_event(unauthorized("the token of this stream was revoked, or has expired"))
                    return
                given: list[Given] = []
                try:
                    known = await self._channels.record(topic, channel)
                    if known.id != channel_id:
                        raise no_such_channel(topic, channel)
                    record = self._channels.topic(topic)
                    held.keep(record.all_numbers)
                    if held.free > 0:
                        more = documents.Receive(
                            max=held.free, wait_ms=round(1000 * ASK_S), timeout_ms=asked.timeout_ms
                        )
                        given = await self._jobs.receive_from(record, channel_id, more)
                    else:
                        await self._until_one_ends(topic, channel_id, number, held)
                except Problem as problem:
                    if problem.status < 500 and not problem.retriable:
                        yield problem_event(problem)
                        return
                    # Records that were given out in a lost answer come again when their delivery expires.
                    await asyncio.sleep(PAUSE_S)
                for each in given:
                    held.give(each)
                if held.stands_still:
                    yield problem_event(_stands_still(len(held)))
                    return
                if given:
                    for event in await self._services.off_loop(events_of, given):
                        yield event
                        said_s = loop.time()
                elif loop.time() - said_s >= HEARTBEAT_S:
                    yield HEARTBEAT
                    said_s = loop.time()
        finally:
            self.open -= 1
            self._open_of[principal.name] -= 1
            if not self._open_of[principal.name]:
                del self._open_of[principal.name]
            for named in held.named().values():
                self._jobs.release(topic, channel_id, named)

    async def _until_one_ends(self, topic: str, channel: int, stream: int, held: Held) -> None:
        """Wait, up to `ASK_S`, until a leader says that deliveries are over, and remove these from `held`.

        Raises:
            Problem: the first one, if no leader could be asked.
        """
        wait_ms = round(1000 * ASK_S)
        asked = {
            asyncio.create_task(
                self._steps.ended(EndedRequest(topic, number, channel, stream, named, wait_ms))
            ): number
            for number, named in held.named().items()
        }
        pending = set(asked)
        ended = 0
        problems: list[Problem] = []
        try:
            while pending and not ended:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    try:
                        ended += held.end(asked[task], task.result())
                    except Problem as problem:
                        problems.append(problem)
        finally:
            for task in pending:
                task.cancel()
        if problems and len(problems) == len(asked):
            raise problems[0]


def _stands_still(out: int) -> Problem:
    return Problem(
        "request_timeout",
        "the consumer of this stream let job after job expire: the stream ends, other consumers get its jobs",
        field="credit",
        value=out,
        hint="Acknowledge jobs in time, extend them, or ask for fewer.",
    )
