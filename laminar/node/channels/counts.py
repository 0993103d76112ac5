"""What became of the records of each channel, counted by the process that led their partitions.

One count for all partitions of a channel that this process leads or has led. They are raised once a turn, and
forgotten with the channel, so there are no more of them than channels: 10,000 in a cluster.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

OVERDUE_MS: Final = 1_000
"""A record that is given out again later than this after its time is counted as overdue."""


@dataclass(slots=True)
class ChannelCount:
    """The counts of one channel.

    `late` are what consumers said of records whose time was over; `overdue` are records that waited for a
    time, and were given out again more than `OVERDUE_MS` after it.
    """

    topic: str
    name: str
    acknowledged: int = 0
    redelivered: int = 0
    late: int = 0
    died: int = 0
    overdue: int = 0

    def row(self) -> tuple[str, str, int, int, int, int, int]:
        """Return topic, name and counts, in the order of the fields."""
        return (
            *(self.topic, self.name, self.acknowledged, self.redelivered),
            *(self.late, self.died, self.overdue),
        )


class ChannelCounts:
    """The counts of a process, by the channel's id, which another channel of its name does not have."""

    def __init__(self) -> None:
        """Begin without any."""
        self._by_id: dict[int, ChannelCount] = {}

    def of(self, topic: str, channel: int, name: str) -> ChannelCount:
        """Return the count of a channel, which is made if there is none."""
        found = self._by_id.get(channel)
        if found is None:
            found = self._by_id[channel] = ChannelCount(topic, name)
        return found

    def keep(self, channels: Collection[int]) -> None:
        """Forget all but these channels, by their ids."""
        self._by_id = {number: each for number, each in self._by_id.items() if number in channels}

    def rows(self) -> list[tuple[str, str, int, int, int, int, int]]:
        """Return all as `ChannelCount.row`."""
        return [each.row() for each in self._by_id.values()]
