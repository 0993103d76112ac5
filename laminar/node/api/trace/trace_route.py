"""The route that reads the trace: a search of `_trace`, a step at a time.

An event is shown to principals that may read its topic. If the topic was deleted since, or created again,
only principals with role admin on all names see the event: the name no longer tells whose records these were.
"""

from __future__ import annotations

from typing import Final

import msgspec

from laminar.http.api.documents.find import search as found_documents
from laminar.http.api.documents.find.search import MAX_FOUND, MAX_SHOWN_BYTES, MAX_TOKEN
from laminar.http.api.documents.find.trace import TraceEvent, TraceFound
from laminar.http.api.names import TRACE_TOPIC
from laminar.http.api.problems import Problem
from laminar.http.api.timestamps import parse_trace_id
from laminar.http.protocol.messages import Request, Response
from laminar.node.access.principals import Principal, principal_of
from laminar.node.api.common.query import integer
from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.find.search import SearchRoutes
from laminar.node.find.where import Where
from laminar.wire.delayed import parse_id
from laminar.wire.trace import KEY_HEADER, TraceRecord, delayed_key, event_key

_BY: Final = ("record", "trace_id", "key")


class _Shown(msgspec.Struct):
    """The fields that are needed of a record of `_trace`, as a search returns it."""

    value: str = ""


_shown = msgspec.json.Decoder(_Shown)
_record = msgspec.json.Decoder(TraceRecord)


class TraceRoute:
    """The handler of the route that reads the trace."""

    def __init__(self, services: ShardServices, topics: TopicLookup, search: SearchRoutes) -> None:
        self._services = services
        self._topics = topics
        self._search = search

    async def trace(self, request: Request) -> Response:
        """Answer GET /v1/trace with one step of a search for trace events."""
        query = request.query
        limit = integer(request, "limit", 100, minimum=1, maximum=MAX_FOUND)
        given = [name for name in _BY if name in query]
        if len(given) != 1:
            raise Problem(
                "invalid",
                "give one of record, trace_id and key",
                field=given[1] if given else "record",
                value=query[given[1]][:80] if given else None,
                outcome="not_applied",
            )
        after = query.get("after")
        if after is not None and len(after) > MAX_TOKEN:
            raise Problem("invalid", "this is no token of a search", field="after", value=after[:80])
        principal = principal_of(request)
        where = self._where(given[0], query[given[0]], principal)
        if TRACE_TOPIC not in self._services.view.topics():
            await self._services.refresh_view()
        if TRACE_TOPIC not in self._services.view.topics():
            nothing = found_documents.Searched(0, 0, 0)
            return Response.json(TraceFound([], nothing, found_documents.Left(0, 0), [], None))
        step = await self._search.step(
            TRACE_TOPIC, where, after=after, limit=limit, value_bytes=MAX_SHOWN_BYTES
        )
        read = [_read(each.document) for each in step.found()]
        events = [each for each in read if each is not None and self._may_see(principal, each)]
        events.sort(key=lambda each: (each.at, each.entry))
        rest = step.rest()
        return Response.json(
            TraceFound(list(map(_document, events)), rest.searched, rest.left, rest.not_searched, rest.after)
        )

    def _where(self, by: str, value: str, principal: Principal) -> Where:
        """Return the conditions that select the requested records of `_trace`.

        Raises 403, 404 or 422 `invalid`.
        """
        if by == "trace_id":
            return Where(trace_id=parse_trace_id(value, field="trace_id"))
        if by == "key":
            return Where(headers={KEY_HEADER: value.encode()})
        topic, *rest = value.split("/")
        if len(rest) == 2 and all(part.isascii() and part.isdecimal() and len(part) < 20 for part in rest):
            principal.require("read", topic)
            partition = self._topics.partition_record(topic, rest[0])
            return Where(key=event_key(partition.group, int(rest[1])).encode())
        try:
            (text,) = rest
            named = parse_id(text)
        except ValueError:
            raise Problem(
                "invalid",
                "a record is TOPIC/PARTITION/OFFSET, or a delayed one TOPIC/ID",
                field="record",
                value=value[:80],
                outcome="not_applied",
            ) from None
        principal.require("read", topic)
        partition = self._topics.partition_record(topic, str(named.partition))
        return Where(key=delayed_key(partition.group, named.number).encode())

    def _may_see(self, principal: Principal, event: TraceRecord) -> bool:
        partition = self._services.view.partition(event.topic, event.partition)
        if partition is None or partition.group.hex() != event.group:
            return principal.may("admin", "")
        return principal.may("read", event.topic)


def _read(document: bytes) -> TraceRecord | None:
    """Decode the event in a record of `_trace`; None if the record is not an event of a known form."""
    try:
        return _record.decode(_shown.decode(document).value)
    except msgspec.MsgspecError:
        return None


def _document(event: TraceRecord) -> TraceEvent:
    """Return the JSON document of an event, without its empty fields."""
    found = {name: value for name, value in msgspec.structs.asdict(event).items() if value not in (None, "")}
    return TraceEvent(**{"node": "", **found})
