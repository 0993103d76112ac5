"""A task of the source: it reads one range of records and yields record batches.

Batch and streaming queries share it. All that a task needs is in its partition or pickled with the reader.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from laminar.batch.large_record import size_of
from laminar.client.net.endpoints import Endpoints
from laminar.spark.read.options import Options
from laminar.spark.read.plan import Range, RowFilter

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

    from laminar.batch import Batch

log = logging.getLogger(__name__)


class RangePartition(InputPartition):
    """The range that one task reads, as Spark pickles it."""

    def __init__(self, wanted: Range, rows: RowFilter) -> None:
        super().__init__(
            (
                (wanted.topic, wanted.partition, wanted.start, wanted.end, wanted.id),
                (rows.tag, rows.since_us, rows.until_us),
            )
        )

    @property
    def range(self) -> Range:
        """The records to read."""
        return Range(*self.value[0])

    @property
    def rows(self) -> RowFilter:
        """The filter on the records of `range`."""
        return RowFilter(*self.value[1])


class LargeRecord(ValueError):
    """A record is larger than a batch, and the option `largeRecords` is ``error``."""

    def __init__(self, wanted: Range, stub: Batch) -> None:
        super().__init__(
            f"{wanted.topic}/{wanted.partition}: the value at {stub.base_offset} has {size_of(stub)} bytes"
            " and is stored apart from its batch. Set the option largeRecords=fetch to fetch each such value,"
            " or largeRecords=null to read it as null"
        )


def read_partition(
    partition: InputPartition, *, endpoints: Endpoints, options: Options, schema: StructType
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the records of `partition`. Runs in an executor.

    Raises:
        DataLoss: when records of the range are gone, with `failOnDataLoss`.
        LargeRecord: for a record larger than a batch, with `largeRecords=error` and if values are selected.
        Error: when the cluster does not answer in time.
    """
    if not isinstance(partition, RangePartition):
        return  # Spark's placeholder when there are no partitions at all
    from laminar.spark.read.cluster import Projection, cluster, tune
    from laminar.spark.read.columns import RecordBatchBuilder

    wanted = partition.range
    here = cluster(endpoints, timeout_ms=options.timeout_ms)

    def large(stub: Batch) -> bytes | None:
        if options.large_records == "error":
            raise LargeRecord(wanted, stub)
        return here.large_value(wanted, stub) if options.large_records == "fetch" else None

    builder = RecordBatchBuilder(
        schema, topic=wanted.topic, partition=wanted.partition, rows=partition.rows, large=large
    )
    columns = Projection(builder.fields, partition.rows.tag)
    if options.gc_freeze:
        tune()
    pieces = here.read(
        wanted, fail_on_data_loss=options.fail_on_data_loss, columns=columns, replica=options.replica
    )
    yield from builder.record_batches(pieces)
