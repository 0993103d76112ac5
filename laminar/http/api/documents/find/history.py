"""The history of one record: what its partition's log says of it."""

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
    """What happened to a record, and when the entry that says so was appended; `entry` is its Raft index."""

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
    """What became of a record. `record` null: it has expired.

    `now`: by channel, where it is; null while there is more. `complete` false: retention took entries that
    may be about it, or some cannot be read. `left`: entries that are to be looked at yet; none if
    `after` is null.
    """

    record: FoundRecord | None
    events: list[Event]
    now: dict[str, str] | None
    complete: bool
    left: Count
    after: str | None
