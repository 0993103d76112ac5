"""The channels because of which a partition's log is kept longer than the topic's retention says.

Retention notes them at each check (`laminar.node.partition.retention`). They are shown in the refusals of
appends on a full disk, in the channel's description and in its metrics, because only an operator can help.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from laminar.node.partition.state.channels import Channel, Channels, Why

MOST_NAMED: Final = 3
"""Most channels that the text of a `KeptLog` names."""

_TEXTS: Final = {
    "unread": "never gave out offset {}",
    "out": "has offset {} out",
    "waiting": "is to try offset {} again",
    "dead": "has offset {} as dead",
}


class Keeper(NamedTuple):
    """A channel that still needs the record at `offset`, so that the log must not be trimmed beyond it.

    `what` is the record's state: never given out (``unread``), given out and not acknowledged yet (``out``),
    ``waiting`` for its next attempt, or ``dead``.
    """

    channel: int
    name: str
    what: Literal["unread", "out", "waiting", "dead"]
    offset: int


class KeptLog(NamedTuple):
    """The channels that keep the first segment of a log from being trimmed although it has expired.

    `end_offset` is the offset at which the next segment begins, `size_bytes` the size of all expired ones.
    """

    keepers: tuple[Keeper, ...]
    end_offset: int
    size_bytes: int

    def still(self, table: Channels) -> KeptLog | None:
        """Return this value with only the channels that still keep the segment; None if none does."""
        left = tuple(each for each in self.keepers if self._keeps(table.by_id.get(each.channel), each))
        return self._replace(keepers=left) if left else None

    def _keeps(self, channel: Channel | None, keeper: Keeper) -> bool:
        if channel is None:
            return False
        if keeper.what == "unread":
            return channel.next < channel.last(self.end_offset)
        return channel.has_open(keeper.offset)

    def bytes_of(self, channel: int) -> int:
        """Return how many bytes of log a channel keeps, alone or together with others; 0 if none."""
        return self.size_bytes if any(each.channel == channel for each in self.keepers) else 0

    def __str__(self) -> str:
        """Return a text for people that names the channels, each with its record."""
        named = [
            f"channel {each.name!r}, which {_TEXTS[each.what].format(each.offset)}"
            for each in self.keepers[:MOST_NAMED]
        ]
        more = len(self.keepers) - len(named)
        return "; ".join(named) + (f"; and {more} more" if more else "")


def open_keeper(
    table: Channels, channel: Channel, *, start_offset: int, entry: int, end_offset: int
) -> Keeper | None:
    """Return the first record of a channel, out or aside, because of which the log cannot be trimmed.

    The log begins at `start_offset` now; after a trim up to entry `entry` it would begin at `end_offset`. A
    record with a copy after that entry keeps nothing. Return None if there is no such record.
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
