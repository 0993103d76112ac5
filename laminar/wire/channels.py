"""Settings of a channel, and the token of a delivery, which clients, nodes and the log of a partition share.

A channel is a named queue of a topic: each record is given to one of its consumers, again and again until it
is acknowledged or dead (failed too often). Here are the settings with their defaults and limits, and the
token, a text that names one delivery (one giving out of a record). The mechanism is in
`laminar.node.partition.state.channels`; `docs/channels.md` describes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from laminar.wire.trace import TRACED

MAX_TIMEOUT_MS = 43_200_000
"""Longest time that a consumer may have for one record: twelve hours."""
MAX_DELAY_MS = 2 * 366 * 86_400_000
"""Longest delay of a retry: two years."""
MAX_FILTER_TAGS = 64
MAX_FILTER_HEADERS = 8
MAX_NAMED = 1024
"""Most ranges of tokens in one request."""
JOBS_TYPE = "application/vnd.laminar.jobs"
"""The media type of records that are given out, as batches."""
STREAM_TYPE = "text/event-stream"
"""The media type of a stream of jobs: server-sent events."""
MAX_CREDIT = 1_000
"""Most jobs that a stream may have out at a time."""
CHANNEL_HEADER = "Laminar-Channel"
"""Header of an answer of these types: the number of the channel that gave them out."""
MAX_ACKS = 10_000
"""Most records that one batch of a sink acknowledges."""
MAX_CHANNELS = 64
"""Most channels of one topic."""
CURSOR_START_SINCE = 5
"""The code version at which all nodes know a channel that begins where a cursor stands."""

TRACE_SINCE = 7
"""The code version at which all nodes know a channel's setting `trace`."""

_LATEST_MS = 253_402_300_799_999
"""The last millisecond of the year 9999, after which RFC 3339 has no times."""

_DATE: Final = "(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_CLOCK: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\.[0-9]{1,9})?"
_OFFSET: Final = "([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_SINCE_1970: Final = "(19[7-9][0-9]|[2-9][0-9]{3})"
TIME_PATTERN: Final = f"(?!0000)[0-9]{{4}}-{_DATE}[Tt ]{_CLOCK}{_OFFSET}|-?[0-9]{{1,15}}"
"""What a text is that is a time, in an OpenAPI schema: RFC 3339 with an offset, or ms since the epoch."""
_TEXT_OF_TIME: Final = {
    "type": "string",
    "pattern": f"^({_SINCE_1970}-{_DATE}[Tt ]{_CLOCK}{_OFFSET}|[0-9]{{1,15}})$",
    "description": "A time since 1970: RFC 3339 with an offset from UTC, or ms since the epoch.",
}
PLACES_AS_TEXT: Final[Mapping[str, Sequence[Mapping[str, str]]]] = {
    "start": [_TEXT_OF_TIME],
    "until": [_TEXT_OF_TIME, {"type": "string", "const": "now"}],
}
"""Of these settings the forms that requests may have beside those that are kept, as OpenAPI schemas."""
_TimeMs = Annotated[int, msgspec.Meta(ge=0, extra_json_schema={"maximum": _LATEST_MS})]
_Timeout = Annotated[int, msgspec.Meta(ge=1_000, le=MAX_TIMEOUT_MS)]
_Delay = Annotated[int, msgspec.Meta(ge=0, le=MAX_DELAY_MS)]
_Text = Annotated[str, msgspec.Meta(max_length=1024)]


class Filter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The filter of a channel: it gives out records with any of the tags (if any) and all of the headers."""

    tags: Annotated[list[_Text], msgspec.Meta(max_length=MAX_FILTER_TAGS)] = []
    headers: Annotated[dict[_Text, _Text], msgspec.Meta(max_length=MAX_FILTER_HEADERS)] = {}

    def takes(self, tag: str | None, headers: Mapping[str, bytes]) -> bool:
        """Return whether a record with this tag and these headers passes the filter."""
        if self.tags and tag not in self.tags:
            return False
        return all(headers.get(name) == value.encode() for name, value in self.headers.items())


class CursorStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The start of a channel at the positions of a cursor of the topic.

    In a partition in which the cursor has no position, the channel begins at the earliest record.
    """

    cursor: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,200}$")]


class ChannelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The settings of a channel; times are in ms. Settings with their default are left out of the encoding.

    `start` is where the channel begins in each partition: ``"earliest"``, ``"latest"``, a time (ms since the
    epoch), or the position of a cursor. `until` is the time at which it ends, for the replay of a range; None
    means never. With `order` ``"key"`` only one record of each key is out (given to a consumer) at a time, in
    the order of the log. `timeout_ms` is how long a consumer has for a record, unless its request names
    another time. `max_attempts` is how often a record is tried before it is dead; 0 means for ever. With
    `on_dead` ``"park"`` the later records of a dead record's key wait for an operator. `dead_ms` is how long
    a dead record is kept. `retry_ms` is the pause before another attempt, which doubles with each attempt up
    to `retry_max_ms`. `max_in_flight` is the largest number of records of one partition that are out at a
    time. `hold_ms` is how long retention keeps records that were never given out. While `paused` is true no
    records are given out, but outcomes are accepted. `trace` says which records have events of this channel
    in the trace; None means those that the topic's setting names.
    """

    start: Annotated[
        Literal["earliest", "latest"] | _TimeMs | CursorStart,
        msgspec.Meta(description="A time is kept in ms since the epoch, also if it is said otherwise."),
    ] = "earliest"
    until: Annotated[
        _TimeMs | None,
        msgspec.Meta(
            description="A time that is over; it is kept in ms since the epoch, also if it is said otherwise."
        ),
    ] = None
    order: Literal["none", "key"] = "none"
    timeout_ms: _Timeout = 30_000
    max_attempts: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 16
    on_dead: Literal["continue", "park"] = "continue"
    dead_ms: _Delay = 14 * 86_400_000
    retry_ms: _Delay = 1_000
    retry_max_ms: _Delay = 900_000
    filter: Filter | None = None
    max_in_flight: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 10_000
    hold_ms: _Delay = 7 * 86_400_000
    paused: bool = False
    trace: Annotated[str, msgspec.Meta(pattern=TRACED)] | None = None

    def retry_delay_ms(self, attempt: int) -> int:
        """Return the pause in ms after attempt number `attempt` (from 1) has failed."""
        return min(self.retry_max_ms, self.retry_ms << min(attempt - 1, 40))

    def fixed(self) -> tuple[object, ...]:
        """Return the values of the settings that cannot be changed after a channel's creation."""
        return (self.start, self.until, self.order)


_DEFAULT = ChannelSettings()
SETTINGS: Final = frozenset(ChannelSettings.__struct_fields__)
"""The names of the settings."""


def settings_of(answer: Mapping[str, Any]) -> ChannelSettings:
    """Return the settings in a decoded document. Raises `msgspec.ValidationError`, which names the field."""
    return msgspec.convert(answer, ChannelSettings)


def stored(settings: ChannelSettings) -> dict[str, Any]:
    """Return the settings as a document, without those that have their default.

    Equal settings give equal documents: a filter that lets every record pass is left out, too. (The option
    `omit_defaults` of the struct compares by identity, so it keeps defaults that were decoded.)
    """
    if settings.filter == Filter():
        settings = msgspec.structs.replace(settings, filter=None)
    found: dict[str, Any] = msgspec.to_builtins(settings)
    return {
        name: value for name, value in found.items() if getattr(settings, name) != getattr(_DEFAULT, name)
    }


_TOKEN = re.compile(r"([0-9]{1,20}):([0-9]{1,20})(?:-([0-9]{1,20}))?:([0-9]{1,20})")


class Named(NamedTuple):
    """The records that a token names: offsets from `first` up to, not including, `end`, of one delivery."""

    partition: int
    first: int
    end: int
    delivery: int


def token(partition: int, offset: int, delivery: int) -> str:
    """Return the token of one record that was given out."""
    return f"{partition}:{offset}:{delivery}"


def parse_token(text: str) -> Named:
    """Return the records that a token names: ``0:812-830:5071`` are offsets 812 to 830 of partition 0.

    Raises:
        ValueError: the text is not a token.
    """
    found = _TOKEN.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:80]!r} is not a job's token, which is PARTITION:OFFSET:DELIVERY")
    partition, first, last, delivery = found.groups()
    named = Named(int(partition), int(first), int(last or first) + 1, int(delivery))
    if named.end <= named.first or max(named) >= 1 << 62:
        raise ValueError(f"{text[:80]!r} is not a job's token: its numbers are impossible")
    return named
