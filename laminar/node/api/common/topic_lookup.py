"""The catalog's records of the topics and partitions that requests name, or 404."""

from __future__ import annotations

from laminar.http.api.problems import Problem
from laminar.node.runtime.cluster_view import View
from membership.records import (
    PartitionRecord,
    TopicRecord,
)


class TopicLookup:
    """Records of topics and partitions by the names in a request, from this shard's copy of the catalog."""

    def __init__(self, view: View) -> None:
        self._view = view

    def record(self, topic: str) -> TopicRecord:
        """Return the topic's record.

        Raises:
            Problem: 404 `no_such_topic`.
        """
        record = self._view.topics().get(topic)
        if record is None:
            raise Problem("no_such_topic", f"there is no topic {topic!r}", field="topic", value=topic)
        return record

    def partition_record(self, topic: str, number: str) -> PartitionRecord:
        """Return the partition's record.

        Raises:
            Problem: 404 `no_such_topic` or `no_such_partition`.
        """
        record = self.record(topic)
        if (
            not number.isascii()
            or not number.isdigit()
            or len(number) > 9
            or int(number) >= record.partitions
        ):
            raise Problem(
                "no_such_partition",
                f"topic {topic!r} has partitions 0 to {record.partitions - 1}",
                field="partition",
                value=number,
                limit=record.partitions - 1,
            )
        found = self._view.partition(topic, int(number))
        assert found is not None, f"{topic}/{number} is in no record of a topic of {record.partitions}"
        return found
