"""Channels, and where they stand in each partition."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType, field

from laminar.http.api.documents.shared import Answer, Count, Request
from laminar.wire.channels import ChannelSettings

_ChannelSettings = Annotated[
    dict[str, Any], Meta(description="As ChannelSettings, without those that have their default.")
]


class NewChannel(Request):
    """A channel that is to be created."""

    settings: ChannelSettings = field(default_factory=ChannelSettings)


class ChannelPatch(Request):
    """A merge patch of a channel's settings (RFC 7396): null sets the default."""

    settings: Annotated[dict[str, Any], Meta(description="As ChannelSettings, or null.")] = field(
        default_factory=dict
    )


class ChannelPartition(Answer):
    """Where a channel stands in one partition.

    `version`: of the settings in force. `next`: the first record that was never given out; `end`: the
    partition's end offset. `depth`: at most that many records are to be given out yet. `pinned`: those of
    `out` that a transaction is to acknowledge. `aside`: records that wait for their next attempt. `lost`:
    records that were trimmed before they were done. `oldest_age_ms`: since the oldest record was appended
    that is neither done nor dead; null: there is none. `blocked`: too many are out or aside for new ones.
    `kept_bytes`: of the log, what retention would trim if the channel, maybe with others, did not keep it.
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
    """A channel, with sums over the partitions whose leaders answered, and the oldest age.

    `opening`: the partitions where it is not open yet. `unanswered`: those whose leaders did not answer.
    `partitions` is left out in a list.
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
    """A page of the list of a topic's channels; `next` is there if there are more."""

    topic: str
    channels: list[Channel]
    next: str | UnsetType = UNSET
