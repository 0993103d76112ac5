"""Batches whose records keep their times when they are appended again, as by an import.

Readers see a record to which its producer gave no time with the time of its append. Appended again, such a
record would get a new time; so its batch first gets a column with the present times. All other columns stay
as they are, compressed ones compressed.
"""

from __future__ import annotations

from laminar.batch.batch import Batch
from laminar.batch.columns import Column, assemble, times
from laminar.batch.header import Buffer, replace_body
from laminar.batch.projection import cells_of


def dated(frame: Buffer) -> bytearray:
    """Return a copy of a verified batch in which each record has its time in the column of times.

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
