"""The headers of each answer of a partition's leader: where it is, the topic's route, what is acknowledged.

Those that stay are encoded once for each topic of a view, as every append is answered with them.
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
    """The encoded headers `Content-Type`, and `Laminar-` with Node, Shard, Route, Term and Committed."""

    def __init__(self, services: ShardServices, topics: TopicLookup) -> None:
        self._topics = topics
        self._view = services.view
        self._place = (
            f"Content-Type: application/json\r\nLaminar-Node: {services.node}\r\n"
            f"Laminar-Shard: {services.number}\r\n"
        ).encode()
        # By topic what does not change in the view of this message.
        self._blocks: dict[str, bytes] = {}
        self._blocks_of: ViewMessage | None = None

    def block(self, topic: str, window: Window) -> bytes:
        """Return the headers of an answer about a partition of this topic, and what is acknowledged in it.

        Acknowledged means committed and on `min_replicas` voters, as for a receipt.
        """
        if self._view.message is not self._blocks_of:
            self._blocks_of, self._blocks = self._view.message, {}
        block = self._blocks.get(topic)
        if block is None:
            version = self._topics.version(topic)
            block = self._blocks[topic] = b"%sLaminar-Route: %d\r\n" % (self._place, version)
        return b"%sLaminar-Term: %d\r\nLaminar-Committed: %d\r\n" % (block, window.term, window.end)


def durability(partition: Partition) -> str:
    """Return what a receipt's JSON says of durability, beside the number of replicas."""
    return _WRITTEN if partition.log.policy.interval_ms else _SYNCED
