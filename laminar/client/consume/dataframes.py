"""Batches as tables: the only module of the client that needs pyarrow, polars or pandas.

Each library is imported by the function that needs it. If it is not installed, the function raises a
`ConfigError` that names the extra to install.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from laminar.client.errors import ConfigError

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

    from laminar.client.records import ReadBatch


def _missing(library: str, extra: str) -> ConfigError:
    return ConfigError(
        f"{library} is not installed", code="missing_library", hint=f"pip install 'laminar-mq[{extra}]'"
    )


def arrow_table(batches: Sequence[ReadBatch[Any]]) -> pyarrow.Table:
    """Return one table of all batches, with a column ``partition`` (int32) added.

    Columns that are not compressed are views of the batches' memory, not copies.
    """
    try:
        import pyarrow
    except ImportError:
        raise _missing("pyarrow", "arrow") from None
    from laminar.batch.arrow.pyarrow_out import schema

    with_partition = schema().append(pyarrow.field("partition", pyarrow.int32()))
    parts = []
    for batch in batches:
        rows = batch.to_arrow()
        partition = pyarrow.repeat(pyarrow.scalar(batch.partition, pyarrow.int32()), rows.num_rows)
        parts.append(pyarrow.RecordBatch.from_arrays([*rows.columns, partition], schema=with_partition))
    return pyarrow.Table.from_batches(parts, schema=with_partition)


def polars_frame(table: pyarrow.Table) -> polars.DataFrame:
    """Return `table` (of `arrow_table`) as a polars DataFrame."""
    try:
        import polars
    except ImportError:
        raise _missing("polars", "polars") from None
    frame = polars.from_arrow(table)
    assert isinstance(frame, polars.DataFrame)
    return frame


def pandas_frame(table: pyarrow.Table) -> pandas.DataFrame:
    """Return `table` (of `arrow_table`) as a pandas DataFrame."""
    try:
        import pandas  # noqa: F401
    except ImportError:
        raise _missing("pandas", "pandas") from None
    return table.to_pandas()
