"""The headers of each answer of a partition's leader: where it is, the topic's route, what is acknowledged.

Those that stay are encoded once for each version of a route, as every append is answered with them.
"""

from __future__ import annotations

from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.partition.receipts import Window

# Versions whose headers are kept.
MOST_VERSIONS = 1024


class AnswerHead:
    """The encoded headers `Content-Type`, and `Laminar-` with Node, Shard, Route, Term and Committed."""

    def __init__(self, services: ShardServices, topics: TopicLookup) -> None:
        self._topics = topics
        self._place = (
            f"Content-Type: application/json\r\nLaminar-Node: {services.node}\r\n"
            f"Laminar-Shard: {services.number}\r\n"
        ).encode()
        self._blocks: dict[int, bytes] = {}

    def block(self, topic: str, window: Window) -> bytes:
        """Return the headers of an answer about a partition of this topic, and what is acknowledged in it.

        Acknowledged means committed and on `min_replicas` voters, as for a receipt.
        """
        version = self._topics.version(topic)
        block = self._blocks.get(version)
        if block is None:
            if len(self._blocks) >= MOST_VERSIONS:
                self._blocks.clear()
            block = self._blocks[version] = b"%sLaminar-Route: %d\r\n" % (self._place, version)
        return b"%sLaminar-Term: %d\r\nLaminar-Committed: %d\r\n" % (block, window.term, window.end)
