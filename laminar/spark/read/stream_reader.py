"""``spark.readStream.format("laminar")``: the driver's side of a streaming query.

One instance lives as long as the query, in a process that Spark keeps for it. Tasks get pickled copies, of
which they call only `read`. All that must survive a restart is in Spark's journal: the ranges of a batch
follow from the two offsets that the journal has for it. Spark calls `latestOffset` up to a hundred times a
second while the query is idle, so `latestOffset` itself waits for records. An exception ends the query, so
the client retries each request until its deadline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from laminar.client.errors import NotFound
from laminar.spark.read import plan
from laminar.spark.read.cluster import Cluster, cluster, resolve_endpoints
from laminar.spark.read.columns import check_schema
from laminar.spark.read.end_offsets import EndOffsetTracker
from laminar.spark.read.loss import partition_loss, positions_now
from laminar.spark.read.offsets import (
    AT_LATEST,
    Ids,
    Offset,
    OffsetSpec,
    Positions,
    decode,
    encode,
    spec_of_symbol,
)
from laminar.spark.read.options import Options
from laminar.spark.read.partition_lineage import admitted
from laminar.spark.read.progress_cursor import ProgressCursor
from laminar.spark.read.tasks import RangePartition, read_partition

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType


log = logging.getLogger(__name__)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of a streaming query: its offsets and ranges."""

    def __init__(self, options: Options, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema
        self._endpoints = resolve_endpoints(options)
        self._tracker: EndOffsetTracker | None = None
        self._progress: ProgressCursor | None = None
        # With the trigger AvailableNow, where the query ends; else None.
        self._target: Offset | None = None
        # The start of the batch for which the last calls waited.
        self._idle_at: Offset | None = None
        # Ends that a majority confirmed and that are below what was read: records were lost.
        self._shorter: Positions = {}
        # Missing topics of which a warning was logged.
        self._warned: set[str] = set()
        self._last_batch_s: float | None = None

    # -- offsets -------------------------------------------------------------------------------

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of a batch that the options set."""
        records, size_bytes = self._options.max_offsets_per_trigger, self._options.max_bytes_per_trigger
        if records is not None:
            return ReadMaxRows(records)
        return ReadAllAvailable() if size_bytes is None else ReadMaxBytes(size_bytes)

    def initialOffset(self) -> dict[str, Any]:
        """Return the query's start as a symbolic offset, without numbers (`laminar.spark.read.offsets`)."""
        return self._options.start.symbol()

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of the query: all that is committed now, as a majority confirms it."""
        here = self._cluster()
        described = here.run(here.describe(self._options, confirmed=True))
        ends = here.run(here.positions(described.ids, AT_LATEST))
        self._target = Offset(ends, described.ids)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the offset at which the next batch, from `start` on, ends; `start` itself if there is none.

        It waits up to `pollTimeoutMs` for records.

        Raises:
            DataLoss: when records are gone before they were read, with `failOnDataLoss`.
            NotFound: when a topic that the options name is gone, with `failOnDataLoss`.
            Error: when the cluster does not answer in time.
        """
        spec = spec_of_symbol(start)
        if spec is not None:
            return self._first_end(spec, limit)
        read = decode(start)
        self._report(read.positions, caught_up=False)
        positions = self._positions_now(read)
        reached = self._reach(positions)
        enough = self._is_enough(plan.lag(positions, reached))
        if not enough and self._target is None and self._is_as_read(read, positions):
            self._await_records(read)
            positions = self._positions_now(read)
            reached = self._reach(positions)
            enough = self._is_enough(plan.lag(positions, reached))
        if not enough and self._is_as_read(read, positions):
            self._report(read.positions, caught_up=True)
            return start  # the same text: Spark takes any other for new records
        # If there are too few records, but the query continues elsewhere than it read to (a partition was
        # replaced or shortened), an empty batch puts the new positions into the journal.
        ends = self._limited(positions, reached, limit) if enough else positions
        self._last_batch_s = time.monotonic()
        return encode(ends, self._ids(ends))

    def _first_end(self, spec: OffsetSpec, limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the query's first batch, with `since`: where that batch begins."""
        here = self._cluster()
        ids = here.run(here.ids(self._options))
        strict = self._options.start_beyond_is_error
        since = here.run(here.positions(ids, spec, starts=True, strict=strict))
        self._tracked(ids)
        # A partition that was created after `ids` were read is not in `since`. It is left to the next batch,
        # which begins at its first record.
        reached = {partition: n for partition, n in self._reach(since).items() if partition in since}
        self._last_batch_s = time.monotonic()
        return encode(self._limited(since, reached, limit), ids, since=since)

    def _limited(self, positions: Positions, reached: Positions, limit: ReadLimit) -> Positions:
        """Return `reached`, or positions closer to `positions` where the batch has a limit."""
        if not isinstance(limit, (ReadMaxRows, ReadMaxBytes)):
            return reached
        # Spark knows one limit for each query; the options may set two.
        return plan.limited(
            positions,
            reached,
            max_records=limit.max_rows if isinstance(limit, ReadMaxRows) else None,
            max_bytes=self._options.max_bytes_per_trigger,
            record_bytes=self._tracked({}).record_bytes,
        )

    def _is_as_read(self, read: Offset, positions: Positions) -> bool:
        """Return whether the query continues exactly where it `read` to, in the same partitions."""
        return positions == read.positions and self._ids(positions) == read.ids

    def _ids(self, positions: Positions) -> Ids:
        """Return the ids of these partitions as the query reads them now."""
        known = self._tracked({}).ids
        if self._target is not None:
            known = known | self._target.ids
        return {partition: known[partition] for partition in positions}

    def _positions_now(self, read: Offset) -> Positions:
        """Return where to continue after `read`: see `laminar.spark.read.loss.positions_now`.

        Raises:
            DataLoss: for records that are gone, with `failOnDataLoss`; without it a warning is logged.
            NotFound: for a topic that the options name and that is gone, likewise.
        """
        tracker = self._tracked(read.ids)
        ids, ends, confirmed = tracker.ids, tracker.ends, self._shorter
        if self._target is not None:
            ids, ends, confirmed = (
                ids | self._target.ids,
                ends | self._target.positions,
                self._target.positions,
            )
        fail = self._options.fail_on_data_loss
        here = self._cluster()
        left_out = {
            partition: here.run(here.offset_at(partition, "latest", id_))
            for partition, id_ in tracker.left_out.items()
            if read.ids.get(partition) == id_
        }
        positions = positions_now(
            read, ids, ends, left_out=left_out, confirmed=confirmed, fail=fail, final=tracker.final
        )
        for topic in tracker.missing:
            if fail:
                raise NotFound(f"there is no topic {topic!r}", code="no_such_topic")
            if topic not in self._warned:
                self._warned.add(topic)
                log.warning("there is no topic %r; the query continues with the others", topic)
        return positions

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the ends as of the last refresh, for the query's progress; makes no request."""
        return encode(self._tracker.ends) if self._tracker is not None else None

    def _report(self, committed: Positions, *, caught_up: bool) -> None:
        # `committed` is the start of the next batch. Spark asks for that batch only when the batch that ends
        # there is committed.
        if self._options.cursor is not None:
            if self._progress is None:
                self._progress = ProgressCursor(self._cluster(), self._options.cursor)
            self._progress.write(committed, caught_up=caught_up)

    def _reach(self, positions: Positions) -> Positions:
        # How far a batch from `positions` can go, before limits.
        # The target was confirmed by a majority; the tracker's ends may be older than that.
        tracker = self._tracked({})
        ends = tracker.ends if self._target is None else self._target.positions
        return plan.forward(positions, admitted(positions, ends, tracker.replaced))

    def _is_enough(self, records: int) -> bool:
        """Return whether `records` are enough for a batch now; False to wait for more.

        See the options `minOffsetsPerTrigger` and `maxTriggerDelay`.
        """
        least = self._options.min_offsets_per_trigger
        if records == 0 or least is None or records >= least or self._target is not None:
            return records > 0
        if self._last_batch_s is None:
            return True
        return (time.monotonic() - self._last_batch_s) * 1000 >= self._options.max_trigger_delay_ms

    def _await_records(self, read: Offset) -> None:
        # Waits up to `pollTimeoutMs` for records after `read`, and refreshes the ends if there may be some.
        tracker = self._tracked(read.ids)
        if read != self._idle_at:
            # A batch was made since the last call: most likely more was appended meanwhile.
            self._idle_at = read
            self._refresh(tracker, read)
            if self._is_enough(plan.lag(read.positions, self._reach(read.positions))):
                return
        if tracker.wait_for_news(self._options.poll_timeout_ms):
            self._refresh(tracker, read)

    def _refresh(self, tracker: EndOffsetTracker, read: Offset) -> None:
        """Refresh the ends, and set `_shorter`.

        An end below what was read is that of a replica that lags, or records were lost. The leader's answer
        decides which.
        """
        ends = tracker.refresh()
        here = self._cluster()
        self._shorter = {}
        for partition, offset in read.positions.items():
            id_ = tracker.ids.get(partition)
            if id_ == read.ids.get(partition) and ends.get(partition, offset) < offset:
                end = here.run(here.offset_at(partition, "latest", id_ or ""))
                if end < offset:
                    self._shorter[partition] = end

    # -- batches -------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the ranges of the batch from `start` to `end`, one for each task.

        Raises:
            DataLoss: when records of the batch are gone, with `failOnDataLoss`.
        """
        options = self._options
        until = decode(end)
        tracker = self._tracked(until.ids)
        gone = tracker.gone(until.ids)
        if gone:
            tracker.refresh()
            gone = tracker.gone(until.ids)
        starts = _starts(start, until)
        whole = plan.ranges(
            starts,
            until.positions,
            {partition: n for partition, n in tracker.earliest.items() if partition not in gone},
            ids=until.ids,
            fail_on_data_loss=options.fail_on_data_loss,
        )
        lost = [each for each in whole if (each.topic, each.partition) in gone]
        if lost:
            partition_loss(
                [f"{each.topic}/{each.partition}, {each.start} to {each.end - 1}: deleted" for each in lost],
                fail=options.fail_on_data_loss,
            )
        pieces = plan.split(
            [each for each in whole if each not in lost],
            min_partitions=options.min_partitions,
            max_records=options.max_records_per_partition,
            max_bytes=options.max_bytes_per_partition,
            record_bytes=tracker.record_bytes,
        )
        rows = plan.RowFilter(tag=options.tag)
        return [RangePartition(piece, rows) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the records of one range, in an executor."""
        return read_partition(
            partition, endpoints=self._endpoints, options=self._options, schema=self._schema
        )

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Spark calls it a batch late, and never for the last, so nothing may depend on it."""

    def stop(self) -> None:
        """End the long polls. Spark ends the process instead; tests call this."""
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = None

    def _cluster(self) -> Cluster:
        return cluster(self._endpoints, timeout_ms=self._options.timeout_ms)

    def _tracked(self, ids: Ids) -> EndOffsetTracker:
        """Return the tracker, which the first call makes.

        Only the first call uses `ids`: the ids of the partitions that the query has read, by the journal.
        Calls that come later may give none.
        """
        if self._tracker is None:
            self._tracker = EndOffsetTracker(self._cluster(), self._options, ids)
            self._tracker.refresh()
        return self._tracker


def _starts(start: dict[str, Any], until: Offset) -> Positions:
    """Return where a batch from `start` to `until` begins, without the partitions that begin at 0.

    These are new, or were deleted and created again: `start` does not have them, or has another id.
    """
    if spec_of_symbol(start) is not None:
        assert until.since is not None, f"the end of a query's first batch does not say its begin: {until}"
        return until.since
    read = decode(start)
    return {
        partition: offset
        for partition, offset in read.positions.items()
        if read.ids.get(partition) == until.ids.get(partition)
    }
