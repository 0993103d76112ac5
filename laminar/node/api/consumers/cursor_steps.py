"""Steps on a cursor in one partition, each carried out by the partition's leader.

A step is a read, a compare-and-set or a deletion, and may be repeated. A step that may give a cursor to a new
owner is a *claim*. If a change of the topic's route created the partition, a claim must pass the gate there:
the partition's ancestors must be drained (`laminar.node.api.consumers.gates`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

import msgspec

from laminar.http.api.problems import Problem
from laminar.node.api.common.leader_call import STEP, LeaderCall
from laminar.node.api.common.makers import maker_of
from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.consumers.gates import Gates
from laminar.node.partition.cursor_commands import is_rewind
from laminar.node.partition.partition import Partition
from laminar.node.partition.problems import Maker
from laminar.node.partition.state.cursors import Cursor
from laminar.node.routes import lineage
from laminar.node.transport.transport import Peer

Bounds = Mapping[int, tuple[int, int]]
"""By partition: its start offset and its committed end offset."""


class CursorRequest(msgspec.Struct, frozen=True, array_like=True):
    """A step on a cursor in one partition: `operation` is get, set or delete.

    A get with an empty `name` lists all cursors. A set with `check` succeeds only if the position is
    `expected` (None: no position yet); a set with `expected_owner` only if that is the owner.
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
    begins: bool = False
    """Whether the step creates a cursor without a gate: the group is new, or must get all of the records."""
    principal: str = ""
    """The principal that counts as creator if the cursor is new; empty if there is none."""


class CursorState(msgspec.Struct, frozen=True, array_like=True):
    """A cursor in one partition, with the partition's start and committed end.

    With an empty name there is no cursor, and only partition, start and end are set.
    """

    name: str
    partition: int
    position: int
    changed_ms: int
    owner: str
    start_offset: int
    end_offset: int


class CursorSteps:
    """Sends steps on cursors to partitions' leaders, and carries out those of partitions led here."""

    def __init__(
        self,
        services: ShardServices,
        leaders: LeaderCall,
        topics: TopicLookup,
        gates: Gates,
    ) -> None:
        self._services = services
        self._leaders = leaders
        self._topics = topics
        self._gates = gates

    async def everywhere(self, topic: str, name: str) -> tuple[list[CursorState], Bounds]:
        """Return the states of a cursor (empty `name`: of all) in all partitions, and the bounds of these."""
        record = self._topics.record(topic)
        states = await self.all([CursorRequest(topic, number, "get", name) for number in record.numbers])
        bounds = {each.partition: (each.start_offset, each.end_offset) for each in states if not each.name}
        return [state for state in states if state.name], bounds

    async def all(self, steps: list[CursorRequest], done: Sequence[CursorState] = ()) -> list[CursorState]:
        """Carry out all steps concurrently; return the cursors' states, or raise the first failure.

        The failure lists the partitions in which steps were carried out, including those in `done`.
        """
        results = await asyncio.gather(*(self._one(step) for step in steps), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        states = [state for result in results if not isinstance(result, BaseException) for state in result]
        if failures:
            first = failures[0]
            if isinstance(first, Problem) and (states or done) and steps[0].operation != "get":
                numbers = ", ".join(str(state.partition) for state in [*done, *states])
                first.detail += f" (set in partitions {numbers})"
            raise first
        return states

    async def unless_there(self, step: CursorRequest) -> None:
        """Carry out a step that creates a cursor, unless the cursor exists."""
        try:
            await self._one(step)
        except Problem as problem:
            # Another request has created it: at another position, or with an owner.
            if problem.code not in ("precondition_failed", "fenced"):
                raise

    async def drains(self, topic: str, number: int) -> tuple[list[str], dict[str, int]]:
        """Return the names of cursors at the end of a sealed partition, and the others' positions by name.

        A cursor that exists only in an ancestor of the partition is not drained here, and has position 0.
        """
        record = self._topics.record(topic)
        seal = lineage.seal_of(record, number)
        end = None if seal is None else seal.end_offset
        numbers = [*lineage.ancestors_of(record, number), number]
        states = await self.all([CursorRequest(topic, each, "get", "") for each in numbers])
        places = {state.name: 0 for state in states if state.name}
        places |= {state.name: state.position for state in states if state.name and state.partition == number}
        held = {state.name for state in states if is_rewind(state.owner) and state.partition == number}
        drained = [
            name for name, at in sorted(places.items()) if end is not None and at >= end and name not in held
        ]
        here = {state.name for state in states if state.partition == number}
        drained = [name for name in drained if name in here]
        return drained, {name: at for name, at in sorted(places.items()) if name not in drained}

    async def _one(self, step: CursorRequest) -> list[CursorState]:
        """Carry out one step at the partition's leader. Every step may be repeated."""
        return await self._leaders.ask("cursor", step, list[CursorState], here=self._perform, policy=STEP)

    async def _perform(self, partition: Partition, step: CursorRequest) -> list[CursorState]:
        names = [step.name]
        if step.operation == "get":
            # Lag is counted from a confirmed end: a deposed leader's end would make it too small.
            await partition.reader.confirmed_end()
            names = names if step.name else partition.cursor_commands.names()
        else:
            try:
                await self._carry_out(partition, step)
            except Problem as problem:
                raise await partition.appends.confirmed(problem) from None
        found = []
        if step.operation == "get":
            # A state without a name, for the partition's bounds.
            start, end = partition.start_offset, partition.end_offset
            found.append(CursorState("", partition.number, start, 0, "", start, end))
        for name in names:
            cursor = partition.cursor_commands.get(name)
            if cursor is not None:
                found.append(state_of(partition, name, cursor))
        return found

    async def _carry_out(self, partition: Partition, step: CursorRequest) -> None:
        if step.operation == "set":
            await self._set(partition, step)
        # Deletes also a cursor that is known only from an uncommitted entry: it may yet be committed.
        elif step.name in partition.cursors.known():
            await self._change(partition, step, None)
        else:
            await partition.reader.confirmed_end()  # a deposed leader may not know the cursor

    async def _set(self, partition: Partition, step: CursorRequest) -> None:
        """Set a cursor; if that is a claim in a partition with ancestors, only through the gate."""
        position, commands = step.position, partition.cursor_commands
        assert position is not None, "a set names a position"
        if not _may_claim(commands.latest(step.name), step) or not await self._gates.has(partition):
            await self._change(partition, step, position)
            return
        now_ms = self._services.clock.wall_ms()
        claim = commands.claim(
            step.name,
            position,
            expected=step.expected,
            check=step.check,
            owner=step.owner,
            expected_owner=step.expected_owner,
            now_ms=now_ms,
            maker=self._maker(step),
        )
        claimed = commands.latest(step.name)
        assert claimed is not None, "it was claimed"
        try:
            await claim
            await self._gates.check(partition, step.name)
            if commands.latest(step.name) is not claimed:
                # If the owner is the same again, it is by a later claim, which has its own answer.
                raise Problem(
                    "changing",
                    f"cursor {step.name!r} of {partition.context.name} was changed during its claim",
                    outcome="not_applied",
                )
        except BaseException:
            with contextlib.suppress(Problem):
                undone = commands.undo_claim(step.name, claimed, now_ms=now_ms)
                if undone is not None:
                    await undone
            raise
        if claimed.position != position:
            moved = msgspec.structs.replace(
                step, check=True, expected=claimed.position, expected_owner=step.owner
            )
            await self._change(partition, moved, position)

    async def _change(self, partition: Partition, step: CursorRequest, position: int | None) -> None:
        await partition.cursor_commands.set(
            step.name,
            position,
            expected=step.expected,
            check=step.check,
            owner=step.owner,
            expected_owner=step.expected_owner,
            now_ms=self._services.clock.wall_ms(),
            maker=self._maker(step),
        )

    def _maker(self, step: CursorRequest) -> Maker:
        return maker_of(self._services.view, step.principal, "cursors")

    async def on_cursor(self, peer: Peer, payload: bytes) -> list[CursorState]:
        """Carry out a step on a cursor for another shard, in a partition that this shard leads."""
        step = msgspec.msgpack.decode(payload, type=CursorRequest)
        return await self._perform(self._leaders.led_here(step.topic, step.partition), step)


def state_of(partition: Partition, name: str, cursor: Cursor) -> CursorState:
    """Return the state of a cursor in a partition, for an answer.

    Position, owner, and the partition's bounds.
    """
    return CursorState(
        name,
        partition.number,
        cursor.position,
        cursor.changed_ms,
        cursor.owner,
        partition.start_offset,
        partition.end_offset,
    )


def _may_claim(before: Cursor | None, step: CursorRequest) -> bool:
    """Return whether a set may be a claim: it creates the cursor, or may give it to a new owner.

    An owner's commit, which moves the cursor, is none. A set that moves nothing may be the repetition of a
    claim that was carried out, but whose answer was lost.
    """
    if step.begins:
        return False
    if before is None:
        return True
    if not step.owner or is_rewind(step.owner):
        return False
    return before.owner != step.owner or before.position == step.position
