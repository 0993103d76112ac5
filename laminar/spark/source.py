"""The class behind ``format("laminar")``: which reader or writer serves which kind of query.

Spark makes one for every ``.load()``, in a process of its own, and pickles it: so it does no I/O and knows
nothing but the options. Spark's look-up imports this module in sessions that never use it; so nothing but
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
        return "laminar"

    def schema(self) -> str:
        from laminar.spark.read.options import SUBJECTS, Options, parse

        # Spark asks this of a write too, whose options are the sink's; a read without a subject is refused
        # by its reader.
        reads = any(self.options.get(name) is not None for name in SUBJECTS)
        return parse(self.options).schema if reads else Options().schema

    def reader(self, schema: StructType) -> BatchReader:
        from laminar.spark.read.batch_reader import BatchReader, PushdownReader
        from laminar.spark.read.options import parse
        from laminar.spark.settings import warn_if_slow

        warn_if_slow()
        options = parse(self.options, streaming=False)
        return (PushdownReader if options.pushdown else BatchReader)(options, schema)

    def streamReader(self, schema: StructType) -> StreamReader:
        from laminar.spark.read.options import parse

        try:
            from laminar.spark.read.stream_reader import StreamReader
        except ImportError as missing:
            # Without its rate limits and AvailableNow a stream could not be what `docs/spark.md` promises.
            raise RuntimeError(f"streams from Laminar need Spark 4.2 or newer ({missing})") from missing

        from laminar.spark.settings import warn_if_slow

        warn_if_slow()
        return StreamReader(parse(self.options, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        from laminar.spark.write.options import parse_sink
        from laminar.spark.write.writers import BatchWriter

        _refuse(overwrite, "mode overwrite")
        return BatchWriter(parse_sink(self.options, streaming=False), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        from laminar.spark.write.options import parse_sink
        from laminar.spark.write.writers import StreamWriter

        _refuse(overwrite, "outputMode complete")
        return StreamWriter(parse_sink(self.options, streaming=True), schema)


def _refuse(overwrite: bool, said: str) -> None:
    if overwrite:
        raise ValueError(f"{said} can not be: a topic is only appended to, so it is append")
