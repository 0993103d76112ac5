"""A reader without a loop: the twin of `laminar.client.consume.reader`.

One call to the loop's thread takes all batches that are ready: a change of threads for each record would cost
more than the record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from laminar.client.consume import reader as aio_reader
from laminar.client.records import ReadBatch, Record
from laminar.client.sync.portal import Portal

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

T = TypeVar("T")


class Reader(Generic[T]):
    """Records of a topic: ``for record in reader``, or ``batches()``, or ``to_arrow()``.

    After a ``break``, the next loop continues with the next record. As a context manager, a reader with a
    cursor commits it when the block ends without an exception.
    """

    def __init__(self, portal: Portal, reader: aio_reader.Reader[T]) -> None:
        self._portal = portal
        self._twin = reader

    def __enter__(self) -> Self:
        self._portal.run(lambda: self._twin.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal.run(lambda: self._twin.__aexit__(kind, error, trace))

    @property
    def positions(self) -> dict[int, int]:
        """By partition, the offset after the last record handed out."""
        return self._twin.positions

    @property
    def ends(self) -> dict[int, int]:
        """By partition, where a reader that does not follow ends; filled when it begins."""
        return self._twin.ends

    @property
    def skipped(self) -> list[tuple[int, int, int]]:
        """Ranges left out, trimmed or unreadable: (partition, first offset, offset after the last)."""
        return self._twin.skipped

    def __iter__(self) -> Iterator[Record[T]]:
        positions = self._twin.positions
        for batch in self._take_batches():
            partition, next_offset, last = batch.partition, batch.next_offset, batch.last_offset
            if not batch:
                positions[partition] = next_offset
            for record in batch.records():
                offset = record.offset
                positions[partition] = next_offset if offset == last else offset + 1
                yield record

    def batches(self) -> Iterator[ReadBatch[T]]:
        """Yield whole batches, without making an object for each record.

        With a filter a batch may be empty: it only says that no record before its `next_offset` passed.
        """
        for batch in self._take_batches():
            self._twin.positions[batch.partition] = batch.next_offset
            yield batch

    def _take_batches(self) -> Iterator[ReadBatch[T]]:
        try:
            while batches := self._portal.run(lambda: self._twin.take_ready()):
                yield from batches
        finally:
            # If the loop broke off, no fetching goes on until another loop continues.
            if not self._portal.closed:
                self.pause()

    # generated from laminar.client.consume.reader.Reader, without take_ready

    def next_batch(self) -> ReadBatch[T] | None:
        """Return the next batch, None at the end. Its records count as handed out: `commit` includes them.

        With a filter a batch may be empty, as in `batches`.
        """
        return self._portal.run(lambda: self._twin.next_batch())

    def commit(self) -> None:
        """Move the cursor after the records handed out so far."""
        self._portal.run(lambda: self._twin.commit())

    def commit_at(self, positions: Mapping[int, int]) -> None:
        """Move the cursor to `positions`: for each partition, the next offset to read."""
        self._portal.run(lambda: self._twin.commit_at(positions))

    def to_arrow(self) -> pyarrow.Table:
        """Read to the end; return one table with offset, timestamp, key, value, tag and partition."""
        return self._portal.run(lambda: self._twin.to_arrow())

    def to_polars(self) -> polars.DataFrame:
        """Read to the end; return a polars frame with the columns of `to_arrow`."""
        return self._portal.run(lambda: self._twin.to_polars())

    def to_pandas(self) -> pandas.DataFrame:
        """Read to the end; return a pandas frame with the columns of `to_arrow`."""
        return self._portal.run(lambda: self._twin.to_pandas())

    def pause(self) -> None:
        """Stop fetching and discard the batches that were read ahead.

        The next call that reads starts fetching again, after the records handed out.
        """
        self._portal.run(lambda: self._twin.pause())

    def close(self) -> None:
        """Stop fetching. Idempotent."""
        self._portal.run(lambda: self._twin.close())
