"""Documents of the history of one record, as its partition's log has it."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import UNSET, Meta, UnsetType

from laminar.http.api.documents.find.search import FoundRecord
from laminar.http.api.documents.shared import Answer, Count, Time

MAX_EVENTS: Final = 1_000

_Event = Annotated[
    str, Meta(description="What happened; docs/search.md lists the words.", extra_json_schema={})
]


class Event(Answer):
    """An event in the life of a record, such as its delivery; the log entry at Raft index `entry` records it.

    `at` is the time of that entry.
    """

    event: _Event
    at: Time
    entry: Count
    channel: str | UnsetType = UNSET
    cursor: str | UnsetType = UNSET
    delivery: Count | UnsetType = UNSET
    attempt: Count | UnsetType = UNSET
    due: Time | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class RecordHistory(Answer):
    """The history of a record, or a part of it. `record` is null if retention has removed the record.

    `now` is the record's present state in each channel; null if not all events were found yet. `complete` is
    false if retention has removed entries that may be about the record, or if some cannot be read. `left` is
    the number of entries still to be searched: pass `after` to continue, which is null if none is left.
    """

    record: FoundRecord | None
    events: list[Event]
    now: dict[str, str] | None
    complete: bool
    left: Count
    after: str | None
