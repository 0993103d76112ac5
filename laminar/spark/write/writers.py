"""``df.write`` and ``df.writeStream`` into topics: tasks stage, the driver commits, each batch counts once.

A stream's sink is named after the query's id, which is in its checkpoint, and its batches have Spark's
numbers. Spark passes the id and the number only to tasks, so the driver cannot begin the sink before them. So
a task reads the sink's epoch and stages under the next one; afterwards the driver begins exactly that next
epoch and commits. That fails if another driver of the same checkpoint has begun it since. A batch write
begins its sink in the driver, before its tasks.

Spark pickles a writer into each task, and for a stream makes another one for each commit. So a writer keeps
nothing that it learns after it was made.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

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

STREAM_PREFIX = "spark-"
WRITE_PREFIX = "spark-write-"
# How long the driver of an aborted write tries to have its stages dropped.
ABORT_S = 10.0


@dataclass(frozen=True)
class StagedMessage(WriterCommitMessage):
    """A task's message to its driver: how many rows (`records`) it had, and what it staged.

    `staged` is None if the batch was committed before, so that nothing is staged.
    """

    sink: str
    number: int
    epoch: int
    records: int
    staged: Staged | None


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
        stager = TaskStager(here, name, number=number, epoch=epoch, task=_context().partitionId())
        staged = stager.stage(rows, self._positions, topic=self._options.topic)
        return StagedMessage(name, number, epoch, stager.rows, staged)

    def _committed_before(
        self, rows: Iterable[pyarrow.RecordBatch], name: str, *, number: int, epoch: int
    ) -> StagedMessage:
        # The rows are read to the end, because Spark waits for that.
        return StagedMessage(name, number, epoch, sum(each.num_rows for each in rows), None)


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
        """Stage the rows of a task, under the epoch after the sink's present one.

        Stage nothing if the batch is committed already.

        Raises:
            OtherBatch: when a later batch is committed.
        """
        from laminar.spark.write.task_stager import sink_info

        name, number = _batch_of_task()
        here = self._cluster()
        known = here.run(sink_info(here, name))
        if known.committed is not None and known.committed > number:
            raise older_than_its_sink(name, number, known.committed)
        already = known.committed is not None and known.committed >= number
        do = self._committed_before if already else self._stage
        return do(iterator, name, number=number, epoch=known.epoch + 1)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Commit what the tasks of batch `batchId` staged, in the driver.

        Raises:
            OtherBatch: when another batch is committed under this number.
            Fenced: when another driver of this checkpoint took over.
        """
        reported = _staged_messages(messages)
        staged = [each.staged for each in reported if each.staged is not None]
        if len(staged) == len(reported) and not any(each.parts for each in staged):
            return
        fingerprint = Fingerprint(
            sum(each.records for each in reported), journal_of(self._options.checkpoint, batchId)
        )
        self._cluster().run(self._commit(reported, staged, batchId, fingerprint))

    async def _commit(
        self, reported: list[StagedMessage], staged: list[Staged], number: int, fingerprint: Fingerprint
    ) -> None:
        sink = self._sink(reported[0].sink)
        if len(staged) < len(reported):
            # The batch was committed in an earlier run, but some partitions may not have published it yet. To
            # commit its number once more has them publish it, and writes nothing.
            epoch = await sink.begin()
            # Otherwise this would commit an empty batch.
            assert sink.committed is not None and sink.committed >= number, (sink.committed, number)
            committed_before(await sink.describe(), number, fingerprint)
            await sink.commit(number, [], epoch=epoch)
            return
        epochs = {each.epoch for each in reported}
        if len(epochs) > 1:
            raise _fenced(sink.name, number, f"its epoch rose to {max(epochs)} while tasks were staging")
        epoch = epochs.pop()
        try:
            await sink.begin(epoch=epoch)
        except Fenced as error:
            raise _fenced(sink.name, number, f"its epoch is {error.limit}") from error
        if sink.committed is not None and sink.committed >= number:
            raise _fenced(sink.name, number, f"batch {sink.committed} is committed")
        await sink.commit(number, staged, epoch=epoch, fingerprint=str(fingerprint))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: stages that are not committed are dropped, and what is committed stays."""


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


def _fenced(sink: str, number: int, why: str) -> Fenced:
    return Fenced(
        f"another driver uses this query's checkpoint: of sink {sink!r} {why}; this driver does not commit"
        f" batch {number}",
        code="fenced",
        field="epoch",
        outcome="not_applied",
    )
