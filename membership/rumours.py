"""Which members' news still have to be told, and how often they were.

SWIM's dissemination: news ride on packets that are sent anyway, each at most about log N times from one
member, the least told first; that reaches everybody with high probability and then falls silent. It doesn't
know what the news are: the newest about a member replaces what was queued about it.
"""

from __future__ import annotations

from collections.abc import Iterator


class Rumours:
    """Names of members with news, each with the number of times it was told."""

    def __init__(self, *, factor: int) -> None:
        assert factor > 0, factor
        self._factor = factor
        self._told: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._told)

    def add(self, name: str) -> None:
        """Queue news about the member, as fresh."""
        self._told.pop(name, None)
        self._told[name] = 0

    def discard(self, name: str) -> None:
        """Forget the member's news."""
        self._told.pop(name, None)

    def limit(self, members: int) -> int:
        """Return how often one member tells one piece of news to a cluster of this size."""
        return self._factor * max(1, members.bit_length())

    def least_told(self) -> Iterator[str]:
        """Go through the names, the least told first and among equals the newest first."""
        names = list(reversed(self._told))
        names.sort(key=self._told.__getitem__)
        return iter(names)

    def told(self, name: str, *, members: int) -> None:
        """Count one telling; after the last one the news is old."""
        told = self._told[name] + 1
        if told >= self.limit(members):
            del self._told[name]
        else:
            self._told[name] = told
