"""ReadIndex: linearizable reads without leases (thesis 6.4).

A leader may answer a read only if a majority confirms, *after the request came*, that they know no later
term. Rounds of heartbeats are numbered; one round confirms all reads that waited when it began. This queue
only does the bookkeeping; rounds are begun and counted in `raft.leadership`.
"""

from __future__ import annotations

from collections import deque


class ReadQueue:
    """Reads that wait for a round to begin, and reads that wait for their round to be confirmed."""

    __slots__ = ("_asked", "waiting")

    def __init__(self) -> None:
        self.waiting: list[int] = []
        # (round, commit index when it began, contexts), in the order of rounds.
        self._asked: deque[tuple[int, int, list[int]]] = deque()

    @property
    def in_flight(self) -> bool:
        """Whether a read waits for a round that has begun."""
        return bool(self._asked)

    def begin(self, round_: int, *, committed_index: int) -> None:
        """Assign all waiting reads to round `round_`, which begins now; their answer is `committed_index`."""
        if self.waiting:
            self._asked.append((round_, committed_index, self.waiting))
            self.waiting = []

    def confirmed(self, round_: int) -> list[tuple[int, int]]:
        """Return (context, index) of each read in the rounds up to `round_`, which are confirmed now."""
        answers: list[tuple[int, int]] = []
        while self._asked and self._asked[0][0] <= round_:
            _, index, contexts = self._asked.popleft()
            answers.extend((context, index) for context in contexts)
        return answers

    def abandon(self) -> list[int]:
        """Drop all reads, for example because leadership is lost, and return their contexts."""
        contexts = [context for _, _, asked in self._asked for context in asked] + self.waiting
        self._asked.clear()
        self.waiting = []
        return contexts
