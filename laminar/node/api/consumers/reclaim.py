"""Reclaim (delete) sealed partitions that no consumer needs any more.

The leader of a sealed partition reclaims it, on a request, or by itself when the partition was sealed a week
ago and retention has taken all of its records. In this order:

1. Check that its inputs are reclaimed (rule `order`): a group that is behind in one has no cursor here yet.
2. *Fence*: an entry of the log, so that the next leader observes it, too. From now on no cursor can begin
   here, be set below the end, be taken by a rewind, or be deleted at the end; no channel can be opened or
   moved. A change that the fence permits, for example another owner of a cursor at the end, may be committed
   after step 5: it is deleted with the partition.
3. Check that no cursor is below the end or owned by a rewind (`drained`), and that each channel is done with
   all records, dead ones included. Otherwise remove the fence.
4. Create each cursor in the outputs, at 0, if it does not exist there (`follow`), and wait until that is
   synced (`pass`). Else a group that is stopped now would start as a new group later.
5. Remove the partition from the catalog.

If the outcome of step 5 is unknown, the fence stays, because the catalog may carry the step out later; if the
leader fails, it stays, too. The next attempt finds the partition gone, or begins again. Without an attempt,
the leader removes the fence when it has known it for `FENCE_MS` by its own monotonic clock and the catalog
still has the partition. No wall clock ends a fence: that of the next leader may be an hour ahead. Reference:
`docs/routes.md#reclaim`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec

from laminar.http.api.deadlines import FORWARDED_SINK_STEP_S
from laminar.http.api.documents import records as documents
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Request, Response
from laminar.node.api.common.leader_call import STEP, LeaderCall
from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.consumers.cursor_steps import CursorRequest, CursorSteps
from laminar.node.catalog.messages.requests import RouteRequest
from laminar.node.partition.cursor_commands import is_rewind
from laminar.node.partition.partition import Partition
from laminar.node.routes import lineage
from laminar.node.transport.transport import Peer, TransportError
from membership.records import TopicRecord
from membership.requests import ReclaimPartition

_log = logging.getLogger("laminar.routes")

RECLAIM_AGE_MS = 7 * 24 * 3_600_000
"""How long after its seal a partition is reclaimed unasked; until then it recognises repeated appends."""

FENCE_MS = 600_000
"""How long a leader keeps the fence of a failed attempt: by then the catalog has carried out its request.

A reclaim that was broken off must not keep consumers from their cursors for ever.
"""

# The pause between two checks for such partitions, and for fences of failed attempts.
CHECK_S = 60.0
# The most cursors that are created at once.
AT_ONCE = 64
# The most cursors that a refusal names.
MOST_NAMED = 20


class ReclaimQuestion(msgspec.Struct, frozen=True, array_like=True):
    """Request to a partition's leader to reclaim the partition."""

    topic: str
    partition: int


class Reclaimed(msgspec.Struct, frozen=True, array_like=True):
    """The answer about a reclaimed partition: its start offset and its end offset."""

    start_offset: int
    end_offset: int


class Reclaims:
    """The reclaim of the partitions that this shard leads, and the handler of its route."""

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
        self._under_way: set[bytes] = set()
        # By group that is led here and fenced: the term, and since when (monotonic, ms) no request to the
        # catalog is begun.
        self._fences: dict[bytes, tuple[int, int]] = {}
        services.spawn(self._keep_reclaiming())

    # -- by itself -----------------------------------------------------------------------------

    async def _keep_reclaiming(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            await self.reclaim_due()
            await self._end_fences()

    async def reclaim_due(self) -> None:
        """Reclaim partitions that were sealed long ago and have no records left, oldest first."""
        due = [each for each in self._services.partitions.values() if self._is_due(each)]
        for partition in sorted(due, key=lambda each: (each.topic, each.number)):
            try:
                await self._reclaim(partition)
            except Problem as problem:
                _log.debug("%s is not reclaimed: %s", partition.context.name, problem)

    async def _end_fences(self) -> None:
        """Remove the fences that failed attempts left in partitions that this shard leads."""
        led = {
            each.replica.group: each
            for each in self._services.partitions.values()
            if each.leads and each.cursor_commands.is_fenced()
        }
        self._fences = {group: seen for group, seen in self._fences.items() if group in led}
        for group, partition in led.items():
            now_ms, term = self._services.clock.monotonic_ms(), partition.replica.core.term
            known_term, since_ms = self._fences.get(group, (0, 0))
            if known_term != term:
                self._fences[group] = (term, now_ms)
            elif now_ms >= since_ms + FENCE_MS and group not in self._under_way:
                with contextlib.suppress(Problem):
                    await self._end_fence(partition, term)

    async def _end_fence(self, partition: Partition, term: int) -> None:
        """Remove a fence, unless the catalog has reclaimed the partition, or another replica led since."""
        group = partition.replica.group
        self._under_way.add(group)
        try:
            await self._services.refresh_view()
            known = self._services.view.partition(partition.topic, partition.number)
            is_there = known is not None and known.group == group
            if is_there and partition.leads and partition.replica.core.term == term:
                await partition.cursor_commands.unfence(now_ms=self._services.clock.wall_ms())
        finally:
            self._under_way.discard(group)

    def _is_due(self, partition: Partition) -> bool:
        seal = partition.kept_seal
        if seal is None or not partition.leads or partition.start_offset < seal.end:
            return False
        if self._services.clock.wall_ms() < seal.time_ms + RECLAIM_AGE_MS:
            return False
        record = self._services.view.topics().get(partition.topic)
        return record is not None and not _before(record, partition.number)

    # -- on request ----------------------------------------------------------------------------

    async def delete(self, request: Request, topic: str, partition: str) -> Response:
        """Answer DELETE /v1/topics/{topic}/partitions/{partition}: reclaim a partition that has ended."""
        record = self._topics.record(topic)
        number = int(partition) if partition.isascii() and partition.isdigit() else -1
        seal = lineage.seal_of(record, number)
        if seal is not None and number not in record.all_numbers:  # repeated
            return _answer(topic, number, Reclaimed(seal.end_offset, seal.end_offset))
        number = self._topics.partition_record(topic, partition).number
        reclaimed = await self._leaders.ask(
            "reclaim",
            ReclaimQuestion(topic, number),
            Reclaimed,
            here=lambda partition, _: self._reclaim(partition),
            policy=STEP,
            timeout_s=FORWARDED_SINK_STEP_S,
        )
        with contextlib.suppress(Problem):
            await self._services.refresh_view()
        return _answer(topic, number, reclaimed)

    async def on_reclaim(self, peer: Peer, payload: bytes) -> Reclaimed:
        """Reclaim a partition that this shard leads, for another shard."""
        question = msgspec.msgpack.decode(payload, type=ReclaimQuestion)
        return await self._reclaim(self._leaders.led_here(question.topic, question.partition))

    # -- the steps -----------------------------------------------------------------------------

    async def _reclaim(self, partition: Partition) -> Reclaimed:
        """Reclaim a partition that this shard leads, unless its reclaim is under way.

        Raises as `_carry_out`.
        """
        group = partition.replica.group
        if group in self._under_way:
            raise Problem("changing", f"{partition.context.name} is being reclaimed", outcome="not_applied")
        self._under_way.add(group)
        try:
            return await self._carry_out(partition)
        finally:
            self._under_way.discard(group)

    async def _carry_out(self, partition: Partition) -> Reclaimed:
        """Reclaim a partition, by the steps that the head of this module lists.

        Raises:
            Problem: 422 `invalid` if the partition is not sealed, or its inputs are not reclaimed; 409
                `not_drained` with the cursors that are behind; 503 if a leader or the catalog does not
                answer.
        """
        await self._services.refresh_view()
        record = self._topics.record(partition.topic)
        end = self._end_of(record, partition)
        before = _before(record, partition.number)
        if before:
            raise Problem(
                "invalid",
                f"{partition.context.name} follows partitions that must be reclaimed first",
                field="partition",
                value=partition.number,
                limit=", ".join(map(str, before)),
                outcome="not_applied",
            )
        commands = partition.cursor_commands
        clock, group, term = self._services.clock, partition.replica.group, partition.replica.core.term
        began_ms, wall_ms = clock.monotonic_ms(), clock.wall_ms()
        # The request of an earlier attempt may still reach the catalog, so its fence is not removed.
        was_fenced = commands.is_fenced()
        await commands.fence(now_ms=wall_ms)
        try:
            await self._check_drained(partition, end)
            self._check_channels(record, partition, end)
            _check_delayed(partition)
            await self._follow(record, partition)
            if clock.monotonic_ms() > began_ms + FENCE_MS // 2:
                raise Problem(
                    "changing",
                    f"the reclaim of {partition.context.name} took too long",
                    outcome="not_applied",
                )
        except BaseException:
            if not was_fenced:
                with contextlib.suppress(Problem):
                    await commands.unfence(now_ms=clock.wall_ms())
            raise
        reclaimed = Reclaimed(partition.start_offset, end)
        self._fences[group] = (term, clock.monotonic_ms())
        await self._forget(partition, wall_ms)
        _log.info("%s is reclaimed; it ended at offset %d", partition.context.name, end)
        return reclaimed

    def _end_of(self, record: TopicRecord, partition: Partition) -> int:
        seal = lineage.seal_of(record, partition.number)
        known = self._services.view.partition(partition.topic, partition.number)
        if known is None or known.group != partition.replica.group:
            raise Problem("not_leader", f"{partition.context.name} is deleted", outcome="not_applied")
        if seal is None or partition.kept_seal is None:
            raise Problem(
                "invalid",
                f"{partition.context.name} takes records: only a sealed partition can be reclaimed",
                field="partition",
                value=partition.number,
                hint="DELETE .../records deletes records.",
                outcome="not_applied",
            )
        return seal.end_offset

    async def _check_drained(self, partition: Partition, end: int) -> None:
        """Check that no cursor is behind here. Called after the fence, so that none can fall behind later."""
        await partition.reader.confirmed_end()
        behind = {}
        for name in partition.cursor_commands.names():
            cursor = partition.cursor_commands.get(name)
            if cursor is not None and (cursor.position < end or is_rewind(cursor.owner)):
                behind[name] = cursor.position
        if behind:
            named = dict(list(behind.items())[:MOST_NAMED])
            raise Problem(
                "not_drained",
                f"{len(behind)} cursors have not acknowledged {partition.context.name} to its end, {end}",
                field="partition",
                value=partition.number,
                limit=named,
                hint="`limit` has cursors and their positions. DELETE those that are no longer used.",
                outcome="not_applied",
            )

    def _check_channels(self, record: TopicRecord, partition: Partition, end: int) -> None:
        """Check that the topic's channels are done here. Called after the fence and `_check_drained`."""
        channels = partition.state.channels
        behind = channels.unfinished(end)
        for name, channel in (record.channels or {}).items():
            if channel.id not in channels.by_id:
                behind[name] = 0  # it is not open yet
        if behind:
            raise Problem(
                "not_drained",
                f"{len(behind)} channels are not done with {partition.context.name} to its end, {end}",
                field="partition",
                value=partition.number,
                limit=dict(list(behind.items())[:MOST_NAMED]),
                hint="`limit` has channels and their positions. Dead records count: replay or drop them.",
                outcome="not_applied",
            )

    async def _follow(self, record: TopicRecord, partition: Partition) -> None:
        """Create the partition's cursors in its outputs, where they do not exist."""
        outputs = [
            each for each in lineage.outputs_of(record, partition.number) if each in record.all_numbers
        ]
        steps = [
            CursorRequest(
                partition.topic, output, "set", name, position=0, check=True, expected=None, begins=True
            )
            for name in partition.cursor_commands.names()
            for output in outputs
        ]
        for first in range(0, len(steps), AT_ONCE):
            await asyncio.gather(*(self._steps.unless_there(step) for step in steps[first : first + AT_ONCE]))

    async def _forget(self, partition: Partition, now_ms: int) -> None:
        request = ReclaimPartition(partition.topic, partition.number, partition.replica.group, now_ms)
        try:
            answer = await self._services.ask_catalog(RouteRequest(request))
        except TransportError as error:
            raise Problem("outcome_unknown", f"the catalog: {error}") from error
        if answer.error:
            raise Problem("outcome_unknown", answer.detail or "the catalog has no leader at the moment")
        result = answer.result
        if result is None or result.outcome not in ("deleted", "exists"):
            detail = "" if result is None else result.detail
            raise Problem("changing", f"the catalog refused: {detail}", outcome="not_applied")


def _before(record: TopicRecord, number: int) -> list[int]:
    """Return the inputs of this partition that are not reclaimed yet, which must come first."""
    return [each for each in lineage.inputs_of(record, number) if each in record.all_numbers]


def _answer(topic: str, number: int, reclaimed: Reclaimed) -> Response:
    return Response.json(
        documents.DeletedRecords(
            topic=topic,
            partition=number,
            before=reclaimed.end_offset,
            dry_run=False,
            deleted=reclaimed.end_offset - reclaimed.start_offset,
            from_offset=reclaimed.start_offset,
            start_offset=reclaimed.end_offset,
            rounded_down=False,
            held_back_by=[],
        )
    )


def _check_delayed(partition: Partition) -> None:
    """Check that no delayed record is pending here.

    Pending ones are being sent to the partition's outputs.
    """
    pending = len(partition.state.delayed)
    if pending:
        raise Problem(
            "changing",
            f"{pending} delayed records of {partition.context.name} are not sent to the next partitions yet",
            field="partition",
            value=partition.number,
            outcome="not_applied",
        )
