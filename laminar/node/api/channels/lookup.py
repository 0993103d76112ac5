"""Look up the catalog's record of a channel that a request names, or answer 404."""

from __future__ import annotations

from laminar.http.api.problems import Problem
from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from membership.records import ChannelRecord, TopicRecord


class ChannelLookup:
    """Looks up records of channels by name in this shard's view (its copy of the catalog)."""

    def __init__(self, services: ShardServices, topics: TopicLookup) -> None:
        self._services = services
        self._topics = topics

    def topic(self, topic: str) -> TopicRecord:
        """Return the catalog's record of a topic, from the view.

        Raises `Problem`: 404 `no_such_topic`, or 503 if the view has none yet.
        """
        return self._topics.record(topic)

    def known(self, topic: str, name: str) -> ChannelRecord | None:
        """Return a channel's record from the view, which may be old; None if it has none.

        Raises `Problem`.
        """
        return (self._topics.record(topic).channels or {}).get(name)

    async def record(self, topic: str, name: str) -> ChannelRecord:
        """Return a channel's record; refresh the view first if it has none.

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
    """Return the problem (404 `no_such_channel`) of a request that names an unknown channel."""
    detail = f"topic {topic!r} has no channel {name!r}"
    return Problem("no_such_channel", detail, field="channel", value=name, outcome="not_applied")
