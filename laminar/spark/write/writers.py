"""``df.write`` and ``df.writeStream`` into topics: tasks stage, the driver commits, each batch counts once.

A stream's sink is named after the query's id, which is in its checkpoint, and its batches have Spark's
numbers. Spark passes the id and the number only to tasks, so the driver cannot begin the sink before them. So
a task reads the sink's epoch and stages under the next one; afterwards the driver begins exactly that next
epoch and commits. That fails if another driver of the same checkpoint has begun it since. A batch write
begins its sink in the driver, before its tasks.

A task of a stream with few rows stages nothing: they travel in its message, and the driver stages them while
it begins the epoch (`held_rows`). Such a task need not know the epoch either. Only the first task of a run of
the query in each process asks for it; later the driver knows it: it is the one after that of its last batch.

Spark pickles a writer into each task, and for a stream makes another one for each commit. So a writer keeps
nothing that it learns after it was made.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from laminar.client.descriptions import SinkInfo
from laminar.client.errors import Error, Fenced
from laminar.client.net.endpoints import Endpoints
from laminar.client.records import Staged
from laminar.spark.write.fingerprints import Fingerprint, committed_before, journal_of, older_than_its_sink
from laminar.spark.write.options import SinkOptions, check_sink_schema

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError as missing:  # Spark 4.0
    raise RuntimeError(f"writing to Laminar needs Spark 4.1 or newer ({missing})") from missing

if TYPE_CHECKING:
    import pyarrow
    from pyspark import TaskContext
    from pyspark.sql.types import StructType

    from laminar.client.transact.sinks import Sink
    from laminar.spark.read.cluster import Cluster
    from laminar.spark.write.held_rows import HeldRows

T = TypeVar("T")

STREAM_PREFIX = "spark-"
WRITE_PREFIX = "spark-write-"
# How long the driver of an aborted write tries to have its stages dropped.
ABORT_S = 10.0


# Runs of queries that a process remembers: the last ones.
_REMEMBERED = 64
# In a process of tasks: by sink, the run of the query in which it asked for the sink's epoch.
_asked: dict[str, str] = {}
# In a process of the driver: by sink, the run, the number and the epoch of the last batch committed here.
_committed: dict[str, tuple[str, int, int]] = {}


@dataclass(frozen=True)
class StagedMessage(WriterCommitMessage):
    """A task's message to its driver: how many rows (`records`) it had, and where they are.

    They are in `staged` or in `held`; in neither if the batch was committed `before`. `epoch` is that of the
    stages, None if the task did not ask for it. `run` is the query's run, "" if it has none.
    """

    sink: str
    number: int
    epoch: int | None
    records: int
    staged: Staged | None = None
    held: HeldRows | None = None
    task: int = 0
    run: str = ""

    @property
    def before(self) -> bool:
        """Whether the batch was committed before, so that nothing of it is staged."""
        return self.staged is None and self.held is None

    @property
    def has_rows(self) -> bool:
        """Whether there is something to commit."""
        return bool(self.held.stages if self.held is not None else self.staged and self.staged.parts)


class _Writer:
    """What the writers of batches and of streams have in common."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        self._options = options
        self._positions = check_sink_schema(schema, topic=options.topic)
        # Resolved in the driver, for all tasks.
        from laminar.spark.read.cluster import resolve_endpoints

        self._endpoints: Endpoints = resolve_endpoints(options)

    def _cluster(self) -> Cluster:
        from laminar.spark.read.cluster import cluster

        return cluster(self._endpoints, timeout_ms=self._options.timeout_ms)

    def _sink(self, name: str) -> Sink:
        from laminar.client.transact.sinks import Sink

        return Sink(self._cluster().session, name)

    def _stage(
        self, rows: Iterable[pyarrow.RecordBatch], name: str, *, number: int, epoch: int
    ) -> StagedMessage:
        from laminar.spark.read.cluster import tune
        from laminar.spark.write.task_stager import TaskStager

        here = self._cluster()
        if self._options.gc_freeze:
            tune()
        task = _context().partitionId()
        stager = TaskStager(here, name, number=number, epoch=epoch, task=task)
        staged = stager.stage(rows, self._positions, topic=self._options.topic)
        return StagedMessage(name, number, epoch, stager.rows, staged, task=task, run=_run_of_task())

    def _committed_before(
        self, rows: Iterable[pyarrow.RecordBatch], name: str, *, number: int, epoch: int
    ) -> StagedMessage:
        # The rows are read to the end, because Spark waits for that.
        return StagedMessage(name, number, epoch, sum(each.num_rows for each in rows))


class BatchWriter(_Writer, DataSourceArrowWriter):
    """The writer of ``df.write.format("laminar").mode("append").save()``, made in the driver."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        # A write without a transaction is atomic too: it has a sink of its own, which it uses once.
        self._name, self._number = options.transaction or (f"{WRITE_PREFIX}{uuid.uuid4()}", 0)
        sink = self._sink(self._name)
        self._epoch = self._cluster().run(sink.begin(once=options.transaction is None))
        self._already = sink.committed is not None and sink.committed >= self._number
        if sink.committed is not None and sink.committed > self._number:
            raise older_than_its_sink(self._name, self._number, sink.committed)

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> StagedMessage:
        """Stage the rows of a task."""
        do = self._committed_before if self._already else self._stage
        return do(iterator, self._name, number=self._number, epoch=self._epoch)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Commit what the tasks staged, in the driver.

        Raises:
            OtherBatch: when another batch is committed under this number.
            Fenced: when another driver took over the sink.
        """
        reported = _staged_messages(messages)
        staged = [each.staged for each in reported if each.staged is not None]
        fingerprint = Fingerprint(sum(each.records for each in reported))
        here, sink = self._cluster(), self._sink(self._name)
        if self._already:
            committed_before(here.run(sink.describe()), self._number, fingerprint)
            here.run(sink.commit(self._number, [], epoch=self._epoch))
        elif any(each.parts for each in staged):
            here.run(sink.commit(self._number, staged, epoch=self._epoch, fingerprint=str(fingerprint)))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Have the nodes drop the stages of a write that failed.

        If the write was committed, and only Spark did not learn it, the records stay. A sink of this write
        alone is begun once more: its new epoch shows the nodes that the write is over, so they drop its
        stages at once. The sink of a transaction is left as it is: the next attempt begins it. Errors are
        ignored.
        """
        if self._options.transaction is None:
            with contextlib.suppress(Error):
                sink = self._sink(self._name)
                self._cluster().run(sink.begin(once=True, timeout=ABORT_S))


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """The writer of ``df.writeStream.format("laminar").start()``.

    Spark makes one for each batch and one for each commit.
    """

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> StagedMessage:
        """Hold the rows of a task, or stage them under the epoch after the sink's present one.

        Do neither if the batch is known to be committed already.

        Raises:
            OtherBatch: when a later batch is committed.
        """
        from laminar.spark.write.held_rows import HELD_TASKS, take_small

        name, number = _batch_of_task()
        run, task = _run_of_task(), _context().partitionId()
        first, all_of_them = take_small(iterator)
        rows = chain(first, iterator)
        epoch = None
        small = all_of_them and task < HELD_TASKS
        if not (small and run and _asked.get(name) == run):
            epoch = self._next_epoch(name, number)
            if epoch is None:
                return self._committed_before(rows, name, number=number, epoch=0)
            _remember(_asked, name, run)
        if small:
            held = self._hold(first, task)
            if held is not None:
                records = sum(batch.num_rows for batch in first)
                return StagedMessage(name, number, epoch, records, held=held, task=task, run=run)
            epoch = epoch or self._next_epoch(name, number)
            if epoch is None:
                return self._committed_before(rows, name, number=number, epoch=0)
        assert epoch is not None, "rows are staged under an epoch"
        return self._stage(rows, name, number=number, epoch=epoch)

    def _next_epoch(self, name: str, number: int) -> int | None:
        """Return the epoch after the sink's present one; None if the batch is committed already.

        Raises:
            OtherBatch: when a later batch is committed.
        """
        from laminar.spark.write.task_stager import sink_info

        here = self._cluster()
        return _epoch_after(here.run(sink_info(here, name)), number)

    def _hold(self, rows: Sequence[pyarrow.RecordBatch], task: int) -> HeldRows | None:
        """Return the rows as a message holds them; None if their frames are too large for one."""
        from laminar.spark.read.cluster import tune
        from laminar.spark.write.held_rows import MOST_FRAME_BYTES, hold

        if self._options.gc_freeze:
            tune()
        held = hold(self._cluster(), rows, self._positions, topic=self._options.topic, task=task)
        return held if held.size_bytes <= MOST_FRAME_BYTES else None

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Commit what the tasks of batch `batchId` staged or hold, in the driver.

        Raises:
            OtherBatch: when another batch is committed under this number.
            Fenced: when another driver of this checkpoint took over.
        """
        reported = _staged_messages(messages)
        if not any(each.before or each.has_rows for each in reported):
            return
        fingerprint = Fingerprint(
            sum(each.records for each in reported), journal_of(self._options.checkpoint, batchId)
        )
        self._cluster().run(self._commit(reported, batchId, fingerprint))

    async def _commit(self, reported: list[StagedMessage], number: int, fingerprint: Fingerprint) -> None:
        name, run = reported[0].sink, reported[0].run
        sink = self._sink(name)
        # Only a commit that succeeds is remembered.
        last = _committed.pop(name, None)
        epoch = None
        if not any(each.before for each in reported):
            epoch = await self._epoch_of(reported, number, last)
        if epoch is None:
            epoch = await self._commit_again(sink, number, fingerprint)
        else:
            staged = await self._begin_and_stage(sink, reported, number, epoch)
            await sink.commit(number, staged, epoch=epoch, fingerprint=str(fingerprint))
        if run:
            _remember(_committed, name, (run, number, epoch))

    async def _epoch_of(
        self, reported: list[StagedMessage], number: int, last: tuple[str, int, int] | None
    ) -> int | None:
        """Return the epoch to begin for a batch; None if it is committed already.

        It is the one that tasks read, or that after the batch before, if this process committed that in the
        same run of the query; else the sink is asked. Whichever it is, it is begun only if it is the next.

        Raises:
            OtherBatch: when a later batch is committed.
            Fenced: when the tasks read different epochs.
        """
        from laminar.spark.write.task_stager import sink_info

        name = reported[0].sink
        epochs = {each.epoch for each in reported if each.epoch is not None}
        if len(epochs) > 1:
            raise _fenced(name, number, f"its epoch rose to {max(epochs)} while tasks were staging")
        if epochs:
            return epochs.pop()
        if last is not None and last[:2] == (reported[0].run, number - 1):
            return last[2] + 1
        return _epoch_after(await sink_info(self._cluster(), name), number)

    async def _begin_and_stage(
        self, sink: Sink, reported: list[StagedMessage], number: int, epoch: int
    ) -> list[Staged]:
        """Begin the epoch and stage the held rows, at the same time; return all that is staged.

        Raises:
            Fenced: when another driver has begun this epoch. What was staged under it is dropped.
        """
        from laminar.spark.write.held_rows import HeldStager

        staged = [each.staged for each in reported if each.staged is not None]
        held = [each.held for each in reported if each.held is not None and each.held.stages]
        others = [each.task for each in reported if each.staged is not None]
        stager = HeldStager(self._cluster(), sink.name, number=number, epoch=epoch)
        staging = asyncio.ensure_future(stager.stage(held, others))
        try:
            try:
                await sink.begin(epoch=epoch)
            except Fenced as error:
                raise _fenced(sink.name, number, f"its epoch is {error.limit}") from error
            if sink.committed is not None and sink.committed >= number:
                raise _fenced(sink.name, number, f"batch {sink.committed} is committed")
            return [*staged, *await staging]
        finally:
            staging.cancel()
            await asyncio.gather(staging, return_exceptions=True)

    async def _commit_again(self, sink: Sink, number: int, fingerprint: Fingerprint) -> int:
        """Have all partitions publish a batch that was committed in an earlier run; return the epoch begun.

        To commit its number once more writes nothing.
        """
        epoch = await sink.begin()
        # Otherwise this would commit an empty batch.
        assert sink.committed is not None and sink.committed >= number, (sink.committed, number)
        committed_before(await sink.describe(), number, fingerprint)
        await sink.commit(number, [], epoch=epoch)
        return epoch

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: stages that are not committed are dropped, and what is committed stays."""


def _epoch_after(known: SinkInfo, number: int) -> int | None:
    """Return the epoch after the sink's present one; None if batch `number` is committed.

    Raises:
        OtherBatch: when a later batch is committed.
    """
    if known.committed is not None and known.committed > number:
        raise older_than_its_sink(known.sink, number, known.committed)
    return None if known.committed == number else known.epoch + 1


def _remember(known: dict[str, T], sink: str, what: T) -> None:
    known.pop(sink, None)
    known[sink] = what
    while len(known) > _REMEMBERED:
        del known[next(iter(known))]


def _staged_messages(messages: Sequence[WriterCommitMessage | None]) -> list[StagedMessage]:
    return [each for each in messages if isinstance(each, StagedMessage)]


def _context() -> TaskContext:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "called outside of a task"
    return context


def _batch_of_task() -> tuple[str, int]:
    """Return the sink and the number of this task's batch, as Spark passes them to its tasks."""
    context = _context()
    query = context.getLocalProperty("sql.streaming.queryId")
    number = context.getLocalProperty("streaming.sql.batchId")
    if query is None or number is None:
        raise RuntimeError("this task has no query id and batch number: continuous mode is not supported")
    return STREAM_PREFIX + query, int(number)


def _run_of_task() -> str:
    """Return the id of this run of the query, another one after each start; "" if Spark gives none."""
    return _context().getLocalProperty("spark.jobGroup.id") or ""


def _fenced(sink: str, number: int, why: str) -> Fenced:
    return Fenced(
        f"another driver uses this query's checkpoint: of sink {sink!r} {why}; this driver does not commit"
        f" batch {number}",
        code="fenced",
        field="epoch",
        outcome="not_applied",
    )
