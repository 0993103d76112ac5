"""Sinks and transactions without a loop: the sync face of `transact.sinks`.

Like the sync producer's, records are gathered in the caller's thread, under a lock: a hop to the loop's
thread for each would cost more than the record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from laminar.client.descriptions import SinkInfo
from laminar.client.errors import ConfigError
from laminar.client.produce.producer import DEFAULT_BUFFER_BYTES, Key
from laminar.client.records import Staged
from laminar.client.sync.channel import Job
from laminar.client.sync.portal import Portal, wait_until
from laminar.client.trace_id import TraceId
from laminar.client.transact import sinks as aio_sinks
from laminar.client.transact.sinks import DEFAULT_STAGE_BYTES, CommitResult
from laminar.client.transact.stage_sender import Named, StageSender


class Sink:
    """A named sequence of batches, each committed whole, once; made by ``client.sink(name)`` without I/O."""

    def __init__(self, portal: Portal, sink: aio_sinks.Sink) -> None:
        self.name = sink.name
        self._portal = portal
        self._twin = sink

    # generated from laminar.client.transact.sinks.Sink, without expect open_sender ready

    def __repr__(self) -> str:
        return repr(self._twin)

    @property
    def epoch(self) -> int | None:
        """The epoch of the sink that this client began last; None before `begin` or the first transaction."""
        return self._twin.epoch

    @property
    def committed(self) -> int | None:
        """Number of the last committed batch, as far as this client knows; None before the first."""
        return self._twin.committed

    def begin(self, *, epoch: int | None = None, once: bool = False, timeout: float | None = None) -> int:
        """Begin a new epoch of the sink; return its number. Clients of older epochs cannot commit any more.

        `epoch` may name the epoch to begin: one more than `describe` reported. It lets workers stage under
        this epoch before it has begun. `once` makes it a single-use sink: the cluster may forget the name
        some hours after its batch, but not if any client began the sink without `once`.

        Raises:
            Fenced: another client has begun `epoch`, or a newer one.
        """
        return self._portal.run(lambda: self._twin.begin(epoch=epoch, once=once, timeout=timeout))

    def describe(self, *, timeout: float | None = None) -> SinkInfo:
        """Return the sink's description from the cluster. Raises `NotFound` before its first `begin`."""
        return self._portal.run(lambda: self._twin.describe(timeout=timeout))

    def delete(self, *, timeout: float | None = None) -> None:
        """Delete the sink: no client can commit under it any more, and staged records are dropped.

        Committed records stay. A sink that is begun under this name later is a new one, without batches.

        Raises:
            NotFound: there is no such sink.
            Error: (``in_progress``) its last batch cannot be published at the moment.
        """
        self._portal.run(lambda: self._twin.delete(timeout=timeout))

    def stage(
        self,
        number: int,
        *,
        epoch: int | None = None,
        batch_bytes: int = DEFAULT_STAGE_BYTES,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        timeout: float | None = None,
    ) -> Stager:
        """Return a writer of records for batch `number`: ``with sink.stage(7, epoch=e) as stager``.

        After the block, `Stager.staged` is passed to `commit`. Any number of writers, also in other
        processes, may stage records for a batch, under the epoch that its driver began.
        """
        return Stager(
            self._portal,
            self._twin.stage(
                number, epoch=epoch, batch_bytes=batch_bytes, buffer_bytes=buffer_bytes, timeout=timeout
            ),
        )

    def commit(
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
        return self._portal.run(
            lambda: self._twin.commit(number, stages, epoch=epoch, fingerprint=fingerprint, timeout=timeout)
        )


class Stager:
    """Stages records for one batch of a sink. Leaving its block waits until all is durable, or raises.

    `append` waits for room, and may be called from several threads.
    """

    def __init__(self, portal: Portal, stager: aio_sinks.Stager) -> None:
        self.number = stager.number
        self._portal = portal
        self._stager = stager
        self._lock = threading.RLock()
        self._progress = threading.Condition(self._lock)
        self._sender: StageSender | None = None

    @property
    def staged(self) -> Staged:
        """What was staged, to be passed to `Sink.commit`; it can be pickled. Known after the block."""
        return self._stager.staged

    def __enter__(self) -> Self:
        self._stager.guard = self._lock
        self._portal.run(lambda: self._stager.__aenter__())
        self._sender = self._stager.sender
        self._sender.on_progress = self._on_progress
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal.run(lambda: self._stager.__aexit__(kind, error, trace))

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

        It waits only for room in the buffer, and raises the error that stopped the staging, if any.
        """
        sender = self._open()
        with self._lock:
            if sender.full:
                self._until(lambda: not sender.full)
            wake = sender.put(
                topic,
                value,
                key,
                tag=tag,
                headers=headers,
                timestamp_ms=timestamp_ms,
                trace_id=trace_id,
                partition=partition,
            )
        if wake:
            sender.wake_from_thread()

    def ack(self, *jobs: Job[Any]) -> None:
        """Acknowledge jobs of channels with this batch: all of it is committed, or nothing.

        Nothing is sent before the commit, so their time must last until then. Then no time runs for them: if
        the batch is committed they are done, and do not come again; else their time begins again. Do not
        acknowledge them by `Job.ack`, too; that is late until the batch has ended.

        Raises:
            Error: (``already_committed``) this batch was committed before, so it can't be with these jobs;
                (``invalid``) they are more than a batch may have.
        """
        self._open()
        with self._lock:
            self._stager.add_acks(job._twin for job in jobs)

    def append_all(self, topic: str | Named, records: Iterable[tuple[Key, Any]]) -> int:
        """Add every (key, value), waiting for room as needed; return the number of records."""
        count = 0
        for key, value in records:
            self.append(topic, value, key)
            count += 1
        return count

    def has_room(self) -> bool:
        """Return whether `append` would not wait."""
        return not self._open().full

    def room(self) -> None:
        """Wait until the buffer has room, as `append` does; raise the error that stopped the staging."""
        sender = self._open()
        with self._lock:
            self._until(lambda: not sender.full)
        if sender.failure is not None:
            raise sender.failure

    def _open(self) -> StageSender:
        if self._sender is None or self._sender.closed:
            raise ConfigError("append outside of the block", code="not_open")
        return self._sender

    def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds. The caller holds the lock; `condition` is called with it held."""
        wait_until(lambda seconds: self._progress.wait_for(condition, seconds))

    def _on_progress(self) -> None:
        with self._lock:
            self._progress.notify_all()


class Transaction(Stager):
    """One batch of a sink: the end of its block commits it. After an exception nothing of it is visible.

    `already` says that this batch was committed before: then appended records are not sent, and the block may
    be left at once. `result` is ``"applied"`` or ``"already"`` after the block, None before.
    """

    def __init__(self, portal: Portal, transaction: aio_sinks.Transaction) -> None:
        super().__init__(portal, transaction)
        self._transaction = transaction

    @property
    def already(self) -> bool:
        """Whether this batch was committed before."""
        return self._transaction.already

    @property
    def result(self) -> CommitResult | None:
        """``"applied"`` or ``"already"`` after the block, None before."""
        return self._transaction.result
