"""What Laminar's source is held against in Spark: the same batches from memory, the same records as tuples,
and, for the cost of a micro-batch, the least that a source in Python can be.

Spark's processes import this module by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)

from laminar.batch import Batch, build, stamp
from laminar.spark.read.batch_reader import BatchReader
from laminar.spark.read.options import COLUMNS, DEFAULT_COLUMNS, parse
from laminar.spark.source import LaminarDataSource

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

VALUE_BYTES = 1024
# As the source makes them of batches as producers send them: 1 MiB.
BATCH_ROWS = 1024

_made: dict[str, pyarrow.RecordBatch] = {}


def record_batch(schema: StructType) -> pyarrow.RecordBatch:
    """Records as in the topic that is read; made once in a process."""
    from laminar.spark.read.columns import RecordBatchBuilder

    key = str(schema.simpleString())
    if key not in _made:
        frame = build([bytes(VALUE_BYTES)] * BATCH_ROWS, keys=[b"%08d" % row for row in range(BATCH_ROWS)])
        stamp(
            frame,
            index=1,
            term=1,
            prev_term=1,
            base_offset=0,
            append_time_ms=1_700_000_000_000,
            committed_index=0,
        )
        builder = RecordBatchBuilder(schema, topic="memory", partition=0)
        (_made[key],) = builder.record_batches([(Batch(bytes(frame)), 0, BATCH_ROWS)])
    return _made[key]


class MemorySource(DataSource):
    """``rows`` records over ``partitions`` tasks, of ``columns`` as in Laminar's source."""

    @classmethod
    def name(cls) -> str:
        return "bench-memory"

    def schema(self) -> str:
        names = self.options.get("columns", ",".join(DEFAULT_COLUMNS)).split(",")
        return ", ".join(f"{name} {COLUMNS[name]}" for name in names)

    def reader(self, schema: StructType) -> DataSourceReader:
        return MemoryReader(schema, int(self.options["rows"]), int(self.options["partitions"]))


class MemoryReader(DataSourceReader):
    def __init__(self, schema: StructType, rows: int, partitions: int) -> None:
        self._schema = schema
        self._batches = rows // partitions // BATCH_ROWS
        self._partitions = partitions

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(number) for number in range(self._partitions)]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        from laminar.spark.read.cluster import tune

        batch = record_batch(self._schema)
        tune()
        for _ in range(self._batches):
            yield batch


class TupleSource(LaminarDataSource):
    """Laminar's source as it would be without Arrow: a tuple a record."""

    @classmethod
    def name(cls) -> str:
        return "bench-tuples"

    def reader(self, schema: StructType) -> BatchReader:
        return TupleReader(parse(self.options, streaming=False), schema)


class TupleReader(BatchReader):
    def read(self, partition: InputPartition) -> Iterator[Any]:
        for batch in super().read(partition):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


class LeastSource(DataSource):
    """A stream of one record a task, made on the spot: what a source in Python costs with Spark alone."""

    @classmethod
    def name(cls) -> str:
        return "bench-least"

    def schema(self) -> str:
        return "value binary"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return LeastReader(int(self.options["partitions"]))


class LeastReader(DataSourceStreamReader):
    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._offset = 0

    def initialOffset(self) -> dict[str, int]:
        return {"offset": 0}

    def latestOffset(self) -> dict[str, int]:  # type: ignore[override]  # as in Spark 4.1: without a limit
        self._offset += 1
        return {"offset": self._offset}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [InputPartition(number) for number in range(self._partitions)]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow

        from laminar.spark.read.cluster import tune

        tune()
        yield pyarrow.RecordBatch.from_arrays([pyarrow.array([b"x"])], names=["value"])
