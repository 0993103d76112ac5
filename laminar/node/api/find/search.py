"""The route that searches a topic. Any node takes each request, and asks the shards that have replicas.

A request is one step of a search: it searches for a while, and answers with the records that it found and a
token with which the next request goes on, at any node. No state is kept between two requests, so a client
ends a search by not asking again.
"""

from __future__ import annotations

from collections.abc import Sequence

from laminar.http.api.documents.find import search as documents
from laminar.http.protocol.messages import Request, Response
from laminar.node.api.common.json_body import json_body
from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.find.asked import places_of, where_of
from laminar.node.api.find.places import Places, begin, next_number, parse, query_hash, refuse_recreated
from laminar.node.api.find.step import MOST_ANSWER_BYTES, Step
from laminar.node.api.find.steps import Place, SearchSteps
from laminar.node.find.examine import Wanted
from laminar.node.find.scan import Span
from laminar.node.find.where import Where
from laminar.wire.key_route import logical_of_key
from membership.records import TopicRecord


class SearchRoutes:
    """The handler of the route that searches a topic."""

    def __init__(self, services: ShardServices, topics: TopicLookup, steps: SearchSteps) -> None:
        self._services = services
        self._topics = topics
        self._steps = steps

    async def search(self, request: Request, topic: str) -> Response:
        """Answer POST /v1/topics/{topic}/search with the records that one step of the search found."""
        asked = json_body(request, documents.Search)
        record = self._topics.record(topic)
        where = where_of(asked.where)
        first, end = places_of(asked, record)
        query = query_hash(
            topic, asked.where, asked.partitions, asked.from_, asked.to, asked.order, asked.follow
        )
        if asked.after is None:
            places = begin(
                query,
                record,
                [
                    self._topics.partition_record(topic, str(number))
                    for number in self._numbers(asked, record, where)
                ],
            )
        else:
            places = parse(asked.after, query)
            record = await self._checked(places, record)
        wanted = Wanted(where, asked.order == "newest", asked.limit, asked.value_bytes, MOST_ANSWER_BYTES)
        step = Step(self._services, self._steps, record, places, wanted, first, end)
        if asked.follow and asked.partitions is None:
            step.add_new_partitions()
        await step.run(wait_s=asked.wait_ms / 1000 if asked.follow else 0.0)
        return step.answer()

    async def step(
        self, topic: str, where: Where, *, after: str | None, limit: int, value_bytes: int
    ) -> Step:
        """Carry out one step of a search of a whole topic, oldest records first, for another route.

        Returns the finished step, which has the records found and the token for the next step.

        Raises:
            Problem: 404 if there is no such topic; 422 `invalid` if `after` is the token of another search.
        """
        record = self._topics.record(topic)
        query = query_hash(topic, where)
        if after is None:
            numbers = self._own_first(list(record.numbers), record, where)
            places = begin(
                query, record, [self._topics.partition_record(topic, str(number)) for number in numbers]
            )
        else:
            places = parse(after, query)
            record = await self._checked(places, record)
        wanted = Wanted(where, False, limit, value_bytes, MOST_ANSWER_BYTES)
        step = Step(self._services, self._steps, record, places, wanted, Place("earliest"), Place("latest"))
        await step.run(wait_s=0.0)
        return step

    def _numbers(self, asked: documents.Search, record: TopicRecord, where: Where) -> Sequence[int]:
        """Return the numbers of the partitions to search; the partition of the wanted key comes first."""
        numbers = list(record.numbers)
        if asked.partitions is not None:
            for number in asked.partitions:
                self._topics.partition_record(record.name, str(number))
            return sorted(set(asked.partitions))
        return self._own_first(numbers, record, where)

    def _own_first(self, numbers: list[int], record: TopicRecord, where: Where) -> list[int]:
        """Return these partitions with the one first to which the route assigns the wanted key."""
        if where.key is not None:
            own = self._topics.route(record).partition_of(logical_of_key(where.key))
            numbers.sort(key=lambda number: number != own)
        return numbers

    async def _checked(self, places: Places, record: TopicRecord) -> TopicRecord:
        """Return the topic's record, if the token is of this topic and not of an earlier one of this name."""
        for is_new in (False, True):
            if is_new:
                await self._services.refresh_view()
                record = self._topics.record(record.name)
            if all(self._fits(span, record) for span in places.spans) and places.newest <= next_number(
                record
            ):
                return record
        refuse_recreated(record.name)

    def _fits(self, span: Span, record: TopicRecord) -> bool:
        found = self._services.view.partition(record.name, span.number)
        return span.number < next_number(record) if found is None else found.group == span.group
