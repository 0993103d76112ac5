"""The administration of a topic's channels: create, describe, change, delete."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from laminar.client.descriptions import ChannelInfo
from laminar.client.errors import AlreadyExists, PreconditionFailed
from laminar.client.net.session import Session, topic_path

SET_TRIES = 5
"""How often a change of a channel is tried, while others change it too."""

_CONTENT = {"Content-Type": "application/json"}


def channel_path(topic: str, name: str) -> str:
    """Return the path of a channel's resource."""
    return f"{topic_path(topic)}/channels/{quote(name, safe='')}"


async def create_channel(
    session: Session,
    topic: str,
    name: str,
    settings: Mapping[str, Any],
    *,
    exist_ok: bool,
    timeout_s: float | None,
) -> ChannelInfo:
    """Create a channel; return its description once it is open in all partitions.

    Raises:
        AlreadyExists: the channel exists with other settings; or it exists, and `exist_ok` is false.
    """
    retries_before = session.retries
    answer = await session.call(
        "PUT",
        channel_path(topic, name),
        body=msgspec.json.encode({"settings": _in_ms(settings)}),
        headers=_CONTENT,
        timeout_s=timeout_s,
    )
    # After a retry, 200 may be the answer to our own creation, whose first answer was lost.
    if answer.status == 200 and not exist_ok and session.retries == retries_before:
        raise AlreadyExists(f"channel {name!r} exists", code="exists", status=200, field="name", value=name)
    return ChannelInfo.from_answer(answer.json())


async def channels_of(session: Session, topic: str) -> list[ChannelInfo]:
    """Return the descriptions of all channels of the topic, sorted by name."""
    answer = await session.get_json(f"{topic_path(topic)}/channels?limit=1000")
    return [ChannelInfo.from_answer(each) for each in answer["channels"]]


async def describe_channel(session: Session, topic: str, name: str) -> ChannelInfo:
    """Return a channel's description. Raises `NotFound` if there is none."""
    return ChannelInfo.from_answer(await session.get_json(channel_path(topic, name)))


async def set_channel(
    session: Session, topic: str, name: str, settings: Mapping[str, Any], *, version: int | None
) -> ChannelInfo:
    """Change the given settings of a channel, a value of None to its default; return the new description.

    Raises:
        NotFound: there is no such channel.
        PreconditionFailed: the channel's version is not `version`; or, without `version`, other clients
            changed the channel during each of `SET_TRIES` attempts.
    """
    path = channel_path(topic, name)
    body = msgspec.json.encode({"settings": dict(settings)})
    for tries_left in reversed(range(SET_TRIES)):
        known = version if version is not None else (await describe_channel(session, topic, name)).version
        try:
            answer = await session.call(
                "PATCH", path, body=body, headers={**_CONTENT, "If-Match": f'"{known}"'}
            )
        except PreconditionFailed:
            if version is not None or not tries_left:
                raise
            continue
        return ChannelInfo.from_answer(answer.json())
    raise AssertionError("the last try raises")


async def delete_channel(session: Session, topic: str, name: str) -> None:
    """Delete a channel, and what it knows of each record; do nothing if there is no such channel."""
    await session.call("DELETE", channel_path(topic, name), accept=(404,))


def _in_ms(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the form of a request, with each `datetime` as ms since the epoch."""
    return {
        name: int(value.timestamp() * 1000) if isinstance(value, datetime.datetime) else value
        for name, value in settings.items()
    }
