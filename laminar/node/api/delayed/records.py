"""Routes of delayed records. Any node takes each request, and asks the leaders of partitions.

The id of a record names the partition that took it. After that partition is sealed, the record is in one of
the partitions that follow. They are asked one after the other, oldest first, so that a record on its way from
one to the next is not missed.
"""

from __future__ import annotations

import asyncio
import base64
from heapq import nsmallest

from laminar.http.api.documents import delayed as documents
from laminar.http.api.documents.delayed import MAX_BUCKETS
from laminar.http.api.parameters import LONGEST_MS, MAX_PAGE
from laminar.http.api.problems import Problem
from laminar.http.api.timestamps import LATEST_MS, format_time, parse_time
from laminar.http.protocol.messages import Request, Response
from laminar.node.api.common.json_body import json_body
from laminar.node.api.common.query import integer
from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.delayed.steps import (
    DelayedAnswer,
    DelayedList,
    DelayedListing,
    DelayedQuestion,
    DelayedSteps,
    Listed,
)
from laminar.node.delay.publisher import State
from laminar.node.partition.state.delayed_records import CANCELLED
from laminar.node.routes.lineage import descendants_of
from laminar.wire.delayed import DelayedId, id_of, parse_id
from membership.records import TopicRecord


class DelayedRoutes:
    """The handlers of the routes of delayed records."""

    def __init__(self, services: ShardServices, topics: TopicLookup, steps: DelayedSteps) -> None:
        self._services = services
        self._topics = topics
        self._steps = steps

    # -- one record ----------------------------------------------------------------------

    async def describe(self, request: Request, topic: str, delayed: str) -> Response:
        """Answer GET /v1/topics/{topic}/delayed/{delayed} with the state of a delayed record."""
        record, found = self._topics.record(topic), _id(delayed)
        answer = await self._ask(record, found, None)
        state = _known(found, answer, topic)
        described = documents.DelayedState(str(found), state)
        if answer.state == State.PENDING.value:
            described.deliver_at = format_time(answer.due_ms)
        return Response.json(described)

    async def cancel(self, request: Request, topic: str, delayed: str) -> Response:
        """Answer DELETE /v1/topics/{topic}/delayed/{delayed}: cancel a delayed record."""
        record, found = self._topics.record(topic), _id(delayed)
        answer = await self._ask(record, found, CANCELLED)
        if answer.state != State.PENDING.value:
            return Response.json(documents.DelayedState(str(found), _known(found, answer, topic)))
        return Response.json(documents.DelayedState(str(found), State.CANCELLED.value))

    async def change(self, request: Request, topic: str, delayed: str) -> Response:
        """Answer PATCH /v1/topics/{topic}/delayed/{delayed}: change its delivery time."""
        asked = json_body(request, documents.DelayedChange)
        record, found = self._topics.record(topic), _id(delayed)
        if asked.deliver_at == "now":
            due_ms = self._services.clock.wall_ms()
        else:
            due_ms = max(0, parse_time(asked.deliver_at, field="deliver_at"))
        answer = await self._ask(record, found, due_ms)
        changed = documents.DelayedState(str(found), _known(found, answer, topic))
        if answer.state == State.PENDING.value:
            changed.deliver_at = format_time(due_ms)
        return Response.json(changed)

    async def _ask(self, topic: TopicRecord, named: DelayedId, due_ms: int | None) -> DelayedAnswer:
        """Return the record's state from the partition that has the record, or had it last.

        With `due_ms` the record gets this delivery time first, or is cancelled.
        """
        there = set(topic.all_numbers)
        followers = descendants_of(topic, named.partition)
        if named.partition not in there and not followers:
            return DelayedAnswer(State.UNKNOWN.value)
        forgotten_ms = -1
        for number in [named.partition, *followers]:
            if number not in there:
                # It is reclaimed: pending records moved to the next partitions, cancellations are forgotten.
                forgotten_ms = named.due_ms
                continue
            answer = await self._steps.ask(
                DelayedQuestion(topic.name, number, named.number, named.due_ms, due_ms)
            )
            forgotten_ms = max(forgotten_ms, answer.forgotten_ms)
            if answer.state == State.ELSEWHERE.value and not descendants_of(topic, number):
                raise Problem(
                    "changing",
                    f"{topic.name}/{number} has ended, and this node does not know yet what follows it",
                    retry_after_ms=500,
                    outcome="not_applied",
                )
            if answer.state in _FINAL:
                break
        else:
            answer = DelayedAnswer(State.PUBLISHED.value)
        if answer.state == State.PUBLISHED.value and named.due_ms <= forgotten_ms:
            raise Problem(
                "delayed_record_ended",
                "this delayed record was published or cancelled; which of the two is no longer known",
                field="id",
                value=str(named),
                outcome="not_applied",
            )
        return answer

    # -- lists ---------------------------------------------------------------------------

    async def listing(self, request: Request, topic: str) -> Response:
        """Answer GET /v1/topics/{topic}/delayed with a page of pending records, or counts of them."""
        record, query = self._topics.record(topic), request.query
        limit = integer(request, "limit", 100, minimum=1, maximum=MAX_PAGE)
        bucket_ms = 0
        if "bucket_ms" in query:
            bucket_ms = integer(request, "bucket_ms", 0, minimum=1, maximum=LONGEST_MS)
        from_ms = parse_time(query["from"], field="from") if "from" in query else 0
        to_ms = parse_time(query["to"], field="to") if "to" in query else LATEST_MS
        after = (-1, -1)
        if "after" in query:
            when, _, named = query["after"].partition("_")
            after = (parse_time(when, field="after"), _id(named, field="after").number)
        key = query["key"].encode() if "key" in query else None
        answers = await asyncio.gather(
            *(
                self._steps.listing(
                    DelayedList(topic, number, from_ms, to_ms, after, limit + 1, key, bucket_ms)
                )
                for number in record.all_numbers
            )
        )
        if bucket_ms:
            return Response.json(buckets_of(answers, bucket_ms))
        # A record that is being sent to the next partition may be listed by both.
        found: dict[int, tuple[int, Listed]] = {}
        for number, answer in zip(record.all_numbers, answers, strict=True):
            found |= {each.number: (number, each) for each in answer.records}
        chosen = nsmallest(limit + 1, found.values(), key=lambda each: (each[1].due_ms, each[1].number))
        page = documents.DelayedPage([_document(number, each) for number, each in chosen[:limit]])
        if len(chosen) > limit:
            _, last_shown = chosen[limit - 1]
            page.next = f"{last_shown.due_ms}_{id_of(last_shown.number, last_shown.was_ms)}"
        return Response.json(page)


_FINAL = (State.PENDING.value, State.CANCELLED.value, State.PUBLISHED.value, State.UNKNOWN.value)


def _id(text: str, *, field: str = "id") -> DelayedId:
    try:
        return parse_id(text)
    except ValueError as error:
        raise Problem("invalid", str(error), field=field, value=text[:80], outcome="not_applied") from error


def _known(named: DelayedId, answer: DelayedAnswer, topic: str) -> str:
    """Return the state in an answer. Raises 404 `no_such_delayed_record`."""
    if answer.state == State.UNKNOWN.value:
        raise Problem(
            "no_such_delayed_record",
            f"topic {topic!r} has given no delayed record this id",
            field="id",
            value=str(named),
            outcome="not_applied",
        )
    return answer.state


def _document(partition: int, listed: Listed) -> documents.DelayedRecord:
    found = documents.DelayedRecord(
        id=str(id_of(listed.number, listed.was_ms)),
        partition=partition,
        deliver_at=format_time(listed.due_ms),
        value_bytes=listed.value_bytes,
    )
    if listed.key is not None:
        try:
            found.key = listed.key.decode()
        except UnicodeDecodeError:
            found.key_base64 = base64.b64encode(listed.key).decode()
    if listed.tag is not None:
        found.tag = listed.tag
    return found


def buckets_of(answers: list[DelayedListing], bucket_ms: int) -> documents.DelayedPage:
    """Add up the counts of all leaders, by span of time.

    Raises 422 `invalid` if too many spans have records.
    """
    found: dict[int, tuple[int, int]] = {}
    for answer in answers:
        for at, (count, size) in answer.buckets.items():
            before = found.get(at, (0, 0))
            found[at] = (before[0] + count, before[1] + size)
    if len(found) > MAX_BUCKETS:
        raise Problem(
            "invalid",
            f"records are pending in more than {MAX_BUCKETS:,} spans of this length: ask for longer ones, or "
            "give `from` and `to`",
            field="bucket_ms",
            value=bucket_ms,
            limit=-(-(max(found) - min(found)) // MAX_BUCKETS),
        )
    return documents.DelayedPage(
        buckets=[documents.DelayedBucket(format_time(at), *found[at]) for at in sorted(found)]
    )
