"""Routes of consumer groups: their members, and what each owns.

The leader of one partition of the topic, chosen by the group's name, keeps the list of members in memory only
(`laminar.node.partition.state.group_members`). Before each answer it confirms that it still leads: otherwise
a deposed leader and the new one could each hear from a part of the members. What members own is in the
cursors. The list moves with the topic's route: to the partition that holds the logical partition of the
group's name now.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from laminar.http.api.documents import groups as documents
from laminar.http.api.documents.groups import MemberState
from laminar.http.api.parameters import GROUP_PATTERN
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Request, Response
from laminar.node.api.common.json_body import json_body
from laminar.node.api.common.leader_call import STEP, LeaderCall
from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.consumers.cursors import CursorRoutes, cursor_document
from laminar.node.partition.state.group_members import Member
from laminar.node.transport.transport import Peer
from laminar.wire.key_route import logical_of_group

if TYPE_CHECKING:
    from laminar.node.partition.partition import Partition

# The pattern of names of groups and members.
_NAME = re.compile(GROUP_PATTERN)


class GroupRequest(msgspec.Struct, frozen=True, array_like=True):
    """One step on a group: `operation` is renew, leave or describe."""

    topic: str
    partition: int
    operation: str
    group: str
    member: str = ""
    mode: str = ""
    session_ms: int = 0


class GroupState(msgspec.Struct, frozen=True, array_like=True):
    """A group's live members, sorted by name.

    `forming` says that a new leader may not know all of them yet.
    """

    members: list[MemberState]
    forming: bool


class GroupRoutes:
    """The handlers of consumer groups' routes."""

    def __init__(
        self,
        services: ShardServices,
        leaders: LeaderCall,
        topics: TopicLookup,
        cursors: CursorRoutes,
    ) -> None:
        self._services = services
        self._leaders = leaders
        self._topics = topics
        self._cursors = cursors

    # -- routes --------------------------------------------------------------------------

    async def group(self, request: Request, topic: str, group: str) -> Response:
        """Answer GET /v1/topics/{topic}/groups/{group} with the group's live members and cursors."""
        state, _ = await self._at_leader(topic, lambda: self._step(topic, "describe", group))
        found, bounds = await self._cursors.named(
            topic, lambda name: name == group or name.startswith(f"{group}.")
        )
        if not state.members and not found:
            raise Problem(
                "no_such_group",
                f"topic {topic!r} has no group {group!r} with members or a cursor",
                field="group",
                value=group,
            )
        record = self._topics.record(topic)
        return Response.json(
            documents.Group(
                topic=topic,
                group=group,
                mode=state.members[0].mode if state.members else None,
                forming=state.forming,
                members=state.members,
                cursors=[cursor_document(record, name, found[name], bounds) for name in sorted(found)],
            )
        )

    async def renew(self, request: Request, topic: str, group: str, member: str) -> Response:
        """Answer PUT /v1/topics/{topic}/groups/{group}/members/{member}: renew its session."""
        wanted = json_body(request, documents.Renewal)
        state, route = await self._at_leader(
            topic,
            lambda: self._step(
                topic,
                "renew",
                group,
                member,
                mode=wanted.mode,
                session_ms=wanted.session_ms,
                routes=wanted.routes,
            ),
        )
        return Response.json(
            documents.RenewedMember(
                topic=topic,
                group=group,
                member=member,
                mode=wanted.mode,
                session_ms=wanted.session_ms,
                forming=state.forming,
                members=state.members,
                route=route,
            )
        )

    async def leave(self, request: Request, topic: str, group: str, member: str) -> Response:
        """Answer DELETE /v1/topics/{topic}/groups/{group}/members/{member}: end its membership."""
        await self._at_leader(topic, lambda: self._step(topic, "leave", group, member))
        return Response(204)

    # -- steps ---------------------------------------------------------------------------

    def _step(
        self,
        topic: str,
        operation: str,
        group: str,
        member: str = "",
        *,
        mode: str = "",
        session_ms: int = 0,
        routes: bool = True,
    ) -> GroupRequest:
        """Return a step for the leader of the partition that has the group's list of members."""
        for field, name in (("group", group), ("member", member)):
            if (name or field == "group") and _NAME.fullmatch(name) is None:
                raise Problem(
                    "invalid", f"not a valid name of a {field}", field=field, value=name, limit=GROUP_PATTERN
                )
        record = self._topics.record(topic)
        route = self._topics.route(record)
        if route.version and not routes:
            raise Problem(
                "stale_route",
                f"members of groups of {topic!r} go over changes of its route, and say so: `routes`",
                field="routes",
                limit=route.version,
                outcome="not_applied",
            )
        number = route.partition_of(logical_of_group(group, record.partitions))
        return GroupRequest(topic, number, operation, group, member, mode, session_ms)

    async def _at_leader(self, topic: str, step_of: Callable[[], GroupRequest]) -> tuple[GroupState, int]:
        """Ask the leader that has the group's list of members; return its answer and the route's version."""
        try:
            state = await self._ask(step_of())
        except Problem as problem:
            if problem.code != "changing":
                raise
            # The group's list of members is at another partition now, or will be soon.
            await self._services.refresh_view()
            state = await self._ask(step_of())
        return state, self._topics.route(self._topics.record(topic)).version

    async def _ask(self, step: GroupRequest) -> GroupState:
        return await self._leaders.ask("group", step, GroupState, here=self._perform, policy=STEP)

    async def _perform(self, partition: Partition, step: GroupRequest) -> GroupState:
        await self._check_place(partition, step)
        await partition.reader.confirmed_end()
        known, now_s = partition.group_members, asyncio.get_running_loop().time()
        opened = partition.state.succession.opened
        if opened is not None:
            known.opened(opened.index, now_s)
        if step.operation == "renew":
            member = Member(step.member, step.mode, step.session_ms, now_s)
            known.renew(step.group, member, now_s=now_s)
        elif step.operation == "leave":
            known.leave(step.group, step.member)
        members = [
            MemberState(each.member, each.mode, each.session_ms, int((now_s - each.seen_s) * 1000))
            for each in known.members(step.group, now_s=now_s)
        ]
        return GroupState(members, known.is_rebalancing(step.group, now_s=now_s))

    async def _check_place(self, partition: Partition, step: GroupRequest) -> None:
        """Check that this partition has the group's list of members: two lists would each lack some members.

        A partition has the list from its opening until the change that replaces it is done. Its leader seals
        it earlier than that, so the leader of a sealed partition asks the catalog whether the change is done.
        Its answers to members until then stay valid, because the partition that follows counts no member as
        dead within one session time.

        Raises:
            Problem: 503 `changing` if another partition has the list, or will have it.
        """
        succession = partition.state.succession
        if succession.status == "waiting":
            raise _elsewhere(partition, step.group)
        if succession.sealed is None:
            return
        await self._services.refresh_view()
        record = self._topics.record(step.topic)
        place = logical_of_group(step.group, record.partitions)
        if self._topics.route(record).partition_of(place) != partition.number:
            raise _elsewhere(partition, step.group)

    async def on_group(self, peer: Peer, payload: bytes) -> GroupState:
        """Carry out a step for another shard, on a group whose list of members is at a partition led here."""
        step = msgspec.msgpack.decode(payload, type=GroupRequest)
        return await self._perform(self._leaders.led_here(step.topic, step.partition), step)


def _elsewhere(partition: Partition, group: str) -> Problem:
    return Problem(
        "changing",
        f"the members of group {group!r} report to the leader of another partition than "
        f"{partition.context.name}",
        outcome="not_applied",
    )
