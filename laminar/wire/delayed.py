"""Ids of delayed records, as clients see them: what clients and nodes share.

A delayed record has a *number* (`laminar.node.partition.state.delayed_records`): that of the partition that
took it, times 2**40, and a count. Its *id* is that partition, the time at which it was to be delivered, and
the count: ``0.1766398920000.17``. The id stays the same when the record is given another time, or when
another partition has it since.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

NUMBERS: Final = 1 << 40
"""How many delayed records one partition can number."""
MAX_DELAY_MS: Final = 10 * 365 * 24 * 3_600_000
"""How long a record may be delayed: ten years."""
ID_TEXT: Final = r"[0-9]{1,9}\.-?[0-9]{1,15}\.[0-9]{1,13}"
"""The pattern of an id."""

_ID = re.compile(rf"{ID_TEXT}\Z", re.ASCII)


class DelayedId(NamedTuple):
    """An id, taken apart: the partition that took the record, its time (ms) then, the count there."""

    partition: int
    due_ms: int
    place: int

    @property
    def number(self) -> int:
        """The record's number."""
        return self.partition * NUMBERS + self.place

    def __str__(self) -> str:
        return f"{self.partition}.{self.due_ms}.{self.place}"


def id_of(number: int, due_ms: int) -> DelayedId:
    """Return the id of the record with a number that was to be delivered at a time (ms)."""
    partition, count = divmod(number, NUMBERS)
    return DelayedId(partition, due_ms, count)


def parse_id(text: str) -> DelayedId:
    """Return the id in a text. Raises ValueError."""
    if not _ID.match(text):
        raise ValueError("the id of a delayed record is PARTITION.TIME.COUNT")
    partition, due_ms, count = map(int, text.split("."))
    if count >= NUMBERS:
        raise ValueError(f"the count in the id of a delayed record is below {NUMBERS}")
    return DelayedId(partition, due_ms, count)
