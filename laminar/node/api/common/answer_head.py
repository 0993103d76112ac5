"""The headers of each answer of a partition's leader: node, shard, the topic's route, term, committed offset.

Constant headers are encoded once for each topic of a view, because every append is answered with them.
"""

from __future__ import annotations

from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Window
from laminar.node.runtime.cluster_view import ViewMessage

_SYNCED = '"synced":true,"flush":"commit"'
_WRITTEN = '"synced":false,"flush":"interval"'


class AnswerHead:
    """Encodes the headers Content-Type and Laminar-Node, -Shard, -Route, -Term and -Committed."""

    def __init__(self, services: ShardServices, topics: TopicLookup) -> None:
        self._topics = topics
        self._view = services.view
        self._place = (
            f"Content-Type: application/json\r\nLaminar-Node: {services.node}\r\n"
            f"Laminar-Shard: {services.number}\r\n"
        ).encode()
        # By topic the headers that are constant as long as the view has this message.
        self._blocks: dict[str, bytes] = {}
        self._blocks_of: ViewMessage | None = None

    def block(self, topic: str, window: Window) -> bytes:
        """Return the encoded headers of an answer about a partition of this topic.

        Laminar-Committed is the end of the records that are committed and on `min_replicas` voters.
        """
        if self._view.message is not self._blocks_of:
            self._blocks_of, self._blocks = self._view.message, {}
        block = self._blocks.get(topic)
        if block is None:
            version = self._topics.version(topic)
            block = self._blocks[topic] = b"%sLaminar-Route: %d\r\n" % (self._place, version)
        return b"%sLaminar-Term: %d\r\nLaminar-Committed: %d\r\n" % (block, window.term, window.end)


def durability(partition: Partition) -> str:
    """Return the JSON members of a receipt that tell whether records are synced, and the flush policy."""
    return _WRITTEN if partition.log.policy.interval_ms else _SYNCED
