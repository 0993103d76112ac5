"""The headers that begin each JSON answer of a leader: its node and shard, and the topic's route.

They are encoded once for each version of a route, as every append is answered with them.
"""

from __future__ import annotations

from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup

# Versions whose headers are kept.
MOST_VERSIONS = 1024


class AnswerHead:
    """The encoded headers `Content-Type`, `Laminar-Node`, `Laminar-Shard` and `Laminar-Route`."""

    def __init__(self, services: ShardServices, topics: TopicLookup) -> None:
        self._topics = topics
        self._place = (
            f"Content-Type: application/json\r\nLaminar-Node: {services.node}\r\n"
            f"Laminar-Shard: {services.number}\r\n"
        ).encode()
        self._blocks: dict[int, bytes] = {}

    def block(self, topic: str) -> bytes:
        """Return the headers of an answer about a partition of this topic."""
        version = self._topics.version(topic)
        block = self._blocks.get(version)
        if block is None:
            if len(self._blocks) >= MOST_VERSIONS:
                self._blocks.clear()
            block = self._blocks[version] = b"%sLaminar-Route: %d\r\n" % (self._place, version)
        return block
