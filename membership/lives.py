"""The lives of a node's data folder: how a cluster sees that an older copy of it was put back.

Each start of a node adds a *life* to its folder, durably and before anything else: the next number, and a
nonce drawn at random. While it runs it turns a *page* of that life now and then. The catalog keeps the newest
life and page of each node, and a node shows all of its lives that the catalog may not know yet, with the last
one that it surely knows. Two histories that were one up to a backup differ behind it: in the number, in a
nonce, or in the page at which the life ended.

A node that is started many times and reaches nobody has a longer chain, and no other one: a higher number is
never a fault. What can't be seen: a copy that is younger than the last page that was told; copies of *all*
folders of a cluster; and, by a node that was cut off, what happened since. This module compares; who is told
what, and what follows, is `catalog_rules` and the node's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

KEPT = 64
"""Of so many lives nobody has heard: further starts add none, as they have told nobody anything either."""


class Life(msgspec.Struct, frozen=True, array_like=True):
    """One start of a node, and the page that it was at."""

    number: int
    nonce: bytes
    page: int = 0


def begin(lives: Sequence[Life], nonce: bytes) -> tuple[Life, ...]:
    """The chain with one more life."""
    if len(lives) >= KEPT:
        return tuple(lives)
    return (*lives, Life(lives[-1].number + 1 if lives else 1, nonce))


def turn(lives: Sequence[Life]) -> tuple[Life, ...]:
    """The chain with the next page of its last life."""
    return (*lives[:-1], msgspec.structs.replace(lives[-1], page=lives[-1].page + 1))


def contradicts(lives: Sequence[Life], known: Life | None) -> bool:
    """Whether a folder that shows `lives` is not what became of the one that was at `known`.

    The page of its last life says nothing: what a node said a moment ago may come late.
    """
    if known is None:
        return False
    for life in lives:
        if life.number == known.number:
            ended = life is not lives[-1]
            return life.nonce != known.nonce or (ended and life.page < known.page)
    return not lives or known.number > lives[-1].number


def newer(one: Life | None, other: Life | None) -> Life | None:
    """The later of two that the catalog has said of one node."""
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda life: (life.number, life.page))
