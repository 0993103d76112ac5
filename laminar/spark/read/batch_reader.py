"""``spark.read.format("laminar")``: a snapshot of topics between a start and an end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from laminar.spark.read import plan
from laminar.spark.read.cluster import cluster, resolve_endpoints
from laminar.spark.read.columns import check_schema
from laminar.spark.read.offsets import AT_EARLIEST, AT_LATEST
from laminar.spark.read.options import Options
from laminar.spark.read.tasks import RangePartition, read_partition

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType

    from laminar.spark.read.filters import Pushed


class BatchReader(DataSourceReader):
    """The reader of a batch query.

    It resolves start and end to offsets when Spark plans the DataFrame, so all actions on one DataFrame see
    the same records.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema
        self._endpoints = resolve_endpoints(options)
        self._pushed: Pushed | None = None

    def partitions(self) -> Sequence[InputPartition]:
        """Return the ranges of the snapshot, one for each task.

        Raises:
            ValueError: when the options name a start or end that a partition does not have.
            DataLoss: when retention trimmed records of the snapshot, with `failOnDataLoss`.
            NotFound: when a topic or a partition that the options name does not exist.
            Error: when the cluster does not answer.
        """
        options = self._options
        here = cluster(self._endpoints, timeout_ms=options.timeout_ms)
        ids = here.run(here.ids(options))
        latest = here.run(here.positions(ids, AT_LATEST))
        earliest = here.run(here.positions(ids, AT_EARLIEST))
        starts, ends = earliest, latest
        if options.start != AT_EARLIEST:
            strict = options.start_beyond_is_error
            starts = here.run(here.positions(ids, options.start, starts=True, strict=strict))
        if options.end != AT_LATEST:
            # An end that is given may lie after the last record.
            given = here.run(here.positions(ids, options.end))
            ends = {partition: min(end, latest[partition]) for partition, end in given.items()}
        whole = plan.ranges(starts, ends, earliest, ids=ids, fail_on_data_loss=options.fail_on_data_loss)
        described = here.run(here.describe(options))
        pieces = plan.split(
            self._pushed.cut(whole) if self._pushed else whole,
            min_partitions=options.min_partitions,
            max_records=options.max_records_per_partition,
            max_bytes=options.max_bytes_per_partition,
            record_bytes={p: each.record_bytes for p, each in described.bounds.items()},
        )
        rows = self._pushed.rows if self._pushed else plan.RowFilter(tag=options.tag)
        return [RangePartition(piece, rows) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the records of one range, in an executor."""
        return read_partition(
            partition, endpoints=self._endpoints, options=self._options, schema=self._schema
        )


class PushdownReader(BatchReader):
    """A batch reader that takes over filters (option `pushdown`).

    It is a class of its own: Spark refuses every reader that has `pushFilters`, unless its setting
    ``spark.sql.python.filterPushdown.enabled`` is on.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take over each filter that is supported; return the others, which Spark must apply."""
        from laminar.spark.read.filters import Pushed

        self._pushed = Pushed(plan.RowFilter(tag=self._options.tag))
        return self._pushed.push(filters)
