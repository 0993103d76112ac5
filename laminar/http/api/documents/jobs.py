"""Documents about jobs (records that a channel delivered), and about records that wait or are dead."""

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
    """The jobs of a token failed: they are delivered again after `delay_ms`, or the channel's own delay."""

    token: _Token
    delay_ms: _Delay | None = None
    reason: Annotated[str, Meta(max_length=200)] = ""


class Extension(Request):
    """The jobs of a token need more time: `timeout_ms` from now, or as long as at their delivery."""

    token: _Token
    timeout_ms: _Timeout | None = None


class Acks(Request):
    """The outcomes of jobs: acknowledged (`ack`), failed (`nack`), released, or in need of more time.

    A released job is delivered again at once, and its attempt does not count.
    """

    ack: _Tokens = field(default_factory=list)
    nack: Annotated[list[Nack], Meta(max_length=MAX_NAMED)] = field(default_factory=list)
    release: _Tokens = field(default_factory=list)
    extend: Annotated[list[Extension], Meta(max_length=MAX_NAMED)] = field(default_factory=list)


class Settled(Answer):
    """The result of reported outcomes: the number of jobs that were changed, and the `late` tokens.

    A token is late if its delivery has expired; nothing was changed for it.
    """

    done: Count
    late: list[str]


class Receive(Request):
    """Request for records of a channel: up to `max`, waiting up to `wait_ms` for the first.

    Each record is delivered again unless its outcome is reported within `timeout_ms`. `settle`, outcomes of
    earlier jobs, is carried out first. With `credit` the answer is a stream, which has at most that number of
    jobs without an outcome at a time; `max` and `wait_ms` have no effect then.
    """

    max: Annotated[int, Meta(ge=1, le=MAX_JOBS)] = 32
    wait_ms: Annotated[int, Meta(ge=0, le=30_000)] = 0
    timeout_ms: _Timeout | None = None
    settle: Acks | UnsetType = UNSET
    credit: Annotated[int, Meta(ge=1, le=MAX_CREDIT)] | None = None


class Received(Answer):
    """Records that were delivered: each as in a fetch, and with its partition, token and attempt."""

    jobs: list[dict[str, Any]]
    settled: Settled | UnsetType = UNSET


class Position(Request):
    """Request to move a channel to a position in all partitions (`at`), or to offsets by partition number.

    With `drop`, records that are delivered and not acknowledged, or wait for another attempt, are dropped;
    dead records stay.
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
    """The offset from which a channel delivers now, by partition number."""

    positions: dict[str, Count]


class AsideJob(Answer):
    """A record that a channel has put aside: it waits for its next attempt, or is dead (failed too often).

    `at` is the time of the next attempt, or the time at which the record became dead. `waits_for_key` tells
    that the record was never delivered, because an earlier record of its key comes first; `at` is null then.
    A key that is not text is in `key_base64`. `unreadable` tells that the record cannot be read now, so that
    its key and tag are unknown.
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
    """A page of the records that wait for an attempt, or of the dead records.

    `next` is there if there may be more, even if this page is empty: pass it as `after`.
    """

    jobs: list[AsideJob]
    next: str | UnsetType = UNSET


class DeadChange(Request):
    """Request to replay (deliver again) or drop dead records: those with these tokens, or ``all``."""

    replay: _Tokens | str | UnsetType = UNSET
    drop: _Tokens | str | UnsetType = UNSET


class DeadChanged(Answer):
    """The number of dead records that were replayed or dropped."""

    count: Count
