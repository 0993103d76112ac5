"""Documents of channels, and of their progress in each partition."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType, field

from laminar.http.api.documents.shared import Answer, Count, Request
from laminar.wire.channels import ChannelSettings

_ChannelSettings = Annotated[
    dict[str, Any], Meta(description="As ChannelSettings, without those that have their default.")
]


class NewChannel(Request):
    """Request to create a channel."""

    settings: ChannelSettings = field(default_factory=ChannelSettings)


class ChannelPatch(Request):
    """Request to change a channel's settings, as a merge patch (RFC 7396): null sets the default."""

    settings: Annotated[dict[str, Any], Meta(description="As ChannelSettings, or null.")] = field(
        default_factory=dict
    )


class ChannelPartition(Answer):
    """The progress of a channel in one partition.

    `version` is that of the settings in force. `next` is the offset of the first record that was never given
    out (delivered to a consumer), `end` is the partition's end offset, and `depth` is an upper bound of the
    number of records still to be given out. `out` counts records that were given out and not acknowledged,
    and `pinned` those of them that a transaction will acknowledge. `aside` counts records that wait for their
    next attempt, `dead` those that failed too often, and `lost` those that were trimmed before they were
    acknowledged. `oldest_age_ms` is the age of the oldest record that is neither acknowledged nor dead; null
    if there is none. `blocked` tells that too many records are out or aside, so that no new ones are given
    out. `kept_bytes` is the size of the part of the log that retention would trim if this channel (perhaps
    with others) did not need it.
    """

    version: Count
    next: Count
    end: Count
    depth: Count
    out: Count
    pinned: Count
    aside: Count
    dead: Count
    lost: Count
    oldest_age_ms: Count | None
    blocked: bool
    kept_bytes: Count


class Channel(Answer):
    """A channel, with its progress summed up over the partitions whose leaders answered.

    `oldest_age_ms` is the largest of the partitions. `opening` has the partitions in which the channel is not
    open yet, and `unanswered` those whose leaders did not answer. `partitions` is left out in a list. The
    other members are explained at `ChannelPartition`.
    """

    topic: str
    channel: str
    id: Count
    version: Count
    settings: _ChannelSettings
    depth: Count
    out: Count
    pinned: Count
    aside: Count
    dead: Count
    lost: Count
    oldest_age_ms: Count | None
    blocked: bool
    kept_bytes: Count
    opening: list[int]
    unanswered: list[int]
    partitions: dict[str, ChannelPartition] | UnsetType = UNSET


class ChannelPage(Answer):
    """A page of the list of a topic's channels; it has `next` if there are more."""

    topic: str
    channels: list[Channel]
    next: str | UnsetType = UNSET
