"""The catalog's record of a channel that a request names, or 404."""

from __future__ import annotations

from laminar.http.api.problems import Problem
from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from membership.records import ChannelRecord, TopicRecord


class ChannelLookup:
    """Records of channels by name, from this shard's copy of the catalog."""

    def __init__(self, services: ShardServices, topics: TopicLookup) -> None:
        self._services = services
        self._topics = topics

    def topic(self, topic: str) -> TopicRecord:
        """Return the topic's record. Raises `Problem` as `TopicLookup.record` does."""
        return self._topics.record(topic)

    def known(self, topic: str, name: str) -> ChannelRecord | None:
        """Return a channel's record in the view, which may be old; None if it has none. Raises `Problem`."""
        return (self._topics.record(topic).channels or {}).get(name)

    async def record(self, topic: str, name: str) -> ChannelRecord:
        """Return a channel's record, from a newer view if this one has none.

        Raises:
            Problem: 404 `no_such_topic` or `no_such_channel`; 503 if the catalog does not confirm that.
        """
        found = self.known(topic, name)
        if found is None:
            await self._services.refresh_view()
            found = self.known(topic, name)
        if found is None:
            raise no_such_channel(topic, name)
        return found


def no_such_channel(topic: str, name: str) -> Problem:
    """Return 404 `no_such_channel`."""
    detail = f"topic {topic!r} has no channel {name!r}"
    return Problem("no_such_channel", detail, field="channel", value=name, outcome="not_applied")
