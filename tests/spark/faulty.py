"""The sink, failing on purpose where it is told to: a file in the folder ``faults`` is a fault, met once.

``task``: a task fails after it has staged. ``twice``: it stages twice, as two attempts at a time would.
``before``, ``after``: the driver's process dies before or after the server's commit. ``taken``: another
driver begins between stages and commit.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.datasource import WriterCommitMessage

from laminar.spark.source import LaminarDataSource
from laminar.spark.write.options import SinkOptions, parse_sink
from laminar.spark.write.writers import StagedMessage, StreamWriter

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType


class FaultySource(LaminarDataSource):
    """``format("laminar-faulty")``, with the option ``faults``."""

    @classmethod
    def name(cls) -> str:
        return "laminar-faulty"

    def streamWriter(self, schema: StructType, overwrite: bool) -> FaultyWriter:
        options = {name: value for name, value in self.options.items() if name != "faults"}
        return FaultyWriter(parse_sink(options, streaming=True), schema, self.options["faults"])


class FaultyWriter(StreamWriter):
    def __init__(self, options: SinkOptions, schema: StructType, folder: str) -> None:
        super().__init__(options, schema)
        self._folder = folder

    def _meets(self, fault: str) -> bool:
        try:
            Path(self._folder, fault).unlink()
        except FileNotFoundError:
            return False
        return True

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> StagedMessage:
        rows = list(iterator)
        # Only a task that has something to stage.
        if any(len(each) for each in rows) and self._meets("twice"):
            super().write(iter(rows))
        message = super().write(iter(rows))
        if any(len(each) for each in rows) and self._meets("task"):
            raise RuntimeError("this task fails once")
        return message

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        staged = [each for each in messages if isinstance(each, StagedMessage)]
        staged = [each for each in staged if each.has_rows]
        if staged:
            if self._meets("before"):
                os.kill(os.getpid(), signal.SIGKILL)
            if self._meets("taken"):
                self._cluster().run(self._sink(staged[0].sink).begin())
        super().commit(messages, batchId)
        if staged and self._meets("after"):
            os.kill(os.getpid(), signal.SIGKILL)
