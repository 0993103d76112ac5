"""Sinks and transactions on an event loop: batches committed whole, once, and in order.

A *sink* is a name under which the cluster remembers the number of the last committed batch, and the *epoch*:
the number by which it refuses all writers but the newest. A program that does everything itself uses
`Transaction`. `Sink` has the single steps, for a driver with workers in other processes: the driver begins an
epoch, workers stage records under it (store them, still invisible) and return `Staged` values to the driver,
and the driver commits these. The cluster drops staged records that are never committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterable, Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlencode

import msgspec

from laminar.client.consume.jobs import Job
from laminar.client.descriptions import SinkInfo
from laminar.client.errors import ConfigError, Error, Fenced, OutcomeUnknown, Overloaded, TimedOut
from laminar.client.net.session import Session
from laminar.client.policy.retry import Backoff
from laminar.client.policy.staging import MAX_FIRST_STAGE, Epoch, Stages, joined
from laminar.client.produce.producer import DEFAULT_BUFFER_BYTES, OVERFLOW, Key
from laminar.client.records import Staged, StagedPart
from laminar.client.trace_id import TraceId
from laminar.client.transact.stage_sender import Named, StageSender, batch_path, sink_path

# Larger than a producer's batches: no caller waits for a single stage, and each stage is an entry in the log.
DEFAULT_STAGE_BYTES = 1 << 20
# A commit whose body would be larger with the numbers of all stages is split: requests before it prepare the
# stages of each partition, and the commit itself has only their counts.
ONE_REQUEST_BYTES = 1 << 20
PINNED_AT_ONCE = 8
# How long a transaction that was refused tries to begin a newer epoch, so that its jobs come again sooner.
FREE_S = 5.0

# `applied`: this commit committed the batch. `already`: this batch, or a later one, was committed before.
CommitResult = Literal["applied", "already"]


class Sink:
    """A named sequence of batches, each committed whole, once; made by ``client.sink(name)`` without I/O."""

    def __init__(self, session: Session, name: str) -> None:
        self.name = name
        self._session = session
        self._epoch = Epoch()
        self._once = False
        self._beginning = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Sink {self.name} epoch {self._epoch.number}>"

    @property
    def epoch(self) -> int | None:
        """The epoch of the sink that this client began last; None before `begin` or the first transaction."""
        return self._epoch.number if self._epoch.begun else None

    @property
    def committed(self) -> int | None:
        """Number of the last committed batch, as far as this client knows; None before the first."""
        return self._epoch.committed if self._epoch.committed >= 0 else None

    async def begin(
        self, *, epoch: int | None = None, once: bool = False, timeout: float | None = None
    ) -> int:
        """Begin a new epoch of the sink; return its number. Clients of older epochs cannot commit any more.

        `epoch` may name the epoch to begin: one more than `describe` reported. It lets workers stage under
        this epoch before it has begun. `once` makes it a single-use sink: the cluster may forget the name
        some hours after its batch, but not if any client began the sink without `once`.

        Raises:
            Fenced: another client has begun `epoch`, or a newer one.
        """
        async with self._beginning:
            self._once = once
            return await self._begin(timeout, epoch)

    async def _begin(self, timeout: float | None, epoch: int | None = None) -> int:
        query: dict[str, int | str] = {"epoch": epoch} if epoch is not None else {}
        if self._once:
            query["once"] = "true"
        path = sink_path(self.name) + (f"?{urlencode(query)}" if query else "")
        # With this key the sink is begun once, however often and late the request arrives.
        key = {"Idempotency-Key": secrets.token_hex(16)}
        answer = await self._session.call("POST", path, headers=key, timeout_s=timeout)
        found = SinkInfo.from_answer(answer.json())
        self._epoch.began(found.epoch, -1 if found.committed is None else found.committed)
        return found.epoch

    async def ready(self, *, timeout: float | None = None) -> int:
        """Return this client's epoch; begin a new one first if there is none or a commit under it failed.

        Raises:
            Fenced: another client has begun a newer epoch since.
        """
        async with self._beginning:
            own = self._epoch
            if own.doubtful and not own.newer:
                own.observe_epoch((await self.describe(timeout=timeout)).epoch)
            if own.newer:
                raise self._fenced(own.number, own.newer)
            if own.begun and not own.doubtful:
                return own.number
            return await self._begin(timeout)

    async def describe(self, *, timeout: float | None = None) -> SinkInfo:
        """Return the sink's description from the cluster. Raises `NotFound` before its first `begin`."""
        return SinkInfo.from_answer(
            (await self._session.call("GET", sink_path(self.name), timeout_s=timeout)).json()
        )

    async def delete(self, *, timeout: float | None = None) -> None:
        """Delete the sink: no client can commit under it any more, and staged records are dropped.

        Committed records stay. A sink that is begun under this name later is a new one, without batches.

        Raises:
            NotFound: there is no such sink.
            Error: (``in_progress``) its last batch cannot be published at the moment.
        """
        key = {"Idempotency-Key": secrets.token_hex(16)}
        await self._session.call("DELETE", sink_path(self.name), headers=key, timeout_s=timeout)
        self._epoch = Epoch()

    async def expect(self, epoch: int, *, timeout: float | None = None) -> int:
        """Check that no epoch newer than `epoch` has begun; return the number of the last committed batch.

        It is -1 before the first.

        Raises:
            Fenced: the sink's epoch is newer than `epoch`.
        """
        found = await self.describe(timeout=timeout)
        if found.epoch > epoch:
            raise self._fenced(epoch, found.epoch)
        return -1 if found.committed is None else found.committed

    def stage(
        self,
        number: int,
        *,
        epoch: int | None = None,
        batch_bytes: int = DEFAULT_STAGE_BYTES,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        timeout: float | None = None,
    ) -> Stager:
        """Return a writer of records for batch `number`: ``async with sink.stage(7, epoch=e) as stager``.

        After the block, `Stager.staged` is passed to `commit`. Any number of writers, also in other
        processes, may stage records for a batch, under the epoch that its driver began.
        """
        return Stager(
            self, number, epoch=epoch, batch_bytes=batch_bytes, buffer_bytes=buffer_bytes, timeout=timeout
        )

    async def commit(
        self,
        number: int,
        stages: Iterable[Staged],
        *,
        epoch: int | None = None,
        fingerprint: str = "",
        timeout: float | None = None,
    ) -> CommitResult:
        """Commit batch `number`: the records of `stages`, and nothing else that was staged for the batch.

        Return, when all partitions show the records, ``"applied"``; or ``"already"`` if this batch or a later
        one was committed before. Batches are committed one after the other, with rising numbers. If another
        client began `epoch`, ``"already"`` is also returned if an earlier attempt of this very commit
        succeeded. `fingerprint` is any text of up to 200 characters that identifies the batch; `describe`
        returns that of the last one.

        Raises:
            Fenced: another client has begun a newer epoch. The error's `outcome` is ``unknown`` if an earlier
                attempt of this commit may have been decided before that.
            OutcomeUnknown: no node could say in time whether the batch was committed. Call `begin` again:
                then `committed` has the number of the last batch.
            Late: the delivery of a job that the batch acknowledges had expired; nothing is committed.
            Error: (``no_stage``) staged records were dropped; (``other_batch``) this number is committed with
                another fingerprint; (``in_progress``) another batch is acknowledging one of the jobs.
        """
        own = self._epoch
        if epoch is None:
            if not own.begun:
                raise ConfigError(f"sink {self.name!r} has no epoch", code="not_begun", hint="begin first")
            epoch = own.number
        parts = joined(stages, sink=self.name, number=number, epoch=epoch)
        more = {"fingerprint": fingerprint} if fingerprint else {}
        body = msgspec.json.encode({"epoch": epoch, "parts": [_document(part) for part in parts]} | more)
        try:
            if len(body) > ONE_REQUEST_BYTES:
                prepared = await self._prepare_all(number, epoch, parts, timeout)
                body = msgspec.json.encode({"epoch": epoch, "parts": prepared} | more)
            result = await self._commit(number, body, timeout)
        except Fenced as error:
            if epoch == own.number:
                own.observe_epoch(int(error.limit))
            raise
        except BaseException:
            own.doubtful |= epoch == own.number
            raise
        if epoch == own.number:
            # A server that lost its coordinator repeats the request at the next one, which answers `already`
            # to our own commit. Under this client's epoch no other client commits: a batch that was not
            # committed before was committed by us.
            if number > own.committed:
                result = "applied"
            own.over(number)
        return result

    async def _prepare_all(
        self, number: int, epoch: int, parts: list[StagedPart], timeout: float | None
    ) -> list[dict[str, Any]]:
        """Ask each partition to promise its stages, in requests of their own; return the commit's parts.

        A commit that would be too large names only their numbers then.
        """
        at_once = asyncio.Semaphore(PINNED_AT_ONCE)

        async def prepare(part: StagedPart) -> dict[str, Any]:
            where = {"topic": part.topic, "partition": part.partition}
            if not part.stages:
                return _document(part)
            async with at_once:
                try:
                    await self._session.call(
                        "POST",
                        f"{batch_path(self.name, number)}/prepared",
                        body=msgspec.json.encode({"epoch": epoch, **where, "stages": part.stages}),
                        headers={"Content-Type": "application/json"},
                        timeout_s=timeout,
                    )
                except Error as error:
                    # An earlier attempt committed the batch: the coordinator will answer that.
                    if error.code != "already_committed":
                        raise
            return _document(part, prepared=True)

        tasks = [asyncio.ensure_future(prepare(part)) for part in parts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _commit(self, number: int, body: bytes, timeout: float | None) -> CommitResult:
        timeout_s = self._session.timeout_s if timeout is None else timeout
        deadline = time.monotonic() + timeout_s
        backoff = Backoff(rng=self._session.rng)
        decided = False
        while True:
            try:
                answer = await self._session.call(
                    "PUT",
                    batch_path(self.name, number),
                    body=body,
                    headers={"Content-Type": "application/json"},
                    timeout_s=max(0.001, deadline - time.monotonic()),
                )
            except Error as error:
                # A partition has published the batch, which an earlier attempt decided. Ask again until the
                # coordinator knows it too.
                if error.code == "already_committed" and time.monotonic() < deadline:
                    decided = True
                    self._session.retries += 1
                    await asyncio.sleep(backoff.next_ms() / 1000)
                    continue
                if error.code == "already_committed" or (decided and isinstance(error, TimedOut)):
                    raise OutcomeUnknown(str(error), code="outcome_unknown", outcome="unknown") from error
                if decided:
                    error.outcome = "unknown"
                raise
            return "applied" if answer.json()["result"] == "applied" else "already"

    def _fenced(self, epoch: int, newer: int) -> Fenced:
        return Fenced(
            f"sink {self.name!r} was begun again by another client: its epoch is {newer}",
            code="fenced",
            field="epoch",
            value=epoch,
            limit=newer,
            outcome="not_applied",
        )

    async def open_sender(
        self,
        number: int,
        *,
        epoch: int | None,
        batch_bytes: int,
        buffer_bytes: int,
        timeout: float | None = None,
        guard: contextlib.AbstractContextManager[Any] | None = None,
    ) -> StageSender:
        """Return a sender of records for batch `number`; begin an epoch first if `epoch` is None.

        Its stage numbers start at a random value so that two writers of one batch do not collide.
        """
        if epoch is None:
            epoch = await self.ready(timeout=timeout)
        stages = Stages(
            first_stage=self._session.rng.randint(0, MAX_FIRST_STAGE),
            batch_bytes=batch_bytes,
            buffer_bytes=buffer_bytes,
        )
        return StageSender(
            self._session,
            stages,
            sink=self.name,
            number=number,
            epoch=epoch,
            timeout_s=self._session.timeout_s if timeout is None else timeout,
            guard=guard,
        )


class Stager:
    """A writer that stages records for one batch of a sink: stores them in their partitions, still invisible.

    Leaving its block waits until all of them are durable, or raises. Call `append`, and await `room` often
    enough that the buffer does not overflow; `append_all` does that by itself.
    """

    def __init__(
        self,
        sink: Sink,
        number: int,
        *,
        epoch: int | None,
        batch_bytes: int,
        buffer_bytes: int,
        timeout: float | None,
    ) -> None:
        self.number = number
        self._sink = sink
        self._given_epoch = epoch
        self._batch_bytes = batch_bytes
        self._buffer_bytes = buffer_bytes
        self._timeout = timeout
        # The lock under which the threads of the synchronous face fill the sender; None without threads.
        self.guard: contextlib.AbstractContextManager[Any] | None = None
        self._sender: StageSender | None = None
        self._staged: Staged | None = None

    @property
    def staged(self) -> Staged:
        """A description of the staged records for `Sink.commit`; it can be pickled. Known after the block."""
        if self._staged is None:
            raise ConfigError("`staged` is available after the stager's block has ended", code="not_staged")
        return self._staged

    async def __aenter__(self) -> Self:
        self._sender = await self._sink.open_sender(
            self.number,
            epoch=self._given_epoch,
            batch_bytes=self._batch_bytes,
            buffer_bytes=self._buffer_bytes,
            timeout=self._timeout,
            guard=self.guard,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sender = self.sender
        try:
            if kind is None:
                self._staged = await sender.finish()
        finally:
            sender.close()

    def append(
        self,
        topic: str | Named,
        value: Any,
        key: Key = None,
        *,
        tag: str | None = None,
        headers: Mapping[str, bytes] | None = None,
        timestamp_ms: int | None = None,
        trace_id: TraceId | None = None,
        partition: int | None = None,
    ) -> None:
        """Add a record for `topic`: bytes if it is a name, else a value for the codec of the `Topic`.

        Raises:
            Overloaded: (``buffer_full``) far more was added than the buffer holds, without awaiting `room`.
            Error: staging has failed before; this is its error.
        """
        sender = self.sender
        if sender.stages.buffered_bytes > self._buffer_bytes * OVERFLOW:
            raise Overloaded(
                f"{sender.stages.buffered_bytes} bytes wait to be staged",
                code="buffer_full",
                field="buffer_bytes",
                value=sender.stages.buffered_bytes,
                limit=self._buffer_bytes * OVERFLOW,
                hint="`await room()` between appends, or use `await append_all(topic, records)`",
                outcome="not_applied",
            )
        if sender.put(
            topic,
            value,
            key,
            tag=tag,
            headers=headers,
            timestamp_ms=timestamp_ms,
            trace_id=trace_id,
            partition=partition,
        ):
            sender.wake()

    async def ack(self, *jobs: Job[Any]) -> None:
        """Acknowledge jobs of channels with this batch: they are acknowledged if and only if it is committed.

        Nothing is sent before the commit, so the jobs must not expire before then. During the commit they do
        not expire; if it fails, their time starts again. Do not call `Job.ack` for them, too: until the batch
        has ended that raises `Late`.

        Raises:
            Error: (``already_committed``) this batch was committed before, without these jobs; (``invalid``)
                the jobs are more than a batch may have.
        """
        self.add_acks(jobs)

    def add_acks(self, jobs: Iterable[Job[Any]]) -> None:
        """Acknowledge jobs with this batch, as `ack` does with jobs that are given one by one."""
        sender = self.sender
        for job in jobs:
            if sender.already:
                raise self._already()
            sender.stages.ack(job.topic, job.partition, job.channel, job.token)

    def _already(self) -> Error:
        return Error(
            f"batch {self.number} of sink {self._sink.name!r} was committed before",
            code="already_committed",
            field="number",
            value=self.number,
            hint="its records are not written again, so it acknowledges no more jobs: take the next number",
            outcome="not_applied",
        )

    async def append_all(
        self, topic: str | Named, records: Iterable[tuple[Key, Any]] | AsyncIterable[tuple[Key, Any]]
    ) -> int:
        """Append every (key, value), waiting for room as needed; return the number of records."""
        count = 0
        if isinstance(records, AsyncIterable):
            async for key, value in records:
                self.append(topic, value, key)
                count += 1
                await self.room()
            return count
        for key, value in records:
            self.append(topic, value, key)
            count += 1
            if not self.has_room():
                await self.room()
        return count

    def has_room(self) -> bool:
        """Return whether `room` would return at once."""
        return not self.sender.full

    async def room(self) -> None:
        """Wait until the buffer has room for more; raise the error that stopped the staging, if any."""
        await self.sender.room()

    @property
    def sender(self) -> StageSender:
        """The sender of the open block; not a stable interface."""
        if self._sender is None or self._sender.closed:
            raise ConfigError("append outside of the block", code="not_open")
        return self._sender


class Transaction(Stager):
    """One batch of a sink: the end of its block commits the batch. After an exception nothing is visible.

    `already` is true if this batch was committed before: then appended records are not sent, and the block
    may be left at once. `result` is None before the end of the block, then ``"applied"`` (the block committed
    the batch) or ``"already"``.
    """

    result: CommitResult | None = None
    already = False

    async def __aenter__(self) -> Self:
        sink = self._sink
        if self._given_epoch is None:
            await sink.ready(timeout=self._timeout)
            committed = -1 if sink.committed is None else sink.committed
        else:
            committed = await sink.expect(self._given_epoch, timeout=self._timeout)
        await super().__aenter__()
        self.already = self.sender.already = self.number <= committed
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sender = self.sender
        await super().__aexit__(kind, error, trace)
        if kind is None:
            if sender.already and sender.stages.acks:
                raise self._already()
            # If the batch was committed before, nothing is staged: the commit only waits until it is
            # published.
            staged = self.staged
            try:
                await self._sink.commit(self.number, [staged], epoch=staged.epoch, timeout=self._timeout)
            except Error as failed:
                if sender.stages.acks and failed.outcome == "not_applied" and self._given_epoch is None:
                    # A newer epoch frees the jobs that some partitions may have pinned.
                    with contextlib.suppress(Error):
                        await self._sink.ready(timeout=FREE_S)
                raise
            self.result = "already" if sender.already else "applied"


def _document(part: StagedPart, *, prepared: bool = False) -> dict[str, Any]:
    """Return a part as the body of a commit has it; `prepared` says that its stages are prepared already.

    It has `acks` only if there are some: nodes before code version 5 refuse a field that they do not know.
    """
    found: dict[str, Any] = {"topic": part.topic, "partition": part.partition}
    found |= {"prepared": len(part.stages)} if prepared else {"stages": part.stages}
    if part.acks:
        found["acks"] = [{"channel": channel, "tokens": tokens} for channel, tokens in part.acks]
    return found
