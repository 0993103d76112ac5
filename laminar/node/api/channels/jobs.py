"""Routes of a channel's consumers: receive records, acknowledge them, move the channel, list dead records.

Any node takes each request. For a receive it first asks the leaders of the partitions to wait until they have
records, which gives out none, and then takes records from the leaders that have some. So no record is given
out to a consumer that went away during the wait.
"""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from laminar.http.api.documents import jobs as documents
from laminar.http.api.parameters import MAX_PAGE, MAX_WAIT_MS
from laminar.http.api.problems import Problem
from laminar.http.api.timestamps import format_time, parse_time
from laminar.http.protocol.messages import Request, Response
from laminar.node.access.principals import principal_of
from laminar.node.api.channels.job_documents import documents_of
from laminar.node.api.channels.lookup import ChannelLookup
from laminar.node.api.channels.steps import (
    ASK_S,
    AsideAnswer,
    AsideRecord,
    AsideRequest,
    ChannelSteps,
    Given,
    PlaceRequest,
    ReceiveRequest,
    SettleRequest,
)
from laminar.node.api.channels.streams import JobStreams
from laminar.node.api.common.forwarding import requester_of
from laminar.node.api.common.json_body import json_body
from laminar.node.api.common.query import integer
from laminar.node.api.common.services import ShardServices
from laminar.node.channels.open_records.jobs import MAX_BYTES
from laminar.node.channels.open_records.search import Budget, Wanted
from laminar.node.channels.requests import Step
from laminar.wire.channels import (
    CHANNEL_HEADER,
    JOBS_TYPE,
    MAX_NAMED,
    STREAM_TYPE,
    Named,
    parse_token,
    token,
)
from membership.records import ChannelRecord, TopicRecord

FIRST_S: Final = 0.5
"""How long the first partition's leader may take to answer before the others are asked, too."""
PAUSE_S: Final = 0.05
MOST_PAUSE_S: Final = 0.5
"""The longest pause before partitions that answered at once, without records, are asked again.

The pause begins with `PAUSE_S` and doubles.
"""
ANSWER_S: Final = 1.0
"""How long a leader has to answer, in addition to the wait that it is asked for."""


class JobRoutes:
    """The handlers of the routes of consumers."""

    def __init__(self, services: ShardServices, channels: ChannelLookup, steps: ChannelSteps) -> None:
        self._services = services
        self._channels = channels
        self._steps = steps
        # The index of the partition that is asked first; it advances with each request, so all get their
        # turn.
        self._turn = 0
        self._releases: set[asyncio.Task[None]] = set()
        self._streams = JobStreams(services, channels, steps, self)

    # -- receive and settle --------------------------------------------------------------

    def receive(self, request: Request, topic: str, channel: str) -> Coroutine[Any, Any, Response]:
        """Answer POST /v1/topics/{topic}/channels/{channel}/receive with records that are given out.

        When the consumer's connection is closed, the request ends, and records taken for it are released.
        """
        request.ends_with_peer = True
        return self._received(request, topic, channel)

    async def _received(self, request: Request, topic: str, channel: str) -> Response:
        asked = json_body(request, documents.Receive)
        known = await self._channels.record(topic, channel)
        record = self._channels.topic(topic)
        streams = STREAM_TYPE in request.headers.get("accept", "")
        if streams:
            await self._streams.check(principal_of(request).name)
        elif asked.credit is not None:
            raise Problem(
                "invalid",
                f"only a stream has a credit: send the header Accept: {STREAM_TYPE}",
                field="credit",
                value=asked.credit,
                outcome="not_applied",
            )
        settled = None
        if asked.settle is not UNSET:
            settled = await self._settle(request, record, known, asked.settle)
        if streams:
            by = requester_of(request, self._services.node)
            return self._streams.response(topic, channel, known.id, asked, principal_of(request), by)
        given = await self.receive_from(record, known.id, asked)
        if JOBS_TYPE in request.headers.get("accept", ""):
            body = msgspec.msgpack.encode(
                [[[each.partition, each.floor, each.runs, each.frames] for each in given], settled]
            )
            return Response(200, [("Content-Type", JOBS_TYPE), (CHANNEL_HEADER, f"{known.id}")], body)
        try:
            jobs = await self._services.off_loop(documents_of, given)
        except asyncio.CancelledError:
            self._release(topic, known.id, given)
            raise
        answer = documents.Received(jobs)
        if settled is not None:
            answer.settled = settled
        return Response.json(answer)

    async def receive_from(self, topic: TopicRecord, channel: int, asked: documents.Receive) -> list[Given]:
        """Take records of a channel from the partitions' leaders; each call begins with the next partition.

        Returns the records given out; an empty list if no leader has any within the request's wait.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(asked.wait_ms, MAX_WAIT_MS) / 1000
        numbers = list(topic.numbers)
        self._turn = (self._turn + 1) % len(numbers)
        numbers = numbers[self._turn :] + numbers[: self._turn]
        # The first partition mostly has records, so it is asked for them at once, without a wait. Its leader
        # may be gone; records that it gives out after others have answered are released.
        first = numbers[:1] if len(numbers) > 1 else numbers
        is_all = len(numbers) == 1
        asking_first = self._begin(topic.name, first, channel, asked, is_all=is_all)
        asking: asyncio.Task[list[Given]] | None = asking_first
        pause_s = PAUSE_S
        try:
            await asyncio.wait({asking_first}, timeout=FIRST_S if len(numbers) > 1 else None)
            while True:
                if asking is not None and asking.done():
                    answered, asking = asking, None
                    if given := answered.result():
                        return given
                began_s = loop.time()
                others = numbers if asking is None else numbers[1:]
                wait_s = min(max(0.0, deadline - began_s), ASK_S)
                ready = await self._ready(topic.name, others, channel, wait_s, asking)
                if asking is not None and asking.done():
                    continue
                given = await self._take(topic.name, ready, channel, asked)
                if given or loop.time() >= deadline:
                    return given
                if not ready and loop.time() - began_s < pause_s:
                    rest_s = min(pause_s, max(0.0, deadline - loop.time()))
                    if asking is None:
                        await asyncio.sleep(rest_s)
                    else:
                        await asyncio.wait({asking}, timeout=rest_s)
                    pause_s = min(2 * pause_s, MOST_PAUSE_S)
        finally:
            if asking is not None:
                asking.add_done_callback(partial(self._release_of, topic.name, channel))

    async def _take(
        self,
        topic: str,
        numbers: Sequence[int],
        channel: int,
        asked: documents.Receive,
        *,
        is_all: bool = True,
    ) -> list[Given]:
        """Take records from one partition after the other, until there are as many as asked for.

        `is_all` False says that the caller asks other partitions later, so that one that fails is only
        skipped. If the request is cancelled, the taking goes on in the background, and its records are
        released.
        """
        taking = self._begin(topic, numbers, channel, asked, is_all=is_all)
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(partial(self._release_of, topic, channel))
            raise

    def _begin(
        self,
        topic: str,
        numbers: Sequence[int],
        channel: int,
        asked: documents.Receive,
        *,
        is_all: bool,
    ) -> asyncio.Task[list[Given]]:
        return asyncio.create_task(self._taken(topic, numbers, channel, asked, is_all=is_all))

    def _release_of(self, topic: str, channel: int, taking: asyncio.Task[list[Given]]) -> None:
        if not taking.cancelled() and taking.exception() is None:
            self._release(topic, channel, taking.result())

    def _release(self, topic: str, channel: int, given: Iterable[Given]) -> None:
        """Release, in the background, the records that were taken for a consumer that is gone."""
        for each in given:
            self.release(
                topic,
                channel,
                [Named(each.partition, run.first, run.end, run.delivery) for run in each.runs],
            )

    def release(self, topic: str, channel: int, named: Sequence[Named]) -> None:
        """Release, in the background, records of one partition: they go to other consumers."""
        if not named:
            return
        steps = [Step("release", each) for each in named]
        task = asyncio.create_task(
            self._settled_quietly(SettleRequest(topic, named[0].partition, channel, steps))
        )
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _settled_quietly(self, request: SettleRequest) -> None:
        with suppress(Problem):  # if it fails, the deliveries expire
            await self._steps.settle(request)

    async def _taken(
        self,
        topic: str,
        numbers: Sequence[int],
        channel: int,
        asked: documents.Receive,
        *,
        is_all: bool,
    ) -> list[Given]:
        found: list[Given] = []
        left, size = asked.max, 0
        for number in numbers:
            request = ReceiveRequest(topic, number, channel, left, 0, asked.timeout_ms)
            try:
                given = await self._steps.receive(request)
            except Problem as problem:
                # The other partitions are asked without this one, which may not have the channel yet.
                if found or problem.code == "being_created":
                    continue
                if problem.outcome == "not_applied" and not (is_all and number == numbers[-1]):
                    continue
                raise
            if given is not None and given.runs:
                found.append(given)
                left -= sum(run.length for run in given.runs)
                size += sum(map(len, given.frames))
            if left <= 0 or size >= MAX_BYTES:
                break  # the whole answer is in memory, as JSON several times
        return found

    async def _ready(
        self,
        topic: str,
        numbers: Sequence[int],
        channel: int,
        wait_s: float,
        asking: asyncio.Task[list[Given]] | None,
    ) -> list[int]:
        """Wait until a partition has records to give out; return all that have some, none after `wait_s`.

        It also returns once `asking` (the request for records of the first partition) is done.

        Raises:
            Problem: the first one, if no leader answers.
        """
        wait_ms = math.ceil(wait_s * 1000)  # rounded down, a rest below 1 ms would be repeated endlessly
        tasks = {
            asyncio.create_task(
                self._steps.receive(ReceiveRequest(topic, number, channel, 0, wait_ms))
            ): number
            for number in numbers
        }
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s + ANSWER_S
        ready: list[int] = []
        problems: list[Problem] = []
        pending = set(tasks)
        also: set[asyncio.Task[Any]] = set() if asking is None else {asking}
        try:
            while pending and not ready and (left_s := deadline - loop.time()) > 0:
                if asking is not None and asking.done():
                    break
                done, _ = await asyncio.wait(
                    pending | also, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                pending -= done
                for task in done - also:
                    try:
                        if task.result() is not None:
                            ready.append(tasks[task])
                    except Problem as problem:
                        if problem.code != "being_created":
                            problems.append(problem)
        finally:
            for task in pending:
                task.cancel()
        if len(problems) == len(tasks) and asking is None:
            raise problems[0]
        return [number for number in numbers if number in ready]

    async def settle(self, request: Request, topic: str, channel: str) -> Response:
        """Answer POST /v1/topics/{topic}/channels/{channel}/acks: take the outcomes of jobs."""
        asked = json_body(request, documents.Acks)
        known = await self._channels.record(topic, channel)
        record = self._channels.topic(topic)
        return Response.json(await self._settle(request, record, known, asked))

    async def _settle(
        self, request: Request, topic: TopicRecord, known: ChannelRecord, asked: documents.Acks
    ) -> documents.Settled:
        channel = known.id
        steps = _steps(asked)
        _check_partitions(topic, [step.named for step in steps], "tokens")
        by_partition: dict[int, list[Step]] = {}
        for step in steps:
            by_partition.setdefault(step.named.partition, []).append(step)
        answers = await asyncio.gather(
            *(
                self._steps.settle(SettleRequest(topic.name, number, channel, each))
                for number, each in by_partition.items()
            ),
            return_exceptions=True,
        )
        done, late = 0, []
        failure: BaseException | None = None
        for answer in answers:
            if isinstance(answer, BaseException):
                failure = failure or answer
                continue
            done += answer.done
            late += [_named_text(named) for named in answer.late]
        if failure is not None:
            raise failure
        return documents.Settled(done, late)

    # -- for people ----------------------------------------------------------------------

    async def seek(self, request: Request, topic: str, channel: str) -> Response:
        """Answer PUT /v1/topics/{topic}/channels/{channel}/position: move the channel."""
        asked = json_body(request, documents.Position)
        known = await self._channels.record(topic, channel)
        record = self._channels.topic(topic)
        places: dict[int, int | str] = {}
        if asked.at is not UNSET and asked.positions is UNSET:
            place = _place(asked.at)
            places = dict.fromkeys(record.numbers, place)
        elif asked.positions is not UNSET and asked.at is UNSET:
            places = {_partition_of(record, name): place for name, place in asked.positions.items()}
        else:
            raise Problem("invalid", "give either a place or positions", field="at", outcome="not_applied")
        offsets = await asyncio.gather(
            *(
                self._steps.seek(PlaceRequest(topic, number, known.id, place, asked.drop))
                for number, place in places.items()
            )
        )
        found = {str(number): offset for number, offset in zip(places, offsets, strict=True)}
        return Response.json(documents.Positioned(found))

    async def aside(self, request: Request, topic: str, channel: str) -> Response:
        """Answer GET /v1/topics/{topic}/channels/{channel}/aside: records that wait for another attempt."""
        return await self._listed(request, topic, channel, "aside")

    async def dead(self, request: Request, topic: str, channel: str) -> Response:
        """Answer GET /v1/topics/{topic}/channels/{channel}/dead: records that failed too often."""
        return await self._listed(request, topic, channel, "dead")

    async def _listed(self, request: Request, topic: str, channel: str, what: str) -> Response:
        """Answer with a page of records that are aside or dead (`what`), one partition after the other.

        The page ends when it has as many records as asked for, or the budget for reads is used up.
        """
        limit = integer(request, "limit", 100, minimum=1, maximum=MAX_PAGE)
        query = request.query
        key = query["key"].encode() if "key" in query else None
        wanted = Wanted(key, query.get("tag"), query.get("reason"))
        known = await self._channels.record(topic, channel)
        first, offset = _after(query.get("after", ""))
        numbers = [number for number in self._channels.topic(topic).numbers if number >= first]
        begin = {number: offset if number == first else 0 for number in numbers}
        # Most partitions have none. First all are asked at once which have some, then these one after the
        # other.
        counts = await asyncio.gather(
            *(
                self._steps.aside(
                    AsideRequest(topic, number, known.id, what, after=begin[number], wanted=wanted)
                )
                for number in numbers
            )
        )
        page, budget = documents.AsidePage([]), Budget(limit)
        for number in [number for number, answer in zip(numbers, counts, strict=True) if answer.count]:
            if budget.is_spent:
                page.next = f"{number}:{begin[number]}"
                break
            asked = AsideRequest(
                topic, number, known.id, what, None, begin[number], budget.listed, wanted, budget
            )
            answer = await self._steps.aside(asked)
            if answer.left is None:
                answer = _as_of_older(answer, asked)
            page.jobs += map(_aside_job, answer.records)
            budget = answer.left or budget
            if answer.next is not None:
                page.next = f"{number}:{answer.next}"
                break
        return Response.json(page)

    async def settle_dead(self, request: Request, topic: str, channel: str) -> Response:
        """Answer POST /v1/topics/{topic}/channels/{channel}/dead: replay or drop dead records."""
        asked = json_body(request, documents.DeadChange)
        known = await self._channels.record(topic, channel)
        record = self._channels.topic(topic)
        if asked.replay is not UNSET and asked.drop is UNSET:
            field, what, chosen = "replay", "retry", asked.replay
        elif asked.drop is not UNSET and asked.replay is UNSET:
            field, what, chosen = "drop", "drop", asked.drop
        else:
            raise Problem("invalid", "give either replay or drop", field="replay", outcome="not_applied")
        if isinstance(chosen, str):
            if chosen != "all":
                raise Problem(
                    "invalid", 'give a list of tokens, or "all"', field=field, value=chosen, limit="all"
                )
            named: dict[int, list[int] | None] = dict.fromkeys(record.numbers)
        else:
            named = {}
            parsed = _parsed(chosen, field)
            _check_partitions(record, parsed, field)
            for each in parsed:
                named.setdefault(each.partition, [])
                offsets = named[each.partition]
                assert offsets is not None
                offsets += range(each.first, min(each.end, each.first + documents.MAX_NAMED_RECORDS))
        answers = await asyncio.gather(
            *(
                self._steps.aside(AsideRequest(topic, number, known.id, what, offsets))
                for number, offsets in named.items()
                if number in set(record.numbers)
            )
        )
        return Response.json(documents.DeadChanged(sum(answer.count for answer in answers)))


# -- lists ---------------------------------------------------------------------------------------


def _as_of_older(answer: AsideAnswer, asked: AsideRequest) -> AsideAnswer:
    """Return the answer of an older program, which cannot search or read records, in today's form.

    Raises:
        Problem: 503 `not_enabled` if the request searches for something.
    """
    budget, listed = asked.budget, answer.records
    assert budget is not None
    if asked.wanted != Wanted():
        raise Problem(
            "not_enabled",
            f"the leader of partition {asked.partition} runs a program that cannot search yet",
            outcome="not_applied",
        )
    more = answer.count > len(listed)
    return AsideAnswer(
        answer.count,
        [replace(each, is_read=False) for each in listed],
        listed[-1].offset + 1 if more else None,
        replace(budget, listed=budget.listed - len(listed)),
    )


def _aside_job(record: AsideRecord) -> documents.AsideJob:
    found = documents.AsideJob(
        partition=record.partition,
        offset=record.offset,
        token=token(record.partition, record.offset, 0),
        attempts=record.attempts,
        at=None if record.waits_for_key else format_time(record.due_ms),
        waits_for_key=record.waits_for_key,
        reason=record.reason,
    )
    if record.key is not None:
        try:
            found.key = record.key.decode()
        except UnicodeDecodeError:
            found.key_base64 = base64.b64encode(record.key).decode()
    if record.tag is not None:
        found.tag = record.tag
    if not record.is_read:
        found.unreadable = True
    return found


# -- tokens and places ---------------------------------------------------------------------------


def _parsed(texts: Iterable[str], field: str) -> list[Named]:
    found: list[Named] = []
    for place, text in enumerate(texts):
        try:
            found.append(parse_token(text))
        except ValueError as error:
            raise Problem(
                "invalid", str(error), field=f"{field}[{place}]", value=text[:80], outcome="not_applied"
            ) from error
    return found


def _check_partitions(topic: TopicRecord, named: Iterable[Named], field: str) -> None:
    """Refuse tokens of partitions that the topic never had. Raises 422 `invalid`."""
    known = set(topic.all_numbers)
    wrong = next((each.partition for each in named if each.partition not in known), None)
    if wrong is not None:
        raise Problem(
            "invalid",
            f"topic {topic.name!r} has no partition {wrong}, which a token names",
            field=field,
            value=wrong,
            outcome="not_applied",
        )


def _steps(asked: documents.Acks) -> list[Step]:
    """Return the steps (ack, release, nack, extend) of a request, one for each token.

    Raises 422 `invalid`.
    """
    steps: list[Step] = [Step("ack", named) for named in _parsed(asked.ack, "ack")]
    steps += [Step("release", named) for named in _parsed(asked.release, "release")]
    steps += [
        Step("nack", named, delay_ms=item.delay_ms, reason=item.reason)
        for item, named in zip(asked.nack, _parsed([each.token for each in asked.nack], "nack"), strict=True)
    ]
    steps += [
        Step("extend", named, timeout_ms=item.timeout_ms)
        for item, named in zip(
            asked.extend, _parsed([each.token for each in asked.extend], "extend"), strict=True
        )
    ]
    if len(steps) > MAX_NAMED:
        raise Problem(
            "invalid",
            f"a request may have {MAX_NAMED:,} tokens at most",
            field="tokens",
            value=len(steps),
            limit=MAX_NAMED,
            outcome="not_applied",
        )
    return steps


def _named_text(named: Named) -> str:
    text = token(named.partition, named.first, named.delivery)
    if named.end == named.first + 1:
        return text
    return f"{named.partition}:{named.first}-{named.end - 1}:{named.delivery}"


def _partition_of(topic: TopicRecord, name: str) -> int:
    if not name.isdecimal() or int(name) not in set(topic.numbers):
        raise Problem(
            "invalid", f"topic {topic.name!r} has no partition {name[:20]!r}", field="positions", value=name
        )
    return int(name)


def _place(at: str) -> str:
    """Return ``earliest``, ``latest``, or a time in ms as text. Raises 422 `invalid`."""
    if at in ("earliest", "latest"):
        return at
    return str(parse_time(at, field="at"))


def _after(text: str) -> tuple[int, int]:
    if not text:
        return 0, 0
    number, _, offset = text.partition(":")
    if not (number.isdecimal() and offset.isdecimal() and len(text) < 40):
        raise Problem("invalid", "after must be `next` of the previous page", field="after", value=text[:80])
    return int(number), int(offset)
