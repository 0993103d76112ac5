"""Begin a cursor in partitions where it is not set, or rewind it in all, across changes of the topic's route.

A cursor is *begun* in the newest partitions first, in their ancestors later (rule `begin`). So a cursor that
exists in an ancestor of a partition, but not in the partition, shows that the partition is new: there the
cursor begins at 0. Whether it exists is checked in the oldest partitions first (`oldest`), because a reclaim
first begins it in the partitions that follow, and deletes it in the ancestor after that.

A *rewind* moves a group's cursor in all partitions at once. It first becomes the cursor's owner in all
partitions, also where the cursor does not exist (`absent`), so that no member owns any; then it reads the
newest route and takes the partitions that were opened meanwhile (`again`). Only when it owns all, it sets the
first position (`whole`). At the end it frees all. If a rewind fails halfway, it must be repeated: until then
it stays the owner of the cursors that it took, and members do not touch these.

Reference: `docs/routes.md#consumers`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from msgspec.structs import replace

from laminar.http.api.problems import Problem
from laminar.http.api.timestamps import parse_time
from laminar.node.api.common.leader_call import STEP, LeaderCall
from laminar.node.api.common.makers import maker_of
from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.consumers.cursor_steps import CursorRequest, CursorState, CursorSteps
from laminar.node.partition.cursor_commands import REWIND
from laminar.node.partition.partition import Partition
from laminar.node.routes import lineage
from laminar.node.transport.transport import Peer

ROUTES_SINCE = 3
"""The code version from which on topics change their routes, and logs have synced entries of cursors."""


class TakeRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request to make a rewind (`owner`) the owner of a cursor in a partition.

    With an empty `owner` it takes nothing, and only looks up the offset of the first record at or after
    `time_ms`. None looks up no offset.
    """

    topic: str
    partition: int
    name: str
    owner: str
    time_ms: int | None
    synced: bool
    principal: str = ""
    """The principal that counts as creator if the cursor is new; empty if there is none."""


class Taken(msgspec.Struct, frozen=True, array_like=True):
    """The answer about one partition: its start and end offset, and the offset at the requested time."""

    partition: int
    start_offset: int
    end_offset: int
    at_time: int = 0


class CursorPlaces:
    """Sets a cursor in all partitions of a topic: where it has no position yet, or everywhere by a rewind."""

    def __init__(
        self,
        services: ShardServices,
        leaders: LeaderCall,
        topics: TopicLookup,
        steps: CursorSteps,
    ) -> None:
        self._services = services
        self._leaders = leaders
        self._topics = topics
        self._steps = steps

    # -- begin ---------------------------------------------------------------------------------

    async def begin(self, topic: str, name: str, place: str, *, principal: str) -> None:
        """Set the cursor at `place` in each partition where it is not set, or at 0 in partitions new to it.

        A partition is new to the cursor if the cursor exists in an ancestor of the partition.

        Raises:
            Problem: 422 if `place` is invalid; 503 while a leader or the catalog does not answer.
        """
        offset_at = self._offset_at(place)
        # A partition that an old view lacks would count as new later, so all its records would be delivered.
        await self._services.refresh_view()
        record = self._topics.record(topic)
        generations = lineage.generations(record)
        bounds: dict[int, CursorState] = {}
        there: set[int] = set()
        for numbers in generations:
            steps = [CursorRequest(topic, number, "get", name) for number in numbers]
            for state in await self._steps.all(steps):
                if state.name:
                    there.add(state.partition)
                else:
                    bounds[state.partition] = state
        # Cursors found in a partition that is reclaimed meanwhile count, too: the view still has it.
        for numbers in reversed(generations):
            absent = [number for number in numbers if number not in there]
            steps = []
            for number in absent:
                new = there.isdisjoint(lineage.ancestors_of(record, number))
                position = await offset_at(topic, bounds[number]) if new else 0
                steps.append(
                    CursorRequest(
                        topic,
                        number,
                        "set",
                        name,
                        position=position,
                        check=True,
                        expected=None,
                        begins=True,
                        principal=principal,
                    )
                )
            await asyncio.gather(*(self._steps.unless_there(step) for step in steps))

    def _offset_at(self, place: str) -> Callable[[str, CursorState], Awaitable[int]]:
        time_ms = _time_of(place)

        async def offset_at(topic: str, bounds: CursorState) -> int:
            if time_ms is None:
                return bounds.start_offset if place == "earliest" else bounds.end_offset
            taken = await self._take(TakeRequest(topic, bounds.partition, "", "", time_ms, synced=False))
            return taken.at_time

        return offset_at

    # -- rewind --------------------------------------------------------------------------------

    async def rewind(self, topic: str, name: str, place: str | Mapping[str, int], *, principal: str) -> None:
        """Set the cursor to `place` in all partitions, or to given positions, also where a member owns it.

        Raises:
            Problem: 422 if `place` is invalid; 404 if a partition does not exist; 409 `fenced` if another
                rewind took the cursor; 503 while a leader or the catalog does not answer. After the outcome
                `unknown` the rewind still owns the cursor in some partitions, until it is repeated.
        """
        time_ms = _time_of(place) if isinstance(place, str) else None
        if not isinstance(place, str):
            for number in place:
                self._topics.partition_record(topic, number)
        owner = f"{REWIND}rewind.{self._services.rng.getrandbits(64):016x}"
        taken: dict[int, Taken] = {}
        try:
            await self._take_all(TakeRequest(topic, 0, name, owner, time_ms, False, principal), taken)
        except BaseException:
            # No position has been changed yet, so the members may go on.
            with contextlib.suppress(Problem):
                await self._let_go(topic, name, owner)
            raise
        try:
            positions = {
                number: position
                for number, each in taken.items()
                if (position := _position(place, each)) is not None
            }
            await self._steps.all(
                [
                    CursorRequest(topic, number, "set", name, position=to, owner=owner, expected_owner=owner)
                    for number, to in positions.items()
                ]
            )
            await self._let_go(topic, name, owner)
        except Problem as problem:
            problem.outcome = "unknown"
            problem.hint = problem.hint or "Repeat the rewind: it holds the cursor in some partitions."
            raise

    async def _take_all(self, request: TakeRequest, taken: dict[int, Taken]) -> None:
        """Take a cursor in each partition that is not in `taken` yet, and add the answers to `taken`."""
        topic = request.topic
        while True:
            await self._services.refresh_view()
            # A synced entry may be written only when all nodes support it; before that, no route has changed.
            synced = self._services.view.code_version >= ROUTES_SINCE
            record = self._topics.record(topic)
            wanted = [number for numbers in lineage.generations(record) for number in numbers]
            for number in [each for each in taken if each not in wanted]:
                del taken[number]  # it was reclaimed
            missing = [number for number in wanted if number not in taken]
            if not missing:
                return
            results = await asyncio.gather(
                *(
                    self._take(replace(request, partition=number, synced=synced))
                    for number in reversed(missing)
                ),
                return_exceptions=True,
            )
            taken |= {each.partition: each for each in results if isinstance(each, Taken)}
            for each in results:
                if isinstance(each, BaseException):
                    raise each

    async def _let_go(self, topic: str, name: str, owner: str) -> None:
        """Free the cursor in all partitions where this rewind owns it."""
        states, _ = await self._steps.everywhere(topic, name)
        steps = [
            CursorRequest(topic, state.partition, "set", name, position=state.position, expected_owner=owner)
            for state in states
            if state.owner == owner
        ]
        await self._steps.all(steps)

    async def _take(self, request: TakeRequest) -> Taken:
        return await self._leaders.ask("take_cursor", request, Taken, here=self._perform, policy=STEP)

    async def _perform(self, partition: Partition, request: TakeRequest) -> Taken:
        if request.owner:
            await partition.cursor_commands.take(
                request.name,
                request.owner,
                now_ms=self._services.clock.wall_ms(),
                synced=request.synced,
                maker=maker_of(self._services.view, request.principal, "cursors"),
            )
        bounds = await partition.reader.confirmed_bounds()
        at_time = 0
        if request.time_ms is not None:
            at_time, _ = await partition.reader.at_time(bounds, request.time_ms)
        return Taken(partition.number, bounds.start, bounds.end, at_time)

    async def on_take_cursor(self, peer: Peer, payload: bytes) -> Taken:
        """Take a cursor for the rewind of another shard, in a partition that this shard leads."""
        request = msgspec.msgpack.decode(payload, type=TakeRequest)
        return await self._perform(self._leaders.led_here(request.topic, request.partition), request)


def _time_of(place: str) -> int | None:
    """Return the time in ms of a place that is a time; None for `earliest` and `latest`.

    Raises:
        Problem: 422 if it is none of these.
    """
    return None if place in ("earliest", "latest") else parse_time(place, field="place")


def _position(place: str | Mapping[str, int], taken: Taken) -> int | None:
    """Return the offset to which a rewind sets the cursor in a partition; None to leave it where it is."""
    if not isinstance(place, str):
        return place.get(str(taken.partition))
    if place == "earliest":
        return taken.start_offset
    return taken.end_offset if place == "latest" else taken.at_time
