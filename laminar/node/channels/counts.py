"""Counters of each channel for metrics: records acknowledged, late, dead, given out again.

A channel has one set of counters for all its partitions that this process leads or has led. They are updated
once a turn of the loop, and dropped with the channel, so there are no more than channels: 10,000 in a
cluster.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

OVERDUE_MS: Final = 1_000
"""A record that is given out again later than this after its time is counted as overdue."""


@dataclass(slots=True)
class ChannelCount:
    """The counters of one channel.

    `late` counts acknowledgements and other steps of consumers that came after their delivery was over.
    `overdue` counts records that waited for a time and were given out more than `OVERDUE_MS` after it.
    """

    topic: str
    name: str
    acknowledged: int = 0
    redelivered: int = 0
    late: int = 0
    died: int = 0
    overdue: int = 0

    def row(self) -> tuple[str, str, int, int, int, int, int]:
        """Return topic, name and counters, in the order of the fields."""
        return (
            *(self.topic, self.name, self.acknowledged, self.redelivered),
            *(self.late, self.died, self.overdue),
        )


class ChannelCounts:
    """The counters of all channels of a process, by channel id.

    A later channel of the same name has another id.
    """

    def __init__(self) -> None:
        """Begin without counters."""
        self._by_id: dict[int, ChannelCount] = {}

    def of(self, topic: str, channel: int, name: str) -> ChannelCount:
        """Return the counters of a channel, which are created if needed."""
        found = self._by_id.get(channel)
        if found is None:
            found = self._by_id[channel] = ChannelCount(topic, name)
        return found

    def keep(self, channels: Collection[int]) -> None:
        """Drop the counters of all channels but these, by id."""
        self._by_id = {number: each for number, each in self._by_id.items() if number in channels}

    def rows(self) -> list[tuple[str, str, int, int, int, int, int]]:
        """Return a row (`ChannelCount.row`) for each channel."""
        return [each.row() for each in self._by_id.values()]
