"""What consumers of a channel ask for and say, and the records that are aside."""

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
    """Records that failed: tried again after `delay_ms`, or as the channel says; the attempt counts."""

    token: _Token
    delay_ms: _Delay | None = None
    reason: Annotated[str, Meta(max_length=200)] = ""


class Extension(Request):
    """Records that need more time: `timeout_ms` from now on, or as at first."""

    token: _Token
    timeout_ms: _Timeout | None = None


class Acks(Request):
    """The outcome of jobs that were given out. A released job comes again at once, and counts no attempt."""

    ack: _Tokens = field(default_factory=list)
    nack: Annotated[list[Nack], Meta(max_length=MAX_NAMED)] = field(default_factory=list)
    release: _Tokens = field(default_factory=list)
    extend: Annotated[list[Extension], Meta(max_length=MAX_NAMED)] = field(default_factory=list)


class Settled(Answer):
    """How many records are as was asked; and the tokens whose delivery was over, of which nothing changed."""

    done: Count
    late: list[str]


class Receive(Request):
    """A request for records of a channel: up to `max`, after up to `wait_ms`, each for `timeout_ms`.

    `settle` is carried out first. `credit` is of a stream: the most that are out of it at a time; `max` and
    `wait_ms` mean nothing then.
    """

    max: Annotated[int, Meta(ge=1, le=MAX_JOBS)] = 32
    wait_ms: Annotated[int, Meta(ge=0, le=30_000)] = 0
    timeout_ms: _Timeout | None = None
    settle: Acks | UnsetType = UNSET
    credit: Annotated[int, Meta(ge=1, le=MAX_CREDIT)] | None = None


class Received(Answer):
    """Records that were given out: as a fetch has them, each with its partition, token and attempt."""

    jobs: list[dict[str, Any]]
    settled: Settled | UnsetType = UNSET


class Position(Request):
    """Where a channel gives out from now on: a place in all partitions, or offsets by partition number.

    `drop`: what is out or waits to be tried again ends, except the dead.
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
    """By partition the offset from which a channel gives out."""

    positions: dict[str, Count]


class AsideJob(Answer):
    """A record that is aside. `at`: when it is tried again; of a dead one, when it died.

    With `waits_for_key` it was never tried: an earlier record of its key goes first, and `at` is null. A key
    that is no text is in `key_base64`. `unreadable`: the record cannot be read now, and its key and tag are
    not known.
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

    `next` is there if there may be more, also when a search has found nothing so far: give it as `after`.
    """

    jobs: list[AsideJob]
    next: str | UnsetType = UNSET


class DeadChange(Request):
    """What to do with dead records: tokens, or ``all``."""

    replay: _Tokens | str | UnsetType = UNSET
    drop: _Tokens | str | UnsetType = UNSET


class DeadChanged(Answer):
    """How many of them were dead."""

    count: Count
