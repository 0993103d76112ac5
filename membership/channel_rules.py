"""The rules of a topic's channels: how they are created, changed and deleted.

The functions are rules as in `catalog_rules`. A channel's id is given once, and its `FIXED` settings stay for
its life.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from membership.changes import Change, next_state, same_state
from membership.limit_rules import over_limit
from membership.records import CatalogState, ChannelRecord, TopicRecord
from membership.requests import ChangeChannel, CreateChannel, DeleteChannel, Outcome, UpdateChannel

MAX_CHANNELS = 64
"""Most channels of one topic.

As in `laminar.wire.channels`, which clients have without this package; a test compares the two.
"""

MOST_CHANNELS = 10_000
"""Most channels of all topics: each is a table in every replica of its topic's partitions."""

MOST_SETTINGS_BYTES = 4_096
"""Most bytes of a channel's settings as JSON: a topic's record has them all, and goes to all nodes."""

FIXED = ("start", "until", "order")
"""Settings of a channel that never change: where it begins and ends, and whether keys are kept in order."""


def change_channel(state: CatalogState, request: ChangeChannel) -> Change:
    """Create, change or delete a channel of a topic: dispatch on the kind of the request."""
    topic = state.topics.get(request.step.topic)
    if topic is None:
        return same_state(state, "absent", f"no topic {request.step.topic!r}")
    match request.step:
        case CreateChannel() as create:
            return create_channel(state, topic, create)
        case UpdateChannel() as update:
            return update_channel(state, topic, update)
        case DeleteChannel() as delete:
            return delete_channel(state, topic, delete)


def create_channel(state: CatalogState, topic: TopicRecord, request: CreateChannel) -> Change:
    """Record a channel. If it exists, the same settings change nothing, and others are refused."""
    known = (topic.channels or {}).get(request.name)
    if known is not None:
        same = known.settings == request.settings
        return same_state(state, "exists" if same else "already_exists", topic=topic)
    wrong = _wrong_channel(topic, request.name, request.settings)
    if wrong:
        return same_state(state, "invalid", wrong, topic=topic)
    if len(topic.channels or ()) >= MAX_CHANNELS:
        return same_state(state, "quota", f"topic {topic.name!r} has {MAX_CHANNELS} channels", topic=topic)
    if sum(len(each.channels) for each in state.topics.values() if each.channels) >= MOST_CHANNELS:
        return same_state(state, "quota", f"all topics together have {MOST_CHANNELS} channels", topic=topic)
    over = over_limit(state, topic.owner, channels=1)
    if over is not None:
        return state, over
    version = state.version + 1
    whole_from = topic.next_partition or topic.partitions
    if topic.change is not None:
        whole_from = min(each.number for each in topic.change.outputs)
    record = ChannelRecord(version, version, request.settings, whole_from)
    return _with_channel(state, "created", topic, request.name, record)


def update_channel(state: CatalogState, topic: TopicRecord, request: UpdateChannel) -> Change:
    """Replace the settings of a channel that still has the request's version."""
    known = (topic.channels or {}).get(request.name)
    if known is None:
        return same_state(state, "absent", f"no channel {request.name!r}", topic=topic)
    if known.version != request.version:
        return same_state(state, "conflict", f"version is {known.version}", topic=topic)
    if known.settings == request.settings:
        return same_state(state, "unchanged", topic=topic)
    wrong = _wrong_channel(topic, request.name, request.settings)
    changed = [each for each in FIXED if known.settings.get(each) != request.settings.get(each)]
    if wrong or changed:
        return same_state(state, "invalid", wrong or f"{', '.join(changed)} never change", topic=topic)
    record = replace(known, version=state.version + 1, settings=request.settings)
    return _with_channel(state, "updated", topic, request.name, record)


def delete_channel(state: CatalogState, topic: TopicRecord, request: DeleteChannel) -> Change:
    """Delete a channel, if it still has the request's id; leaders then close it in their logs."""
    known = (topic.channels or {}).get(request.name)
    if known is None:
        return same_state(state, "absent", f"no channel {request.name!r}", topic=topic)
    if known.id != request.id:
        return same_state(state, "conflict", f"id is {known.id}", topic=topic)
    return _with_channel(state, "deleted", topic, request.name, None)


def _wrong_channel(topic: TopicRecord, name: str, settings: Mapping[str, Any]) -> str:
    if topic.name.startswith("_"):
        return f"topic {topic.name!r} belongs to the system, and has no channels"
    if not name:
        return "a channel needs a name"
    size = len(msgspec.json.encode(settings))
    if size > MOST_SETTINGS_BYTES:
        return f"the settings are {size} bytes, of at most {MOST_SETTINGS_BYTES}"
    return ""


def _with_channel(
    state: CatalogState, outcome: Outcome, topic: TopicRecord, name: str, record: ChannelRecord | None
) -> Change:
    """Set a channel of the topic; None: remove it. The topic has a new version, too."""
    channels = {each: known for each, known in (topic.channels or {}).items() if each != name}
    if record is not None:
        channels[name] = record
    topic = replace(topic, channels=channels or None, version=state.version + 1)
    return next_state(state, outcome, {"topic": topic}, topics=state.topics | {topic.name: topic})
