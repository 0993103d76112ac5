"""``spark.readStream.format("laminar")``: the driver's side of a streaming query.

One instance lives as long as the query, in a process that Spark keeps for it; another is pickled into the
tasks and only reads. What must survive a restart is in Spark's journal alone: ranges follow from two
journaled offsets. Spark asks `latestOffset` up to a hundred times a second, so it waits for news itself; and
an exception ends the query, so the client below retries until its deadline.
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
from laminar.spark.read.end_offsets import Watch
from laminar.spark.read.loss import partition_loss, settle
from laminar.spark.read.offsets import (
    AT_LATEST,
    Ids,
    Offset,
    Place,
    Positions,
    decode,
    encode,
    place_of_symbol,
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
    """Offsets and ranges of one query."""

    def __init__(self, options: Options, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema
        self._endpoints = resolve_endpoints(options)
        self._watch: Watch | None = None
        self._progress: ProgressCursor | None = None
        self._target: Offset | None = None
        self._idle_at: Offset | None = None
        # Ends that a majority confirmed, of partitions that were read further than that.
        self._shorter: Positions = {}
        self._warned: set[str] = set()
        self._last_batch_s: float | None = None

    # -- offsets -------------------------------------------------------------------------------

    def getDefaultReadLimit(self) -> ReadLimit:
        records, size_bytes = self._options.max_offsets_per_trigger, self._options.max_bytes_per_trigger
        if records is not None:
            return ReadMaxRows(records)
        return ReadAllAvailable() if size_bytes is None else ReadMaxBytes(size_bytes)

    def initialOffset(self) -> dict[str, Any]:
        """Where the query starts, as a symbol: see `laminar.spark.read.offsets`."""
        return self._options.start.symbol()

    def prepareForTriggerAvailableNow(self) -> None:
        here = self._cluster()
        described = here.run(here.describe(self._options, confirmed=True))
        ends = here.run(here.positions(described.ids, AT_LATEST))
        self._target = Offset(ends, described.ids)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        place = place_of_symbol(start)
        if place is not None:
            return self._first_end(place, limit)
        read = decode(start)
        self._report(read.positions, at_rest=False)
        positions = self._settled(read)
        reached = self._reach(positions)
        enough = self._is_enough(plan.lag(positions, reached))
        if not enough and self._target is None and self._is_as_read(read, positions):
            self._await_news(read)
            positions = self._settled(read)
            reached = self._reach(positions)
            enough = self._is_enough(plan.lag(positions, reached))
        if not enough and self._is_as_read(read, positions):
            self._report(read.positions, at_rest=True)
            return start  # the very same text: anything else would be news
        # Where some partition is not what was read, a batch of no records puts down where to go on.
        ends = self._limited(positions, reached, limit) if enough else positions
        self._last_batch_s = time.monotonic()
        return encode(ends, self._ids(ends))

    def _first_end(self, place: Place, limit: ReadLimit) -> dict[str, Any]:
        """The end of the query's first batch; it says where that begins, so the journal does."""
        here = self._cluster()
        ids = here.run(here.ids(self._options))
        strict = self._options.start_beyond_is_error
        since = here.run(here.positions(ids, place, starts=True, strict=strict))
        self._watching(ids)
        # What was made since is not in `since`: the next batch begins it at its first record.
        reached = {partition: n for partition, n in self._reach(since).items() if partition in since}
        self._last_batch_s = time.monotonic()
        return encode(self._limited(since, reached, limit), ids, since=since)

    def _limited(self, positions: Positions, reached: Positions, limit: ReadLimit) -> Positions:
        """`reached`, or less far from `positions` where a batch has limits."""
        if not isinstance(limit, (ReadMaxRows, ReadMaxBytes)):
            return reached
        # Spark knows one limit a query; there may be two.
        return plan.limited(
            positions,
            reached,
            max_records=limit.max_rows if isinstance(limit, ReadMaxRows) else None,
            max_bytes=self._options.max_bytes_per_trigger,
            record_bytes=self._watching({}).record_bytes,
        )

    def _is_as_read(self, read: Offset, positions: Positions) -> bool:
        """Whether what there is goes on from what was `read`, in the same partitions."""
        return positions == read.positions and self._ids(positions) == read.ids

    def _ids(self, positions: Positions) -> Ids:
        """The ids of these partitions, as the query reads them now."""
        known = self._watching({}).ids
        if self._target is not None:
            known = known | self._target.ids
        return {partition: known[partition] for partition in positions}

    def _settled(self, read: Offset) -> Positions:
        """Where to go on after `read`, in what is there now. Raises `DataLoss`, or warns; see `settle`."""
        watch = self._watching(read.ids)
        ids, ends, confirmed = watch.ids, watch.ends, self._shorter
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
            for partition, id_ in watch.left_out.items()
            if read.ids.get(partition) == id_
        }
        positions = settle(read, ids, ends, left_out=left_out, confirmed=confirmed, fail=fail)
        for topic in watch.missing:
            if fail:
                raise NotFound(f"there is no topic {topic!r}", code="no_such_topic")
            if topic not in self._warned:
                self._warned.add(topic)
                log.warning("there is no topic %r; the query goes on with the others", topic)
        return positions

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The ends as last heard, for the query's progress; asks nobody."""
        return encode(self._watch.ends) if self._watch is not None else None

    def _report(self, committed: Positions, *, at_rest: bool) -> None:
        # What Spark asks to go on from is committed: the batch before is.
        if self._options.cursor is not None:
            if self._progress is None:
                self._progress = ProgressCursor(self._cluster(), self._options.cursor)
            self._progress.write(committed, at_rest=at_rest)

    def _reach(self, positions: Positions) -> Positions:
        # The target was confirmed by a majority, while what the watch heard may be older than that.
        watch = self._watching({})
        ends = watch.ends if self._target is None else self._target.positions
        return plan.forward(positions, admitted(positions, ends, watch.replaced))

    def _is_enough(self, records: int) -> bool:
        """Whether `records` make a batch now, or more are waited for."""
        least = self._options.min_offsets_per_trigger
        if records == 0 or least is None or records >= least or self._target is not None:
            return records > 0
        if self._last_batch_s is None:
            return True
        return (time.monotonic() - self._last_batch_s) * 1000 >= self._options.max_trigger_delay_ms

    def _await_news(self, read: Offset) -> None:
        watch = self._watching(read.ids)
        if read != self._idle_at:
            # A batch was made since we were here: meanwhile, most likely, more was appended.
            self._idle_at = read
            self._look(watch, read)
            if self._is_enough(plan.lag(read.positions, self._reach(read.positions))):
                return
        if watch.wait_for_news(self._options.poll_timeout_ms):
            self._look(watch, read)

    def _look(self, watch: Watch, read: Offset) -> None:
        """Hear of the ends; one before what was read already is old news, or records were lost."""
        heard = watch.look()
        here = self._cluster()
        self._shorter = {}
        for partition, offset in read.positions.items():
            id_ = watch.ids.get(partition)
            if id_ == read.ids.get(partition) and heard.get(partition, offset) < offset:
                end = here.run(here.offset_at(partition, "latest", id_ or ""))
                if end < offset:
                    self._shorter[partition] = end

    # -- batches -------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        options = self._options
        until = decode(end)
        watch = self._watching(until.ids)
        gone = watch.gone(until.ids)
        if gone:
            watch.look()
            gone = watch.gone(until.ids)
        starts = _starts(start, until)
        whole = plan.ranges(
            starts,
            until.positions,
            {partition: n for partition, n in watch.earliest.items() if partition not in gone},
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
            record_bytes=watch.record_bytes,
        )
        rows = plan.RowFilter(tag=options.tag)
        return [RangePartition(piece, rows) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return read_partition(
            partition, endpoints=self._endpoints, options=self._options, schema=self._schema
        )

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: Spark says it a batch late, and never of the last one, so nothing may rest on it."""

    def stop(self) -> None:
        """End the long polls. Spark ends the process instead; a test calls it."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _cluster(self) -> Cluster:
        return cluster(self._endpoints, timeout_ms=self._options.timeout_ms)

    def _watching(self, ids: Ids) -> Watch:
        """The watch; made at the first call, when `ids` are those of the journal."""
        if self._watch is None:
            self._watch = Watch(self._cluster(), self._options, ids)
            self._watch.look()
        return self._watch


def _starts(start: dict[str, Any], until: Offset) -> Positions:
    """Where a batch from `start` to `until` begins; a partition that `start` does not know begins at 0."""
    if place_of_symbol(start) is not None:
        assert until.since is not None, f"the end of a query's first batch does not say its begin: {until}"
        return until.since
    read = decode(start)
    return {
        partition: offset
        for partition, offset in read.positions.items()
        if read.ids.get(partition) == until.ids.get(partition)
    }
