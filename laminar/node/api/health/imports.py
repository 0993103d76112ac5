"""Remember when each running import of a topic last made a request to this shard.

A topic stays closed until its import is done. If the import was abandoned, the topic is never opened, and
only its silence shows that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from laminar.node.api.health.problems import Found
from laminar.node.runtime.cluster_view import View
from membership.records import TopicRecord

QUIET_MS: Final = 60_000
"""An import that makes no request for so long counts as stopped."""
FIRST_MS: Final = 5_000
"""A topic may be this old before any request of its import is known."""

_SETTING: Final = "importing"


class SeenImports:
    """The times of the last requests of imports at this shard."""

    def __init__(self, view: View, now_ms: Callable[[], int]) -> None:
        """Begin without times; `now_ms` returns the time of the monotonic clock in ms."""
        self._view = view
        self._now_ms = now_ms
        # By topic. Only topics under import are added, and `ages_ms` removes those that are open.
        self._last_ms: dict[str, int] = {}

    def note(self, topic: str, import_id: str) -> None:
        """Record the time of a request that names an import, if that is the running import of this topic."""
        record = self._view.topics().get(topic)
        if record is not None and record.settings.get(_SETTING) == import_id:
            self._last_ms[topic] = self._now_ms()

    def ages_ms(self) -> dict[str, int]:
        """Return by topic the time in ms since its running import last made a request here."""
        topics, now_ms = self._view.topics(), self._now_ms()
        self._last_ms = {
            name: last_ms
            for name, last_ms in self._last_ms.items()
            if name in topics and _SETTING in topics[name].settings
        }
        return {name: now_ms - last_ms for name, last_ms in self._last_ms.items()}


def merge_ages(ages: dict[str, int], more: Mapping[str, int]) -> None:
    """Merge `more` into `ages` (both by topic); the lower age of a topic counts."""
    for topic, age_ms in more.items():
        ages[topic] = min(age_ms, ages.get(topic, age_ms))


def stopped_import(record: TopicRecord, age_ms: int | None, *, now_ms: int) -> Iterator[Found]:
    """Yield the problem of a topic whose import seems to have stopped.

    `age_ms` is the time since the import last made a request to any node; None if no node knows of one.
    """
    if _SETTING not in record.settings:
        return
    if age_ms is None:
        if now_ms - record.created_ms < FIRST_MS:
            return
        said = "no node that answers knows of a request of its import"
    elif age_ms < QUIET_MS:
        return
    else:
        said = f"its import has asked for nothing for {age_ms // 1000:,} s"
    yield Found("import_stopped", record.name, f"topic {record.name} is closed: {said}", record.name)
