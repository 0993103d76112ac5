"""Routes of channels: create, describe, change, delete, list.

The catalog records which channels exist, and their settings; the leaders of the partitions open and close
channels as their views of the catalog say (`laminar.node.shard.channels`). A request that creates or changes
a channel waits until the leaders have done so, so that the settings apply to everything received after its
answer.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
from msgspec import UNSET

from laminar.http.api.documents import channels as documents
from laminar.http.api.parameters import MAX_PAGE
from laminar.http.api.problems import Problem, over_limit
from laminar.http.api.timestamps import parse_time
from laminar.http.protocol.messages import Request, Response
from laminar.node.api.channels.lookup import ChannelLookup, no_such_channel
from laminar.node.api.channels.states import ChannelState, ChannelStates
from laminar.node.api.common.etags import changed, etag, names, required
from laminar.node.api.common.json_body import document_of, json_body
from laminar.node.api.common.placement_call import PlacementCall
from laminar.node.api.common.query import integer, next_link
from laminar.node.api.common.services import ShardServices, check_enabled
from laminar.node.api.consumers.cursor_steps import CursorSteps
from laminar.node.catalog.messages.answers import CatalogAnswer
from laminar.node.catalog.messages.requests import ChannelRequest
from laminar.node.transport.transport import TransportError
from laminar.wire.channels import (
    CURSOR_START_SINCE,
    SETTINGS,
    TRACE_SINCE,
    ChannelSettings,
    CursorStart,
    settings_of,
    stored,
)
from membership.channel_rules import FIXED, MOST_SETTINGS_BYTES
from membership.records import ChannelRecord, TopicRecord
from membership.requests import CreateChannel, DeleteChannel, Result, UpdateChannel

OPEN_WAIT_S = 5.0
"""How long a request waits for the leaders to open a channel, or to apply its new settings."""
OPEN_RETRY_S = 0.02
_PLACES: Final[dict[str, tuple[tuple[type, ...], tuple[str, ...], str]]] = {
    "start": ((int, str, dict), ("earliest", "latest"), 'earliest, latest, a time, {"cursor": NAME}'),
    "until": ((int, str), (), "now, a time"),
}
"""The settings that name places: the types of their values, permitted words, and the text of the limit."""


class ChannelRoutes:
    """The handlers of the routes that create, describe, change and delete channels."""

    def __init__(
        self,
        services: ShardServices,
        channels: ChannelLookup,
        states: ChannelStates,
        placement: PlacementCall,
        cursors: CursorSteps,
    ) -> None:
        self._services = services
        self._channels = channels
        self._states = states
        self._placement = placement
        self._cursors = cursors

    # -- descriptions --------------------------------------------------------------------

    async def channels(self, request: Request, topic: str) -> Response:
        """Answer GET /v1/topics/{topic}/channels with a page of the topic's channels."""
        prefix = request.query.get("prefix", "")
        limit = integer(request, "limit", 100, minimum=1, maximum=MAX_PAGE)
        after = request.query.get("after", "")
        record = self._channels.topic(topic)
        known = record.channels or {}
        found = sorted(name for name in known if name.startswith(prefix) and name > after)
        page = found[:limit]
        states = await self._states.of(topic, record.numbers) if page else {}
        described = [self._describe(record, name, known[name], states) for name in page]
        for each in described:
            each.partitions = UNSET
        answer = documents.ChannelPage(topic, described)
        headers = []
        if len(found) > limit:
            answer.next = page[-1]
            path = f"/v1/topics/{topic}/channels"
            headers.append(next_link(path, prefix=prefix, limit=limit, after=page[-1]))
        return Response.json(answer, headers=headers)

    async def channel(self, request: Request, topic: str, channel: str) -> Response:
        """Answer GET /v1/topics/{topic}/channels/{channel} with settings and progress by partition."""
        known = await self._channels.record(topic, channel)
        record = self._channels.topic(topic)
        states = await self._states.of(topic, record.numbers, known.id)
        return self._shown(record, channel, known, states)

    def _shown(
        self,
        topic: TopicRecord,
        name: str,
        known: ChannelRecord,
        states: dict[int, list[ChannelState]],
        *,
        created: bool = False,
    ) -> Response:
        headers = [etag(known.version)]
        if created:
            headers.insert(0, ("Location", f"/v1/topics/{topic.name}/channels/{name}"))
        described = self._describe(topic, name, known, states)
        return Response.json(described, status=201 if created else 200, headers=headers)

    def _describe(
        self, topic: TopicRecord, name: str, known: ChannelRecord, states: dict[int, list[ChannelState]]
    ) -> documents.Channel:
        now_ms = self._services.clock.wall_ms()
        there = {number: state for number in states for state in states[number] if state.channel == known.id}
        ages = [max(0, now_ms - state.oldest_ms) for state in there.values() if state.oldest_ms]
        return documents.Channel(
            topic=topic.name,
            channel=name,
            id=known.id,
            version=known.version,
            settings=known.settings,
            depth=sum(state.depth for state in there.values()),
            out=sum(state.out for state in there.values()),
            pinned=sum(state.pinned for state in there.values()),
            aside=sum(state.aside for state in there.values()),
            dead=sum(state.dead for state in there.values()),
            lost=sum(state.lost for state in there.values()),
            oldest_age_ms=max(ages, default=None),
            blocked=any(state.blocked for state in there.values()),
            kept_bytes=sum(state.kept_bytes for state in there.values()),
            opening=sorted(states.keys() - there.keys()),
            unanswered=[number for number in topic.numbers if number not in states],
            partitions={
                str(number): documents.ChannelPartition(
                    version=state.version,
                    next=state.next,
                    end=state.end,
                    depth=state.depth,
                    out=state.out,
                    pinned=state.pinned,
                    aside=state.aside,
                    dead=state.dead,
                    lost=state.lost,
                    oldest_age_ms=max(0, now_ms - state.oldest_ms) if state.oldest_ms else None,
                    blocked=state.blocked,
                    kept_bytes=state.kept_bytes,
                )
                for number, state in sorted(there.items())
            },
        )

    # -- changes -------------------------------------------------------------------------

    async def create(self, request: Request, topic: str, channel: str) -> Response:
        """Answer PUT /v1/topics/{topic}/channels/{channel}, once the channel is open in all partitions.

        Raises:
            Problem: 503 `being_created` if the channel is not open in all partitions after `OPEN_WAIT_S`. It
                exists all the same, and the leaders go on to open it.
        """
        record = self._channels.topic(topic)
        asked = json_body(request, documents.ChannelPatch).settings
        settings = document_of({"settings": self._in_ms(asked)}, documents.NewChannel).settings
        wanted = stored(settings)
        _check_size(wanted)
        _check_sense(settings)
        self._check_until(wanted)
        await self._check_trace(wanted)
        if isinstance(settings.start, CursorStart) and channel not in (record.channels or {}):
            await self._check_cursor(topic, settings.start.cursor)
        result = await self._ask(ChannelRequest(CreateChannel(topic, channel, wanted)), topic)
        known = _channel_of(result, channel)
        if result.outcome == "already_exists" and known is not None:
            # A repeated request with "now" is the same request: the channel keeps its first end.
            is_same = asked.get("until") == "now" and _but_until(wanted) == _but_until(known.settings)
            if not is_same:
                raise _already_exists(topic, channel, wanted, known)
        if known is None:
            raise no_such_channel(topic, channel)
        await self._placement.until_seen(result.version)
        states = await self._until(topic, channel, known, version=known.id)
        if states is None:
            raise Problem(
                "being_created",
                f"channel {channel!r} of topic {topic!r} exists, and is not open in all partitions yet",
                retry_after_ms=500,
                outcome="unknown",
            )
        record = self._channels.topic(topic)
        return self._shown(record, channel, known, states, created=result.outcome == "created")

    def _in_ms(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return settings with the times of `start` and `until` in ms; ``now`` is this node's clock.

        Raises:
            Problem: 422 `invalid`, with what is allowed.
        """
        found = dict(settings)
        for name, (kinds, words, allowed) in _PLACES.items():
            value = settings.get(name)
            if value is None or value in words:
                continue
            field = f"settings.{name}"
            if name == "until" and value == "now":
                found[name] = self._services.clock.wall_ms()
            elif isinstance(value, bool) or not isinstance(value, kinds):
                raise _no_place(field, value, allowed)
            elif not isinstance(value, dict):
                try:
                    found[name] = parse_time(value, field=field)
                except Problem:
                    raise _no_place(field, value, allowed) from None
        return found

    def _check_until(self, settings: dict[str, Any]) -> None:
        """Refuse a time `until` in the future: a leader looks up its offset when it opens the channel.

        Raises `Problem`.
        """
        until, now_ms = settings.get("until"), self._services.clock.wall_ms()
        if until is not None and until > now_ms:
            raise Problem(
                "invalid",
                "until must be a time in the past, or `now`",
                field="settings.until",
                value=until,
                limit=now_ms,
                outcome="not_applied",
            )

    async def _check_trace(self, settings: dict[str, Any]) -> None:
        """Refuse the setting `trace` while a node runs a program that cannot read it.

        Raises 503 `not_enabled`.
        """
        if "trace" in settings:
            await check_enabled(self._services, TRACE_SINCE, "the setting `trace` of a channel")

    async def _check_cursor(self, topic: str, cursor: str) -> None:
        """Refuse a channel that begins at a cursor which no partition has: it would give out all records.

        Raises:
            Problem: 404 `no_such_cursor`; 503 `not_enabled` while a node runs a program that does not support
                this start; 503 while a leader does not answer.
        """
        await check_enabled(self._services, CURSOR_START_SINCE, "to begin at a cursor")
        states, _ = await self._cursors.everywhere(topic, cursor)
        if not states:
            raise Problem(
                "no_such_cursor",
                f"topic {topic!r} has no cursor {cursor!r} in any partition",
                field="settings.start.cursor",
                value=cursor,
                outcome="not_applied",
            )

    async def update(self, request: Request, topic: str, channel: str) -> Response:
        """Answer PATCH /v1/topics/{topic}/channels/{channel}: change settings, if If-Match names the version.

        The answer waits up to `OPEN_WAIT_S` until all leaders apply the new settings. Its versions, one for
        each partition, show which leaders do.
        """
        known = await self._if_match(request, topic, channel)
        patch = self._in_ms(json_body(request, documents.ChannelPatch).settings)
        # An unknown name must be refused even if its value is null, so it is merged although nulls are not.
        unknown = {name: value for name, value in patch.items() if name not in SETTINGS}
        merged = unknown | {
            name: value for name, value in (known.settings | patch).items() if value is not None
        }
        settings = document_of({"settings": merged}, documents.NewChannel).settings
        _check_fixed(known, settings)
        wanted = stored(settings)
        _check_size(wanted)
        await self._check_trace(wanted)
        if patch.keys() & {"on_dead", "retry_ms", "retry_max_ms"}:
            # Only then: else a channel with settings that an earlier program accepted could not be paused.
            _check_sense(settings)
        step = UpdateChannel(topic, channel, known.version, wanted)
        result = await self._ask(ChannelRequest(step), topic)
        now = _channel_of(result, channel)
        if result.outcome == "conflict" and now is not None:
            raise changed(f'"{known.version}"', now.version, what="channel")
        if now is None:
            raise no_such_channel(topic, channel)
        await self._placement.until_seen(result.version)
        await self._until(topic, channel, now, version=now.version)
        return await self.channel(request, topic, channel)

    async def delete(self, request: Request, topic: str, channel: str) -> Response:
        """Answer DELETE /v1/topics/{topic}/channels/{channel}; the leaders close it after the answer."""
        if "if-match" in request.headers:
            known = await self._if_match(request, topic, channel)
        else:
            known = await self._channels.record(topic, channel)
        result = await self._ask(ChannelRequest(DeleteChannel(topic, channel, known.id)), topic)
        now = _channel_of(result, channel)
        if result.outcome == "conflict" and now is not None:
            raise changed(f'"{known.version}"', now.version, what="channel")
        if result.outcome == "absent":
            raise no_such_channel(topic, channel)
        await self._placement.until_seen(result.version)
        return Response(204)

    async def _if_match(self, request: Request, topic: str, channel: str) -> ChannelRecord:
        """Return the channel's record if If-Match names its version; refresh the view first if it does not.

        Raises:
            Problem: 428 `if_match_required`, 412 `precondition_failed`, or 404.
        """
        wanted = required(request.headers.get("if-match"), what="channel")
        known = await self._channels.record(topic, channel)
        if not names(wanted, known.version):
            await self._services.refresh_view()
            known = await self._channels.record(topic, channel)
        if not names(wanted, known.version):
            raise changed(wanted, known.version, what="channel")
        return known

    async def _until(
        self, topic: str, channel: str, known: ChannelRecord, *, version: int
    ) -> dict[int, list[ChannelState]] | None:
        """Wait until all leaders have at least `version` of a channel; return its states by partition.

        Returns None if a leader has not after `OPEN_WAIT_S`.

        Raises:
            Problem: 404 if the channel is deleted meanwhile.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + OPEN_WAIT_S
        found: dict[int, list[ChannelState]] = {}
        while True:
            record = self._channels.topic(topic)
            now = (record.channels or {}).get(channel)
            if self._services.view.version > known.version and (now is None or now.id != known.id):
                raise no_such_channel(topic, channel)
            missing = [number for number in record.numbers if number not in found]
            answers = await self._states.of(topic, missing, known.id)
            found |= {
                number: states
                for number, states in answers.items()
                if any(state.version >= version for state in states)
            }
            if all(number in found for number in record.numbers):
                return found
            if loop.time() >= deadline:
                return None
            await asyncio.sleep(OPEN_RETRY_S)

    # -- the catalog ---------------------------------------------------------------------

    async def _ask(self, request: ChannelRequest, topic: str) -> Result:
        """Send a request to the catalog's leader and return its result.

        A retry is safe: it compares and sets.

        Raises:
            Problem: the catalog refused the request, or has no leader.
        """
        try:
            answer = await self._services.ask_catalog(request)
        except TransportError as error:
            raise Problem("no_leader", f"the catalog: {error}", outcome="unknown") from error
        if answer.error:
            raise _refusal(answer)
        result = answer.result
        assert result is not None
        if result.outcome in ("invalid", "failed"):
            raise Problem("invalid", result.detail, outcome="not_applied")
        if result.outcome == "absent" and result.topic is None:
            detail = f"there is no topic {topic!r}"
            raise Problem("no_such_topic", detail, field="topic", value=topic, outcome="not_applied")
        return result


def _refusal(answer: CatalogAnswer) -> Problem:
    if answer.error == "quota" and answer.what:
        return over_limit(answer.what, answer.value, answer.limit, detail=answer.detail)
    if answer.error == "quota":
        return Problem(
            "quota",
            answer.detail,
            field="channels",
            value=answer.value,
            limit=answer.limit,
            hint="Delete a channel that is not used any more.",
        )
    if answer.error == "not_enabled":
        return Problem("not_enabled", answer.detail)
    detail = answer.detail or "the catalog has no leader at the moment"
    return Problem("no_leader", detail, outcome="unknown")


def _channel_of(result: Result, name: str) -> ChannelRecord | None:
    """Return a channel's record as it is after a command; None if the channel does not exist."""
    return None if result.topic is None else (result.topic.channels or {}).get(name)


def _no_place(field: str, value: Any, allowed: str) -> Problem:
    return Problem(
        "invalid",
        "a time is RFC 3339 with an offset, as 2026-01-31T12:00:00Z, or whole milliseconds since the epoch",
        field=field,
        value=value,
        limit=allowed,
        outcome="not_applied",
    )


def _but_until(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of settings in which `until` only says whether there is an end."""
    return settings | {"until": "until" in settings}


def _check_size(settings: dict[str, Any]) -> None:
    """Refuse settings that are larger as JSON than the catalog stores. Raises `Problem`."""
    size = len(msgspec.json.encode(settings))
    if size > MOST_SETTINGS_BYTES:
        raise Problem(
            "invalid",
            "the settings, as JSON, have too many bytes",
            field="settings",
            value=size,
            limit=MOST_SETTINGS_BYTES,
            outcome="not_applied",
        )


def _check_sense(settings: ChannelSettings) -> None:
    """Refuse settings that contradict each other.

    Raises:
        Problem: 422 `invalid`.
    """
    start, until = settings.start, settings.until
    if settings.on_dead == "park" and settings.order != "key":
        raise _no_sense("on_dead", "park", "order=key", "without order by key no record has a key to park")
    if settings.retry_max_ms < settings.retry_ms:
        detail = "the longest pause is shorter than the first one; give both"
        raise _no_sense("retry_max_ms", settings.retry_max_ms, settings.retry_ms, detail)
    if until is not None and (start == "latest" or (isinstance(start, int) and until < start)):
        raise _no_sense(
            "until", until, start, "the channel ends before it begins, and would give out nothing"
        )


def _no_sense(name: str, value: object, limit: object, detail: str) -> Problem:
    return Problem(
        "invalid", detail, field=f"settings.{name}", value=value, limit=limit, outcome="not_applied"
    )


def _check_fixed(known: ChannelRecord, settings: ChannelSettings) -> None:
    """Refuse a change of a setting that is fixed when the channel is created.

    Raises:
        Problem: 422 `invalid`.
    """
    for name, is_, asked in zip(FIXED, settings_of(known.settings).fixed(), settings.fixed(), strict=True):
        if asked != is_:
            raise Problem(
                "invalid",
                f"{name} cannot be changed after the channel is created: create another channel",
                field=f"settings.{name}",
                value=msgspec.to_builtins(asked),
                limit=msgspec.to_builtins(is_),
                outcome="not_applied",
            )


def _already_exists(topic: str, channel: str, wanted: dict[str, Any], known: ChannelRecord) -> Problem:
    """Return 409 `already_exists`, which lists how the existing channel's settings differ."""
    different = [
        (name, wanted.get(name, "default"), known.settings.get(name, "default"))
        for name in sorted(known.settings.keys() | wanted.keys())
        if wanted.get(name) != known.settings.get(name)
    ]
    texts = [f"{name} is {is_}, not {asked}" for name, asked, is_ in different]
    name, asked, is_ = different[0]
    return Problem(
        "already_exists",
        f"channel {channel!r} of topic {topic!r} exists with other settings: {'; '.join(texts)}",
        field=f"settings.{name}",
        value=asked,
        limit=is_,
        outcome="not_applied",
    )
