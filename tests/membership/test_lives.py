"""The lives of a folder: what a copy that was put back cannot show, and what no honest node fails to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from membership.lives import KEPT, Life, begin, contradicts, newer, turn

# What happens to a node, one after another.
STEPS = st.lists(st.sampled_from(["start", "page", "heard", "confirmed"]), max_size=40)


class Folder:
    """A node's chain, with every life and page that the catalog was told and may still repeat."""

    def __init__(self) -> None:
        self.nonces = 0
        self.lives: tuple[Life, ...] = ()
        self.said: list[Life] = []
        self.start()

    def start(self) -> None:
        self.nonces += 1
        self.lives = begin(self.lives, b"%d" % self.nonces)

    def step(self, what: str) -> None:
        if what == "start":
            self.start()
        elif what == "page":
            self.lives = turn(self.lives)
        else:
            self.said.append(self.lives[-1])
            if what == "confirmed":
                self.lives = self.lives[-1:]


@given(STEPS)
def test_a_node_that_only_went_on_is_never_taken_for_an_older_copy(steps: list[str]) -> None:
    """Whatever the catalog, or a node with an old copy of it, has heard of the folder."""
    folder = Folder()
    for step in steps:
        folder.step(step)
        for known in folder.said:
            assert not contradicts(folder.lives, known)
    assert not contradicts(folder.lives, None)


@given(STEPS, STEPS, STEPS)
def test_a_copy_older_than_what_was_told_last_is_always_seen(
    before: list[str], between: list[str], after: list[str]
) -> None:
    """However often the copy is started, and however many pages it turns: it never passes what was told."""
    folder = Folder()
    for step in before:
        folder.step(step)
    copy = folder.lives
    folder.step("page")
    for step in between:
        folder.step(step)
    folder.step("heard")
    known = folder.said[-1]

    folder.lives = copy
    folder.start()
    assert contradicts(folder.lives, known)
    for step in after:
        if step in ("start", "page"):
            folder.step(step)
            assert contradicts(folder.lives, known)


def test_who_shows_no_past_is_refused_where_one_is_known() -> None:
    """As a copy from before there were lives does."""
    assert contradicts((), Life(1, b"a"))


def test_lives_that_reach_nobody_are_bounded() -> None:
    """And the last of them is still the same life for those who heard of it after all."""
    lives: tuple[Life, ...] = ()
    for number in range(2 * KEPT):
        lives = begin(lives, b"%d" % number)

    assert len(lives) == KEPT
    assert not contradicts(lives, lives[-1])


def test_the_later_of_two_lives_is_the_known_one() -> None:
    """By number, then by page."""
    first, paged, second = Life(1, b"a"), Life(1, b"a", 3), Life(2, b"b")

    assert newer(None, first) == newer(first, None) == first
    assert newer(first, paged) == paged
    assert newer(second, paged) == second
