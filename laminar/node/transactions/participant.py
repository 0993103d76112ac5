"""The participant of transactions in one partition: stages batches, prepares, publishes and drops them.

Every step may be repeated, and is answered as the first time. The participant decides only by its partition's
table of staged batches (`laminar.node.partition.state.staged_batches`). It never drops a prepared batch
unless it is asked to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from laminar.batch import Header, Kind, as_staged
from laminar.batch.header import HEADER_SIZE, seal
from laminar.http.api.documents.transactions import MAX_STAGES
from laminar.http.api.problems import Problem
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.sinks import FIRST_ONCE_EPOCH
from laminar.node.partition.state.staged_batches import MAX_PUBLISHED_ONCE, BatchKey, Published, Stage
from laminar.node.partition.state.staging_entries import PrepareOperation, PrepareRecord, PublishRecord

# The most publications that one `prepare` entry can remove.
FORGOTTEN_IN_ONE = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch of a sink: the sink's id (16 bytes), the number, and the epoch of the driver that staged it."""

    sink: bytes
    number: int
    epoch: int

    @property
    def key(self) -> BatchKey:
        """The key of the batch in the table of staged batches."""
        return (self.sink, self.number, self.epoch)


class Participant:
    """The transaction commands of one partition. Leader only: elsewhere they raise 503 `not_leader`.

    Each future is resolved when its entry is committed; for a command that was carried out before, when that
    entry is committed.
    """

    def __init__(self, partition: Partition) -> None:
        self._partition = partition

    def stage(
        self, batch: Batch, stage: int, frame: bytearray | memoryview, header: Header
    ) -> asyncio.Future[Receipt]:
        """Append a verified, unstamped batch of records as stage number `stage` of `batch`.

        `header` is that of `frame`, which is changed in place into a `staged` entry. If the same records are
        staged under this number already, nothing is appended.

        Raises:
            Problem: 422 `invalid` when other records are staged under this number, there are too many stages,
                or the partition's flush policy is `interval`; 409 `in_progress` when the batch is prepared;
                409 `already_committed` when it or a later one is published; 503 `changing` while no batch may
                begin here.
        """
        partition = self._partition
        partition.check_leads()
        self._refuse_interval()
        self._refuse_published(batch)
        known = partition.state.stages.stage(batch.key, stage)
        if known is not None:
            if (known.records, known.body_crc) != (header.count, header.body_crc):
                raise Problem(
                    "invalid",
                    "another batch of records was staged under this number",
                    field="stage",
                    value=stage,
                    outcome="not_applied",
                )
            return partition.appends.when_committed(
                known.index, Receipt(partition.number, 0, known.records, True)
            )
        prepared = partition.state.stages.batch(batch.key)
        if prepared is None:
            partition.check_may_begin()
        elif prepared.prepared:
            raise Problem(
                "in_progress", "this batch is being committed: no stage can be added", outcome="not_applied"
            )
        if prepared is not None and prepared.count >= MAX_STAGES:
            raise Problem(
                "invalid",
                "a batch may have no more stages in one partition, failed attempts included",
                field="stages",
                value=prepared.count + 1,
                limit=MAX_STAGES,
                hint="Commit more often, or stage larger batches of records.",
                outcome="not_applied",
            )
        as_staged(
            frame,
            sink=batch.sink,
            epoch=batch.epoch,
            number=batch.number,
            stage=stage,
            records=header.count,
        )
        return partition.appends.append_control(frame)

    def prepare(self, batch: Batch, stages: Sequence[int]) -> asyncio.Future[Receipt]:
        """Promise to retain these stages of a batch until its decision is known, and drop its other stages.

        Raises:
            Problem: 409 `no_stage` when one of them is not here: dropped for its age, or never staged; 409
                `in_progress` when other stages of the batch are prepared under this epoch; 409
                `already_committed` when the batch or a later one is published; 429 `quota` when too many
                publications of single-use sinks are remembered here.
        """
        partition = self._partition
        partition.check_leads()
        self._refuse_interval()
        self._refuse_published(batch)
        closed = partition.appends.closed()
        if closed is not None:
            return closed
        known = partition.state.stages.batch(batch.key)
        have = {each.number for each in known.stages} if known is not None else set()
        missing = sorted(set(stages) - have)
        if missing or not stages:
            raise Problem(
                "no_stage",
                f"{partition.topic}/{partition.number} does not have all stages that are to be committed",
                field="stages",
                value=missing[0] if missing else None,
                limit=len(have),
                outcome="not_applied",
            )
        if known is None or not known.prepared:
            self._refuse_crowd(batch)
            return self._prepare(batch, PrepareOperation.PREPARE, stages)
        if have != set(stages):
            # The coordinator may already have decided on the prepared stages: only under a newer epoch may
            # others be prepared.
            raise Problem(
                "in_progress",
                "other stages of this batch are being committed in this epoch",
                field="stages",
                value=len(set(stages)),
                limit=len(have),
                outcome="not_applied",
            )
        return partition.appends.when_committed(
            partition.log.last_index, Receipt(partition.number, 0, 0, duplicate=True)
        )

    def confirm_prepared(self, batch: Batch, count: int) -> asyncio.Future[Receipt]:
        """Confirm that `count` stages of a batch are prepared here, by an earlier request.

        The count is enough, because a prepared batch is never prepared with other stages under its epoch.
        Raises 409 `no_stage` when the count differs.
        """
        partition = self._partition
        partition.check_leads()
        self._refuse_interval()
        self._refuse_published(batch)
        closed = partition.appends.closed()
        if closed is not None:
            return closed
        known = partition.state.stages.batch(batch.key)
        have = known.count if known is not None and known.prepared else 0
        if have != count:
            raise Problem(
                "no_stage",
                f"{partition.topic}/{partition.number} has prepared {have} stages of this batch, not {count}",
                field="prepared",
                value=count,
                limit=have,
                outcome="not_applied",
            )
        return partition.appends.when_committed(
            partition.log.last_index, Receipt(partition.number, 0, 0, duplicate=True)
        )

    def prepare_index_of(self, batch: Batch) -> int:
        """Return the index of a batch's `prepare` entry; 0 if it is not prepared, or the index is unknown."""
        known = self._partition.state.stages.batch(batch.key)
        return known.prepare_index if known is not None and known.prepared else 0

    def knows(self, batch: Batch, prepare_index: int = 0) -> bool:
        """Return whether `publish` with the same arguments would succeed, for the first time or repeated."""
        stages = self._partition.state.stages
        done, known = stages.published(batch.sink), stages.batch(batch.key)
        if done is not None and done.number >= batch.number:
            return True
        return (
            known is not None
            and known.prepared
            and (not prepare_index or not known.prepare_index or known.prepare_index == prepare_index)
        )

    def publish(self, batch: Batch, prepare_index: int = 0) -> asyncio.Future[Receipt]:
        """Give the records of a prepared batch their offsets; for a repetition return the first receipt.

        `prepare_index` is the index of the `prepare` entry that the decision names; 0 if it names none, as
        decisions of older versions. A batch that was prepared by another entry is not published: it was
        published long ago, and late requests have staged and prepared it again after the partition forgot
        that.

        Raises:
            Problem: 409 `no_stage` if the batch has no stages here that this entry prepared.
        """
        partition = self._partition
        partition.check_leads()
        done = partition.state.stages.published(batch.sink)
        if done is not None and done.number >= batch.number:
            return self._done(batch, done)
        known = partition.state.stages.batch(batch.key)
        if known is None or not self.knows(batch, prepare_index):
            raise Problem(
                "no_stage",
                f"{partition.topic}/{partition.number} has no stages that were prepared for this decision",
                field="number",
                value=batch.number,
                outcome="not_applied",
            )
        stages = sorted(known.stages, key=_number)
        record = PublishRecord(
            batch.sink, batch.number, batch.epoch, [(each.index, each.records) for each in stages]
        )
        tag_mask = 0
        for each in stages:
            tag_mask |= each.tag_mask
        count = sum(each.records for each in stages)
        frame = bytearray(HEADER_SIZE) + msgspec.msgpack.encode(record)
        # The entry is small and its batch decided, so it is accepted even while new records are refused for
        # lack of room.
        return partition.appends.append_control(
            seal(frame, Kind.PUBLISH, count=count, tag_mask=tag_mask), count=count, even_if_full=True
        )

    def drop(self, batch: Batch) -> asyncio.Future[Receipt]:
        """Remove the stages of a batch, prepared or not.

        The caller must know that the batch is not decided and can't be any more, or that it is published.
        """
        self._partition.check_leads()
        if self._partition.state.stages.batch(batch.key) is None:
            return self._partition.appends.when_committed(
                self._partition.log.last_index, Receipt(self._partition.number, 0, 0, duplicate=True)
            )
        return self._prepare(batch, PrepareOperation.DROP, [])

    def forget(self, sink: bytes, epoch: int) -> asyncio.Future[Receipt]:
        """Forget a deleted sink's epochs up to `epoch`: their stages, and which batch was published last.

        The caller must know that no batch can be decided under these epochs any more.
        """
        partition = self._partition
        partition.check_leads()
        stages = partition.state.stages
        published = stages.published(sink)
        if stages.of_sink(sink, epoch=epoch) or (published is not None and published.epoch <= epoch):
            return self._prepare(Batch(sink=sink, number=0, epoch=epoch), PrepareOperation.FORGET, [])
        return partition.appends.when_committed(
            partition.log.last_index, Receipt(partition.number, 0, 0, duplicate=True)
        )

    def forget_published(self, published: Sequence[tuple[bytes, int]]) -> None:
        """Propose to forget publications of single-use sinks, given as (sink, index of the publish entry).

        The caller must know from their coordinators that these sinks have no open decision. The outcome is
        not reported.
        """
        for first in range(0, len(published), FORGOTTEN_IN_ONE):
            some = list(published[first : first + FORGOTTEN_IN_ONE])
            record = PrepareRecord(bytes(16), 0, 0, PrepareOperation.FORGET_PUBLISHED, published=some)
            self._append(record, even_if_full=True).add_done_callback(_ignore)

    def drop_abandoned(self, *, idle_before_ms: int, begun_before_ms: int) -> int:
        """Propose to drop the batches in `StagedBatches.abandoned`; return their number.

        The times are compared with append times, by the leader only: the replicas drop a batch when they
        apply the proposed entry, and not by clocks of their own.
        """
        keys = self._partition.state.stages.abandoned(
            idle_before_ms=idle_before_ms, begun_before_ms=begun_before_ms
        )
        for sink, number, epoch in keys:
            self.drop(Batch(sink=sink, number=number, epoch=epoch)).add_done_callback(_ignore)
        return len(keys)

    def drop_unprepared(self) -> int:
        """Propose to drop every batch and every upload that is not prepared; return their number.

        It is for a change of the route that no longer waits for open batches. Prepared batches are retained,
        because a decision may name them. A later commit or publish of these is refused with 409 `no_stage`.
        """
        self._partition.check_leads()
        keys = [key for key, held in self._partition.state.stages.batches() if not held.prepared]
        for sink, number, epoch in keys:
            self.drop(Batch(sink=sink, number=number, epoch=epoch)).add_done_callback(_ignore)
        return len(keys)

    def _prepare(
        self, batch: Batch, operation: PrepareOperation, stages: Sequence[int]
    ) -> asyncio.Future[Receipt]:
        record = PrepareRecord(batch.sink, batch.number, batch.epoch, operation, sorted(set(stages)))
        return self._append(record, even_if_full=operation is not PrepareOperation.PREPARE)

    def _append(self, record: PrepareRecord, *, even_if_full: bool) -> asyncio.Future[Receipt]:
        frame = bytearray(HEADER_SIZE) + msgspec.msgpack.encode(record)
        return self._partition.appends.append_control(seal(frame, Kind.PREPARE), even_if_full=even_if_full)

    def _refuse_crowd(self, batch: Batch) -> None:
        """Refuse a prepare of a single-use sink while too many of their publications are remembered here.

        The prepare is the last step that can be refused: it may be followed by a decision, and a decided
        batch must be published.
        """
        known = self._partition.state.stages.published_once
        if batch.epoch >= FIRST_ONCE_EPOCH and known >= MAX_PUBLISHED_ONCE:
            raise Problem(
                "quota",
                f"{self._partition.topic}/{self._partition.number} remembers too many batches of single-use"
                " sinks; they are forgotten some time after their commit",
                field="published",
                value=known,
                limit=MAX_PUBLISHED_ONCE,
                retry_after_ms=1_000,
                outcome="not_applied",
            )

    def _refuse_interval(self) -> None:
        """Refuse if the flush policy is `interval`, which answers before a sync: prepares must be durable."""
        if self._partition.log.policy.is_interval:
            raise Problem(
                "invalid",
                "transactions require partitions with the flush policy `commit`",
                field="flush",
                value="interval",
                limit="commit",
                outcome="not_applied",
            )

    def _refuse_published(self, batch: Batch) -> None:
        done = self._partition.state.stages.published(batch.sink)
        if done is not None and done.number >= batch.number:
            raise Problem(
                "already_committed",
                f"batch {done.number} of this sink is published in {self._partition.topic}/"
                f"{self._partition.number}",
                field="number",
                value=batch.number,
                limit=done.number,
                outcome="not_applied",
            )

    def _done(self, batch: Batch, done: Published) -> asyncio.Future[Receipt]:
        known = done.number == batch.number
        receipt = Receipt(
            self._partition.number, done.offset if known else 0, done.count if known else 0, duplicate=True
        )
        return self._partition.appends.when_committed(done.index, receipt)


def _number(stage: Stage) -> int:
    return stage.number


def _ignore(future: asyncio.Future[Receipt]) -> None:
    """Ignore the outcome: the next check, here or on the next leader, proposes it again."""
    if not future.cancelled():
        future.exception()
