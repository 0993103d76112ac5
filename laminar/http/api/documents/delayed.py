"""Documents of delayed records: the pending ones, and changes of their times."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import UNSET, Meta, UnsetType

from laminar.http.api.documents.shared import Answer, Count, Request, Time

MAX_BUCKETS: Final = 10_000

DelayedId = Annotated[str, Meta(description="PARTITION.TIME.COUNT; it stays the same.")]
_State = Annotated[
    str, Meta(extra_json_schema={"enum": ["pending", "published", "cancelled"]}, description="What it is.")
]


class DelayedRecord(Answer):
    """A pending record: the time when readers get it, its id, and the `partition` that stores it."""

    id: DelayedId
    partition: Count
    deliver_at: Time
    value_bytes: Count
    key: str | UnsetType = UNSET
    key_base64: str | UnsetType = UNSET
    tag: str | UnsetType = UNSET


class DelayedBucket(Answer):
    """The number of pending records in one span of time, which begins at `at`."""

    at: Time
    records: Count
    bytes: Count


class DelayedPage(Answer):
    """Pending records in order of their times. If there are more, pass `next` as `after`.

    With `bucket_ms`, the numbers of pending records by span of time instead, without empty spans.
    """

    records: list[DelayedRecord] | UnsetType = UNSET
    next: str | UnsetType = UNSET
    buckets: list[DelayedBucket] | UnsetType = UNSET


class DelayedState(Answer):
    """The state of a delayed record. While it is pending, `deliver_at` is its time."""

    id: DelayedId
    state: _State
    deliver_at: Time | UnsetType = UNSET


class DelayedChange(Request):
    """Request to change the time of a pending record: a time, or "now"."""

    deliver_at: int | Annotated[str, Meta(max_length=64)]
