"""The coordinator of transactions over partitions: it decides which batches of a sink are committed.

docs/consensus.md#transactions explains why each step is needed.

A sink's name selects one partition of the topic `_transactions`; the leader of that partition coordinates
the sink. A commit has five steps: the epoch is checked; every target partition prepares its stages; one entry
in the coordinator's log decides; every target publishes; one more entry records that all have published. The
decision is checked against the table of sinks as of the log's end, in the same turn of the loop in which it
is proposed, so it is refused if an earlier entry of the log raised the epoch. The last two steps are in
`decision_publisher`: a later leader continues with them.

The caller passes an object that calls the targets (`Targets`). Every step may be repeated.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec

from laminar.http.api.problems import Problem
from laminar.node.partition.partition import Partition
from laminar.node.partition.problems import NO_MAKER, Maker
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.pins import PartAcks
from laminar.node.partition.state.sinks import (
    FIRST_ONCE_EPOCH,
    MAX_KEPT,
    Decision,
    Deletion,
    Sink,
    Target,
    first_once_epoch,
)
from laminar.node.transactions.decision_publisher import DecisionPublisher, PublishTargets
from laminar.node.transactions.sink_log import SinkLog

TOPIC = "_transactions"


def id_of(name: str) -> bytes:
    """Return the id (16 bytes) of the sink with this name, which is in the headers of its batches."""
    return hashlib.sha256(b"sink\0" + name.encode()).digest()[:16]


def id_of_name(name: str) -> bytes:
    """Return the id (16 bytes) of a producer's name in the table of sinks; it differs from every sink's."""
    return hashlib.sha256(b"producer\0" + name.encode()).digest()[:16]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a commit in one partition.

    `stages` are the numbers of the stages to prepare. If it is empty, the stages were prepared before, and
    `prepared` is their number; if that is 0, too, the part has no records. `acks` are the jobs of channels
    that the part acknowledges.
    """

    topic: str
    partition: int
    stages: list[int] = []
    prepared: int = 0
    acks: list[PartAcks] = []

    @property
    def has_records(self) -> bool:
        """Whether the part has stages."""
        return bool(self.stages or self.prepared)


class Prepared(msgspec.Struct, frozen=True, array_like=True):
    """The promise of a partition: its group's id, and the index of the `prepare` entry in its log.

    `pin_index` is the index of the entry that pinned (reserved) the jobs to be acknowledged; 0 if there are
    none.
    """

    group: bytes
    prepare_index: int
    pin_index: int = 0


class Targets(PublishTargets, Protocol):
    """The participants of a transaction: the leaders of other partitions, on any node."""

    async def prepare(self, sink: bytes, number: int, epoch: int, part: Part) -> Prepared:
        """Ask the leader of a partition to prepare its part of a batch. Raises `Problem`."""


class Coordinator:
    """The coordinator of the sinks on one partition of `_transactions`, while this process leads that."""

    def __init__(
        self,
        partition: Partition,
        targets: Targets,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self.partition = partition
        self._targets = targets
        self._sinks = SinkLog(partition)
        self._publisher = DecisionPublisher(partition, self._sinks, targets, spawn=spawn)

    async def begin(
        self,
        sink_id: bytes,
        name: str,
        request: str = "",
        *,
        epoch: int = 0,
        once: bool = False,
        maker: Maker = NO_MAKER,
    ) -> Sink:
        """Raise the sink's epoch and return the sink; its former driver is refused from now on.

        `request` is an id that the client chose for this call ("": none). If this request raised the epoch
        last, the epoch is not raised again: a repeated request does not fence the driver that it began. With
        `epoch` (0: any) the epoch is raised to exactly that value, or not at all. `once` asks for a single-
        use sink, which may be forgotten after its batch; an existing usual sink stays a usual one.

        Raises:
            Problem: 409 `fenced` when another driver began this epoch or a later one; 422 `invalid` when
                `epoch` is not the next; 404 `no_such_sink` when the sink to which `epoch` belongs was deleted
                or forgotten; 409 `in_progress` while the sink is being deleted; 429 `quota` when there are as
                many sinks as permitted.
        """
        sink = self._sinks.get(sink_id)
        if epoch > sink.last_epoch + 1:
            # A deposed leader that has not noticed does not know the epochs between. Only a confirmed leader
            # may say that they never began.
            await self.partition.reader.confirmed_end()
            sink = self._sinks.get(sink_id)
        if sink.deletion is Deletion.BEGUN:
            raise Problem(
                "in_progress",
                f"sink {name!r} is being deleted, and some partitions have not removed it yet",
                field="sink",
                value=name,
                hint="DELETE it again, until that is answered 204.",
                outcome="not_applied",
            )
        if epoch and sink.deletion:
            # An epoch is named by a driver that continues. The numbers of a new sink start again, so it would
            # commit once more what it had committed before the deletion.
            raise Problem(
                "no_such_sink",
                f"sink {name!r} was deleted",
                field="sink",
                value=name,
                hint="Without an epoch a new sink of this name begins, which has committed no batch.",
                outcome="not_applied",
            )
        if epoch and epoch != sink.last_epoch + 1 and not (request and sink.begun_by == request):
            if sink.epoch == 0 and epoch < sink.first:
                raise _not_the_first(name, sink, epoch)
            raise _not_the_epoch(sink, epoch)
        unknown = sink.epoch == 0 or sink.deletion is Deletion.DONE
        if unknown:
            maker.check("sinks", self.partition.state.sinks.made_by)
        if once and unknown:
            sink = msgspec.structs.replace(
                self._new_once(), deleted_by=sink.begun_by if sink.deletion else ""
            )
        elif unknown and self.partition.state.sinks.kept >= MAX_KEPT:
            raise Problem(
                "quota",
                "this coordinator has the maximum number of sinks",
                field="sink",
                value=name,
                limit=MAX_KEPT,
                hint="once=true begins a single-use sink, which is forgotten after its batch.",
                outcome="not_applied",
            )
        elif sink.deletion:
            # A new sink of the same name: it begins above the old one's epochs, so that none is used twice.
            sink = Sink("", epoch=sink.epoch, first=sink.epoch + 1, deleted_by=sink.begun_by)
        elif unknown:
            # `first` is above the floor: no epoch of a sink that was deleted and forgotten is used twice.
            sink = Sink("", epoch=sink.last_epoch, first=sink.first)
        made_by = maker.principal if unknown else sink.made_by
        begun = msgspec.structs.replace(sink, name=name, once=once and sink.once, made_by=made_by)
        return await self._raise(sink_id, begun, request)

    async def delete(self, sink_id: bytes, request: str) -> Sink:
        """Begin to delete a sink, and return it: its driver is refused from now on.

        A batch that is decided is published everywhere first. Afterwards the caller asks every partition to
        forget the sink, and then calls `deleted`. A repetition of `request` (an id that the client chose), or
        a call while the deletion is under way, returns the sink as it is.

        Raises:
            Problem: 404 `no_such_sink`, or 409 `in_progress` when a batch cannot be published now.
        """
        sink = self._sinks.get(sink_id)
        again = (sink.deletion and sink.begun_by == request) or (request and sink.deleted_by == request)
        if sink.deletion is Deletion.BEGUN or again:
            # The caller may ask partitions to forget the sink only after the epoch that refuses its drivers
            # is
            # committed.
            partition = self.partition
            await partition.appends.when_committed(partition.log.last_index, Receipt(partition.number, 0, 0))
            return sink
        if not sink.exists:
            # A deposed leader that has not noticed may not know of the sink. Only a confirmed leader may say
            # that there is none.
            await self.partition.reader.confirmed_end()
            if not self._sinks.get(sink_id).exists:
                raise Problem("no_such_sink", "there is no such sink", outcome="not_applied")
            return await self.delete(sink_id, request)
        if sink.undone is not None:
            try:
                await self._publisher.finished(sink_id, sink.undone.number)
            except Problem as problem:
                raise Problem(
                    "in_progress",
                    f"the sink is not deleted: {problem.detail}",
                    field="sink",
                    value=sink.name,
                    outcome="not_applied",
                ) from problem
            return await self.delete(sink_id, request)
        # No decision is open in this turn of the loop, and no later one can be under this epoch.
        gone = msgspec.structs.replace(sink, epoch=sink.epoch + 1, begun_by=request, deletion=Deletion.BEGUN)
        await self._sinks.change(sink_id, gone, ends=True)
        return gone

    async def deleted(self, sink_id: bytes, epoch: int) -> Sink:
        """Record that every partition has forgotten the sink up to this epoch, so that its name is free.

        Returns the sink; unchanged if it is not being deleted under this epoch.
        """
        # A deposed leader that has not noticed may not know of the deletion, or may hold an end of it that
        # will be truncated.
        await self.partition.reader.confirmed_end()
        sink = self._sinks.get(sink_id)
        if sink.deletion is Deletion.BEGUN and sink.epoch == epoch:
            sink = msgspec.structs.replace(sink, deletion=Deletion.DONE)
            await self._sinks.change(sink_id, sink, ends=True)
        return sink

    async def over(self, sinks: Sequence[bytes]) -> list[bytes]:
        """Return those of `sinks` without an open decision, confirmed by a majority after this call.

        All batches that were decided for them are published in every partition, so no coordinator will ask
        for that again.
        """
        await self.partition.reader.confirmed_end()
        await self._recorded(sinks)
        table = self.partition.state.sinks
        states = [(sink_id, table.get(sink_id), table.committed_at(sink_id)) for sink_id in sinks]
        return [
            sink_id
            for sink_id, last, committed in states
            if (last is None or last.undone is None) and (committed is None or committed.undone is None)
        ]

    async def listed(self, *, prefix: str, after: str, limit: int) -> list[Sink]:
        """Return the sinks that exist or are being deleted, confirmed by a majority after this call.

        They are the first `limit` by name of those that begin with `prefix` and sort after `after`.
        """
        await self.partition.reader.confirmed_end()
        return self.partition.state.sinks.listed(prefix=prefix, after=after, limit=limit)

    def _new_once(self) -> Sink:
        """Return a new single-use sink, whose epoch is still the one before its first."""
        first = first_once_epoch(self.partition.log.last_index)
        return Sink("", epoch=first - 1, first=first, once=True)

    async def end(self, sink_id: bytes, epoch: int) -> Sink:
        """Make it impossible that a single-use sink's batch is still decided under `epoch`; return the sink.

        It is for a sink whose driver has been silent for too long: its epoch is raised. A sink that has
        another epoch, or has decided its batch, or is no single-use sink, is returned in its committed state.
        """
        sink = self._sinks.get(sink_id)
        if sink.epoch == 0:
            # Forgotten, or never begun. Raising an epoch ensures that this is still so when the answer
            # arrives.
            sink = self._new_once()
        elif not sink.once or sink.epoch != epoch or sink.number >= 0:
            return await self.status(sink_id)
        return await self._raise(sink_id, sink, "", ends=True)

    async def fence(self, sink_id: bytes, epoch: int, number: int) -> Sink:
        """Make it impossible that batch `number` of a sink is still decided under `epoch`; return the sink.

        It is for a driver that pinned jobs and was silent for too long: the sink gets an epoch above the
        driver's. The driver's epoch may be unknown here: it was only in the log of a deposed leader, and
        never committed. A sink that has a newer epoch, or has decided the batch, is returned in its committed
        state.
        """
        sink = self._sinks.get(sink_id)
        if sink.epoch == 0:
            sink = self._new_once()  # as in `end`
        elif sink.epoch > epoch or sink.number >= number:
            return await self.status(sink_id)
        else:
            sink = msgspec.structs.replace(sink, epoch=epoch)
        return await self._raise(sink_id, sink, "", ends=True)

    async def take_name(
        self, sink_id: bytes, name: str, producer: bytes, request: str = "", *, maker: Maker = NO_MAKER
    ) -> Sink:
        """Raise the epoch of a producer's name; return the name's entry, with its id and the new epoch.

        `producer` (16 bytes) is the producer id that the name gets if it has none yet.
        """
        sink = self._sinks.get(sink_id)
        made_by = sink.made_by
        if not sink.producer:
            maker.check("producers", self.partition.state.sinks.names_made_by)
            made_by = maker.principal
        named = msgspec.structs.replace(sink, name=name, producer=sink.producer or producer, made_by=made_by)
        return await self._raise(sink_id, named, request)

    async def _raise(self, sink_id: bytes, sink: Sink, request: str, *, ends: bool = False) -> Sink:
        if request and sink.begun_by == request:
            partition = self.partition
            await partition.appends.when_committed(partition.log.last_index, Receipt(partition.number, 0, 0))
            return sink
        begun = msgspec.structs.replace(sink, epoch=sink.epoch + 1, begun_by=request)
        await self._sinks.change(sink_id, begun, ends=ends)
        return begun

    async def status(self, sink_id: bytes) -> Sink:
        """Return the committed state of the sink, confirmed by a majority after this call.

        A batch whose commit was answered is not shown as under way.
        """
        await self.partition.reader.confirmed_end()
        await self._recorded([sink_id])
        sinks = self.partition.state.sinks
        return sinks.committed_at(sink_id) or sinks.unknown

    async def _recorded(self, sinks: Sequence[bytes]) -> None:
        """Wait until the entries that record the publication of these sinks' batches are committed.

        The commit of a batch is answered before that. Without the wait, the batch could then still be shown
        as under way.
        """
        table = self.partition.state.sinks
        for sink_id in sinks:
            known, last = table.committed_at(sink_id), table.get(sink_id)
            if known is not None and known.undone is not None and (last is None or last.undone is None):
                await self._sinks.until_committed()
                return

    async def commit(
        self, sink_id: bytes, number: int, epoch: int, parts: Sequence[Part], fingerprint: str = ""
    ) -> bool:
        """Commit a batch atomically; return True when all its partitions have published it.

        Returns False if this number, or a higher one, was committed before; it is published then, too.
        `fingerprint` is the driver's digest of the batch ("": none).

        Raises:
            Problem: 409 `fenced` for an older epoch; 409 `no_stage` where a partition no longer holds a
                stage; 409 `late` where a job is not out under its delivery any more; 422 `invalid` for an
                epoch that never began; 404 `no_such_sink` for an epoch of a sink that was forgotten; 504
                `outcome_unknown` when it is not known whether the batch is decided and published everywhere;
                `stages_lost` when this or the previous batch was decided and can't be published any more; 409
                `other_batch` when this number is decided with another fingerprint, that is, for another
                batch.
        """
        if epoch > self._sinks.get(sink_id).epoch:
            # A deposed leader that has not noticed does not know of a newer epoch. Only a confirmed leader
            # may say that it never began.
            await self.partition.reader.confirmed_end()
        if self._decided(sink_id, number, epoch, fingerprint):
            await self._publisher.finished(sink_id, number)
            return False
        answers = await asyncio.gather(
            *(self._targets.prepare(sink_id, number, epoch, part) for part in parts), return_exceptions=True
        )
        # Entries that were appended meanwhile are in the table now, and there is no await from here to the
        # proposal. One of them may have decided this very batch; then that is why a prepare failed.
        if self._decided(sink_id, number, epoch, fingerprint):
            await self._publisher.finished(sink_id, number)
            return False
        for answer in answers:
            if isinstance(answer, BaseException):
                # A deposed leader that has not noticed may not know of the commit, forgotten there since.
                await self.partition.reader.confirmed_end()
                if self._decided(sink_id, number, epoch, fingerprint):
                    await self._publisher.finished(sink_id, number)
                    return False
                raise answer
        sink = self._sinks.get(sink_id)
        if sink.undone is not None:
            # The previous batch is decided and not published everywhere: wait until it is.
            try:
                await self._publisher.finished(sink_id, sink.undone.number)
            except Problem as problem:
                if problem.code == "stages_lost":
                    problem.outcome = "not_applied"  # this batch is not decided
                raise
            return await self.commit(sink_id, number, epoch, parts, fingerprint)
        targets = tuple(
            Target(
                part.topic,
                part.partition,
                answer.group,
                answer.prepare_index,
                answer.pin_index,
                part.has_records,
            )
            for part, answer in zip(parts, answers, strict=True)
            if isinstance(answer, Prepared)
        )
        decision = Decision(number, epoch, targets)
        await self._sinks.change(
            sink_id, msgspec.structs.replace(sink, number=number, undone=decision, fingerprint=fingerprint)
        )
        await self._publisher.finished(sink_id, number)
        return True

    def _decided(self, sink_id: bytes, number: int, epoch: int, fingerprint: str) -> bool:
        """Return whether this number, or a higher one, is decided as of the log's end.

        Raises:
            Problem: no batch may be decided under this epoch, or the number is decided with another
                fingerprint.
        """
        sink = self._sinks.get(sink_id)
        refuse_epoch(sink, epoch)
        known = sink.fingerprint
        if number == sink.number and fingerprint and known and fingerprint != known:
            raise Problem(
                "other_batch",
                f"batch {number} of sink {sink.name!r} is committed, with another fingerprint",
                field="fingerprint",
                value=fingerprint,
                limit=known,
                outcome="not_applied",
            )
        return number <= sink.number

    def finish_all(self) -> None:
        """Start to publish every open decision, also those of earlier leaders. Call it periodically."""
        self._publisher.finish_all()


def refuse_epoch(sink: Sink, epoch: int) -> None:
    """Raise `Problem` if no batch can be decided under `epoch`: it is not current, or the sink is deleted."""
    if epoch >= FIRST_ONCE_EPOCH and (epoch < sink.first or sink.epoch < FIRST_ONCE_EPOCH):
        raise Problem(
            "no_such_sink",
            f"the sink that began with epoch {epoch} was single-use and has been forgotten: "
            "its batch may have been committed before it was forgotten",
            field="epoch",
            value=epoch,
            outcome="unknown",
        )
    if sink.epoch == 0 and 0 < epoch < sink.first:
        raise Problem(
            "no_such_sink",
            f"no sink has epoch {epoch}; one that was deleted may have had it, and committed this batch",
            field="epoch",
            value=epoch,
            limit=sink.last_epoch,
            outcome="unknown",
        )
    # A sink that never began has the epoch 0, and a request may name 0, too.
    if epoch != sink.epoch or sink.epoch == 0 or sink.deletion:
        raise _not_the_epoch(sink, epoch)


def _not_the_first(name: str, sink: Sink, epoch: int) -> Problem:
    return Problem(
        "no_such_sink",
        f"there is no sink {name!r}, and a new one would not begin with epoch {epoch}",
        field="epoch",
        value=epoch,
        limit=sink.last_epoch,
        hint="It may be of a sink that was deleted. One that begins now has the epoch after `limit`.",
        outcome="not_applied",
    )


def _not_the_epoch(sink: Sink, epoch: int) -> Problem:
    return Problem(
        "fenced" if epoch <= sink.epoch and sink.epoch else "invalid",
        f"sink {sink.name!r} was deleted"
        if sink.deletion
        else f"the epoch of sink {sink.name!r} is {sink.epoch}",
        field="epoch",
        value=epoch,
        limit=sink.last_epoch,
        outcome="not_applied",
    )
