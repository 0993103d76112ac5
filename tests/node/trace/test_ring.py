"""Which waiting events are written, and when."""

from __future__ import annotations

from laminar.node.trace.ring import Event, Known, Place, TraceRing

PLACE = Place("t", 0, b"g" * 16)


def delivered(offset: int) -> Event:
    return Event("delivered", 0, PLACE, offset, 1, None, "c", if_sampled=True)


def taken(ring: TraceRing) -> list[int | None]:
    return [event.offset for event, _ in ring.take()]


def learn(ring: TraceRing, offset: int, *, is_sampled: bool) -> None:
    ring.know(PLACE.group, offset, Known(None, None, is_sampled))


def test_an_event_of_a_record_whose_flag_is_learned_later_waits_once() -> None:
    """A delivery is committed before its record is read; events may be taken in between."""
    ring = TraceRing()
    for offset in range(3):
        ring.put(delivered(offset))

    assert [] == taken(ring), "no flag is known yet"
    learn(ring, 0, is_sampled=True)
    learn(ring, 1, is_sampled=False)
    ring.put(delivered(3))
    assert [0] == taken(ring), "1 has not the flag, that of 2 stayed unknown"
    learn(ring, 2, is_sampled=True)
    learn(ring, 3, is_sampled=True)
    assert [3] == taken(ring), "2 waited long enough"
    assert (0, 2) == (len(ring), ring.made)
