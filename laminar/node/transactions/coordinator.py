"""The coordinator of transactions over partitions: which driver may commit what, and when it ends.

Why each step is as it is: docs/consensus.md#transactions.

The sinks whose names fall to one partition of the topic `_transactions` are coordinated by the leader of
that partition. A commit is: the epoch is checked; every target pins what is to be published; one entry in
this log decides; every target publishes; one entry says that this is done. The decision is made against the
table as the end of this log has it, in the same turn in which it is proposed: an epoch that was raised
before it in the log refuses it. A leader that comes later finds what is undone in its table, and continues.

How targets are asked is given from outside; every step may be asked for again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec

from laminar.batch import Kind, build_control
from laminar.http.api.problems import Problem
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.sinks import (
    FIRST_ONCE_EPOCH,
    MAX_KEPT,
    Decision,
    Deletion,
    Sink,
    SinkChange,
    Target,
    first_once_epoch,
)

_log = logging.getLogger("laminar.transactions")

TOPIC = "_transactions"
RETRY_S = 0.05
SLOWEST_RETRY_S = 2.0
# The problem code of a batch whose stages are gone from a partition.
LOST_RETRY_S = 30.0
# A decision that was not published by then is answered as such: asking again waits on.
PUBLISH_WAIT_S = 20.0


def id_of(name: str) -> bytes:
    """Return the id (16 bytes) of a sink in the headers of its batches."""
    return hashlib.sha256(b"sink\0" + name.encode()).digest()[:16]


def id_of_name(name: str) -> bytes:
    """Return the id of a producer's name, which is no sink's."""
    return hashlib.sha256(b"producer\0" + name.encode()).digest()[:16]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a commit in one partition: the numbers of its stages, or how many it has `pinned`."""

    topic: str
    partition: int
    stages: list[int] = []
    pinned: int = 0


class Pinned(msgspec.Struct, frozen=True, array_like=True):
    """The promise of a partition: its group's id, and the index of the pin there."""

    group: bytes
    pin: int


class Targets(Protocol):
    """The participants of a transaction: the leaders of other partitions, on any node."""

    async def pin(self, sink: bytes, number: int, epoch: int, part: Part) -> Pinned:
        """Have a partition pin its part. Raises `Problem`."""

    async def publish(self, sink: bytes, number: int, epoch: int, target: Target) -> None:
        """Have a partition publish; nothing is left to do if its group is gone. Raises `Problem`."""


class Coordinator:
    """The coordinator on one partition of `_transactions`, while this process leads it."""

    def __init__(
        self,
        partition: Partition,
        targets: Targets,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self.partition = partition
        self._targets = targets
        self._spawn = spawn
        self._loop = asyncio.get_running_loop()
        # By sink, a decision of which some partition has nothing left, and since when that is known.
        self._lost: dict[bytes, tuple[Decision, Problem, float]] = {}
        # Sinks whose decision is being published here, and the futures that wait for it.
        self._finishing: dict[bytes, asyncio.Future[None]] = {}

    def _sink(self, sink_id: bytes) -> Sink:
        self.partition.check_leads()
        sinks = self.partition.state.sinks
        return sinks.get(sink_id) or sinks.unknown

    def _change(self, sink_id: bytes, sink: Sink, *, ends: bool = False) -> asyncio.Future[Receipt]:
        payload = msgspec.msgpack.encode(SinkChange(sink_id, sink))
        return self.partition.appends.append_control(build_control(Kind.SINK, payload), even_if_full=ends)

    async def begin(
        self, sink_id: bytes, name: str, request: str = "", *, epoch: int = 0, once: bool = False
    ) -> Sink:
        """Raise the sink's epoch; its former driver is refused from now on.

        Once for each `request` that is named, so a repeated or late one fences no driver that began by it.
        With `epoch`, to exactly that one. `once`: the sink writes one batch and is never used again, so it
        may be forgotten, unless it was ever begun otherwise.

        Raises:
            Problem: 409 `fenced` when another driver began this epoch or a later one, 422 `invalid` when it
                is not the next.
        """
        sink = self._sink(sink_id)
        if epoch > sink.last_epoch + 1:
            # A deposed leader that has not noticed does not know the epochs between: only the real one may
            # deny them.
            await self.partition.reader.confirmed_end()
            sink = self._sink(sink_id)
        if sink.deletion is Deletion.BEGUN:
            raise Problem(
                "in_progress",
                f"sink {name!r} is being deleted, and some partitions still know of it",
                field="sink",
                value=name,
                hint="DELETE it again, until that is answered 204.",
                outcome="not_applied",
            )
        if epoch and sink.deletion:
            # A driver that goes on would commit again what it had committed.
            raise Problem(
                "no_such_sink",
                f"sink {name!r} was deleted",
                field="sink",
                value=name,
                hint="Without an epoch it begins again, and knows of no batch.",
                outcome="not_applied",
            )
        if epoch and epoch != sink.last_epoch + 1 and not (request and sink.begun_by == request):
            if sink.epoch == 0 and epoch < sink.first:
                raise _not_the_first(name, sink, epoch)
            raise _not_the_epoch(sink, epoch)
        unknown = sink.epoch == 0 or sink.deletion is Deletion.DONE
        if once and unknown:
            sink = msgspec.structs.replace(
                self._new_once(), deleted_by=sink.begun_by if sink.deletion else ""
            )
        elif unknown and self.partition.state.sinks.kept >= MAX_KEPT:
            raise Problem(
                "quota",
                "no more sinks that are kept for ever can be begun",
                field="sink",
                value=name,
                limit=MAX_KEPT,
                hint="once=true begins one that is forgotten after its batch.",
                outcome="not_applied",
            )
        elif sink.deletion:
            # Another sink; no epoch of the old one comes again.
            sink = Sink("", epoch=sink.epoch, first=sink.epoch + 1, deleted_by=sink.begun_by)
        elif unknown:
            # Nor does an epoch of one that was deleted and forgotten since.
            sink = Sink("", epoch=sink.last_epoch, first=sink.first)
        begun = msgspec.structs.replace(sink, name=name, once=once and sink.once)
        return await self._raise(sink_id, begun, request)

    async def delete(self, sink_id: bytes, request: str) -> Sink:
        """Begin to delete a sink: its driver is refused from now on, and what was decided is published first.

        Afterwards every partition forgets it, and `deleted` records that here.

        Raises:
            Problem: 404 `no_such_sink`, or 409 `in_progress` when a batch cannot be published now.
        """
        sink = self._sink(sink_id)
        again = (sink.deletion and sink.begun_by == request) or (request and sink.deleted_by == request)
        if sink.deletion is Deletion.BEGUN or again:
            # Nothing is forgotten anywhere before the epoch that refuses its drivers is committed.
            partition = self.partition
            await partition.appends.when_committed(partition.log.last_index, Receipt(partition.number, 0, 0))
            return sink
        if not sink.exists:
            # A deposed leader that has not noticed does not know of it: only the real one may deny it.
            await self.partition.reader.confirmed_end()
            if not self._sink(sink_id).exists:
                raise Problem("no_such_sink", "there is no such sink", outcome="not_applied")
            return await self.delete(sink_id, request)
        if sink.undone is not None:
            try:
                await self._finished(sink_id, sink.undone.number)
            except Problem as problem:
                raise Problem(
                    "in_progress",
                    f"the sink is not deleted: {problem.detail}",
                    field="sink",
                    value=sink.name,
                    outcome="not_applied",
                ) from problem
            return await self.delete(sink_id, request)
        # In this turn nothing is undone: what is decided later is decided under a newer epoch, or not at all.
        gone = msgspec.structs.replace(sink, epoch=sink.epoch + 1, begun_by=request, deletion=Deletion.BEGUN)
        await self._change(sink_id, gone, ends=True)
        return gone

    async def deleted(self, sink_id: bytes, epoch: int) -> Sink:
        """Record that every partition has forgotten the sink up to this epoch: its name is free."""
        # A deposed leader that has not noticed may not know of the deletion, or of an end of it that is lost.
        await self.partition.reader.confirmed_end()
        sink = self._sink(sink_id)
        if sink.deletion is Deletion.BEGUN and sink.epoch == epoch:
            sink = msgspec.structs.replace(sink, deletion=Deletion.DONE)
            await self._change(sink_id, sink, ends=True)
        return sink

    async def over(self, sinks: Sequence[bytes]) -> list[bytes]:
        """Return those of the sinks that have nothing under way, confirmed by a majority after this call.

        What was decided is published in every partition, so it will not be asked for again.
        """
        await self.partition.reader.confirmed_end()
        table = self.partition.state.sinks
        states = [(sink_id, table.get(sink_id), table.committed_at(sink_id)) for sink_id in sinks]
        return [
            sink_id
            for sink_id, last, committed in states
            if (last is None or last.undone is None) and (committed is None or committed.undone is None)
        ]

    async def listed(self, *, prefix: str, after: str, limit: int) -> list[Sink]:
        """Return the listed sinks by name, confirmed by a majority after this call."""
        await self.partition.reader.confirmed_end()
        return self.partition.state.sinks.listed(prefix=prefix, after=after, limit=limit)

    def _new_once(self) -> Sink:
        """Return a sink that writes once, before its first epoch."""
        first = first_once_epoch(self.partition.log.last_index)
        return Sink("", epoch=first - 1, first=first, once=True)

    async def end(self, sink_id: bytes, epoch: int) -> Sink:
        """Rule out that a batch of a sink that writes once is still decided under `epoch`; return the sink.

        For a sink whose driver has been silent for too long. A batch that is decided stays decided.
        """
        sink = self._sink(sink_id)
        if sink.epoch == 0:
            # Forgotten, or it never began. That this is so still when the answer arrives, an epoch sees to.
            sink = self._new_once()
        elif not sink.once or sink.epoch != epoch or sink.number >= 0:
            return await self.status(sink_id)
        return await self._raise(sink_id, sink, "")

    async def take_name(self, sink_id: bytes, name: str, producer: bytes, request: str = "") -> Sink:
        """Raise the epoch of a producer's name, as `begin` does a sink's.

        `producer` is the id that the name gets if it has none yet.
        """
        sink = self._sink(sink_id)
        named = msgspec.structs.replace(sink, name=name, producer=sink.producer or producer)
        return await self._raise(sink_id, named, request)

    async def _raise(self, sink_id: bytes, sink: Sink, request: str) -> Sink:
        if request and sink.begun_by == request:
            partition = self.partition
            await partition.appends.when_committed(partition.log.last_index, Receipt(partition.number, 0, 0))
            return sink
        begun = msgspec.structs.replace(sink, epoch=sink.epoch + 1, begun_by=request)
        await self._change(sink_id, begun)
        return begun

    async def status(self, sink_id: bytes) -> Sink:
        """Return the sink as it is committed, confirmed by a majority after this call."""
        await self.partition.reader.confirmed_end()
        sinks = self.partition.state.sinks
        return sinks.committed_at(sink_id) or sinks.unknown

    async def commit(
        self, sink_id: bytes, number: int, epoch: int, parts: Sequence[Part], fingerprint: str = ""
    ) -> bool:
        """Commit a batch atomically; done when all its partitions have published it.

        Return False if this batch was committed already, or a later one was: numbers rise.

        Raises:
            Problem: 409 `fenced` for an older epoch; `no_stage` where something is not staged any more; 422
                for an epoch that never began; 404 `no_such_sink` for one of a sink that was forgotten; 504
                `outcome_unknown` when the commit is not known to be over; `stages_lost` when this or the
                batch before was decided and can't be published any more; with a `fingerprint` 409
                `other_batch` where this number is decided with another: what is committed is not this batch.
        """
        if epoch > self._sink(sink_id).epoch:
            # A deposed leader that has not noticed does not know of it: only the real one may deny it.
            await self.partition.reader.confirmed_end()
        if self._decided(sink_id, number, epoch, fingerprint):
            await self._finished(sink_id, number)
            return False
        pins = await asyncio.gather(
            *(self._targets.pin(sink_id, number, epoch, part) for part in parts), return_exceptions=True
        )
        # Whatever came between is in the table now: no turn passes from here to the proposal. It may have
        # decided this very batch, which then is why it could not be pinned.
        if self._decided(sink_id, number, epoch, fingerprint):
            await self._finished(sink_id, number)
            return False
        for pin in pins:
            if isinstance(pin, BaseException):
                # A deposed leader that has not noticed may not know of the commit, forgotten there since.
                await self.partition.reader.confirmed_end()
                if self._decided(sink_id, number, epoch, fingerprint):
                    await self._finished(sink_id, number)
                    return False
                raise pin
        sink = self._sink(sink_id)
        if sink.undone is not None:
            # The batch before is decided and not published: its own commit goes on with it.
            try:
                await self._finished(sink_id, sink.undone.number)
            except Problem as problem:
                if problem.code == "stages_lost":
                    problem.outcome = "not_applied"  # of this batch nothing is decided
                raise
            return await self.commit(sink_id, number, epoch, parts, fingerprint)
        targets = tuple(
            Target(part.topic, part.partition, pin.group, pin.pin)
            for part, pin in zip(parts, pins, strict=True)
            if isinstance(pin, Pinned)
        )
        decision = Decision(number, epoch, targets)
        await self._change(
            sink_id, msgspec.structs.replace(sink, number=number, undone=decision, fingerprint=fingerprint)
        )
        await self._finished(sink_id, number)
        return True

    def _decided(self, sink_id: bytes, number: int, epoch: int, fingerprint: str) -> bool:
        """Return whether this batch is decided already. Raises `Problem` if this epoch may not decide."""
        sink = self._sink(sink_id)
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

    # -- publishing ------------------------------------------------------------------------

    async def _finished(self, sink_id: bytes, number: int) -> None:
        """Wait until a decided batch is published everywhere.

        Raises:
            Problem: 504 `outcome_unknown`, or `stages_lost` where it can't be published any more.
        """
        why = "not yet published in every partition"
        try:
            async with asyncio.timeout(PUBLISH_WAIT_S):
                while True:
                    sink = self._sink(sink_id)
                    if sink.epoch == 0:
                        raise Problem("no_such_sink", "the sink is not known any more")
                    if sink.number >= number and (sink.undone is None or sink.undone.number > number):
                        return
                    lost = self._lost.get(sink_id)
                    if lost is not None and lost[0] == sink.undone:
                        break
                    self._finish(sink_id)
                    await asyncio.shield(self._finishing[sink_id])
            raise Problem("stages_lost", f"batch {number} of this sink is decided, and {lost[1].detail}")
        except TimeoutError:
            pass
        except Problem as problem:
            if problem.code == "stages_lost":
                raise
            why = problem.detail or problem.code
        raise Problem("outcome_unknown", f"batch {number} of this sink is decided, and {why}")

    async def _committed(self) -> None:
        """Wait until what is in the log now is committed, or this replica no longer leads."""
        partition = self.partition
        index = partition.log.last_index
        try:
            await partition.appends.when_committed(index, Receipt(partition.number, 0, 0))
        except Problem as problem:
            _log.debug("a decision is not committed: %s", problem)

    async def _is_undone(self, sink_id: bytes, decision: Decision) -> bool:
        """Return whether a decision is not published everywhere; False if this is not the leader.

        Confirmed by a majority after this call: a decision that is published may be forgotten by a partition.
        """
        try:
            await self.partition.reader.confirmed_end()
        except Problem:
            return False
        known = self.partition.state.sinks.get(sink_id)
        return known is not None and known.undone == decision

    def finish_all(self) -> None:
        """Resume publishing what earlier leaders decided."""
        if self.partition.leads:
            for sink_id in self.partition.state.sinks.undone():
                # A lost decision ends only with the deletion of its topic: then the sink continues.
                lost = self._lost.get(sink_id)
                if lost is None or self._loop.time() - lost[2] >= LOST_RETRY_S:
                    self._finish(sink_id)

    def _finish(self, sink_id: bytes) -> None:
        if sink_id not in self._finishing:
            self._finishing[sink_id] = self._loop.create_future()
            self._spawn(self._publish(sink_id))

    async def _publish(self, sink_id: bytes) -> None:
        """Publish the sink's decision in every partition, then record that in the log."""
        pause_s = RETRY_S
        try:
            while self.partition.leads:
                sinks = self.partition.state.sinks
                sink = sinks.get(sink_id)
                if sink is None or sink.undone is None:
                    return
                decision = sink.undone
                committed = sinks.committed_at(sink_id)
                if committed is None or committed.undone != decision:
                    # The commit point is a committed entry: before it, no reader may see anything of this.
                    await self._committed()
                    continue
                answers = await asyncio.gather(
                    *(
                        self._targets.publish(sink_id, decision.number, decision.epoch, target)
                        for target in decision.targets
                    ),
                    return_exceptions=True,
                )
                failed = [answer for answer in answers if isinstance(answer, BaseException)]
                for error in failed:
                    if not isinstance(error, Problem):
                        raise error
                    if error.code == "no_stage" and await self._is_undone(sink_id, decision):
                        # Only a leader says so, and every leader has the pin, as long as any replica has.
                        self._lost[sink_id] = (decision, error, self._loop.time())
                        _log.error("batch %d of sink %s: %s", decision.number, sink.name, error)
                        return
                try:
                    if not failed:
                        self._lost.pop(sink_id, None)
                        now = self._sink(sink_id)
                        if now.undone == decision:
                            # Waited for: after a commit that was answered, no client sees it under way.
                            await self._change(sink_id, msgspec.structs.replace(now, undone=None), ends=True)
                        return
                except Problem as problem:
                    failed = [problem]
                _log.info("batch %d of sink %s is published again: %s", decision.number, sink.name, failed[0])
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, SLOWEST_RETRY_S)
        finally:
            self._finishing.pop(sink_id).set_result(None)


def refuse_epoch(sink: Sink, epoch: int) -> None:
    """Raise `Problem` when nothing can be decided under this epoch of the sink."""
    if epoch >= FIRST_ONCE_EPOCH and (epoch < sink.first or sink.epoch < FIRST_ONCE_EPOCH):
        raise Problem(
            "no_such_sink",
            f"the sink that began with epoch {epoch} was to write once, and is not known any more: "
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
    # Of a sink that never began the epoch is 0, and so may be what is asked for.
    if epoch != sink.epoch or sink.epoch == 0 or sink.deletion:
        raise _not_the_epoch(sink, epoch)


def _not_the_first(name: str, sink: Sink, epoch: int) -> Problem:
    return Problem(
        "no_such_sink",
        f"there is no sink {name!r}, and epoch {epoch} is not the first of one that begins",
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
