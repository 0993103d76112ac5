"""The trace events of one shard that wait to be written, and the remembered fields of their records.

Nothing waits for the trace: events that find no room are dropped, and counted.
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
"""The most events that wait in memory. They are written each half second, so at most 8,192 a second."""
MOST_KNOWN: Final = 32_768
"""The most records whose trace id and key are remembered for later events; the oldest are forgotten."""
LONGEST_KEY: Final = 256
"""The most bytes of a record's key in an event; a longer key is left out."""


class Who(msgspec.Struct, frozen=True, array_like=True):
    """A requester: the principal, the client's address without the port, and the node that it asked."""

    principal: str = ""
    address: str = ""
    node: str = ""


class Place(NamedTuple):
    """A partition: its topic and number, and the id of its group."""

    topic: str
    partition: int
    group: bytes


class Known(NamedTuple):
    """The remembered fields of a record: trace id, key, and the flag and span id of its `traceparent`."""

    trace_id: bytes | None
    key: bytes | None
    is_sampled: bool
    parent_id: bytes | None = None


class Event(NamedTuple):
    """An event of a record. A delayed record has no `offset` before it is published, but a `number`.

    With `if_sampled` the event is written only if the record turns out to have the flag "sampled".
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
    """The waiting events of all partitions of a shard."""

    def __init__(self, *, most: int = MOST_WAITING) -> None:
        """Begin empty, with room for `most` events."""
        self._most = most
        self._events: deque[Event] = deque()
        # How many of them, from the oldest on, were there at the last `take`, with a flag that was unknown.
        self._waited = 0
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
        """The number of events for which there is room now."""
        return self._most - len(self._events)

    def put(self, event: Event) -> None:
        """Store an event until it is written; drop it if there is no room."""
        if len(self._events) >= self._most:
            self.miss(1)
            return
        self._events.append(event)
        if not event.if_sampled:
            self.made += 1

    def miss(self, count: int) -> None:
        """Count events that are not created because there is no room for them."""
        self.made += count
        self.dropped += count

    def take(self) -> list[tuple[Event, Known | None]]:
        """Remove and return all waiting events, oldest first, with the remembered fields of their records.

        An event that depends on a flag which is not known yet waits for the next call, and is dropped if it
        is not known then: a delivery is committed a moment before the leader reads the record.
        """
        events, self._events = self._events, deque()
        found = []
        for number, event in enumerate(events):
            known = self._known.get((event.place.group, place_of(event.offset, event.number)))
            if event.if_sampled:
                if known is None and number >= self._waited:
                    self._events.append(event)
                    continue
                if known is None or not known.is_sampled:
                    continue  # the record is not sampled, so the event is not wanted
                self.made += 1
            found.append((event, known))
        self._waited = len(self._events)
        return found

    def know(self, group: bytes, place: int, known: Known) -> None:
        """Remember the fields of a record for its later events."""
        self._known[group, place] = known
        if len(self._known) > MOST_KNOWN:
            for oldest in list(islice(self._known, MOST_KNOWN // 8)):
                del self._known[oldest]

    def known(self, group: bytes, place: int) -> Known | None:
        """Return the trace id, key and flag of the record at `place` of a group; None if not remembered."""
        return self._known.get((group, place))

    def failed(self, error: Exception, lost: int = 0) -> None:
        """Count events that could not be created because of a bug. Only these events are missing."""
        self.miss(max(lost, 1))
        if not self._has_failed:
            self._has_failed = True
            _log.error("events of the trace could not be created; this is logged only once", exc_info=error)

    def statistics(self) -> dict[str, int]:
        """Return the counters, and the number of waiting events."""
        return {
            "events": self.made,
            "written": self.written,
            "dropped": self.dropped,
            "waiting": len(self._events),
        }


def place_of(offset: int | None, number: int | None) -> int:
    """Return the integer by which a record is remembered: its offset, or the complement of its number."""
    return offset if offset is not None else ~(number or 0)


def shortened(keys: Iterable[bytes | None]) -> list[bytes | None]:
    """Return the keys for events: None in place of a key that is too long."""
    return [None if key is None or len(key) > LONGEST_KEY else bytes(key) for key in keys]
