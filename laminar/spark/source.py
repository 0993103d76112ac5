"""The data source class of ``format("laminar")``: it chooses the reader or writer for each kind of query.

For every ``.load()`` Spark makes an instance in another process and pickles it. So an instance does no I/O
and holds nothing but the options. Spark imports this module also in sessions that never use it, so only
pyspark's base class is imported at the top.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from laminar.spark.read.batch_reader import BatchReader
    from laminar.spark.read.stream_reader import StreamReader
    from laminar.spark.write.writers import BatchWriter, StreamWriter


class LaminarDataSource(DataSource):
    """Topics as rows, with the Kafka source's columns and options. ``docs/spark.md`` has both."""

    @classmethod
    def name(cls) -> str:
        """Return the name that ``format`` takes."""
        return "laminar"

    def schema(self) -> str:
        """Return the columns that the options choose, as Spark's DDL."""
        from laminar.spark.read.options import SUBJECTS, Options, parse

        # Spark also asks for the schema of a write, whose options are the sink's. A read that names no topic
        # is refused by its reader.
        reads = any(self.options.get(name) is not None for name in SUBJECTS)
        return parse(self.options).schema if reads else Options().schema

    def reader(self, schema: StructType) -> BatchReader:
        """Return the reader of a batch query.

        Raises:
            ValueError: for a wrong option or column.
        """
        from laminar.spark.read.batch_reader import BatchReader, PushdownReader
        from laminar.spark.read.options import parse
        from laminar.spark.settings import warn_if_slow

        warn_if_slow()
        options = parse(self.options, streaming=False)
        return (PushdownReader if options.pushdown else BatchReader)(options, schema)

    def streamReader(self, schema: StructType) -> StreamReader:
        """Return the reader of a streaming query.

        Raises:
            RuntimeError: when Spark is older than 4.2.
            ValueError: for a wrong option or column.
        """
        from laminar.spark.read.options import parse

        try:
            from laminar.spark.read.stream_reader import StreamReader
        except ImportError as missing:
            # Without rate limits and AvailableNow a stream could not keep what docs/spark.md promises.
            raise RuntimeError(f"streams from Laminar need Spark 4.2 or newer ({missing})") from missing

        from laminar.spark.settings import warn_if_slow

        warn_if_slow()
        return StreamReader(parse(self.options, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """Return the writer of a batch query.

        Raises:
            ValueError: for a wrong option or column, and for mode overwrite.
        """
        from laminar.spark.write.options import parse_sink
        from laminar.spark.write.writers import BatchWriter

        _refuse_overwrite(overwrite, "mode overwrite")
        return BatchWriter(parse_sink(self.options, streaming=False), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        """Return the writer of a streaming query.

        Raises:
            ValueError: for a wrong option or column, and for output mode complete.
        """
        from laminar.spark.write.options import parse_sink
        from laminar.spark.write.writers import StreamWriter

        _refuse_overwrite(overwrite, "outputMode complete")
        return StreamWriter(parse_sink(self.options, streaming=True), schema)


def _refuse_overwrite(overwrite: bool, mode: str) -> None:
    if overwrite:
        raise ValueError(f'{mode} is not supported: topics are append-only; use mode "append"')
