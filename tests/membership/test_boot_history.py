"""The lives of a folder: what a copy that was put back cannot show, and what no honest node fails to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from membership.boot_history import KEPT, BootRecord, advance, begin, contradicts, newer

# What happens to a node, one after another.
STEPS = st.lists(st.sampled_from(["start", "page", "heard", "confirmed"]), max_size=40)


class Folder:
    """A node's chain, with every life and page that the catalog was told and may still repeat."""

    def __init__(self) -> None:
        self.nonces = 0
        self.boot_history: tuple[BootRecord, ...] = ()
        self.said: list[BootRecord] = []
        self.start()

    def start(self) -> None:
        self.nonces += 1
        self.boot_history = begin(self.boot_history, b"%d" % self.nonces)

    def step(self, what: str) -> None:
        if what == "start":
            self.start()
        elif what == "page":
            self.boot_history = advance(self.boot_history)
        else:
            self.said.append(self.boot_history[-1])
            if what == "confirmed":
                self.boot_history = self.boot_history[-1:]


@given(STEPS)
def test_a_node_that_only_went_on_is_never_taken_for_an_older_copy(steps: list[str]) -> None:
    """Whatever the catalog, or a node with an old copy of it, has heard of the folder."""
    folder = Folder()
    for step in steps:
        folder.step(step)
        for known in folder.said:
            assert not contradicts(folder.boot_history, known)
    assert not contradicts(folder.boot_history, None)


@given(STEPS, STEPS, STEPS)
def test_a_copy_older_than_what_was_told_last_is_always_seen(
    before: list[str], between: list[str], after: list[str]
) -> None:
    """However often the copy is started, and however many pages it turns: it never passes what was told."""
    folder = Folder()
    for step in before:
        folder.step(step)
    copy = folder.boot_history
    folder.step("page")
    for step in between:
        folder.step(step)
    folder.step("heard")
    known = folder.said[-1]

    folder.boot_history = copy
    folder.start()
    assert contradicts(folder.boot_history, known)
    for step in after:
        if step in ("start", "page"):
            folder.step(step)
            assert contradicts(folder.boot_history, known)


def test_who_shows_no_past_is_refused_where_one_is_known() -> None:
    """As a copy from before there were lives does."""
    assert contradicts((), BootRecord(1, b"a"))


def test_lives_that_reach_nobody_are_bounded() -> None:
    """And the last of them is still the same life for those who heard of it after all."""
    lives: tuple[BootRecord, ...] = ()
    for number in range(2 * KEPT):
        lives = begin(lives, b"%d" % number)

    assert len(lives) == KEPT
    assert not contradicts(lives, lives[-1])


def test_the_later_of_two_lives_is_the_known_one() -> None:
    """By number, then by page."""
    first, paged, second = BootRecord(1, b"a"), BootRecord(1, b"a", 3), BootRecord(2, b"b")

    assert newer(None, first) == newer(first, None) == first
    assert newer(first, paged) == paged
    assert newer(second, paged) == second
