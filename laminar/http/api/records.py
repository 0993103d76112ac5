"""The records of a request as parallel lists, a form in which they are easily joined and split.

They are checked here against the limits of an append.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from laminar.batch import Batch, Buffer, build
from laminar.http.api.limits import Limits
from laminar.http.api.problems import Problem
from laminar.wire.trace import TRACEPARENT, TraceParent, parse_traceparent

_T = TypeVar("_T")


def too_many_records(count: int, limit: int) -> Problem:
    """Return the problem 413 for a body with more than `limit` records; `count` is how many were read."""
    return Problem("too_large", "records is too large", field="records", value=count, limit=limit)


class Records:
    """Records as parallel lists, one for each column; a column that no record has is None.

    `size_bytes` is the size of all values and keys.
    """

    __slots__ = (
        *("delivery_times", "headers", "keys", "size_bytes"),
        *("tags", "timestamps", "trace_ids", "values"),
    )

    def __init__(
        self,
        values: list[Buffer],
        *,
        keys: list[bytes | None] | None = None,
        tags: list[str | None] | None = None,
        headers: list[Mapping[str, bytes] | None] | None = None,
        timestamps: list[int | None] | None = None,
        delivery_times: list[int | None] | None = None,
        trace_ids: list[bytes | None] | None = None,
    ) -> None:
        self.values = values
        self.keys = keys
        self.tags = tags
        self.headers = headers
        self.timestamps = timestamps
        self.delivery_times = delivery_times
        self.trace_ids = trace_ids
        self.size_bytes = sum(map(len, values)) + (sum(map(len, filter(None, keys))) if keys else 0)

    def __len__(self) -> int:
        return len(self.values)

    def take(self, rows: Sequence[int]) -> Records:
        """Return the records with these numbers (from 0), in the order of `rows`."""
        return Records(
            [self.values[row] for row in rows],
            keys=_take(self.keys, rows),
            tags=_take(self.tags, rows),
            headers=_take(self.headers, rows),
            timestamps=_take(self.timestamps, rows),
            delivery_times=_take(self.delivery_times, rows),
            trace_ids=_take(self.trace_ids, rows),
        )

    def trace(self, header: str | None) -> None:
        """Set the trace ids of records by their own headers `traceparent`, or else by the request's `header`.

        A record that takes the request's `header` gets it as its own header `traceparent`. A record that
        already has a trace id keeps it. A `header` that is malformed is ignored, as W3C Trace Context
        demands.

        Raises:
            Problem: 422 `invalid`: a record's trace id differs from that in its own header.
        """
        given = None if header is None else parse_traceparent(header)
        own = [_own_trace(fields) for fields in self.headers or ()]
        if given is None and not any(own):
            return
        count = len(self.values)
        trace_ids = list(self.trace_ids or [None] * count)
        headers = list(self.headers or [None] * count)
        for row, said in enumerate(own or [None] * count):
            known = trace_ids[row]
            if said is not None:
                if known not in (None, said.trace_id):
                    raise _contradicted(row, known, said)
                trace_ids[row] = said.trace_id
            elif given is not None and header is not None and known in (None, given.trace_id):
                trace_ids[row] = given.trace_id
                headers[row] = {**(headers[row] or {}), TRACEPARENT: header.encode()}
        self.trace_ids, self.headers = trace_ids, headers

    def build(self) -> bytearray:
        """Return the frame of one batch with the records, to which a leader has given no offsets yet.

        Raises `BatchError` (a ValueError) if a record is not allowed.
        """
        return build(
            self.values,
            keys=self.keys,
            timestamps=self.timestamps,
            tags=self.tags,
            headers=self.headers,
            delivery_times=self.delivery_times,
            trace_ids=self.trace_ids,
        )

    @classmethod
    def of_batch(cls, batch: Batch) -> Records:
        """Return the records of a batch."""
        return cls(
            list(batch.values),
            keys=batch.keys,
            tags=batch.tags,
            headers=list(batch.headers) if batch.headers is not None else None,
            timestamps=batch.given_timestamps,
            delivery_times=batch.delivery_times,
            trace_ids=batch.trace_ids,
        )

    @classmethod
    def concat(cls, parts: Sequence[Records]) -> Records:
        """Return the records of all `parts`, in order."""
        if len(parts) == 1:
            return parts[0]
        counts = [len(part.values) for part in parts]
        return cls(
            [value for part in parts for value in part.values],
            keys=_joined([part.keys for part in parts], counts),
            tags=_joined([part.tags for part in parts], counts),
            headers=_joined([part.headers for part in parts], counts),
            timestamps=_joined([part.timestamps for part in parts], counts),
            delivery_times=_joined([part.delivery_times for part in parts], counts),
            trace_ids=_joined([part.trace_ids for part in parts], counts),
        )

    def check(self, limits: Limits) -> None:
        """Raise 413 or 422 if a record exceeds a limit, naming the record, the value and the limit."""
        count = len(self.values)
        if count == 0:
            raise Problem("invalid", "an append has at least one record", field="records", value=0, limit=1)
        _at_most("records", count, limits.max_records)
        if self.size_bytes > limits.max_record_bytes:
            for row, value in enumerate(self.values):
                _at_most(f"records[{row}].value", len(value), limits.max_record_bytes)
        for row, key in enumerate(self.keys or ()):
            if key is not None and len(key) > limits.max_key_bytes:
                _at_most(f"records[{row}].key", len(key), limits.max_key_bytes)
        for row, tag in enumerate(self.tags or ()):
            if tag is not None and len(tag.encode()) > limits.max_tag_bytes:
                _at_most(f"records[{row}].tag", len(tag.encode()), limits.max_tag_bytes)
        for row, fields in enumerate(self.headers or ()):
            if fields:
                size = sum(len(name.encode()) + len(value) for name, value in fields.items())
                _at_most(f"records[{row}].headers", size, limits.max_headers_bytes)


def _own_trace(headers: Mapping[str, bytes] | None) -> TraceParent | None:
    value = None if headers is None else headers.get(TRACEPARENT)
    return None if value is None else parse_traceparent(bytes(value).decode("ascii", "replace"))


def _contradicted(row: int, trace_id: bytes, said: TraceParent) -> Problem:
    return Problem(
        "invalid",
        "the trace id is another one than that of the record's header traceparent",
        field=f"records[{row}].trace_id",
        value=trace_id.hex(),
        limit=said.trace_id.hex(),
        outcome="not_applied",
    )


def _at_most(field: str, value: int, limit: int) -> None:
    if value > limit:
        raise Problem("too_large", f"{field} is too large", field=field, value=value, limit=limit)


def _take(column: list[_T] | None, rows: Sequence[int]) -> list[_T] | None:
    return None if column is None else [column[row] for row in rows]


def _joined(columns: Sequence[list[_T | None] | None], counts: Sequence[int]) -> list[_T | None] | None:
    """Return one column of several parts, joined; None if no part has it.

    `counts` has the number of records of each part; the records of a part without the column get None.
    """
    if not any(columns):
        return None
    joined: list[_T | None] = []
    for column, count in zip(columns, counts, strict=True):
        joined.extend([None] * count if column is None else column)
    return joined
