"""What a task does: its partition is a range of records, its answer record batches.

The same for batches and streams. Everything a task needs is in its partition or pickled with the reader.
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
    """One task's records."""

    def __init__(self, wanted: Range, rows: RowFilter) -> None:
        super().__init__(
            (
                (wanted.topic, wanted.partition, wanted.start, wanted.end, wanted.id),
                (rows.tag, rows.since_us, rows.until_us),
            )
        )

    @property
    def range(self) -> Range:
        return Range(*self.value[0])

    @property
    def rows(self) -> RowFilter:
        return RowFilter(*self.value[1])


class LargeRecord(ValueError):
    """A value that is larger than a batch, which the query did not say how to read."""

    def __init__(self, wanted: Range, stub: Batch) -> None:
        super().__init__(
            f"{wanted.topic}/{wanted.partition}: the value at {stub.base_offset} has {size_of(stub)} bytes,"
            " and is not in the batches. With the option largeRecords=fetch each such value is read by"
            " itself, with largeRecords=null it is null"
        )


def read_partition(
    partition: InputPartition, *, endpoints: Endpoints, options: Options, schema: StructType
) -> Iterator[pyarrow.RecordBatch]:
    """The records of `partition`, in an executor."""
    if not isinstance(partition, RangePartition):
        return  # Spark's stand-in when there are no partitions at all
    from laminar.spark.read.cluster import Columns, cluster, tune
    from laminar.spark.read.columns import Builder

    wanted = partition.range
    here = cluster(endpoints, timeout_ms=options.timeout_ms)

    def large(stub: Batch) -> bytes | None:
        if options.large_records == "error":
            raise LargeRecord(wanted, stub)
        return here.large_value(wanted, stub) if options.large_records == "fetch" else None

    builder = Builder(
        schema, topic=wanted.topic, partition=wanted.partition, rows=partition.rows, large=large
    )
    columns = Columns(builder.fields, partition.rows.tag)
    if options.gc_freeze:
        tune()
    pieces = here.read(
        wanted, fail_on_data_loss=options.fail_on_data_loss, columns=columns, replica=options.replica
    )
    yield from builder.record_batches(pieces)
