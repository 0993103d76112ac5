"""Spark's sink up to the point where it would send: what the cluster's share of a write is measured against.

A module of its own, as Spark's processes import it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from laminar.client.records import Staged
from laminar.spark.source import LaminarDataSource
from laminar.spark.write.options import parse_sink
from laminar.spark.write.writers import BatchWriter, StagedMessage

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

PARTITIONS = 4


class DiscardWriter(BatchWriter):
    """The sink up to the point where a stage would be sent."""

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> StagedMessage:
        from laminar.spark.write.rows import Partitioner, StageBuffer
        from laminar.wire.key_route import Route

        rows = StageBuffer(
            self._positions,
            topic=self._options.topic,
            partitioner_of=lambda _: Partitioner(Route.even(PARTITIONS), first=0),
        )
        records = sum(stage[3] for batch in iterator for stage in rows.put(batch))
        records += sum(stage[3] for stage in rows.finish())
        staged = Staged(self._name, self._number, self._epoch, (), records)
        return StagedMessage(self._name, self._number, self._epoch, records, staged)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Nothing was staged."""


class DiscardSource(LaminarDataSource):
    """``format("laminar-discard")``."""

    @classmethod
    def name(cls) -> str:
        return "laminar-discard"

    def writer(self, schema: StructType, overwrite: bool) -> DiscardWriter:
        return DiscardWriter(parse_sink(self.options, streaming=False), schema)
