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
    """A record that is pending: readers get it only at the time `deliver_at`.

    `partition` is the partition that stores it until then.
    """

    id: DelayedId
    partition: Count
    deliver_at: Time
    value_bytes: Count
    key: str | UnsetType = UNSET
    key_base64: str | UnsetType = UNSET
    tag: str | UnsetType = UNSET


class DelayedBucket(Answer):
    """The number of records that are due in one span of time, which begins at `at`, and their bytes."""

    at: Time
    records: Count
    bytes: Count


class DelayedPage(Answer):
    """A page of the pending records, in order of the times at which they are due.

    If there are more, pass `next` as `after`. If the request had `bucket_ms`, there are `buckets` in place of
    `records`: the number of records in each span of `bucket_ms`, without empty spans.
    """

    records: list[DelayedRecord] | UnsetType = UNSET
    next: str | UnsetType = UNSET
    buckets: list[DelayedBucket] | UnsetType = UNSET


class DelayedState(Answer):
    """The state of a delayed record. `deliver_at` is the time at which it is due, left out if not pending."""

    id: DelayedId
    state: _State
    deliver_at: Time | UnsetType = UNSET


class DelayedChange(Request):
    """Request to change the time at which a pending record is due, to another time or "now"."""

    deliver_at: int | Annotated[str, Meta(max_length=64)]
