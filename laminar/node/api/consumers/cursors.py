"""Routes of cursors: a consumer's named positions in the partitions of a topic, and their lag.

A cursor's position in a partition is stored in the log of that partition. So a request for several partitions
is carried out by several leaders, each of which compares and sets the position in its own. If a change fails
in one partition, the error lists the partitions in which it was made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from msgspec import UNSET

from laminar.http.api.documents import cursors as documents
from laminar.http.api.documents.cursors import CursorChange
from laminar.http.api.parameters import MAX_PAGE, OFFSET_LIMIT
from laminar.http.api.problems import Problem
from laminar.http.api.timestamps import format_time
from laminar.http.protocol.messages import Request, Response
from laminar.node.access.principals import owner_of
from laminar.node.api.common.json_body import json_body
from laminar.node.api.common.query import integer, next_link
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.consumers.cursor_places import CursorPlaces
from laminar.node.api.consumers.cursor_steps import Bounds, CursorRequest, CursorState, CursorSteps
from laminar.node.partition.cursor_commands import REWIND, is_rewind
from laminar.node.routes import lineage
from membership.records import TopicRecord

_NUMBER = re.compile(r"(?:0|[1-9][0-9]{0,8})\Z", re.ASCII)
# The most partitions that an error lists.
MOST_NAMED = 20


class CursorRoutes:
    """The handlers of cursor routes."""

    def __init__(self, topics: TopicLookup, steps: CursorSteps, places: CursorPlaces) -> None:
        self._topics = topics
        self._steps = steps
        self._places = places

    # -- routes --------------------------------------------------------------------------

    async def cursors(self, request: Request, topic: str) -> Response:
        """Answer GET /v1/topics/{topic}/cursors with a page of the topic's cursors."""
        prefix = request.query.get("prefix", "")
        limit = integer(request, "limit", 100, minimum=1, maximum=MAX_PAGE)
        after = request.query.get("after", "")
        found, bounds = await self.named(topic, lambda name: name.startswith(prefix) and name > after)
        record = self._topics.record(topic)
        names = sorted(found)
        page = names[:limit]
        answer = documents.CursorPage(
            topic, [cursor_document(record, name, found[name], bounds) for name in page]
        )
        headers = []
        if len(names) > limit:
            answer.next = page[-1]
            path = f"/v1/topics/{topic}/cursors"
            headers.append(next_link(path, prefix=prefix, limit=limit, after=page[-1]))
        return Response.json(answer, headers=headers)

    async def cursor(self, request: Request, topic: str, cursor: str) -> Response:
        """Answer GET /v1/topics/{topic}/cursors/{cursor} with positions, lags and owners."""
        states, bounds = await self._steps.everywhere(topic, cursor)
        if not states:
            raise Problem(
                "no_such_cursor", f"topic {topic!r} has no cursor {cursor!r}", field="cursor", value=cursor
            )
        return Response.json(cursor_document(self._topics.record(topic), cursor, states, bounds))

    async def set(self, request: Request, topic: str, cursor: str) -> Response:
        """Answer PUT /v1/topics/{topic}/cursors/{cursor}: compare and set each position in its partition."""
        change = json_body(request, CursorChange)
        if is_rewind(cursor):
            raise Problem(
                "invalid",
                f"names of cursors that begin with {REWIND} are the cluster's own",
                field="cursor",
                value=cursor,
            )
        _check_change(change)
        record = self._topics.record(topic)
        if change.begin is not UNSET:
            await self._places.begin(topic, cursor, change.begin, principal=owner_of(request))
        elif change.rewind is not UNSET:
            await self._places.rewind(topic, cursor, change.rewind, principal=owner_of(request))
        else:
            states = await self._set_positions(record, cursor, change, owner_of(request))
            return Response.json(cursor_document(record, cursor, states, {}))
        states, bounds = await self._steps.everywhere(topic, cursor)
        return Response.json(cursor_document(self._topics.record(topic), cursor, states, bounds))

    async def _set_positions(
        self, record: TopicRecord, cursor: str, change: CursorChange, principal: str
    ) -> list[CursorState]:
        assert isinstance(change.positions, dict), "checked"
        expected = change.expected
        steps = {}
        for number, position in change.positions.items():
            partition = self._topics.partition_record(record.name, number).number
            steps[partition] = CursorRequest(
                record.name,
                partition,
                "set",
                cursor,
                position=position,
                check=expected is not None,
                expected=expected.get(number) if expected is not None else None,
                owner=change.owner,
                expected_owner=change.expected_owner,
                principal=principal,
            )
        # A cursor may reach the end of a partition, and go on in those that follow, in one request.
        states: list[CursorState] = []
        for numbers in lineage.generations(record):
            states += await self._steps.all(
                [steps.pop(number) for number in numbers if number in steps], states
            )
        return states + await self._steps.all(list(steps.values()), states)

    async def delete(self, request: Request, topic: str, cursor: str) -> Response:
        """Answer DELETE /v1/topics/{topic}/cursors/{cursor}: delete it in all partitions."""
        record = self._topics.record(topic)
        # A partition without the cursor, after one that has it, would count as a new one.
        for numbers in reversed(lineage.generations(record)):
            await self._steps.all([CursorRequest(topic, number, "delete", cursor) for number in numbers])
        return Response(204)

    # -- steps ---------------------------------------------------------------------------

    async def named(
        self, topic: str, wanted: Callable[[str], bool]
    ) -> tuple[dict[str, list[CursorState]], Bounds]:
        """Return the states of the cursors that `wanted` selects, by name, and the partitions' bounds."""
        found: dict[str, list[CursorState]] = {}
        states, bounds = await self._steps.everywhere(topic, "")
        for state in states:
            if wanted(state.name):
                found.setdefault(state.name, []).append(state)
        return found, bounds


def _check_change(change: CursorChange) -> None:
    """Check a change as far as possible before any partition is asked.

    Raises:
        Problem: 422 `invalid`.
    """
    given = [field for field in ("positions", "begin", "rewind") if getattr(change, field) is not UNSET]
    if len(given) != 1 or change.positions == {}:
        raise Problem(
            "invalid",
            "a change has one of `positions`, `begin` and `rewind`, and `positions` is not empty",
            field=given[-1] if given else "positions",
            limit="positions, begin, rewind",
        )
    if change.positions is UNSET:
        if change.expected is not None or change.owner or change.expected_owner is not None:
            raise Problem("invalid", "owners and expected positions belong to `positions`", field=given[0])
        return
    if is_rewind(change.owner):
        raise Problem(
            "invalid", f"owners that begin with {REWIND} are rewinds", field="owner", value=change.owner
        )
    if is_rewind(change.expected_owner or ""):
        # A client that does not support rewinds would treat their owners as members that died.
        raise Problem(
            "fenced",
            "the cursor is being rewound; only that, or another rewind, lets it go",
            field="expected_owner",
            value=change.expected_owner,
            limit=change.expected_owner,
            outcome="not_applied",
        )
    positions = change.positions
    for field, offsets in (("positions", positions), ("expected", change.expected or {})):
        for number, offset in offsets.items():
            if number not in positions or _NUMBER.match(number) is None:
                raise Problem(
                    "invalid",
                    "each name must be the number of a partition for which a position is given",
                    field=field,
                    value=number,
                    limit=", ".join(list(positions)[:MOST_NAMED]),
                )
            if offset is not None and not 0 <= offset < OFFSET_LIMIT:
                raise Problem(
                    "invalid",
                    "a position must be an offset",
                    field=f"{field}.{number}",
                    value=offset,
                    limit=OFFSET_LIMIT,
                )


def cursor_document(
    topic: TopicRecord, name: str, states: list[CursorState], bounds: Bounds
) -> documents.Cursor:
    """Return a cursor's document: by partition its position, its lag behind the end, and its owner.

    A partition of `bounds` that is not in `states` counts as unread from start to end. With `bounds` the
    document also lists the partitions that no consumer may own yet, and the ancestors that they wait for.
    """
    ordered = sorted(states, key=lambda state: state.partition)
    known = {state.partition for state in states}
    unread = {
        str(number): end - start for number, (start, end) in sorted(bounds.items()) if number not in known
    }
    lags = {str(state.partition): max(0, state.end_offset - state.position) for state in ordered}
    lags |= unread
    # How many records were trimmed before the cursor passed them.
    gone = {
        str(state.partition): state.start_offset - state.position
        for state in ordered
        if state.position < state.start_offset
    }
    ends = {number: seal.end_offset for number in sorted(bounds) if (seal := lineage.seal_of(topic, number))}
    waits = {number: waits_for(topic, number, states) for number in sorted(bounds)} if ends else {}
    return documents.Cursor(
        topic=topic.name,
        cursor=name,
        positions={str(state.partition): state.position for state in ordered},
        lag=lags,
        total_lag=sum(lags.values()),
        overtaken=bool(gone),
        overtaken_by=gone,
        owners={str(state.partition): state.owner for state in ordered if state.owner},
        changed=format_time(max((state.changed_ms for state in ordered), default=0)),
        ends={str(number): end for number, end in ends.items()} if ends else UNSET,
        waits_for={str(number): before for number, before in waits.items() if before} if ends else UNSET,
    )


def waits_for(topic: TopicRecord, number: int, states: Iterable[CursorState]) -> dict[str, int]:
    """Return the ancestors of a partition whose ends a cursor has not reached, with their end offsets.

    Seals in the catalog are final, so the result is as current as `states`.
    """
    known = {state.partition: state for state in states}
    found = {}
    for each in lineage.ancestors_of(topic, number, only_strict=True):
        seal, state = lineage.seal_of(topic, each), known.get(each)
        end = 0 if seal is None else seal.end_offset
        if state is None or state.position < end or is_rewind(state.owner):
            found[str(each)] = end
    return found
