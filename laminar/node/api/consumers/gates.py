"""The gate of a partition: a consumer may own it only when it has acknowledged all earlier partitions.

A change of the topic's route seals partitions, and new ones follow them. The older records of a key lie in
the *ancestors* of the partition that has the key now. So a claim (a set that makes a consumer the owner of a
cursor in a partition) is valid only if the same cursor is *drained* in each ancestor: the ancestor is sealed,
and the cursor is at its end.

The order matters. The partition's leader first commits the claim; then it asks the ancestors' leaders, whose
answers a majority confirms; if an ancestor is not drained, the claim is undone. With the question first, the
cursor could be rewound between answer and claim. A rewind owns the cursor in all partitions before it moves
it back in any, so it either replaces the claim's owner, or the ancestor answers `held`.

Views of the catalog may be old. The set of a partition's ancestors never grows, so an old view names all of
them, and perhaps some that are reclaimed: so the view is refreshed before a reclaimed one decides. Only a
view of an earlier topic of the same name may lack ancestors: to exclude it, the partition's group id is
compared.

Reference: `docs/routes.md#consumers`, whose names of rules are claim, inputs, ancestors, acked, keep, held.
"""

from __future__ import annotations

import asyncio

import msgspec

from laminar.http.api.deadlines import (
    ELECTION_WAIT_S,
    FORWARDED_GATE_S,
    GATE_ATTEMPTS_S,
    GATE_S,
    STEP_PAUSE_S,
)
from laminar.http.api.problems import Problem
from laminar.node.api.common.attempts import keep_code
from laminar.node.api.common.leader_call import LeaderCall, RetryPolicy
from laminar.node.api.common.services import ShardServices
from laminar.node.partition.cursor_commands import is_rewind
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.cursors import Cursor
from laminar.node.routes import lineage
from laminar.node.transport.transport import Peer
from membership.records import TopicRecord

GATE = RetryPolicy(
    attempts_s=GATE_ATTEMPTS_S,
    pause_s=STEP_PAUSE_S,
    repeatable=True,
    conclude=keep_code,
    election_wait_s=min(GATE_ATTEMPTS_S, ELECTION_WAIT_S),
)


class DrainQuestion(msgspec.Struct, frozen=True, array_like=True):
    """The question to a partition's leader whether a cursor has drained it (is at its final end)."""

    topic: str
    partition: int
    name: str


class DrainAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A leader's answer to `DrainQuestion`, confirmed by a majority.

    `end` is the partition's end offset, final only if it is sealed. `held` says that a rewind owns the
    cursor, and will move it.
    """

    drained: bool
    end: int
    position: int | None
    held: bool


class Gates:
    """Checks that a cursor has finished a partition's ancestors before a consumer may own it there."""

    def __init__(self, services: ShardServices, leaders: LeaderCall) -> None:
        self._services = services
        self._leaders = leaders

    async def has(self, partition: Partition) -> bool:
        """Return whether this partition has ancestors, so that a consumer that claims it must be checked.

        May refresh the view (this shard's copy of the catalog).
        """
        return bool(self._ancestors(partition.number, await self._record(partition)))

    async def before(self, partition: Partition) -> list[int]:
        """Return the ancestors of this partition, whose records must be consumed first.

        Raises:
            Problem: 503 `changing` if the change that creates the partition is not done; 503 `not_leader` if
                the catalog does not know the partition.
        """
        return self._ancestors(partition.number, await self._opened(partition))

    async def check(self, partition: Partition, name: str) -> None:
        """Check that the cursor has reached the ends of all ancestors of this partition.

        Call it only after the claim (the entry that makes the consumer the cursor's owner) is committed.

        Raises:
            Problem: 409 `not_drained` with the ends of the ancestors where it is not; 503 `changing` when
                some leader did not answer in time.
        """
        try:
            async with asyncio.timeout(GATE_S):
                await self._check(partition, name)
        except TimeoutError:
            raise _not_known(partition, "leaders of partitions before it did not answer in time") from None

    async def _check(self, partition: Partition, name: str) -> None:
        record = await self._opened(partition)
        ancestors = self._ancestors(partition.number, record)
        try:
            answers = await self._ask(record.name, ancestors, name)
        except Problem:
            # An ancestor may be reclaimed by now: then it was drained, or the group never read it.
            await self._services.refresh_view()
            record = await self._record(partition)
            ancestors = self._ancestors(partition.number, record)
            try:
                answers = await self._ask(record.name, ancestors, name)
            except Problem as problem:
                raise _not_known(partition, problem.detail or problem.title) from problem
        behind = {number: answers[number] for number in ancestors if not answers[number].drained}
        if behind:
            raise _not_drained(partition, name, behind)

    async def _opened(self, partition: Partition) -> TopicRecord:
        """Return the topic's record, if the change that creates this partition is done in it.

        Before that, a power failure may undo the seals of the change's inputs, which then take records again.

        Raises:
            Problem: 503 `changing` if the change is not done in the newest view.
        """
        record = await self._record(partition)
        if lineage.state_of(record, partition.number) == "waiting":
            await self._services.refresh_view()
            record = await self._record(partition)
            if lineage.state_of(record, partition.number) == "waiting":
                raise _not_known(partition, "the partitions before it have not ended")
        return record

    def _ancestors(self, number: int, record: TopicRecord) -> list[int]:
        return lineage.ancestors_of(record, number, only_strict=True)

    async def _record(self, partition: Partition) -> TopicRecord:
        """Return the record of the partition's topic; refresh the view first if it lacks the partition.

        Raises:
            Problem: 503 `not_leader` if the newest view has no such partition.
        """
        if not self._is_known(partition):
            await self._services.refresh_view()
            if not self._is_known(partition):
                raise Problem(
                    "not_leader", f"{partition.context.name} is not in the catalog", outcome="not_applied"
                )
        return self._services.view.topics()[partition.topic]

    def _is_known(self, partition: Partition) -> bool:
        view = self._services.view
        known = view.partition(partition.topic, partition.number)
        return (
            known is not None and known.group == partition.replica.group and partition.topic in view.topics()
        )

    # -- questions to the leaders of ancestors -------------------------------------------------

    async def _ask(self, topic: str, ancestors: list[int], name: str) -> dict[int, DrainAnswer]:
        asked = [self._ask_one(DrainQuestion(topic, number, name)) for number in ancestors]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found = {}
        for number, answer in zip(ancestors, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            found[number] = answer
        return found

    async def _ask_one(self, question: DrainQuestion) -> DrainAnswer:
        return await self._leaders.ask(
            "drained", question, DrainAnswer, here=self._answer, policy=GATE, timeout_s=FORWARDED_GATE_S
        )

    async def _answer(self, partition: Partition, question: DrainQuestion) -> DrainAnswer:
        name = question.name
        end = await partition.reader.confirmed_end()
        seal = partition.state.committed_seal
        cursor: Cursor | None = partition.cursor_commands.get(name)
        return DrainAnswer(
            drained=partition.cursor_commands.is_drained(name),
            end=end if seal is None else seal.end,
            position=None if cursor is None else cursor.position,
            held=cursor is not None and is_rewind(cursor.owner),
        )

    async def on_drained(self, peer: Peer, payload: bytes) -> DrainAnswer:
        """Answer another shard whether a cursor is at the end of a sealed partition that this shard leads."""
        question = msgspec.msgpack.decode(payload, type=DrainQuestion)
        return await self._answer(self._leaders.led_here(question.topic, question.partition), question)


def _not_drained(partition: Partition, name: str, behind: dict[int, DrainAnswer]) -> Problem:
    places = ", ".join(
        f"{number} ("
        + ("held by a rewind" if answer.held else f"{answer.position or 0} of {answer.end}")
        + ")"
        for number, answer in behind.items()
    )
    return Problem(
        "not_drained",
        f"cursor {name!r} must reach the ends of earlier partitions of {partition.topic!r} before it may be "
        f"owned in {partition.number}: {places}",
        field="cursor",
        value=name,
        limit={str(number): answer.end for number, answer in behind.items()},
        outcome="not_applied",
    )


def _not_known(partition: Partition, why: str) -> Problem:
    """Return 503 `changing`: the consumer may try again, but the search for a leader is not repeated."""
    return Problem(
        "changing",
        f"it is unknown whether all records before {partition.context.name} are acknowledged: {why}",
        outcome="not_applied",
    )
