"""A shard's part in changes of routes: it seals the inputs and opens the outputs that it leads.

A change of a topic's route replaces partitions (its inputs) by new ones (its outputs); see docs/routes.md.
For each group that is led here, by this node's view of the catalog:

1. *Seal.* In an input of a change that is `closing`, or was done by force, the leader appends the `SEAL`
   entry. The view may be outdated, but a change that is closing is never cancelled.
2. *Report.* When the seal is committed, and synced by a majority of the voters, the leader reports it to the
   catalog. A new leader that finds the seal in its log continues with this step.
3. *Open.* In an output of a change that is `done`, the leader appends the `OPEN` entry.
4. *Learn.* Replicas that do not lead learn from the catalog that the seal in their log is final, so that they
   may tell readers of it.
5. *Ask.* A leader whose log may have lost a seal takes no records until it has compared its log with the
   newest catalog. If a change that ends the partition is closing or done, the partition is sealed again. If
   the change that created the partition is not done, the partition waits.

Work that fails stays due (`WorkLists`), and is tried again every `CHECK_S`, with each view and each election.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container
from typing import Literal

import msgspec

from laminar.http.api.problems import Problem
from laminar.log.disk.errors import StorageError
from laminar.node.catalog.messages.requests import RouteRequest
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.succession import Input, OpenRecord, Output, SealRecord
from laminar.node.routes import plan
from laminar.node.routes.messages import (
    QUESTION,
    SYNCED_SEAL,
    PartitionAnswer,
    PartitionQuestion,
    SealAnswer,
    SealQuestion,
)
from laminar.node.runtime.process import Method
from laminar.node.shard.replicas.context import ShardContext
from laminar.node.shard.replicas.work_lists import WorkLists
from laminar.node.transactions.participant import Participant
from laminar.node.transport.transport import Peer, Transport, TransportError
from membership.records import PartitionRecord, RouteChange, Seal, TopicRecord
from membership.requests import ReportSeal

_log = logging.getLogger("laminar.routes")

CHECK_S = 0.2
# How long another voter may take to sync its seal and answer; and the pause before all are asked again.
SYNC_TIMEOUT_S = 2.0
SYNC_RETRY_S = 0.05
# How long a sealed partition waits for a view that contains its report, before it reports again.
SEEN_S = 1.0
# How long staged records that are not prepared may keep an input from being sealed; then they are dropped.
# The other inputs may be sealed by then, and appends of their keys wait.
PATIENCE_S = 5.0

Duty = Literal["ask", "open", "seal"]


def duty_of(partition: Partition, origin: RouteChange | None, end: RouteChange | None) -> Duty | None:
    """Return the step that the leader of a partition has to take now; None if there is none.

    `origin` is the change that created the partition and `end` the one that ends it, or None.
    """
    number, succession = partition.number, partition.state.succession
    ends = end is not None and end.state != "preparing"
    if succession.status == "open" and succession.in_doubt and not ends:
        return "ask"
    if succession.status == "waiting":
        return "open" if origin is not None and origin.state == "done" else None
    if end is not None and ends and (number not in end.seals or partition.kept_seal is None):
        return "seal"
    return None


class Changes:
    """A cache by topic of the changes that created and that end each partition, from the topics' records."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[TopicRecord, dict[int, RouteChange], dict[int, RouteChange]]] = {}

    def around(self, topic: TopicRecord, number: int) -> tuple[RouteChange | None, RouteChange | None]:
        """Return the change that created a partition and the one that ends it; each None if there is none."""
        if topic.change is None and not topic.changes:
            return None, None
        known = self._known.get(topic.name)
        if known is None or known[0] is not topic:
            changes = [*(topic.changes or ()), *([] if topic.change is None else [topic.change])]
            origins = {each.number: change for change in changes for each in change.outputs}
            ends = {each.number: change for change in changes for each in change.inputs}
            known = self._known[topic.name] = (topic, origins, ends)
        return known[1].get(number), known[2].get(number)

    def forget(self, topics: Container[str]) -> None:
        """Forget the topics that are not in `topics` (any more)."""
        for name in [name for name in self._known if name not in topics]:
            del self._known[name]


class RouteChanges:
    """Performs a shard's steps in changes of routes. The shard calls `check` when steps may be due."""

    def __init__(self, shard: ShardContext, work: WorkLists, *, transport: Transport) -> None:
        self._shard = shard
        self._work = work
        self._transport = transport
        self._due = work.add("routes", self._is_due)
        self._changes = Changes()
        self._under_way: set[bytes] = set()
        # By group, since when (the loop's time) staged records keep it from being sealed.
        self._blocked_s: dict[bytes, float] = {}
        self.sealed = 0
        self.opened = 0

    @property
    def methods(self) -> dict[str, Method]:
        """The methods by which other processes ask about this shard's partitions and seals, by name."""
        return {QUESTION: self._on_question, SYNCED_SEAL: self._on_seal_question}

    def statistics(self) -> dict[str, int]:
        """Return how many partitions were sealed and opened by this process."""
        return {"sealed": self.sealed, "opened": self.opened}

    def check(self) -> None:
        """Start the steps that are due and not under way."""
        self._changes.forget(self._shard.view.topics())
        for record, partition in self._work.due(self._due):
            if partition is not None and not partition.replica.leading:
                self._learn(record, partition)
            elif partition is not None and record.group not in self._under_way:
                self._under_way.add(record.group)
                self._shard.spawn(self._perform(record, partition))

    def _is_due(self, record: PartitionRecord, partition: Partition | None) -> bool:
        topic = self._shard.view.topics().get(record.topic)
        if partition is None or topic is None:
            return False
        origin, end = self._changes.around(topic, record.number)
        if partition.replica.leading:
            return duty_of(partition, origin, end) is not None
        return end is not None and record.number in end.seals and partition.kept_seal is None

    def _learn(self, record: PartitionRecord, partition: Partition) -> None:
        """Note that the seal in this replica's log is final, if it is the one that the catalog has."""
        topic = self._shard.view.topics().get(record.topic)
        change = None if topic is None else self._changes.around(topic, record.number)[1]
        if change is not None and self._is_reported(change, partition):
            partition.keep_seal()

    async def _perform(self, record: PartitionRecord, partition: Partition) -> None:
        """Take the step that is due for one partition; if it fails, it stays due."""
        try:
            topic = self._shard.view.topics().get(record.topic)
            if topic is None or not partition.leads:
                return
            origin, end = self._changes.around(topic, record.number)
            duty = duty_of(partition, origin, end)
            if duty == "ask":
                await self._ask(record, partition)
            elif duty == "open" and origin is not None:
                await self._open(topic, origin, partition)
            elif duty == "seal" and end is not None:
                await self._seal(topic, end, record, partition)
        except Problem as problem:
            _log.debug("%s/%d: %s", record.topic, record.number, problem)
        except (TransportError, StorageError) as error:
            _log.debug("%s/%d: %s", record.topic, record.number, error)
        finally:
            self._under_way.discard(record.group)

    # -- ask -----------------------------------------------------------------------------------

    async def _ask(self, record: PartitionRecord, partition: Partition) -> None:
        """Compare with the newest catalog, and let the partition take records if no change forbids it."""
        term = partition.replica.core.term
        await self._shard.refresh_view()
        topic = self._shard.view.topics().get(record.topic)
        known = self._shard.view.partition(record.topic, record.number)
        if topic is None or known is None or known.group != record.group:
            return  # The partition is deleted.
        if not partition.leads or partition.replica.core.term != term:
            return  # The next leader asks for itself.
        origin, end = self._changes.around(topic, record.number)
        if duty_of(partition, origin, end) == "ask" and (origin is None or origin.state == "done"):
            partition.lacks_no_seal()

    # -- open ----------------------------------------------------------------------------------

    async def _open(self, topic: TopicRecord, origin: RouteChange, partition: Partition) -> None:
        own = next(each for each in origin.outputs if each.number == partition.number)
        record = OpenRecord(
            origin.id, origin.version, own.first, own.size, self._inputs_of(topic.name, origin)
        )
        await partition.propose_open(record)
        self.opened += 1

    def _inputs_of(self, topic: str, change: RouteChange) -> list[Input]:
        """Return the inputs of a change that are sealed and not reclaimed.

        In a forced change some inputs may not be sealed yet.
        """
        found = []
        for held in change.inputs:
            seal = change.seals.get(held.number)
            record = self._shard.view.partition(topic, held.number)
            if seal is not None and record is not None:
                found.append(Input(held.number, record.group, seal.end_offset, seal.time_ms))
        return found

    # -- seal ----------------------------------------------------------------------------------

    async def _seal(
        self, topic: TopicRecord, change: RouteChange, record: PartitionRecord, partition: Partition
    ) -> None:
        """Seal a partition, wait until a majority has synced the seal, and report it to the catalog."""
        assert change.state != "preparing", "only the inputs of a closing change are sealed"
        # Hold the partition: the hold that the change's driver asked for may end, and a new leader has none.
        partition.hold(plan.HOLD_MS / 1000)
        self._clear_the_way(partition)
        outputs = [Output(each.number, each.first, each.size, each.group) for each in change.outputs]
        was_sealed = partition.state.succession.sealed is not None
        await partition.propose_seal(SealRecord(change.id, change.version, outputs, change.order))
        self._blocked_s.pop(record.group, None)
        self.sealed += not was_sealed
        while partition.kept_seal is None:
            partition.check_leads()
            reported = self._is_reported(change, partition)
            if reported or partition.seal_is_kept(await self._synced_seals(partition)):
                partition.keep_seal()
            else:
                await asyncio.sleep(SYNC_RETRY_S)
        kept = partition.kept_seal
        if record.number not in change.seals:
            seal = Seal(kept.index, kept.end, kept.time_ms)
            report = ReportSeal(topic.name, change.id, record.number, record.group, seal)
            answer = await self._shard.ask_catalog(RouteRequest(report))
            if answer.result is not None:
                await self._until_seen(answer.result.version)

    def _clear_the_way(self, partition: Partition) -> None:
        """Drop staged records that are not prepared, once they have delayed the seal for `PATIENCE_S`."""
        now_s = asyncio.get_running_loop().time()
        if not partition.state.stages:
            self._blocked_s.pop(partition.replica.group, None)
        elif now_s >= self._blocked_s.setdefault(partition.replica.group, now_s) + PATIENCE_S:
            drop_unprepared(partition)

    async def _synced_seals(self, partition: Partition) -> dict[str, tuple[int, int]]:
        """Sync this log and ask the other voters to sync theirs; return their `synced_seal`, by node."""
        others = [
            node
            for voter, node in partition.replica.configuration_record.voters
            if voter != partition.replica.replica_id
        ]
        said, _ = await asyncio.gather(
            asyncio.gather(*(self._ask_synced(node, partition) for node in others)),
            self._sync_seal(partition),
        )
        return dict(zip(others, said, strict=True))

    async def _ask_synced(self, node: str, partition: Partition) -> tuple[int, int]:
        address = self._shard.view.partition_address(node, partition.topic, partition.number)
        if address is None:
            return (0, 0)
        payload = msgspec.msgpack.encode(SealQuestion(partition.replica.group))
        try:
            said = await self._transport.call(address, SYNCED_SEAL, payload, timeout=SYNC_TIMEOUT_S)
            answer = msgspec.msgpack.decode(said, type=SealAnswer)
        except (TransportError, msgspec.DecodeError):
            return (0, 0)
        return (answer.index, answer.term)

    async def _sync_seal(self, partition: Partition) -> None:
        """Sync the log up to its seal at once, because an `interval` log would be synced only later."""
        seal = partition.state.succession.sealed
        if seal is not None and seal.index > partition.log.synced_index:
            await self._shard.storage.sync(durable=True)

    @staticmethod
    def _is_reported(change: RouteChange, partition: Partition) -> bool:
        """Return whether the catalog has recorded the seal that is in this log."""
        seal = partition.state.committed_seal
        return seal is not None and change.seals.get(partition.number) == Seal(
            seal.index, seal.end, seal.time_ms
        )

    async def _until_seen(self, version: int) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SEEN_S
        while self._shard.view.version < version and loop.time() < deadline:
            await self._shard.view_change(deadline - loop.time())

    # -- questions of others --------------------------------------------------------------------

    async def _on_seal_question(self, peer: Peer, payload: bytes) -> bytes:
        question = msgspec.msgpack.decode(payload, type=SealQuestion)
        partition = self._shard.by_group.get(question.group)
        answer = SealAnswer()
        if partition is not None:
            await self._sync_seal(partition)
            answer = SealAnswer(*partition.synced_seal)
        return msgspec.msgpack.encode(answer)

    async def _on_question(self, peer: Peer, payload: bytes) -> bytes:
        question = msgspec.msgpack.decode(payload, type=PartitionQuestion)
        partition = self._shard.by_group.get(question.group)
        if partition is None:
            return msgspec.msgpack.encode(PartitionAnswer())
        if not partition.leads:
            self._shard.driver.leader_requested(partition.replica)
            return msgspec.msgpack.encode(PartitionAnswer())
        if question.hold_ms:
            partition.hold(question.hold_ms / 1000)
        if question.drop:
            drop_unprepared(partition)
        refusal = partition.appends.no_room()
        stages = partition.state.stages
        return msgspec.msgpack.encode(
            PartitionAnswer(
                leads=True,
                under_way=len(stages),
                prepared=sum(batch.prepared for _, batch in stages.batches()),
                refused="" if refusal is None else refusal.detail or refusal.code,
            )
        )


def drop_unprepared(partition: Partition) -> None:
    """Propose to drop all staged batches that are not prepared, which no decision can name. Leader only."""
    try:
        Participant(partition).drop_unprepared()
    except Problem as problem:
        _log.debug("%s/%d: %s", partition.topic, partition.number, problem)
