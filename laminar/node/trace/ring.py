"""The events of one shard that wait to be written, and what is remembered of the records they are about.

Nothing waits for the trace: what finds no room is dropped, and counted.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Final, NamedTuple

import msgspec

_log = logging.getLogger("laminar.trace")

MOST_WAITING: Final = 4_096
"""Events that wait in memory. They are written each half second, so at most 8,192 a second are."""
MOST_KNOWN: Final = 32_768
"""Records whose trace id and key are remembered for their later events; the oldest are forgotten."""
LONGEST_KEY: Final = 256
"""Most bytes of a record's key that events have; a longer one is left out."""


class Who(msgspec.Struct, frozen=True, array_like=True):
    """Who asked for something: the principal, its address without the port, and the node that was asked."""

    principal: str = ""
    address: str = ""
    node: str = ""


class Place(NamedTuple):
    """A partition: its topic and number, and the id of its group."""

    topic: str
    partition: int
    group: bytes


class Known(NamedTuple):
    """What is remembered of a record: trace id, key; of its `traceparent` if it is sampled, and the span."""

    trace_id: bytes | None
    key: bytes | None
    is_sampled: bool
    parent_id: bytes | None = None


class Event(NamedTuple):
    """What happened to a record. `offset` is None before a delayed record is published; `number` is its own.

    `if_sampled`: it counts only if the record turns out to be sampled.
    """

    name: str
    at_ms: int
    place: Place
    offset: int | None
    entry: int
    who: Who | None
    channel: str | None = None
    delivery: int | None = None
    attempt: int | None = None
    due_ms: int | None = None
    reason: str = ""
    number: int | None = None
    member: str = ""
    if_sampled: bool = False


class TraceRing:
    """The events that wait, of all partitions of a shard."""

    def __init__(self, *, most: int = MOST_WAITING) -> None:
        """Begin empty, with room for `most` events."""
        self._most = most
        self._events: deque[Event] = deque()
        # By group and offset, or group and the complement of a delayed record's number.
        self._known: dict[tuple[bytes, int], Known] = {}
        self._has_failed = False
        self.made = 0
        self.written = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._events)

    @property
    def room(self) -> int:
        """How many events find room now."""
        return self._most - len(self._events)

    def put(self, event: Event) -> None:
        """Keep an event until it is written; drop it if there is no room."""
        if len(self._events) >= self._most:
            self.miss(1)
            return
        self._events.append(event)
        if not event.if_sampled:
            self.made += 1

    def miss(self, count: int) -> None:
        """Count events that are not made, as there is no room for them."""
        self.made += count
        self.dropped += count

    def take(self) -> list[tuple[Event, Known | None]]:
        """Return all that waits, oldest first, with what is known of the records; nothing waits then."""
        events, self._events = self._events, deque()
        found = []
        for event in events:
            known = self._known.get((event.place.group, place_of(event.offset, event.number)))
            if event.if_sampled:
                if known is None or not known.is_sampled:
                    continue  # it is none of those that are asked for
                self.made += 1
            found.append((event, known))
        return found

    def know(self, group: bytes, place: int, known: Known) -> None:
        """Remember a record for its later events."""
        self._known[group, place] = known
        if len(self._known) > MOST_KNOWN:
            for oldest in list(islice(self._known, MOST_KNOWN // 8)):
                del self._known[oldest]

    def known(self, group: bytes, place: int) -> Known | None:
        """Return what is remembered of a record."""
        return self._known.get((group, place))

    def failed(self, error: Exception, lost: int = 0) -> None:
        """Note that events could not be made because of a bug: they are missing, and nothing else is."""
        self.miss(max(lost, 1))
        if not self._has_failed:
            self._has_failed = True
            _log.error("events of the trace could not be made; this is said once", exc_info=error)

    def statistics(self) -> dict[str, int]:
        """Return counters, and how many events wait."""
        return {
            "events": self.made,
            "written": self.written,
            "dropped": self.dropped,
            "waiting": len(self._events),
        }


def place_of(offset: int | None, number: int | None) -> int:
    """Return the integer by which a record is known: its offset, or below 0 a delayed record's number."""
    return offset if offset is not None else ~(number or 0)


def shortened(keys: Iterable[bytes | None]) -> list[bytes | None]:
    """Return keys as events have them: those that are too long are left out."""
    return [None if key is None or len(key) > LONGEST_KEY else bytes(key) for key in keys]
