"""Which records of a topic are traced: the meaning of the setting `trace`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from laminar.http.api.roles import SYSTEM_PREFIX

SETTING: Final = "trace"
OFF: Final = "off"
ALL: Final = "all"
SAMPLED: Final = "sampled"

_MASK: Final = (1 << 64) - 1
_SPREAD: Final = 0x9E3779B97F4A7C15  # 2**64 by the golden ratio: multiples of it are spread evenly


class Mode(NamedTuple):
    """The records that are traced: those below `limit` by the hash of their place.

    With `by_flag` only those whose `traceparent` says that they are sampled.
    """

    limit: int
    by_flag: bool = False

    def takes(self, salt: int, offset: int) -> bool:
        """Return whether the record at an offset is traced; `salt` is of its partition."""
        return ((offset + 1) * _SPREAD + salt) & _MASK < self.limit

    def rows(self, salt: int, first: int, count: int) -> Sequence[int]:
        """Return which of `count` records from an offset on are traced, by their distance from it."""
        if self.takes_all:
            return range(count)
        limit, at = self.limit, (first + 1) * _SPREAD + salt
        return [row for row in range(count) if (at + row * _SPREAD) & _MASK < limit]

    @property
    def takes_all(self) -> bool:
        """Whether the place of a record does not matter."""
        return self.limit > _MASK


def is_traced(settings: Mapping[str, object]) -> bool:
    """Return whether any record of a topic with these settings may be traced."""
    return settings.get(SETTING, OFF) != OFF


def mode_in(topic: str, settings: Mapping[str, object]) -> Mode | None:
    """Return which records of a topic are traced; None: none, as always of the system's topics."""
    return None if topic.startswith(SYSTEM_PREFIX) else mode_of(settings.get(SETTING))


def mode_of(setting: object) -> Mode | None:
    """Return what the setting says; None: nothing is traced, also if a newer program has set it."""
    if setting == ALL:
        return Mode(_MASK + 1)
    if setting == SAMPLED:
        return Mode(_MASK + 1, by_flag=True)
    try:
        share = float(setting) if isinstance(setting, str) else 0.0
    except ValueError:
        return None
    return Mode(int(share * (_MASK + 1))) if 0 < share < 1 else None
