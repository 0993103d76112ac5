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
    """An event of a record, and the time of the entry that records it; `entry` is that entry's Raft index."""

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
    """The history of a record. `record` is null if retention has removed it.

    `now` is the record's state by channel; null while there are more events. `complete` is false if retention
    removed entries that may be about the record, or some cannot be read. `left` is the number of entries
    still to be searched; none if `after` is null.
    """

    record: FoundRecord | None
    events: list[Event]
    now: dict[str, str] | None
    complete: bool
    left: Count
    after: str | None
