"""The forms of an export's files: how batches become bytes.

`batch` keeps batches as they are stored, so that they can be imported. The others are for other programs:
JSON lines, CSV, and Parquet, which needs the extra `arrow`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from laminar.batch import Batch, Buffer
from laminar.batch.large_record import size_of
from laminar.client.backup.manifest import Form
from laminar.client.backup.place import Writer
from laminar.client.errors import ConfigError
from laminar.http.api.fetch_body import record_document

ROW_GROUP_BYTES: Final = 16 << 20
"""Bytes of batches, decompressed, that a row group of Parquet has at least, but for the last of a file."""

_CSV_COLUMNS: Final = (
    *("offset", "timestamp", "key", "key_base64", "value", "value_base64", "value_bytes"),
    *("tag", "headers", "headers_base64", "deliver_at", "trace_id"),
)
_CALCULATED: Final = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet calculates begins so."""
_ARROW_COLUMNS: Final = ("offset", "timestamp", "key", "value", "tag", "headers")


class Sink:
    """A file of records in one form that is being written: `write`, then `finish` or `discard`."""

    least_bytes = 0
    """How many bytes of parts are gathered before they are written."""

    def __init__(self, writer: Writer, head: bytes = b"") -> None:
        self._writer = writer
        if head:
            writer.write(head)

    @property
    def bytes(self) -> int:
        """The bytes in the file so far."""
        return self._writer.bytes

    def write(self, parts: Sequence[Buffer]) -> None:
        """Add encoded batches, as returned by `encode`."""
        self._writer.write(b"".join(parts))

    def finish(self) -> str:
        """Complete the file: give it its name, durably, and return its SHA-256."""
        return self._writer.finish()

    def discard(self) -> None:
        """Remove the incomplete file. Idempotent; does nothing after `finish`."""
        self._writer.discard()


class _ParquetSink(Sink):
    """A Parquet file: its parts are batches, and each `write` makes a row group of them."""

    least_bytes = ROW_GROUP_BYTES

    def __init__(self, writer: Writer) -> None:
        super().__init__(writer)
        import pyarrow.parquet

        self._out = _Out(writer)
        self._parquet = pyarrow.parquet.ParquetWriter(self._out, _schema(), compression="zstd")

    def write(self, parts: Sequence[Buffer]) -> None:
        self._parquet.write_table(_table([Batch(each, verified=True) for each in parts]))

    def finish(self) -> str:
        self._parquet.close()
        return super().finish()

    def discard(self) -> None:
        self._out.is_open = False  # what it writes as it ends goes nowhere
        self._parquet.close()
        super().discard()


class _Out:
    """A file object for pyarrow, over a `Writer`."""

    closed = False

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.is_open = True

    def write(self, data: Any) -> int:
        """Add bytes."""
        if self.is_open:
            self._writer.write(data)
        return len(data)

    def tell(self) -> int:
        """Return how many bytes were added."""
        return self._writer.bytes

    def flush(self) -> None:
        """Do nothing: the writer flushes at its end."""

    def close(self) -> None:
        """Do nothing: the owner of the writer closes it."""


def check_form(form: Form) -> None:
    """Raise `ConfigError` if files of this form need a library that is not installed."""
    if form != "parquet":
        return
    try:
        import pyarrow.parquet  # noqa: F401  # optional: asked for before it is used
    except ImportError:
        raise ConfigError(
            "Parquet needs the library pyarrow",
            code="missing_extra",
            field="format",
            value=form,
            hint="pip install 'laminar-mq[arrow]'",
        ) from None


def open_sink(form: Form, writer: Writer) -> Sink:
    """Return a `Sink` that writes a file of this form by `writer`."""
    if form == "parquet":
        return _ParquetSink(writer)
    return Sink(writer, _csv_rows([_CSV_COLUMNS]) if form == "csv" else b"")


def encode(form: Form, batch: Batch) -> Buffer:
    """Return a batch encoded in this form, for `Sink.write`.

    Raises:
        BatchError: the batch cannot be read, because its producer wrote it wrongly.
    """
    return _ENCODERS[form](batch)


def _frame(batch: Batch) -> Buffer:
    return batch.frame


def _lines(batch: Batch) -> bytes:
    """Return the records of a batch as JSON, one a line, with the members that HTTP answers have."""
    return b"".join([msgspec.json.encode(record_document(each, batch)) + b"\n" for each in batch])


def _csv(batch: Batch) -> bytes:
    return _csv_rows(
        [_cell(document.get(name)) for name in _CSV_COLUMNS]
        for document in (record_document(each, batch) for each in batch)
    )


def _csv_rows(rows: Iterable[Iterable[object]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def _cell(value: Any) -> object:
    """Return a cell of CSV; text that a spreadsheet would take for a formula begins with a `'`."""
    if isinstance(value, dict):
        return msgspec.json.encode(value).decode()
    return f"'{value}" if isinstance(value, str) and value.startswith(_CALCULATED) else value


_ENCODERS: Final[dict[Form, Callable[[Batch], Buffer]]] = {
    "batch": _frame,
    "jsonl": _lines,
    "csv": _csv,
    "parquet": _frame,
}


def _schema() -> Any:
    import pyarrow

    from laminar.batch.arrow.pyarrow_out import schema

    known = schema(_ARROW_COLUMNS)
    return known.append(pyarrow.field("trace_id", pyarrow.utf8())).append(
        pyarrow.field("value_bytes", pyarrow.int64())
    )


def _table(batches: Sequence[Batch]) -> Any:
    """Return a table of batches; column `value_bytes` has the length of values in files of their own."""
    import pyarrow

    from laminar.batch.arrow.pyarrow_out import table

    traces: list[str | None] = []
    sizes: list[int | None] = []
    for batch in batches:
        ids = batch.trace_ids or [None] * len(batch)
        traces += [None if each is None else each.hex() for each in ids]
        sizes += [size_of(batch)] if batch.is_large else [None] * len(batch)
    columns = table(batches, _ARROW_COLUMNS).columns
    return pyarrow.Table.from_arrays(
        [*columns, pyarrow.array(traces, pyarrow.utf8()), pyarrow.array(sizes, pyarrow.int64())],
        schema=_schema(),
    )
