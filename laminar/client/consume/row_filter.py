"""The filter of a reader: the records with a tag and with headers, picked from whole batches.

A node leaves out batches that cannot contain the tag, by a hash of the tag; headers are in no index, so those
records come over the network. Here tags and headers are compared themselves, so an equal hash does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from laminar.batch import Batch
from laminar.client.errors import ConfigError


class RowFilter:
    """A filter that picks the records with the given tag (if any) and all of the given headers."""

    def __init__(self, *, tag: str | None, headers: Mapping[str, bytes]) -> None:
        self.tag = tag
        self._headers = dict(headers)

    def rows(self, batch: Batch, among: range) -> Sequence[int]:
        """Return the rows of the batch that pass the filter, of the rows `among`, in order.

        Raises:
            BatchError: a column that is compared cannot be read.
        """
        rows: Sequence[int] = among
        if self.tag is not None:
            rows = [row for row in batch.tagged(self.tag) if row in among]
        if rows and self._headers:
            cells = batch.headers
            wanted = self._headers.items()
            rows = [
                row for row in rows if cells and all(cells[row].get(name) == value for name, value in wanted)
            ]
        return rows


def row_filter(tag: Any, headers: Mapping[Any, Any] | None) -> RowFilter | None:
    """Return the filter for a reader's arguments; None if they give neither a tag nor headers.

    Raises:
        ConfigError: no record can have such a tag or header.
    """
    if tag is None and not headers:
        return None
    if not (tag is None or isinstance(tag, str)):
        raise _bad("tag", tag, "a text")
    wanted: dict[str, bytes] = {}
    for name, value in (headers or {}).items():
        if not (isinstance(name, str) and isinstance(value, str | bytes)):
            raise _bad("headers", {name: value}, "a text by name, or bytes")
        wanted[name] = value.encode() if isinstance(value, str) else value
    return RowFilter(tag=tag, headers=wanted)


def _bad(field: str, value: object, what: str) -> ConfigError:
    return ConfigError(f"{field}={value!r} is not {what}", code="bad_filter", field=field, value=value)
