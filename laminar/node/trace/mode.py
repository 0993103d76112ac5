"""Which records of a topic are traced: the meaning of the setting `trace`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
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

    With `by_flag` only those whose `traceparent` says that they are sampled. `reads_flags`: that is looked
    for, as it matters to the topic or to a channel of it.
    """

    limit: int
    by_flag: bool = False
    reads_flags: bool = False

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


NONE: Final = Mode(0)
"""No records, but those that a channel names."""


def is_traced(*settings: Mapping[str, object]) -> bool:
    """Return whether any record may be traced, of a topic, or a channel of it, with these settings."""
    return any(each.get(SETTING, OFF) != OFF for each in settings)


def mode_in(
    topic: str, settings: Mapping[str, object], channels: Iterable[Mapping[str, object]] = ()
) -> Mode | None:
    """Return which records of a topic are traced by its settings, where its channels do not say otherwise.

    None: neither the topic nor a channel traces any, as always of the system's topics.
    """
    if topic.startswith(SYSTEM_PREFIX):
        return None
    modes = [mode_of(each.get(SETTING)) for each in channels]
    mode = mode_of(settings.get(SETTING)) or (NONE if any(modes) else None)
    reads_flags = any(each is not None and each.by_flag for each in (mode, *modes))
    return None if mode is None else mode._replace(reads_flags=reads_flags)


@lru_cache(maxsize=256)
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
