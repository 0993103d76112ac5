"""The gate of a partition: a consumer owns it only when all that lies before it is acknowledged.

A change of the topic's route ends partitions, and others follow. Records of a key lie in the *ancestors* of
the partition that holds it now, and are older there. So a claim of a cursor in a partition stands only if the
same cursor is *drained* in each of its ancestors: that is sealed, and its end acknowledged.

The order matters. The claim is committed first, by the partition's leader, and then the ancestors' leaders
are asked, each confirmed by a majority; if one is not drained the claim is undone. Asked before, the cursor
could be rewound between answer and claim. A rewind holds the cursor in all partitions before it sets any
back, so it takes the claim away, or makes the answer `held`.

Views of the catalog may be old. The ancestors of a partition never grow, so an old view names all of them,
and perhaps some that are reclaimed: it is asked for again before one of these decides. Only a view of
another topic of this name, deleted since, may lack some: the claimed partition's group is compared.

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
    """Whether a cursor is drained in a partition, which its leader is asked."""

    topic: str
    partition: int
    name: str


class DrainAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What the leader says, confirmed by a majority; `end` is final only if the partition is sealed.

    `held`: a rewind holds the cursor, and will set it back.
    """

    drained: bool
    end: int
    position: int | None
    held: bool


class Gates:
    """The gates of all partitions that this shard leads."""

    def __init__(self, services: ShardServices, leaders: LeaderCall) -> None:
        self._services = services
        self._leaders = leaders

    async def has(self, partition: Partition) -> bool:
        """Return whether a claim in this partition must pass a gate. Asks for a newer view if that is old."""
        return bool(self._ancestors(partition.number, await self._record(partition)))

    async def before(self, partition: Partition) -> list[int]:
        """Return the partitions before this one whose records come first, once its change is done.

        Raises:
            Problem: 503 `changing` or `not_leader` when that is not known.
        """
        return self._ancestors(partition.number, await self._opened(partition))

    async def check(self, partition: Partition, name: str) -> None:
        """Return if the cursor is drained in all partitions before this one. After the claim only.

        Raises:
            Problem: 409 `not_drained` with the ends of those where it is not; 503 `changing` when some leader
                did not answer in time.
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
            # One may have been reclaimed since this view: then it was drained, or the group never read it.
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
        """Return the topic's record, once the partition's change is done there.

        Before, the seals of its inputs may be lost with the power, and these take records again.

        Raises:
            Problem: 503 `changing` if it is not done in the newest view.
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
        """Return the record of the topic that the partition is of.

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
        """Answer another shard about a partition that is led here."""
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
        f"cursor {name!r} is to reach the ends of partitions of {partition.topic!r} before it owns "
        f"{partition.number}: {places}",
        field="cursor",
        value=name,
        limit={str(number): answer.end for number, answer in behind.items()},
        outcome="not_applied",
    )


def _not_known(partition: Partition, why: str) -> Problem:
    """Return 503 `changing`: it may be tried again, by the consumer; no leader is to be looked for."""
    return Problem(
        "changing",
        f"it is not known whether all before {partition.context.name} is acknowledged: {why}",
        outcome="not_applied",
    )
