"""So many elections at once and no more: who campaigns when (`laminar.node.consensus.election_throttle`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from laminar.node.consensus.election_throttle import ElectionThrottle

HOLD_MS = 40


class Core:
    """What `ElectionThrottle` looks at."""

    is_electing = False
    is_expedited = False


class Candidate:
    """A replica; `end` is what a later input does: it leads, or another does."""

    def __init__(self, name: str, line: Line, *, hastened: bool = False) -> None:
        self.name = name
        self.line = line
        self.core = Core()
        self.core.is_expedited = hastened

    def end(self) -> bool:
        """Whether another may campaign now."""
        self.core.is_electing = False
        return self.line.throttle.processed(self.line.typed(self))


class Line:
    """Elections, two at once, and who campaigned so far; polled as the driver does."""

    def __init__(self) -> None:
        self.campaigned = ""
        self.now_ms = 0
        self.need_not: set[str] = set()
        self.throttle = ElectionThrottle(hold_ms=HOLD_MS, most_at_once=2)

    def typed(self, replica: Candidate) -> Any:
        return replica

    def poll(self) -> None:
        while (replica := self.throttle.next(self.now_ms)) is not None:
            candidate: Any = replica
            if candidate.name not in self.need_not:
                self.campaigned += candidate.name
                candidate.core.is_electing = True
            self.throttle.processed(replica)

    def due(self, names: Iterable[str], *, hastened: bool = False) -> list[Candidate]:
        replicas = [Candidate(name, self, hastened=hastened) for name in names]
        for replica in replicas:
            self.throttle.add(self.typed(replica))
            self.poll()
        return replicas


def test_so_many_campaign_at_once_and_the_next_when_one_is_over() -> None:
    """In the order in which it was their time."""
    line = Line()
    a, b, *_ = line.due("abcd")
    assert ("ab", 2) == (line.campaigned, len(line.throttle))

    assert b.end()
    line.poll()
    assert "abc" == line.campaigned
    assert a.end()
    line.poll()
    assert "abcd" == line.campaigned
    assert 0 == len(line.throttle)


def test_a_group_that_cannot_elect_holds_up_the_others_for_a_moment_only() -> None:
    """It lost its majority, perhaps for long; tens of thousands of others did not."""
    line = Line()
    line.due("abcdef")
    while line.campaigned != "abcdef":
        at_ms = line.throttle.next_ms()
        assert at_ms is not None
        line.now_ms = at_ms - 1
        before = line.campaigned
        line.poll()
        assert before == line.campaigned
        line.now_ms = at_ms
        line.poll()
        assert before != line.campaigned

    assert 2 * HOLD_MS == line.now_ms
    assert line.throttle.next_ms() is None


def test_one_that_tries_again_goes_behind_those_that_have_not_tried() -> None:
    """And is one of those under way once, however often it tries."""
    line = Line()
    a, _, _ = line.due("abc")
    line.throttle.add(line.typed(a))
    line.poll()
    assert "abc" == line.campaigned

    line.now_ms = HOLD_MS
    line.poll()
    assert "abca" == line.campaigned


def test_a_group_that_a_request_waits_for_goes_first() -> None:
    """Whether that is known before it is its time, or while it waits."""
    line = Line()
    a, b, _, d = line.due("abcd")
    line.due("e", hastened=True)
    line.throttle.expedite(line.typed(d))
    a.end()
    b.end()
    line.poll()
    assert "abed" == line.campaigned


def test_one_that_is_not_driven_any_more_does_not_campaign_and_holds_up_no_other() -> None:
    """Neither one that campaigns nor one that waits."""
    line = Line()
    a, _, c, d, _ = line.due("abcde")
    for gone in (d, c, a):
        line.throttle.removed(line.typed(gone))
    line.due("f")

    assert "abe" == line.campaigned


def test_one_that_need_not_campaign_any_more_takes_no_place() -> None:
    """A leader was heard while it waited."""
    line = Line()
    a, _, _, _ = line.due("abcd")
    line.need_not.add("c")
    a.end()
    line.poll()
    assert "abd" == line.campaigned
