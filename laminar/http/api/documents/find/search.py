"""Documents of searches: the conditions, the records found, and how much was searched."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from laminar.http.api.documents.shared import MAX_PARTITIONS, Answer, Count, Request, Time
from laminar.http.api.parameters import ID_PATTERN, MAX_WAIT_MS, OFFSET_LIMIT

MAX_FOUND: Final = 1_000
MAX_SHOWN_BYTES: Final = 64 * 1024
MAX_TOKEN: Final = 1 << 19
MAX_HEADERS: Final = 16
MAX_PATH: Final = 1024

# The numbers of the partitions are checked by the handler, whose refusal names the partition.
_Offset = Annotated[int, Meta(ge=0, le=OFFSET_LIMIT)]
_Offsets = Annotated[dict[str, _Offset], Meta(max_length=MAX_PARTITIONS)]
_Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Place = Annotated[str, Meta(max_length=64)] | _Offsets


class JsonEquals(Request):
    """A condition on a record's value: it is JSON that has `equals` at `path`, names joined by dots."""

    path: Annotated[str, Meta(min_length=1, max_length=MAX_PATH)]
    equals: Annotated[str, Meta(max_length=MAX_SHOWN_BYTES)] | _Whole | float | bool | None


class Where(Request):
    """The conditions of a search; a record must meet all of them. Without a condition every record does."""

    key: Annotated[str, Meta(max_length=MAX_SHOWN_BYTES)] | None = None
    key_base64: Annotated[str, Meta(max_length=2 * MAX_SHOWN_BYTES)] | None = None
    trace_id: Annotated[str, Meta(pattern=f"^{ID_PATTERN}$")] | None = None
    tag: Annotated[str, Meta(max_length=255)] | None = None
    headers: Annotated[dict[str, str], Meta(max_length=MAX_HEADERS)] | None = None
    contains: Annotated[str, Meta(min_length=1, max_length=MAX_PATH)] | None = None
    json: JsonEquals | None = None


class Search(Request):
    """Request to search a topic: the conditions, the range, and how much to return in one answer.

    `from` and `to` are `earliest`, `latest`, a time, or offsets by partition. To continue a search, pass the
    `after` of its last answer. With `follow` the search has no end, and continues with records that are
    appended meanwhile; an answer then waits up to `wait_ms` for its first record.
    """

    where: Where = msgspec.field(default_factory=Where)
    partitions: (
        Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1, max_length=MAX_PARTITIONS)] | None
    ) = None
    from_: _Place = msgspec.field(default="earliest", name="from")
    to: _Place = "latest"
    order: Literal["oldest", "newest"] = "oldest"
    limit: Annotated[int, Meta(ge=1, le=MAX_FOUND)] = 100
    value_bytes: Annotated[int, Meta(ge=0, le=MAX_SHOWN_BYTES)] = 4096
    follow: bool = False
    wait_ms: Annotated[int, Meta(ge=0, le=MAX_WAIT_MS)] = 0
    after: Annotated[str, Meta(max_length=MAX_TOKEN)] | None = None


class FoundRecord(Answer):
    """A record that was found; its value may be `truncated`, and `size` is the size of the whole in bytes."""

    partition: Count
    offset: Count
    timestamp: Time
    size: Count
    truncated: bool
    value: str | UnsetType = UNSET
    value_base64: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    key_base64: str | UnsetType = UNSET
    tag: str | UnsetType = UNSET
    headers: dict[str, str] | UnsetType = UNSET
    headers_base64: dict[str, str] | UnsetType = UNSET
    deliver_at: Time | UnsetType = UNSET
    trace_id: str | UnsetType = UNSET


class Searched(Answer):
    """The amount that was searched for this answer: records, bytes, and segments by index.

    `segments_by_index` is the number of segments of which, thanks to an index, only possible matches were
    read.
    """

    records: Count
    bytes: Count
    segments_by_index: Count


class Left(Answer):
    """The rest that is still to be searched: numbers of records, as far as known, and of partitions."""

    records: Count
    partitions: Count


class NotSearched(Answer):
    """A range of offsets (`to` excluded) that cannot be searched, and why."""

    partition: Count
    from_: Count = msgspec.field(name="from")
    to: Count
    why: Annotated[str, Meta(extra_json_schema={"enum": ["damaged", "expired", "unreadable"]})]


class Found(Answer):
    """The records that one request found, and how far it searched.

    To continue the search, pass `after`; it is null if everything was searched.
    """

    records: list[FoundRecord]
    searched: Searched
    left: Left
    not_searched: list[NotSearched]
    after: str | None
