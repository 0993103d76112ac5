"""SWIM's dissemination: which member updates still ride on packets, and how often each was sent.

An update rides on packets that are sent anyway, the least sent first, and at most about log N times from one
member: that reaches every member with high probability, and then ends (SWIM paper, section 4.1). What an
update says is not known here; the newest about a member takes the place of the one that was queued.
"""

from __future__ import annotations

from collections.abc import Iterator


class PiggybackQueue:
    """Names of members with an update, each with the number of times it was sent."""

    def __init__(self, *, factor: int) -> None:
        assert factor > 0, factor
        self._factor = factor
        self._sent: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, name: str) -> None:
        """Queue an update about the member, as not sent yet."""
        self._sent.pop(name, None)
        self._sent[name] = 0

    def discard(self, name: str) -> None:
        """Remove the member's update."""
        self._sent.pop(name, None)

    def limit(self, members: int) -> int:
        """Return how often one member sends an update in a cluster of this size."""
        return self._factor * max(1, members.bit_length())

    def least_sent(self) -> Iterator[str]:
        """Iterate over the names, the least sent first and among equals the newest first."""
        names = list(reversed(self._sent))
        names.sort(key=self._sent.__getitem__)
        return iter(names)

    def count_send(self, name: str, *, members: int) -> None:
        """Count one sending of the member's update; the last one removes it."""
        sent = self._sent[name] + 1
        if sent >= self.limit(members):
            del self._sent[name]
        else:
            self._sent[name] = sent
