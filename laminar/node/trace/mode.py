"""The setting `trace`: it selects the records of a topic that are traced."""

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
    """A value of the setting: the records are traced whose hash of their offset is below `limit`.

    With `by_flag` only records are traced whose header `traceparent` has the flag "sampled". `reads_flags`
    says that the flag must be read, because the topic or a channel of it depends on it.
    """

    limit: int
    by_flag: bool = False
    reads_flags: bool = False

    def takes(self, salt: int, offset: int) -> bool:
        """Return whether the record at an offset is traced; `salt` is a number of its partition."""
        return ((offset + 1) * _SPREAD + salt) & _MASK < self.limit

    def rows(self, salt: int, first: int, count: int) -> Sequence[int]:
        """Return which of `count` records from offset `first` on are traced, as distances from `first`."""
        if self.takes_all:
            return range(count)
        limit, at = self.limit, (first + 1) * _SPREAD + salt
        return [row for row in range(count) if (at + row * _SPREAD) & _MASK < limit]

    def about(self, count: int) -> int:
        """Return the expected number of traced records among `count`."""
        return count * self.limit >> 64

    @property
    def takes_all(self) -> bool:
        """Whether all records are selected, so that the hash need not be computed."""
        return self.limit > _MASK


NONE: Final = Mode(0)
"""The topic traces no records, but a channel of it does."""


def is_traced(*settings: Mapping[str, object]) -> bool:
    """Return whether records may be traced with these settings (of a topic, and maybe of a channel)."""
    return any(each.get(SETTING, OFF) != OFF for each in settings)


def mode_in(
    topic: str, settings: Mapping[str, object], channels: Iterable[Mapping[str, object]] = ()
) -> Mode | None:
    """Return the mode of a topic by its settings, which applies where a channel has no setting of its own.

    Returns None if neither the topic nor a channel traces records, and always for internal topics.
    """
    if topic.startswith(SYSTEM_PREFIX):
        return None
    modes = [mode_of(each.get(SETTING)) for each in channels]
    mode = mode_of(settings.get(SETTING)) or (NONE if any(modes) else None)
    reads_flags = any(each is not None and each.by_flag for each in (mode, *modes))
    return None if mode is None else mode._replace(reads_flags=reads_flags)


@lru_cache(maxsize=256)
def mode_of(setting: object) -> Mode | None:
    """Return the mode of a setting; None if it traces nothing, or only newer programs know its value."""
    if setting == ALL:
        return Mode(_MASK + 1)
    if setting == SAMPLED:
        return Mode(_MASK + 1, by_flag=True)
    try:
        share = float(setting) if isinstance(setting, str) else 0.0
    except ValueError:
        return None
    return Mode(int(share * (_MASK + 1))) if 0 < share < 1 else None
