"""StallDetector: who stands still too long, by the clock that the test holds."""

from __future__ import annotations

from laminar.http.protocol.timeouts import StallDetector


def test_a_body_below_the_floor_is_too_slow_in_any_window() -> None:
    """A quick beginning buys no later pause."""
    stalls = StallDetector(100.0)

    def slow(now_s: float, received: int) -> bool:
        return stalls.over_body(now_s, received=received, window_s=10, floor_bytes_per_s=100)

    assert not slow(109, 0)
    assert not slow(111, 5000)
    assert not slow(120, 5000)
    assert slow(122, 5500)


def test_no_byte_prolongs_a_head() -> None:
    """Its window starts with the first sweep that sees it, and is forgotten with the head."""
    stalls = StallDetector(0.0)

    assert not stalls.over_head(50, limit_s=10)
    assert not stalls.over_head(60, limit_s=10)
    assert stalls.over_head(61, limit_s=10)
    assert not stalls.over_idle(62, received=0, limit_s=1)
    assert not stalls.over_head(63, limit_s=10)


def test_idle_is_who_sends_nothing() -> None:
    """Every byte starts the window anew."""
    stalls = StallDetector(0.0)

    assert not stalls.over_idle(60, received=1, limit_s=60)
    assert not stalls.over_idle(120, received=1, limit_s=60)
    assert stalls.over_idle(121, received=1, limit_s=60)


def test_a_reader_is_judged_by_what_it_takes_while_something_waits() -> None:
    """The window starts when something waits, and ends when nothing does."""
    stalls = StallDetector(0.0)

    def slow(now_s: float, drained: int) -> bool:
        return stalls.over_writing(now_s, drained=drained, window_s=30, floor_bytes_per_s=100)

    assert not slow(1000, 0)
    assert not slow(1031, 10_000)
    assert slow(1062, 10_001)
    stalls.written()
    assert not slow(2000, 10_001)
    assert not slow(2030, 10_001)
    assert slow(2031, 10_001)
