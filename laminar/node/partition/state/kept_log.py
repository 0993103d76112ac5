"""Which channels keep the log of a partition longer than the topic's rules do, and with which record.

Retention notes it at each check (`laminar.node.partition.retention`). It is said where appends are refused
because the disk is full, in the channel's description and in its metrics: only a person can end it.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from laminar.node.partition.state.channels import Channel, Channels, Why

MOST_NAMED: Final = 3
"""Most channels that a text names."""

_TEXTS: Final = {
    "unread": "never gave out offset {}",
    "out": "has offset {} out",
    "waiting": "is to try offset {} again",
    "dead": "has offset {} as dead",
}


class Keeper(NamedTuple):
    """A channel before whose record at `offset` the log may not begin.

    The record was never given out (``unread``), it is ``out``, ``waiting`` for its next attempt, or ``dead``.
    """

    channel: int
    name: str
    what: Literal["unread", "out", "waiting", "dead"]
    offset: int


class KeptLog(NamedTuple):
    """The channels that keep the first segment of a log, which has expired.

    The next segment begins at `end_offset`; `size_bytes`: of all segments that have expired.
    """

    keepers: tuple[Keeper, ...]
    end_offset: int
    size_bytes: int

    def still(self, table: Channels) -> KeptLog | None:
        """Return it with the channels that keep the segment yet; None if none does."""
        left = tuple(each for each in self.keepers if self._keeps(table.by_id.get(each.channel), each))
        return self._replace(keepers=left) if left else None

    def _keeps(self, channel: Channel | None, keeper: Keeper) -> bool:
        if channel is None:
            return False
        if keeper.what == "unread":
            return channel.next < channel.last(self.end_offset)
        return channel.has_open(keeper.offset)

    def bytes_of(self, channel: int) -> int:
        """Return how many bytes a channel keeps, maybe with others; 0: none."""
        return self.size_bytes if any(each.channel == channel for each in self.keepers) else 0

    def __str__(self) -> str:
        """Return the channels, each with its record, for people."""
        named = [
            f"channel {each.name!r}, which {_TEXTS[each.what].format(each.offset)}"
            for each in self.keepers[:MOST_NAMED]
        ]
        more = len(self.keepers) - len(named)
        return "; ".join(named) + (f"; and {more} more" if more else "")


def open_keeper(
    table: Channels, channel: Channel, *, start_offset: int, entry: int, end_offset: int
) -> Keeper | None:
    """Return what a channel has out or aside that keeps a log from beginning after an entry; None: nothing.

    The log begins at `start_offset` now, and would begin at `end_offset`. What has a copy after the entry
    keeps nothing.
    """
    copies = table.copies
    offset = min(
        (
            offset
            for held in (channel.out, channel.aside)
            for offset in held
            if (copies[offset].entry <= entry if offset in copies else start_offset <= offset < end_offset)
        ),
        default=None,
    )
    if offset is None:
        return None
    aside = channel.aside.get(offset)
    what: Literal["out", "waiting", "dead"] = (
        "out" if aside is None else "dead" if aside.why is Why.DEAD else "waiting"
    )
    return Keeper(channel.id, channel.name, what, offset)
