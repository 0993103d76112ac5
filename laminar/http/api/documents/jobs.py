"""Documents of a channel's consumers, and of records that are aside (waiting for an attempt, or dead)."""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import UNSET, Meta, UnsetType, field

from laminar.http.api.documents.cursors import Positions
from laminar.http.api.documents.shared import Answer, Count, Request, Time
from laminar.wire.channels import MAX_CREDIT, MAX_DELAY_MS, MAX_NAMED, MAX_TIMEOUT_MS, TIME_PATTERN

MAX_JOBS: Final = 10_000
MAX_NAMED_RECORDS: Final = MAX_JOBS
"""Most records that a request about a channel names."""

_Token = Annotated[
    str, Meta(max_length=120, description="PARTITION:OFFSET:DELIVERY, or PARTITION:FIRST-LAST:DELIVERY")
]
_Tokens = Annotated[list[_Token], Meta(max_length=MAX_NAMED)]
_Delay = Annotated[int, Meta(ge=0, le=MAX_DELAY_MS)]
_Timeout = Annotated[int, Meta(ge=1_000, le=MAX_TIMEOUT_MS)]


class Nack(Request):
    """Jobs that failed: they are given out again after `delay_ms`, or as the channel is set."""

    token: _Token
    delay_ms: _Delay | None = None
    reason: Annotated[str, Meta(max_length=200)] = ""


class Extension(Request):
    """Jobs that need more time: `timeout_ms` from now, or the same time as at their delivery."""

    token: _Token
    timeout_ms: _Timeout | None = None


class Acks(Request):
    """The outcomes of jobs. A released job is given out again at once, and its attempt does not count."""

    ack: _Tokens = field(default_factory=list)
    nack: Annotated[list[Nack], Meta(max_length=MAX_NAMED)] = field(default_factory=list)
    release: _Tokens = field(default_factory=list)
    extend: Annotated[list[Extension], Meta(max_length=MAX_NAMED)] = field(default_factory=list)


class Settled(Answer):
    """The number of jobs changed as asked, and the tokens whose delivery had expired: unchanged."""

    done: Count
    late: list[str]


class Receive(Request):
    """A request for records of a channel: up to `max`, after up to `wait_ms`, each for `timeout_ms`.

    `settle` is carried out first. `credit` makes the answer a stream, and is the most jobs that the stream
    may have out at a time; `max` and `wait_ms` have no effect then.
    """

    max: Annotated[int, Meta(ge=1, le=MAX_JOBS)] = 32
    wait_ms: Annotated[int, Meta(ge=0, le=30_000)] = 0
    timeout_ms: _Timeout | None = None
    settle: Acks | UnsetType = UNSET
    credit: Annotated[int, Meta(ge=1, le=MAX_CREDIT)] | None = None


class Received(Answer):
    """Records that were given out: the members of a fetch, and for each its partition, token and attempt."""

    jobs: list[dict[str, Any]]
    settled: Settled | UnsetType = UNSET


class Position(Request):
    """Request to move a channel: a position for all partitions, or offsets by partition number.

    With `drop`, the records that are out or wait for another attempt are dropped; dead records stay.
    """

    at: (
        Annotated[
            str,
            Meta(
                description="earliest, latest, or a time: RFC 3339 with an offset, or ms since 1970.",
                extra_json_schema={"pattern": f"^(earliest|latest|{TIME_PATTERN})$"},
            ),
        ]
        | UnsetType
    ) = UNSET
    positions: Positions | UnsetType = UNSET
    drop: bool = False


class Positioned(Answer):
    """The offset from which a channel gives out now, by partition."""

    positions: dict[str, Count]


class AsideJob(Answer):
    """A record that is aside. `at` is the time of its next attempt, or the time when it became dead.

    A record with `waits_for_key` was never given out, because an earlier record of its key comes first; `at`
    is null. A key that is no text is in `key_base64`. `unreadable` tells that the record cannot be read now,
    so that its key and tag are unknown.
    """

    partition: int
    offset: Count
    token: str
    attempts: Count
    at: Time | None
    waits_for_key: bool
    reason: str
    key: str | UnsetType = UNSET
    key_base64: str | UnsetType = UNSET
    tag: str | UnsetType = UNSET
    unreadable: bool | UnsetType = UNSET


class AsidePage(Answer):
    """A page of the records that are aside, or dead.

    `next` is there if there may be more, even if this page is empty: pass it as `after`.
    """

    jobs: list[AsideJob]
    next: str | UnsetType = UNSET


class DeadChange(Request):
    """Request to replay or drop dead records: those with these tokens, or ``all``."""

    replay: _Tokens | str | UnsetType = UNSET
    drop: _Tokens | str | UnsetType = UNSET


class DeadChanged(Answer):
    """The number of records that were dead, and are replayed or dropped now."""

    count: Count
