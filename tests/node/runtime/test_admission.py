"""Whose word on consensus a process hears (docs/consensus.md#a-folder-that-goes-back)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from laminar.node.runtime.process import Process, encode_chain
from laminar.node.transport.connections import Peer
from membership.lives import Life


class Listener(Process):
    """What `admits` needs of a process; `told` is what it has heard of the catalog."""

    def __init__(self) -> None:
        self.boot = SimpleNamespace(node="a")  # type: ignore[assignment]
        self.told: Life | None = None
        self._greeted = {}
        self._verdicts = {}

    def knows(self, node: str) -> bool:
        return True

    def known_life(self, node: str) -> Life | None:
        return self.told


FIRST, SECOND, OTHER = Life(1, b"1"), Life(2, b"2"), Life(2, b"x")


def greets(*lives: Life, role: int = 1) -> Peer:
    return Peer("b", role, b"nonce%d" % role, encode_chain(lives))


def test_a_copy_older_than_a_life_that_greeted_is_not_heard() -> None:
    """The catalog has not heard of the second start yet; but this process has, and may have promised it
    something.
    """
    listener = Listener()
    listener.told = FIRST
    assert listener.admits(greets(FIRST))
    assert listener.admits(greets(FIRST, SECOND))

    assert not listener.admits(greets(FIRST, OTHER))
    assert not listener.admits(greets(FIRST))
    assert listener.admits(greets(FIRST, SECOND, role=2))
    assert listener.admits(greets(FIRST, SECOND, Life(3, b"3")))


@pytest.mark.parametrize("told", [SECOND, OTHER])
def test_one_that_is_not_heard_leaves_nothing(told: Life) -> None:
    """Else a copy that was refused once would bar the folder that it was a copy of."""
    listener = Listener()
    listener.told = told
    assert not listener.admits(greets(FIRST))
    assert not listener.admits(greets(FIRST, Life(2, b"no"), Life(3, b"3")))

    assert listener.admits(greets(FIRST, told))
