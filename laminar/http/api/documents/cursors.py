"""Documents of cursors, the named positions that the cluster stores."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import UNSET, Meta, UnsetType

from laminar.http.api.documents.shared import MAX_PARTITIONS, Answer, Count, Request, Time
from laminar.http.api.parameters import OFFSET_LIMIT

MAX_OWNER: Final = 200

_Owner = Annotated[str, Meta(max_length=MAX_OWNER)]
# Checked by the handler, whose refusal names the partition.
_Position = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": OFFSET_LIMIT - 1})]
Positions = Annotated[dict[str, _Position], Meta(max_length=MAX_PARTITIONS)]


class CursorChange(Request):
    """Request to change a cursor, by exactly one of `positions`, `begin` and `rewind`.

    `positions` has offsets by partition number. `begin` and `rewind` name a position: `earliest`, `latest` or
    a time. `begin` sets the cursor in the partitions in which it is not set yet; `rewind` sets it in all
    partitions (or, given offsets by partition number, in those), also if a member of the group owns it there.
    """

    positions: Positions | UnsetType = UNSET
    expected: dict[str, _Position | None] | None = None
    owner: _Owner = ""
    expected_owner: _Owner | None = None
    begin: str | UnsetType = UNSET
    rewind: str | Positions | UnsetType = UNSET


class Cursor(Answer):
    """A cursor (a consumer's stored position): offset, lag in records, and owner, each by partition number.

    `overtaken_by` is the number of records that retention trimmed before the cursor passed them, by
    partition; `overtaken` tells whether there are any.
    """

    topic: str
    cursor: str
    positions: dict[str, Count]
    lag: dict[str, Count]
    total_lag: Count
    overtaken: bool
    overtaken_by: dict[str, Count]
    owners: dict[str, str]
    changed: Time
    ends: dict[str, Count] | UnsetType = UNSET
    """The final ends of the partitions that take no more records; left out if there are none."""
    waits_for: dict[str, dict[str, Count]] | UnsetType = UNSET
    """By partition: the partitions, with their ends, that must be acknowledged before it is read."""


class CursorPage(Answer):
    """A page of the list of a topic's cursors; it has `next` if there are more."""

    topic: str
    cursors: list[Cursor]
    next: str | UnsetType = UNSET
