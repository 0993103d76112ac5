"""Lists on standard output: for people, for programs, for pipes.

JSON has every field under its own name. A table has the columns that the command chose; it is cut to the
width of a terminal, but not in a pipe. Colours come from rich, which honours NO_COLOR.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from laminar.cli.options import Listing

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Row = Mapping[str, Any]

# Wider than any row: a pipe has no width of its own.
_UNBOUNDED = 100_000


def show(rows: Sequence[Row], listing: Listing, *, columns: Sequence[str], name: str) -> None:
    """Print `rows`; `columns` are those of a table, and `name` is the column with a row's name."""
    if listing.format == "json":
        show_json(rows)
    elif listing.format == "names":
        for row in rows:
            print(row[name])
    else:
        console_of(sys.stdout).print(table_of(rows, columns))


def show_json(document: Any) -> None:
    """Print one JSON document, indented."""
    print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def console_of(file: Any) -> Console:
    """Return a console that writes to `file`, as wide as the terminal, or as needed where it is none."""
    from rich.console import Console

    return Console(file=file, highlight=False, width=None if file.isatty() else _UNBOUNDED)


def table_of(rows: Sequence[Row], columns: Sequence[str]) -> Table:
    """Return an empty table: numbers to the right; an underscore in a name is a space in the heading."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        numeric = any(
            isinstance(row.get(column), int | float) and not isinstance(row[column], bool) for row in rows
        )
        table.add_column(
            column.replace("_", " ").upper(), justify="right" if numeric else "left", no_wrap=True
        )
    for row in rows:
        table.add_row(*(plain(row.get(column)) for column in columns))
    return table


def plain(value: Any) -> str:
    """Return a value as a cell's text: "" for None, numbers with thousands apart, lists with commas."""
    from rich.markup import escape

    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return escape(", ".join(map(str, value)))
    if isinstance(value, Mapping):
        return escape(", ".join(f"{key}={each}" for key, each in value.items()))
    return escape(str(value))


class ProgressLine:
    """A line on standard error that each text replaces; in a pipe, a new line for each text."""

    def __init__(self) -> None:
        self._shown = ""
        self._over = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Replace the line by this text."""
        if text == self._shown:
            return
        if self._over:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)
        self._shown = text

    def end(self) -> None:
        """Keep the line as it is, and continue below it."""
        if self._over and self._shown:
            print(file=sys.stderr, flush=True)
