"""Ids of delayed records, by which clients name them: their form, and their numbers in nodes.

Nodes give a delayed record a *number* (`laminar.node.partition.state.delayed_records`): the partition that
took the record, times 2**40, plus a count. Its *id* has that partition, the time at which it was to be
delivered at first (ms since the epoch), and the count: ``0.1766398920000.17``. The id does not change when
the record gets another time, or is moved to another partition.
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
    """The parts of an id: the partition that took the record, its first delivery time, the count there."""

    partition: int
    due_ms: int
    place: int

    @property
    def number(self) -> int:
        """The record's number, by which nodes know it."""
        return self.partition * NUMBERS + self.place

    def __str__(self) -> str:
        return f"{self.partition}.{self.due_ms}.{self.place}"


def id_of(number: int, due_ms: int) -> DelayedId:
    """Return the id of the record with this number, to be delivered at `due_ms` (ms since the epoch)."""
    partition, count = divmod(number, NUMBERS)
    return DelayedId(partition, due_ms, count)


def parse_id(text: str) -> DelayedId:
    """Return the parts of the id `text`. Raises ValueError if the text is not an id."""
    if not _ID.match(text):
        raise ValueError("the id of a delayed record is PARTITION.TIME.COUNT")
    partition, due_ms, count = map(int, text.split("."))
    if count >= NUMBERS:
        raise ValueError(f"the count in the id of a delayed record is below {NUMBERS}")
    return DelayedId(partition, due_ms, count)
