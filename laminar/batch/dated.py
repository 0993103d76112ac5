"""Batches whose records keep their times when they are appended again, as by an import.

A record without a time of its own shows that of its append. Appended again it would show a new one, so its
batch gets a column of times first. All other bytes of the body stay: compressed columns stay compressed.
"""

from __future__ import annotations

from laminar.batch.batch import Batch
from laminar.batch.columns import Column, assemble, times
from laminar.batch.header import Buffer, replace_body
from laminar.batch.projection import cells_of


def dated(frame: Buffer) -> bytearray:
    """Return a copy of a verified batch of records in which each record has a time.

    Raises:
        BatchError: the directory or a time is wrong.
    """
    batch = Batch(frame, verified=True)
    entry = batch.entry(Column.TIMESTAMP)
    if entry is not None and not entry.null_count:
        return bytearray(frame)
    others = batch.columns - {Column.TIMESTAMP}
    cells = list(cells_of(frame, batch.directory(), len(batch), others))
    cells.append(times(Column.TIMESTAMP, batch.timestamps))
    cells.sort(key=lambda each: each.column)
    return replace_body(frame, assemble(cells))
