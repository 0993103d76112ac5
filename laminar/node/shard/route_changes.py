"""A shard's part in changes of routes: its inputs end, its outputs open (docs/routes.md).

For each group that is led here, by the view of the catalog:

1. *Seal.* An input of a change that is closing, or is done by force, appends its `SEAL`. A view may be old,
   but what is closing is never cancelled.
2. *Report.* When the seal is committed, and synced by a majority of the voters, the leader reports it to the
   catalog. One that finds the seal in its log goes on from there.
3. *Open.* An output of a change that is done appends its `OPEN`.
4. *Learn.* Any other replica learns from the catalog that the seal in its log is kept, so that it may tell
   readers.
5. *Ask.* A leader that may lack a seal takes no records before it has compared with the catalog as it is
   now. If a change is closing over the partition, or done, it is sealed again; if the change that made it is
   not done, it waits.

What is not done is due again (`WorkLists`), and looked at every `CHECK_S`, with each view and each election.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container
from typing import Literal

import msgspec

from laminar.http.api.problems import Problem
from laminar.log.disk.errors import StorageError
from laminar.node.catalog.route_requests import RouteRequest
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
from laminar.node.shard.context import ShardContext
from laminar.node.shard.work_lists import WorkLists
from laminar.node.transactions.participant import Participant
from laminar.node.transport.transport import Peer, Transport, TransportError
from membership.records import PartitionRecord, RouteChange, Seal, TopicRecord
from membership.requests import ReportSeal

_log = logging.getLogger("laminar.routes")

CHECK_S = 0.2
# How long another voter has for the sync of its seal; and the pause before it is asked again.
SYNC_TIMEOUT_S = 2.0
SYNC_RETRY_S = 0.05
# How long a sealed partition waits for the view with its report, before it reports again.
SEEN_S = 1.0
# How long after its change began to close an input drops what is staged, not prepared, and in the way of its
# seal. The other inputs may be sealed by then, and their keys wait.
PATIENCE_S = 5.0

Duty = Literal["ask", "open", "seal"]


def duty_of(partition: Partition, origin: RouteChange | None, end: RouteChange | None) -> Duty | None:
    """Return what the leader of a partition has to do for the changes that made it, and that end it."""
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
    """The changes before and after each partition, by the newest records of topics: a table of each."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[TopicRecord, dict[int, RouteChange], dict[int, RouteChange]]] = {}

    def around(self, topic: TopicRecord, number: int) -> tuple[RouteChange | None, RouteChange | None]:
        """Return the change that made a partition, and the one that ends it; None: there is none."""
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
        """Forget the topics that are not there any more."""
        for name in [name for name in self._known if name not in topics]:
            del self._known[name]


class RouteChanges:
    """The inputs and outputs that one shard leads. The shard calls `check` when something may be due."""

    def __init__(self, shard: ShardContext, work: WorkLists, *, transport: Transport) -> None:
        self._shard = shard
        self._work = work
        self._transport = transport
        self._due = work.add("routes", self._is_due)
        self._changes = Changes()
        self._under_way: set[bytes] = set()
        # By group, since when (the loop's time) something is in the way of its seal.
        self._blocked_s: dict[bytes, float] = {}
        self.sealed = 0
        self.opened = 0

    @property
    def methods(self) -> dict[str, Method]:
        """What other processes ask of this shard."""
        return {QUESTION: self._on_question, SYNCED_SEAL: self._on_seal_question}

    def statistics(self) -> dict[str, int]:
        """Return how many partitions were sealed and opened by this process."""
        return {"sealed": self.sealed, "opened": self.opened}

    def check(self) -> None:
        """Begin what is due and not under way."""
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
        """Note that the seal in this replica's log is kept, if it is the one that the catalog has."""
        topic = self._shard.view.topics().get(record.topic)
        change = None if topic is None else self._changes.around(topic, record.number)[1]
        if change is not None and self._is_reported(change, partition):
            partition.keep_seal()

    async def _perform(self, record: PartitionRecord, partition: Partition) -> None:
        """Do what is due for one partition; what fails is due again."""
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
        """Compare with the catalog as it is now: let the partition take records, if nothing forbids it."""
        term = partition.replica.core.term
        await self._shard.refresh_view()
        topic = self._shard.view.topics().get(record.topic)
        known = self._shard.view.partition(record.topic, record.number)
        if topic is None or known is None or known.group != record.group:
            return  # it is deleted
        if not partition.leads or partition.replica.core.term != term:
            return  # the next leader asks
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
        """Return the inputs that are sealed and not reclaimed; those of a forced change may not be."""
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
        """Seal a partition, see to it that the seal is kept, and report it."""
        assert change.state != "preparing", "only what is closing is sealed"
        # The driver's hold may end, and a new leader holds nothing.
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
        """Drop what is not prepared, once it has been in the way of the seal for `PATIENCE_S`."""
        now_s = asyncio.get_running_loop().time()
        if not partition.state.stages:
            self._blocked_s.pop(partition.replica.group, None)
        elif now_s >= self._blocked_s.setdefault(partition.replica.group, now_s) + PATIENCE_S:
            drop_unprepared(partition)

    async def _synced_seals(self, partition: Partition) -> dict[str, tuple[int, int]]:
        """Sync this log, and have the other voters sync theirs; return the seals that they name then."""
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
        """Sync the log up to its seal at once: an `interval` log would wait for its time."""
        seal = partition.state.succession.sealed
        if seal is not None and seal.index > partition.log.synced_index:
            await self._shard.storage.sync(durable=True)

    @staticmethod
    def _is_reported(change: RouteChange, partition: Partition) -> bool:
        """Return whether it is this log's seal that the catalog has recorded."""
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
    """Propose to drop all that is staged and not prepared: no decision may name it. Leader only."""
    try:
        Participant(partition).drop_unprepared()
    except Problem as problem:
        _log.debug("%s/%d: %s", partition.topic, partition.number, problem)
