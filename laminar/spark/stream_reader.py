"""``spark.readStream.format("laminar")``: the driver's side of a streaming query.

One instance lives as long as the query, in a process that Spark keeps for it; another is pickled into the
tasks and only reads. What must survive a restart is in Spark's journal alone: ranges follow from two
journaled offsets. Spark asks `latestOffset` up to a hundred times a second, so it waits for news itself; and
an exception ends the query, so the client below retries until its deadline.
"""

from __future__ import annotations

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

from laminar.spark import plan
from laminar.spark.cluster import Cluster, cluster, resolve_endpoints
from laminar.spark.columns import check_schema
from laminar.spark.offsets import AT_LATEST, Positions, decode, encode, place_of_symbol
from laminar.spark.options import Options
from laminar.spark.progress import ProgressCursor
from laminar.spark.succession import admitted
from laminar.spark.tasks import RangePartition, read_partition
from laminar.spark.watch import Watch

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offsets and ranges of one query."""

    def __init__(self, options: Options, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema
        self._endpoints = resolve_endpoints(options)
        self._watch: Watch | None = None
        self._progress: ProgressCursor | None = None
        self._target: Positions | None = None
        self._idle_at: Positions | None = None
        self._last_batch_s: float | None = None

    # -- offsets -------------------------------------------------------------------------------

    def getDefaultReadLimit(self) -> ReadLimit:
        records, size_bytes = self._options.max_offsets_per_trigger, self._options.max_bytes_per_trigger
        if records is not None:
            return ReadMaxRows(records)
        return ReadAllAvailable() if size_bytes is None else ReadMaxBytes(size_bytes)

    def initialOffset(self) -> dict[str, Any]:
        """Where the query starts, as a symbol: see `laminar.spark.offsets`."""
        return self._options.start.symbol()

    def prepareForTriggerAvailableNow(self) -> None:
        here = self._cluster()
        self._target = here.run(here.positions(self._options, AT_LATEST))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        place = place_of_symbol(start)
        if place is not None:
            here = self._cluster()
            strict = self._options.start_beyond_is_error
            # The empty batch that this makes pins it: from here on the journal has numbers.
            return encode(here.run(here.positions(self._options, place, beyond_is_error=strict)))
        positions = decode(start)
        self._report(positions, at_rest=False)
        reached = self._reach(positions)
        if self._target is None and not self._is_enough(plan.lag(positions, reached)):
            self._await_news(positions)
            reached = self._reach(positions)
        if not self._is_enough(plan.lag(positions, reached)):
            self._report(positions, at_rest=True)
            return start  # the very same text: anything else would be news
        self._last_batch_s = time.monotonic()
        if isinstance(limit, (ReadMaxRows, ReadMaxBytes)):
            # Spark knows one limit a query; there may be two.
            reached = plan.limited(
                positions,
                reached,
                max_records=limit.max_rows if isinstance(limit, ReadMaxRows) else None,
                max_bytes=self._options.max_bytes_per_trigger,
                record_bytes=self._watching().record_bytes,
            )
        return encode(reached)

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
        watch = self._watching()
        ends = watch.ends if self._target is None else self._target
        return plan.forward(positions, admitted(positions, ends, watch.replaced))

    def _is_enough(self, records: int) -> bool:
        """Whether `records` make a batch now, or more are waited for."""
        least = self._options.min_offsets_per_trigger
        if records == 0 or least is None or records >= least or self._target is not None:
            return records > 0
        if self._last_batch_s is None:
            return True
        return (time.monotonic() - self._last_batch_s) * 1000 >= self._options.max_trigger_delay_ms

    def _await_news(self, positions: Positions) -> None:
        watch = self._watching()
        if positions != self._idle_at:
            # A batch was made since we were here: meanwhile, most likely, more was appended.
            self._idle_at = positions
            self._look(watch, positions)
            if self._is_enough(plan.lag(positions, self._reach(positions))):
                return
        if watch.wait_for_news(self._options.poll_timeout_ms):
            self._look(watch, positions)

    def _look(self, watch: Watch, positions: Positions) -> None:
        """Hear of the ends; an end before what was read already is either old news or a topic made anew."""
        heard = watch.look()
        behind = {p: offset for p, offset in positions.items() if heard.get(p, offset) < offset}
        if not behind or not self._options.fail_on_data_loss:
            return
        here = self._cluster()
        for partition, offset in behind.items():
            end = here.run(here.offset_at(partition, "latest"))
            if end < offset:
                topic, number = partition
                raise plan.DataLoss(
                    plan.loss_message(f"{topic}/{number} ends at {end}, was read to {offset}")
                )

    # -- batches -------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        if place_of_symbol(start) is not None:
            return []
        options = self._options
        watch = self._watching()
        whole = plan.ranges(
            decode(start), decode(end), watch.earliest, fail_on_data_loss=options.fail_on_data_loss
        )
        pieces = plan.split(
            whole,
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

    def _watching(self) -> Watch:
        if self._watch is None:
            self._watch = Watch(self._cluster(), self._options)
            self._watch.look()
        return self._watch
