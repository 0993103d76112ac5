"""Routes of cursors: a consumer's named positions in the partitions of a topic, and their lag.

A cursor's position in a partition is kept by that partition's group. So a request for several partitions is
carried out by several leaders, each of which compares and sets its own position. If a change fails in one
partition, the error says in which others it was made.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from laminar.http.api import documents
from laminar.http.api.deadlines import FORWARDED_STEP_S
from laminar.http.api.documents import CursorChange
from laminar.http.api.parameters import MAX_PAGE, OFFSET_LIMIT
from laminar.http.api.problems import Problem
from laminar.http.api.timestamps import format_time
from laminar.http.protocol.messages import Request, Response
from laminar.node.api.common.forwarding import Exchange
from laminar.node.api.common.json_body import json_body
from laminar.node.api.common.leader_call import STEP, LeaderCall
from laminar.node.api.common.leader_lookup import ReplicaEndpoint
from laminar.node.api.common.query import integer, next_link
from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.transport.transport import Peer

if TYPE_CHECKING:
    from laminar.node.partition.partition import Partition

_NUMBER = re.compile(r"(?:0|[1-9][0-9]{0,8})\Z", re.ASCII)
# Most partitions that an error lists.
MOST_NAMED = 20
# By partition: its start offset and its committed end offset.
Bounds = Mapping[int, tuple[int, int]]


class CursorRequest(msgspec.Struct, frozen=True, array_like=True):
    """One step on one partition: `operation` is get, set or delete; get with an empty `name` lists all.

    A set with `check` succeeds only if the position is `expected` (None: no position yet), and with
    `expected_owner` only if that is the owner.
    """

    topic: str
    partition: int
    operation: str
    name: str
    position: int | None = None
    check: bool = False
    expected: int | None = None
    owner: str = ""
    expected_owner: str | None = None


class CursorState(msgspec.Struct, frozen=True, array_like=True):
    """A cursor in one partition, with the partition's start and committed end.

    With an empty name there is no cursor: only partition, start and end count.
    """

    name: str
    partition: int
    position: int
    changed_ms: int
    owner: str
    start_offset: int
    end_offset: int


class CursorRoutes:
    """The handlers of cursor routes."""

    def __init__(
        self, services: ShardServices, exchange: Exchange, leaders: LeaderCall, topics: TopicLookup
    ) -> None:
        self._services = services
        self._exchange = exchange
        self._leaders = leaders
        self._topics = topics

    # -- routes --------------------------------------------------------------------------

    async def cursors(self, request: Request, topic: str) -> Response:
        """Answer GET /v1/topics/{topic}/cursors."""
        prefix = request.query.get("prefix", "")
        limit = integer(request, "limit", 100, minimum=1, maximum=MAX_PAGE)
        after = request.query.get("after", "")
        found, bounds = await self.named(topic, lambda name: name.startswith(prefix) and name > after)
        names = sorted(found)
        page = names[:limit]
        answer = documents.CursorPage(
            topic, [cursor_document(topic, name, found[name], bounds) for name in page]
        )
        headers = []
        if len(names) > limit:
            answer.next = page[-1]
            path = f"/v1/topics/{topic}/cursors"
            headers.append(next_link(path, prefix=prefix, limit=limit, after=page[-1]))
        return Response.json(answer, headers=headers)

    async def cursor(self, request: Request, topic: str, cursor: str) -> Response:
        """Answer GET /v1/topics/{topic}/cursors/{cursor}."""
        states, bounds = await self._everywhere(topic, cursor)
        if not states:
            raise Problem(
                "no_such_cursor", f"topic {topic!r} has no cursor {cursor!r}", field="cursor", value=cursor
            )
        return Response.json(cursor_document(topic, cursor, states, bounds))

    async def set(self, request: Request, topic: str, cursor: str) -> Response:
        """Answer PUT /v1/topics/{topic}/cursors/{cursor}: compare and set each position in its partition."""
        change = json_body(request, CursorChange)
        expected = change.expected
        _check_change(change)
        steps = []
        for number, position in change.positions.items():
            record = self._topics.partition_record(topic, number)
            steps.append(
                CursorRequest(
                    topic,
                    record.number,
                    "set",
                    cursor,
                    position=position,
                    check=expected is not None,
                    expected=expected.get(number) if expected is not None else None,
                    owner=change.owner,
                    expected_owner=change.expected_owner,
                )
            )
        return Response.json(cursor_document(topic, cursor, await self._all(steps), {}))

    async def delete(self, request: Request, topic: str, cursor: str) -> Response:
        """Answer DELETE /v1/topics/{topic}/cursors/{cursor}."""
        record = self._topics.record(topic)
        steps = [CursorRequest(topic, number, "delete", cursor) for number in record.numbers]
        await self._all(steps)
        return Response(204)

    # -- steps ---------------------------------------------------------------------------

    async def named(
        self, topic: str, wanted: Callable[[str], bool]
    ) -> tuple[dict[str, list[CursorState]], Bounds]:
        """Return, by name, the states of a topic's cursors that `wanted` selects; and the bounds."""
        found: dict[str, list[CursorState]] = {}
        states, bounds = await self._everywhere(topic, "")
        for state in states:
            if wanted(state.name):
                found.setdefault(state.name, []).append(state)
        return found, bounds

    async def _everywhere(self, topic: str, name: str) -> tuple[list[CursorState], Bounds]:
        """Return a cursor's states in all partitions, or with an empty name all cursors'; and the bounds."""
        record = self._topics.record(topic)
        states = await self._all([CursorRequest(topic, number, "get", name) for number in record.numbers])
        bounds = {each.partition: (each.start_offset, each.end_offset) for each in states if not each.name}
        return [state for state in states if state.name], bounds

    async def _all(self, steps: list[CursorRequest]) -> list[CursorState]:
        """Carry out all steps concurrently; return their states, or raise the first failure after all."""
        results = await asyncio.gather(*(self._one(step) for step in steps), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        states = [state for result in results if not isinstance(result, BaseException) for state in result]
        if failures:
            first = failures[0]
            if isinstance(first, Problem) and states and steps[0].operation != "get":
                done = ", ".join(str(state.partition) for state in states)
                first.detail += f" (set in partitions {done})"
            raise first
        return states

    async def _one(self, step: CursorRequest) -> list[CursorState]:
        """Carry out one step at the partition's leader. Every step may be repeated."""

        async def there(where: ReplicaEndpoint) -> list[CursorState]:
            answer: list[CursorState] = await self._exchange.ask(
                where.address, "cursor", step, kind=list[CursorState], timeout_s=FORWARDED_STEP_S
            )
            return answer

        return await self._leaders(
            step.topic,
            step.partition,
            here=lambda partition: self._perform(partition, step),
            there=there,
            policy=STEP,
        )

    async def _perform(self, partition: Partition, step: CursorRequest) -> list[CursorState]:
        if step.operation == "get":
            # Lag is counted from a confirmed end: a deposed leader's end would make it too small.
            await partition.reader.confirmed_end()
            names = [step.name] if step.name else partition.cursors.known()
        else:
            names = [step.name]
            # Deletes also a cursor that is known only from an uncommitted entry: it may yet be committed.
            if step.operation == "set" or step.name in partition.cursors.known():
                await partition.cursor_commands.set(
                    step.name,
                    step.position if step.operation == "set" else None,
                    expected=step.expected,
                    check=step.check,
                    owner=step.owner,
                    expected_owner=step.expected_owner,
                    now_ms=self._services.clock.wall_ms(),
                )
        found = []
        if step.operation == "get":
            # A state without a name, for the partition's bounds.
            start, end = partition.start_offset, partition.end_offset
            found.append(CursorState("", partition.number, start, 0, "", start, end))
        for name in names:
            cursor = partition.cursor_commands.get(name)
            if cursor is not None:
                found.append(
                    CursorState(
                        name,
                        partition.number,
                        cursor.position,
                        cursor.changed_ms,
                        cursor.owner,
                        partition.start_offset,
                        partition.end_offset,
                    )
                )
        return found

    async def on_cursor(self, peer: Peer, payload: bytes) -> list[CursorState]:
        """Carry out a step for another shard, on a partition that is led here."""
        step = msgspec.msgpack.decode(payload, type=CursorRequest)
        return await self._perform(self._leaders.led_here(step.topic, step.partition), step)


def _check_change(change: CursorChange) -> None:
    """Check a change as far as possible before any partition is asked.

    Raises:
        Problem: 422 `invalid`.
    """
    for field, offsets in (("positions", change.positions), ("expected", change.expected or {})):
        for number, offset in offsets.items():
            if number not in change.positions or _NUMBER.match(number) is None:
                raise Problem(
                    "invalid",
                    "each name must be the number of a partition for which a position is given",
                    field=field,
                    value=number,
                    limit=", ".join(list(change.positions)[:MOST_NAMED]),
                )
            if offset is not None and not 0 <= offset < OFFSET_LIMIT:
                raise Problem(
                    "invalid",
                    "a position must be an offset",
                    field=f"{field}.{number}",
                    value=offset,
                    limit=OFFSET_LIMIT,
                )


def cursor_document(topic: str, name: str, states: list[CursorState], bounds: Bounds) -> documents.Cursor:
    """Return a cursor's document: by partition its position, its lag behind the end, and its owner.

    A partition of `bounds` that is not in `states` counts as unread from start to end.
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
    return documents.Cursor(
        topic=topic,
        cursor=name,
        positions={str(state.partition): state.position for state in ordered},
        lag=lags,
        total_lag=sum(lags.values()),
        overtaken=bool(gone),
        overtaken_by=gone,
        owners={str(state.partition): state.owner for state in ordered if state.owner},
        changed=format_time(max((state.changed_ms for state in ordered), default=0)),
    )
